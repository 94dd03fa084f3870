"""An engine in this process with the interface of one in another (bench/engine_process.py), and one update into either,
as a driver has it done."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from typing import Any, TypeVar
from unittest import mock

import torch

from tests.worlds.processes import forks
from verl_like.config import RolloutConfig
from verl_like.kit.bench import engine_process
from verl_like.kit.bench.engine_process import EngineProcess, EngineSettings, Hosted, connected, hosted, receive, wanted
from verl_like.parallel.dist import ProcessInfo
from verl_like.rollout.base import RolloutEngine
from verl_like.weight_sync.channel import InProcess, SendingEnd
from verl_like.weight_sync.receiver import WeightReceiver
from verl_like.weight_sync.source import WeightSource
from verl_like.weight_sync.verdict import Receipt, SyncReport, WeightSyncError, verdict
from verl_like.workers.weights import sync_within

Result = TypeVar("Result")


def failure(sync: Callable[[int], object], version: int) -> str:
    """What a sync to this version says as it fails; "none" where it does not."""
    try:
        sync(version)
    except WeightSyncError as error:
        return str(error)
    return "none"


class EngineHere:
    def __init__(self, settings: EngineSettings, process: ProcessInfo) -> None:
        self.hosted = hosted(settings, process)

    def begin(self, function: Callable[..., Result], *arguments: Any) -> Callable[[], Result]:
        """It is done when the result is asked for."""
        return lambda: function(self.hosted, *arguments)

    def call(self, function: Callable[..., Result], *arguments: Any) -> Result:
        return self.begin(function, *arguments)()

    def shutdown(self) -> None:
        self.hosted.rollout.shutdown()


Engine = EngineHere | EngineProcess


def elsewhere(settings: EngineSettings) -> EngineProcess:
    """An engine in a process of its own: `hf` in a fork that has torch imported, vLLM in one that starts anew."""
    if settings.rollout.name != "hf":
        return EngineProcess(settings)
    with mock.patch.object(engine_process, "get_context", lambda method: forks()):
        return EngineProcess(settings)


Sync = Callable[[int], SyncReport]  # by version


def within(
    engine: Any,
    rollout: RolloutEngine,
    config: RolloutConfig,
    process: ProcessInfo,
    trainer_dtype: torch.dtype = torch.float32,
) -> Sync:
    """Syncs of trainer and engine in this process, as the hybrid engine names its ranks."""
    prove, name = config.sync_probe, "rank {}"
    source = WeightSource(engine, process, prove=prove, trainer_dtype=trainer_dtype, name=name)
    return partial(sync_within, source, WeightReceiver(rollout, config, process, name=name))


def connect(kind: str, engine: Engine, device: torch.device, **settings: Any) -> SendingEnd:
    """The sending end of a channel of this kind, which the engine has joined."""
    if isinstance(engine, EngineProcess):
        return connected(kind, engine, device, **settings)
    engine.hosted.channel = channel = InProcess()
    return channel


def transfer(source: WeightSource, channel: SendingEnd, engine: Engine, version: int) -> SyncReport:
    """Raises WeightSyncError; the engine is unloaded then, or has ended."""
    asked, received = engine.call(wanted), engine.begin(receive)
    try:
        sent = source.send(version, asked, channel)
    except WeightSyncError:
        _receipt(received)
        raise
    receipt = _receipt(received)
    try:
        return verdict([sent], [receipt])
    except WeightSyncError:
        if receipt.mark is not None:
            engine.call(unload)
        raise


def unload(engine: Hosted) -> None:
    engine.receiver.unload()


def _receipt(received: Callable[[], Receipt]) -> Receipt:
    try:
        return received()
    except (WeightSyncError, BrokenProcessPool) as error:  # it has left its group, or its process has ended
        return Receipt(mark=None, seconds=0.0, problems={"rollout rank 0": [f"{type(error).__name__}: {error}"]})
