"""The main job on one CUDA device with a model of the size of Qwen2.5-0.5B: bfloat16, vLLM, offload, sleep and wake."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm")
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "e2e"))

from support import main_ppo, metrics_of, overrides, write_task

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(1200)]

QWEN25_05B = {
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151936,  # far beyond the character tokenizer: the rest must be masked on both sides
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}


@pytest.fixture(scope="module")
def half_billion(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder without weights: the trainer initialises them from config.json and trainer.seed."""
    folder = tmp_path_factory.mktemp("qwen_05b")
    for path in tiny_model.iterdir():
        if path.suffix != ".safetensors":
            (folder / path.name).write_bytes(path.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    config.pop("layer_types", None)
    (folder / "config.json").write_text(json.dumps(config | QWEN25_05B))
    return folder


@pytest.mark.parametrize("offload", [False, True])
def test_main_job_on_cuda(tmp_path: Path, half_billion: Path, offload: bool) -> None:
    settings = {
        "trainer.launcher": "ray",
        "trainer.device": "cuda",
        "trainer.n_gpus_per_node": 1,
        "trainer.total_training_steps": 4,
        "trainer.save_freq": 4,
        "actor_rollout_ref.rollout.name": "vllm",
        "actor_rollout_ref.rollout.gpu_memory_utilization": 0.4,
        "actor_rollout_ref.actor.old_log_probs": "recompute",
        "actor_rollout_ref.actor.use_kl_loss": True,
        "actor_rollout_ref.actor.optim.lr": 1e-5,
        "actor_rollout_ref.actor.fsdp_config.param_offload": offload,
        "actor_rollout_ref.actor.fsdp_config.optimizer_offload": offload,
    }
    result = main_ppo(overrides(write_task(tmp_path), half_billion, tmp_path / "out", **settings), timeout=1100)
    assert result.returncode == 0, result.stdout
    records = metrics_of(tmp_path / "out")
    assert len(records) == 4
    for record in records:
        assert record["weight_sync/probe_gap_mean"] < 2e-2
        assert record["training/rollout_probs_diff_mean"] < 1e-2
        assert record["perf/max_memory_allocated_gb"] > 1.0
    assert abs(records[0]["actor/ppo_kl"]) < 1e-3


def test_conversations_with_tools(tmp_path: Path) -> None:
    """Turns of many episodes meet in the engine, with tool processes beside it: does a small model learn to call, and
    does the trainer agree with the sampler about tokens that were sampled in several requests?"""
    out, recipe = tmp_path / "out", Path(__file__).resolve().parents[2] / "recipes" / "agent_tools" / "run.sh"
    settings = ("trainer.device=cuda", "trainer.n_gpus_per_node=1", f"trainer.default_local_dir={out}")
    memory = "actor_rollout_ref.rollout.gpu_memory_utilization=0.2"
    environment = os.environ | {"PYTHON": sys.executable, "OUT": str(tmp_path), "ROLLOUT": "vllm"}
    subprocess.run(["bash", str(recipe), *settings, memory], env=environment, check=True, timeout=1100)
    records = [record for record in metrics_of(out) if "tools/calls/mean" in record]
    assert records[-1]["tools/calls/mean"] > 0.9 and records[-1]["critic/score/mean"] > 0.85
    assert all(record["training/rollout_probs_diff_mean"] < 1e-2 for record in records)


def test_requests_are_added_and_aborted_while_others_decode(tmp_path: Path, half_billion: Path) -> None:
    """More prompts than a step uses, few at a time: what is left is aborted, and nothing of it is in the next step."""
    scheduler = "actor_rollout_ref.rollout.scheduler"
    settings = {
        "trainer.launcher": "ray",
        "trainer.device": "cuda",
        "trainer.n_gpus_per_node": 1,
        "trainer.total_training_steps": 4,
        "actor_rollout_ref.rollout.name": "vllm",
        "actor_rollout_ref.rollout.gpu_memory_utilization": 0.4,
        f"{scheduler}.additional_prompts.enable": True,
        f"{scheduler}.additional_prompts.max": 4,
        f"{scheduler}.max_running_requests": 24,
    }
    result = main_ppo(overrides(write_task(tmp_path), half_billion, tmp_path / "out", **settings), timeout=1100)
    assert result.returncode == 0, result.stdout
    records = metrics_of(tmp_path / "out")
    assert len(records) == 4 and sum(record["scheduler/num_unused"] for record in records) > 0
    assert all(record["weight_sync/probe_gap_mean"] < 2e-2 for record in records)
