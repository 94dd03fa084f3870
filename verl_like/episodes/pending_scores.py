"""Scores that are on their way, and what is done to them when they are there."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from verl_like.batch import Scores
from verl_like.rewards.grading import Grading


class PendingBatch:
    """Scores of one batch. `wait` returns when the graders are done, `result` computes what follows, once."""

    def __init__(self, scores: Grading | Scores) -> None:
        self._scores = scores
        self._waits: list[Grading] = [scores] if isinstance(scores, Grading) else []
        self._then: list[Callable[[Scores], Scores]] = []
        self._result: Scores | None = None

    def then(self, change: Callable[[Scores], Scores]) -> None:
        """Applied to the scores after what was given before."""
        self._then.append(change)

    def wait_for(self, grading: Grading) -> None:
        """Another one that the result needs."""
        self._waits.append(grading)

    def wait(self) -> None:
        """Return when everything has been graded."""
        for grading in self._waits:
            grading.wait()

    def result(self) -> Scores:
        """RewardError if too few rewards could be computed."""
        if self._result is None:
            scores = self._scores.result() if isinstance(self._scores, Grading) else self._scores
            for change in self._then:
                scores = change(scores)
            self._result = scores
        return self._result


def renumbered(scores: Scores) -> Scores:
    """Return the scores with failures that name their rows of this batch."""
    failures = [
        None if failure is None else dataclasses.replace(failure, row=row)
        for row, failure in enumerate(scores.failures)
    ]
    return scores.replace(failures=failures)


def of_rows(scores: Scores, episode_of_row: Sequence[int]) -> Scores:
    """Scores of episodes, given to each of their rows."""
    return renumbered(scores.select(episode_of_row))
