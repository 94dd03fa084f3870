"""Values that the configuration reads of each row, beside its score: a row that lacks one has failed, by its name."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from verl_like.algorithms.sample_weights import difficulty
from verl_like.batch import PromptRow, RewardFailure, Scores, usable_number
from verl_like.config import ActorConfig, AlgorithmConfig, RewardModelConfig

logger = logging.getLogger(__name__)

SHAPED_REWARDS = ("seq_reward", "seq_final_reward")
"""What algorithm.filter_groups.metric may name, and no reward function returns."""


def complete(
    scores: Scores,
    rows: Sequence[PromptRow],
    algorithm: AlgorithmConfig,
    *,
    reward_model: RewardModelConfig | None = None,
    actor: ActorConfig | None = None,
) -> Scores:
    """The scores, where rows that lack a value have failed (bad_value), which is logged.

    For want of a value of the reward function a row scores reward_model.failure_penalty, if there is one; for want of
    one of the data set it is left out in any case. Of a section that is not given nothing is known to be read.
    """
    wanted = _of_reward_function(algorithm, reward_model)
    penalty = None if reward_model is None else reward_model.failure_penalty
    score_B, valid_B, failures = scores.score_B.clone(), scores.valid_B.clone(), list(scores.failures)
    failed = []
    for i in valid_B.nonzero().flatten().tolist():
        in_data = _lacking_in_data(rows[i], algorithm, actor)
        if what := in_data or ("" if failures[i] else _lacking(scores.extras[i], wanted)):
            failures[i] = RewardFailure(row=i, data_source=rows[i].data_source, kind="bad_value", message=what)
            score_B[i] = math.nan if in_data or penalty is None else penalty
            valid_B[i] = not score_B[i].isnan()
            failed.append(i)
    if failed:
        what = f"{len(failed)} of {len(rows)} rows lack a value that is read of each, and count as failed rewards"
        logger.warning("%s: row %d (dataset index %d): %s", what, i := failed[0], rows[i].index, failures[i])
    return scores.replace(score_B=score_B, valid_B=valid_B, failures=failures)


def _of_reward_function(algorithm: AlgorithmConfig, reward_model: RewardModelConfig | None) -> dict[str, str]:
    """Name of each value that it must return -> the key that names it."""
    wanted = dict.fromkeys(component_names(algorithm), "algorithm.gdpo_reward_keys")
    if (rules := algorithm.filter_groups).enable and rules.metric not in (None, "score", *SHAPED_REWARDS):
        wanted[rules.metric] = "algorithm.filter_groups.metric"
    overlong = reward_model and reward_model.overlong_buffer
    if overlong and overlong.enable and overlong.only_key is not None:
        wanted[overlong.only_key] = "reward_model.overlong_buffer.only_key"
    return wanted


def _lacking(extras: Mapping[str, Any], wanted: Mapping[str, str]) -> str:
    for name, key in wanted.items():
        if name not in extras:
            what = (
                f"the reward function returned no {name!r}; it returned {', '.join(sorted(extras)) or 'a score alone'}"
            )
            return f"{key}={name}: {what}. Name one of these, or return it"
        if usable_number(extras[name]) is None:
            return f"{key}={name}: {extras[name]!r:.200} is no finite number"
    return ""


def _lacking_in_data(row: PromptRow, algorithm: AlgorithmConfig, actor: ActorConfig | None) -> str:
    norm = algorithm.agent_reward_norm
    try:
        if norm.method != "identity" and norm.grouping not in ("state", "batch", "inductive"):
            column_value(row, norm.grouping)
        if actor is not None and actor.sample_weight.difficulty:
            difficulty(row, actor.sample_weight.difficulty_key)
    except ValueError as error:
        return str(error)
    return ""


def component_names(algorithm: AlgorithmConfig) -> list[str]:
    """The rewards that gdpo compares besides the score. Other estimators need none."""
    return [key for key in algorithm.gdpo_reward_keys if key != "score"] if algorithm.adv_estimator == "gdpo" else []


def extra_numbers(scores: Scores, name: str) -> Tensor:
    """The number that the reward function returned under `name` for each row: float64 [B]; NaN where it is none. A row
    that failed, and has a score all the same (reward_model.failure_penalty), has that here too."""
    others = [math.nan if f is None else s for f, s in zip(scores.failures, scores.score_B.tolist(), strict=True)]
    found = [usable_number(extras.get(name)) for extras in scores.extras]
    pairs = zip(found, others, strict=True)
    return torch.tensor([other if number is None else number for number, other in pairs], dtype=torch.float64)


def column_value(row: PromptRow, column: str) -> str:
    """What algorithm.agent_reward_norm.grouping compares of a row. ValueError where it has no such column."""
    own: dict[str, Any] = {"data_source": row.data_source, "ability": row.ability, "index": row.index}
    if column not in own and column not in row.extra_info:
        raise ValueError(
            f"algorithm.agent_reward_norm.grouping={column}: dataset row {row.index} has no such extra_info column; "
            f"choose state, inductive, batch, {', '.join(own)} or one of {sorted(row.extra_info)}"
        )
    return repr(own[column] if column in own else row.extra_info[column])
