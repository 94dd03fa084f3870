"""Asynchronous training as verl's program fully_async_main spells it: samples of a run, mini-batches between two syncs.

There the trainer takes actor.ppo_mini_batch_size * async_training.require_batches prompts at a time and sends its
weights every async_training.trigger_parameter_sync_step times; here that is one step. Standard library only.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from verl_like.config.errors import raise_if_any
from verl_like.config.ppo import PPOConfig
from verl_like.config.schema import get_value

_TOTAL = "rollout.total_rollout_steps"
# what one round takes, with verl's own defaults
_TIMES = {"async_training.require_batches": 1, "async_training.trigger_parameter_sync_step": 4}
_MINI, _BATCH, _STEPS = (
    "actor_rollout_ref.actor.ppo_mini_batch_size",
    "data.train_batch_size",
    "trainer.total_training_steps",
)
# what that program's own file says; the policy's ratio is taken to the sampler
_PROGRAM = {
    "trainer.mode": "separate_async",
    "actor_rollout_ref.hybrid_engine": False,
    "algorithm.rollout_correction.bypass_mode": True,
}


def rounds_of_verl(given: dict[str, object], size: Callable[[object], int]) -> tuple[dict[str, object], str]:
    """Find what keys of fully_async_main mean here.

    Args:
        given: the user's settings, under today's names where they have one.
        size: a value as a whole number; 0 for what is none.

    Returns the keys to set, which the user has not, or as nothing (data.train_batch_size=0), and a line that says so;
    both empty where no such key is given. Raises ConfigError for one that is no number above 0.
    """
    asked = {key: size(given[key]) for key in (_TOTAL, *_TIMES) if given.get(key) is not None}
    raise_if_any([f"{key}={given[key]}: give a whole number above 0" for key, value in asked.items() if value < 1])
    if not asked:
        return {}, ""
    found: dict[str, object] = {}
    batch, beside = size(given.get(_BATCH, 0)), _not_of_that_program(given, size)
    if not beside:
        found = {key: value for key, value in _PROGRAM.items() if given.get(key) is None}
        rounds = (asked.get(key, default) for key, default in _TIMES.items())
        batch = found[_BATCH] = size(given.get(_MINI, get_value(PPOConfig(), _MINI))) * math.prod(rounds)
    batch = batch or size(get_value(PPOConfig(), _BATCH))
    if _TOTAL in asked and given.get(_STEPS) is None:
        found[_STEPS] = max(1, asked[_TOTAL] // batch)
    names = ", ".join(f"{key}={given[key]}" for key in asked) + beside
    means = ", ".join(f"{key}={value}" for key, value in found.items()) or "nothing"
    return found, f"{names}: a step trains all mini-batches between two syncs; this sets {means}"


def _not_of_that_program(given: dict[str, object], size: Callable[[object], int]) -> str:
    """Name the setting with which verl's program would not run: a step's prompts, or engines beside the trainer."""
    for key, value in given.items():
        if (
            (key == _BATCH and size(value) > 0)
            or (key == "trainer.mode" and value not in (None, _PROGRAM[key]))
            or (key == "actor_rollout_ref.hybrid_engine" and str(value).lower() == "true")
        ):
            return f" beside {key}={value}"
    return ""


def is_of_rounds(key: str) -> bool:
    """Tell whether a key is one of those that `rounds_of_verl` reads and no other part knows."""
    return key == _TOTAL or key in _TIMES
