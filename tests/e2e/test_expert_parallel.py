"""GRPO on a tiny mixture of experts whose experts are handed out to two ranks, asked for by Megatron's keys."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import main_ppo, metrics_of, overrides, write_task
from transformers import AutoTokenizer

from tests.unit.models import zoo

pytestmark = pytest.mark.slow


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("engine", "steps"), [("hf", 8), ("vllm", 2)])
def test_a_run_is_that_of_ranks_that_share_all_experts(
    tmp_path: Path, tiny_model: Path, engine: str, steps: int
) -> None:
    """The first step is the same to rounding; each sync is proved, bit by bit and by the probe."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}  # of a size that vLLM has a kernel for on a CPU
    model = Path(zoo.folder(tmp_path, "qwen3_moe", vocab_size=len(tokenizer), initializer_range=0.05, **heads))
    tokenizer.save_pretrained(model)
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
