"""Old and newer spellings of verl, mapped to the one name we use. Applied to overrides and YAML before composing."""

import json
import re
from collections.abc import Callable
from typing import Any

from verl_like.config.actor import PolicyLossConfig
from verl_like.config.availability import belongs_to, newer_than_here
from verl_like.config.correction_aliases import Change, correction_spellings
from verl_like.config.reward import CustomRewardFunctionConfig
from verl_like.config.schema import find_key, sections

__all__ = ["Change", "canonical", "renamed", "rest_of"]

# Old key pattern -> new key. Applied in order, the first match wins; \1, \2 carry parts over.
RENAMED: tuple[tuple[str, str], ...] = (
    (r"(?!trainer\.).+\.full_determinism", "trainer.full_determinism"),
    (r"(actor_rollout_ref\.actor|critic)\.checkpoint\.contents", r"\1.checkpoint.save_contents"),
    (r"(actor_rollout_ref\.actor|critic)\.optim\.clip_grad", r"\1.grad_clip"),
    (r"(actor_rollout_ref\.actor|critic)\.optim\.lr_scheduler_type", r"\1.optim.warmup_style"),
    (r"critic\.(?:model\.)?fsdp(?:_config)?\.(strategy|ulysses_sequence_parallel_size)", r"critic.\1"),
    (r"critic\.(?:fsdp|fsdp_config)\.(.+)", r"critic.model.fsdp_config.\1"),
    (
        r"actor_rollout_ref\.(actor|ref)\.fsdp_config\."
        r"(strategy|ulysses_sequence_parallel_size|use_torch_compile|entropy_checkpointing|entropy_from_logits_with_chunking)",
        r"actor_rollout_ref.\1.\2",
    ),
    (
        r"(.+\.fsdp_config)\.(?:tensor_model_parallel_size|tensor_parallel_degree|tp_size|tp)",
        r"\1.tensor_parallel_size",
    ),
    (r"(.+\.fsdp_config)\.min_num_params", r"\1.wrap_policy.min_num_params"),
    (r"(.+\.fsdp_config)\.mixed_precision\.param_dtype", r"\1.dtype"),
    (r"actor_rollout_ref\.actor\.(use_remove_padding|use_fused_kernels)", r"actor_rollout_ref.model.\1"),
    (r"actor_rollout_ref\.actor\.use_prefix_grouper", "actor_rollout_ref.model.share_prompts"),
    (r"(actor_rollout_ref\.model|reward_model\.model|critic\.model)\.external_libs", r"\1.external_lib"),
    (
        r"actor_rollout_ref\.rollout\.checkpoint_engine\.update_weights_bucket_megabytes",
        "actor_rollout_ref.rollout.update_weights_bucket_megabytes",
    ),
    (r"((?:actor_rollout_ref|critic)\.model)\.lora\.(rank|alpha|adapter_path)", r"\1.lora_\2"),
    (r"((?:actor_rollout_ref|critic)\.model)\.lora\.((?:target|exclude)_modules)", r"\1.\2"),
    (r"actor_rollout_ref\.model\.tokenizer_path", "data.tokenizer"),
    (r"data\.((?:tool_config|function_tool)_path)", r"actor_rollout_ref.rollout.multi_turn.\1"),
    (r"actor_rollout_ref\.rollout\.block_size", "actor_rollout_ref.rollout.engine_kwargs.vllm.block_size"),
    (r"trainer\.v1\.trainer_mode", "trainer.mode"),
    (r"trainer\.v1\.(?:colocate|separate)_async\.num_warmup_batches", "async_training.over_sample_rate"),
    (r"trainer\.v1\.sampler\.max_off_policy_threshold", "async_training.max_staleness"),
    (r"trainer\.v1\.sampler\.max_off_policy_strategy", "async_training.beyond"),
    (r"async_training\.staleness_threshold", "async_training.over_sample_rate"),
    (r"async_training\.use_rollout_log_probs", "algorithm.rollout_correction.bypass_mode"),
    (r"data\.mm_processor_kwargs(\..+)?", r"actor_rollout_ref.model.mm_processor_kwargs\1"),
    (r"actor_rollout_ref\.model\.enable_activation_offloading", "actor_rollout_ref.model.enable_activation_offload"),
    (r"trainer\.val_generations_to_log_to_wandb", "trainer.log_val_generations"),
    (r"actor_rollout_ref\.profiler\.(.+)", r"actor_rollout_ref.actor.profiler.\1"),
    (r"(.+\.profiler)\.tool_config\.(?:nsys|torch|npu)\.discrete", r"\1.discrete"),
    (r"global_profiler\.(steps|tool)", r"trainer.profile_\1"),
    (r"global_profiler\.global_tool_config\.nsys\.discrete", "actor_rollout_ref.actor.profiler.discrete"),
    (r"global_profiler\.global_tool_config\.nsys\.((?:controller|worker)_nsight_options.*)", r"trainer.\1"),
    (r"ray_kwargs\.timeline_json_file", "ray_init.timeline_json_file"),
    (r"ray_kwargs\.ray_init\.(.+)", r"ray_init.\1"),
    (r"ray_init\._temp_dir", "ray_init.temp_dir"),
    (r"skip\.rollout\.enable", "actor_rollout_ref.rollout.skip_rollout"),
    (r"skip\.rollout\.dump_dir", "actor_rollout_ref.rollout.skip_dump_dir"),
    (r"reward\.custom_reward_function\.(.+)", r"custom_reward_function.\1"),
    (r"(?:reward|reward_model)\.num_workers", "custom_reward_function.num_workers"),
    (r"reward\.reward_manager(?:\.name)?", "reward_model.reward_manager"),
    (r"(?:reward\.)?sandbox_fusion\.(.+)", r"reward_model.sandbox_fusion.\1"),
    (r"(?:reward|reward_model)\.reward_kwargs\.overlong_buffer_cfg\.(.+)", r"reward_model.overlong_buffer.\1"),
    (r"reward\.reward_kwargs(\..+)?", r"reward_model.reward_kwargs\1"),
    (r"reward\.reward_model\.model_path", "reward_model.model.path"),
    (
        r"reward\.reward_model\.(enable|enable_resource_pool|n_gpus_per_node|nnodes|model_type|rollout\..+)",
        r"reward_model.\1",
    ),
    (r"reward_model\.model\.type", "reward_model.model_type"),
)

# Patterns of verl's keys that say nothing here: dropped with a warning that says why.
_GRADED = "responses are graded as they end, with a reward model or without"
_TRACES = "trainer.profile_tool records every step of trainer.profile_steps into <log_dir>/profile"
DROPPED: dict[str, str] = {
    r"(actor_rollout_ref\.(actor|ref)|critic)\.rollout_n": "it follows actor_rollout_ref.rollout.n",
    r"trainer\.use_legacy_worker_impl": "there is one worker implementation",
    r"actor_rollout_ref\.nccl_timeout": "trainer.rpc_timeout bounds calls and collectives",
    r"actor_rollout_ref\.actor\.data_loader_seed": "trainer.seed seeds the shuffle of actor.shuffle",
    r"critic\.data_loader_seed": "trainer.seed seeds the shuffle of critic.shuffle",
    r"critic\.model\.tokenizer_path": "the critic sees the policy's tokens",
    r"(actor_rollout_ref|critic)\.model\.torch_dtype": (
        "verl reads it nowhere; actor_rollout_ref.actor.fsdp_config.model_dtype (critic.model.fsdp_config.model_dtype) "
        "is the precision of trained weights, and fsdp_config.dtype that of computing"
    ),
    r"actor_rollout_ref\.rollout\.multi_turn\.num_repeat_rollouts": (
        "verl reads it nowhere; actor_rollout_ref.rollout.n is how many conversations a prompt gets"
    ),
    r"critic\.loss_scale_factor": "the critic's seq-mean-token-sum-norm divides by data.max_response_length",
    r"trainer\.use_v1": "there is one trainer",
    r"trainer\.v1\.separate_async\.parameter_sync_step|async_training\.(trigger_parameter_sync_step|require_batches)": (
        "a step trains the data.train_batch_size / actor.ppo_mini_batch_size mini-batches of its prompts, and then "
        "sends the weights"
    ),
    r"actor_rollout_ref\.actor\.calculate_sum_pi_squared": "it is computed where algorithm.adv_estimator needs it",
    r"actor_rollout_ref\.actor\.calculate_entropy": "the entropy is always computed and reported",
    r"data\.return_multi_modal_inputs": "inputs are not passed through the driver",
    r"actor_rollout_ref\.rollout\.multi_stage_wake_up": "weights and cache are woken in stages where the engine can",
    r"actor_rollout_ref\.rollout\.(sglang_(engine|rollout)_mode|server\..+)": (
        "an SGLang engine is a process beside each worker, reached by a pipe: no connections, no attempts"
    ),
    r"actor_rollout_ref\.rollout\.over_sample_rate": (
        "no response is cut to save time; rollout.scheduler.additional_prompts.enable=True waits for fewer of them"
    ),
    r"trainer\.tensorboard_dir": "the files are in <trainer.log_dir>/tensorboard",
    r"trainer\.rl_logging_board_dir": "trainer.rollout_data_dir keeps responses",
    r"data\.image_patch_size": "the model's own processor has it",
    r"trainer\.npu_profile(\..+)?": "there is no profiler of NPUs here",
    r"trainer\.v1\.separate_async\.hybrid_rollout\.(switch|adaptive)_.+": "it belongs to hybrid_rollout.enable_switch",
    r"skip\.(rollout_tq|async_rollout)\.dump_dir": "it belongs to the enable beside it",
    r".+\.fsdp_config\.use_orig_params": "weights always keep their own names and shapes",
    r".+\.fsdp_config\.seed": "trainer.seed seeds all that is drawn",
    r".+\.fsdp_config\.turbo_config(\..+)?": "it belongs to a sharding backend that is not built (strategy=fsdp_turbo)",
    r".+\.fsdp_config\.use_no_sync_for_gradient_accumulation": "fsdp_config.sync_every_micro_batch says it",
    r".+\.fsdp_config\.pad_to_length_bucket": "micro-batches are not padded",
    r"(critic|reward_model)\.model\.fsdp_config\.(use_torch_compile|entropy_.+)": (
        "this model is not compiled, and has no entropy"
    ),
    r"(actor_rollout_ref\.ref|reward_model\.model)\.fsdp_config\.forward_only": "this model is never trained",
    r"actor_rollout_ref\.rollout\.skip_tokenizer_init": "the engine loads a tokenizer for rollout.stop, and only then",
    r"actor_rollout_ref\.rollout\.seed": "trainer.seed seeds every response (rollout.seed_per_request)",
    r"actor_rollout_ref\.rollout\.checkpoint_engine\.(backend|engine_kwargs(\..+)?|custom_backend_module)": (
        "how weights travel follows from where the engines are: in the process, beside it, or in a pool of their own"
    ),
    r"actor_rollout_ref\.rollout\.trust_remote_code": "the engine follows actor_rollout_ref.model.trust_remote_code",
    r"(.+\.)?_target_": "every section has its class",
    r"reward_model\.use_reward_loop": _GRADED,
    r"(reward\.)?reward_model\.rollout\.(layered_summon|multi_stage_wake_up|scheduling_policy|full_determinism|seed)": (
        "the weights stay as they are, and the judge's temperature says how it samples"
    ),
    r"(reward\.)?reward_model\.rollout\.(ignore_eos|temperature|top_[kp]|do_sample|n|.*log_prob.+|val_kwargs\..+)": (
        "who asks the model says how it samples: custom_reward_function, or reward_model.judge"
    ),
    r"actor_rollout_ref\.rollout\.profiler(\..+)?": "generation is in the actor's profile (actor.profiler)",
    r".+\.profiler\.(tool|save_path|tool_config\.(?!\w+\.discrete$).+)": _TRACES,
    r"global_profiler\.(profile_continuous_steps|save_path|global_tool_config\.torch_memory(\..+)?)": _TRACES,
}

# Switches and sizes of verl that are accepted at the values at which they ask for what is done anyway.
AT_REST: dict[str, tuple[Any, ...]] = {
    r"actor_rollout_ref\.rollout\.(data|expert|pipeline_model)_parallel_size": (1,),
    r"actor_rollout_ref\.rollout\.logprobs_mode": ("processed_logprobs",),
    r"actor_rollout_ref\.rollout\.scheduling_policy": ("fcfs", "priority"),
    r"actor_rollout_ref\.rollout\.engine_kwargs\.trtllm": ({}, None),
    r"actor_rollout_ref\.rollout\.engine_kwargs\.vllm\.disable_mm_preprocessor_cache": (True,),  # it keeps none
    r"actor_rollout_ref\.rollout\.moe_load_balance_metrics_interval": (0,),
    r".+\.optim\.optimizer_impl": ("torch.optim",),
    r".+\.optim\.override_optimizer_config": (None,),
    r".+\.optim\.zero_indexed_step": (True,),
    r"(actor_rollout_ref\.actor|critic\.model)\.fsdp_config\.forward_only": (False,),
    r"actor_rollout_ref\.(actor|ref)\.(fsdp_config\.)?entropy_from_logits_chunk_size": (2048,),
    r"(actor_rollout_ref\.(actor|ref)|critic\.model)\.(fsdp_config\.)?pad_to_length": (False,),
    r"(actor_rollout_ref\.actor|critic)\.checkpoint\.strict": (True,),
    r"(actor_rollout_ref\.actor|critic)\.checkpoint\.mbridge_config": ({}, None),
    r"actor_rollout_ref\.actor\.sum_pi_squared_checkpointing": (False,),
    r"(.+\.|global_)profiler\.(relocate_results|finish_hook_.+)": (False, None, []),
    r"actor_rollout_ref\.ref\.model|(actor_rollout_ref|critic)\.model\.(hf_config_path|target_parameters)": (None,),
    r"trainer\.v1\.sync": ({}, None),
    r"actor_rollout_ref\.rollout\.router_config_path": (None,),
    r"(actor_rollout_ref|critic)\.model\.lora\.(type|dropout_position|lora_[AB]_init_method)": (
        *("lora", "pre", "xavier", "zero"),
    ),
    r"(actor_rollout_ref|critic)\.model\.lora\.dropout": (0.0,),
    r"(actor_rollout_ref|critic)\.model\.lora\.freeze_.+": (True,),
    r"(actor_rollout_ref|critic)\.model\.lora\.target_modules": (
        ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"],  # Megatron's names: verl's FSDP reads lora_* alone
    ),
    r"actor_rollout_ref\.(actor|ref)\.router_replay\.mode": ("disabled",),
    r"skip\.(rollout|rollout_tq|async_rollout)\.action": ("cache",),
    r"data\.audio_key": ("audios", None),
    r"algorithm\.filter_groups\.max_inflight_gen_batches": (1,),
    r"trainer\.esi_redundant_time": (0,),
    r"trainer\.checkpoint_callback_class": (None,),
    r"reward\.reward_manager\.source": ("register",),
    r"global_profiler\.tool": (None,),
    r"async_training\.partial_rollout": (True,),
    r"trainer\.v1\.separate_async\.hybrid_rollout\.enable_switch": (False,),
    r"trainer\.v1\.sampler\.(sync_refill_failed_groups|custom_sampler\.(path|name))": (False, None),
    r"reward_model\.profiler\.tool_config": (None,),
    r"(reward\.)?reward_model\.rollout\.(data|expert|pipeline_model)_parallel_size": (1, None),
    r"(reward\.)?reward_model\.rollout\.skip_tokenizer_init": (False, None),
    r"(reward\.)?reward_model\.rollout\.load_format": ("auto", "safetensors", None),
    r"reward\.reward_manager\.module\.(name|path)": ("custom_reward_manager", None),
    r"reward_model\.reward_loop_(source|module_path|class_name)": ("register", None),
}

# Sections in which verl's null of a key that must have a value means that nothing is set there.
UNSET = r"reward_model\..+|custom_reward_function\.num_workers|.+\.optim\.warmup_style"

# Global sizes: still keys, divided by the data-parallel size in BatchPlan.
DEPRECATED: dict[str, str] = {
    "actor_rollout_ref.actor.ppo_micro_batch_size": "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",
    "actor_rollout_ref.ref.log_prob_micro_batch_size": "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size": (
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu"
    ),
    "critic.ppo_micro_batch_size": "critic.ppo_micro_batch_size_per_gpu",
    "critic.forward_micro_batch_size": "critic.forward_micro_batch_size_per_gpu",
    "reward_model.micro_batch_size": "reward_model.micro_batch_size_per_gpu",
}

# Key pattern -> spelling of a value -> the value of today.
SPELLINGS: dict[str, dict[str, str]] = {
    r"actor_rollout_ref\.rollout\.load_format": {
        **dict.fromkeys(("auto", "dtensor", "dummy", "safetensors", "dummy_megatron", "megatron"), "dummy_dtensor"),
        "hf": "dummy_hf",
    },
    r"\w+\.rollout\.dtype|.+\.fsdp_config\.(model_dtype|dtype|mixed_precision\.(reduce|buffer)_dtype)": {
        "bf16": "bfloat16",
        "fp16": "float16",
        "half": "float16",
        "fp32": "float32",
        "float": "float32",
    },
    r"actor_rollout_ref\.actor\.kl_loss_type|algorithm\.kl_penalty": {"k1": "kl", "k2": "mse", "k3": "low_var_kl"},
    r"algorithm\.adv_estimator": {
        "grpo_vectorized": "grpo",
        "rloo_vectorized": "rloo",
    },  # verl's second implementations
    r"actor_rollout_ref\.actor\.policy_loss\.loss_mode": {"gmpo": "geo_mean"},
    r".+\.optim\.optimizer": {"AdamW": "adamw", "AdamW8bit": "adamw_8bit"},
    r"trainer\.profile_tool": {"npu": "torch", "torch_memory": "torch"},
}
_LOGGERS = {"tracking": "wandb", "stdout": "console", "file": "jsonl"}


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _loggers(value: Any) -> Any:
    return [_mapped(_LOGGERS)(name) for name in names] if isinstance(names := _as_list(value), list) else names or []


def _mapped(table: dict[str, str]) -> Callable[[Any], Any]:
    return lambda value: table.get(value, value) if isinstance(value, str) else value


def _null_is(replacement: Any) -> Callable[[Any], Any]:
    return lambda value: replacement if value is None else value


def _processes(value: Any) -> Any:
    return "auto" if value is None else int(value) if isinstance(value, str) and value.isdecimal() else value


def _top_k(value: Any) -> Any:
    return -1 if value in (0, None) else value


# Key pattern -> conversion of its value.
VALUES: tuple[tuple[str, Callable[[Any], Any]], ...] = (
    *((pattern, _mapped(names)) for pattern, names in SPELLINGS.items()),
    (r"actor_rollout_ref\.rollout\.(val_kwargs\.)?top_k", _top_k),
    (
        r"actor_rollout_ref\.rollout\.server",
        lambda value: False if isinstance(value, dict) else value,
    ),  # verl's section
    (r"trainer\.logger", _loggers),
    (r"trainer\.n_gpus_per_node", _processes),
    (r"trainer\.(save|test)_freq", lambda value: -1 if value in (0, False) else value),
    (r"custom_reward_function\.name", _null_is(CustomRewardFunctionConfig().name)),
    (r".+\.optim\.(lr_warmup_steps|total_training_steps)", _null_is(-1)),
    (r".+\.policy_loss\.dro_beta", _null_is(PolicyLossConfig().dro_beta)),
    (r".+\.model\.exclude_modules", lambda value: None if value == [] else value),
    (r"data\.val_files", _null_is([])),
    (r"actor_rollout_ref\.rollout\.(val_kwargs\.)?(stop|bad_words)", _as_list),
    (r"data\.(train_files|val_files)|.+\.transformer_layer_cls_to_wrap|.+\.(save|load)_contents", _as_list),
)


# Other names of a sharding, as FSDP2 settings: FSDP1's, DeepSpeed's and ROLL's.
_SHARDINGS: dict[str, dict[str, bool]] = {
    "fsdp": {},
    "deepspeed_zero2": {"reshard_after_forward": False},
    "deepspeed_zero3": {"reshard_after_forward": True},
    "deepspeed_zero2_cpuoffload": {"reshard_after_forward": False, "optimizer_offload": True},
    "deepspeed_zero3_cpuoffload": {"offload_policy": True},
    "deepspeed_train": {},
    "deepspeed_infer": {},
    "fsdp2_train": {},
    "fsdp2_infer": {},
}


def _sharding(change: Change) -> list[Change] | None:
    if not isinstance(change.value, str) or change.value not in _SHARDINGS:
        return None
    role = change.key.removesuffix(".strategy")
    section = f"{role}.fsdp_config" if role.startswith("actor_rollout_ref") else f"{role}.model.fsdp_config"
    settings = _SHARDINGS[change.value].items()
    return [Change(change.key, "fsdp2"), *(Change(f"{section}.{name}", value) for name, value in settings)]


def _disable_checkpointing(change: Change) -> list[Change]:
    return [Change(change.key.replace("disable_", "enable_"), not change.value)]


def _recompute(change: Change) -> list[Change] | None:
    """ROLL (Megatron): null means no recomputation."""
    if change.value is not None:
        return None
    return [Change(change.key.replace("recompute_granularity", "enable_gradient_checkpointing"), False)]


# Key pattern -> the settings that stand for one; None where the value is an ordinary one.
EXPANDED: tuple[tuple[str, Callable[[Change], list[Change] | None]], ...] = (
    (r"(actor_rollout_ref\.(actor|ref)|critic|reward_model)\.strategy", _sharding),
    (r"(actor_rollout_ref|critic)\.model\.disable_gradient_checkpointing", _disable_checkpointing),
    (r"(actor_rollout_ref|critic)\.model\.recompute_granularity", _recompute),
)


def canonical(changes: list[Change]) -> tuple[list[Change], list[str]]:
    """Settings under today's names and values, and one warning line for each that was translated."""
    result: list[Change] = []
    changes, warnings = correction_spellings(changes)
    for change in changes:
        change = _followed(change)
        if change is None:
            continue
        why = _dropped(change)
        if why is not None:
            warnings.append(f"{change.key} has no effect: {why}")
            continue
        expand = next((e for pattern, e in EXPANDED if re.fullmatch(pattern, change.key)), None)
        expanded = None if expand is None else expand(change)
        if expanded is not None:
            result += expanded
            meant = ", ".join(f"{new.key}={new.value}" for new in expanded)
            warnings.append(f"{change.key}={change.value} is another spelling of {meant}")
            continue
        key = renamed(change.key)
        if key != change.key:
            warnings.append(f"{change.key} is another spelling of {key}; use {key}")
        if key in DEPRECATED and change.value is not None:
            warnings.append(
                f"{key} is deprecated: it counts sequences over all processes and is divided by the data-parallel "
                f"size; use {DEPRECATED[key]}"
            )
        value = _converted(key, change.value)
        if value not in (change.value, [change.value]) and change.value is not None and str(value) != change.value:
            warnings.append(f"{key}={change.value} is another spelling of {key}={value}")
        result.append(Change(key, value))
    return result, warnings


_REFERENCE = re.compile(r"\$\{(oc\.select:)?\s*([\w.]+)\s*(?:,(.*))?\}")


def _followed(change: Change) -> Change | None:
    """A setting that follows another (`${key}`, `${oc.select:key,default}`), by that one's name of today; the default,
    where there is no such key. None: by another spelling it follows itself, as keys in verl's own files do."""
    match = _REFERENCE.fullmatch(change.value) if isinstance(change.value, str) else None
    if match is None or match[2].startswith((".", "oc.")):
        return change
    source = renamed(match[2])
    if source == renamed(change.key):
        return None
    if match[1] and find_key(source) is None and source not in sections():
        return _followed(Change(change.key, _read((match[3] or "null").strip())))
    return Change(change.key, change.value.replace(match[2], source, 1))


def _read(text: str) -> Any:
    """A default in an interpolation: `null`, `false`, a number, `[]`; anything else is text."""
    try:
        return json.loads(text.lower())
    except ValueError:
        return text


def _dropped(change: Change) -> str | None:
    """Reason why a setting is left out; None where it is kept."""
    if change.value == "???":
        return "??? is what YAML writes for a value that was not given"
    key = renamed(change.key)
    for pattern, why in DROPPED.items():
        if re.fullmatch(pattern, change.key) or re.fullmatch(pattern, key):
            return why
    known = find_key(key)
    if known is None:
        newer = newer_than_here(key) or newer_than_here(change.key)
        if newer is not None and not change.value:
            return f"it is off, and not available yet ({newer})"
        switch = belongs_to(key) or belongs_to(change.key)
        if switch is not None:
            return f"it belongs to {switch}, which is off, and not available yet ({newer})"
    elif change.value is None and re.fullmatch(UNSET, key) and not known.may_be_null:
        return "null leaves its default"
    return f"{change.value} is what is done anyway" if change.value in (*rest_of(change.key), *rest_of(key)) else None


def rest_of(key: str) -> tuple[Any, ...]:
    """The values at which an unbuilt key of verl's is accepted; none for other keys."""
    return next((rest for pattern, rest in AT_REST.items() if re.fullmatch(pattern, key)), ())


def renamed(key: str) -> str:
    """Today's spelling of a key."""
    for pattern, replacement in RENAMED:
        match = re.fullmatch(pattern, key)
        if match:
            return match.expand(replacement)
    return key


def _converted(key: str, value: Any) -> Any:
    if isinstance(value, str) and value.startswith("${"):
        return value  # an interpolation: its target is converted
    for pattern, convert in VALUES:
        if re.fullmatch(pattern, key):
            value = convert(value)
    return value
