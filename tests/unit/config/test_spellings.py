"""Old and newer spellings: where they go, what they become, and the warning line."""

import pytest

from verl_like.config.schema import find_key, suggest
from verl_like.config.spellings import Change, canonical, newer_than_here, refusal

A, R, M = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
F = f"{A}.fsdp_config"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (f"{A}.checkpoint.contents", f"{A}.checkpoint.save_contents"),
        (f"{A}.optim.clip_grad", f"{A}.grad_clip"),
        ("critic.optim.clip_grad", "critic.grad_clip"),
        ("critic.optim.lr_scheduler_type", "critic.optim.warmup_style"),
        ("critic.fsdp.param_offload", "critic.model.fsdp_config.param_offload"),
        ("critic.fsdp.ulysses_sequence_parallel_size", "critic.ulysses_sequence_parallel_size"),
        (f"{A}.fsdp_config.ulysses_sequence_parallel_size", f"{A}.ulysses_sequence_parallel_size"),
        ("reward_model.model.fsdp_config.min_num_params", "reward_model.model.fsdp_config.wrap_policy.min_num_params"),
        (f"{A}.fsdp_config.tp_size", f"{A}.fsdp_config.tensor_parallel_size"),
        (f"{A}.fsdp_config.tensor_model_parallel_size", f"{A}.fsdp_config.tensor_parallel_size"),
        (f"{A}.fsdp_config.mixed_precision.param_dtype", f"{A}.fsdp_config.dtype"),
        ("actor_rollout_ref.model.lora.rank", "actor_rollout_ref.model.lora_rank"),
        ("reward_model.megatron.tensor_model_parallel_size", "reward_model.model.fsdp_config.tensor_parallel_size"),
        (
            "actor_rollout_ref.ref.megatron.context_parallel_size",
            "actor_rollout_ref.ref.fsdp_config.context_parallel_size",
        ),
        ("critic.megatron.optimizer_offload", "critic.model.fsdp_config.optimizer_offload"),
        (f"{A}.optim.override_optimizer_config.optimizer_cpu_offload", f"{F}.optimizer_offload"),
        (f"{M}.override_config.model_config.rope_theta", f"{M}.override_config.rope_theta"),
        ("critic.model.lora.target_modules", "critic.model.target_modules"),
        (f"{A}.policy_loss.tau_pos", f"{A}.tau_pos"),
        ("rollout.n_gpus_per_node", f"{R}.n_gpus_per_node"),
        (f"{A}.megatron.router_replay.mode", f"{A}.router_replay.mode"),
        (f"{A}.use_remove_padding", "actor_rollout_ref.model.use_remove_padding"),
        (f"{A}.use_prefix_grouper", "actor_rollout_ref.model.share_prompts"),
        ("actor_rollout_ref.model.external_libs", "actor_rollout_ref.model.external_lib"),
        (f"{R}.checkpoint_engine.update_weights_bucket_megabytes", f"{R}.update_weights_bucket_megabytes"),
        ("trainer.val_generations_to_log_to_wandb", "trainer.log_val_generations"),
        ("ray_kwargs.ray_init.num_cpus", "ray_init.num_cpus"),
        ("ray_kwargs.timeline_json_file", "ray_init.timeline_json_file"),
        ("reward.custom_reward_function.path", "custom_reward_function.path"),
        ("reward.num_workers", "custom_reward_function.num_workers"),
        ("reward.reward_manager.name", "reward_model.reward_manager"),
        ("reward_manager.name", "reward_model.reward_manager"),
        ("reward.sandbox_fusion.url", "reward_model.sandbox_fusion.url"),
        ("reward_model.reward_kwargs.overlong_buffer_cfg.len", "reward_model.overlong_buffer.len"),
        ("reward.reward_model.enable", "reward_model.enable"),
        ("actor_rollout_ref.profiler.ranks", f"{A}.profiler.ranks"),
        ("critic.profiler.tool_config.nsys.discrete", "critic.profiler.discrete"),
        (f"{A}.profiler.tool_config.npu.discrete", f"{A}.profiler.discrete"),
        ("global_profiler.tool", "trainer.profile_tool"),
        ("global_profiler.steps", "trainer.profile_steps"),
        ("global_profiler.global_tool_config.nsys.discrete", f"{A}.profiler.discrete"),
        ("global_profiler.global_tool_config.nsys.worker_nsight_options.kill", "trainer.worker_nsight_options.kill"),
    ],
)
def test_renamed(old, new):
    (change,), warnings = canonical([Change(old, 1)])
    assert change == Change(new, 1)
    assert find_key(new), "an alias must lead to a key"
    assert warnings == [f"{old} is another spelling of {new}; use {new}"]


@pytest.mark.parametrize(
    ("key", "old", "new", "warns"),
    [
        *((f"{R}.load_format", old, "dummy_dtensor", True) for old in ("auto", "dtensor", "dummy", "safetensors")),
        (f"{R}.load_format", "dummy_megatron", "dummy_dtensor", True),
        (f"{R}.load_format", "hf", "dummy_hf", True),
        (f"{R}.load_format", "dummy_hf", "dummy_hf", False),
        (f"{A}.optim.optimizer", "AdamW8bit", "adamw_8bit", True),
        ("trainer.logger", "tracking", ["wandb"], True),
        ("trainer.logger", "wandb", ["wandb"], False),
        ("trainer.logger", ["stdout", "tracking"], ["console", "wandb"], True),
        (f"{R}.top_k", 0, -1, True),
        (f"{R}.val_kwargs.top_k", 0, -1, True),
        (f"{R}.top_k", 50, 50, False),
        ("data.train_files", "/a.parquet", ["/a.parquet"], False),
        ("data.val_files", None, [], False),
        (f"{A}.fsdp_config.model_dtype", "fp32", "float32", True),
        (f"{R}.dtype", "bf16", "bfloat16", True),
        (f"{R}.name", "sglang_async", "sglang", True),
        (f"{A}.kl_loss_type", "k3", "low_var_kl", True),
        ("algorithm.adv_estimator", "rloo_vectorized", "rloo", True),
        ("reward_model.reward_manager", "gdpo", "naive", True),
        (f"{A}.policy_loss.loss_mode", "gmpo", "geo_mean", True),
        ("data.train_files", "${data.val_files}", "${data.val_files}", False),
        (f"{A}.fsdp_config.mixed_precision.reduce_dtype", "bf16", "bfloat16", True),
        ("critic.model.fsdp_config.mixed_precision.buffer_dtype", "fp32", "float32", True),
        ("trainer.test_freq", False, -1, True),
        ("trainer.save_freq", False, -1, True),
        ("trainer.save_freq", 0, -1, True),
        ("actor_rollout_ref.model.lora.merge", False, False, False),  # beside keys that are not available
        ("trainer.n_gpus_per_node", "8", 8, False),
        ("trainer.n_gpus_per_node", "auto", "auto", False),
        ("trainer.profile_tool", "npu", "torch", True),
        ("custom_reward_function.name", None, "compute_score", False),
    ],
)
def test_values(key, old, new, warns):
    (change,), warnings = canonical([Change(key, old)])
    assert change == Change(key, new)
    assert bool(warnings) is warns


def test_global_sizes_stay_and_warn():
    changes, warnings = canonical([Change(f"{A}.ppo_micro_batch_size", 64)])
    assert changes == [Change(f"{A}.ppo_micro_batch_size", 64)]
    assert "divided by the data-parallel size; use actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu" in warnings[0]
    assert canonical([Change(f"{A}.ppo_micro_batch_size", None)])[1] == []


@pytest.mark.parametrize("key", ["reward.reward_manager.module.path", "reward_model.reward_loop_class_name"])
def test_a_manager_in_verls_form_is_refused_with_the_key_of_ours(key):
    assert canonical([Change(key, "mine.py")])[0] == [Change(key, "mine.py")]
    told = refusal(key)
    assert told and "set it to null" in told and "reward_model.reward_manager=file.py:Name" in told


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("env.trian.tags", "env.train.tags"),
        ("env.val.num_group", "env.val.num_groups"),
        ("env.tags", "env.train.tags"),
        ("actor_rollout_ref.model.lora.merg", "actor_rollout_ref.model.lora.merge"),
        ("critic.model.lora.mergee", "critic.model.lora.merge"),
    ],
)
@pytest.mark.parametrize("value", [None, False, "x"])
def test_a_misspelt_key_beside_keys_of_ours_is_told_what_it_was_meant_to_be(typed, meant, value):
    assert canonical([Change(typed, value)]) == ([Change(typed, value)], []), "it was dropped, as if it were verl's"
    assert newer_than_here(typed) is None
    assert suggest(typed) == f"; did you mean {meant}?"


def test_dropped_keys_say_why():
    changes, warnings = canonical([Change("critic.rollout_n", 8)])
    assert (changes, warnings) == ([], ["critic.rollout_n has no effect: it follows actor_rollout_ref.rollout.n"])


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("critic.model.fsdp_config.use_orig_params", True),
        (f"{A}.fsdp_config.use_orig_params", True),
        ("actor_rollout_ref.ref.fsdp_config.forward_only", True),
        (f"{R}.skip_tokenizer_init", False),
        (f"{R}.trust_remote_code", True),
        (f"{R}.profiler.ranks", [0]),
        (f"{A}.profiler.tool_config.npu.level", "level0"),
        ("reward_model.use_reward_loop", True),
        ("reward_model.rollout.data_parallel_size", 1),
        ("reward.reward_model.rollout.temperature", 1.0),
        ("reward.reward_model.rollout.disaggregation.enabled", False),
        ("reward.reward_model.rollout.disaggregation.transfer_backend", "nixl"),
        ("model_engine", "megatron"),
        ("reward_model._target_", "verl.workers.config.RewardModelConfig"),
        ("global_profiler.save_path", "x"),
        (f"{R}.data_parallel_size", 1),
        ("critic.optim.optimizer_impl", "torch.optim"),
        ("transfer_queue.enable", False),
        ("global_profiler.finish_hook_cmd", None),
        ("actor_rollout_ref.model.torch_dtype", "bfloat16"),  # of no effect in verl either
        (f"{R}.multi_turn.num_repeat_rollouts", 4),
        (f"{R}.trace.token2text", True),
        # from verl's own ppo_trainer.yaml of 0.5 to 0.9, at its defaults
        ("trainer.npu_profile.options.level", "level1"),
        ("trainer.esi_redundant_time", 0),
        (f"{A}.optim.warmup_style", None),
        (f"{A}.optim.zero_indexed_step", True),
        (f"{A}.fsdp_config.seed", 42),
        (f"{A}.fsdp_config.forward_only", False),
        (f"{A}.fsdp_config.qat.ignore_patterns", ["lm_head"]),
        ("critic.fsdp.qat.mode", "w4a16"),
        ("critic.fsdp.use_torch_compile", True),
        ("critic.fsdp.turbo_config.distributed.fsdp_plan.param_dtype", "bf16"),
        (f"{R}.prometheus.port", 9090),
        (f"{R}.mtp", "${oc.select:actor_rollout_ref.model.mtp, null}"),
        (f"{R}.name", "???"),
        ("actor_rollout_ref.model.lora.dropout", 0.0),
        ("actor_rollout_ref.ref.router_replay.mode", "disabled"),
        ("distillation.distillation_loss.use_chunked_topk", True),
        ("reward_model.rollout.dtype", None),
        # from its ppo_megatron_trainer.yaml, at its defaults
        (f"{A}.megatron.override_transformer_config.recompute_granularity", None),
        (f"{A}.megatron.override_ddp_config.overlap_grad_reduce", True),
        ("reward_model.megatron.pipeline_model_parallel_size", None),
        ("reward_model.megatron.virtual_pipeline_model_parallel_size", None),
        ("actor_rollout_ref.ref.megatron.override_transformer_config", {}),
        (f"{A}.optim.lr_decay_steps", None),
        (f"{R}.layer_name_map.qkv_layer_name", "qkv"),
        ("critic.load_weight", True),
        (f"{A}.pad_to_length", False),
        ("critic.megatron.qat.mode", "w4a16"),
        (f"{A}.megatron.entropy_from_logits_chunk_size", 2048),
        (f"{A}.megatron.override_transformer_config.use_flash_attn", True),
        ("critic.optim.muon_num_ns_steps", 5),
        (f"{A}.fsdp_config.pad_to_length", "${oc.select:actor_rollout_ref.actor.pad_to_length,False}"),
    ],
)
def test_what_asks_for_nothing_else_is_dropped_with_a_warning(key, value):
    changes, (warning,) = canonical([Change(key, value)])
    assert changes == [] and warning.startswith(f"{key} has no effect: ")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (f"{R}.data_parallel_size", 2),
        ("model_engine", "veomni"),
        ("transfer_queue.enable", True),
        (f"{A}.qat.enable", True),
        (f"{R}.trace.backend", "weave"),
        ("skip.rollout.steps", [1]),
        ("actor_rollout_ref.model.lora.dropout", 1.0),
        (f"{A}.pad_to_length", True),
        (f"{A}.megatron.override_transformer_config.moe_aux_loss_coeff", 0.01),
        (f"{A}.megatron.override_transformer_config.num_moe_experts", 4),
        (f"{A}.optim.min_lr", 1e-7),
    ],
)
def test_what_asks_for_something_else_stays_and_is_refused(key, value):
    assert canonical([Change(key, value)]) == ([Change(key, value)], [])
    assert find_key(key) is None


@pytest.mark.parametrize(
    ("key", "value", "found"),
    [
        (f"{A}.use_remove_padding", "${oc.select:actor_rollout_ref.model.use_remove_padding,false}", None),
        ("data.tool_config_path", f"${{oc.select:{R}.multi_turn.tool_config_path, null}}", None),
        (
            "critic.profiler.tool_config.nsys.discrete",
            "${oc.select:global_profiler.global_tool_config.nsys.discrete}",
            Change("critic.profiler.discrete", f"${{oc.select:{A}.profiler.discrete}}"),
        ),
        (f"{A}.kl_loss_coef", "${oc.select:no.such.key,0.01}", Change(f"{A}.kl_loss_coef", 0.01)),
        (f"{A}.grad_clip", "${.clip_ratio}", Change(f"{A}.grad_clip", "${.clip_ratio}")),
        ("trainer.project_name", "${oc.env:USER}", Change("trainer.project_name", "${oc.env:USER}")),
    ],
)
def test_what_follows_another_key_follows_its_name_of_today(key, value, found):
    """And nothing follows itself, as keys with two spellings in verl's own files would."""
    assert canonical([Change(key, value)])[0] == ([] if found is None else [found])


def test_what_megatron_splits_otherwise_is_sharded_by_fsdp_with_a_line_that_says_so():
    mega, ref = f"{A}.megatron", "actor_rollout_ref.ref.megatron"
    asked = {
        f"{mega}.expert_tensor_parallel_size": 4,
        f"{mega}.tensor_model_parallel_size": 2,
        f"{mega}.context_parallel_size": 2,
        f"{ref}.tensor_model_parallel_size": 2,  # whose context size is the actor's
        "critic.megatron.tensor_model_parallel_size": 2,
    }
    changes, lines = canonical([Change(key, value) for key, value in asked.items()])
    assert {change.key: change.value for change in changes} == {
        f"{F}.tensor_parallel_size": 1,
        f"{F}.context_parallel_size": 2,
        "actor_rollout_ref.ref.fsdp_config.tensor_parallel_size": 1,
        "critic.model.fsdp_config.tensor_parallel_size": 2,
    }
    loud = [line for line in lines if line.endswith("same numbers")]
    assert [line.partition(": ")[0] for line in loud] == [
        f"{mega}.tensor_model_parallel_size=2",
        f"{ref}.tensor_model_parallel_size=2",
        f"{mega}.expert_tensor_parallel_size=4",
    ]
    assert "FSDP shards the weights over these processes" in loud[0] and "context_parallel_size=2" in loud[0]


TENSOR, EXPERTS = f"{A}.megatron.tensor_model_parallel_size", f"{A}.megatron.expert_model_parallel_size"
CONTEXT, OF_REF = f"{A}.megatron.context_parallel_size", "actor_rollout_ref.ref"
ROLLOUT = "actor_rollout_ref.rollout.tensor_model_parallel_size"


@pytest.mark.parametrize(
    ("asked", "actor", "reference"),
    [
        ({TENSOR: 2, f"{OF_REF}.megatron.context_parallel_size": 2}, 2, 1),
        ({TENSOR: 2, f"{OF_REF}.megatron.expert_model_parallel_size": 4}, 2, 1),
        ({TENSOR: 2, f"{OF_REF}.ulysses_sequence_parallel_size": 2}, 2, 1),
        ({TENSOR: 2, f"{OF_REF}.megatron.context_parallel_size": 1}, 2, None),
        ({TENSOR: "2", CONTEXT: 2.0}, 1, None),
        ({TENSOR: f"${{{ROLLOUT}}}", ROLLOUT: 2, CONTEXT: 2}, 1, None),
        ({TENSOR: f"${{{ROLLOUT}}}", EXPERTS: 2}, f"${{{ROLLOUT}}}", None),  # 1, as it is not set
        ({TENSOR: 2, CONTEXT: f"${{oc.select:{ROLLOUT},1}}", ROLLOUT: 2}, 1, None),
        ({TENSOR: f"${{{CONTEXT}}}", CONTEXT: f"${{{TENSOR}}}"}, f"${{{F}.context_parallel_size}}", None),
    ],
)
def test_a_role_is_split_once_whoever_says_its_sizes(asked, actor, reference):
    """The reference follows the actor's tensor size, and what follows another key has that one's size."""
    changes, lines = canonical([Change(key, value) for key, value in asked.items()])
    found = {change.key: change.value for change in changes}
    assert found[f"{F}.tensor_parallel_size"] == actor
    assert found.get(f"{OF_REF}.fsdp_config.tensor_parallel_size") == reference
    told = [line for line in lines if line.endswith("same numbers")]
    assert len(told) == (1 in (actor, reference))
    for line in told:
        key, _, other = line.partition(": beside ")
        assert key.partition("=")[0] in asked and other.partition("=")[0] in asked


def test_what_follows_a_size_that_is_left_out_keeps_it():
    changes, _ = canonical([Change(ROLLOUT, f"${{{TENSOR}}}"), Change(TENSOR, 2), Change(CONTEXT, 2)])
    assert changes[:2] == [Change(ROLLOUT, 2), Change(f"{F}.tensor_parallel_size", 1)]


def test_a_switch_with_a_counterpart_is_that_one():
    changes, _ = canonical([Change(f"{A}.megatron.override_transformer_config.moe_grouped_gemm", True)])
    assert changes == [Change("actor_rollout_ref.model.experts_implementation", "grouped_mm")]


def test_verls_sections_of_an_override_are_taken_apart():
    key = "actor_rollout_ref.model.override_config"
    given = {"model_config": {"max_position_embeddings": 9}, "moe_config": {"freeze_moe_router": False}}
    assert canonical([Change(key, given)])[0] == [Change(key, {"max_position_embeddings": 9})]
    kept = canonical([Change(key, {"moe_config": {"freeze_moe_router": True}})])[0]
    assert kept == [Change(key, {"freeze_moe_router": True})]  # which no model has: refused at the start


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (Change(f"{A}.strategy", "deepspeed_zero2"),
         [Change(f"{A}.strategy", "fsdp2"), Change(f"{F}.reshard_after_forward", False)]),
        (Change(f"{A}.strategy", "deepspeed_zero3_cpuoffload"),
         [Change(f"{A}.strategy", "fsdp2"), Change(f"{F}.offload_policy", True)]),
        (Change("critic.strategy", "deepspeed_zero3"),
         [Change("critic.strategy", "fsdp2"), Change("critic.model.fsdp_config.reshard_after_forward", True)]),
        (Change(f"{A}.strategy", "fsdp"), [Change(f"{A}.strategy", "fsdp2")]),
        (Change(f"{F}.strategy", "fsdp"), [Change(f"{A}.strategy", "fsdp2")]),
        (Change("critic.fsdp.strategy", "fsdp"), [Change("critic.strategy", "fsdp2")]),
        (Change(f"{A}.optim.lr_decay_style", "cosine"), [Change(f"{A}.optim.warmup_style", "cosine")]),
        (Change(f"{A}.megatron.override_transformer_config.recompute_granularity", "selective"),
         [Change(f"{M}.enable_gradient_checkpointing", True), Change(f"{M}.recompute_granularity", "selective")]),
        (Change("reward_model.strategy", "fsdp"), [Change("reward_model.strategy", "fsdp2")]),
        (Change(f"{A}.strategy", "fsdp2_train"), [Change(f"{A}.strategy", "fsdp2")]),
        (Change(f"{M}.disable_gradient_checkpointing", True), [Change(f"{M}.enable_gradient_checkpointing", False)]),
        (Change(f"{M}.recompute_granularity", None), [Change(f"{M}.enable_gradient_checkpointing", False)]),
    ],
)  # fmt: skip
def test_one_setting_that_stands_for_several(change, expected):
    changes, warnings = canonical([change])
    assert changes == expected and len(warnings) == 1 and "is another spelling of" in warnings[0]
    assert all(find_key(new.key) for new in changes)


def test_ordinary_values_of_those_keys_are_left_alone():
    same = [Change(f"{A}.strategy", "fsdp2"), Change(f"{M}.recompute_granularity", "selective")]
    assert canonical(same) == (same, [])
