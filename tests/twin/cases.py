"""Configurations that users train, for the twin: sizes of published models, at most a few of their layers where the
layers are alike, and full depth where depth is what is looked at."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

DATA = Path(os.environ.get("VERL_LIKE_SHARED_DATA", Path(__file__).parents[3] / "shared" / "data"))

_ACTOR, _MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.model"
_FSDP = f"{_ACTOR}.fsdp_config"
_REF = "actor_rollout_ref.ref.fsdp_config"
_ULYSSES, _REF_ULYSSES = (f"actor_rollout_ref.{role}.ulysses_sequence_parallel_size" for role in ("actor", "ref"))
_OPTIM = f"{_ACTOR}.optim.optimizer"
_PIPE, _REF_PIPE = (f"{fsdp}.pipeline_parallel_size" for fsdp in (_FSDP, _REF))
SMALL, MIDDLE, LARGE = "Qwen__Qwen2.5-0.5B-Instruct", "Qwen__Qwen2.5-1.5B-Instruct", "Qwen__Qwen2.5-7B-Instruct"
QWEN3, LLAMA, EXPERTS = "Qwen__Qwen3-8B", "meta-llama__Llama-3.1-8B", "Qwen__Qwen3-30B-A3B"
TWO_MICRO_BATCHES = [f"{_ACTOR}.ppo_max_token_len_per_gpu=2304"]  # of the eight rows of 512 tokens
PARKED = [f"{_FSDP}.param_offload=true", f"{_FSDP}.optimizer_offload=true"]
# Of eight ranks, with the eight rows for each of the four that have rows of their own.
TWO_STAGES = [f"{_PIPE}=2", f"{_REF_PIPE}=2", "data.train_batch_size=4", f"{_ACTOR}.ppo_mini_batch_size=4"]
ZERO_BUBBLE = [*TWO_STAGES, f"{_FSDP}.pipeline_schedule=zero_bubble"]
UNEQUAL = [[7 + 90 * i, 3 + 100 * i] for i in range(8)]


def case(name: str, model: str, *keys: str, world: int = 8, layers: int | None = 2, **more: Any) -> dict[str, Any]:
    """A case for tests.twin.run."""
    path = str(DATA / "model_configs" / f"{model}.json")
    return {"name": name, "model": path, "keys": keys, "world": world, "layers": layers, **more}


# Left out: fsdp_config.offload_policy. torch's fully_shard moves real CPU weights to the device by `param.data = ...`,
# which makes of a parameter what is no fake tensor; and SGLang's and vLLM's own operators, since engines are not built.
CASES = [
    case("one rank", SMALL, world=1),
    case("eight ranks", SMALL, *TWO_MICRO_BATCHES, packing=True),
    case("64 ranks, all layers", MIDDLE, *TWO_MICRO_BATCHES, world=64, layers=None),
    case("rows of other lengths", QWEN3, *TWO_MICRO_BATCHES, world=64, lengths=UNEQUAL),
    case("hybrid sharding", LARGE, f"{_FSDP}.fsdp_size=4", world=64),
    case("replicas alone", SMALL, f"{_FSDP}.fsdp_size=1"),
    case("Ulysses 2", QWEN3, f"{_ULYSSES}=2", f"{_REF_ULYSSES}=2"),
    case("Ulysses 4", LLAMA, f"{_ULYSSES}=4", f"{_REF_ULYSSES}=4", world=64),
    case("Ulysses 4 of 2 key heads", MIDDLE, f"{_ULYSSES}=4", world=64),
    case("chunks 2", QWEN3, f"{_FSDP}.context_parallel_size=2"),
    case("chunks 4 and Ulysses 2", MIDDLE, f"{_FSDP}.context_parallel_size=4", f"{_ULYSSES}=2", world=64),
    case("tensor 2", LLAMA, f"{_FSDP}.tensor_parallel_size=2"),
    case("tensor 2, 64 ranks", LARGE, f"{_FSDP}.tensor_parallel_size=2", f"{_FSDP}.fsdp_size=16", world=64),
    case("experts", EXPERTS, world=64),
    case("experts over 8 ranks", EXPERTS, f"{_FSDP}.expert_parallel_size=8", world=64),
    case("experts, tensor 2", EXPERTS, f"{_FSDP}.tensor_parallel_size=2", f"{_FSDP}.fsdp_size=16", world=64),
    case("parked", LARGE, *PARKED, f"{_REF}.param_offload=true"),
    case("two stages", LLAMA, *TWO_STAGES),
    case("zero_bubble", MIDDLE, *ZERO_BUBBLE, *TWO_MICRO_BATCHES),
    case("activations parked", LARGE, f"{_MODEL}.enable_activation_offload=true"),
    case("activations kept", LARGE, f"{_MODEL}.enable_gradient_checkpointing=false"),
    case("selective recomputation", LARGE, f"{_MODEL}.recompute_granularity=selective"),
    case("LoRA", LARGE, f"{_MODEL}.lora_rank=32", world=64),
    case("LoRA, tensor 2", LLAMA, f"{_MODEL}.lora_rank=32", f"{_FSDP}.tensor_parallel_size=2"),
    case("critic", MIDDLE, "algorithm.adv_estimator=gae"),
    case("reward model", MIDDLE, "reward_model.enable=true", "reward_model.model.path={folder}/model"),
    case("liger", LARGE, f"{_MODEL}.use_liger=true"),
    case("full logits", SMALL, f"{_MODEL}.use_fused_kernels=false"),
    case("padded rows", SMALL, f"{_MODEL}.use_remove_padding=false"),
    case("compiled blocks", MIDDLE, f"{_ACTOR}.use_torch_compile=true"),
    case("lean optimizer, 16 bits", MIDDLE, f"{_OPTIM}=adamw_bf16"),
    case("lean optimizer, 8 bits", MIDDLE, f"{_OPTIM}=adamw_8bit", f"{_FSDP}.model_dtype=bfloat16", world=64),
    case("gradients summed once", MIDDLE, f"{_FSDP}.sync_every_micro_batch=false", *TWO_MICRO_BATCHES),
    case("weights stay gathered", MIDDLE, f"{_FSDP}.reshard_after_forward=false", *TWO_MICRO_BATCHES),
    case("prefetch", MIDDLE, f"{_FSDP}.forward_prefetch=true"),
    case("exact KL", SMALL, f"{_ACTOR}.kl_loss_type=full"),
    case("flash-attn", QWEN3, flash_attn=True),
    case("soft caps and windows", "google__gemma-3-1b-it", lengths=[[600, 600]] * 4),
]  # fmt: skip

_DEEPER: list[tuple[str, str, int, list[str]]] = [  # for the memory forecast: name, model, ranks, keys
    ("Qwen2.5-0.5B", SMALL, 1, []),
    ("Qwen2.5-0.5B", SMALL, 8, []),
    ("Qwen2.5-1.5B, two micro-batches", MIDDLE, 64, TWO_MICRO_BATCHES),
    ("Qwen2.5-1.5B, PPO", MIDDLE, 8, ["algorithm.adv_estimator=gae"]),
    ("Qwen2.5-1.5B, gradients summed once", MIDDLE, 8, [f"{_FSDP}.sync_every_micro_batch=false", *TWO_MICRO_BATCHES]),
    ("Qwen2.5-1.5B, weights stay gathered", MIDDLE, 8, [f"{_FSDP}.reshard_after_forward=false", *TWO_MICRO_BATCHES]),
    ("Qwen2.5-1.5B, adamw_8bit", MIDDLE, 64, [f"{_OPTIM}=adamw_8bit", f"{_FSDP}.model_dtype=bfloat16"]),
    ("Qwen2.5-1.5B, adamw_bf16", MIDDLE, 8, [f"{_OPTIM}=adamw_bf16"]),
    ("Qwen2.5-7B", LARGE, 8, []),
    ("Qwen2.5-7B, hybrid sharding", LARGE, 64, [f"{_FSDP}.fsdp_size=4"]),
    ("Qwen2.5-7B, selective recomputation", LARGE, 8, [f"{_MODEL}.recompute_granularity=selective"]),
    ("Qwen2.5-7B, LoRA", LARGE, 64, [f"{_MODEL}.lora_rank=32"]),
    ("Qwen2.5-7B, parked", LARGE, 8, [*PARKED, f"{_REF}.param_offload=true"]),
    ("Qwen3-8B", QWEN3, 64, []),
    ("Qwen3-8B, Ulysses 2", QWEN3, 8, [f"{_ULYSSES}=2", f"{_REF_ULYSSES}=2"]),
    ("Qwen3-8B, chunks 2", QWEN3, 8, [f"{_FSDP}.context_parallel_size=2"]),
    ("Llama-3.1-8B, activations kept", LLAMA, 8, [f"{_MODEL}.enable_gradient_checkpointing=false"]),
    ("Llama-3.1-8B, tensor 2", LLAMA, 8, [f"{_FSDP}.tensor_parallel_size=2"]),
    ("Llama-3.1-8B, Ulysses 4", LLAMA, 64, [f"{_ULYSSES}=4", f"{_REF_ULYSSES}=4"]),
    ("Qwen3-30B-A3B", EXPERTS, 64, []),
    ("Qwen3-30B-A3B, expert 8", EXPERTS, 64, [f"{_FSDP}.expert_parallel_size=8"]),
    ("Qwen2.5-1.5B, two stages", MIDDLE, 8, [*TWO_STAGES, f"{_ACTOR}.ppo_max_token_len_per_gpu=2048"]),
    ("Qwen2.5-7B, zero_bubble", LARGE, 8, [*ZERO_BUBBLE, f"{_ACTOR}.ppo_max_token_len_per_gpu=1024"]),
    ("Qwen2.5-1.5B, zero_bubble, LoRA", MIDDLE, 8, [*ZERO_BUBBLE, f"{_MODEL}.lora_rank=32"]),
]
FORECAST = [case(f"{name} on {world}", model, *keys, world=world, layers=4) for name, model, world, keys in _DEEPER]
