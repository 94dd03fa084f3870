"""verl.trainer.ppo.core_algos: the decorator under which advantage estimators of users' own are known."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any

from verl_like.algorithms.advantages import register_advantage


def register_adv_est(name_or_enum: str | Enum) -> Callable[[Any], Any]:
    """Register an estimator that takes verl's arguments (verl_agents/estimators.py)."""
    return register_advantage(name_or_enum.value if isinstance(name_or_enum, Enum) else name_or_enum)
