"""Several rewards for one row: which ones, with which weights, and what they come to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from verl_like.rewards.graders import GRADERS, is_grader
from verl_like.rewards.reward_call import RewardOutcome
from verl_like.user_code import FORMS

CUSTOM, JUDGE = "custom", "judge"


@dataclass(frozen=True, slots=True)
class Part:
    """One of a row's rewards: a built-in grader, "custom" (custom_reward_function) or "judge"."""

    name: str
    weight: float = 1.0


class Weights:
    """Weights of reward_model.weights: {data_source or pattern: {part: weight}}.

    Raises ValueError for what cannot be graded so.
    """

    def __init__(self, table: Mapping[str, Any], *, has_custom: bool, has_judge: bool) -> None:
        self._table = {
            source: _parts(source, parts, has_custom=has_custom, has_judge=has_judge) for source, parts in table.items()
        }

    def parts_of(self, data_source: str) -> tuple[Part, ...]:
        """The parts of a row, or () if the table does not name its source."""
        if data_source in self._table:
            return self._table[data_source]
        return next((parts for pattern, parts in self._table.items() if fnmatchcase(data_source, pattern)), ())

    def sources(self) -> list[str]:
        """The data sources and patterns that the table names."""
        return list(self._table)

    def names(self) -> set[str]:
        """The parts that the table names."""
        return {part.name for parts in self._table.values() for part in parts}


def _parts(source: str, parts: Any, *, has_custom: bool, has_judge: bool) -> tuple[Part, ...]:
    key = f"reward_model.weights.{source}"
    if not isinstance(parts, Mapping) or not parts:
        raise ValueError(f"{key}={parts!r}: write {{part: weight, ...}}, such as {{gsm8k: 1.0, judge: 0.5}}")
    for name, weight in parts.items():
        if isinstance(weight, bool) or not isinstance(weight, int | float):
            raise ValueError(f"{key}.{name}={weight!r}: a weight is a number")
        if name == CUSTOM and not has_custom:
            raise ValueError(f"{key}.{name}: custom_reward_function.path is not set")
        if name == JUDGE and not has_judge:
            raise ValueError(
                f"{key}.{name}: reward_model.judge.url is not set, and there is no generative reward model"
            )
        if name not in (CUSTOM, JUDGE) and not is_grader(name):
            known = ", ".join((CUSTOM, JUDGE, *GRADERS))
            raise ValueError(f"{key}.{name}: there is no such part; choose one of {known}, or your own: {FORMS}")
    return tuple(Part(name, float(weight)) for name, weight in parts.items())


def combine(parts: Sequence[Part], outcomes: Sequence[RewardOutcome]) -> RewardOutcome:
    """The weighted sum; what failed in one part has failed as a whole. Values of the first part keep their names."""
    seconds = max(outcome.seconds for outcome in outcomes)
    for part, outcome in zip(parts, outcomes, strict=True):
        if outcome.score is None:
            message = outcome.message if len(parts) == 1 else f"{part.name}: {outcome.message}"
            return RewardOutcome(kind=outcome.kind, message=message, seconds=seconds, lost=outcome.lost)
    score = sum(part.weight * (outcome.score or 0.0) for part, outcome in zip(parts, outcomes, strict=True))
    extras = dict(outcomes[0].extras)
    if len(parts) > 1:
        for part, outcome in zip(parts, outcomes, strict=True):
            extras[f"part_{part.name}"] = outcome.score
    return RewardOutcome(score=score, extras=extras, seconds=seconds)
