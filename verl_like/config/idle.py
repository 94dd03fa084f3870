"""Rows of the tables that say which settings can have no effect in a run."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from verl_like.config.enums import ADV_ESTIMATORS
from verl_like.config.ppo import PPOConfig
from verl_like.config.schema import get_value


@dataclass(frozen=True, slots=True)
class Idle:
    """Keys (or sections ending in ".") that can have no effect while the condition holds, and why."""

    keys: tuple[str, ...]
    when: Callable[[PPOConfig], bool]
    why: str


# What is said of a key's value -> whether that is so; other words are names of a value
_STATES: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("false", "empty", "0"), lambda value: not value),
    **dict.fromkeys(("not set", "null"), lambda value: value is None),
    "set": lambda value: value is not None,
    "true": bool,
}


def idle_while(key: str, state: str, *keys: str) -> Idle:
    """`keys` can have no effect while "KEY is STATE": false, empty, 0, true, not set, null, set, a name, or not a
    name. What stands behind a colon explains it."""
    word = state.partition(":")[0]
    name = word.removeprefix("not ")
    holds = _STATES.get(word) or (lambda value: (str(value) == name) == (name == word))
    return Idle(keys, lambda config: holds(get_value(config, key)), f"{key} is {state}")


def other_estimator(config: PPOConfig, *estimators: str) -> bool:
    """Whether the estimator is another built-in one; what one of the user's own reads is not known."""
    return config.algorithm.adv_estimator in ADV_ESTIMATORS and config.algorithm.adv_estimator not in estimators
