"""In which order vLLM's weights and cache come back, with vLLM itself replaced by a llm."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from verl_like.plugins.vllm import compat
from verl_like.plugins.vllm.engine import VLLMRolloutEngine, _Running
from verl_like.rollout.rollout_engine import GenerationRequest, SamplingParams, UnloadedError
from verl_like.rollout.step_loop import StepLoop


class Recorder:
    def __init__(self) -> None:
        self.events: list[str] = []
        self.level = 0
        core = SimpleNamespace(batch_queue=[])
        self.llm_engine = SimpleNamespace(engine_core=SimpleNamespace(engine_core=core), step=self.step)

    def step(self) -> None:
        self.llm_engine.engine_core.engine_core.batch_queue.pop()
        self.events.append("step")

    def sleep(self, level: int, mode: str = "abort") -> None:
        self.events += ["sleep"] if mode == "keep" else [mode, "sleep"]
        self.level = level

    def wake_up(self, tags: list[str]) -> None:
        self.events += tags


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> VLLMRolloutEngine:
    made = VLLMRolloutEngine.__new__(VLLMRolloutEngine)
    made._llm, made._model = Recorder(), torch.nn.Linear(1, 1)
    made._sleep_mode, made._asleep, made._version = True, set(), None
    made.keeps_adapters, made._running = False, {}
    made._loop = StepLoop(made, device=torch.device("cpu"))
    monkeypatch.setattr(compat, "reload", lambda llm, stream: llm.events.append("reload"))
    monkeypatch.setattr(compat, "drop_caches", lambda llm: None)
    monkeypatch.setattr(compat, "stop", lambda llm: llm.events.append("stop"))
    return made


@pytest.fixture
def llm(engine: VLLMRolloutEngine) -> Recorder:
    """What the engine takes for vLLM."""
    return engine._llm  # pyright: ignore[reportReturnType]


def test_a_load_wakes_the_cache_only_after_the_weights_are_there(engine: VLLMRolloutEngine, llm: Recorder) -> None:
    engine.sleep()
    engine.load_weights([], version=1)
    engine.wake()  # nothing is left to wake
    assert llm.events == ["sleep", "weights", "reload", "kv_cache"] and llm.level == 1
    engine.shutdown()


def test_weights_that_are_thrown_away_must_come_again(engine: VLLMRolloutEngine, llm: Recorder) -> None:
    engine.load_weights([], version=1)
    engine.sleep(discard=True)
    assert llm.level == 2 and engine.held is None
    with pytest.raises(UnloadedError):
        engine.open()
    assert llm.events == ["reload", "sleep"], "nothing comes back before it can be filled"
    engine.load_weights([], version=1)
    assert llm.events[2:] == ["weights", "reload", "kv_cache"] and engine.weight_version == 1
    engine.shutdown()


def test_nothing_is_woken_twice_after_a_failed_load(
    engine: VLLMRolloutEngine, llm: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(llm: Any, stream: Any) -> None:
        raise RuntimeError("planted")

    engine.sleep()
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="planted"):
        patch.setattr(compat, "reload", fail)
        engine.load_weights([], version=1)
    assert engine.weight_version is None
    engine.load_weights([], version=2)
    assert llm.events == ["sleep", "weights", "reload", "kv_cache"]
    engine.shutdown()


def test_a_step_launched_ahead_is_taken_in_before_sleep_and_load(engine: VLLMRolloutEngine, llm: Recorder) -> None:
    queue = llm.llm_engine.engine_core.engine_core.batch_queue
    queue.append("in flight")
    engine.sleep()
    assert llm.events == ["step", "sleep"]
    queue.append("in flight")
    engine.load_weights([], version=1)
    assert llm.events[2:] == ["step", "weights", "reload", "kv_cache"]
    engine.shutdown()


def test_sleep_keeps_requests_that_are_under_way(engine: VLLMRolloutEngine, llm: Recorder) -> None:
    request = GenerationRequest(request_id="r", prompt_ids=[1], sampling=SamplingParams(max_tokens=2))
    engine._running["r"] = _Running(request, [(0, 1)], "r")
    engine.sleep()
    assert llm.events == ["sleep"]
    engine.shutdown()


def test_a_sleeping_engine_is_woken_before_its_end(engine: VLLMRolloutEngine, llm: Recorder) -> None:
    engine.sleep()
    engine.shutdown()
    assert llm.events == ["sleep", "weights", "kv_cache", "stop"]
    assert engine._llm is None and engine._model is None  # both hold the weights


def test_an_engine_that_cannot_wake_ends_all_the_same(
    engine: VLLMRolloutEngine, llm: Recorder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:

    def fail(tags: list[str]) -> None:
        raise RuntimeError("CUDA Error: out of memory")

    engine.sleep()
    monkeypatch.setattr(llm, "wake_up", fail)
    engine.shutdown()
    assert llm.events == ["sleep", "stop"]
    assert "out of memory" in caplog.text
