"""Values that the configuration reads of each row, beside its score: a row that lacks one has failed, by its name."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from verl_like.batch import PromptRow, RewardFailure, Scores, usable_number
from verl_like.config import ActorConfig, AlgorithmConfig, RewardModelConfig

SHAPED_REWARDS = ("seq_reward", "seq_final_reward")
"""Metrics that algorithm.filter_groups.metric may name, and no reward function returns."""
NOT_IN_EXTRA_INFO = ("state", "batch", "inductive", "data_source", "ability", "index")
"""Values of algorithm.agent_reward_norm.grouping, besides columns of extra_info."""
_GROUPING = "algorithm.agent_reward_norm.grouping"


def complete(
    scores: Scores,
    rows: Sequence[PromptRow],
    algorithm: AlgorithmConfig,
    *,
    reward_model: RewardModelConfig | None = None,
    actor: ActorConfig | None = None,
) -> Scores:
    """Mark rows that lack a value which the configuration reads as failed (bad_value), and return the scores.

    A row that lacks a value of the reward function scores reward_model.failure_penalty, if there is one. A row that
    lacks a value of the data set is left out in any case.

    Args:
        scores: scores of the rows, [B].
        rows: the data set's rows that the responses answer, one for each score.
        algorithm: names the rewards that gdpo compares, and the columns that rewards are grouped by.
        reward_model: names the values of the reward function; None means that none is read.
        actor: names the value of the data set that weighs rows; None means that none is read.
    """
    returned, given = of_reward_function(algorithm, reward_model), _of_data(algorithm, actor)
    penalty = reward_model and reward_model.failure_penalty
    score_B, valid_B, failures = scores.score_B.clone(), scores.valid_B.clone(), list(scores.failures)
    for i in valid_B.nonzero().flatten().tolist():
        what = _lacking(rows[i].extra_info, given, "the row has")
        lost = what or penalty is None
        if not what and failures[i] is None:
            what = _lacking(scores.extras[i], returned, "the reward function returned")
        if what:
            failures[i] = RewardFailure(row=i, data_source=rows[i].data_source, kind="bad_value", message=what)
            score_B[i], valid_B[i] = math.nan if lost else penalty, not lost
    return scores.replace(score_B=score_B, valid_B=valid_B, failures=failures)


def of_reward_function(algorithm: AlgorithmConfig, reward_model: RewardModelConfig | None) -> dict[str, str]:
    """Map the name of each number that the reward function must return to the key that names it."""
    wanted = dict.fromkeys(component_names(algorithm), "algorithm.gdpo_reward_keys")
    if (rules := algorithm.filter_groups).enable and rules.metric not in (None, "score", *SHAPED_REWARDS):
        wanted[rules.metric] = "algorithm.filter_groups.metric"
    overlong = reward_model and reward_model.overlong_buffer
    if overlong and overlong.enable and overlong.only_key is not None:
        wanted[overlong.only_key] = "reward_model.overlong_buffer.only_key"
    return wanted


def _of_data(algorithm: AlgorithmConfig, actor: ActorConfig | None) -> dict[str, str]:
    """Map the name of each value that a row's extra_info must hold to the key that names it."""
    wanted, norm = {}, algorithm.agent_reward_norm
    if norm.method != "identity" and norm.grouping not in NOT_IN_EXTRA_INFO:
        wanted[norm.grouping] = _GROUPING
    if actor is not None and actor.sample_weight.difficulty:
        wanted[actor.sample_weight.difficulty_key] = "actor_rollout_ref.actor.sample_weight.difficulty_key"
    return wanted


def _lacking(values: Mapping[str, Any], wanted: Mapping[str, str], source: str) -> str:
    for name, key in wanted.items():
        if name not in values:
            return f"{key}={name}: {source} {', '.join(sorted(values)) or 'a score alone'}, and no {name!r}"
        if key != _GROUPING and usable_number(values[name]) is None:
            return f"{key}={name}: {source} {values[name]!r:.200}, which is no finite number"
    return ""


def component_names(algorithm: AlgorithmConfig) -> list[str]:
    """Names of the rewards that gdpo compares besides the score; empty for other estimators."""
    read = "gdpo_reward_keys" in algorithm.estimator.reads
    return [key for key in algorithm.gdpo_reward_keys if read and key != "score"]


def extra_numbers(scores: Scores, name: str) -> Tensor:
    """Number that the reward function returned under `name` for each row: float64 [B]; NaN where it is none.

    A row that failed, and has a score all the same (reward_model.failure_penalty), has that score here too.
    """
    numbers = [usable_number(extras.get(name)) for extras in scores.extras]
    failed = zip(numbers, scores.failures, scores.score_B.tolist(), strict=True)
    return torch.tensor([(s if f else math.nan) if n is None else n for n, f, s in failed], dtype=torch.float64)
