"""A rank that runs out of memory inside the model, where others wait for it: the run goes on with smaller parts."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from support import main_ppo, metrics_of, overrides, write_task
from test_expert_parallel import mixture

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
# Asks the allocator for what it does not have in a layer of rank 1, once there is a checkpoint to go on from.
HUNGRY = """
from pathlib import Path

import torch

def ask_for_too_much(module, arguments):
    if type(module).__name__.endswith("DecoderLayer") and module.training and arguments[0].shape[1] > {limit}:
        if torch.distributed.get_rank() == 1 and Path("{checkpoint}").exists():
            torch.empty(2**47)

torch.nn.modules.module.register_module_forward_pre_hook(ask_for_too_much)
"""
FSDP, ACTOR = "actor_rollout_ref.actor.fsdp_config", "actor_rollout_ref.actor"
ASYNCHRONOUS = {
    "trainer.mode": "separate_async",
    "actor_rollout_ref.hybrid_engine": False,
    "actor_rollout_ref.rollout.nnodes": 1,
    "actor_rollout_ref.rollout.n_gpus_per_node": 1,
    "algorithm.rollout_correction.rollout_is": "token",
    "async_training.max_staleness": 1,
}
RUNS: dict[str, tuple[int, int, int, dict[str, Any]]] = {  # ranks, budget that fits, ranks by which it counts, keys
    "expert": (2, 28, 1, {f"{FSDP}.expert_parallel_size": 2}),
    "context": (2, 28, 2, {f"{FSDP}.context_parallel_size": 2}),
    "tensor": (2, 56, 1, {f"{FSDP}.tensor_parallel_size": 2}),  # norms have half of the tokens
    "ulysses": (2, 28, 2, {f"{ACTOR}.ulysses_sequence_parallel_size": 2}),
    "stages": (2, 28, 1, {f"{FSDP}.pipeline_parallel_size": 2}),
    "shard x expert": (4, 28, 1, {f"{FSDP}.expert_parallel_size": 2}),
    "context, asynchronous": (2, 28, 2, {f"{FSDP}.context_parallel_size": 2, **ASYNCHRONOUS}),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_goes_on_with_smaller_micro_batches(tmp_path: Path, tiny_model: Path, name: str) -> None:
    """Halved twice by new starts, of which trainer.max_restarts=1 allows one in vain; the numbers are those of a run
    whose micro-batches were as small from the start. (Asynchronous ones train other samples each time.)"""
    ranks, fits, slices, axis = RUNS[name]
    alike = "trainer.mode" not in axis
    model, task, found = mixture(tmp_path, tiny_model) if "expert" in name else tiny_model, write_task(tmp_path), {}
    for run, budget in (("large", 4 * fits), ("small", fits))[: 1 + alike]:
        out = tmp_path / run
        module = tmp_path / f"hungry_{run}.py"
        module.write_text(HUNGRY.format(limit=32, checkpoint=out / "global_step_1"))
        settings = {
            "trainer.launcher": "ray",
            "trainer.n_gpus_per_node": ranks,
            "trainer.total_training_steps": 3,
            "trainer.save_freq": 1,
            "trainer.max_restarts": 1,
            "trainer.restart_delay": 0,
            "actor_rollout_ref.model.external_lib": module,
            f"{ACTOR}.ppo_max_token_len_per_gpu": budget,
            f"{ACTOR}.optim.eps": 1e-3,
        }
        done = main_ppo(overrides(task, model, out, **(settings | axis)), timeout=400)
        assert done.returncode == 0, done.stdout[-4000:]
        told = re.findall(r"beginning again in 0 s from (\S+) \(with smaller micro-batches: trainer.max", done.stdout)
        assert told == ([str(out / "global_step_1")] * 2 if run == "large" else []), done.stdout[-4000:]
        for size in (2 * fits, fits) if run == "large" else ():
            assert re.search(rf"with {size * slices} tokens; or give it a smaller {ACTOR}.ppo_max_token", done.stdout)
        found[run] = metrics_of(out)
    assert [record["training/global_step"] for record in found["large"]] == [1, 2, 3]
    for large in found["large"]:
        rescued = large["training/global_step"] > 1
        assert large.get("perf/out_of_memory") == (2 if rescued else None)
        assert large.get("perf/lowered_micro_batch") == (fits * slices if rescued else None)
    for large, small in zip(found["large"], found["small"], strict=True) if alike else ():
        for key in (f"actor/{each}" for each in ("pg_loss", "grad_norm", "entropy") if f"actor/{each}" in small):
            assert large[key] == pytest.approx(small[key], rel=1e-4, abs=1e-6), key
        assert large["critic/score/mean"] == small["critic/score/mean"]
        assert "perf/out_of_memory" not in small
