"""Rows as GRPO has them: neighbours share a prompt, lengths are those of the workload."""

from __future__ import annotations

import pytest
import torch

from verl_like.engine.microbatch import computed_tokens
from verl_like.kit.bench.inputs import grouped_rows, random_prompts
from verl_like.kit.bench.shapes import WORKLOADS, BenchError, Workload

LOAD = Workload(num_prompts=3, responses_per_prompt=4, prompt_length=5, mean_response=7, max_response=20)


def test_the_rows_of_a_group_share_their_prompt() -> None:
    batch = grouped_rows(LOAD, 50, seed=2)
    batch.check()
    assert batch.group_B.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    prompts = [tuple(row) for row in batch.prompt_ids_BP.tolist()]
    assert len(set(prompts)) == 3 and all(len(set(prompts[i : i + 4])) == 1 for i in (0, 4, 8))
    responses = [
        tuple(row[:n]) for row, n in zip(batch.response_ids_BR.tolist(), batch.response_length_B.tolist(), strict=True)
    ]
    assert len(set(responses)) == 12


def test_lengths_mask_and_advantages() -> None:
    batch = grouped_rows(LOAD, 50, seed=2)
    assert batch.response_length_B.tolist() == LOAD.draw_lengths(2)
    assert batch.response_mask_BR.sum(1).tolist() == LOAD.draw_lengths(2)
    assert bool((batch.response_ids_BR[batch.response_mask_BR] >= 3).all())
    first_B = batch.advantages_BR[:, :1]
    assert bool((first_B != 0).all())  # every row has a gradient
    assert torch.equal(batch.advantages_BR, first_B * batch.response_mask_BR)
    assert 0 <= 3 * 5 + 12 * 7 - computed_tokens(batch) < 12  # some responses begin with the same word
    assert int(batch.num_tokens_B().sum()) == 12 * (5 + 7)


def test_responses_that_end_by_themselves() -> None:
    lengths = WORKLOADS["cpu"].response_lengths(1)
    assert len(lengths) == 512 and max(lengths) == 128 and min(lengths) < 5
    assert 50 < sum(lengths) / 512 < 60  # 64 x (1 - (63/64)^128) = 55.5


def test_other_seeds_give_other_prompts() -> None:
    one, two = (random_prompts(LOAD, 50, seed=seed) for seed in (1, 2))
    assert len(one) == 3 and one != two and all(len(ids) == LOAD.prompt_length for ids in one)


def test_fewer_rows_are_whole_groups() -> None:
    assert LOAD.with_rows(None) is LOAD
    assert LOAD.with_rows(8).num_prompts == 2
    for rows, near in ((6, 4), (2, 4)):
        with pytest.raises(BenchError, match=f"--rows {rows} are no whole groups of 4 .* use {near}"):
            LOAD.with_rows(rows)
