"""ReMax's baseline (algorithm.adv_estimator=remax): the reward of the greedy response to each prompt of the batch.

A source around another source, so that the loop does not know of it. The greedy responses are graded, and never trained
on. What it costs is in the metrics: timing_s/gen_max (inside timing_s/gen) and remax/response_length/mean.
"""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from verl_like.algorithms.reward_shaping import baseline_rewards
from verl_like.batch import Prompts, Rollouts, Scores
from verl_like.config import PPOConfig
from verl_like.rewards.manager import RewardManager
from verl_like.rollout.rollout_engine import SamplingParams
from verl_like.trainer.roles import PolicyGroup
from verl_like.trainer.source import BatchSource, PendingScores


@dataclass(slots=True)
class BaselineScores:
    """Scores of the batch, to which the rewards of the greedy responses are added when both are there."""

    grading: PendingScores
    greedy: PendingScores
    answers: Rollouts  # the greedy responses
    config: PPOConfig
    prompt_of_row_B: Tensor  # int64: position of each row's prompt among the greedy responses
    num_failed: int = 0

    def wait(self) -> None:
        """Return when every row and every greedy response has been graded."""
        self.grading.wait()
        self.greedy.wait()

    def result(self) -> Scores:
        """Scores with baseline_B. A row whose baseline could not be graded has no advantage: it is not valid."""
        scores, greedy = self.grading.result(), self.greedy.result()
        algorithm, reward_model = self.config.algorithm, self.config.reward_model
        limit = self.config.data.max_response_length
        reward_B = baseline_rewards(algorithm, reward_model, self.answers, greedy, limit)
        baseline_B = reward_B[self.prompt_of_row_B]
        known_B = ~baseline_B.isnan()
        self.num_failed = int(reward_B.isnan().sum())
        return scores.replace(
            score_B=torch.where(known_B, scores.score_B, torch.full_like(scores.score_B, torch.nan)),
            valid_B=scores.valid_B & known_B,
            baseline_B=baseline_B,
        )


class GreedyBaselineSource:
    """Batches of `inner`, each with one greedy response per prompt, sampled from the same weights."""

    def __init__(self, inner: BatchSource, sampling: SamplingParams, config: PPOConfig) -> None:
        self.inner, self.config = inner, config
        self.sampling = dataclasses.replace(sampling, do_sample=False)
        self._scores: BaselineScores | None = None
        self._seconds = self._length = 0.0

    def next_rollouts(self, policy: PolicyGroup, rewards: RewardManager, step: int) -> tuple[Rollouts, PendingScores]:
        """The inner source's rollouts; their scores carry baseline_B."""
        rollouts, grading = self.inner.next_rollouts(policy, rewards, step)
        start = time.perf_counter()
        prompts, prompt_of_row_B = prompts_of(rollouts)
        greedy = rewards.begin(prompts, n=1, step=step)
        # The seed means nothing to a greedy response.
        answers = policy.generate(prompts, self.sampling, n=1, seed=0, step=step, on_response=greedy.add)
        self._seconds = time.perf_counter() - start
        self._length = answers.response_length_B.double().mean().item()
        self._scores = BaselineScores(
            grading=grading, greedy=greedy, answers=answers, config=self.config, prompt_of_row_B=prompt_of_row_B
        )
        return rollouts, self._scores

    def metrics(self) -> dict[str, float]:
        """The inner source's, and the cost and failures of the last step's greedy responses."""
        failed = 0 if self._scores is None else self._scores.num_failed
        return self.inner.metrics() | {
            "timing_s/gen_max": self._seconds,
            "remax/response_length/mean": self._length,
            "remax/failures": float(failed),
        }

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.inner.load_state_dict(state)


def prompts_of(rollouts: Rollouts) -> tuple[Prompts, Tensor]:
    """Each prompt of the batch once, in order of its first row, and each row's position among them (int64 [B])."""
    first_row: dict[int, int] = {}
    for row, group in enumerate(rollouts.group_B.tolist()):
        first_row.setdefault(group, row)
    position = {group: place for place, group in enumerate(first_row)}
    rows = torch.tensor(list(first_row.values()), dtype=torch.long)
    prompts = Prompts(
        prompt_ids_BP=rollouts.prompt_ids_BP[rows],
        prompt_length_B=rollouts.prompt_length_B[rows],
        group_B=rollouts.group_B[rows],
        rows=[rollouts.rows[row] for row in rows.tolist()],
    )
    return prompts, torch.tensor([position[group] for group in rollouts.group_B.tolist()], dtype=torch.long)
