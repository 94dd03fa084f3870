"""GRPO on a tiny mixture of experts: a whole run with the proof of each weight sync, whose model loads elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import metrics_of, overrides, write_task
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.unit.models import zoo
from verl_like.episodes import rows
from verl_like.models.families import num_experts
from verl_like.models.routes import filled
from verl_like.parallel.sharding import saved_buffers
from verl_like.trainer.compose import compose
from verl_like.trainer.recording import read_step, step_file
from verl_like.trainer.run import run as train

R3 = {"actor.router_replay.mode": "R3", "rollout.enable_rollout_routing_replay": True}


def tiny_mixture(folder: Path, tiny_model: Path, name: str) -> Path:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    model = Path(zoo.folder(folder, name, vocab_size=len(tokenizer), initializer_range=0.05))
    tokenizer.save_pretrained(model)
    return model


@pytest.mark.parametrize("name", ["R2", "R3", "compared"])
def test_routes_travel_with_the_rows_of_a_step(tmp_path: Path, tiny_model: Path, name: str) -> None:
    """With several updates a step, in bfloat16; a recorded step has them, and another run trains on it."""
    model = tiny_mixture(tmp_path, tiny_model, "qwen3_moe")
    keys: dict[str, Any] = {"R2": {"actor.router_replay.mode": "R2"}, "R3": R3, "compared": {list(R3)[1]: True}}[name]
    settings = {
        "trainer.total_training_steps": 2,
        "trainer.record_freq": 1,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 4,
        "actor_rollout_ref.actor.fsdp_config.dtype": "bfloat16",
        "actor_rollout_ref.actor.use_kl_loss": True,
        **{f"actor_rollout_ref.{key}": value for key, value in keys.items()},
    }
    task = write_task(tmp_path)
    train(compose(overrides(task, model, tmp_path / "out", **settings)))
    shares = [step["router/differing_share"] for step in metrics_of(tmp_path / "out")]
    assert all(0 < share < 0.5 for share in shares)
    columns = read_step(step_file(tmp_path / "out" / "recorded", 1)).columns
    routes_T, lengths = columns["experience.routes_T"], columns["experience.routed_length_B"]
    source = "evaluated" if name == "R2" else "rollouts"
    assert torch.equal(routes_T, columns[f"{source}.routes_T"]) and len(routes_T) == int(lengths.sum())
    if name == "R3":
        settings |= {"actor_rollout_ref.rollout.name": "recorded", "trainer.record_freq": -1}
        settings |= {"actor_rollout_ref.rollout.skip_dump_dir": str(tmp_path / "out" / "recorded")}
        train(compose(overrides(task, model, tmp_path / "again", **settings)))
        again = [step["router/differing_share"] for step in metrics_of(tmp_path / "again")]
        assert again == shares


def test_routes_of_other_tokens_are_found_at_the_start(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: each token gets the routes of the one before it."""
    monkeypatch.setattr(rows, "filled", lambda *given: np.roll(filled(*given), 1, 0))
    settings = {f"actor_rollout_ref.{key}": value for key, value in R3.items()}
    model = tiny_mixture(tmp_path, tiny_model, "qwen3_moe")
    with pytest.raises(
        ValueError, match=r"router_replay.mode=R3: routes that the rollout engine records are not those of"
    ):
        train(compose(overrides(write_task(tmp_path), model, tmp_path / "out", **settings)))


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
    model = tiny_mixture(tmp_path, tiny_model, name)
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
