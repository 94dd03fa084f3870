"""Weights between two processes: what is not a change of numbers, and what happens when one of the two ends or stops.

Changed numbers: test_sync_faults.py. Which end is where: the engine in its process and the trainer here, or, for a
sender that stops, the other way round.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.contracts.engine_ends import EngineHere, connect, elsewhere, transfer
from tests.contracts.test_weight_sync import FAULTS
from tests.unit.rollout.tiny import (
    MAX_LEN,
    TOKENIZER_SIZE,
    FakeTrainEngine,
    Items,
    single_process,
    tiny_model,
)
from verl_like.cluster.janitor import cleanup_shm
from verl_like.config import ModelConfig, RolloutConfig
from verl_like.config.roles import RoleConfig
from verl_like.engine.fsdp import FSDPEngine
from verl_like.kit.bench.engine_process import (
    EngineProcess,
    EngineSettings,
    Hosted,
    join,
    receive,
    sender_of,
    wanted,
)
from verl_like.kit.bench.meters import LiveBytes
from verl_like.parallel.dist import ProcessInfo, shutdown_distributed
from verl_like.rollout.rollout_engine import GenerationRequest, RolloutError, SamplingParams
from verl_like.weight_sync import wired
from verl_like.weight_sync.channel import InProcess, SendingEnd, filled
from verl_like.weight_sync.header import Wanted
from verl_like.weight_sync.receiver import WeightReceiver
from verl_like.weight_sync.source import WeightSource
from verl_like.weight_sync.verdict import SyncReport, WeightSyncError
from verl_like.weight_sync.wired import Way

CPU = torch.device("cpu")
RUN_ID = f"between{os.getpid()}"
REQUEST = GenerationRequest(request_id="r", prompt_ids=[1, 2, 3], sampling=SamplingParams(max_tokens=4), seed=1)
BUCKET = 40_000  # bytes; the model has 322 kB, its largest tensors 25 kB
DEADLINE_S = 3.0
ENGINES = [
    ("hf", "inproc"),
    ("hf", "ipc"),
    ("hf", "broadcast"),
    pytest.param(("vllm", "ipc"), marks=pytest.mark.engines),
    pytest.param(("vllm", "broadcast"), marks=pytest.mark.engines),
]


@pytest.fixture(scope="module")
def process() -> Iterator[ProcessInfo]:
    yield single_process()
    shutdown_distributed()


class Pair:
    """A trainer here and an engine wherever, with a channel that is set up anew when it broke."""

    def __init__(self, name: str, kind: str, process: ProcessInfo, folder: Path) -> None:
        tiny_model(seed=3).save_pretrained(folder)
        self.folder = folder
        settings = EngineSettings(
            rollout=RolloutConfig(name=name, enforce_eager=True, max_num_seqs=8, max_num_batched_tokens=64),
            model=ModelConfig(path=str(folder)),
            tokenizer_size=TOKENIZER_SIZE,
            max_model_len=MAX_LEN,
            run_id=RUN_ID,
        )
        self.name = name
        self.kind, self.process, self.trainer = kind, process, FakeTrainEngine(tiny_model(seed=3))
        self.engine = EngineHere(settings, process) if kind == "inproc" else elsewhere(settings)
        self.source = WeightSource(self.trainer, process, prove=True)  # type: ignore[arg-type]
        self.channel: SendingEnd = InProcess()
        self.version = 0

    def connect(self, deadline_s: float = 60.0) -> None:
        self.channel.close()
        settings: Any = {"run_id": RUN_ID, "bucket_bytes": BUCKET, "deadline_s": deadline_s}
        self.channel = connect(self.kind, self.engine, CPU, **settings)

    def sync(self) -> SyncReport:
        self.version += 1
        return transfer(self.source, self.channel, self.engine, self.version)


@pytest.fixture(scope="module", params=ENGINES, ids=lambda p: "-".join(p))
def pair(
    request: pytest.FixtureRequest, process: ProcessInfo, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    name, kind = request.param
    if name == "vllm":
        pytest.importorskip("vllm")
    made = Pair(name, kind, process, tmp_path_factory.mktemp("model"))
    yield made
    made.channel.close()
    made.engine.shutdown()
    assert not list(Path("/dev/shm").glob(f"*{RUN_ID}*"))


def generate(engine: Hosted) -> list[int]:
    """The versions of what it samples."""
    return engine.rollout.generate([REQUEST])[0].sampled.weight_versions.tolist()


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_caught_and_a_full_sync_recovers(pair: Pair, fault: str) -> None:
    spoil, message = FAULTS[fault]
    pair.connect()
    pair.sync()
    pair.trainer.spoil = spoil
    with pytest.raises(WeightSyncError, match=message):
        pair.sync()
    assert pair.engine.call(wanted).held is None
    with pytest.raises(RolloutError, match="no weights"):
        pair.engine.call(generate)
    pair.trainer.spoil = lambda items: items
    if fault == "interrupted":
        pair.connect()  # what broke off is not taken up again
    report = pair.sync()
    assert report.num_read_back == report.num_tensors == 27 and (report.probe_gap or 0.0) < 1e-5
    assert set(pair.engine.call(generate)) == {pair.version}


def test_an_optimizer_whose_steps_change_nothing_is_caught(pair: Pair) -> None:
    """The trainer counts its own steps; receivers are told before anything is sent."""
    pair.connect()
    pair.sync()
    pair.trainer.changes = pair.trainer.changes.after_step(lr=1e-8, grad_norm=1.0, exact=True)
    assert pair.sync().num_changed == 0  # a step as small may be lost
    pair.trainer.changes = pair.trainer.changes.after_step(lr=1e-3, grad_norm=1.0, exact=True)
    with pytest.raises(WeightSyncError, match="none of 27 tensors has changed"):
        pair.sync()
    assert pair.engine.call(wanted).held is None
    pair.trainer.changes = pair.trainer.changes.after_load()  # they may be any now, the same ones too
    pair.connect()
    assert pair.sync().num_changed == 0


def test_a_truncated_bucket(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    if pair.kind == "inproc":
        pytest.skip("has no buckets")

    def truncated(*given: Any, **how: Any) -> Iterator[Any]:
        for number, (entries, data) in enumerate(filled(*given, **how)):
            yield entries, data[:-4] if number == 1 else data

    pair.connect()
    with monkeypatch.context() as patch:
        patch.setattr(wired, "filled", truncated)
        with pytest.raises(WeightSyncError, match=r"a bucket of .* ends before model"):
            pair.sync()
    assert pair.engine.call(wanted).held is None
    pair.connect()
    pair.sync()


def receive_counting(engine: Hosted) -> int:
    """Most bytes of tensors in the engine's process, which takes unproved weights."""
    with LiveBytes(CPU) as live:
        receive(engine)
    return live.peak


def test_live_bytes_stay_small(pair: Pair) -> None:
    """In process the tensor at hand, else two buckets and that; and never all of them."""
    pair.connect()
    model = ModelConfig(path=str(pair.folder))
    trainer = FSDPEngine(RoleConfig(model=model), pair.process, tokenizer_size=TOKENIZER_SIZE)
    source = WeightSource(trainer, pair.process, prove=False)
    sizes = [4 * shape.numel() for shape in trainer.weight_names().values()]
    asked, received = pair.engine.call(wanted), pair.engine.begin(receive_counting)
    with LiveBytes(CPU) as live:
        source.send(1, asked, pair.channel)
        if pair.kind == "inproc":
            received()
    limit = 2 * BUCKET + max(sizes) if pair.kind != "inproc" else 1.2 * max(sizes)
    assert max(sizes) <= live.peak <= limit < 0.5 * sum(sizes)
    if pair.kind != "inproc":
        theirs = received()
        assert pair.name == "vllm" or max(sizes) <= theirs <= 2 * BUCKET + max(sizes)  # vLLM packs a layer at once


# The engine's process stops, ends, or is the sender that does.


def halt_in_the_midst(engine: Hosted, number: int) -> None:
    """The next load sends this process a signal after eight tensors."""
    load = engine.rollout.load_weights

    def halting(stream: Items, version: int, **how: Any) -> None:
        del engine.rollout.load_weights
        load(_halting(stream, number), version, **how)

    engine.rollout.load_weights = halting  # type: ignore[method-assign]


def _halting(items: Items, number: int) -> Items:
    for i, item in enumerate(items):
        if i == 8:
            os.kill(os.getpid(), number)
        yield item


SENDERS: list[Any] = []


def process_id(engine: Hosted) -> int:
    """Of the engine's process."""
    return os.getpid()


def open_sender(engine: Hosted, kind: str, run_id: str) -> Way:
    """A trainer in the engine's process."""
    SENDERS.append(sender_of(kind, run_id=run_id, bucket_bytes=BUCKET, device=CPU, deadline_s=DEADLINE_S))
    return SENDERS[-1].way


def send_halting(engine: Hosted, asked: Wanted, number: int) -> list[str]:
    """Send from there, with a signal after eight tensors; what the sender says."""
    trainer = FakeTrainEngine(tiny_model(seed=3))
    trainer.spoil = lambda items: _halting(items, number)
    process = ProcessInfo(rank=0, world_size=1, local_rank=0, device=CPU)
    source = WeightSource(trainer, process, prove=True)  # type: ignore[arg-type]
    sent = source.send(1, asked, SENDERS[-1])
    return [problem for found in sent.problems.values() for problem in found]


def await_stop(pid: int) -> None:
    """Until the process stands still."""
    deadline = time.monotonic() + 30
    while Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "T":
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture(scope="module")
def here(process: ProcessInfo, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosted]:
    """An engine in this process that receives from a sender in another."""
    made = Pair("hf", "inproc", process, tmp_path_factory.mktemp("model"))
    assert isinstance(made.engine, EngineHere)
    engine = made.engine.hosted
    engine.receiver = WeightReceiver(engine.rollout, RolloutConfig(), process)
    yield engine
    if engine.channel is not None:
        engine.channel.close()
    made.engine.shutdown()


STATE = r"\d+ of 27 tensors had"


def test_a_receiver_that_stands_still(pair: Pair) -> None:
    if not isinstance(pair.engine, EngineProcess):
        pytest.skip("one process")
    pair.connect(deadline_s=DEADLINE_S)
    pair.sync()
    pair.engine.call(halt_in_the_midst, signal.SIGSTOP)
    pid, asked = pair.engine.call(process_id), pair.engine.call(wanted)
    received, began = pair.engine.begin(receive), time.monotonic()
    sent = pair.source.send(99, asked, pair.channel)
    assert time.monotonic() - began < DEADLINE_S + 8
    await_stop(pid)
    (problem,) = sent.problems["trainer rank 0"]
    assert re.search(rf"trainer rank 0 waited \d\.\d s for rollout rank 0: {STATE} been", problem)
    os.kill(pid, signal.SIGCONT)
    assert "rollout rank 0" in received().problems["rollout rank 0"][0]
    assert pair.engine.call(wanted).held is None
    pair.connect()
    pair.sync()


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_a_sender_that_stands_still_or_ends(pair: Pair, here: Hosted, number: signal.Signals) -> None:
    if not isinstance(pair.engine, EngineProcess):
        pytest.skip("one process")
    pid, process = pair.engine.call(process_id), pair.engine
    join(here, pair.kind, process.call(open_sender, pair.kind, RUN_ID))
    said = process.begin(send_halting, here.receiver.wanted(), number)
    began = time.monotonic()
    receipt = receive(here)
    assert time.monotonic() - began < DEADLINE_S + 8
    (problem,) = receipt.problems["rollout rank 0"]
    assert receipt.mark is None and here.rollout.weight_version is None
    if number == signal.SIGSTOP:
        assert f"rollout rank 0 waited {DEADLINE_S:.0f}" in problem and "s for trainer rank 0: " in problem
        os.kill(pid, signal.SIGCONT)
        assert "rollout rank 0" in "".join(said())
    else:
        assert "trainer rank 0 is gone" in problem or "bytes of a bucket" in problem
        with pytest.raises(BrokenProcessPool):
            said()
        left = cleanup_shm(RUN_ID)  # as the janitor does
        assert len(left) == (2 if pair.kind == "ipc" else 0)


def test_a_receiver_that_ends(pair: Pair, process: ProcessInfo, tmp_path_factory: pytest.TempPathFactory) -> None:
    """A process of its own, since the one before has ended too."""
    if not isinstance(pair.engine, EngineProcess) or pair.name == "vllm":
        pytest.skip("one process, or an engine that makes no difference to it")
    again = Pair("hf", pair.kind, process, tmp_path_factory.mktemp("again"))
    try:
        again.connect()
        again.sync()
        again.engine.call(halt_in_the_midst, signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(WeightSyncError, match=r"rollout rank 0 is gone, trainer rank 0 lost it after .* been"):
            again.sync()
        assert time.monotonic() - began < 30
    finally:
        again.channel.close()
        again.engine.shutdown()
