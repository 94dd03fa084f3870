"""Engines whose cache holds a fraction of what runs: requests are thrown out and computed again, which nobody sees."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.contracts.test_rollout_engine import ENDLESS, MODEL, begun, gap, requests
from tests.unit.rollout.tiny import build, log_probs, single_process, state, tiny_model
from verl_like.config.rollout import EngineKwargsConfig
from verl_like.parallel.dist import shutdown_distributed
from verl_like.rollout.base import RolloutEngine

pytestmark = pytest.mark.engines
CACHES: dict[str, dict[str, Any]] = {  # of about 300 tokens, where 24 responses of 100 are asked for
    "vllm": {"vllm": {"block_size": 32, "num_gpu_blocks_override": 12}},
    "sglang": {"sglang": {"max_total_tokens": 300}},
}


@pytest.mark.parametrize("name", ["vllm", pytest.param("sglang", marks=pytest.mark.sglang)])
def test_log_probs_and_versions_of_requests_that_lost_their_cache(name: str, tmp_path: Path) -> None:
    engine = build(name, tmp_path, single_process(), engine_kwargs=EngineKwargsConfig(**CACHES[name]))
    try:
        engine.load_weights(iter(state(MODEL).items()), 1)
        thrown_out = count_preemptions(engine) if name == "vllm" else [1]  # the other is in another process
        asked = requests(24, ENDLESS)
        done = engine.generate(asked)
        assert thrown_out
        assert max(gap(r, c) for r, c in zip(asked, done, strict=True)) < 1e-5
        assert {v for c in done for v in c.sampled.weight_versions.tolist()} == {1}
        under_other_weights(engine)
    finally:
        engine.shutdown()
        shutdown_distributed()


def count_preemptions(engine: RolloutEngine) -> list[str]:
    """Ids of requests that vLLM has thrown out, as it does so."""
    scheduler = engine._llm.llm_engine.engine_core.engine_core.scheduler  # type: ignore[attr-defined]
    preempt, found = scheduler._preempt_request, list[str]()

    def noted(request: Any, *arguments: Any, **options: Any) -> None:
        found.append(request.request_id)
        preempt(request, *arguments, **options)

    scheduler._preempt_request = noted
    return found


def under_other_weights(engine: RolloutEngine) -> None:
    """Weights change while some run, some were thrown out, and some wait."""
    other, asked = tiny_model(seed=9), requests(24, ENDLESS)
    engine.open()
    futures = [engine.submit(r) for r in asked]
    begun(engine, "r0")
    time.sleep(0.05)
    engine.pause()
    kept = engine.snapshot()
    assert any(0 < len(sampled) < 100 for sampled in kept.values())
    engine.load_weights(iter(state(other).items()), 2)
    engine.open()
    for request, future in zip(asked, futures, strict=True):
        done = future.result(120)
        versions = done.sampled.weight_versions.tolist()
        first = len(kept[request.request_id]) if request.request_id in kept else 100  # a fast engine was done with it
        assert versions == [1] * first + [2] * (100 - first)
        for model, part in ((MODEL, slice(0, first)), (other, slice(first, 100))):
            expected = log_probs(model, request.prompt_ids + done.token_ids)[len(request.prompt_ids) - 1 :]
            assert torch.allclose(torch.tensor(done.log_probs)[part], expected[part], atol=1e-5)
    engine.pause()
