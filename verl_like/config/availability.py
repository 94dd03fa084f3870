"""Settings of features that are not built yet, and settings without effect. Building a feature = deleting its row.

`NO_EFFECT`: keys of verl that are accepted because scripts carry them, but change nothing by design.
`NEWER`: parts of newer verl that have no keys here.
"""

from collections.abc import Mapping
from typing import Any

from verl_like.config.ppo import PPOConfig
from verl_like.config.schema import find_key, get_value

_ACTOR = "actor_rollout_ref.actor"
_REF = "actor_rollout_ref.ref"
_ROLLOUT = "actor_rollout_ref.rollout"
_MODELS = (f"{_ACTOR}.fsdp_config", f"{_REF}.fsdp_config", "critic.model.fsdp_config", "reward_model.model.fsdp_config")


# Switch -> (the values that ask for what is not built; None: any that is set, what to do instead).
NOT_YET: dict[str, tuple[tuple[str, ...] | None, str]] = {
    **{f"{section}.strategy": (("megatron",), "use fsdp2") for section in (_ACTOR, _REF, "critic", "reward_model")},
    **{
        f"{section}.model_dtype": (("float16", "fp16"), "use float32: updates would be lost to rounding")
        for section in _MODELS
    },
    **dict.fromkeys(
        (f"{_ROLLOUT}.agent.custom_async_server.path", f"{_ROLLOUT}.agent.custom_async_server.name"),
        (
            None,
            "leave it out: a server of your own could not be given weights that are proved to be the trainer's; "
            "rollout.name chooses an engine",
        ),
    ),
}

NO_EFFECT: dict[str, str] = {
    "reward_model.model.use_fused_kernels": "they belong to the language-model head, which a reward model has not",
    "reward_model.rollout.free_cache_engine": "responses are graded while others are sampled",
    "data.dataloader_num_workers": "the driver tokenises the prompts of a batch itself",
    f"{_ROLLOUT}.prompt_length": "it must equal data.max_prompt_length, which is what counts",
    f"{_ROLLOUT}.layered_summon": "weights are always gathered tensor by tensor",
    f"{_ROLLOUT}.calculate_log_probs": "the sampler's log-probs always come along and are always compared",
    **{
        f"{_ROLLOUT}.multi_turn.{name}": "tokens are never made again from text; `verl-like check-template` shows what "
        "a chat template rewrites"
        for name in ("enable_tokenization_sanity_check", "tokenization_sanity_check_mode")
    },
    f"{_ROLLOUT}.mode": "sync and async are the same: the engine always works request by request",
    **{
        f"{s}.grad_offload": "gradients are freed after every optimizer step; offload_policy also moves them during it"
        for s in _MODELS
    },
    **{
        f"{_REF}.{name}": "nobody asks for the reference's entropy"
        for name in ("entropy_from_logits_with_chunking", "entropy_checkpointing")
    },
}

# Section or key of newer verl of which nothing is here -> what it is, and what is instead. Unknown keys below these get
# this answer, not a did-you-mean: a section that has a key of ours, or a spelling of one, has rows for its other names.
NEWER: dict[str, str] = {
    "actor_rollout_ref.model.mtp": "multi-token prediction",
    "actor_rollout_ref.model.tiled_mlp": "tiled MLP",
    "actor_rollout_ref.actor.megatron": "Megatron training",
    "actor_rollout_ref.ref.megatron": "Megatron training",
    "actor_rollout_ref.actor.router_replay": "router replay of mixture-of-experts models",
    "actor_rollout_ref.ref.router_replay": "router replay of mixture-of-experts models",
    "actor_rollout_ref.actor.qat": "quantisation-aware training",
    "actor_rollout_ref.rollout.engine_kwargs.trtllm": "TensorRT-LLM; rollout.name=vllm or sglang",
    "actor_rollout_ref.rollout.trace": (
        "traces in weave, MLflow or trackio; trainer.rollout_data_dir writes every response with its tokens, turns and "
        "tool calls as jsonl, trainer.log_val_generations sends validation's to the trackers of trainer.logger, and "
        "`verl-like report` shows both"
    ),
    "actor_rollout_ref.rollout.prometheus": "the engine's metrics; trainer.prometheus_port serves those of the run",
    "actor_rollout_ref.rollout.disaggregation": "separate prefill and decode",
    "actor_rollout_ref.rollout.quantization_config_file": "quantised rollout by a file (rollout.quantization is there)",
    "actor_rollout_ref.rollout.enable_rollout_routing_replay": "router replay of mixture-of-experts models",
    "actor_rollout_ref.rollout.mtp": "multi-token prediction",
    "actor_rollout_ref.rollout.qat": "quantisation-aware training",
    **{
        f"{section}.rollout.{name}": what
        for section in ("reward_model", "reward.reward_model")
        for name, what in (
            ("disaggregation", "separate prefill and decode"),
            ("limit_images", "reward models that look at images"),
            ("mtp", "multi-token prediction"),
            ("quantization", "quantised reward models (rollout.engine_kwargs.vllm.quantization asks vLLM for it)"),
            ("quantization_config_file", "quantised reward models"),
        )
    },
    "critic.megatron": "Megatron training",
    "data.datagen": "generated datasets",
    "distillation": "on-policy distillation",
    "global_profiler.global_tool_config.precision_debugger": "the precision debugger",
    "skip.rollout.steps": "choice of the steps to record and replay; skip.rollout.enable takes them all",
    "skip.rollout_tq": "record and replay through the transfer queue; skip.rollout records",
    "skip.async_rollout": "record and replay of asynchronous steps; skip.rollout records synchronous ones",
    "trainer.v1.separate_async.hybrid_rollout": "devices that change between training and rollout",
    **{
        f"trainer.v1.sampler.{name}": "samplers of finished groups; data.sampler.class_path draws prompts"
        for name in ("custom_sampler", "sampler_kwargs")
    },
    "transfer_queue": "the transfer queue",
    "critic.model.mtp": "multi-token prediction",
    "critic.model.tiled_mlp": "tiled MLP",
    **{
        f"{role}.model.lora.{name}": "more options of Megatron's LoRA; its precision follows fsdp_config"
        for role in ("actor_rollout_ref", "critic")
        for name in ("a2a_experimental", "dtype")
    },
    **{f"{section}.qat": "quantisation-aware training" for section in _MODELS},
}

# Last name of a section of NEWER -> the setting in it that switches it on; the others say nothing while it is off.
_SWITCHES = {
    **dict.fromkeys(("mtp", "qat", "prometheus", "transfer_queue"), "enable"),
    **dict.fromkeys(("tiled_mlp", "disaggregation", "distillation"), "enabled"),
    "router_replay": "mode",
    "trace": "backend",
}


def belongs_to(path: str) -> str | None:
    """The switch of an unbuilt section that this setting says nothing without; None for a switch, or elsewhere."""
    section = _section_of(path)
    switch = None if section is None else _SWITCHES.get(section.rpartition(".")[2])
    if switch is None or path.rpartition(".")[2] == switch:
        return None
    return f"{section}.{switch}"


def not_available(config: PPOConfig) -> list[str]:
    """One line for every switch that is on without its feature being built; followers of a listed key are left out."""
    on = {key: value for key in NOT_YET if _asks_for_it(key, value := get_value(config, key))}
    return [
        f"{key}={value}: not available yet; {NOT_YET[key][1]}" for key, value in on.items() if not _follows(key, on)
    ]


def _asks_for_it(key: str, value: Any) -> bool:
    refused = NOT_YET[key][0]
    return bool(value) if refused is None else value in refused


def _follows(key: str, on: Mapping[str, Any]) -> bool:
    """Return True where a key of the reference or the critic only repeats the actor's (see trainer/config/*.yaml)."""
    name = key.rsplit(".", 1)[-1]
    return key in (f"{_REF}.{name}", f"critic.{name}") and f"{_ACTOR}.{name}" in on


def without_effect(set_keys: frozenset[str]) -> list[str]:
    """One line for every key that the user set and nothing reads in this version."""
    return [f"{key} has no effect: {why}" for key, why in NO_EFFECT.items() if key in set_keys]


def newer_than_here(path: str) -> str | None:
    """Subject of an unknown key of newer verl; None for a key that is known here, or nowhere."""
    section = _section_of(path)
    return None if section is None else NEWER[section]


def _section_of(path: str) -> str | None:
    """The row of NEWER that an unknown key is in."""
    if find_key(path) is not None:
        return None
    return next((prefix for prefix in NEWER if path == prefix or path.startswith(prefix + ".")), None)
