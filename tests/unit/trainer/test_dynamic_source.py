"""Dynamic sampling against a scripted policy: what is drawn, kept, given back, counted and resumed."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.data.factory import CharTokenizer, write_prompts
from verl_like.batch import Prompts, RewardFailure, Rollouts, Scores
from verl_like.config import AlgorithmConfig, DataConfig, FilterGroupsConfig, PPOConfig
from verl_like.data.dataset import PromptDataset
from verl_like.data.loader import PromptLoader
from verl_like.data.sampler import ResumableSampler
from verl_like.rollout.assemble import assemble_rollouts
from verl_like.rollout.rollout_engine import Completion, Sampled
from verl_like.trainer.dynamic_source import MaskingSource, ResamplingSource, renumbered

N = 2
Verdict = Callable[[int, int], list[float]]  # (position in the data set, step) -> score of each response


def teaches(position: int, step: int) -> list[float]:
    """Two prompts of three have a signal."""
    return [1.0, 1.0] if position % 3 == 0 else [float(position), 0.0]


@dataclass
class ScriptedPolicy:
    """Answers prompt p with the single tokens p, p: the grader can tell which prompt it was."""

    answered: list[list[int]] = field(default_factory=list)

    def generate(self, prompts: Prompts, sampling: Any, *, n: int, seed: Any, step: int, on_response: Any) -> Rollouts:
        self.answered.append(prompts.group_B.tolist())
        completions = [
            Completion(request_id="", sampled=Sampled.of([row.index], [-1.0], step), finish_reason="stop")
            for row in prompts.rows
            for _ in range(n)
        ]
        for i, completion in enumerate(completions):
            on_response(i, completion)
        return assemble_rollouts(prompts, n, completions)


@dataclass
class ScriptedRewards:
    verdict: Verdict = teaches
    graded: int = 0

    def begin(self, prompts: Prompts, *, n: int, step: int) -> ScriptedGrading:
        return ScriptedGrading(self, [row.index for row in prompts.rows for _ in range(n)], step)


@dataclass
class ScriptedGrading:
    rewards: ScriptedRewards
    positions: list[int]
    step: int
    seen: dict[int, int] = field(default_factory=dict)

    def add(self, row: int, completion: Completion) -> None:
        assert row not in self.seen, "a response was graded twice"
        self.seen[row] = completion.token_ids[0]
        self.rewards.graded += 1

    def result(self) -> Scores:
        assert [self.seen[row] for row in range(len(self.positions))] == self.positions
        values = [self.rewards.verdict(p, self.step)[i % N] for i, p in enumerate(self.positions)]
        return Scores(
            score_B=torch.tensor(values),
            valid_B=torch.ones(len(values), dtype=torch.bool),
            extras=[{} for _ in values],
            failures=[None] * len(values),
        )


@pytest.fixture
def dataset(tmp_path: Path) -> PromptDataset:
    files = write_prompts(tmp_path / "a.parquet", ["x" * (i % 5 + 1) for i in range(12)])
    return PromptDataset(DataConfig(), files, CharTokenizer(template=False), split="train")


def source(
    dataset: PromptDataset, *, batch: int = 4, draw: int = 3, masking: bool = False, **rules: Any
) -> ResamplingSource | MaskingSource:
    config = PPOConfig(
        data=DataConfig(train_batch_size=batch, gen_batch_size=draw),
        algorithm=AlgorithmConfig(filter_groups=FilterGroupsConfig(enable=True, **rules)),
    )
    sampler = ResumableSampler(len(dataset), shuffle=False, seed=1, identity=dataset.identity())
    loader = PromptLoader(dataset, sampler, batch if masking else draw, drop_last=masking)
    kind = MaskingSource if masking else ResamplingSource
    return kind(loader, None, config, n=N, seed=1)  # pyright: ignore[reportArgumentType]


def steps(given: Any, count: int, first: int = 1, verdict: Verdict = teaches) -> list[tuple[list[int], list[float]]]:
    """(positions, scores) of each step's batch."""
    taken = []
    for step in range(first, first + count):
        rollouts, pending = given.next_rollouts(ScriptedPolicy(), ScriptedRewards(verdict), step)
        pending.wait()
        rollouts.check()
        taken.append(([row.index for row in rollouts.rows], pending.result().score_B.tolist()))
    return taken


def test_it_draws_until_the_batch_is_full_of_groups_with_a_signal(dataset: PromptDataset) -> None:
    """Positions 0, 3, 6, 9 teach nothing. Draws of 3: two useful groups each, so that two draws fill a batch of 4."""
    given = source(dataset)
    policy, rewards = ScriptedPolicy(), ScriptedRewards()
    rollouts, pending = given.next_rollouts(policy, rewards, 1)  # pyright: ignore[reportArgumentType]
    assert [row.index for row in rollouts.rows] == [1, 1, 2, 2, 4, 4, 5, 5]
    assert pending.result().score_B.tolist() == [1.0, 0.0, 2.0, 0.0, 4.0, 0.0, 5.0, 0.0]
    assert rollouts.group_B.tolist() == [1, 1, 2, 2, 4, 4, 5, 5]
    assert policy.answered == [[0, 1, 2], [3, 4, 5]] and rewards.graded == 12  # every response once
    assert given.metrics() == {
        "train/num_gen_batches": 2.0,
        "filter_groups/num_drawn": 6.0,
        "filter_groups/num_dropped": 2.0,
        "filter_groups/num_unused": 0.0,
        "filter_groups/signal_fraction": pytest.approx(2 / 3),
        "filter_groups/score_mean_drawn": pytest.approx((2 * 1 + 2 * 1 + 1 + 2 + 4 + 5) / 12),
    }


def test_unused_prompts_come_first_in_the_next_step(dataset: PromptDataset) -> None:
    given = source(dataset, batch=3)  # two draws give four groups: the fourth goes back
    policy = ScriptedPolicy()
    for step in (1, 2):
        rollouts, _ = given.next_rollouts(policy, ScriptedRewards(), step)  # pyright: ignore[reportArgumentType]
        if step == 1:
            assert given.metrics()["filter_groups/num_unused"] == 1.0
            assert [row.index for row in rollouts.rows] == [1, 1, 2, 2, 4, 4]
    assert policy.answered == [[0, 1, 2], [3, 4, 5], [5, 6, 7], [8, 9, 10]]  # 5 again, under its old number
    assert [row.index for row in rollouts.rows] == [5, 5, 7, 7, 8, 8]
    assert given.state_dict()["returned"] == [[10, 10]]


@pytest.mark.parametrize("before", range(5))
def test_a_resumed_source_goes_on_exactly_where_it_stopped(dataset: PromptDataset, before: int) -> None:
    whole = steps(source(dataset, batch=3), 5)
    first = source(dataset, batch=3)
    steps(first, before)
    second = source(dataset, batch=3)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert steps(second, 5 - before, first=before + 1) == whole[before:]
    assert len({str(step) for step in whole}) > 1


def test_no_prompt_is_lost_or_trained_on_twice_in_an_epoch(dataset: PromptDataset) -> None:
    """Every useful prompt of an epoch is trained on once, however draws and batches are cut."""
    useful = [p for p in range(12) if p % 3]
    for batch, draw in ((2, 4), (4, 6), (2, 3), (4, 3), (1, 5)):
        trained = [row for rows, _ in steps(source(dataset, batch=batch, draw=draw), 8 // batch) for row in rows]
        assert sorted(trained) == sorted(useful * N), (batch, draw)


def test_it_gives_up_and_names_the_keys(dataset: PromptDataset) -> None:
    given = source(dataset, max_num_gen_batches=2)
    with pytest.raises(ValueError) as caught:
        steps(given, 1, verdict=lambda position, step: [1.0, 1.0] if position else [1.0, 0.0])
    text = str(caught.value)
    assert "step 1: 2 draws (6 prompts, mean score 0.917) gave 1 groups with a signal" in text
    for key in ("data.train_batch_size=4", "max_num_gen_batches=2", "data.gen_batch_size=3", "resample=false"):
        assert key in text


def test_without_a_bound_it_stops_after_ten_passes(dataset: PromptDataset) -> None:
    policy = ScriptedPolicy()
    rewards = ScriptedRewards(lambda position, step: [0.0, 0.0])
    with pytest.raises(ValueError, match="40 draws"):
        source(dataset).next_rollouts(policy, rewards, 1)  # pyright: ignore[reportArgumentType]
    assert len(policy.answered) == 40


def test_keep_and_mask_draws_once(dataset: PromptDataset) -> None:
    given = source(dataset, masking=True, resample=False)
    policy = ScriptedPolicy()
    rollouts, pending = given.next_rollouts(policy, ScriptedRewards(), 1)  # pyright: ignore[reportArgumentType]
    assert [row.index for row in rollouts.rows] == [0, 0, 1, 1, 2, 2, 3, 3]
    trained_B = pending.result().trained_B
    assert trained_B is not None and trained_B.tolist() == [False, False, True, True, True, True, False, False]
    assert policy.answered == [[0, 1, 2, 3]]
    assert given.metrics()["filter_groups/num_dropped"] == 2.0
    assert given.metrics()["train/num_gen_batches"] == 1.0


def test_failures_name_their_rows_of_the_joined_batch() -> None:
    failure = RewardFailure(row=9, data_source="toy", kind="timeout", message="")
    scores = Scores(
        score_B=torch.zeros(2),
        valid_B=torch.tensor([True, False]),
        extras=[{}, {}],
        failures=[None, failure],
    )
    moved = renumbered(scores).failures
    assert moved[0] is None and moved[1] is not None and moved[1].row == 1
