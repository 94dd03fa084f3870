"""The reward model's worker against Hugging Face's own sequence classifier."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import ROOT, load_script
from verl_like.cluster.local import LocalWorkerGroup
from verl_like.config import ModelConfig
from verl_like.config.batch_plan import BatchPlan
from verl_like.models.loading import check_score_head, load_hf_config
from verl_like.trainer.compose import compose
from verl_like.trainer.roles import RewardModelHandle
from verl_like.workers.spec import WorkerSpec


@pytest.fixture(scope="module")
def recipe() -> Any:
    return load_script(ROOT / "recipes" / "reward_model" / "train.py", "reward_model_recipe")


def group_of(path: Path, tmp_path: Path, *overrides: str) -> tuple[LocalWorkerGroup, RewardModelHandle]:
    config = compose(
        [
            "reward_model.enable=True",
            "trainer.placement={reward:{roles:[reward]}}",
            f"reward_model.model.path={path}",
            "data.train_files=x.parquet",
            "actor_rollout_ref.rollout.n=2",
            "data.train_batch_size=2",
            "actor_rollout_ref.actor.ppo_mini_batch_size=2",
            *overrides,
        ]
    )
    plan = BatchPlan.build(config, 1, 100)
    spec = WorkerSpec(
        config=config, plan=plan, tokenizer_size=9, max_model_len=8, profile_dir=str(tmp_path), pool="reward"
    )
    workers = LocalWorkerGroup("verl_like.workers.host:RoleHost", spec)
    return workers, RewardModelHandle(workers, plan, balance=True, timeout_s=60)


@pytest.mark.parametrize("overrides", [(), ("reward_model.model.use_remove_padding=False",)], ids=["packed", "padded"])
def test_scores_are_those_of_hugging_face(recipe: Any, tmp_path: Path, overrides: tuple[str, ...]) -> None:
    settings = recipe.Settings(hidden_size=64)
    model = recipe.build_model(50, 0, settings)
    model.save_pretrained(tmp_path / "rm")
    texts = [[3, 4, 5], [7] * 17, [9, 8], list(range(10, 40))]
    with torch.no_grad():
        wanted = [model(input_ids=torch.tensor([text])).logits[0, 0].item() for text in texts]
    budget = "reward_model.forward_max_token_len_per_gpu=40"  # several micro-batches
    workers, group = group_of(tmp_path / "rm", tmp_path, budget, *overrides)
    try:
        assert group.scores(texts) == pytest.approx(wanted, abs=1e-5)
    finally:
        workers.shutdown()


@pytest.mark.slow
def test_a_model_trained_on_preferences_prefers_what_people_chose(
    recipe: Any, tmp_path: Path, shared_data: Path
) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(shared_data / "tok_minimind")
    settings = recipe.Settings(hidden_size=64, num_layers=1, steps=60)
    rows = recipe.read_pairs(shared_data / "tool_chat" / "dpo_en_demo.json")[:60]
    recipe.train(tmp_path, tokenizer, rows, rows[:20], settings)
    pairs = [
        [tokenizer.apply_chat_template(row["prompt"] + row[side], return_dict=False) for side in ("chosen", "rejected")]
        for row in rows
    ]
    workers, group = group_of(tmp_path / "model", tmp_path)
    try:
        values = group.scores([text for pair in pairs for text in pair])
    finally:
        workers.shutdown()
    right = sum(chosen > rejected for chosen, rejected in zip(values[::2], values[1::2], strict=True))
    assert right / len(pairs) > 0.85  # a random model: 0.5


def test_a_model_without_a_trained_head_is_refused(recipe: Any, tmp_path: Path) -> None:
    model = recipe.build_model(50, 0, recipe.Settings(hidden_size=64))
    model.model.save_pretrained(tmp_path / "rm")
    config = ModelConfig(path=str(tmp_path / "rm"))
    with pytest.raises(ValueError, match=r"reward_model\.model\.path=.*score\.weight.*\(1, 64\).*there is none"):
        check_score_head(config, load_hf_config(config), "reward_model.model.path")
    model.save_pretrained(tmp_path / "whole")
    whole = ModelConfig(path=str(tmp_path / "whole"))
    check_score_head(whole, load_hf_config(whole), "reward_model.model.path")
    with pytest.raises(ValueError, match="must be a local folder"):
        check_score_head(ModelConfig(path="org/hub-name"), load_hf_config(whole), "reward_model.model.path")
