"""One batch on its way through the graders: responses go in as they end, scores come out in row order."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from dataclasses import dataclass
from typing import Protocol

import torch

from verl_like.batch import PromptRow, RewardFailure, Scores
from verl_like.rewards.model_score import Answer, ModelScore, without_rule
from verl_like.rewards.parts import Part, combine
from verl_like.rewards.reward_call import RewardCall, RewardOutcome, is_finite_reward

logger = logging.getLogger(__name__)

_LOGGED_FAILURES = 3  # rows shown in full per batch
_HEAD_CHARS = 200
_SLOW_S = 1.0  # a reward that takes longer is worth a line in the log

Submit = Callable[[Sequence[RewardCall]], list[Future[RewardOutcome]]]


@dataclass(frozen=True, slots=True)
class Scorer:
    """One way to grade a row: where the call goes, and the built-in grader it names (None: the user's function)."""

    part: Part
    submit: Submit
    grader: str | None = None


class Response(Protocol):
    """What grading needs of a completion of the rollout engine."""

    @property
    def token_ids(self) -> Sequence[int]: ...


class RewardError(RuntimeError):
    """No row of a batch or of a whole validation could be scored, or too few."""


class Grading:
    """Scores of one batch, some of them perhaps still being computed. `RewardManager.begin` makes one.

    Call `add` for every row, in any order and from one thread at a time, then `result`. What a row's score is does not
    depend on the order or on the time of arrival.
    """

    def __init__(
        self,
        rows: Sequence[PromptRow],
        *,
        step: int,
        decode: Callable[[Sequence[int]], str],
        scorers_of: Callable[[PromptRow], Sequence[Scorer]],
        may_all_fail: bool = False,
        model: ModelScore | None = None,
        prompt_ids: Sequence[Sequence[int]] = (),
        together: bool = False,
        failure_penalty: float | None = None,
        max_failure_fraction: float = 1.0,
        graded_by: str = "",
    ) -> None:
        """together: all rows in one call of `submit`, when the last has come. failure_penalty: score of failed rows.

        max_failure_fraction: more failed rows are a RewardError, which names `graded_by`.
        """
        self._rows, self._step, self._may_all_fail = rows, step, may_all_fail
        self._model, self._prompt_ids = model, prompt_ids
        self._rule = model is None or model.needs_rule
        self._responses: dict[int, Sequence[int]] = {}
        self._decode, self._together, self._failure_penalty = decode, together, failure_penalty
        self._most = max_failure_fraction if failure_penalty is None else 1.0
        self._graded_by = graded_by
        self._scorers = [tuple(scorers_of(row)) for row in rows] if self._rule else []
        self._calls: dict[int, RewardCall] = {}
        self._futures: dict[int, list[Future[RewardOutcome]]] = {}
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
        self._calls[row] = RewardCall(
            data_source=source.data_source,
            solution_str=self._decode(token_ids),
            ground_truth=source.ground_truth,
            extra_info=source.extra_info,
            question=question_of(source),
        )
        if not self._together:
            self._futures[row] = [scorer.submit([self._call(row, scorer)])[0] for scorer in self._scorers[row]]
        elif len(self._calls) == len(self._rows):
            scorer = self._scorers[0][0]  # one function for the whole batch
            calls = [self._call(each, scorer) for each in range(len(self._rows))]
            self._futures = {each: [future] for each, future in enumerate(scorer.submit(calls))}

    def _call(self, row: int, scorer: Scorer) -> RewardCall:
        return dataclasses.replace(self._calls[row], grader=scorer.grader)

    def wait(self) -> None:
        """Return when every row has been graded by its rule."""
        wait_for([future for futures in self._futures.values() for future in futures])

    def result(self) -> Scores:
        """Scores in row order. Rows that failed have score NaN, valid_B false and a RewardFailure; they are logged.

        Raises RewardError if every row failed, or more than max_failure_fraction, unless this is one batch of several
        (`may_all_fail`): `require_enough` is then due.
        """
        if self._scores is None:
            if missing := len(self._rows) - len(self._responses):
                raise RuntimeError(f"{missing} of {len(self._rows)} responses were never given to the graders")
            scores = self._by_rule() if self._rule else without_rule(len(self._rows))
            self._scores = scores if self._model is None else self._model.add_to(scores, self._answers())
            self._report(self._scores)
            if not self._may_all_fail:
                require_enough([self._scores], step=self._step, most=self._most, graded_by=self._graded_by)
        return self._scores

    def _by_rule(self) -> Scores:
        outcomes = [
            combine([scorer.part for scorer in self._scorers[row]], [f.result() for f in self._futures[row]])
            for row in range(len(self._rows))
        ]
        self._report_slowest(outcomes)
        sources = [row.data_source for row in self._rows]
        return to_scores(outcomes, sources, failure_penalty=self._failure_penalty)

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
            "step %d: %d of %d rewards failed (%s); these rows %s",
            *(self._step, len(failures), len(scores), _kinds(failures)),
            "are left out" if self._failure_penalty is None else f"score {self._failure_penalty:g}",
        )
        for failure in failures[:_LOGGED_FAILURES]:
            logger.warning(
                "reward %s: row %d (dataset index %d, data_source %s), response %r:\n%s",
                *(failure.kind, failure.row, self._rows[failure.row].index, failure.data_source),
                *(self._decode(self._responses[failure.row])[:_HEAD_CHARS], failure.message),
            )

    def _report_slowest(self, outcomes: Sequence[RewardOutcome]) -> None:
        row, slowest = max(enumerate(outcomes), key=lambda item: item[1].seconds, default=(0, None))
        if slowest is not None and slowest.seconds >= _SLOW_S:
            logger.info(
                "step %d: the slowest reward took %.1f s: row %d (dataset index %d, data_source %s), response %r",
                *(self._step, slowest.seconds, row, self._rows[row].index, self._rows[row].data_source),
                self._calls[row].solution_str[:_HEAD_CHARS],
            )


def question_of(row: PromptRow) -> str:
    """The last user message of the prompt, as text."""
    contents = [message["content"] for message in row.messages if message.get("role") == "user"]
    return contents[-1] if contents and isinstance(contents[-1], str) else ""


def to_scores(
    outcomes: Sequence[RewardOutcome], data_sources: Sequence[str], *, failure_penalty: float | None = None
) -> Scores:
    """Outcomes of a batch, in order, as the struct that training uses. failure_penalty: see Grading."""
    outcomes = [_finite(outcome) for outcome in outcomes]
    failures = [
        None
        if outcome.kind is None
        else RewardFailure(row=row, data_source=source, kind=outcome.kind, message=outcome.message)
        for row, (outcome, source) in enumerate(zip(outcomes, data_sources, strict=True))
    ]
    failed = math.nan if failure_penalty is None else failure_penalty
    values = [failed if outcome.score is None else outcome.score for outcome in outcomes]
    return Scores(
        score_B=torch.tensor(values, dtype=torch.float32),
        valid_B=torch.tensor([f is None or failure_penalty is not None for f in failures], dtype=torch.bool),
        extras=[dict(outcome.extras) for outcome in outcomes],
        failures=failures,
        seconds_B=torch.tensor([outcome.seconds for outcome in outcomes], dtype=torch.float32),
    )


def _finite(outcome: RewardOutcome) -> RewardOutcome:
    """A weighted sum may be too large for the tensor where its parts were not."""
    if outcome.score is None or is_finite_reward(outcome.score):
        return outcome
    message = f"score is {outcome.score:g}: it must be finite, also as a 32-bit float"
    return dataclasses.replace(outcome, score=None, kind="bad_value", message=message)


def require_enough(batches: Sequence[Scores], *, step: int, most: float = 1.0, graded_by: str = "") -> None:
    """RewardError, with the first failures, if every row failed, or more than the share `most` of them."""
    total = sum(len(scores) for scores in batches)
    failures = [failure for scores in batches for failure in scores.failures if failure is not None]
    if not failures or (len(failures) < total and len(failures) <= most * total):
        return
    if len(failures) == total:
        what = f"the reward of every response ({total}) failed ({_kinds(failures)})"
    else:
        what = (
            f"{len(failures)} of {total} rewards failed ({_kinds(failures)}), more than "
            f"reward_model.max_failure_fraction={most:g}; to train on such rows, set reward_model.failure_penalty"
        )
    shown = [f"row {f.row} of data_source {f.data_source}: {f.kind}: {f.message}" for f in failures[:_LOGGED_FAILURES]]
    raise RewardError("\n  ".join([f"step {step}: {what}. Graded by {graded_by}. The first:", *shown]))


def _kinds(failures: Sequence[RewardFailure]) -> str:
    return ", ".join(f"{count} x {kind}" for kind, count in Counter(f.kind for f in failures).items())
