"""An engine in another process when that process fails; what it does in good order is in test_rollout_engine.py."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch

from verl_like.rollout.remote import RemoteEngine
from verl_like.rollout.rollout_engine import Completion, GenerationRequest, RolloutError, SamplingParams

REQUEST = GenerationRequest(request_id="r", prompt_ids=[1], sampling=SamplingParams(max_tokens=4))


class Engine:
    """What RemoteEngine asks of one, without a model: no request ever ends."""

    dtype, tokenizer_size, max_model_len, keeps_adapters = torch.float32, 10, 20, False

    def load_weights(self, stream: object, version: int, *, partial: bool) -> None:
        assert list(stream) == []  # type: ignore[call-overload]

    def submit(self, request: GenerationRequest) -> Future[Completion]:
        return Future()

    def unload(self) -> None: ...

    def open(self) -> None: ...

    def sleep(self) -> None:
        time.sleep(100)

    def wake(self) -> None:
        raise OSError("no device")

    def shutdown(self) -> None: ...


def refused() -> Engine:
    raise ValueError("rollout.dtype=float9 is none")


def opened(**options: float) -> RemoteEngine:
    engine = RemoteEngine(Engine, **options)  # type: ignore[arg-type]
    engine.load_weights([], 1)
    engine.open()
    return engine


def test_a_killed_process_fails_what_is_pending_and_what_comes() -> None:
    engine = opened()
    future = engine.submit(REQUEST)
    with pytest.raises(ValueError, match="'r' is already in use"):
        engine.submit(REQUEST)
    os.kill(engine._process.pid, signal.SIGKILL)
    with pytest.raises(RolloutError, match=r"has ended \(exit code -9\)"):
        future.result(30)
    with pytest.raises(RolloutError, match="has ended"):
        engine.submit(REQUEST)
    engine.shutdown()


def test_errors_come_back_by_name() -> None:
    with pytest.raises(ValueError, match="float9"):
        RemoteEngine(refused)  # type: ignore[arg-type]
    engine = opened()
    with pytest.raises(RolloutError, match="OSError: no device"):
        engine.wake()
    engine.shutdown()
    assert engine._process.exitcode == 0


def test_a_process_that_does_not_answer_is_ended() -> None:
    engine = opened(timeout_s=30.0)
    engine._timeout_s = 0.2
    with pytest.raises(RolloutError, match=r"did not answer sleep\(\) within 0.2 s"):
        engine.sleep()
    engine.shutdown()
    assert engine._process.exitcode == -signal.SIGKILL


def test_the_process_does_not_outlive_the_one_that_started_it(tmp_path: Path) -> None:
    script = (
        "import os\nfrom tests.contracts.test_remote_engine import opened\n"
        "if __name__ == '__main__':\n"
        "    engine = opened(); print(engine._process.pid, flush=True); os.kill(os.getpid(), 9)\n"
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
