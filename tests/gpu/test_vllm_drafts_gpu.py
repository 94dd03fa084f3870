"""Guesses of ours in vLLM's speculative path on CUDA: tokens keep the model's distribution."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.contracts import test_speculation as speculation
from tests.unit.rollout.tiny import build, single_process, state
from verl_like.parallel.dist import shutdown_distributed
from verl_like.rollout.base import RolloutEngine

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
proposer = speculation.proposer


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RolloutEngine]:
    pytest.importorskip("vllm")
    settings: dict[str, Any] = {"dtype": "float32", "gpu_memory_utilization": 0.2, "speculative": speculation.OURS}
    made = build("vllm", tmp_path_factory.mktemp("model"), single_process("cuda"), **settings)
    try:
        made.load_weights(iter(state(speculation.model()).items()), 1)
        yield made
    finally:
        made.shutdown()
        shutdown_distributed()


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0}, {"top_p": 0.7}, {"top_k": 5}], ids=str)
def test_no_response_of_the_last_epoch_is_replayed(
    engine: RolloutEngine, proposer: Any, sampling: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speculation, "ATOL", 1e-3)
    speculation.test_no_response_of_the_last_epoch_is_replayed(engine, proposer, sampling)
