"""Engines that compute nothing, and a client of a few lines: what the protocol does, without a model.

A model's weights are a hash of all that was done to it, in order; a sampler's tokens one of weights, prompt and seed.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from aiohttp.test_utils import TestClient, TestServer

from verl_like.config.serve import ServeConfig
from verl_like.plugins.tinker_server.adapters import AdapterSpec
from verl_like.plugins.tinker_server.engine import Answer, Prompt, Result, Work
from verl_like.plugins.tinker_server.fair import ONE_OF_A_MODEL
from verl_like.plugins.tinker_server.images import Reader
from verl_like.plugins.tinker_server.prompts import Limits
from verl_like.plugins.tinker_server.server import application
from verl_like.plugins.tinker_server.service import Service
from verl_like.plugins.tinker_server.store import Store
from verl_like.plugins.tinker_server.wire import MESSAGES, PROTOBUF
from verl_like.rollout.rollout_engine import RolloutError

LIMITS = Limits(
    model="base",
    arch="fake",
    tokenizer=None,
    vocabulary=100,
    longest=32,
    eos_ids=(1,),
    seed=1,
    serve=ServeConfig(max_lora_rank=8, checkpoint_freq=2, max_queued=50, max_models=9),
    shared={},
    reader=Reader(),
)
SHARED = dict.fromkeys(
    ("forward", "forward_backward", "sample", *ONE_OF_A_MODEL), 1000
)  # Limits.shared where tenants share passes
LORA = {"rank": 4, "seed": 3, "train_mlp": True, "train_attn": True, "train_unembed": True}
Key = str


class Killed(BaseException):
    """The process is gone in the middle of a call."""


def mixed(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


class FakeEngines:
    """Weights and gradient of each model are texts. kill_at: number of the call that does not come back, and whether
    it has done its work by then. error_at: the same of one that fails. dead: no sample comes back."""

    def __init__(
        self, kill_at: tuple[int, bool] | None = None, error_at: tuple[int, bool] | None = None, dead: bool = False
    ) -> None:
        self._error_at, self._dead = error_at, dead
        self.models: dict[str, tuple[str, str]] = {}
        self.calls: list[str] = []
        self.shared: list[int] = []  # requests of each pass and each batch of samples
        self._kill_at = kill_at

    def _done(self, what: str, before: bool) -> None:
        if not before:
            self.calls.append(what)
        if self._kill_at is not None and self._kill_at == (len(self.calls) - (not before), not before):
            raise Killed
        if self._error_at is not None and self._error_at == (len(self.calls) - (not before), not before):
            self._error_at = None
            raise OSError("No space left on device")

    def has(self, model: str) -> bool:
        return model in self.models

    def check(self, spec: AdapterSpec) -> None:
        if spec.rank == 7:
            raise ValueError("rank=7: no")

    def create(self, model: str, spec: AdapterSpec) -> None:
        self.models[model] = (mixed(spec), "")

    def load(self, model: str, folder: Path, *, optimizer: bool) -> AdapterSpec:
        saved = json.loads((folder / "weights.json").read_text())
        self.models[model] = (mixed(saved["weights"]) if not optimizer else saved["weights"], "")
        return AdapterSpec(rank=4, seed=0)

    def saver(self, model: str, folder: Path, *, optimizer: bool) -> Callable[[], None]:
        self._done("save", True)
        weights = json.dumps({"weights": self.models[model][0]})

        def save() -> None:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "weights.json").write_text(weights)
            self._done("save", False)

        return save

    def drop(self, model: str) -> None:
        self.models.pop(model, None)

    def drop_gradient(self, model: str) -> None:
        self.models[model] = (self.models[model][0], "")

    def forward_backward(self, asked: Sequence[Work], *, backward: bool, seed: int) -> list[Result]:
        if len(asked) > 1 and any(13 in row.ids for each in asked for row in each.rows):
            raise FloatingPointError("13 is not finite, and nothing was added")
        self._done("pass", True)
        self.shared.append(len(asked))
        found: list[Result] = []
        for each in asked:
            weights, gradient = self.models[each.model]
            told = mixed(weights, each.loss, sorted(each.settings.items()), [row.ids.tolist() for row in each.rows])
            if backward:
                self.models[each.model] = (weights, mixed(gradient, told))
            value = int(told[:6], 16)
            found.append(
                ([np.full(row.targets.shape, -value, np.float32) for row in each.rows], {"loss:sum": float(value)})
            )
        self._done("pass", False)
        return found

    def optim_step(self, model: str, params: dict[str, float]) -> dict[str, float]:
        self._done("step", True)
        weights, gradient = self.models[model]
        self.models[model] = (mixed(weights, gradient, sorted(params.items())), "")
        self._done("step", False)
        return {"grad_norm:mean": float(int(self.models[model][0][:6], 16))}

    def sample(self, asked: Sequence[tuple[str, Path | None, Prompt]]) -> list[Answer | None]:
        if self._dead:
            raise RolloutError("the rollout engine has stopped: a test")
        self.shared.append(len(asked))
        return [self._sampled(folder, prompt) for _, folder, prompt in asked]

    def _sampled(self, folder: Path | None, prompt: Prompt) -> Answer:
        weights = "base" if folder is None else json.loads((folder / "weights.json").read_text())["weights"]
        told = mixed(weights, prompt.ids, prompt.seed)
        ids = np.array([int(told[i : i + 2], 16) % 100 for i in range(0, 8, 2)], np.int32)
        return Answer(samples=[(ids, np.zeros(4, np.float32), True)] * prompt.num_samples)

    def cancel(self, name: str) -> None: ...


class Running:
    """A server that runs: HTTP in front of fake engines."""

    def __init__(self, engines: FakeEngines, service: Service, http: TestClient, thread: ThreadPoolExecutor) -> None:
        self.engines, self.service, self.http, self.thread = engines, service, http, thread

    async def post(self, path: str, body: Any, key: Key = "tml-anybody-here") -> tuple[int, Any]:
        """POST; a dictionary goes as JSON, bytes as protobuf."""
        headers = {"X-API-Key": key}
        if isinstance(body, bytes):
            sent: dict[str, Any] = {"data": body, "headers": headers | {"Content-Type": PROTOBUF}}
        else:
            sent = {"json": body, "headers": headers}
        async with self.http.post(f"/api/v1/{path}", **sent) as response:
            data = await response.read()
            return response.status, json.loads(data) if response.content_type == "application/json" else data

    async def get(self, path: str, key: Key = "tml-anybody-here") -> tuple[int, Any]:
        async with self.http.get(f"/api/v1/{path}", headers={"X-API-Key": key}) as response:
            return response.status, json.loads(await response.read())


@asynccontextmanager
async def running(
    folder: Path,
    *,
    kill_at: tuple[int, bool] | None = None,
    error_at: tuple[int, bool] | None = None,
    dead: bool = False,
    keys: dict[str, Key] | None = None,
    shared: dict[str, int] | None = None,
    **serve: Any,
) -> AsyncIterator[Running]:
    """A server on the state in `folder`. Its end is that of a kill: nothing is written any more."""
    engines, store = FakeEngines(kill_at, error_at, dead), Store(folder)
    with ThreadPoolExecutor(1) as thread:
        limits = replace(LIMITS, shared=shared or {}, serve=replace(LIMITS.serve, **serve))
        service = Service(engines, store, limits, thread)
        await service.start()
        front = TestServer(application(service, keys, 2**16))
        await front.start_server(auto_decompress=False)
        async with TestClient(front) as http:
            yield Running(engines, service, http, thread)
        await service.stop()
    store.close()


def pass_body(model: str, seq: int, ids: Sequence[int] = (5, 6, 7), *, forward: bool = False, **changed: Any) -> bytes:
    """A forward_backward of one row. changed: fields of the message."""
    columns = {
        "target_tokens": np.asarray([*ids[1:], 2], np.int64),
        "weights": np.ones(len(ids), np.float32),
        **changed.pop("columns", {}),
    }
    fields = {"model_id": model, "seq_id": seq, "loss_fn": "cross_entropy", "forward_only": forward}
    message = MESSAGES["Pass"](**fields | changed)
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = np.asarray(ids, np.int32).tobytes()
    for name, values in columns.items():
        if values is None:
            continue
        tensor = MESSAGES["Tensor"](
            dense=values.tobytes(), dtype=2 if values.dtype == np.int64 else 1, shape=values.shape
        )
        datum.loss_fn_inputs.add(key=name).value.MergeFrom(tensor)
    return message.SerializeToString()


class Tenant:
    """A client: one session, one model, requests in their order."""

    def __init__(self, server: Running, key: Key = "tml-anybody-here") -> None:
        self.server, self.key, self.seq, self.samples = server, key, 0, 0
        self.session = self.model = self.sampler = ""
        self.told: dict[str, Any] = {}  # by request

    async def call(self, path: str, body: Any) -> Any:
        status, answer = await self.server.post(path, body, self.key)
        assert status == 200, answer
        return answer

    async def begin(self, **lora: Any) -> Tenant:
        self.session = (await self.call("create_session", {}))["session_id"]
        body = {"session_id": self.session, "model_seq_id": 0, "base_model": "base", "lora_config": LORA | lora}
        future = await self.call("create_model", body)
        self.model = (await self.result(future))["model_id"]
        return self

    async def result(self, future: Any) -> Any:
        answer = await self.call("retrieve_future", {"request_id": future["request_id"]})
        self.told[future["request_id"]] = answer
        return answer

    def body_of(self, act: str, number: int) -> tuple[str, Any]:
        """The path and body of the next request. act: pass, forward, step, save, snapshot, sample."""
        if act == "sample":
            self.samples += 1
            prompt = {"chunks": [{"type": "encoded_text", "tokens": [3, number % 90 + 5]}]}
            place = {"sampling_session_id": self.sampler, "seq_id": self.samples - 1}
            return "asample", {**place, "prompt": prompt, "sampling_params": {"max_tokens": 4}}
        self.seq += 1
        place = {"model_id": self.model, "seq_id": self.seq}
        if act in ("pass", "forward"):
            return "forward_backward", pass_body(
                self.model, self.seq, (5, number % 90 + 5, 9), forward=act == "forward"
            )
        return {
            "step": ("optim_step", place | {"adam_params": {"learning_rate": 0.1 + number}}),
            "save": ("save_weights", place | {"path": f"s{self.seq}"}),
            "load": ("load_weights", place | {"path": f"tinker://{self.model}/weights/s{number}", "optimizer": True}),
            "snapshot": ("save_weights_for_sampler", place | {"sampling_session_seq_id": self.seq}),
        }[act]

    async def act(self, act: str, number: int = 0) -> Any:
        """Send a request and wait for what comes of it."""
        answer = await self.result(await self.call(*self.body_of(act, number)))
        if act == "snapshot":
            self.sampler = answer["sampling_session_id"]
        return answer

    def weights(self) -> tuple[str, str]:
        """Weights and gradient in the engines' memory."""
        return self.server.engines.models[self.model]


def run(coroutine: Any) -> Any:
    return asyncio.run(coroutine)
