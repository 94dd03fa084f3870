"""Flat columns and their padded forms on a GPU: what row copies do on a CPU, an index does there."""

from __future__ import annotations

import pytest
import torch

from tests.unit.algorithms.builders import experience
from verl_like.flat_columns import flat_rows, on_rows, padded_rows, row_sums, take_rows

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
LENGTH_B = torch.tensor([3, 0, 5, 1])


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.bool, torch.bfloat16])
def test_there_and_back_as_on_a_cpu(side: str, dtype: torch.dtype) -> None:
    values = (torch.arange(9) % 4).to(dtype)
    padded = padded_rows(values.cuda(), LENGTH_B, 7, side, 1)  # type: ignore[arg-type]
    assert torch.equal(padded.cpu(), padded_rows(values, LENGTH_B, 7, side, 1))  # type: ignore[arg-type]
    assert torch.equal(flat_rows(padded, LENGTH_B, side).cpu(), values)  # type: ignore[arg-type]
    assert torch.equal(take_rows(values.cuda(), LENGTH_B, [2, 0]).cpu(), take_rows(values, LENGTH_B, [2, 0]))


def test_sums_and_spreads_as_on_a_cpu() -> None:
    values, on_device = torch.randn(9), LENGTH_B.cuda()
    assert torch.allclose(row_sums(values.cuda(), on_device).cpu(), row_sums(values, LENGTH_B))
    assert torch.equal(on_rows(on_device, on_device).cpu(), on_rows(LENGTH_B, LENGTH_B))


def test_a_micro_batch_has_the_forms_of_the_cpu_and_makes_each_once() -> None:
    rows = experience(3)
    there = rows.to("cuda").with_forms()
    for name in ("advantages_BR", "response_mask_BR", "old_log_probs_BR", "selected_BR"):
        assert torch.equal(getattr(there, name).cpu(), getattr(rows, name)), name
        assert getattr(there, name) is getattr(there, name)
