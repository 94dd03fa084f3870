"""Images and videos on CUDA, in the trainer and in the engines: log-probs against transformers' forward on the CPU,
gradients of both towers, and their weights after sleep and a sync."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.contracts.test_vision_rollout import Bench
from tests.unit.models import tiny_vision as tiny
from tests.unit.models.test_vision import Case, log_probs
from tests.unit.rollout.tiny import free_port
from verl_like.models import packing
from verl_like.parallel.dist import ProcessInfo, init_distributed, shutdown_distributed

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-3), (torch.bfloat16, 0.1)])
def test_packed_rows_as_on_a_cpu(family: str, dtype: torch.dtype, limit: float, tmp_path: Path) -> None:
    """Flash or varlen attention of the text, SDPA of the tower; pixels and places of features on the device."""
    case = Case(tmp_path, family)
    model = case.ours().to("cuda", dtype)
    wanted_T = torch.ones_like(case.rows.response_mask_T)
    inputs = packing.pack(case.rows, wanted_T, torch.device("cuda"), share_prompts=True, vision=case.vision)
    found = log_probs(model, inputs)
    with torch.no_grad():
        assert (found.detach().cpu().double() - case.expected()).abs().mean() < limit
    found.sum().backward()
    gradients = {name: parameter.grad for name, parameter in model.hf.named_parameters()}
    assert all(gradient is not None and gradient.isfinite().all() for gradient in gradients.values())
    assert any("visual" in name and gradient is not None and gradient.any() for name, gradient in gradients.items())


@pytest.fixture(scope="module")
def process() -> Iterator[ProcessInfo]:
    yield init_distributed(0, 1, 0, 1, "127.0.0.1", free_port(), "cuda")
    shutdown_distributed()


@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("name", ["hf", "vllm", "vllm-server", pytest.param("sglang", marks=pytest.mark.sglang)])
def test_engines_see_the_same_with_old_and_new_weights(
    name: str, family: str, process: ProcessInfo, tmp_path: Path
) -> None:
    """In bfloat16. Features of images that were seen before the sleep are not those of the new weights."""
    if name.startswith("vllm"):
        pytest.importorskip("vllm")
    bench = Bench(tmp_path, name, family, process, gpu_memory_utilization=0.2)
    try:
        for version in (2, 3):
            requests = [bench.request(prompt, seed) for prompt in range(4) for seed in range(4)]
            for request, completion in zip(requests, bench.engine.generate(requests), strict=True):
                gap = torch.tensor(completion.log_probs) - bench.expected(request, completion.token_ids)
                print(name, family, version, request.request_id, f"{float(gap.abs().mean()):.4f}")
                assert gap.abs().mean() < 0.02  # on a CPU 0.0015 at most
            assert bench.prove() == set()
            bench.engine.sleep()
            bench.disturb(seed=version)
            bench.load(version)
    finally:
        bench.engine.shutdown()
