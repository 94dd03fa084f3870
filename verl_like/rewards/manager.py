"""From responses to rewards: decode, score in worker processes, count what failed.

One path for everything: built-in graders and the user's reward function run in the same killable processes (`pool.py`).
A row whose reward could not be computed gets NaN and valid_B false: it is left out of training, never scored 0.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from typing import Any

from verl_like.batch import PromptRow, Prompts, Rollouts, Scores
from verl_like.config import CustomRewardFunctionConfig, DataConfig, RewardModelConfig
from verl_like.rewards import graders
from verl_like.rewards.execution import ExecutionPlace
from verl_like.rewards.grading import Grading
from verl_like.rewards.loading import resolve_path
from verl_like.rewards.model_score import ModelScore
from verl_like.rewards.pool import WorkerPool
from verl_like.rewards.protocol import ScorerSpec

logger = logging.getLogger(__name__)

_MANAGERS = ("naive",)


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
        self._model: ModelScore | None = None
        self.rule_grades = not reward_model.enable or reward_model.rule_weight != 0
        self._choice = graders.choose(reward_model.rule, reward_model.rule_by_source, reward_model.rule_kwargs)
        self._tokenizer = tokenizer
        self._reward_fn_key = data.reward_fn_key
        self._custom = custom.path is not None
        self._execution = ExecutionPlace(reward_model, num_workers=custom.num_workers, call_timeout=custom.timeout)
        spec = ScorerSpec(
            path=None if custom.path is None else resolve_path(custom.path),
            name=custom.name,
            kwargs=dict(custom.reward_kwargs)
            if self._custom
            else {"options": self._execution.add_to(self._choice.options)},
            timeout=float(custom.timeout),
        )
        self._pool = WorkerPool(spec, num_workers=custom.num_workers)
        try:
            self._pool.start()
        except BaseException:
            self._pool.close()
            raise

    def use_model(self, model: ModelScore) -> None:
        """Score with a reward model too, once its workers are there (reward_model.enable)."""
        self._model = model

    def check_rows(self, rows: Iterable[tuple[str, str]]) -> None:
        """ValueError if there is no reward for a (data_source, style). Call it with the data set's before training."""
        if self._custom or not self.rule_grades:
            return
        rows = list(rows)
        self._choice.check_rows(rows)
        graders_used = {self._choice.grader_of_row(source, style) for source, style in rows}
        if any(graders.GRADERS[name].runs_programs for name in graders_used if name is not None):
            self._execution.require()

    def begin(self, prompts: Prompts, *, n: int, step: int, may_all_fail: bool = False) -> Grading:
        """Grading of n responses to each prompt, which are yet to come. ValueError for a data source without a grader.

        may_all_fail: this is one batch of several, so that its `result` need not hold a score.
        """
        rows = [row for row in prompts.rows for _ in range(n)]
        prompt_ids = [ids for ids in prompts.token_lists() for _ in range(n)]
        return self._grading(rows, prompt_ids, step=step, may_all_fail=may_all_fail)

    def score(self, rollouts: Rollouts, *, step: int) -> Scores:
        """One reward per response of rollouts that are complete: `begin` and `Grading.result` in one."""
        grading = self._grading(rollouts.rows, rollouts.prompt_lists(), step=step)
        lengths = rollouts.response_length_B.tolist()
        for row, (ids, length) in enumerate(zip(rollouts.response_ids_BR, lengths, strict=True)):
            grading.add_tokens(row, ids[:length].tolist())
        return grading.result()

    def _grading(
        self, rows: Sequence[PromptRow], prompt_ids: Sequence[list[int]], *, step: int, may_all_fail: bool = False
    ) -> Grading:
        self.check_rows((row.data_source, row.style) for row in rows)
        return Grading(
            rows,
            step=step,
            decode=self._decode,
            grader_of=self._grader_of,
            submit=self._pool.submit,
            may_all_fail=may_all_fail,
            model=self._model,
            prompt_ids=prompt_ids,
        )

    def _grader_of(self, row: PromptRow) -> str | None:
        return None if self._custom else self._choice.grader_of_row(row.data_source, row.style)

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=True)

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
