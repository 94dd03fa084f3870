"""Requests and what they do: sessions, models, futures, samplers. HTTP is in server.py, numbers are in engine.py.

All state is that of one event loop; the engines compute in one thread beside it, a request at a time.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from verl_like.plugins.tinker_server import bodies, wire
from verl_like.plugins.tinker_server.adapters import AdapterSpec
from verl_like.plugins.tinker_server.bodies import Refused
from verl_like.plugins.tinker_server.catalogue import Catalogue
from verl_like.plugins.tinker_server.engine import Engines, Prompt, Work
from verl_like.plugins.tinker_server.fair import ONE_OF_A_MODEL, FairQueue, Job, Residents
from verl_like.plugins.tinker_server.prompts import Limits, prompt_of
from verl_like.plugins.tinker_server.store import Record, Store
from verl_like.rollout.rollout_engine import RolloutError, request_seed

log = logging.getLogger(__name__)

_WAIT_S = 25.0  # a poll of the client ends after 45
_SWEEP_S = 60.0
_AHEAD = 10_000  # by which a request's number may be beyond the one that is due
_LINGER_S = 0.002  # for what clients send when they are told, so that they share the next pass
_TRIES = 3  # starts of a computation of which a server has ended
_TOKEN_BYTES = 16  # of a row to train on: id, target and weight
_PASSES = frozenset({"forward", "forward_backward"})
_CHANGING = frozenset({"create", "load", "optim_step"})
_OF_JOB = ("tenant", "kind", "session", "model", "seq")
Change = Callable[[], str | None]  # of the store, made together with a result; a folder that is then of no use
Results = list[tuple[Job, bytes, list[Change]]]


class Service:
    """The server without HTTP. Methods raise Refused for what is not taken. thread: a pool of one, the engines' own."""

    def __init__(self, engines: Engines, store: Store, limits: Limits, thread: ThreadPoolExecutor) -> None:
        self.engines, self.store, self.limits = engines, store, limits
        self.catalogue = Catalogue(store, limits)
        self._queue, self._futures = FairQueue(), dict[str, asyncio.Event]()
        self._seen: dict[str, float] = {}  # sessions, when they were last heard of
        self._broken: dict[str, str] = {}  # models, by which request their gradient is not whole
        self._steps: dict[str, int] = {}  # optimizer steps since a model's state was written
        self._residents = Residents(limits.serve.max_models)
        self._gaps: dict[tuple[str, int], float] = {}  # models and numbers that others wait for, and since when
        self._thread = thread
        self._files: dict[str, list[asyncio.Future[None]]] = {}  # that are written, by request
        self._work, self._running = asyncio.Event(), set[str]()
        self.tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Take up what a server before this one left, and begin to compute."""
        self.store.sweep()
        for each in self.store.rows("SELECT id FROM requests WHERE status = 'waiting' AND tries >= ?", _TRIES):
            told = _error(f"the server ended {_TRIES} times while it was computed", "server")
            self._settle(each["id"], told, failed=True)
        for model in self.store.rows("SELECT id FROM models"):
            last = "SELECT coalesce(max(seq), -1) FROM requests WHERE model = ? AND status != 'waiting'"
            self._queue.next_seq[model["id"]] = self.store.value(last, model["id"]) + 1
        for each in self.store.rows("SELECT * FROM requests WHERE status = 'waiting' ORDER BY arrived"):
            self._enqueue(each)
        self.tasks = [asyncio.create_task(self._compute()), asyncio.create_task(self._look_after())]

    async def stop(self) -> None:
        """End after the request that is being computed."""
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)

    # --- sessions ----------------------------------------------------------------------------------------------------

    def create_session(self, tenant: str, body: bytes) -> Record:
        asked = bodies.read(bodies.CreateSession, body)
        name = uuid.uuid4().hex
        told = {"user_metadata": asked.user_metadata, "display_name": asked.display_name}
        self.store.add("sessions", id=name, tenant=tenant, created=time.time(), told=told)
        self._seen[name] = time.monotonic()
        return {"type": "create_session", "session_id": name}

    def heartbeat(self, tenant: str, session: str) -> Record:
        self._session(tenant, session)
        return {"type": "session_heartbeat"}

    def finish_session(self, tenant: str, session: str) -> None:
        """End a session as its client asks; a second time is no fault."""
        self.catalogue.owned("sessions", tenant, session, "session")
        self._end(session)

    def _session(self, tenant: str, session: str) -> Record:
        found = self.catalogue.owned("sessions", tenant, session, "session")
        if found["ended"] is not None:
            raise Refused(f"session {session} has ended: begin another", 410)
        self._seen[session] = time.monotonic()
        return found

    def _end(self, session: str, why: str = "") -> None:
        """End a session: what waits fails, its models leave the memory, snapshots that have no name are deleted."""
        self.store.change("UPDATE sessions SET ended = ? WHERE id = ? AND ended IS NULL", time.time(), session)
        self._seen.pop(session, None)
        for job in self._queue.remove(lambda job: job.session == session):
            self._settle(job.request, _error(f"the session has ended{why}", "user"), failed=True)
        for model in self.store.rows("SELECT id FROM models WHERE session = ?", session):
            self._residents.forget(model["id"])
            self._thread.submit(self.engines.drop, model["id"])
        for sampler in self.store.rows("SELECT folder FROM samplers WHERE session = ? AND folder IS NOT NULL", session):
            self.store.remove_folder(sampler["folder"])
        self.store.sweep()

    async def _look_after(self) -> None:
        """End sessions that have fallen silent, and drop what is too old."""
        for session in self.store.rows("SELECT id FROM sessions WHERE ended IS NULL"):
            self._seen.setdefault(session["id"], time.monotonic())  # since this server is there
        while True:
            await asyncio.sleep(min(_SWEEP_S, self.limits.serve.session_timeout / 2))
            oldest = time.monotonic() - self.limits.serve.session_timeout
            for session in [name for name, seen in self._seen.items() if seen < oldest]:
                log.info("session %s has been silent for %g s: ended", session, self.limits.serve.session_timeout)
                self._end(session)
            late = {(model, self._queue.next_seq[model]): job for model, job in self._queue.overdue()}
            self._gaps = {gap: self._gaps.get(gap, time.monotonic()) for gap in late}
            for (model, due), since in list(self._gaps.items()):
                if since < oldest:
                    self._end(late[model, due].session, f": request {due} of {model} never came")
            self.store.sweep()

    # --- models ------------------------------------------------------------------------------------------------------

    def create_model(self, tenant: str, body: bytes) -> Record:
        """Begin a model of the base. Raises Refused for an adapter that it cannot have."""
        asked = bodies.read(bodies.CreateModel, body)
        self._session(tenant, asked.session_id)
        self._base(asked.base_model)
        self._adamw(asked.optimizer_config)
        lora = asked.lora_config
        if lora is None:
            raise Refused("lora_config is missing: this server trains adapters, not the base")
        if lora.rank > self.limits.serve.max_lora_rank:
            raise Refused(f"lora_config.rank={lora.rank}: this server gives {self.limits.serve.max_lora_rank} at most")
        seed = request_seed(self.limits.seed, "adapter", asked.model_seq_id) if lora.seed is None else lora.seed
        spec = AdapterSpec(**{**lora.model_dump(), "seed": seed})
        try:
            self.engines.check(spec)
        except ValueError as error:
            raise Refused(f"lora_config: {error}") from error
        return self._first(tenant, asked, spec, "create", body)

    def create_by_load(self, tenant: str, body: bytes) -> Record:
        """Begin a model with the state of a checkpoint."""
        asked = bodies.read(bodies.CreateByLoad, body)
        self._session(tenant, asked.session_id)
        if asked.base_model is not None:
            self._base(asked.base_model)
        self._adamw(asked.optimizer_config)
        found = self.catalogue.checkpoint(tenant, asked.path)
        spec = AdapterSpec(**self.catalogue.spec(found["model"]))
        return self._first(tenant, asked, spec, "load", body)

    def _first(self, tenant: str, asked: Any, spec: AdapterSpec, kind: str, body: bytes) -> Record:
        name, now = f"{asked.session_id}:train:{asked.model_seq_id}", time.time()
        if self.store.row("SELECT id FROM models WHERE id = ?", name) is None:
            told = {"user_metadata": asked.user_metadata}
            row = {"session": asked.session_id, "spec": asdict(spec), "created": now, "used": now, "told": told}
            self.store.add("models", id=name, tenant=tenant, **row)
            self._queue.next_seq[name] = 0
        return self._submit(tenant, asked.session_id, name, 0, kind, body)

    def _base(self, name: str | None) -> None:
        if name != self.limits.model:
            raise Refused(f"base_model={name!r}: this server has {self.limits.model!r}", 404)

    def _adamw(self, optimizer: bodies.Optimizer | None) -> None:
        if optimizer is not None and optimizer.type != "adamw":
            raise Refused(f"optimizer_config.type={optimizer.type!r} is not available; choose adamw")

    def _model(self, tenant: str, name: str) -> Record:
        found = self.catalogue.owned("models", tenant, name, "model")
        self._session(tenant, found["session"])
        return found

    def info(self, tenant: str, name: str) -> Record:
        """Answer get_info."""
        spec = json.loads(self.catalogue.owned("models", tenant, name, "model")["spec"])
        named, more = {"model_name": self.limits.model}, {"is_lora": True, "lora_rank": spec["rank"]}
        data = {"arch": self.limits.arch, "tokenizer_id": self.limits.tokenizer, **named}
        return {"type": "get_info", "model_data": data, "model_id": name, **named, **more}

    def capabilities(self) -> Record:
        model = {"model_name": self.limits.model, "max_context_length": self.limits.longest}
        return {"supported_models": [{**model, "trainable": True, "sampleable": True}]}

    # --- requests in a model's order ---------------------------------------------------------------------------------

    def submit_pass(self, tenant: str, body: bytes) -> Record:
        """Take a forward_backward, or a forward alone."""
        message = wire.parsed_pass(body)
        model = self._model(tenant, message.model_id)
        if not message.seq_id >= 1:
            raise Refused(f"seq_id={message.seq_id} must be at least 1")
        kind = "forward" if message.forward_only else "forward_backward"
        return self._submit(tenant, model["session"], model["id"], message.seq_id, kind, body)

    def submit(self, tenant: str, kind: str, body: bytes) -> Record:
        """Take a JSON request in a model's order. One that is wrong has its number, and fails in its turn."""
        place = bodies.read(bodies.OfModel, body)
        model = self._model(tenant, place.model_id)
        return self._submit(tenant, model["session"], model["id"], place.seq_id, kind, body)

    def _submit(self, tenant: str, session: str, model: str, seq: int, kind: str, body: bytes) -> Record:
        if seq > (due := self._queue.next_seq[model]) + _AHEAD:
            raise Refused(f"seq_id={seq} is far beyond the one that is due, {due}")
        row = {"id": f"{model}:{seq}", "tenant": tenant, "session": session, "model": model, "seq": seq, "kind": kind}
        self._accept(row | {"cost": 1 + len(body) // _TOKEN_BYTES}, body, is_due=seq == due)
        return {"request_id": row["id"], "model_id": model}

    def _accept(self, row: Record, body: bytes, *, is_due: bool) -> None:
        """Write a request down and queue it; one that came before is the same one. is_due: others may wait for it."""
        digest, name = hashlib.blake2b(row["kind"].encode() + b"\0" + body, digest_size=16).digest(), row["id"]
        if (old := self.store.row("SELECT digest FROM requests WHERE id = ?", name)) is not None:
            if old["digest"] != digest:
                raise Refused(f"request {name} was sent before with another content: its seq_id was used twice")
            return
        count, size = self._queue.waiting(row["tenant"])
        full = count >= self.limits.serve.max_queued or (
            count and size + len(body) > self.limits.serve.max_queued_megabytes * 2**20
        )
        if full and not is_due:
            raise Refused(f"{count} requests of this key wait, {size:,} bytes: come again later", 429)
        self.store.add_request(**row, digest=digest, body=body)
        self._enqueue(row | {"body": body, "tries": 0})

    def _enqueue(self, row: Record) -> None:
        known = {name: row[name] for name in (*_OF_JOB, "cost")}
        job = Job(request=row["id"], size=len(row["body"]), alone=row["tries"] > 0, **known)
        self._futures.setdefault(job.request, asyncio.Event())
        self._queue.put(job)
        self._work.set()

    # --- futures -----------------------------------------------------------------------------------------------------

    async def retrieve(self, tenant: str, request: str) -> Record | None:
        """Wait for a request that was done or failed; None where it is neither yet."""
        found = self.catalogue.owned("requests", tenant, request, "request")
        if found["session"] in self._seen:
            self._seen[found["session"]] = time.monotonic()
        if found["status"] == "waiting":
            try:
                async with asyncio.timeout(_WAIT_S):
                    await self._futures[request].wait()
            except TimeoutError:
                return None
            found = self.catalogue.owned("requests", tenant, request, "request")
        if found["result"] is None:
            raise Refused(f"the result of {request} was given before, and is gone", 410)
        self.store.tell(request)
        return found

    def cancel(self, tenant: str, request: str) -> None:
        """End a sampling request, which waits or runs. Others are computed all the same: what follows them counts."""
        found = self.catalogue.owned("requests", tenant, request, "request")
        if found["kind"] != "sample" or found["status"] != "waiting":
            return
        if self._queue.remove(lambda job: job.request == request):
            self._settle(request, _error("it was cancelled", "user"), failed=True)
        elif request in self._running:
            self.engines.cancel(request)

    def _settle(self, request: str, result: bytes, *, failed: bool = False) -> None:
        self.store.finish(request, result, failed=failed)
        self._wake(request)

    def _wake(self, request: str) -> None:
        if (event := self._futures.pop(request, None)) is not None:
            event.set()

    # --- computing ---------------------------------------------------------------------------------------------------

    async def _compute(self) -> None:
        while True:
            if self.limits.shared:
                await asyncio.sleep(_LINGER_S)
            jobs = self._queue.pop(self.limits.shared)
            if not jobs:
                self._work.clear()
                await self._work.wait()
                continue
            self._running = {job.request for job in jobs}
            with self.store.together():
                for job in jobs:
                    self.store.change("UPDATE requests SET tries = tries + 1 WHERE id = ?", job.request)
            await self._take(jobs)
            self._running = set()

    async def _take(self, jobs: list[Job]) -> None:
        """Compute jobs: passes and samples together, or each by itself where that fails; others one by one.

        Their files are written side by side, and what came of them in one transaction.
        """
        results: Results = []
        for part in [[job] for job in jobs] if jobs[0].kind in ONE_OF_A_MODEL else [jobs]:
            try:
                results += await self._computed(part)
            except RolloutError:
                raise  # the sampling engine is dead: only another start heals that
            except Exception as error:
                await self._failed(part, error)
        whole: Results = []
        for result in results:
            try:
                await asyncio.gather(*self._files.pop(result[0].request, ()))
                whole.append(result)
            except Exception as error:
                await self._failed([result[0]], error)
        try:
            self._write(whole)
        except Exception as error:
            for job, _, _ in whole:
                await self._failed([job], error)

    async def _failed(self, jobs: list[Job], error: Exception) -> None:
        """Compute jobs one by one that failed together; fail one that was alone."""
        if len(jobs) > 1:
            log.info("%d requests are computed one by one: %s", len(jobs), error)
            for job in jobs:
                await self._take([job])
            return
        job, refused = jobs[0], isinstance(error, ValueError)
        await asyncio.gather(*self._files.pop(job.request, ()), return_exceptions=True)
        if not refused:
            log.error("request failed: %s", job.request, exc_info=error)
        if not isinstance(error, Refused):
            await self._forget(job)
        await self._fail(
            job, str(error) if refused else f"{type(error).__name__}: {error}", "user" if refused else "server"
        )

    async def _forget(self, job: Job) -> None:
        """Drop a model that a failed request may have changed: the next one builds it again from what is written."""
        if job.model is not None and job.kind in _CHANGING:
            await self._call(self.engines.drop, job.model)

    async def _fail(self, job: Job, text: str, category: str) -> None:
        """Fail a request. A step over a gradient that is not whole fails with its passes, and drops it."""
        if job.model is not None and job.kind == "forward_backward":
            self._broken.setdefault(job.model, job.request)
        elif job.model is not None and job.kind == "optim_step":
            self._broken.pop(job.model, None)
            if await self._call(self.engines.has, job.model):
                await self._call(self.engines.drop_gradient, job.model)
        self._settle(job.request, _error(text, category), failed=True)

    def _write(self, results: Results) -> None:
        """Write results down together with what they changed, all or none."""
        with self.store.together():
            gone = [folder for _, _, changes in results for change in changes if (folder := change()) is not None]
            for job, result, _ in results:
                self.store.finish(job.request, result)
                if job.model is not None:
                    self.store.change("UPDATE models SET used = ? WHERE id = ?", time.time(), job.model)
        for folder in gone:
            self.store.remove_folder(folder)
        for job, _, _ in results:
            self._wake(job.request)

    async def _computed(self, jobs: list[Job]) -> Results:
        """Compute jobs of one kind: passes and samples may be several."""
        due = {job.model: job for job in reversed(jobs) if job.model is not None}
        for name in self._residents.use({name: job.tenant for name, job in due.items()}):
            await self._call(self.engines.drop, name)
        for name, job in due.items():
            if job.seq > 0:
                await self._revive(name, job.seq)
        kind, job = jobs[0].kind, jobs[0]
        if kind == "sample":
            return await self._samples(jobs)
        if kind in _PASSES:
            return [(job, result, []) for job, result in zip(jobs, await self._passes(jobs), strict=True)]
        assert job.model is not None
        if kind == "create":
            spec = AdapterSpec(**self.catalogue.spec(job.model))
            await self._call(self.engines.create, job.model, spec)
            result = _json({"type": "create_model", "model_id": job.model}), [await self._state(job, job.model)]
        else:
            of_kind = {"optim_step": self._optim_step, "load": self._load}.get(kind, self._save)
            result = await of_kind(job, job.model)
        return [(job, *result)]

    async def _call(self, function: Callable[..., Any], *values: Any, **named: Any) -> Any:
        """Compute in the engines' thread."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, partial(function, *values, **named))

    async def _revive(self, model: str, before: int) -> None:
        """Bring a model back that is not in memory: its last state, and once more what was done since."""
        if await self._call(self.engines.has, model):
            return
        state, seq = self._value_of(model, "state"), self._value_of(model, "state_seq")
        if state is None:
            raise Refused(f"{model} was not created: its first request failed")
        try:
            await self._again(model, Path(state), seq, before)
        except BaseException:
            await self._call(self.engines.drop, model)  # half of a history is none
            raise

    async def _again(self, model: str, state: Path, seq: int, before: int) -> None:
        """Load a state, and compute what was done between two requests."""
        self._broken.pop(model, None)
        await self._call(self.engines.load, model, state, optimizer=True)
        done = "SELECT * FROM requests WHERE model = ? AND seq > ? AND seq < ? ORDER BY seq"
        for row in self.store.rows(done, model, seq, before):
            job = Job(**{name: row[name] for name in _OF_JOB}, request=row["id"])
            if row["status"] == "failed":
                if job.kind == "forward_backward":
                    self._broken.setdefault(model, job.request)
                elif job.kind == "optim_step":
                    self._broken.pop(model, None)
                    await self._call(self.engines.drop_gradient, model)
            elif job.kind == "forward_backward":
                await self._passes([job])
            elif job.kind == "optim_step":
                params = bodies.read(bodies.OptimStep, self._body(job)).adam_params
                await self._call(self.engines.optim_step, model, params.model_dump())

    def _body(self, job: Job) -> bytes:
        return self.store.value("SELECT body FROM requests WHERE id = ?", job.request)

    def _value_of(self, model: str, column: str) -> Any:
        return self.store.value(f"SELECT {column} FROM models WHERE id = ?", model)

    async def _passes(self, jobs: list[Job]) -> list[bytes]:
        """Compute passes of one kind together. A single one has random numbers that follow from its place."""
        asked, kind, limits = list[Work](), jobs[0].kind, self.limits
        for job in jobs:
            message = wire.parsed_pass(self._body(job))
            rows, loss, settings = wire.rows_of(message, limits.vocabulary, limits.longest, limits.reader)
            asked.append(Work(model=job.model or "", rows=rows, loss=loss, settings=settings))
        seed = request_seed(self.limits.seed, "pass", jobs[0].seq)
        backward = kind == "forward_backward"
        found = await self._call(self.engines.forward_backward, asked, backward=backward, seed=seed)
        return [wire.pass_output(each.rows, *told) for each, told in zip(asked, found, strict=True)]

    async def _optim_step(self, job: Job, model: str) -> tuple[bytes, list[Change]]:
        params = bodies.read(bodies.OptimStep, self._body(job)).adam_params
        if (broken := self._broken.get(model)) is not None:
            raise Refused(f"{broken}, a forward_backward since the last step, failed: no weight was changed")
        metrics = await self._call(self.engines.optim_step, model, params.model_dump())
        self._steps[model] = self._steps.get(model, 0) + 1
        due = self._steps[model] >= self.limits.serve.checkpoint_freq
        return _json({"metrics": metrics}), [await self._state(job, model)] if due else []

    async def _state(self, job: Job, model: str) -> Change:
        """Write the model's state; that it is the one to begin with is left to the transaction."""
        folder = self._folder("states", job)
        await self._save_to(folder, job, model, optimizer=True)
        self._steps[model] = 0
        return partial(self.store.keep_state, model, job.seq, folder)

    async def _save_to(self, folder: Path, job: Job, model: str, *, optimizer: bool) -> None:
        """Begin to write a model; before the request is done, that is."""
        write = await self._call(self.engines.saver, model, folder, optimizer=optimizer)
        self._files.setdefault(job.request, []).append(asyncio.ensure_future(asyncio.to_thread(write)))

    def _folder(self, kind: str, job: Job) -> Path:
        return self.store.folder / kind / (job.model or "").replace(":", "_") / str(job.seq)

    async def _load(self, job: Job, model: str) -> tuple[bytes, list[Change]]:
        """Put a checkpoint's weights, and its optimizer where that is asked for, into a model."""
        kind = bodies.Load if job.seq else bodies.CreateByLoad
        asked = bodies.read(kind, self._body(job))
        found = self.catalogue.checkpoint(job.tenant, asked.path)
        await self._call(self.engines.load, model, Path(found["folder"]), optimizer=asked.optimizer)
        self._broken.pop(model, None)  # what was added up is gone
        return _json({"type": "load_weights", "path": asked.path, "model_id": model}), [await self._state(job, model)]

    async def _save(self, job: Job, model: str) -> tuple[bytes, list[Change]]:
        """Write a checkpoint, or the snapshot of a sampling client, which has no name."""
        training = job.kind == "save_weights"
        asked = bodies.read(bodies.Save if training else bodies.SaveForSampler, self._body(job))
        path = None if asked.path is None else f"tinker://{model}/{'' if training else 'sampler_'}weights/{asked.path}"
        taken = self.store.row("SELECT path FROM checkpoints WHERE path = ?", path) is not None
        if taken and not (isinstance(asked, bodies.Save) and asked.overwrite):
            raise Refused(f"{path} is there already; choose another name, or overwrite=True for a state")
        number = asked.sampling_session_seq_id if isinstance(asked, bodies.SaveForSampler) else None
        if path is None and number is None:
            raise Refused("path or sampling_session_seq_id must be given")
        folder = self._folder("saved", job)
        answer: Record = {"type": job.kind, "path": path}
        if path is None:
            sampler = f"{job.session}:sample:{number}"
            old = self.store.row("SELECT folder FROM samplers WHERE id = ?", sampler)
            if old is not None and old["folder"] != str(folder):
                raise Refused(f"sampling_session_seq_id={number} was used before, for other weights")
            await self._save_to(folder, job, model, optimizer=False)
            row = {"id": sampler, "tenant": job.tenant, "session": job.session, "folder": str(folder)}
            change: Change = partial(self.store.add, "samplers", replace=True, **row)
            return _json({**answer, "sampling_session_id": sampler}), [change]
        now, kind = time.time(), "training" if training else "sampler"
        await self._save_to(folder, job, model, optimizer=training)
        expires = None if asked.ttl_seconds is None else now + asked.ttl_seconds
        row = {"path": path, "tenant": job.tenant, "model": model, "kind": kind, "folder": str(folder)}
        told = {"user_metadata": asked.user_metadata}
        return _json(answer), [partial(self._new_checkpoint, **row, created=now, expires=expires, told=told)]

    def _new_checkpoint(self, **row: Any) -> str | None:
        """Write a checkpoint down; return the folder of one that it takes the place of."""
        old = self.store.row("SELECT folder FROM checkpoints WHERE path = ?", row["path"])
        size = sum(file.stat().st_size for file in Path(row["folder"]).iterdir())
        self.store.add("checkpoints", replace=True, **row, bytes=size)
        return None if old is None or old["folder"] == row["folder"] else old["folder"]

    # --- sampling ----------------------------------------------------------------------------------------------------

    def create_sampler(self, tenant: str, body: bytes) -> Record:
        """Open a sampling client on the base, or on a checkpoint's weights, which stay those of now."""
        asked = bodies.read(bodies.CreateSampler, body)
        self._session(tenant, asked.session_id)
        folder = self._weights(tenant, asked.model_path, asked.base_model)
        name = f"{asked.session_id}:sample:{asked.sampling_session_seq_id}"
        row = {"tenant": tenant, "session": asked.session_id, "path": asked.model_path, "folder": folder}
        if (old := self.store.row("SELECT path FROM samplers WHERE id = ?", name)) is None:
            self.store.add("samplers", id=name, **row)
        elif old["path"] != asked.model_path:
            raise Refused(f"sampling_session_seq_id={asked.sampling_session_seq_id} was used before, for {old['path']}")
        return {"type": "create_sampling_session", "sampling_session_id": name}

    def _weights(self, tenant: str, path: str | None, base: str | None) -> str | None:
        """Folder of a path's adapter; None: the base."""
        if path is None and base is None:
            raise Refused("model_path or base_model must be given")
        if base is not None:
            self._base(base)
        return None if path is None else self.catalogue.checkpoint(tenant, path)["folder"]

    def join_sampler(self, tenant: str, name: str) -> Record:
        """Number a further client of a sampler."""
        self.catalogue.owned("samplers", tenant, name, "sampling session")
        self.store.change("UPDATE samplers SET clients = clients + 1 WHERE id = ?", name)
        count = self.store.value("SELECT clients FROM samplers WHERE id = ?", name)
        return {"type": "join_sampling_session", "client_counter": count}

    def sampler(self, tenant: str, name: str) -> Record:
        found = self.catalogue.owned("samplers", tenant, name, "sampling session")
        return {"sampler_id": name, "base_model": self.limits.model, "model_path": found["path"]}

    def submit_sample(self, tenant: str, body: bytes) -> Record:
        """Take a prompt. Raises Refused for one that cannot be answered."""
        asked = bodies.read(bodies.Sample, body)
        if asked.sampling_session_id is None or asked.seq_id is None:
            raise Refused("sampling_session_id and seq_id must be given: create a sampling session first")
        sampler = self.catalogue.owned("samplers", tenant, asked.sampling_session_id, "sampling session")
        self._session(tenant, sampler["session"])
        prompt = prompt_of(asked, sampler["id"], self.limits)
        name = f"{sampler['id']}:{asked.seq_id}"
        row = {"id": name, "tenant": tenant, "session": sampler["session"], "model": None, "seq": 0, "kind": "sample"}
        row["cost"] = len(prompt.ids) + prompt.num_samples * prompt.sampling.max_tokens
        self._accept(row, body, is_due=False)
        return {"request_id": name, "sample_sequence_ids": [f"{name}:{i}" for i in range(asked.num_samples)]}

    async def _samples(self, jobs: list[Job]) -> Results:
        asked: list[tuple[str, Path | None, Prompt]] = []
        for job in jobs:
            body = bodies.read(bodies.Sample, self._body(job))
            assert body.sampling_session_id is not None
            sampler = self.catalogue.owned("samplers", job.tenant, body.sampling_session_id, "sampling session")
            folder = None if sampler["folder"] is None else Path(sampler["folder"])
            asked.append((job.request, folder, prompt_of(body, sampler["id"], self.limits)))
        results: Results = []
        for job, answer in zip(jobs, await self._call(self.engines.sample, asked), strict=True):
            if answer is None:
                self._settle(job.request, _error("it was cancelled", "user"), failed=True)
            else:
                results.append((job, wire.samples_output(answer), []))
        return results


def _json(value: Record) -> bytes:
    return json.dumps(value).encode()


def _error(text: str, category: str) -> bytes:
    return _json({"error": text, "category": category})
