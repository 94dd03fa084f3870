"""From responses to rewards: decode, score in worker processes, count what failed.

One path for everything: built-in graders and the user's reward function run in the same killable processes (`pool.py`).
A row whose reward could not be computed gets NaN and valid_B false: it is left out of training, never scored 0.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from typing import Any

import torch

from verl_like.batch import PromptRow, RewardFailure, Rollouts, Scores
from verl_like.config import CustomRewardFunctionConfig, DataConfig, RewardModelConfig
from verl_like.rewards import graders
from verl_like.rewards.loading import resolve_path
from verl_like.rewards.pool import WorkerPool
from verl_like.rewards.protocol import RewardCall, RewardOutcome, ScorerSpec

logger = logging.getLogger(__name__)

_MANAGERS = ("naive",)
_LOGGED_FAILURES = 3  # rows shown in full per batch
_HEAD_CHARS = 200


class RewardError(RuntimeError):
    """No row of a batch, or of a whole validation, could be scored."""


class PendingScores:
    """Scores on their way: `RewardManager.submit` returns one, `result` waits for all rows."""

    def __init__(self, calls: list[RewardCall], futures: list[Future[RewardOutcome]], rows: list[PromptRow], step: int):
        self._calls, self._futures, self._rows, self._step = calls, futures, rows, step

    def result(self) -> Scores:
        """Scores in the order of the rollouts, also if every row failed: see `require_any`."""
        outcomes = [future.result() for future in self._futures]
        scores = to_scores(outcomes, [call.data_source for call in self._calls])
        self._report(scores)
        return scores

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
                *(self._calls[failure.row].solution_str[:_HEAD_CHARS], failure.message),
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


class RewardManager:
    """Scores rollouts with custom_reward_function.path, or with the built-in grader of each row's data source.

    The constructor starts custom_reward_function.num_workers processes and waits until they have loaded the function,
    so that a missing file or a wrong signature is found before the first step. Call `close`, or use it in a `with`.
    """

    def __init__(
        self,
        custom: CustomRewardFunctionConfig,
        reward_model: RewardModelConfig,
        data: DataConfig,
        tokenizer: Any,
    ) -> None:
        _check_supported(custom, reward_model)
        self._choice = graders.choose(reward_model.rule, reward_model.rule_by_source, reward_model.rule_kwargs)
        self._tokenizer = tokenizer
        self._reward_fn_key = data.reward_fn_key
        self._custom = custom.path is not None
        spec = ScorerSpec(
            path=None if custom.path is None else resolve_path(custom.path),
            name=custom.name,
            kwargs=dict(custom.reward_kwargs) if self._custom else {"options": self._choice.options},
            timeout=float(custom.timeout),
        )
        self._pool = WorkerPool(spec, num_workers=custom.num_workers)
        try:
            self._pool.start()
        except BaseException:
            self._pool.close()
            raise

    def check_rows(self, rows: Iterable[tuple[str, str]]) -> None:
        """ValueError if there is no reward for a (data_source, style). Call it with the data set's before training."""
        if not self._custom:
            self._choice.check_rows(rows)

    def submit(self, rollouts: Rollouts, *, step: int) -> PendingScores:
        """Start scoring and return at once."""
        calls = self._calls(rollouts)
        self.check_rows((row.data_source, row.style) for row in rollouts.rows)
        return PendingScores(calls, self._pool.submit(calls), rollouts.rows, step)

    def score(self, rollouts: Rollouts, *, step: int, may_all_fail: bool = False) -> Scores:
        """One reward per response. Rows that failed have score NaN, valid_B false and a RewardFailure.

        Raises RewardError if every row failed, unless `may_all_fail`: one batch of several, then `require_any` is due.
        Raises ValueError for a data source without a grader.
        """
        scores = self.submit(rollouts, step=step).result()
        if not may_all_fail:
            require_any([scores], step=step)
        return scores

    def metrics(self, scores: Scores, rows: Sequence[PromptRow] | None = None) -> dict[str, float]:
        """reward/failures, reward/timeouts, reward/failure_fraction and the mean of each further numeric value.

        With `rows`, and more than one data source among them, also reward/<data_source>/score/mean.
        """
        return reward_metrics(scores, rows)

    def worker_pids(self) -> list[int]:
        """Process ids of the live reward workers."""
        return self._pool.worker_pids()

    def close(self) -> None:
        """Kill the worker processes. Safe to call twice."""
        self._pool.close()

    def __enter__(self) -> RewardManager:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _calls(self, rollouts: Rollouts) -> list[RewardCall]:
        lengths = rollouts.response_length_B.tolist()
        tokens = [ids[:length].tolist() for ids, length in zip(rollouts.response_ids_BR, lengths, strict=True)]
        texts = [self._tokenizer.decode(ids, skip_special_tokens=True) for ids in tokens]
        return [
            RewardCall(
                data_source=row.data_source,
                solution_str=text,
                ground_truth=row.ground_truth,
                extra_info=row.extra_info,
                grader=None if self._custom else self._choice.grader_of_row(row.data_source, row.style),
            )
            for row, text in zip(rollouts.rows, texts, strict=True)
        ]


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


def reward_metrics(scores: Scores, rows: Sequence[PromptRow] | None = None) -> dict[str, float]:
    """See RewardManager.metrics."""
    failures = [failure for failure in scores.failures if failure is not None]
    metrics = {
        "reward/failures": float(len(failures)),
        "reward/timeouts": float(sum(failure.kind == "timeout" for failure in failures)),
        "reward/failure_fraction": len(failures) / max(1, len(scores)),
    }
    collected: dict[str, list[float]] = {}
    for extras in scores.extras:
        for key, value in extras.items():
            if isinstance(value, bool | int | float) and math.isfinite(value):
                collected.setdefault(f"reward/{key}/mean", []).append(float(value))
    sources = [row.data_source for row in rows] if rows is not None else []
    if len(set(sources)) > 1:
        for source, value, valid in zip(sources, scores.score_B.tolist(), scores.valid_B.tolist(), strict=True):
            if valid:
                collected.setdefault(f"reward/{source}/score/mean", []).append(value)
    return metrics | {name: sum(values) / len(values) for name, values in collected.items()}


def _check_supported(custom: CustomRewardFunctionConfig, reward_model: RewardModelConfig) -> None:
    if reward_model.enable:
        raise ValueError("reward_model.enable=True: reward models are not available yet; set it to False")
    if reward_model.reward_manager not in _MANAGERS:
        raise ValueError(
            f"reward_model.reward_manager={reward_model.reward_manager}: not available yet; choose one of "
            f"{', '.join(_MANAGERS)}"
        )
    if custom.path is None and custom.reward_kwargs:
        logger.warning(
            "custom_reward_function.reward_kwargs has no effect: custom_reward_function.path is not set; options of "
            "built-in graders go to reward_model.rule_kwargs"
        )
