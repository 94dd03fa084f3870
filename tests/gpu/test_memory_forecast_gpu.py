"""Is the memory forecast right on a GPU?"""

from __future__ import annotations

import pytest
import torch

from verl_like.kit.bench.memory import CASES, case, rows_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("name", sorted(CASES.keys() - {"two ranks"}))
def test_every_phase_is_within_15_percent(name: str) -> None:
    told, measured, _ = case(name, 16_384, None)
    rows = rows_of(name, told, measured)
    assert len(rows) == 3
    for row in rows:
        print(row.name, {key: round(value, 3) for key, value in row.figures.items()})
        assert row.figures["forecast / measured"] == pytest.approx(1, abs=0.15)
