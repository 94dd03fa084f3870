"""Responses on their way through the graders: each goes in as it ends, a batch's scores come out in row order."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from verl_like.batch import PromptRow, RewardFailure, Scores, unusable_extras
from verl_like.config.errors import RunStopped
from verl_like.rewards.parts import Part, combine
from verl_like.rewards.reward_call import RewardCall, RewardOutcome, is_finite_reward
from verl_like.services.server import answers

logger = logging.getLogger(__name__)

_LOGGED_FAILURES = 3  # rows shown in full per batch
_HEAD_CHARS = 200
_HEALTH_S, _TRIES = 10.0, 3  # of a server that is asked whether it lives
_SLOW_S = 1.0  # a reward that takes longer is worth a line in the log
_told: set[str] = set()  # further values that the log of this process has named

Submit = Callable[[Sequence[RewardCall]], list[Future[RewardOutcome]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One response with its prompt, both as the policy's tokens."""

    row: PromptRow
    prompt_ids: Sequence[int]
    response_ids: Sequence[int] | NDArray[np.int32]

    @property
    def response(self) -> list[int]:
        """The response's tokens as numbers of Python, which take nine times the memory: not to be kept."""
        return np.asarray(self.response_ids).tolist()

    def text(self, tokenizer: Any) -> str:
        """The answer: the response, behind what the row's last message has of it where the prompt ends with that."""
        if begun := self.row.begun.strip():
            both = ([*self.prompt_ids, *more] for more in ([], self.response))
            prompt, whole = (tokenizer.decode(ids, skip_special_tokens=True) for ids in both)
            if (prompt := prompt.rstrip()).endswith(begun):
                return whole[len(prompt) - len(begun) :]
        return tokenizer.decode(self.response, skip_special_tokens=True)


class ModelScores(Protocol):
    """A reward model, as whoever grades sees it (plugins/reward_models)."""

    @property
    def needs_rule(self) -> bool:
        """Return True where rules grade as well."""
        ...

    def add_to(self, scores: Scores, answers: Sequence[Answer]) -> Scores:
        """Its scores, joined with the rules'."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """Addresses of the servers of a reward model, for its graders.

    path: path of the model, and the name under which the servers answer.
    places: (host:port, what to call it) of each server.
    lost: makes the error that ends a run which has lost a server.
    end_ids: tokens that end the model's answers.
    """

    path: str
    places: Sequence[tuple[str, str]]
    lost: Callable[[str], Exception]
    end_ids: Sequence[int] = ()
    _turns: itertools.count[int] = field(default_factory=itertools.count)

    @property
    def addresses(self) -> list[str]:
        return [address for address, _ in self.places]

    def next_address(self) -> str:
        """Return the address of the server whose turn it is."""
        return self.places[next(self._turns) % len(self.places)][0]

    def require_alive(self) -> None:
        """Raise `lost` where a server does not answer: a function of the user's may have taken that for a 0."""
        for address, name in self.places:
            if not any(answers(f"http://{address}/health", _HEALTH_S) for _ in range(_TRIES)):
                raise self.lost(f"{name} does not answer; what was graded since may be wrong, and is not used")


@dataclass(frozen=True, slots=True)
class Scorer:
    """One way to grade a row: where the call goes, and the built-in grader it names (None: the user's function)."""

    part: Part
    submit: Submit
    grader: str | None = None


@dataclass(slots=True, kw_only=True, eq=False)
class Graded:
    """One response that the graders have, or will have: `RewardManager.grade` makes it."""

    answer: Answer
    text: str  # the response, decoded
    scorers: Sequence[Scorer] = ()
    futures: Sequence[Future[RewardOutcome]] = ()  # one for each scorer; none where a batch is graded as a whole

    def call(self, scorer: Scorer, server: str = "") -> RewardCall:
        """Make the call that asks this scorer for the response's score."""
        row = self.answer.row
        return RewardCall(
            data_source=row.data_source,
            solution_str=self.text,
            ground_truth=row.ground_truth,
            # as verl adds: number of turns (a prompt and its answer are two) and rewards of tools
            extra_info={"num_turns": 2, "rollout_reward_scores": {}, **row.extra_info},
            question=question_of(row),
            grader=scorer.grader,
            server=server,
        )


class RewardError(RunStopped):
    """Error of a batch or a whole validation of which no row, or too few, could be scored."""


class Grading:
    """Scores of one batch, some of them perhaps still being computed. `RewardManager.gather` makes one.

    What a row's score is does not depend on the order or on the time in which responses were given to the graders.
    """

    def __init__(
        self,
        graded: Sequence[Graded],
        *,
        step: int,
        may_all_fail: bool = False,
        quiet: bool = False,
        model: ModelScores | None = None,
        failure_penalty: float | None = None,
        max_failure_fraction: float = 1.0,
        graded_by: str = "",
        server: str = "",
        check: Callable[[], None] | None = None,
    ) -> None:
        """Take over responses in grading. Those without futures are graded by one call of `submit` for all of them.

        quiet: neither log failures nor call `check`: `report` is due for the whole.
        failure_penalty: score of failed rows.
        max_failure_fraction: share of failed rows above which a RewardError is raised, which names `graded_by`.
        check: function that raises where the graders are not there any more.
        """
        self._graded, self._step, self._may_all_fail, self._quiet = graded, step, may_all_fail, quiet
        self._model, self._failure_penalty = model, failure_penalty
        self._rule = model is None or model.needs_rule
        self._most = max_failure_fraction if failure_penalty is None else 1.0
        self._graded_by, self._check = graded_by, check
        left = [place for place, each in enumerate(graded) if not each.futures]
        if self._rule and left:
            scorer = graded[left[0]].scorers[0]  # one function for the whole batch
            for place, future in zip(left, scorer.submit([graded[i].call(scorer, server) for i in left]), strict=True):
                graded[place].futures = [future]
        self._scores: Scores | None = None

    def wait(self) -> None:
        """Return when every row has been graded by its rule."""
        wait_for([future for each in self._graded for future in each.futures])

    def result(self) -> Scores:
        """Scores in row order. Rows that failed have score NaN, valid_B false and a RewardFailure; they are logged.

        Raises RewardError if every row failed, or more than max_failure_fraction, unless this is one batch of several
        (`may_all_fail`): `require_enough` is then due.
        """
        if self._scores is None:
            scores = self._by_rule()
            if self._check is not None and not self._quiet:
                self._check()
            answers = [each.answer for each in self._graded]
            self._scores = scores if self._model is None else self._model.add_to(scores, answers)
            if not self._quiet:
                report(self._scores, self._graded, step=self._step, failure_penalty=self._failure_penalty)
            if not self._may_all_fail:
                require_enough([self._scores], step=self._step, most=self._most, graded_by=self._graded_by)
        return self._scores

    def _by_rule(self) -> Scores:
        outcomes = [
            combine([scorer.part for scorer in each.scorers], [future.result() for future in each.futures])
            if each.futures
            else RewardOutcome(score=0.0)  # a reward model scores it
            for each in self._graded
        ]
        self._report_slowest(outcomes)
        sources = [each.answer.row.data_source for each in self._graded]
        return to_scores(outcomes, sources, failure_penalty=self._failure_penalty)

    def _report_slowest(self, outcomes: Sequence[RewardOutcome]) -> None:
        row, slowest = max(enumerate(outcomes), key=lambda item: item[1].seconds, default=(0, None))
        if slowest is not None and slowest.seconds >= _SLOW_S:
            source = self._graded[row].answer.row
            logger.info(
                "step %d: the slowest reward took %.1f s: row %d (dataset index %d, data_source %s), response %r",
                *(self._step, slowest.seconds, row, source.index, source.data_source),
                self._graded[row].text[:_HEAD_CHARS],
            )


def report(scores: Scores, graded: Sequence[Graded], *, step: int, failure_penalty: float | None) -> None:
    """Log how many rewards failed, and the first of them in full; and what makes the others doubtful."""
    own = [(scorer, future) for each in graded for scorer, future in zip(each.scorers, each.futures, strict=False)]
    tell_of_deaths([future.result() for scorer, future in own if scorer.grader is None], f"step {step}")
    for key, rows in unusable_extras(scores.extras).items():
        if key not in _told:
            _told.add(key)
            logger.warning(
                "step %d: %r of the reward function is no finite (32-bit) number in %d of %d rows, which are left out "
                "of its means: row %d (dataset index %d, data_source %s) has %.200r. This is said once",
                *(step, key, len(rows), len(scores), rows[0]),
                *((row := graded[rows[0]].answer.row).index, row.data_source, scores.extras[rows[0]][key]),
            )
    failures = [failure for failure in scores.failures if failure is not None]
    if not failures:
        return
    logger.warning(
        "step %d: %d of %d rewards failed (%s); these rows %s",
        *(step, len(failures), len(scores), _kinds(failures)),
        "are left out" if failure_penalty is None else f"score {failure_penalty:g}",
    )
    for failure in _different(failures):
        failed = graded[failure.row]
        logger.warning(
            "reward %s: row %d (dataset index %d, data_source %s), response %r:\n%s",
            *(failure.kind, failure.row, failed.answer.row.index, failure.data_source),
            *(failed.text[:_HEAD_CHARS], failure.message),
        )


def tell_of_deaths(outcomes: Sequence[RewardOutcome], where: str) -> None:
    """Log an error where a process that the function started died in several calls, and all of these score the same.

    The function may swallow such a death, and take it for a score.
    """
    dead = [outcome for outcome in outcomes if outcome.child_died]
    if len(dead) > 1 and len({outcome.score for outcome in dead}) == 1:
        logger.error(
            "%s: %d RESPONSES ALL SCORE %s, AND A PROCESS THAT THE REWARD FUNCTION STARTED %s: it may take that for "
            "a score, and then nothing is learnt. What the process wrote to stderr, above, says why it died",
            *(where, len(dead), dead[0].score, dead[-1].child_died.upper()),
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
    penalties = [math.nan if failure_penalty is None or outcome.lost else failure_penalty for outcome in outcomes]
    values = [p if outcome.score is None else outcome.score for p, outcome in zip(penalties, outcomes, strict=True)]
    return Scores(
        score_B=torch.tensor(values, dtype=torch.float32),
        valid_B=torch.tensor([not math.isnan(value) for value in values], dtype=torch.bool),
        extras=[dict(outcome.extras) for outcome in outcomes],
        failures=failures,
        seconds_B=torch.tensor([outcome.seconds for outcome in outcomes], dtype=torch.float32),
    )


def _finite(outcome: RewardOutcome) -> RewardOutcome:
    """Make a failure of an outcome whose score is not finite.

    A weighted sum may be too large for the tensor where its parts were not.
    """
    if outcome.score is None or is_finite_reward(outcome.score):
        return outcome
    message = f"score is {outcome.score:g}: it must be finite, also as a 32-bit float"
    return dataclasses.replace(outcome, score=None, kind="bad_value", message=message)


def require_enough(batches: Sequence[Scores], *, step: int, most: float = 1.0, graded_by: str = "") -> None:
    """Raise RewardError, with the first failures, if every row failed, or more than the share `most` of them."""
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
    shown = [f"row {f.row} of data_source {f.data_source}: {f.kind}: {f.message}" for f in _different(failures)]
    raise RewardError("\n  ".join([f"step {step}: {what}. Graded by {graded_by}. The first:", *shown]))


def _different(failures: Sequence[RewardFailure]) -> list[RewardFailure]:
    """The first of each message and data source, a few of them."""
    first = {(f.message, f.data_source): f for f in reversed(failures)}
    return sorted(first.values(), key=lambda f: f.row)[:_LOGGED_FAILURES]


def _kinds(failures: Sequence[RewardFailure]) -> str:
    return ", ".join(f"{count} x {kind}" for kind, count in Counter(f.kind for f in failures).items())
