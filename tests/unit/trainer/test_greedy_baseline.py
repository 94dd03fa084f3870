"""ReMax's greedy responses: one per prompt, greedy, graded, mapped to the right rows, never part of the batch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from tests.unit.algorithms.builders import rollouts
from verl_like.batch import PromptRow, Prompts, Rollouts, Scores
from verl_like.config import AlgorithmConfig, LengthRewardConfig, PPOConfig, RewardModelConfig
from verl_like.rollout.assemble import assemble_rollouts
from verl_like.rollout.rollout_engine import Completion, Sampled, SamplingParams
from verl_like.trainer.greedy_baseline import GreedyBaselineSource, prompts_of


@dataclass
class Graded:
    scores: Scores
    given: list[int] = field(default_factory=list)

    def add(self, row: int, completion: Completion) -> None:
        self.given.append(row)

    def wait(self) -> None: ...

    def result(self) -> Scores:
        return self.scores


def graded(values: list[float], failed: tuple[int, ...] = ()) -> Graded:
    n = len(values)
    valid = torch.tensor([i not in failed for i in range(n)])
    score = torch.where(valid, torch.tensor(values), torch.full((n,), torch.nan))
    return Graded(Scores(score_B=score, valid_B=valid, extras=[{}] * n, failures=[None] * n))


@dataclass
class Policy:
    seen: list[tuple[Prompts, SamplingParams, int]] = field(default_factory=list)

    def generate(self, prompts: Prompts, sampling: Any, *, n: int, seed: Any, step: int, on_response: Any) -> Rollouts:
        self.seen.append((prompts, sampling, n))
        done = [
            Completion(request_id="", sampled=Sampled.of([1, 2], [0.0, 0.0], 0), finish_reason="stop")
            for _ in range(len(prompts) * n)
        ]
        for i, completion in enumerate(done):
            on_response(i, completion)
        return assemble_rollouts(prompts, n, done)


@dataclass
class Rewards:
    greedy: Graded

    def begin(self, prompts: Prompts, *, n: int, step: int) -> Graded:
        return self.greedy


@dataclass
class Inner:
    rollouts: Rollouts
    grading: Graded

    def next_rollouts(self, policy: Any, rewards: Any, step: int) -> tuple[Rollouts, Graded]:
        return self.rollouts, self.grading

    def metrics(self) -> dict[str, float]:
        return {"inner": 1.0}

    def state_dict(self) -> dict[str, Any]:
        return {"position": 3}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded = state


GROUPS = [7, 3, 7, 3, 9]  # rows of a group need not be neighbours


def batch() -> Rollouts:
    found = rollouts((2, 1, 3, 1, 2), GROUPS)
    ids = torch.tensor(GROUPS, dtype=torch.int32)[:, None].expand(5, 3)
    return found.replace(prompt_ids_BP=ids, rows=[PromptRow(index=g, data_source="t", messages=[]) for g in GROUPS])


def test_each_prompt_is_answered_once_greedily_and_its_score_reaches_all_its_rows() -> None:
    policy, greedy = Policy(), graded([10.0, 20.0, 30.0])
    inner = Inner(batch(), graded([1.0, 2.0, 3.0, 4.0, 5.0]))
    source = GreedyBaselineSource(inner, SamplingParams(max_tokens=4, temperature=0.7), PPOConfig())
    rollouts_, pending = source.next_rollouts(policy, Rewards(greedy), 1)  # type: ignore[arg-type]
    (prompts, sampling, n) = policy.seen[0]
    assert rollouts_ is inner.rollouts and len(policy.seen) == 1 and n == 1 and sampling.greedy
    assert prompts.group_B.tolist() == [7, 3, 9] == prompts.prompt_ids_BP[:, 0].tolist()
    assert [row.index for row in prompts.rows] == [7, 3, 9] and greedy.given == [0, 1, 2]
    pending.wait()
    found = pending.result()
    assert found.baseline_B is not None and found.baseline_B.tolist() == [10.0, 20.0, 10.0, 20.0, 30.0]
    assert found.score_B.tolist() == [1.0, 2.0, 3.0, 4.0, 5.0] and found.valid_B.all()
    metrics = source.metrics()
    assert metrics["inner"] == 1.0 and metrics["timing_s/gen_max"] > 0
    assert metrics["remax/response_length/mean"] == 2.0 and metrics["remax/failures"] == 0


def test_rows_without_a_baseline_are_left_out_and_counted() -> None:
    inner = Inner(batch(), graded([1.0, 2.0, 3.0, 4.0, 5.0], failed=(4,)))
    source = GreedyBaselineSource(inner, SamplingParams(max_tokens=4), PPOConfig())
    _, pending = source.next_rollouts(Policy(), Rewards(graded([10.0, 20.0, 30.0], failed=(0,))), 1)  # type: ignore[arg-type]
    found = pending.result()
    assert found.valid_B.tolist() == [False, True, False, True, False]
    assert found.score_B.isnan().tolist() == [True, False, True, False, True]
    assert source.metrics()["remax/failures"] == 1


def test_the_baseline_is_shaped_as_the_rewards_are() -> None:
    """Two of 512 tokens at -256 a budget cost 1; then rewards are clipped at 12."""
    config = PPOConfig(
        algorithm=AlgorithmConfig(adv_estimator="remax", reward_clip=12.0),
        reward_model=RewardModelConfig(length_reward=LengthRewardConfig(enable=True, coef=-256.0)),
    )
    inner = Inner(batch(), graded([1.0, 2.0, 3.0, 4.0, 5.0]))
    source = GreedyBaselineSource(inner, SamplingParams(max_tokens=4), config)
    _, pending = source.next_rollouts(Policy(), Rewards(graded([10.0, 20.0, 30.0], failed=(2,))), 1)  # type: ignore[arg-type]
    found = pending.result()
    assert found.baseline_B is not None and found.baseline_B[:4].tolist() == [9.0, 12.0, 9.0, 12.0]
    assert found.valid_B.tolist() == [True, True, True, True, False]
    assert found.score_B[:4].tolist() == [1.0, 2.0, 3.0, 4.0]  # those of sampled responses are shaped later


def test_it_remembers_what_the_inner_source_remembers() -> None:
    inner = Inner(batch(), graded([0.0] * 5))
    source = GreedyBaselineSource(inner, SamplingParams(max_tokens=4), PPOConfig())
    assert source.state_dict() == {"position": 3}
    source.load_state_dict({"position": 4})
    assert inner.loaded == {"position": 4}


@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4], [4, 2, 0, 3, 1]])
def test_prompts_of_points_every_row_at_its_prompt(order: list[int]) -> None:
    shuffled = batch().select(order)
    prompts, place = prompts_of(shuffled)
    assert torch.equal(prompts.group_B[place], shuffled.group_B)
