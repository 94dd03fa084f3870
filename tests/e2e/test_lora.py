"""GRPO with LoRA: a whole run, resumed, against the same checks as any other run."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from support import metrics_of, overrides, write_task

from verl_like.trainer.compose import compose
from verl_like.trainer.run import run as train

LORA = {
    "actor_rollout_ref.model.lora_rank": 8,
    "actor_rollout_ref.model.lora_alpha": 16,
    "actor_rollout_ref.actor.optim.lr": 2e-2,
    "actor_rollout_ref.actor.use_kl_loss": True,
    "actor_rollout_ref.actor.checkpoint.save_contents": "[model,optimizer,extra,hf_model]",
}


def with_large_logits(model: Path, folder: Path) -> Path:
    """The logits of a fresh head of size 0.02 differ little, whatever the layers do, and LoRA leaves the head alone."""
    shutil.copytree(model, folder)
    tensors = load_file(folder / "model.safetensors")
    scaled = {name: t * 3 if name == "model.norm.weight" else t for name, t in tensors.items()}
    save_file(scaled, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def run(folder: Path, model: Path, name: str, **settings: Any) -> list[dict[str, float]]:
    train(compose(overrides(write_task(folder), model, folder / name, **LORA, **settings)))
    return metrics_of(folder / name)


def test_adapters_travel_alone_and_the_run_resumes(tmp_path: Path, tiny_model: Path) -> None:
    model = with_large_logits(tiny_model, tmp_path / "model")
    settings = {"actor_rollout_ref.model.lora.merge": False, "trainer.save_freq": 2}
    whole = run(tmp_path, model, "whole", **settings, **{"trainer.total_training_steps": 4})
    sent = [record["weight_sync/num_tensors"] for record in whole if "weight_sync/num_tensors" in record]
    num_adapters = len(load_file(tmp_path / "whole/global_step_4/actor/adapter/adapter_model.safetensors"))
    assert sent[-1] == num_adapters and all(count in (num_adapters, sent[0]) for count in sent)
    assert max(record.get("weight_sync/probe_gap_mean", 0.0) for record in whole) < 1e-4
    run(tmp_path, model, "parts", **settings, **{"trainer.total_training_steps": 2})
    parts = run(tmp_path, model, "parts", **settings, **{"trainer.total_training_steps": 4})
    for key in ("critic/score/mean", "actor/pg_loss", "actor/grad_norm"):
        assert parts[-1][key] == whole[-1][key]


def test_the_reward_rises_and_the_run_resumes(tmp_path: Path, tiny_model: Path) -> None:
    model = with_large_logits(tiny_model, tmp_path / "model")
    steps = {"trainer.total_training_steps": 10, "trainer.save_freq": 5}
    whole = run(tmp_path, model, "whole", **steps)
    early, late = (sum(r["critic/score/mean"] for r in part) / 3 for part in (whole[:3], whole[-3:]))
    assert late > early + 0.1
    assert whole[0]["actor/kl_loss"] == 0.0 and whole[-1]["actor/kl_loss"] > 0.01  # the base stays where it was
    run(tmp_path, model, "parts", **(steps | {"trainer.total_training_steps": 5}))
    parts = run(tmp_path, model, "parts", **steps)
    assert parts[-1]["critic/score/mean"] == whole[-1]["critic/score/mean"]
    folders = [tmp_path / name / "global_step_10" / "actor" for name in ("whole", "parts")]
    first, second = (load_file(folder / "huggingface" / "model.safetensors") for folder in folders)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert (folders[0] / "adapter" / "adapter_model.safetensors").exists()
