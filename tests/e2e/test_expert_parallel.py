"""GRPO on a tiny mixture of experts whose experts are handed out to two ranks, asked for by Megatron's keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support import main_ppo, metrics_of, overrides, write_task
from transformers import AutoTokenizer

from tests.unit.models import zoo

pytestmark = pytest.mark.slow
SPREAD, LEARNING_RATE = "actor_rollout_ref.actor.fsdp_config.expert_parallel_size", "actor_rollout_ref.actor.optim.lr"


def mixture(folder: Path, tiny_model: Path) -> Path:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}  # of a size that vLLM has a kernel for on a CPU
    model = Path(zoo.folder(folder, "qwen3_moe", vocab_size=len(tokenizer), initializer_range=0.05, **heads))
    tokenizer.save_pretrained(model)
    return model


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("engine", "steps"), [("hf", 8), ("vllm", 2)])
def test_a_run_is_that_of_ranks_that_share_all_experts(
    tmp_path: Path, tiny_model: Path, engine: str, steps: int
) -> None:
    """The first step is the same to rounding; each sync is proved, bit by bit and by the probe."""
    model = mixture(tmp_path, tiny_model)
    settings = {
        "trainer.launcher": "ray",
        "trainer.n_gpus_per_node": 2,
        "trainer.total_training_steps": steps,
        "actor_rollout_ref.rollout.name": engine,
        "actor_rollout_ref.actor.use_kl_loss": True,
    }
    spread = {
        "actor_rollout_ref.actor.strategy": "megatron",
        "actor_rollout_ref.actor.megatron.expert_model_parallel_size": 2,  # the reference follows
        "actor_rollout_ref.actor.megatron.tensor_model_parallel_size": 2,
        "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size": 2,
    }
    task, found = write_task(tmp_path), {}
    for name, more in (("spread", spread), ("whole", {"trainer.total_training_steps": 1})):
        result = main_ppo(overrides(task, model, tmp_path / name, **(settings | more)), timeout=500)
        assert result.returncode == 0, result.stdout
        assert "2 (2 data parallel)" in result.stdout
        assert result.stdout.count("; same numbers") == (2 if more is spread else 0)
        found[name] = metrics_of(tmp_path / name)
    records = found["spread"]
    assert max(record["weight_sync/probe_gap"] for record in records) < 1e-3
    for key in ("actor/grad_norm", "actor/pg_loss", "actor/moe_max_load", "critic/score/mean"):
        assert records[0][key] == pytest.approx(found["whole"][0][key], rel=1e-4, abs=1e-7), key
    assert len(records) == steps
    scores = [record["critic/score/mean"] for record in records]
    assert engine == "vllm" or sum(scores[-2:]) / 2 > sum(scores[:2]) / 2 + 0.1


@pytest.mark.timeout(1200)
def test_a_run_on_four_ranks_is_one_ranks(tmp_path: Path, tiny_model: Path) -> None:
    """PPO with experts in halves, each sharded over two ranks; the critic is such a mixture too."""
    model, task, found = mixture(tmp_path, tiny_model), write_task(tmp_path), {}
    settings = {
        "algorithm.adv_estimator": "gae",
        "critic.model.path": model,
        "trainer.total_training_steps": 2,
        "actor_rollout_ref.actor.use_kl_loss": True,
        "actor_rollout_ref.actor.old_log_probs": "recompute",
        "actor_rollout_ref.actor.ppo_mini_batch_size": 4,
        "actor_rollout_ref.actor.optim.eps": 1e-3,
        "critic.optim.eps": 1e-3,
    }
    many = {"trainer.launcher": "ray", "trainer.n_gpus_per_node": 4, SPREAD: 2}  # the reference follows
    many["critic.model.fsdp_config.expert_parallel_size"] = 2
    for name, more in (("one", {"trainer.launcher": "local"}), ("many", many)):
        result = main_ppo(overrides(task, model, tmp_path / name, **(settings | more)), timeout=500)
        assert result.returncode == 0, result.stdout
        found[name] = metrics_of(tmp_path / name)
    assert "4 (4 data parallel)" in result.stdout
    assert max(record["weight_sync/probe_gap"] for record in found["many"]) < 1e-5
    names = [f"critic/{name}" for name in ("score/mean", "vf_loss", "grad_norm", "values/mean")]
    for single, several in zip(found["one"], found["many"], strict=True):
        for name in (*names, "actor/pg_loss", "actor/grad_norm", "actor/kl_loss"):
            assert several[name] == pytest.approx(single[name], rel=2e-4, abs=1e-6), name


def rise(scores: list[float]) -> float:
    return (sum(scores[-2:]) - sum(scores[:2])) / 2


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_reward_rises_as_on_one_rank(tmp_path: Path, tiny_model: Path, seed: int) -> None:
    """With vLLM, whose samples follow from seeds of their own; and it stays where nothing is learnt."""
    model, task, found = mixture(tmp_path, tiny_model), write_task(tmp_path), dict[str, list[float]]()
    runs: dict[str, dict[str, Any]] = {"one": {}, "spread": {SPREAD: 2}, "still": {SPREAD: 2, LEARNING_RATE: 0}}
    for name, more in runs.items():
        settings = {
            "trainer.launcher": "ray",
            "trainer.n_gpus_per_node": 1 if name == "one" else 2,
            "trainer.total_training_steps": 8,
            "trainer.seed": seed,
            "actor_rollout_ref.rollout.name": "vllm",
        }
        result = main_ppo(overrides(task, model, tmp_path / name, **(settings | more)), timeout=580)
        assert result.returncode == 0, result.stdout
        found[name] = [record["critic/score/mean"] for record in metrics_of(tmp_path / name)]
        assert len(found[name]) == 8
    print(f"seed {seed}:", {name: [round(score, 3) for score in scores] for name, scores in found.items()})
    assert found["spread"][:2] == pytest.approx(found["one"][:2], abs=0.02)
    assert rise(found["spread"]) > 0.3 and rise(found["spread"]) > 0.7 * rise(found["one"])
    assert rise(found["still"]) < 0.1
