from __future__ import annotations

import pytest
import torch

from verl_like.batch import PromptRow, Prompts, pad_rows
from verl_like.rollout.assemble import assemble_rollouts, build_requests, request_seed
from verl_like.rollout.rollout_engine import Completion, Sampled, SamplingParams


@pytest.fixture
def prompts() -> Prompts:
    ids = [[5, 6, 7], [8]]
    return Prompts(
        prompt_ids_BP=pad_rows(ids, side="left", dtype=torch.int32),
        prompt_length_B=torch.tensor([3, 1]),
        group_B=torch.tensor([40, 41]),
        rows=[PromptRow(index=i, data_source="d", messages=[]) for i in range(2)],
    )


def test_seed_is_stable_and_distinct() -> None:
    assert request_seed(1, 2, 3, 4) == 579868893099880874
    seeds = {request_seed(s, t, g, k) for s in range(3) for t in range(3) for g in range(12) for k in range(12)}
    assert len(seeds) == 3 * 3 * 12 * 12
    assert all(0 <= s < 2**62 for s in seeds)


def test_requests_are_prompt_major(prompts: Prompts) -> None:
    sampling = SamplingParams(max_tokens=4)
    requests = build_requests(prompts, 2, sampling, seed=1, step=7)
    assert [r.prompt_ids for r in requests] == [[5, 6, 7], [5, 6, 7], [8], [8]]
    assert [r.seed for r in requests] == [request_seed(1, 7, g, k) for g in (40, 41) for k in (0, 1)]
    assert len({r.request_id for r in requests}) == 4
    unseeded = build_requests(prompts, 1, sampling, seed=1, step=7, seed_per_request=False)
    assert [r.seed for r in unseeded] == [None, None]


def test_assembled_rows(prompts: Prompts) -> None:
    answers = [[1], [1, 2, 3], [], [4, 5]]
    completions = [
        Completion(
            request_id=str(i),
            sampled=Sampled.of(tokens, [-0.5] * len(tokens), i + 1),
            finish_reason="stop" if i else "length",
        )
        for i, tokens in enumerate(answers)
    ]
    rollouts = assemble_rollouts(prompts, 2, completions)
    rollouts.check()
    assert rollouts.response_ids_BR.tolist() == [[1, 0, 0], [1, 2, 3], [0, 0, 0], [4, 5, 0]]
    assert rollouts.response_mask_BR.sum(dim=1).tolist() == [1, 3, 0, 2]
    assert rollouts.group_B.tolist() == [40, 40, 41, 41]
    assert rollouts.prompt_ids_BP.tolist() == [[5, 6, 7], [5, 6, 7], [0, 0, 8], [0, 0, 8]]
    assert rollouts.rollout_log_probs_BR is not None
    assert rollouts.rollout_log_probs_BR[0].tolist() == [-0.5, 0.0, 0.0]
    assert rollouts.weight_version_BR.tolist() == [[1, 0, 0], [2, 2, 2], [0, 0, 0], [4, 4, 0]]
    assert rollouts.finish_reasons == ["length", "stop", "stop", "stop"]
    assert [row.index for row in rollouts.rows] == [0, 0, 1, 1]


def test_wrong_number_of_completions_is_refused(prompts: Prompts) -> None:
    with pytest.raises(ValueError, match="0 completions"):
        assemble_rollouts(prompts, 2, [])
