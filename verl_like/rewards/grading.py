"""One batch on its way through the graders: responses go in as they end, scores come out in row order."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from typing import Protocol

import torch

from verl_like.batch import PromptRow, RewardFailure, Scores
from verl_like.rewards.model_score import Answer, ModelScore, without_rule
from verl_like.rewards.protocol import RewardCall, RewardOutcome

logger = logging.getLogger(__name__)

_LOGGED_FAILURES = 3  # rows shown in full per batch
_HEAD_CHARS = 200

Submit = Callable[[Sequence[RewardCall]], list[Future[RewardOutcome]]]


class Response(Protocol):
    """What grading needs of a completion of the rollout engine."""

    @property
    def token_ids(self) -> Sequence[int]: ...


class RewardError(RuntimeError):
    """No row of a batch, or of a whole validation, could be scored."""


class Grading:
    """Scores of one batch, some of them perhaps still being computed. `RewardManager.begin` makes one.

    Call `add` for every row, in any order and from one thread, then `result`. What a row's score is does not depend on
    the order or on the time of arrival.
    """

    def __init__(
        self,
        rows: Sequence[PromptRow],
        *,
        step: int,
        decode: Callable[[Sequence[int]], str],
        grader_of: Callable[[PromptRow], str | None],
        submit: Submit,
        may_all_fail: bool = False,
        model: ModelScore | None = None,
        prompt_ids: Sequence[Sequence[int]] = (),
    ) -> None:
        self._rows, self._step, self._may_all_fail = rows, step, may_all_fail
        self._model, self._prompt_ids = model, prompt_ids
        self._rule = model is None or model.needs_rule
        self._responses: dict[int, Sequence[int]] = {}
        self._decode, self._grader_of, self._submit = decode, grader_of, submit
        self._futures: dict[int, Future[RewardOutcome]] = {}
        self._scores: Scores | None = None

    def add(self, row: int, response: Response) -> None:
        """Start grading the response of one row."""
        self.add_tokens(row, response.token_ids)

    def add_tokens(self, row: int, token_ids: Sequence[int]) -> None:
        """Start grading one row's response, given as tokens. A reward model scores all rows at once, in `result`."""
        self._responses[row] = token_ids
        if not self._rule:
            return
        source = self._rows[row]
        call = RewardCall(
            data_source=source.data_source,
            solution_str=self._decode(token_ids),
            ground_truth=source.ground_truth,
            extra_info=source.extra_info,
            grader=self._grader_of(source),
        )
        (self._futures[row],) = self._submit([call])

    def wait(self) -> None:
        """Return when every row has been graded by its rule."""
        wait_for(self._futures.values())

    def result(self) -> Scores:
        """Scores in row order. Rows that failed have score NaN, valid_B false and a RewardFailure; they are logged.

        Raises RewardError if every row failed, unless this is one batch of several (`may_all_fail`): `require_any` is
        then due.
        """
        if self._scores is None:
            if missing := len(self._rows) - len(self._responses):
                raise RuntimeError(f"{missing} of {len(self._rows)} responses were never given to the graders")
            scores = self._by_rule() if self._rule else without_rule(len(self._rows))
            self._scores = scores if self._model is None else self._model.add_to(scores, self._answers())
            self._report(self._scores)
            if not self._may_all_fail:
                require_any([self._scores], step=self._step)
        return self._scores

    def _by_rule(self) -> Scores:
        outcomes = [self._futures[row].result() for row in range(len(self._rows))]
        return to_scores(outcomes, [row.data_source for row in self._rows])

    def _answers(self) -> list[Answer]:
        return [
            Answer(row=row, prompt_ids=self._prompt_ids[i], response_ids=self._responses[i])
            for i, row in enumerate(self._rows)
        ]

    def _report(self, scores: Scores) -> None:
        failures = [failure for failure in scores.failures if failure is not None]
        if not failures:
            return
        logger.warning(
            "step %d: %d of %d rewards failed (%s); these rows are left out",
            *(self._step, len(failures), len(scores), _kinds(failures)),
        )
        for failure in failures[:_LOGGED_FAILURES]:
            logger.warning(
                "reward %s: row %d (dataset index %d, data_source %s), response %r:\n%s",
                *(failure.kind, failure.row, self._rows[failure.row].index, failure.data_source),
                *(self._decode(self._responses[failure.row])[:_HEAD_CHARS], failure.message),
            )


def to_scores(outcomes: Sequence[RewardOutcome], data_sources: Sequence[str]) -> Scores:
    """Outcomes of a batch, in order, as the struct that training uses."""
    failures = [
        None
        if outcome.kind is None
        else RewardFailure(row=row, data_source=source, kind=outcome.kind, message=outcome.message)
        for row, (outcome, source) in enumerate(zip(outcomes, data_sources, strict=True))
    ]
    values = [math.nan if outcome.score is None else outcome.score for outcome in outcomes]
    return Scores(
        score_B=torch.tensor(values, dtype=torch.float32),
        valid_B=torch.tensor([failure is None for failure in failures], dtype=torch.bool),
        extras=[dict(outcome.extras) for outcome in outcomes],
        failures=failures,
    )


def require_any(batches: Sequence[Scores], *, step: int) -> None:
    """RewardError, with the first failure, if there are rows and the reward of every one of them failed."""
    failures = [failure for scores in batches for failure in scores.failures if failure is not None]
    if failures and len(failures) == sum(len(scores) for scores in batches):
        first = failures[0]
        raise RewardError(
            f"step {step}: the reward of every response ({len(failures)}) failed ({_kinds(failures)}). The first, row "
            f"{first.row} of data_source {first.data_source}: {first.kind}: {first.message}"
        )


def _kinds(failures: Sequence[RewardFailure]) -> str:
    return ", ".join(f"{count} x {kind}" for kind, count in Counter(f.kind for f in failures).items())
