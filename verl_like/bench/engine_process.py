"""A rollout engine with its weight receiver in a process of its own, to which weights travel by a channel."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import torch

from verl_like.cluster.lifecycle import name_shared_memory
from verl_like.config import ModelConfig, RolloutConfig
from verl_like.models.loading import load_hf_config
from verl_like.parallel.dist import ProcessInfo, init_distributed, shutdown_distributed
from verl_like.rollout.build import build_rollout_engine
from verl_like.rollout.rollout_engine import RolloutEngine
from verl_like.weight_sync.broadcast import BroadcastReceiver, BroadcastSender
from verl_like.weight_sync.channel import InProcess, ReceivingEnd, SendingEnd
from verl_like.weight_sync.header import Wanted
from verl_like.weight_sync.ipc import IpcReceiver, IpcSender
from verl_like.weight_sync.receiver import WeightReceiver
from verl_like.weight_sync.source import WeightSource
from verl_like.weight_sync.verdict import Receipt, SyncReport, WeightSyncError, verdict
from verl_like.weight_sync.wired import Way

Result = TypeVar("Result")
CHANNELS = ("inproc", "ipc", "broadcast")
_LOOPBACK = "127.0.0.1"
_START_S, _END_S = 600.0, 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """What builds the engine, in its process. Picklable."""

    rollout: RolloutConfig
    model: ModelConfig
    tokenizer_size: int
    max_model_len: int
    tokenizer: str
    run_id: str
    device: str
    port: int
    rank: int = 0
    num_ranks: int = 1


@dataclass(slots=True)
class Hosted:
    """What there is in an engine's process."""

    rollout: RolloutEngine
    receiver: WeightReceiver
    device: torch.device
    channel: ReceivingEnd | None = None


def hosted(settings: EngineSettings, process: ProcessInfo) -> Hosted:
    """Build the engine here."""
    rollout = build_rollout_engine(
        settings.rollout,
        settings.model,
        process=process,
        hf_config=load_hf_config(settings.model),
        tokenizer_size=settings.tokenizer_size,
        max_model_len=settings.max_model_len,
        seed=1,
        run_id=settings.run_id,
        tokenizer=settings.tokenizer,
    )
    return Hosted(rollout, WeightReceiver(rollout, settings.rollout, process), process.device)


class EngineHere:
    """The engine in this process, with the interface of one in another."""

    def __init__(self, engine: Hosted) -> None:
        self._engine = engine

    def begin(self, function: Callable[..., Result], *arguments: Any) -> Callable[[], Result]:
        """See EngineProcess: it is done when the result is asked for."""
        return lambda: function(self._engine, *arguments)

    def call(self, function: Callable[..., Result], *arguments: Any) -> Result:
        """See EngineProcess."""
        return self.begin(function, *arguments)()

    def shutdown(self) -> None:
        """End the engine."""
        self._engine.rollout.shutdown()


class EngineProcess:
    """Functions of a module, called in the engine's process with its `Hosted` first, one after the other."""

    def __init__(self, settings: EngineSettings) -> None:
        context = get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, settings), name="engine", daemon=True)
        self.process.start()
        theirs.close()

    def begin(self, function: Callable[..., Result], *arguments: Any) -> Callable[[], Result]:
        """Call it there; what is returned waits for the result. Its errors are raised as they are, if they can be
        pickled."""
        self._pipe.send((function, arguments))
        return self._result

    def call(self, function: Callable[..., Result], *arguments: Any) -> Result:
        """`begin`, and wait."""
        return self.begin(function, *arguments)()

    def shutdown(self) -> None:
        """End the process, with or without its help."""
        try:
            self._pipe.send(None)
            self.process.join(_END_S)
        except OSError:  # it has ended
            pass
        self.process.kill()
        self.process.join()

    def _result(self) -> Any:
        if not self._pipe.poll(_START_S):
            raise TimeoutError(f"the engine's process gave no answer in {_START_S:g} s")
        value = self._pipe.recv()
        if isinstance(value, BaseException):
            raise value
        return value


def _serve(pipe: Connection, settings: EngineSettings) -> None:
    torch.set_num_threads(1) if settings.device == "cpu" else None
    name_shared_memory(settings.run_id)
    place = (settings.rank, settings.num_ranks) * 2
    process = init_distributed(*place, _LOOPBACK, settings.port, settings.device)
    engine = hosted(settings, process)
    try:
        while (order := pipe.recv()) is not None:
            function, arguments = order
            try:
                value = function(engine, *arguments)
            except Exception as error:
                error.add_note(traceback.format_exc())
                value = error
            pipe.send(value)
    except EOFError:  # the other process is gone
        pass
    finally:
        engine.rollout.shutdown()
        shutdown_distributed()


def wanted(engine: Hosted) -> Wanted:
    """See WeightReceiver."""
    return engine.receiver.wanted()


def join(engine: Hosted, kind: str, way: Way, rank: int) -> None:
    """Become the receiver of a channel."""
    if engine.channel is not None:
        engine.channel.close()
    engine.channel = (IpcReceiver if kind == "ipc" else BroadcastReceiver)(way, rank, engine.device)


def join_here(engine: Hosted, channel: InProcess) -> None:
    """Become the receiver of a channel in this process."""
    engine.channel = channel


def receive(engine: Hosted) -> Receipt:
    """See WeightReceiver."""
    assert engine.channel is not None
    return engine.receiver.receive(engine.channel)


def unload(engine: Hosted) -> None:
    """See WeightReceiver."""
    engine.receiver.unload()


def opened(
    kind: str, engines: Sequence[EngineHere | EngineProcess], *, run_id: str, bucket_bytes: int, **settings: Any
) -> SendingEnd:
    """The sending end of a channel of this kind, which the engines have joined. settings: device, deadline_s, name."""
    names = [f"rollout rank {rank}" for rank in range(len(engines))]
    if kind == "inproc":
        channel = InProcess()
        engines[0].call(join_here, channel)
        return channel
    if kind == "ipc":
        sender: Any = IpcSender(names[0], run_id=run_id, bucket_bytes=bucket_bytes, **settings)
    else:
        sender = BroadcastSender(_LOOPBACK, names, bucket_bytes=bucket_bytes, **settings)
    for rank, engine in enumerate(engines):
        engine.call(join, kind, sender.way, rank)
    return sender


def transfer(
    source: WeightSource, channel: SendingEnd, engines: Sequence[EngineHere | EngineProcess], version: int, **how: Any
) -> SyncReport:
    """One update into all engines, as a driver has it done. Raises WeightSyncError; the engines are unloaded then."""
    asked = Wanted.of_all([engine.call(wanted) for engine in engines])
    received = [engine.begin(receive) for engine in engines]
    try:
        sent = source.send(version, asked, channel, **how)
    except WeightSyncError:
        for result in received:
            _receipt(result)
        raise
    receipts = [_receipt(result) for result in received]
    try:
        return verdict([sent], receipts)
    except WeightSyncError:
        for engine, receipt in zip(engines, receipts, strict=True):
            if receipt.mark is not None:
                engine.call(unload)
        raise


def _receipt(result: Callable[[], Receipt]) -> Receipt:
    try:
        return result()
    except (WeightSyncError, EOFError, OSError) as error:  # it has left its group, or its process has ended
        return Receipt(mark=None, seconds=0.0, problems={"an engine": [f"{type(error).__name__}: {error}"]})
