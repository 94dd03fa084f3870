from __future__ import annotations

import random

import numpy as np
import torch

from verl_like.rollout.base import preserve_rng


def _draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_states_come_back_also_after_an_error() -> None:
    torch.manual_seed(3), np.random.seed(3), random.seed(3)
    expected = _draw()
    torch.manual_seed(3), np.random.seed(3), random.seed(3)
    try:
        with preserve_rng():
            torch.manual_seed(9), np.random.seed(9), random.seed(9)
            _draw()
            raise KeyError
    except KeyError:
        pass
    assert _draw() == expected
