"""Server for clients of the Tinker protocol: ten clients with a model each, beside one client with the same work.

    verl-like bench serve                                    # 10 clients, a pass of 4 rows each, then 4 samples
    verl-like bench serve --model 0.5b --clients 4 --rank 32

A round of a client is a forward_backward, a step, a snapshot, and samples from it. One client does the rounds of all of
them in requests that are as many times as large, which is the most that a server could make of them. Requests are
those of the protocol, given to the service itself: a client's own work and HTTP are left out. The bar is for clients
who share passes (serve.isolation=shared).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from verl_like.kit.bench.bars import SERVED, bar
from verl_like.kit.bench.inputs import word_tokenizer, write_model
from verl_like.kit.bench.report import Report, Row, check_comparable, finish
from verl_like.kit.bench.shapes import MODELS, BenchError
from verl_like.plugins.tinker_server.engine import Engines
from verl_like.plugins.tinker_server.server import EVERYONE
from verl_like.plugins.tinker_server.service import Service
from verl_like.plugins.tinker_server.start import ServeFacts, limits_of
from verl_like.plugins.tinker_server.store import Store
from verl_like.plugins.tinker_server.wire import MESSAGES
from verl_like.trainer.compose import compose


@dataclass(frozen=True, slots=True)
class Work:
    """One client's round: rows of `length` tokens to train on, and as many samples of `new` tokens."""

    rows: int
    length: int
    new: int
    rank: int


class Client:
    """One session with one model."""

    def __init__(self, service: Service, work: Work, number: int) -> None:
        self._service, self._work, self._seq, self._number = service, work, 0, number
        self._session = service.create_session(EVERYONE, b"{}")["session_id"]
        random = np.random.default_rng(number)
        self._ids = random.integers(3, service.limits.vocabulary, (work.rows, work.length + 1))

    async def begin(self) -> None:
        place = {"session_id": self._session, "model_seq_id": 0, "base_model": self._service.limits.model}
        body = place | {"lora_config": {"rank": self._work.rank, "seed": self._number}}
        future = self._service.create_model(EVERYONE, json.dumps(body).encode())
        self._model = future["model_id"]
        await self._told(future)

    async def round(self) -> None:
        """Train on the rows, and sample from what was learned."""
        step = {"adam_params": {"learning_rate": 1e-4}}
        futures = [self._service.submit_pass(EVERYONE, self._pass()), self._submit("optim_step", step)]
        futures.append(self._submit("save_weights_for_sampler", {"sampling_session_seq_id": self._seq}))
        sampler = json.loads([await self._told(future) for future in futures][-1])["sampling_session_id"]
        chunk = {"tokens": self._ids[0, :16].tolist()}
        body: dict[str, Any] = {"sampling_session_id": sampler, "seq_id": 0, "prompt": {"chunks": [chunk]}}
        body |= {"num_samples": self._work.rows, "sampling_params": {"max_tokens": self._work.new, "stop": []}}
        await self._told(self._service.submit_sample(EVERYONE, json.dumps(body).encode()))

    def _submit(self, kind: str, more: dict[str, Any]) -> Any:
        self._seq += 1
        body = {"model_id": self._model, "seq_id": self._seq, **more}
        return self._service.submit(EVERYONE, kind, json.dumps(body).encode())

    def _pass(self) -> bytes:
        self._seq += 1
        message = MESSAGES["Pass"](model_id=self._model, seq_id=self._seq, loss_fn="cross_entropy")
        for ids in self._ids:
            datum = message.data.add()
            datum.model_input.add().encoded_text.tokens = ids[:-1].astype(np.int32).tobytes()
            weights = np.full(len(ids) - 1, 1 / ids.size, np.float32)
            for name, values, dtype in (("target_tokens", ids[1:].astype(np.int64), 2), ("weights", weights, 1)):
                tensor = MESSAGES["Tensor"](dense=values.tobytes(), dtype=dtype, shape=values.shape)
                datum.loss_fn_inputs.add(key=name).value.MergeFrom(tensor)
        return message.SerializeToString()

    async def _told(self, future: Any) -> bytes:
        found = await self._service.retrieve(EVERYONE, future["request_id"])
        while found is None:
            found = await self._service.retrieve(EVERYONE, future["request_id"])
        if found["status"] != "done":
            raise BenchError(f"{found['kind']} failed: {found['result'].decode()}")
        return found["result"]


def main(arguments: argparse.Namespace) -> Report:
    """Measure the three ways in turns, print the table."""
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    shape, count = MODELS[arguments.model], arguments.clients
    each = Work(arguments.rows, arguments.length, arguments.tokens, arguments.rank)
    whole = Work(each.rows * count, each.length, each.new, each.rank)
    told = {"model": asdict(shape), "clients": count, **asdict(each), "threads": arguments.threads}
    check_comparable("serve", told, arguments.compare)
    ways: dict[str, tuple[str, list[Work]]] = {
        "one client": ("exact", [whole]),
        f"{count} clients, shared": ("shared", [each] * count),
        f"{count} clients, exact": ("exact", [each] * count),
    }
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder) / "model", shape, each.length + each.new, seed=1)
        word_tokenizer(shape.vocab_size).save_pretrained(Path(folder) / "tokenizer")
        seconds = {
            name: asyncio.run(_measured(Path(folder), name, how, works, arguments))
            for name, (how, works) in ways.items()
        }
    tokens = whole.rows * (each.length + each.new)
    rows = [Row(name=name, seconds=taken, figures={"tokens/s": tokens / taken}) for name, taken in seconds.items()]
    one, shared, _ = seconds.values()
    text = f"A round of all: {whole.rows} rows of {each.length} tokens to train on, as many samples of {each.new}."
    notes = [text, bar("of one client's throughput, shared", one / shared, SERVED, at_least=True)]
    report = Report(bench="serve", work=told, rows=rows, figures={"of_one": one / shared}, notes=notes)
    return finish(report, arguments.json, arguments.compare)


async def _measured(folder: Path, name: str, how: str, works: list[Work], arguments: argparse.Namespace) -> float:
    """Median seconds of a round of all clients."""
    state = folder / name.replace(" ", "_")
    keys = ["trainer.objective=serve", f"serve.isolation={how}", f"actor_rollout_ref.model.path={folder / 'model'}"]
    keys += [f"data.tokenizer={folder / 'tokenizer'}", "actor_rollout_ref.rollout.name=hf", *arguments.overrides]
    config = compose(keys)
    loop = asyncio.get_running_loop()
    with ExitStack() as stack:
        thread = stack.enter_context(ThreadPoolExecutor(1))
        facts, store = ServeFacts(config, stack, trains=False), stack.enter_context(closing(Store(state)))
        make: Callable[[], Engines] = lambda: Engines(  # noqa: E731
            config,
            device=facts.device,
            tokenizer_size=len(facts.tokenizer),
            max_model_len=facts.max_model_len,
            run_id="bench",
        )
        engines = await loop.run_in_executor(thread, make)
        service = Service(engines, store, limits_of(config, facts), thread)
        await service.start()
        clients, taken = [Client(service, work, number) for number, work in enumerate(works)], list[float]()
        await asyncio.gather(*(client.begin() for client in clients))
        for _ in range(arguments.rounds + 1):
            begun = time.perf_counter()
            await asyncio.gather(*(client.round() for client in clients))
            taken.append(time.perf_counter() - begun)
        await service.stop()
        await loop.run_in_executor(thread, engines.close)
    return median(taken[1:])
