"""Every way to shard, offload and recompute, as engine settings; each must give the default's gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.unit.engine import fsdp1
from tests.unit.engine.scenarios import gradients, my_rows
from tests.unit.engine.tiny import PolicyLoss, build_engine, denominators, experience, weights
from verl_like.config.batch_plan import MicroBatchRule
from verl_like.config.fsdp import FSDPConfig, MixedPrecisionConfig, WrapPolicyConfig
from verl_like.engine.fsdp import FSDPEngine
from verl_like.parallel.dist import ProcessInfo
from verl_like.parallel.materialize import Materializer

LORA = {"lora_rank": 4, "lora_alpha": 8}
TIED = {"override_config": {"tie_word_embeddings": True}}
OPTIONS: dict[str, dict[str, Any]] = {
    "fsdp2": {},
    "fsdp2_keep_gathered": {"fsdp": FSDPConfig(reshard_after_forward=False)},
    "fsdp2_summed_once": {"fsdp": FSDPConfig(sync_every_micro_batch=False)},
    "fsdp2_zero2_summed_once": {"fsdp": FSDPConfig(reshard_after_forward=False, sync_every_micro_batch=False)},
    "fsdp2_prefetch": {"fsdp": FSDPConfig(forward_prefetch=True)},
    "fsdp2_cpu_offload_policy": {"fsdp": FSDPConfig(offload_policy=True)},
    "fsdp2_replicated": {"fsdp": FSDPConfig(fsdp_size=1)},
    "fsdp2_by_size": {"fsdp": FSDPConfig(wrap_policy=WrapPolicyConfig(min_num_params=6000))},
    "fsdp2_by_class": {"fsdp": FSDPConfig(wrap_policy=WrapPolicyConfig(transformer_layer_cls_to_wrap=["Qwen2MLP"]))},
    "fsdp2_buffers": {"fsdp": FSDPConfig(mixed_precision=MixedPrecisionConfig(buffer_dtype="float32"))},
    "fsdp2_checkpointing": {"model": {"enable_gradient_checkpointing": True}},
    "fsdp2_selective": {"model": {"enable_gradient_checkpointing": True, "recompute_granularity": "selective"}},
    "fsdp2_tied": {"model": {"override_config": {"tie_word_embeddings": True}}},
    "fsdp2_lora": {"model": LORA},
    "fsdp2_checkpointed_lora": {"model": LORA | {"enable_gradient_checkpointing": True}},
}


def gradients_of_all(process: ProcessInfo, path: str) -> dict[str, dict[str, Tensor]]:
    batch = experience(9)
    return {
        name: gradients(build_engine(process, path, **settings), my_rows(process, batch, "even"), batch)
        for name, settings in OPTIONS.items()
    }


def train_and_save(process: ProcessInfo, path: str, folder: str, model: dict[str, Any]) -> dict[str, Any]:
    """Two steps, a checkpoint, one more step; and the same from an engine that reads the folder, and from one that
    reads what FSDP1 writes of the same weights and averages."""
    result: dict[str, Any] = {}
    first = build_engine(process, path, model=model)
    for seed in range(2):
        step(process, first, seed)
    contents = ["model", "optimizer", "extra"]
    first.save(folder, contents=contents)
    fsdp1.save(process, first, folder, f"{folder}_fsdp1")
    step(process, first, 2)
    result["uninterrupted"] = weights(first)
    for name in ("fsdp2", "fsdp1"):
        other = build_engine(process, path, seed=50, model=model)
        other.load(folder if name == "fsdp2" else f"{folder}_fsdp1", contents=contents)
        step(process, other, 2)
        result[name] = weights(other)
    return result


def step(process: ProcessInfo, engine: FSDPEngine, seed: int) -> None:
    batch = experience(7, seed=seed)
    rows = my_rows(process, batch, "even")
    engine.train_minibatch(rows, PolicyLoss(), denominators(batch), rule=MicroBatchRule(max_tokens=24))


def everything(process: ProcessInfo, path: str, folder: str) -> dict[str, Any]:
    return {
        "gradients": gradients_of_all(process, path),
        "saved": train_and_save(process, path, f"{folder}/full", {}),
        "saved_lora": train_and_save(process, path, f"{folder}/lora", LORA),
        "saved_tied": train_and_save(process, path, f"{folder}/tied", TIED),
        "apart": apart(process, path),
        "lora_ulysses": gradients(build_engine(process, path, ulysses=2, model=LORA), experience(9), experience(9)),
        "mismatch": mismatch(process),
        "collectives": {name: collectives(process, path, OPTIONS[name]) for name in SUMMED},
    }


SUMMED = ("fsdp2", "fsdp2_keep_gathered", "fsdp2_summed_once", "fsdp2_zero2_summed_once")


def collectives(process: ProcessInfo, path: str, settings: dict[str, Any]) -> dict[str, int]:
    """How often an update of four micro-batches gathers and reduces, all units of FSDP together."""
    engine, batch = build_engine(process, path, **settings), experience(8)
    rows, rule = my_rows(process, batch, "even"), MicroBatchRule(max_sequences=8 // process.world_size // 4)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        engine.train_minibatch(rows, PolicyLoss(), denominators(batch), rule=rule)
    names = [event.name.partition(" ")[0] for event in profile.events()]
    return {"gathers": names.count("FSDP::all_gather"), "reductions": names.count("FSDP::post_backward_reduce")}


def apart(process: ProcessInfo, path: str) -> dict[str, tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """Gradients with and without a backward pass for rows of advantage 0, which are all that rank 0 has (of a sequence
    group: some of the rows that its ranks share)."""
    batch, world, result = experience(9), process.world_size, {}
    batch = batch.replace(advantages_BR=batch.advantages_BR * (torch.arange(9) % 2)[:, None])
    zero_B = torch.arange(9) % 2 == 0
    for name, settings in APART.items():
        engine = build_engine(process, path, **settings)
        mine = slice(None) if "ulysses" in settings else slice(process.rank, None, world)
        rows, apart_B = batch.select(range(9)[mine]), zero_B[mine]
        by_advantage = PolicyLoss(entropy=0.0)
        result[name] = tuple(gradients(engine, rows, batch, chosen, by_advantage) for chosen in (None, apart_B))
    return result


APART: dict[str, dict[str, Any]] = {
    "fsdp2": {},
    "replicated": {"fsdp": FSDPConfig(fsdp_size=1)},
    "sequence_parallel": {"ulysses": 2},
}


def mismatch(process: ProcessInfo) -> str:
    """The last rank's model has another shape: what does each rank say?"""
    model = torch.nn.Linear(4, 3 if process.rank == process.world_size - 1 else 2, device="cpu")
    try:
        Materializer(model, process.device, process.device).fill(model)
    except ValueError as error:
        return str(error)
    return ""


def hybrid(process: ProcessInfo, path: str) -> dict[str, Any]:
    """Two replicas of two shards each: gradients, and the reported norm over the norm of the gradient."""
    batch, result = experience(9), {}
    engine = build_engine(process, path, fsdp=FSDPConfig(fsdp_size=2))
    result["gradients"] = gradients(engine, my_rows(process, batch, "even"), batch)
    norm = torch.stack([g.norm() for g in result["gradients"].values()]).norm()
    rows = my_rows(process, batch, "even")
    metrics = engine.train_minibatch(rows, PolicyLoss(), denominators(batch), rule=MicroBatchRule(max_tokens=24))
    result["norms_equal"] = {"norm": torch.tensor(metrics["grad_norm"].value) / norm}
    return result
