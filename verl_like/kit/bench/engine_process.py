"""A rollout engine with its weight receiver in a process of its own, and a channel to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any, TypeVar

import torch

from verl_like.cluster.environment import LOOPBACK
from verl_like.cluster.lifecycle import die_with_parent
from verl_like.config import ModelConfig, RolloutConfig
from verl_like.models.loading import load_hf_config
from verl_like.parallel.dist import ProcessInfo, init_distributed, shutdown_distributed
from verl_like.rollout.base import RolloutEngine
from verl_like.weight_sync.broadcast import BroadcastReceiver, BroadcastSender
from verl_like.weight_sync.channel import ReceivingEnd, SendingEnd
from verl_like.weight_sync.header import Wanted
from verl_like.weight_sync.ipc import IpcReceiver, IpcSender
from verl_like.weight_sync.receiver import WeightReceiver
from verl_like.weight_sync.verdict import Receipt
from verl_like.weight_sync.wired import Way, WiredSender
from verl_like.workers.rollout import start_engine

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """Settings that build the engine in its process. Picklable.

    local_rank: rank in its process group of one, if it has a process of its own; it chooses the GPU.
    """

    rollout: RolloutConfig
    model: ModelConfig
    tokenizer_size: int
    max_model_len: int
    run_id: str
    device: str = "cpu"
    tokenizer: str | None = None
    local_rank: int = 0


@dataclass(slots=True)
class Hosted:
    """Objects in an engine's process."""

    rollout: RolloutEngine
    receiver: WeightReceiver
    device: torch.device
    channel: ReceivingEnd | None = None


class EngineProcess:
    """Functions of a module, called in the engine's process with its `Hosted` first, one after the other."""

    def __init__(self, settings: EngineSettings) -> None:
        context = get_context("spawn")
        self._pool = ProcessPoolExecutor(1, mp_context=context, initializer=_start, initargs=(settings,))

    def begin(self, function: Callable[..., Result], *arguments: Any) -> Callable[[], Result]:
        """Begin a call in the engine's process.

        Returns a function that waits for the result or error (BrokenProcessPool: the process has ended).
        """
        return self._pool.submit(_call, function, arguments).result

    def call(self, function: Callable[..., Result], *arguments: Any) -> Result:
        """Begin a call, and wait for its result."""
        return self.begin(function, *arguments)()

    def shutdown(self) -> None:
        """End engine and process."""
        with suppress(BrokenProcessPool):  # it has ended
            self.call(_end)
        self._pool.shutdown()


def hosted(settings: EngineSettings, process: ProcessInfo) -> Hosted:
    """Build the engine in this process."""
    rollout = start_engine(
        settings.rollout,
        settings.model,
        process=process,
        hf_config=load_hf_config(settings.model),
        tokenizer_size=settings.tokenizer_size,
        max_model_len=settings.max_model_len,
        seed=1,
        run_id=settings.run_id,
        tokenizer=settings.tokenizer or "",
    )
    return Hosted(rollout, WeightReceiver(rollout, settings.rollout, process), process.device)


_HERE: list[Hosted] = []  # in an engine's process


def _start(settings: EngineSettings) -> None:
    die_with_parent()
    process = init_distributed(0, 1, settings.local_rank, 1, LOOPBACK, 0, settings.device)
    _HERE.append(hosted(settings, process))


def _call(function: Callable[..., Result], arguments: Sequence[Any]) -> Result:
    return function(_HERE[0], *arguments)


def _end(engine: Hosted) -> None:
    engine.rollout.shutdown()
    if engine.channel is not None:
        engine.channel.close()
    shutdown_distributed()


def wanted(engine: Hosted) -> Wanted:
    """Ask the engine's receiver for the form in which it wants weights."""
    return engine.receiver.wanted()


def join(engine: Hosted, kind: str, way: Way) -> None:
    """Become the receiver of a channel."""
    if engine.channel is not None:
        engine.channel.close()
    engine.channel = (IpcReceiver if kind == "ipc" else BroadcastReceiver)(way, 0, engine.device)


def receive(engine: Hosted) -> Receipt:
    """Let the engine's receiver take the next update from the channel."""
    assert engine.channel is not None
    return engine.receiver.receive(engine.channel)


def sender_of(kind: str, *, run_id: str, **settings: Any) -> WiredSender:
    """Make the sending end of a channel to one engine in another process.

    settings: see WiredSender.
    """
    if kind == "ipc":
        return IpcSender("rollout rank 0", run_id=run_id, **settings)
    return BroadcastSender(LOOPBACK, ["rollout rank 0"], **settings)


def connected(kind: str, engine: EngineProcess, device: torch.device, *, run_id: str, **settings: Any) -> SendingEnd:
    """The sending end of a channel of this kind, which the engine has joined."""
    sender = sender_of(kind, run_id=run_id, device=device, **settings)
    engine.call(join, kind, sender.way)
    return sender
