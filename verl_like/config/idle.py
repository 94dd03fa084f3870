"""A row of the tables that say which settings can have no effect in a run."""

from collections.abc import Callable
from dataclasses import dataclass

from verl_like.config.enums import ADV_ESTIMATORS
from verl_like.config.ppo import PPOConfig


@dataclass(frozen=True, slots=True)
class Idle:
    """Keys (or sections ending in ".") that can have no effect while the condition holds, and why."""

    keys: tuple[str, ...]
    when: Callable[[PPOConfig], bool]
    why: str


def other_estimator(config: PPOConfig, *estimators: str) -> bool:
    """Whether the estimator is another built-in one; what one of the user's own reads is not known."""
    return config.algorithm.adv_estimator in ADV_ESTIMATORS and config.algorithm.adv_estimator not in estimators
