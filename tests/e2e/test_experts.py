"""GRPO on a tiny mixture of experts: a whole run with the proof of each weight sync, whose model loads elsewhere."""

from __future__ import annotations

from pathlib import Path

import torch
from support import metrics_of, overrides, write_task
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.unit.models import zoo
from verl_like.trainer.compose import compose
from verl_like.trainer.run import run as train


def test_the_reward_rises_and_the_model_loads(tmp_path: Path, tiny_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    model = Path(zoo.folder(tmp_path, "qwen3_moe", vocab_size=len(tokenizer), initializer_range=0.05))
    tokenizer.save_pretrained(model)
    settings = {
        "trainer.total_training_steps": 8,
        "trainer.save_freq": 8,
        "actor_rollout_ref.actor.checkpoint.save_contents": "[model,optimizer,extra,hf_model]",
    }
    train(compose(overrides(write_task(tmp_path), model, tmp_path / "out", **settings)))
    steps = metrics_of(tmp_path / "out")
    early, late = (sum(r["critic/score/mean"] for r in part) / 2 for part in (steps[:2], steps[-2:]))
    assert late > early + 0.1
    assert all(record["weight_sync/probe_gap"] < 1e-3 for record in steps)
    folder = tmp_path / "out" / "global_step_8" / "actor" / "huggingface"
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert loaded.config.num_experts == 8
    assert torch.isfinite(loaded(torch.tensor([[1, 2, 3]])).logits).all()
