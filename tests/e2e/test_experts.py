"""GRPO on a tiny mixture of experts: a whole run with the proof of each weight sync, whose model loads elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support import metrics_of, overrides, write_task
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.unit.models import zoo
from verl_like.models.families import num_experts
from verl_like.parallel.sharding import saved_buffers
from verl_like.trainer.compose import compose
from verl_like.trainer.run import run as train


@pytest.mark.parametrize(
    ("name", "router"),
    [
        ("qwen3_moe", {}),
        pytest.param("deepseek_v3", {"bias_update_rate": 0.01, "balance_loss_coef": 0.01}, marks=pytest.mark.slow),
        pytest.param("glm4_moe", {"bias_update_rate": 0.01}, marks=pytest.mark.slow),
        pytest.param("gpt_oss", {"z_loss_coef": 0.001}, marks=pytest.mark.slow),
    ],
)
def test_the_reward_rises_and_the_model_loads(
    tmp_path: Path, tiny_model: Path, name: str, router: dict[str, float]
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    model = Path(zoo.folder(tmp_path, name, vocab_size=len(tokenizer), initializer_range=0.05))
    tokenizer.save_pretrained(model)
    settings = {
        "trainer.total_training_steps": 8,
        "trainer.save_freq": 8,
        "actor_rollout_ref.actor.checkpoint.save_contents": "[model,optimizer,extra,hf_model]",
        **{f"actor_rollout_ref.actor.router.{key}": value for key, value in router.items()},
    }
    train(compose(overrides(write_task(tmp_path), model, tmp_path / "out", **settings)))
    steps = metrics_of(tmp_path / "out")
    early, late = (sum(r["critic/score/mean"] for r in part) / 2 for part in (steps[:2], steps[-2:]))
    assert late > early + 0.1
    assert all(record["weight_sync/probe_gap"] < 1e-3 for record in steps)
    folder = tmp_path / "out" / "global_step_8" / "actor" / "huggingface"
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert num_experts(loaded.config) == 8
    biases = [float(bias.abs().max()) for _, bias in saved_buffers(loaded)]
    assert all(moved > 0 for moved in biases) and bool(biases) == ("bias_update_rate" in router)
    assert torch.isfinite(loaded(torch.tensor([[1, 2, 3]])).logits).all()
