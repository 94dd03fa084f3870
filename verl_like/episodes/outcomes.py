"""Outcomes of episodes, and what becomes of each by its policy (`rollout.outcomes.*`). Pure.

    graded   solved, failed, truncated                                             train | mask | drop
    lost     timed_out, tool_error, environment_error, grader_error, aborted       drop | retry

The reward of a lost one is not known, and so is never a number.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from verl_like.batch import Scores, usable_number
from verl_like.config import OutcomesConfig
from verl_like.config.errors import RunStopped
from verl_like.config.outcomes import GRADED, LOST
from verl_like.episodes.episode import Episode, EpisodeFailure

logger = logging.getLogger(__name__)
_SHOWN_FAILURES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Policies:
    """Policies for episodes, by outcome; see OutcomesConfig.

    max_lost: share of all sampled episodes that may be lost.
    """

    of: Mapping[str, str] = field(default_factory=dict)
    solved_above: float = 0.0
    max_retries: int = 0
    episode_timeout: float | None = None
    max_lost: float = 1.0

    @classmethod
    def from_config(cls, config: OutcomesConfig, *, max_failure_fraction: float) -> Policies:
        graded = {"solved": config.solved, "failed": config.failed, "truncated": config.truncated}
        lost = {"timed_out": config.timed_out, "tool_error": config.tool_error, "aborted": config.aborted}
        lost |= {"environment_error": config.environment_error, "grader_error": config.grader_error}
        return cls(
            of=graded | lost,
            solved_above=config.solved_above,
            max_retries=config.max_retries,
            episode_timeout=config.episode_timeout,
            max_lost=max_failure_fraction if config.max_lost_fraction is None else config.max_lost_fraction,
        )

    def retries(self, outcome: str) -> bool:
        """Return True where the prompt is to be sampled again after this outcome."""
        return self.of.get(outcome) == "retry"

    def outcome(self, episode: Episode, *, score: float | None, extras: Mapping[str, Any]) -> str:
        """Name the outcome of one episode. A grader's `acc` says more than a shaped score.

        score: None where there is none.
        """
        if episode.failure is not None:
            return episode.failure.outcome
        if score is None:
            return "grader_error"
        correct = usable_number(extras.get("acc"))
        value = score if correct is None else correct
        if value > self.solved_above:
            return "solved"
        cut_off = episode.turns[-1].finish_reason == "length" or episode.counts.get("out_of_turns", 0) > 0
        return "truncated" if cut_off else "failed"

    def outcomes(self, episodes: Sequence[Episode], scores: Scores) -> list[str]:
        """Name the outcome of each of these episodes, by their scores."""
        values, valid = scores.score_B.tolist(), scores.valid_B.tolist()
        known = [value if there else None for value, there in zip(values, valid, strict=True)]
        return [
            self.outcome(episode, score=score, extras=extras)
            for episode, score, extras in zip(episodes, known, scores.extras, strict=True)
        ]

    def apply(self, episodes: Sequence[Episode], scores: Scores, *, keep: bool = True) -> tuple[Scores, list[str]]:
        """The scores of these episodes after their policies, and their outcomes.

        Masked ones keep their score and leave trained_B; dropped ones have none any more (valid_B). keep: where no
        score would be left, those to be dropped are masked: a step that teaches nothing is no reason to end a run.
        """
        outcomes = self.outcomes(episodes, scores)
        of = [self.of.get(outcome, "train") if outcome in GRADED else "lost" for outcome in outcomes]
        dropped_B = torch.tensor([policy == "drop" for policy in of], dtype=torch.bool)
        unmasked_B = torch.tensor([policy != "mask" for policy in of], dtype=torch.bool)
        if keep and dropped_B.any() and not (scores.valid_B & ~dropped_B).any():
            logger.warning("rollout.outcomes.* drops every graded episode of this batch: nothing is learnt from it")
            dropped_B, unmasked_B = torch.zeros_like(dropped_B), unmasked_B & ~dropped_B
        if dropped_B.any():
            scores = scores.replace(
                score_B=scores.score_B.masked_fill(dropped_B, math.nan), valid_B=scores.valid_B & ~dropped_B
            )
        if not unmasked_B.all():
            scores = scores.replace(trained_B=trained_too(scores, unmasked_B))
        return scores, outcomes

    def require_few_lost(
        self,
        episodes: Sequence[Episode],
        outcomes: Sequence[str],
        retried: Sequence[str],
        in_races: Sequence[EpisodeFailure] = (),
    ) -> None:
        """RunStopped, with the first failures, if more than `max_lost` were lost. retried: outcomes of episodes that
        were sampled again. in_races: of those that others took the place of."""
        further = len(retried) + len(in_races)
        num_lost, total = num_lost_of(outcomes) + further, len(outcomes) + further
        if num_lost <= self.max_lost * total:
            return
        known = [failure.outcome for failure in in_races]
        kinds = Counter([*retried, *known, *(outcome for outcome in outcomes if outcome in LOST)])
        told = ", ".join(f"{count} x {kind}" for kind, count in kinds.items())
        failures = [*(episode.failure for episode in episodes if episode.failure is not None), *in_races]
        what = (
            f"{num_lost} of {total} episodes were lost ({told}; {len(retried)} of them were sampled again), more than "
            f"actor_rollout_ref.rollout.outcomes.max_lost_fraction={self.max_lost:g} (null there: "
            "reward_model.max_failure_fraction). The first:"
        )
        shown = [f"{failure.outcome}, {failure.kind}: {failure.message}" for failure in failures[:_SHOWN_FAILURES]]
        raise RunStopped("\n  ".join([what, *shown]))


def trained_too(scores: Scores, rows_B: torch.Tensor) -> torch.Tensor:
    """Return trained_B narrowed to `rows_B`: rows that were trained on so far, and are among these."""
    return rows_B if scores.trained_B is None else scores.trained_B & rows_B


def outcome_metrics(outcomes: Sequence[str], retried: Sequence[str], num_in_races: int = 0) -> dict[str, float]:
    """outcomes/<name> of a batch; outcomes/retried: lost ones that were sampled again, by their outcome too;
    outcomes/lost_fraction: of all that were sampled. num_in_races: lost ones that others took the place of."""
    counts, again, further = Counter(outcomes), Counter(retried), len(retried) + num_in_races
    return {
        **{f"outcomes/{name}": float(counts[name]) for name in (*GRADED, *LOST)},
        "outcomes/retried": float(len(retried)),
        **{f"outcomes/retried/{name}": float(count) for name, count in again.items()},
        "outcomes/lost_fraction": (num_lost_of(outcomes) + further) / max(len(outcomes) + further, 1),
    }


def num_lost_of(outcomes: Sequence[str]) -> int:
    return sum(outcome in LOST for outcome in outcomes)
