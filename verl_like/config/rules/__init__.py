"""Checks across sections: combinations that cannot work, and settings that can have no effect in this run."""

from collections.abc import Mapping, Sequence

from verl_like.config.errors import raise_if_any
from verl_like.config.ppo import PPOConfig
from verl_like.config.rule import all_rules, idle_lines, impossible, risky
from verl_like.config.rules import groups, losses, rewards, rollout, run, training  # noqa: F401, they register
from verl_like.config.spellings import not_available, without_effect

__all__ = ["all_rules", "check", "idle_lines", "impossible", "risky"]


def check(
    config: PPOConfig, set_keys: frozenset[str] = frozenset(), followers: Mapping[str, Sequence[str]] = {}
) -> list[str]:
    """Warnings about this configuration, one line each.

    set_keys: dotted keys that the user set; only those are warned about. followers: key -> keys that take its value.
    Raises ConfigError listing every combination that cannot work and every feature that is not built.
    """
    raise_if_any(not_available(config) + impossible(config))
    return without_effect(set_keys) + idle_lines(config, set_keys, followers) + risky(config)
