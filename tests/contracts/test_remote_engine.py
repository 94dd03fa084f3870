"""An engine in another process when that process fails; what it does in good order is in test_rollout_engine.py."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.worlds.processes import forks
from verl_like.kit.bench.fake_time import FakeTimeEngine, FakeTimeRollout
from verl_like.rollout.rollout_engine import (
    Completion,
    EngineLostError,
    GenerationRequest,
    RolloutError,
    Sampled,
    SamplingParams,
)
from verl_like.workers import remote_engine
from verl_like.workers.remote_engine import RemoteEngine

REQUEST = GenerationRequest(request_id="r", prompt_ids=[1], sampling=SamplingParams(max_tokens=4))


class Engine:
    """What RemoteEngine asks of one, without a model: no request ever ends."""

    dtype, tokenizer_size, vocab_size, max_model_len = torch.float32, 10, 10, 20
    keeps_adapters, sees = False, False

    def load_weights(self, stream: object, version: int, *, partial: bool) -> None:
        assert list(stream) == []  # type: ignore[call-overload]

    def submit(self, request: GenerationRequest) -> Future[Completion]:
        return Future()

    def unload(self) -> None: ...

    def open(self) -> None: ...

    def sleep(self, discard: bool = False) -> None:
        time.sleep(100)

    def wake(self) -> None:
        raise OSError("no device")

    def shutdown(self) -> None: ...


class Steps(FakeTimeEngine):
    """A request of priority -99 breaks it."""

    def add(self, request: GenerationRequest) -> None:
        if request.priority == -99:
            raise RuntimeError("a step broke")
        super().add(request)


class Counting(FakeTimeRollout):
    """A whole engine that takes the names a, b, ... and no others."""

    def __init__(self) -> None:
        super().__init__(Steps(length_of=lambda request: 10**9))

    def _load(self, stream: Iterator[tuple[str, Tensor]], *, partial: bool) -> None:
        names = [name for name, _ in stream]
        assert names == ["a", "b"][: len(names)], names


@pytest.fixture(autouse=True)
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's process has torch imported: three seconds of CPU less a test. The last test spawns one."""
    monkeypatch.setattr(remote_engine, "get_context", lambda method: forks())


def refused() -> Engine:
    raise ValueError("rollout.dtype=float9 is none")


def opened(**options: float) -> RemoteEngine:
    engine = RemoteEngine(Engine, **options)  # type: ignore[arg-type]
    engine.load_weights([], 1)
    engine.open()
    return engine


def process_of(engine: RemoteEngine) -> BaseProcess:
    return engine._there._process


def wait_at_most(engine: RemoteEngine, seconds: float) -> None:
    """For an answer, from now on: a start may take longer."""
    engine._there._timeout_s = seconds


def test_a_killed_process_fails_what_is_pending_and_what_comes() -> None:
    engine = opened()
    future = engine.submit(REQUEST)
    with pytest.raises(ValueError, match="'r' is already in use"):
        engine.submit(REQUEST)
    os.kill(process_of(engine).pid, signal.SIGKILL)
    with pytest.raises(RolloutError, match=r"has ended \(exit code -9\)"):
        future.result(30)
    with pytest.raises(RolloutError, match="has ended"):
        engine.submit(REQUEST)
    engine.shutdown()


def test_the_next_whole_load_starts_a_lost_process_anew() -> None:
    engine = RemoteEngine(Counting)
    engine.load_weights([("a", torch.zeros(2))], 1, mark="one")
    engine.open()
    os.kill(process_of(engine).pid, signal.SIGSTOP)  # or the request would end before
    waiting = engine.submit(REQUEST)
    process_of(engine).kill()
    with pytest.raises(EngineLostError, match="has ended"):
        waiting.result(30)
    assert engine.held is None and engine.lost
    engine.pause(), engine.sleep(), engine.wake(), engine.unload()  # nothing is there that could
    with pytest.raises(EngineLostError, match="has ended"):
        engine.open()
    with pytest.raises(RuntimeError, match="adapters came without base weights"):
        engine.load_weights([("a", torch.zeros(2))], 2, partial=True)
    engine.load_weights([("a", torch.zeros(2)), ("b", torch.zeros(3))], 2)
    assert (engine.weight_version, engine.num_restarts, engine.lost) == (2, 1, "")
    short = SamplingParams(max_tokens=2)
    with engine.opened():
        request = GenerationRequest(request_id="r", prompt_ids=[1], sampling=short)
        assert len(engine.submit(request).result(30).sampled) == 2
    engine.shutdown()


def test_an_engine_that_hangs_while_requests_are_pending_is_ended() -> None:
    engine = opened()
    wait_at_most(engine, 0.3)  # the reader looks at it when the next message has come
    with pytest.raises(RolloutError, match="no device"):
        engine.wake()
    future = engine.submit(REQUEST)
    os.kill(process_of(engine).pid, signal.SIGSTOP)
    with pytest.raises(EngineLostError, match=r"has said nothing for 0\.6 s, with requests pending"):
        future.result(30)
    engine.shutdown()


def test_an_engine_whose_steps_have_ended_is_lost() -> None:
    engine = RemoteEngine(Counting)
    engine.load_weights([], 1)
    engine.open()
    with pytest.raises(RolloutError, match="the rollout engine stopped: RuntimeError: a step broke"):
        broken = GenerationRequest(request_id="x", prompt_ids=[1], sampling=SamplingParams(max_tokens=4), priority=-99)
        engine.submit(broken).result(30)
    assert "a step broke" in engine.lost
    engine.load_weights([], 2)
    assert engine.num_restarts == 1
    engine.shutdown()


def test_errors_come_back_by_name() -> None:
    with pytest.raises(ValueError, match="float9"):
        RemoteEngine(refused)  # type: ignore[arg-type]
    engine = opened()
    with pytest.raises(RolloutError, match="OSError: no device"):
        engine.wake()
    engine.shutdown()
    assert process_of(engine).exitcode == 0


def test_a_process_that_does_not_answer_is_ended() -> None:
    engine = opened(timeout_s=30.0)
    wait_at_most(engine, 0.2)
    with pytest.raises(RolloutError, match=r"did not answer sleep\(\) within 0.2 s"):
        engine.sleep()
    engine.shutdown()
    assert process_of(engine).exitcode == -signal.SIGKILL


def test_the_process_does_not_outlive_the_one_that_started_it(tmp_path: Path) -> None:
    """Not even in the middle of a call, in which it reads nothing."""
    script = (
        "import os, time\nfrom tests.contracts.test_remote_engine import opened, process_of\n"
        "if __name__ == '__main__':\n"
        "    engine = opened(); print(process_of(engine).pid, flush=True)\n"
        "    engine._there.ask('call', 'sleep', ()); time.sleep(0.5); os.kill(os.getpid(), 9)\n"
    )
    (tmp_path / "starts.py").write_text(script)
    out = subprocess.run(
        [sys.executable, str(tmp_path / "starts.py")],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    pid, deadline = int(out.stdout), time.monotonic() + 30
    while Path(f"/proc/{pid}/stat").exists() and Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_what_others_say_in_the_midst_of_weights_is_done_after_them() -> None:
    engine = RemoteEngine(Counting)
    engine.load_weights([], 1)
    wait_at_most(engine, 20.0)
    waiting = engine.submit(REQUEST)
    with ThreadPoolExecutor() as threads:
        looking: list[Future[dict[str, Sampled]]] = []

        def stream() -> Iterator[tuple[str, Tensor]]:
            yield "a", torch.zeros(2)
            engine.abort(["r"])
            looking.append(threads.submit(engine.snapshot))
            while len(engine._there._answers) < 2:
                time.sleep(0.01)
            time.sleep(0.1)
            yield "b", torch.zeros(2)

        engine.load_weights(stream(), 2)
        assert looking[0].result() == {}
    assert waiting.result(20).finish_reason == "abort"
    engine.shutdown()


def test_adapters_alone_build_on_the_weights_of_before() -> None:
    engine = RemoteEngine(Counting)
    engine.load_weights([("a", torch.zeros(2))], 1)
    engine.load_weights([("a", torch.zeros(2))], 2, partial=True)
    assert engine.weight_version == 2
    engine.shutdown()


def test_callbacks_may_submit_abort_and_look() -> None:
    engine = RemoteEngine(Counting)
    engine.load_weights([], 1)
    engine.open()
    wait_at_most(engine, 20.0)
    found: Future[tuple[dict[str, Sampled], Future[Completion]]] = Future()

    def ended(_: Future[Completion]) -> None:
        prompt = [1] * 300_000  # more than the pipe holds
        next_one = GenerationRequest(request_id="next", prompt_ids=prompt, sampling=SamplingParams(max_tokens=2))
        future = engine.submit(next_one)
        engine.abort(["unknown"])
        found.set_result((engine.snapshot(), future))

    engine.submit(REQUEST).add_done_callback(ended)
    seen, future = found.result(20)
    assert seen.keys() <= {"next"}
    assert len(future.result(20).sampled) == 2
    engine.shutdown()


def test_what_has_ended_before_a_pause_is_known_after_it() -> None:
    engine = RemoteEngine(Counting)
    engine.load_weights([], 1)
    for i in range(20):
        engine.open()
        engine.submit(GenerationRequest(request_id=f"{i}", prompt_ids=[1], sampling=SamplingParams(max_tokens=i + 1)))
        time.sleep(0.01)
        engine.pause()
        assert engine._there._pending.keys() == engine.snapshot().keys()
    engine.shutdown()


def test_a_request_that_cannot_travel_leaves_its_id_free() -> None:
    engine = opened()
    with pytest.raises(AttributeError):  # by pickle
        engine.submit(GenerationRequest(request_id="r", prompt_ids=[1], sampling=REQUEST.sampling, session=lambda: 0))  # type: ignore[arg-type]
    engine.submit(REQUEST)
    engine.shutdown()


def test_an_engine_ends_though_its_process_has_just_died() -> None:
    engine, gate = opened(), threading.Event()
    fail = engine._there._fail

    def late(text: str) -> None:
        gate.wait(20)
        fail(text)

    engine._there._fail = late  # type: ignore[method-assign]
    process_of(engine).kill()
    connection.wait([process_of(engine).sentinel])
    threading.Timer(0.5, gate.set).start()
    engine.shutdown()


def test_a_message_that_cannot_be_read_ends_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = opened()
    future = engine.submit(REQUEST)
    monkeypatch.setattr("verl_like.rollout.wire_errors._KNOWN", {"OSError": None})
    with pytest.raises(RolloutError, match="cannot be read"):
        engine.wake()
    with pytest.raises(RolloutError, match="cannot be read"):
        future.result(20)
    engine.shutdown()
