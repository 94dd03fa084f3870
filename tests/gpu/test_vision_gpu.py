"""Images and videos on CUDA: log-probs of packed rows against transformers' forward on the CPU, and gradients of both
towers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.unit.models import tiny_vision as tiny
from tests.unit.models.test_vision import Case, log_probs
from verl_like.models import packing

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
