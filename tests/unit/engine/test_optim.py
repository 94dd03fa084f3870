from __future__ import annotations

import math

import pytest

from verl_like.config.optim import OptimConfig
from verl_like.engine.optim import Schedule


def rates(optim: OptimConfig, total: int | None, count: int) -> list[float]:
    schedule, values = Schedule(optim, total), []
    for _ in range(count):
        values.append(schedule.rate())
        schedule.steps_done += 1
    return values


def test_constant_with_warmup() -> None:
    assert rates(OptimConfig(lr=2.0, lr_warmup_steps=4), None, 6) == [0.0, 0.5, 1.0, 1.5, 2.0, 2.0]
    assert rates(OptimConfig(lr=2.0), None, 3) == [2.0, 2.0, 2.0]


def test_warmup_ratio() -> None:
    assert rates(OptimConfig(lr=1.0, lr_warmup_steps_ratio=0.2), 10, 4) == [0.0, 0.5, 1.0, 1.0]
    assert rates(OptimConfig(lr=1.0, lr_warmup_steps=1, lr_warmup_steps_ratio=0.9), 10, 2) == [0.0, 1.0]


def test_cosine_by_hand() -> None:
    """Ten steps, two of warm-up from 0.1 to 1, then half a cosine wave from 1 down to 0.1."""
    optim = OptimConfig(lr=1.0, lr_warmup_steps=2, warmup_style="cosine", min_lr_ratio=0.1)
    values = rates(optim, 10, 12)
    assert values[:3] == pytest.approx([0.1, 0.55, 1.0])
    assert values[6] == pytest.approx(0.55)
    assert values[4] == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi / 4)) / 2)
    assert values[10] == pytest.approx(0.1)
    assert min(values) >= 0.1 - 1e-12


def test_full_cycle() -> None:
    optim = OptimConfig(lr=1.0, warmup_style="cosine", num_cycles=1.0)
    assert rates(optim, 8, 9)[4] == pytest.approx(0.0) and rates(optim, 8, 9)[8] == pytest.approx(1.0)


def test_unknown_length_is_refused() -> None:
    for optim in (OptimConfig(warmup_style="cosine"), OptimConfig(lr_warmup_steps_ratio=0.1)):
        with pytest.raises(ValueError, match="total_training_steps"):
            Schedule(optim, None)


def test_length_set_by_the_user_wins() -> None:
    assert Schedule(OptimConfig(total_training_steps=7), 99).total == 7
    assert Schedule(OptimConfig(), 99).total == 99
