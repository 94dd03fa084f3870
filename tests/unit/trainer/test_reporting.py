"""Which steps keep responses, and how old the weights were that sampled."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.unit.observe import factory
from verl_like.config import TrainerConfig
from verl_like.trainer.reporting import Reporter


def reporter(first_step: int = 1, **settings: Any) -> Any:
    return SimpleNamespace(trainer=TrainerConfig(**settings), first_step=first_step, newest_version=0)


def kept_steps(own: Any) -> list[int]:
    rollouts, scores = factory.rollouts([[1]] * 4, groups=[0, 0, 1, 1]), factory.scores([0.0, 1.0, 1.0, 1.0])
    return [step for step in range(own.first_step, 22) if Reporter.rows_to_keep(own, step, rollouts, scores)]


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({"sample_freq": 10}, [1, 2, 3, 4, 5, 10, 20]),
        ({"sample_freq": 10, "first_step": 8}, [8, 10, 20]),  # a resumed run's first step is shown on the console
        ({"sample_freq": 10, "first_step": 8, "console_samples": 0}, [10, 20]),
        ({"sample_freq": -1}, [1]),
        ({"sample_freq": -1, "console_samples": 0}, []),
    ],
)
def test_the_first_steps_and_every_kth_keep_responses(settings: dict[str, Any], steps: list[int]) -> None:
    assert kept_steps(reporter(**settings)) == steps


def test_staleness_counts_from_the_newest_weights_that_ever_sampled() -> None:
    own, rollouts = reporter(), factory.rollouts([[1, 2], [3]])
    newer = rollouts.replace(weight_version_BR=torch.tensor([[3, 4], [4, 0]], dtype=torch.int32))
    assert Reporter._staleness(own, newer) == {"training/weight_staleness": 1.0}  # padding is no token
    older = rollouts.replace(weight_version_BR=torch.full((2, 2), 2, dtype=torch.int32))
    assert Reporter._staleness(own, older) == {"training/weight_staleness": 2.0}
    nothing = rollouts.replace(response_mask_BR=torch.zeros(2, 2, dtype=torch.bool))
    assert Reporter._staleness(own, nothing) == {}
