"""Requests and what they do: sessions, models, futures, samplers. HTTP is in server.py, numbers are in engine.py.

All state is that of one event loop; the engines compute in one thread beside it, a request at a time.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import re
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from verl_like.plugins.tinker_server import bodies, wire
from verl_like.plugins.tinker_server.bodies import AdapterSpec, Refused
from verl_like.plugins.tinker_server.catalogue import Catalogue
from verl_like.plugins.tinker_server.engine import Engines, Prompt, Work
from verl_like.plugins.tinker_server.fair import ONE_OF_A_MODEL, FairQueue, Job, Residents
from verl_like.plugins.tinker_server.prompts import Limits, prompt_of
from verl_like.plugins.tinker_server.store import KEPT_S, Record, Store
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
_OF_JOB = ("tenant", "kind", "session", "model", "seq", "cost")
_NUMBER_OF_SAMPLER = re.compile(rb'"sampling_session_seq_id":\s*\d+')  # a client that sends again takes another
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
        self._thread = thread
        self._work, self._running = asyncio.Event(), set[str]()
        self.tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Take up what a server before this one left, and begin to compute."""
        self.store.sweep()
        for session in self.store.rows("SELECT id FROM sessions WHERE ended IS NULL"):
            self._seen[session["id"]] = time.monotonic()  # since this server is there
        for each in self.store.rows("SELECT id FROM requests WHERE status = 'waiting' AND tries >= ?", _TRIES):
            self._fail(each["id"], f"the server ended {_TRIES} times while it was computed", "server")
        for model in self.store.rows("SELECT id FROM models"):
            last = "SELECT coalesce(max(seq), -1) FROM requests WHERE model = ? AND status != 'waiting'"
            self._queue.next_seq[model["id"]] = self.store.value(last, model["id"]) + 1
        for each in self.store.rows("SELECT * FROM requests WHERE status = 'waiting' ORDER BY arrived"):
            self._enqueue(each)
        self.tasks = [asyncio.create_task(self._compute()), asyncio.create_task(self._look_after())]

    async def stop(self) -> None:
        """End after the request that is being computed; samples break off. Another start computes it: no try counts."""
        if not self.tasks[0].done():
            for name in self._running:
                self.engines.cancel(name)
                self.store.change("UPDATE requests SET tries = tries - 1 WHERE id = ?", name)
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)

    def once(self, call: list[str], body: bytes, make: Callable[[], Any]) -> Any:
        """Answer a call that makes or deletes something; one that comes again has the answer of the first time."""
        sent = " ".join(call).encode("utf-8", "surrogateescape") + b"\0" + body
        name = hashlib.blake2b(sent, digest_size=16).hexdigest()
        with self.store.together():
            if (found := self.store.row("SELECT answer FROM answers WHERE call = ?", name)) is not None:
                return json.loads(found["answer"])
            self.store.add("answers", call=name, answer=json.dumps(answer := make()), told=time.time())
        return answer

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
            self._fail(job.request, f"the session has ended{why}")
        for model in self.store.rows("SELECT id FROM models WHERE session = ?", session):
            self._leave(model["id"])
        for sampler in self.store.rows("SELECT folder FROM samplers WHERE session = ? AND folder IS NOT NULL", session):
            self.store.remove_folder(sampler["folder"])
        self.store.sweep()

    def _leave(self, model: str) -> None:
        """Take a model of an ended session out of memory."""
        self._residents.forget(model)
        self._thread.submit(self.engines.drop, model)

    async def _look_after(self) -> None:
        """End sessions that have fallen silent, and drop what is too old."""
        while True:
            await asyncio.sleep(min(_SWEEP_S, self.limits.serve.session_timeout / 2))
            oldest = time.monotonic() - self.limits.serve.session_timeout
            for session in [name for name, seen in self._seen.items() if seen < oldest]:
                log.info("session %s has been silent for %g s: ended", session, self.limits.serve.session_timeout)
                self._end(session)
            for job, due in [*self._queue.overdue(oldest)]:
                self._end(job.session, f": request {due} of {job.model} never came")
            self.store.sweep()

    # --- models ------------------------------------------------------------------------------------------------------

    def create_model(self, tenant: str, body: bytes) -> Record:
        """Begin a model of the base. Raises Refused for an adapter that it cannot have."""
        asked = bodies.read(bodies.CreateModel, body)
        self._may_begin(tenant, asked)
        lora = asked.lora_config
        if lora is None:
            raise Refused("lora_config is missing: this server trains adapters, not the base")
        if lora.rank > self.limits.serve.max_lora_rank:
            raise Refused(f"lora_config.rank={lora.rank}: this server gives {self.limits.serve.max_lora_rank} at most")
        seed = request_seed(self.limits.seed, "adapter", asked.model_seq_id) if lora.seed is None else lora.seed
        spec = lora.model_copy(update={"seed": seed})
        try:
            self.engines.check(spec)
        except ValueError as error:
            raise Refused(f"lora_config: {error}") from error
        return self._first(tenant, asked, spec, "create", body)

    def create_by_load(self, tenant: str, body: bytes) -> Record:
        """Begin a model with the state of a checkpoint."""
        asked = bodies.read(bodies.CreateByLoad, body)
        self._may_begin(tenant, asked)
        found = self.catalogue.checkpoint(tenant, asked.path)
        return self._first(tenant, asked, self.catalogue.spec(found["model"]), "load", body)

    def _first(self, tenant: str, asked: bodies.Create, spec: AdapterSpec, kind: str, body: bytes) -> Record:
        name, now = f"{asked.session_id}:train:{asked.model_seq_id}", time.time()
        if self.store.row("SELECT id FROM models WHERE id = ?", name) is None:
            told = {"user_metadata": asked.user_metadata}
            row = {"session": asked.session_id, "spec": spec.model_dump(), "created": now, "used": now, "told": told}
            self.store.add("models", id=name, tenant=tenant, **row)
            self._queue.next_seq[name] = 0
        return self._submit(tenant, asked.session_id, name, 0, kind, body)

    def _may_begin(self, tenant: str, asked: bodies.Create) -> None:
        self._session(tenant, asked.session_id)
        if isinstance(asked, bodies.CreateModel) or asked.base_model is not None:
            self._base(asked.base_model)
        if asked.optimizer_config is not None and asked.optimizer_config.type != "adamw":
            raise Refused(f"optimizer_config.type={asked.optimizer_config.type!r} is not available; choose adamw")

    def _base(self, name: str | None) -> None:
        if name != self.limits.model:
            raise Refused(f"base_model={name!r}: this server has {self.limits.model!r}", 404)

    def _model(self, tenant: str, name: str) -> Record:
        found = self.catalogue.owned("models", tenant, name, "model")
        self._session(tenant, found["session"])
        return found

    def info(self, tenant: str, name: str) -> Record:
        """Answer get_info."""
        spec = self.catalogue.spec(self.catalogue.owned("models", tenant, name, "model")["id"])
        named, more = {"model_name": self.limits.model}, {"is_lora": True, "lora_rank": spec.rank}
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
        sent, name = row["kind"].encode() + b"\0" + _NUMBER_OF_SAMPLER.sub(b"", body), row["id"]
        digest = hashlib.blake2b(sent, digest_size=16).digest()
        if (old := self.store.row("SELECT digest, kind FROM requests WHERE id = ?", name)) is not None:
            if old["digest"] not in (digest, None) or old["kind"] != row["kind"]:
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
        job = _job(row)
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
            raise Refused(f"the result of {request} is gone: results are kept {KEPT_S / 60:g} minutes", 410)
        self.store.tell(request)
        return found

    def cancel(self, tenant: str, request: str) -> None:
        """End a sampling request, which waits or runs. Others are computed all the same: what follows them counts."""
        found = self.catalogue.owned("requests", tenant, request, "request")
        if found["kind"] != "sample" or found["status"] != "waiting":
            return
        if self._queue.remove(lambda job: job.request == request):
            self._fail(request, "it was cancelled")
        elif request in self._running:
            self.engines.cancel(request)

    def _fail(self, request: str, text: str, category: str = "user") -> None:
        self.store.finish(request, _json({"error": text, "category": category}), failed=True)
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
            for model in {job.model for job in jobs if job.session not in self._seen} - {""}:
                self._leave(model)  # its session has ended meanwhile

    async def _take(self, jobs: list[Job]) -> None:
        """Compute jobs: passes and samples together, or each by itself where that fails; others side by side.

        What came of them is written in one transaction.
        """
        tenants = {job.model: job.tenant for job in reversed(jobs) if job.model}
        for name in self._residents.use(tenants):
            await self._call(self.engines.drop, name)
        parts = [[job] for job in jobs] if jobs[0].kind in ONE_OF_A_MODEL else [jobs]
        results: Results = []
        computed = await asyncio.gather(*map(self._computed, parts), return_exceptions=True)
        for part, found in zip(parts, computed, strict=True):
            if isinstance(found, list):
                results += found
            elif isinstance(found, Exception) and not isinstance(found, RolloutError):
                await self._failed(part, found)
            else:
                raise found  # the sampling engine is dead: only another start heals that
        try:
            self._write(results)
        except Exception as error:
            for job, _, _ in results:
                await self._failed([job], error)

    async def _failed(self, jobs: list[Job], error: Exception) -> None:
        """Compute jobs one by one that failed together; fail one that was alone."""
        if len(jobs) > 1:
            log.info("%d requests are computed one by one: %s", len(jobs), error)
            for job in jobs:
                await self._take([job])
            return
        job, refused = jobs[0], isinstance(error, ValueError)
        if job.session not in self._seen:  # so its model may have left memory
            self._fail(job.request, "the session has ended")
            return
        if not refused:
            log.error("request failed: %s", job.request, exc_info=error)
        if job.kind in _CHANGING and not isinstance(error, Refused):
            await self._call(self.engines.drop, job.model)  # it may be half changed: the next one builds it again
        await self._break(job)
        text = str(error) if refused else f"{type(error).__name__}: {error}"
        self._fail(job.request, text, "user" if refused else "server")

    async def _break(self, job: Job) -> None:
        """Note that a pass failed, whose gradient is not whole then. A step over it fails too, and drops it."""
        if job.kind == "forward_backward":
            self._broken.setdefault(job.model, job.request)
        elif job.kind == "optim_step":
            self._broken.pop(job.model, None)
            if await self._call(self.engines.has, job.model):
                await self._call(self.engines.drop_gradient, job.model)

    def _write(self, results: Results) -> None:
        """Write results down together with what they changed, all or none."""
        with self.store.together():
            gone = [folder for _, _, changes in results for change in changes if (folder := change()) is not None]
            for job, result, _ in results:
                self.store.finish(job.request, result)
                self.store.change("UPDATE models SET used = ? WHERE id = ?", time.time(), job.model)
        for folder in gone:
            self.store.remove_folder(folder)
        for job, _, _ in results:
            self._wake(job.request)

    async def _computed(self, jobs: list[Job]) -> Results:
        """Compute jobs of one kind: passes and samples may be several."""
        for model, seq in {job.model: job.seq for job in reversed(jobs) if job.seq}.items():
            await self._revive(model, seq)
        job, kind = jobs[0], jobs[0].kind
        if kind == "sample":
            return await self._samples(jobs)
        if kind in _PASSES:
            return [(job, result, []) for job, result in zip(jobs, await self._passes(jobs), strict=True)]
        of_kind = {"create": self._create, "optim_step": self._optim_step, "load": self._load}
        return [(job, *await of_kind.get(kind, self._save)(job))]

    async def _call(self, function: Callable[..., Any], *values: Any, **named: Any) -> Any:
        """Compute in the engines' thread."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, partial(function, *values, **named))

    async def _revive(self, model: str, before: int) -> None:
        """Bring a model back that is not in memory: its last state, and once more what was done since."""
        if await self._call(self.engines.has, model):
            return
        found = self.store.row("SELECT state, state_seq FROM models WHERE id = ?", model)
        if found is None or found["state"] is None:
            raise Refused(f"{model} was not created: its first request failed")
        try:
            await self._again(model, Path(found["state"]), found["state_seq"], before)
        except BaseException:
            await self._call(self.engines.drop, model)  # half of a history is none
            raise

    async def _again(self, model: str, state: Path, seq: int, before: int) -> None:
        """Load a state, and compute what was done between two requests."""
        self._broken.pop(model, None)
        await self._call(self.engines.load, model, state, optimizer=True)
        done = "SELECT * FROM requests WHERE model = ? AND seq > ? AND seq < ? ORDER BY seq"
        for row in self.store.rows(done, model, seq, before):
            job = _job(row)
            if row["status"] == "failed":
                await self._break(job)
            elif job.kind == "forward_backward":
                await self._passes([job])
            elif job.kind == "optim_step":
                await self._call(self.engines.optim_step, model, self._adam(job))

    def _body(self, job: Job) -> bytes:
        return self.store.value("SELECT body FROM requests WHERE id = ?", job.request)

    def _adam(self, job: Job) -> dict[str, float]:
        return bodies.read(bodies.OptimStep, self._body(job)).adam_params.model_dump()

    async def _passes(self, jobs: list[Job]) -> list[bytes]:
        """Compute passes of one kind together. A single one has random numbers that follow from its place."""
        asked, kind, limits = list[Work](), jobs[0].kind, self.limits
        for job in jobs:
            message = wire.parsed_pass(self._body(job))
            asked.append(await self._call(wire.work_of, message, limits))  # others are answered meanwhile
        seed = request_seed(self.limits.seed, "pass", jobs[0].seq)
        backward = kind == "forward_backward"
        found = await self._call(self.engines.forward_backward, asked, backward=backward, seed=seed)
        return [wire.pass_output(each.rows, *told) for each, told in zip(asked, found, strict=True)]

    async def _create(self, job: Job) -> tuple[bytes, list[Change]]:
        await self._call(self.engines.create, job.model, self.catalogue.spec(job.model))
        return _json({"type": "create_model", "model_id": job.model}), [await self._state(job)]

    async def _optim_step(self, job: Job) -> tuple[bytes, list[Change]]:
        params = self._adam(job)
        if (broken := self._broken.get(job.model)) is not None:
            raise Refused(f"{broken}, a forward_backward since the last step, failed: no weight was changed")
        metrics = await self._call(self.engines.optim_step, job.model, params)
        self._steps[job.model] = self._steps.get(job.model, 0) + 1
        due = self._steps[job.model] >= self.limits.serve.checkpoint_freq
        return _json({"metrics": metrics}), [await self._state(job)] if due else []

    async def _state(self, job: Job) -> Change:
        """Write the model's state; that it is the one to begin with is left to the transaction."""
        folder = self._folder("states", job)
        await self._save_to(folder, job.model, optimizer=True)
        self._steps[job.model] = 0
        return partial(self.store.keep_state, job.model, job.seq, folder)

    async def _save_to(self, folder: Path, model: str, *, optimizer: bool) -> None:
        """Write a model; requests of others are computed meanwhile."""
        await asyncio.to_thread(await self._call(self.engines.saver, model, folder, optimizer=optimizer))

    def _folder(self, kind: str, job: Job) -> Path:
        return self.store.folder / kind / job.model.replace(":", "_") / str(job.seq)

    async def _load(self, job: Job) -> tuple[bytes, list[Change]]:
        """Put a checkpoint's weights, and its optimizer where that is asked for, into a model."""
        kind = bodies.Load if job.seq else bodies.CreateByLoad
        asked = bodies.read(kind, self._body(job))
        found = self.catalogue.checkpoint(job.tenant, asked.path)
        await self._call(self.engines.load, job.model, Path(found["folder"]), optimizer=asked.optimizer)
        self._broken.pop(job.model, None)  # what was added up is gone
        return _json({"type": "load_weights", "path": asked.path, "model_id": job.model}), [await self._state(job)]

    async def _save(self, job: Job) -> tuple[bytes, list[Change]]:
        """Write a checkpoint, or the snapshot of a sampling client, which has no name."""
        asked, training = bodies.read(bodies.Save, self._body(job)), job.kind == "save_weights"
        kind, place = ("training", "weights") if training else ("sampler", "sampler_weights")
        folder, now = self._folder("saved", job), time.time()
        answer: Record = {"type": job.kind, "path": None}
        row = {"tenant": job.tenant, "folder": str(folder)}
        if asked.path is not None:
            answer["path"] = path = f"tinker://{job.model}/{place}/{asked.path}"
            taken = self.store.row("SELECT path FROM checkpoints WHERE path = ?", path) is not None
            if taken and not (training and asked.overwrite):
                raise Refused(f"{path} is there already; choose another name, or overwrite=True for a state")
            row |= {"path": path, "model": job.model, "kind": kind, "created": now}
            expires = None if asked.ttl_seconds is None else now + asked.ttl_seconds
            change: Change = partial(
                self._new_checkpoint, **row, expires=expires, told={"user_metadata": asked.user_metadata}
            )
        elif training or asked.sampling_session_seq_id is None:
            raise Refused("path or sampling_session_seq_id must be given")
        else:  # not by the client's number, another in each try: samples follow from the name
            count = self.store.value("SELECT count(*) FROM samplers WHERE id GLOB ?", f"{job.model}:sample:*")
            answer["sampling_session_id"] = name = f"{job.model}:sample:{count}"
            change = partial(self._new_sampler, id=name, session=job.session, **row)
        await self._save_to(folder, job.model, optimizer=training)
        return _json(answer), [change]

    def _new_sampler(self, **row: Any) -> str:
        """Write a snapshot down; return its folder, which goes where its session has ended meanwhile."""
        self.store.add("samplers", replace=True, **row)
        return row["folder"]

    def _new_checkpoint(self, **row: Any) -> str | None:
        """Write a checkpoint down; return the folder of one that it takes the place of."""
        old = self.store.row("SELECT folder FROM checkpoints WHERE path = ?", row["path"])
        size = sum(file.stat().st_size for file in Path(row["folder"]).iterdir())
        self.store.add("checkpoints", replace=True, **row, bytes=size)
        return None if old is None else old["folder"]

    # --- sampling ----------------------------------------------------------------------------------------------------

    def create_sampler(self, tenant: str, body: bytes) -> Record:
        """Open a sampling client on the base, or on a checkpoint's weights, which stay those of now."""
        asked = bodies.read(bodies.CreateSampler, body)
        self._session(tenant, asked.session_id)
        folder = None
        if asked.model_path is not None:
            folder = self.catalogue.checkpoint(tenant, asked.model_path)["folder"]
        elif asked.base_model is None:
            raise Refused("model_path or base_model must be given")
        if asked.base_model is not None:
            self._base(asked.base_model)
        name = f"{asked.session_id}:sample:{asked.sampling_session_seq_id}"
        row = {"tenant": tenant, "session": asked.session_id, "path": asked.model_path, "folder": folder}
        if (old := self.store.row("SELECT path FROM samplers WHERE id = ?", name)) is None:
            self.store.add("samplers", id=name, **row)
        elif old["path"] != asked.model_path:
            raise Refused(f"sampling_session_seq_id={asked.sampling_session_seq_id} was used before, for {old['path']}")
        return {"type": "create_sampling_session", "sampling_session_id": name}

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
        name, sampler, prompt = self._prompt(tenant, body)
        self._session(tenant, sampler["session"])
        row = {"id": name, "tenant": tenant, "session": sampler["session"], "model": "", "seq": 0, "kind": "sample"}
        row["cost"] = len(prompt.ids) + prompt.num_samples * prompt.sampling.max_tokens
        self._accept(row, body, is_due=False)
        return {"request_id": name, "sample_sequence_ids": [f"{name}:{i}" for i in range(prompt.num_samples)]}

    def _prompt(self, tenant: str, body: bytes) -> tuple[str, Record, Prompt]:
        """Read what is asked: the request's name, its sampler and the prompt."""
        asked = bodies.read(bodies.Sample, body)
        if asked.sampling_session_id is None or asked.seq_id is None:
            raise Refused("sampling_session_id and seq_id must be given: create a sampling session first")
        sampler = self.catalogue.owned("samplers", tenant, asked.sampling_session_id, "sampling session")
        return f"{sampler['id']}:{asked.seq_id}", sampler, prompt_of(asked, sampler["id"], self.limits)

    async def _samples(self, jobs: list[Job]) -> Results:
        asked: list[tuple[str, Path | None, Prompt]] = []
        for job in jobs:
            name, sampler, prompt = self._prompt(job.tenant, self._body(job))
            asked.append((name, sampler["folder"] and Path(sampler["folder"]), prompt))
        results: Results = []
        for job, answer in zip(jobs, await self._call(self.engines.sample, asked), strict=True):
            if answer is None:
                self._fail(job.request, "it was cancelled")
            else:
                results.append((job, wire.samples_output(answer), []))
        return results


def _job(row: Record) -> Job:
    known = {name: row[name] for name in _OF_JOB}
    return Job(request=row["id"], size=len(row["body"] or b""), alone=row["tries"] > 0, **known)


def _json(value: Record) -> bytes:
    return json.dumps(value).encode()
