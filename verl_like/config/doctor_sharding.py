"""The doctor's rules about sharding, offload, recomputation and LoRA: see doctor.py."""

from collections.abc import Iterator

from verl_like.config.ppo import PPOConfig
from verl_like.config.roles import RoleConfig, needs_reference, roles_of
from verl_like.config.schema import Idle, get_value, idle_while

_ACTOR = "actor_rollout_ref.actor.fsdp_config"
_REF = "actor_rollout_ref.ref.fsdp_config"
_CRITIC = "critic.model.fsdp_config"
_ON_HOST = "trainer.device is cpu: everything is in host memory"

_MODELS = ("actor_rollout_ref.model", "critic.model")


def impossible_sharding(config: PPOConfig) -> Iterator[str]:
    """Combinations of sharding settings that cannot work: keys, values, fix."""
    policy = config.actor_rollout_ref
    for role in roles_of(config).values():
        if role.tensor > 1:
            yield from _impossible_tensor(role)
    most = policy.rollout.engine.adapter_rank
    if most and policy.model.lora_rank > most and not policy.model.lora.merge:
        yield (
            f"actor_rollout_ref.model.lora_rank={policy.model.lora_rank} with actor_rollout_ref.model.lora.merge=False "
            f"and rollout.name=vllm: vLLM keeps adapters up to rank {most}; set model.lora.merge=True"
        )
    if most == 0 and policy.model.lora_rank and not policy.model.lora.merge:
        yield (
            "actor_rollout_ref.model.lora.merge=False with rollout.name=sglang: SGLang is sent whole weights; set "
            "model.lora.merge=True, or rollout.name=vllm"
        )


def _impossible_tensor(role: RoleConfig) -> Iterator[str]:
    """Settings that tensor parallelism of the trainer cannot be combined with."""
    key = f"{role.tensor_key}={role.tensor}"
    if role.ulysses > 1:
        yield f"{key} with {role.ulysses_key}={role.ulysses}: a role has one of the two; set one to 1"
    if not role.model.use_remove_padding:
        yield f"{key} with {role.model_section}.use_remove_padding=False: it works on packed tokens; set it to True"


def _on_cpu(config: PPOConfig) -> bool:
    return config.trainer.device == "cpu"


SHARDING_IDLE: tuple[Idle, ...] = (
    idle_while("actor_rollout_ref.model.lora_rank", "0", "actor_rollout_ref.model.lora.merge"),
    Idle(("critic.model.lora.merge",), lambda c: True, "a critic's weights are not sent to a rollout engine"),
    Idle(
        (f"{_REF}.", "actor_rollout_ref.ref.use_torch_compile"),
        lambda c: needs_reference(c) and c.actor_rollout_ref.model.lora_rank > 0,
        "with LoRA the reference is the actor's own base model (actor_rollout_ref.model.lora_rank)",
    ),
    *(
        Idle(
            (f"{section}.wrap_policy.min_num_params",),
            lambda c, section=section: bool(get_value(c, f"{section}.wrap_policy.transformer_layer_cls_to_wrap")),
            f"{section}.wrap_policy.transformer_layer_cls_to_wrap names the modules",
        )
        for section in (_ACTOR, _REF, _CRITIC)
    ),
    Idle(tuple(f"{section}.enable_activation_offload" for section in _MODELS), _on_cpu, _ON_HOST),
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
