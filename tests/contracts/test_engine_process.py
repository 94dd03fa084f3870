"""`rollout.server`: vLLM in a process of its own gives what it gives in the trainer's."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.unit.rollout.tiny import build, single_process, state, tiny_model
from verl_like.parallel.dist import shutdown_distributed
from verl_like.rollout.base import RolloutEngine
from verl_like.rollout.rollout_engine import EngineLostError, GenerationRequest, SamplingParams
from verl_like.workers.remote_engine import RemoteEngine

pytestmark = pytest.mark.engines


def sampled(engine: RolloutEngine) -> list[tuple[list[int], list[float]]]:
    sampling = SamplingParams(max_tokens=20, stop_token_ids=(3,))
    asked = [GenerationRequest(request_id=f"r{i}", prompt_ids=[i + 1], sampling=sampling, seed=i) for i in range(8)]
    return [(done.token_ids, done.log_probs) for done in engine.generate(asked)]


def test_vllm_beside_the_trainer_samples_as_in_it_and_comes_back_after_its_end(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    process, weights = single_process(), state(tiny_model())
    within, beside = (build("vllm", tmp_path / name, process, server=name == "beside") for name in ("in", "beside"))
    assert isinstance(beside, RemoteEngine) and not isinstance(within, RemoteEngine)
    for engine in (within, beside):
        engine.load_weights(iter(weights.items()), 1)
    assert sampled(beside) == sampled(within)
    shapes = {name: tensor.shape for name, tensor in weights.items()}
    assert beside.weight_checksums(shapes) == within.weight_checksums(shapes)
    os.kill(beside._there._process.pid or 0, signal.SIGKILL)
    beside._there._reader.join(30)
    with pytest.raises(EngineLostError, match="exit code -9"):
        sampled(beside)
    beside.load_weights(iter(weights.items()), 2)
    assert sampled(beside) == sampled(within)
    for engine in (within, beside):
        engine.shutdown()
    shutdown_distributed()
