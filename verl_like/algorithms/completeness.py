"""Values that the configuration reads of each row, beside its score: a row that lacks one has failed, by its name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from verl_like.algorithms.sample_weights import difficulty
from verl_like.batch import PromptRow, RewardFailure, Scores, usable_number
from verl_like.config import ActorConfig, AlgorithmConfig, RewardModelConfig

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
    """The scores, where rows that lack a value have failed (bad_value).

    A value of the reward function: the row scores reward_model.failure_penalty, if there is one. A value of the data
    set: the row is left out in any case. Without a section nothing is known to be read by it.
    """
    wanted = _of_reward_function(algorithm, reward_model)
    score_B, failures = scores.score_B.clone(), list(scores.failures)
    for i, (row, extras) in enumerate(zip(rows, scores.extras, strict=True)):
        penalty = None
        what = _lacking_in_data(row, algorithm, actor)
        if not what and failures[i] is None:
            what = next((text for name, key in wanted.items() if (text := _lacking(extras, name, key))), "")
            penalty = reward_model.failure_penalty if reward_model else None
        if what and bool(scores.valid_B[i]):
            failures[i] = RewardFailure(row=i, data_source=row.data_source, kind="bad_value", message=what)
            score_B[i] = torch.nan if penalty is None else penalty
    return scores.replace(score_B=score_B, valid_B=scores.valid_B & ~score_B.isnan(), failures=failures)


def _of_reward_function(algorithm: AlgorithmConfig, reward_model: RewardModelConfig | None) -> dict[str, str]:
    """Name of each value that it must return -> the key that names it."""
    wanted = dict.fromkeys(component_names(algorithm), "algorithm.gdpo_reward_keys")
    rules = algorithm.filter_groups
    if rules.enable and rules.metric not in (None, "score", *SHAPED_REWARDS):
        wanted[rules.metric] = "algorithm.filter_groups.metric"
    overlong = reward_model.overlong_buffer if reward_model else None
    if overlong is not None and overlong.enable and overlong.only_key is not None:
        wanted[overlong.only_key] = "reward_model.overlong_buffer.only_key"
    return wanted


def _lacking(extras: Mapping[str, Any], name: str, key: str) -> str:
    if name not in extras:
        found = ", ".join(sorted(extras)) or "a score alone"
        what = f"the reward function returned no {name!r}; it returned {found}"
        return f"{key}={name}: {what}. Name one of these, or return it"
    return "" if usable_number(extras[name]) is not None else f"{key}={name}: {extras[name]!r:.200} is no finite number"


def _lacking_in_data(row: PromptRow, algorithm: AlgorithmConfig, actor: ActorConfig | None) -> str:
    try:
        if algorithm.agent_reward_norm.method != "identity":
            column_value(row, algorithm.agent_reward_norm.grouping)
        if actor is not None and actor.sample_weight.difficulty:
            difficulty(row, actor.sample_weight.difficulty_key)
    except ValueError as error:
        return str(error)
    return ""


def component_names(algorithm: AlgorithmConfig) -> list[str]:
    """The rewards that gdpo compares besides the score. Other estimators need none."""
    keys = algorithm.gdpo_reward_keys if algorithm.adv_estimator == "gdpo" else []
    return [key for key in keys if key != "score"]


def extra_numbers(scores: Scores, name: str) -> Tensor:
    """The number that the reward function returned under `name` for each row: float64 [B]; NaN where it is none. A row
    that failed, and has a score all the same (reward_model.failure_penalty), has that here too."""
    numbers = [usable_number(extras.get(name)) for extras in scores.extras]
    stand_ins = [
        torch.nan if failure is None else score
        for failure, score in zip(scores.failures, scores.score_B.tolist(), strict=True)
    ]
    pairs = zip(numbers, stand_ins, strict=True)
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
