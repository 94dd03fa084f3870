"""The memory forecast of the cases of `verl-like bench memory`, beside what they once took."""

from __future__ import annotations

from pathlib import Path

import pytest

from verl_like.kit.bench.memory import CASES, job_of, told_of
from verl_like.kit.forecast.memory import GIB

MEASURED = {  # GiB: gen, old_log_prob, update_actor; docs/performance.md says where
    "base": (2.355, 3.064, 3.685),
    "activations kept": (2.357, 3.067, 4.751),
    "selective": (2.355, 3.064, 4.390),
    "bfloat16": (2.393, 2.820, 3.446),
    "bfloat16, kept": (2.396, 2.823, 3.979),
    "adamw_bf16": (1.791, 2.500, 3.121),
    "adamw_8bit": (1.517, 2.226, 2.847),
    "wide": (2.116, 2.745, 3.831),
    "large head": (3.111, 4.324, 5.726),
    "sleep_level=2": (2.352, 2.500, 3.122),
    "LoRA": (1.283, 2.007, 2.088),
    "two ranks": (1.464, 1.771, 1.972),
}


@pytest.mark.parametrize("name", MEASURED)
def test_the_forecast_is_what_was_measured(name: str, tmp_path: Path) -> None:
    ranks = CASES[name][1]
    told = told_of(job_of(tmp_path, name, 1024, on_cuda=False), ranks, on_cuda=False)
    for phase, gib in zip(("gen", "old_log_prob", "update_actor"), MEASURED[name], strict=True):
        assert told.total(phase) / GIB == pytest.approx(gib, rel=0.1), phase
