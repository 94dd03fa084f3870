"""The doctor's rules about sharding, offload, recomputation and LoRA: see doctor.py."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from verl_like.config.fsdp import FSDPConfig
from verl_like.config.idle import Idle
from verl_like.config.model import ModelConfig
from verl_like.config.ppo import PPOConfig
from verl_like.config.roles import RoleConfig, needs_reference, roles_of

_ACTOR = "actor_rollout_ref.actor.fsdp_config"
_REF = "actor_rollout_ref.ref.fsdp_config"
_CRITIC = "critic.model.fsdp_config"
_VLLM_RANKS = 512  # the largest max_lora_rank of vLLM (vllm.config.lora)
_ON_HOST = "trainer.device is cpu: everything is in host memory"

_SHARDINGS: tuple[tuple[str, Callable[[PPOConfig], FSDPConfig]], ...] = (
    (_ACTOR, lambda c: c.actor_rollout_ref.actor.fsdp_config),
    (_REF, lambda c: c.actor_rollout_ref.ref.fsdp_config),
    (_CRITIC, lambda c: c.critic.model.fsdp_config),
)
_MODELS: tuple[tuple[str, Callable[[PPOConfig], ModelConfig]], ...] = (
    ("actor_rollout_ref.model", lambda c: c.actor_rollout_ref.model),
    ("critic.model", lambda c: c.critic.model),
)


def impossible_sharding(config: PPOConfig) -> list[str]:
    """Combinations of sharding settings that cannot work: keys, values, fix."""
    policy, problems = config.actor_rollout_ref, []
    for role in roles_of(config).values():
        if role.tensor > 1:
            problems += _impossible_tensor(role)
    if policy.rollout.name == "vllm" and policy.model.lora_rank > _VLLM_RANKS and not policy.model.lora.merge:
        problems.append(
            f"actor_rollout_ref.model.lora_rank={policy.model.lora_rank} with actor_rollout_ref.model.lora.merge=False "
            f"and rollout.name=vllm: vLLM keeps adapters up to rank {_VLLM_RANKS}; set model.lora.merge=True"
        )
    if policy.rollout.name == "sglang" and policy.model.lora_rank and not policy.model.lora.merge:
        problems.append(
            "actor_rollout_ref.model.lora.merge=False with rollout.name=sglang: SGLang is sent whole weights; set "
            "model.lora.merge=True, or rollout.name=vllm"
        )
    return list(dict.fromkeys(problems))  # with LoRA the reference has the actor's


def _impossible_tensor(role: RoleConfig) -> list[str]:
    """What tensor parallelism of the trainer cannot be combined with."""
    key, problems = f"{role.tensor_key}={role.tensor}", []
    if role.ulysses > 1:
        problems.append(f"{key} with {role.ulysses_key}={role.ulysses}: a role has one of the two; set one to 1")
    if not role.model.use_remove_padding:
        problems.append(
            f"{key} with {role.model_section}.use_remove_padding=False: it works on packed tokens; set it to True"
        )
    return problems


def _on_cpu(config: PPOConfig) -> bool:
    return config.trainer.device == "cpu"


def _not_checkpointing(get: Callable[[PPOConfig], ModelConfig], config: PPOConfig) -> bool:
    return not get(config).enable_gradient_checkpointing


def _wraps_by_class(get: Callable[[PPOConfig], FSDPConfig], config: PPOConfig) -> bool:
    return bool(get(config).wrap_policy.transformer_layer_cls_to_wrap)


def _without_lora(get: Callable[[PPOConfig], ModelConfig], config: PPOConfig) -> bool:
    return get(config).lora_rank == 0


SHARDING_IDLE: tuple[Idle, ...] = (
    *(
        Idle(
            tuple(f"{section}.{name}" for name in ("lora_alpha", "target_modules", "exclude_modules")),
            partial(_without_lora, get),
            f"{section}.lora_rank is 0",
        )
        for section, get in _MODELS
    ),
    Idle(
        ("actor_rollout_ref.model.lora.merge",),
        partial(_without_lora, _MODELS[0][1]),
        "actor_rollout_ref.model.lora_rank is 0",
    ),
    Idle(("critic.model.lora.merge",), lambda c: True, "a critic's weights are not sent to a rollout engine"),
    Idle(
        (f"{_REF}.", "actor_rollout_ref.ref.use_torch_compile"),
        lambda c: needs_reference(c) and c.actor_rollout_ref.model.lora_rank > 0,
        "with LoRA the reference is the actor's own base model (actor_rollout_ref.model.lora_rank)",
    ),
    *(
        Idle(
            (f"{section}.recompute_granularity",),
            partial(_not_checkpointing, get),
            f"{section}.enable_gradient_checkpointing is false",
        )
        for section, get in _MODELS
    ),
    *(
        Idle(
            (f"{section}.wrap_policy.min_num_params",),
            partial(_wraps_by_class, get),
            f"{section}.wrap_policy.transformer_layer_cls_to_wrap names the modules",
        )
        for section, get in _SHARDINGS
    ),
    Idle(tuple(f"{section}.enable_activation_offload" for section, _ in _MODELS), _on_cpu, _ON_HOST),
    Idle(
        tuple(
            f"{section}.{name}"
            for section in (_ACTOR, _CRITIC)
            for name in ("param_offload", "optimizer_offload", "offload_policy")
        ),
        _on_cpu,
        _ON_HOST,
    ),
)
