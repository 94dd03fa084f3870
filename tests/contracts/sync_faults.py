"""Faults planted into a weight sync, on the way out of the trainer or into the engine: which tensors are named?

Each is planted into every tensor at once, and the error must name exactly those that hold other numbers afterwards:
after a step of 1e-6 in bfloat16 an old tensor is often the new one, bit for bit.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from tests.contracts.engine_ends import Engine, connect, transfer
from verl_like.engine.fsdp import FSDPEngine
from verl_like.kit.bench.engine_process import Hosted, wanted
from verl_like.parallel.dist import ProcessInfo
from verl_like.parallel.sharding import local_tensor
from verl_like.plugins.vllm import compat
from verl_like.rollout.rollout_engine import HeldWeights
from verl_like.weight_sync.source import WeightSource
from verl_like.weight_sync.verdict import SyncReport, WeightSyncError

State = dict[str, Tensor]
RUN_ID = f"faults{os.getpid()}"
LEARNING_RATES = (4e-4, 1e-6)
SIDES = ("export", "loader")
KIND = "model.layers.1."  # one of each kind is left out, alone
DROPPED = (
    f"{KIND}self_attn.k_proj.weight",
    f"{KIND}self_attn.v_proj.bias",
    f"{KIND}mlp.down_proj.weight",
    f"{KIND}input_layernorm.weight",
    "model.embed_tokens.weight",
)


def _row_negated(tensor: Tensor) -> Tensor:
    return torch.cat([-tensor[:1], tensor[1:]])


def _nan(tensor: Tensor) -> Tensor:
    spoilt = tensor.clone()
    spoilt.view(-1)[-1] = float("nan")
    return spoilt


def _swapped(new: State) -> State:
    """Tensors of one shape go round among each other."""
    spoilt = dict(new)
    for shape in {tensor.shape for tensor in new.values()}:
        names = [name for name, tensor in new.items() if tensor.shape == shape]
        spoilt |= {name: new[names[i - 1]] for i, name in enumerate(names)}
    return spoilt


def _each(spoil: Callable[[Tensor], Tensor]) -> Callable[[State, State], State]:
    return lambda new, old: {name: spoil(tensor) for name, tensor in new.items()}


FAULTS: dict[str, Callable[[State, State], State]] = {
    "stale": lambda new, old: old,
    "x 1.001": _each(lambda t: t * 1.001),
    "row negated": _each(_row_negated),
    "flipped": _each(lambda t: t.flip(0)),
    "zeroed": _each(torch.zeros_like),
    "swapped": lambda new, old: _swapped(new),
    "NaN": _each(_nan),
}


@dataclass(frozen=True, slots=True)
class Caught:
    """should: tensors that are not what the trainer holds. named: those in the error (none: the sync passed)."""

    should: list[str]
    named: list[str]


class Plant:
    """One trainer and one engine, here or in a process of its own; each case starts from a sync that passes, which is
    at the same time the proof that the fault before is gone and that nothing is reported without a fault."""

    def __init__(self, engine: FSDPEngine, rollout: Engine, kind: str, process: ProcessInfo, bucket: int) -> None:
        self.engine, self.rollout, self.kind = engine, rollout, kind
        self._source = WeightSource(engine, process, prove=True)
        self._channel = connect(kind, rollout, process.device, run_id=RUN_ID, bucket_bytes=bucket)
        self.dtype = rollout.call(wanted).dtype
        self._version = 0
        self._noise = torch.Generator().manual_seed(0)

    def case(self, fault: str, side: str, lr: float, *, here: bool = True) -> Caught:
        """A fault in every tensor, before it is rounded, after an optimizer step. here: False where only other ranks
        plant it."""
        old, new = self._stepped(lr)
        spoilt = {name: tensor.to(self.dtype) for name, tensor in FAULTS[fault](new, old).items()}
        new = {name: tensor.to(self.dtype) for name, tensor in new.items()}
        should = [name for name, tensor in spoilt.items() if not torch.equal(tensor + 0.0, new[name] + 0.0)]
        with self._planted(spoilt if here else new, side):
            return Caught(should, self._named(self._failure()))

    def dropped(self, name: str, side: str) -> list[str]:
        """One tensor alone does not come; what the error says. The step is one that changes it also in 16 bits: a
        loader that leaves out what the engine holds already leaves nothing wrong."""
        _, new = self._stepped(1e-6 if self.dtype == torch.float32 else 4e-4)
        with self._planted({n: t.to(self.dtype) for n, t in new.items() if n != name}, side):
            return self._failure()

    def skipped(self, lr: float) -> Caught:
        """The engine takes the stream, says it is loaded, and keeps what it had."""
        old, new = self._stepped(lr)
        self.rollout.call(only_pretend)
        should = [name for name in new if not torch.equal(old[name].to(self.dtype), new[name].to(self.dtype))]
        try:
            return Caught(should, self._named(self._failure()))
        finally:
            self.rollout.call(load_as_ever)

    def sync(self) -> SyncReport:
        """The next version."""
        self._version += 1
        return transfer(self._source, self._channel, self.rollout, self._version)

    def shutdown(self) -> None:
        """End the engine."""
        self._channel.close()
        self.rollout.shutdown()

    def _stepped(self, lr: float) -> tuple[State, State]:
        """What the engine holds after a sync that passes, and what it should hold after a step of AdamW's size."""
        report = self.sync()
        assert report.num_read_back == report.num_tensors
        old = self._exported()
        with torch.no_grad():
            for parameter in self.engine.model.parameters():
                local = local_tensor(parameter)
                local.add_(lr * torch.randn(local.shape, generator=self._noise).sign())
        return old, self._exported()

    def _exported(self) -> State:
        return {name: tensor.clone() for name, tensor in self.engine.export_weights(torch.float32)}

    @contextmanager
    def _planted(self, spoilt: State, side: str) -> Iterator[None]:
        if side == "export":
            with mock.patch.object(self.engine, "export_weights", lambda *settings: iter(spoilt.items())):
                yield
            return
        self.rollout.call(load_others, spoilt)
        yield
        self.rollout.call(load_as_ever)

    def _failure(self) -> list[str]:
        try:
            self.sync()
        except WeightSyncError as error:
            assert self.rollout.call(wanted).held is None
            return error.problems
        return []

    def _named(self, problems: list[str]) -> list[str]:
        differences = ("differs from the trainer's shards: ", "differs in the rollout engine: ")
        return [problem.split(": ")[1] for problem in problems if problem.startswith(differences)]


# What is called in the engine's process.


def load_others(engine: Hosted, spoilt: State) -> None:
    """From now on the engine loads these tensors, whatever comes."""
    load = engine.rollout.load_weights

    def load_other(stream: Iterator[tuple[str, Tensor]], version: int, **how: Any) -> None:
        for _ in stream:
            pass
        load(iter(spoilt.items()), version, **how)

    engine.rollout.load_weights = load_other  # type: ignore[method-assign]


def only_pretend(engine: Hosted) -> None:
    """From now on the engine reads what comes, and forgets it."""
    rollout: Any = engine.rollout

    def pretend(stream: Iterator[tuple[str, Tensor]], version: int, *, partial: bool, mark: str) -> None:
        for _ in stream:
            pass
        rollout._in_memory, rollout._unloaded = HeldWeights(version=version, mark=mark), False

    rollout.load_weights = pretend


def load_as_ever(engine: Hosted) -> None:
    """Take back what was planted."""
    del engine.rollout.load_weights


def cached_tokens(engine: Hosted) -> int:
    """See RolloutEngine."""
    return engine.rollout.cached_tokens()


def keep_cache(engine: Hosted) -> None:
    """From now on vLLM's prefix cache is not emptied."""
    KEPT.append(compat.drop_caches)
    compat.drop_caches = lambda llm: None


def empty_cache(engine: Hosted) -> None:
    """Take `keep_cache` back."""
    compat.drop_caches = KEPT.pop()


KEPT: list[Any] = []
