"""The rows of the check, its settings, and the room that it takes."""

from __future__ import annotations

from pathlib import Path

import torch

from verl_like.config import ModelConfig
from verl_like.kit.selfcheck.material import long_lengths, most_sampled, random_rollouts, short_lengths
from verl_like.kit.selfcheck.plain import PlainModel
from verl_like.kit.selfcheck.tiny import write_tiny_model
from verl_like.kit.selfcheck.work import comparable
from verl_like.models.prefix_tree import beginnings
from verl_like.trainer.compose import compose


def test_responses_to_one_prompt_begin_alike() -> None:
    """A fault in trees that are deeper than prompts meets rows that have them."""
    rollouts = random_rollouts(short_lengths(12), 100, difficulty_key="difficulty")
    prompts = rollouts.prompt_length_B.tolist()
    deeper = [b for b, common in enumerate(beginnings(rollouts).repeated()) if common > prompts[b]]
    assert len(deeper) == 4  # of six pairs; two are an episode whose second part has a prompt of its own


def test_a_long_row_of_many_ids_ends_with_what_was_sampled() -> None:
    ids = 2**17
    few, most = random_rollouts(long_lengths(600), ids, difficulty_key="difficulty"), most_sampled(ids)[0]
    many = random_rollouts(long_lengths(600), 100, difficulty_key="difficulty")
    assert most == 64 and most_sampled(100) == (2**23 // 100, 28) and most_sampled(2**20) == (28, 12)
    assert few.response_mask_BR.sum(dim=1).tolist() == [most + 1, most + 1, 20]
    assert few.response_mask_BR[0, [0, -most]].all() and not few.response_mask_BR[0, 1:-most].any()
    assert many.response_mask_BR.sum(dim=1).tolist() == [448, 127, 20]


def test_routes_are_not_replayed(tmp_path: Path) -> None:
    """No part of the check has routes of a sampler."""
    model = f"actor_rollout_ref.model.path={write_tiny_model(tmp_path)}"
    config = compose(["data.train_files=x.parquet", model, "actor_rollout_ref.actor.router_replay.mode=R2"])
    assert comparable(config).actor_rollout_ref.actor.router_replay.mode == "disabled"


def test_a_resting_model_has_no_weights_in_memory(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path)
    model = PlainModel(ModelConfig(path=path), vocab_size=40, seed=1, device="cpu", dtype=torch.float64)
    before = {name: weight.detach().clone() for name, weight in model.hf.named_parameters()}
    with model.resting(str(tmp_path)):
        assert not any(weight.numel() for weight in model.hf.parameters())
    assert all(torch.equal(weight, before[name]) for name, weight in model.hf.named_parameters())
