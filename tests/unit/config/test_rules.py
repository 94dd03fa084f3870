"""Rules: impossible combinations are one error that lists them all; idle settings are warnings that say why."""

import dataclasses

import pytest

from verl_like.config import PPOConfig
from verl_like.config.rules import all_rules
from verl_like.config.schema import find_key, keys
from verl_like.config.spellings import no_effect, not_available, not_yet
from verl_like.trainer.compose import compose_with_warnings

A, R, F = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.ref"
T, P = f"{A}.fsdp_config.tensor_parallel_size", f"{A}.fsdp_config.pipeline_parallel_size"
K = f"{R}.enable_rollout_routing_replay"
G = f"{R}.speculative.method=history"


def warnings_of(*overrides):
    return compose_with_warnings(overrides)[1]


def test_the_default_configuration_is_quiet():
    assert warnings_of() == []


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.curriculum.enable=true"], f"data.curriculum.enable=True with {R}.n=1: one response is never mixed"),
        (["data.curriculum.enable=true", f"{R}.n=4", "data.sampler.class_path=a.py:B"],
          "data.curriculum.enable=True with data.sampler.class_path=a.py:B: both say which prompts come"),
        (["data.curriculum.enable=true", f"{R}.n=4", "data.domain_weights={a: 1}"], "both say which prompts come"),
        (["data.curriculum.enable=true", f"{R}.n=4", "trainer.objective=sft"], "no responses are sampled that it"),
        (["data.curriculum.enable=true", f"{R}.n=4", "env.train.tags=[frozen_lake]"], "each start of an environment"),
        (["data.curriculum.enable=true", f"{R}.n=4", f"{R}.name=recorded"], f"True with {R}.name=recorded: both"),
        ([f"{A}.optim.optimizer=muon", f"{T}=2"], f"{A}.optim.optimizer=muon with {T}=2: parts of split matrices"),
        ([f"{A}.optim.optimizer=muon", "actor_rollout_ref.model.lora_rank=4"], "no matrices of the model; use adamw"),
        ([f"{A}.optim.optimizer=muon", f"{A}.fsdp_config.model_dtype=bfloat16"], "small steps would be lost"),
        (["critic.optim.optimizer=muon", "critic.model.lora_rank=4"], "no matrices of the model; use adamw or set"),
        (["critic.enable=false"], "critic.enable=False with algorithm.adv_estimator=gae"),
        (["algorithm=grpo", f"{R}.n=4", "trainer.critic_warmup=2"], "there is no critic: nothing would be"),
        (["algorithm.adv_estimator=maxrl", "algorithm.use_kl_in_reward=true"], "maxrl needs rewards of 0 or more"),
        (["algorithm.adv_estimator=maxrl", "algorithm.reward_norm.kind=batch"], "maxrl needs rewards of 0 or more"),
        (["algorithm.adv_estimator=maxrl", "algorithm.whiten_rewards=true"], "maxrl needs rewards of 0 or more"),
        ([f"{R}.do_sample=false", f"{R}.n=2"], f"{R}.do_sample=False with {R}.n=2"),
        ([f"{R}.name=hf", f"{R}.tensor_model_parallel_size=2"], "the hf engine has no tensor parallelism"),
        ([f"{R}.name=openai"], f"{R}.name=openai with {R}.openai.url=None: set it"),
        ([f"{R}.name=openai", f"{R}.openai.url=http://h", f"{R}.multi_turn.enable=true"], "answers single prompts"),
        ([f"{R}.name=openai", f"{R}.openai.url=http://h", f"{R}.ignore_eos=true"], "endpoint's tokens are its own"),
        ([f"{R}.use_fire_sampling=true", f"{R}.stop=[x]"], "there the first token is a request of its own"),
        ([f"{R}.sleep_level=3"], "sleep_level=3: must lie between 1 and 2"),
        ([f"{R}.sleep_level=2", f"{R}.free_cache_engine=false"], "the engine does not sleep; set it to True"),
        ([f"{R}.sleep_level=2", f"{R}.quantization=int8", f"{R}.name=hf"], "set quantization=null, or sleep_level=1"),
        ([f"{R}.sleep_level=2", "actor_rollout_ref.model.lora_rank=4", "actor_rollout_ref.model.lora.merge=false"],
          "a sync brings adapters alone; set it to True, or"),
        ([f"{R}.sleep_level=2", "trainer.placement={other:{roles:[critic,rollout],nnodes:1,"
          "n_gpus_per_node:1}}"], "nobody there has the weights; give the engine a pool of its own, or"),
        ([f"{R}.val_kwargs.do_sample=true"], f"{R}.val_kwargs.do_sample=True with {R}.val_kwargs.temperature=0.0"),
        ([f"{R}.response_length=100"], f"{R}.response_length=100 with data.max_response_length=512"),
        ([f"{R}.enable_chunked_prefill=false", f"{R}.max_num_batched_tokens=1000"], "must be at least max_model_len"),
        ([f"{A}.use_kl_loss=true", f"{A}.use_unbiased_kl=true", f"{A}.kl_loss_type=mse"], "use one of kl, k1, low"),
        ([f"{T}=2", f"{A}.ulysses_sequence_parallel_size=2"], f"{T}=2 with {A}.ulysses_sequence_parallel_size=2"),
        ([f"{T}=2", f"{A}.fsdp_config.context_parallel_size=2"], f"{T}=2 with {A}.fsdp_config.context_parallel_size=2"),
        ([f"{A}.router.z_loss_coef=1", f"{A}.fsdp_config.context_parallel_size=2"], "scores are those of whole"),
        ([f"{T}=2", "actor_rollout_ref.model.use_remove_padding=false"], f"{T}=2 with actor_rollout_ref.model.use_rem"),
        ([f"{P}=2", f"{T}=2", f"{A}.fsdp_config.pipeline_schedule=zero_bubble"], f"zero_bubble with {T}=2: "),
        ([f"{P}=2", "actor_rollout_ref.model.enable_activation_offload=true"], "offload=True: not available"),
        ([f"{P}=2", f"{A}.use_torch_compile=true"], f"{P}=2 with {A}.use_torch_compile=True: not available"),
        ([f"{P}=2", f"{A}.use_kl_loss=true", f"{A}.kl_loss_type=full"], f"{P}=2 with {A}.kl_loss_type=full: it comp"),
        ([f"{P}=2", f"{K}=true"], f"{P}=2 with {K}=True: routes are those of all layers"),
        ([f"{P}=2", f"{A}.router.z_loss_coef=1"], "losses are those of all layers"),
        ([f"{T}=0"], "tensor_parallel_size=0: must be at least 1"),
        ([f"{A}.rl_loss_coef=0"], "nothing would be trained"),
        ([f"{A}.router_replay.mode=R3"], f"{A}.router_replay.mode=R3 with {K}=False: it replays the rollout engine's"),
        ([f"{A}.router_replay.mode=R2", "algorithm.rollout_correction.bypass_mode=true"], "no pass of the trainer's"),
        ([f"{A}.router_replay.mode=R2", f"{A}.old_log_probs=rollout"], f"R2 with {A}.old_log_probs=rollout: no pass"),
        ([f"{A}.router_replay.mode=R2", f"{A}.use_torch_compile=true"], "choices are exchanged inside of layers"),
        ([f"{K}=true", f"{A}.use_torch_compile=true"], f"{K}=True with {A}.use_torch_compile=True"),
        ([f"{K}=true", f"{R}.name=sglang"], f"{K}=True with {R}.name=sglang: this engine records none"),
        ([f"{K}=true", f"{R}.engine_kwargs.vllm.speculative_config={{method:ngram}}"], "guessed wrong have routes"),
        ([G, f"{R}.name=vllm", f"{K}=true"], f"{K}=True with {R}.speculative.method=history: tokens that are guessed"),
        ([f"{R}.speculative.method=ngram", f"{R}.name=sglang"], "takes no guesses; use name=hf or vllm"),
        ([f"{R}.speculative.method=ngram", f"{R}.engine_kwargs.vllm.speculative_config={{method:ngram}}"],
          "both say how tokens are guessed"),
        ([G, f"{R}.name=hf", f"{K}=true"], "guessed wrong have routes"),
        ([G, f"{R}.name=hf", "trainer.parity=exact"], "adds up in another order than over one"),
        ([G, f"{R}.name=hf", "trainer.objective=serve"], "follows from all requests"),
        ([f"{R}.speculative.method=ngram", f"{R}.min_p=0.1"], f"{R}.speculative.method=ngram: vLLM refuses such"),
        ([f"{F}.router_replay.mode=R3"], "a divergence compares whole policies, routers included"),
        ([f"{A}.router_replay.replay_file=a.pt"], "recorded with the rows of a step"),
        ([f"{A}.ratio_skip_threshold=0.5"], "ratio_skip_threshold=0.5: must be at least 1"),
        ([f"{A}.policy_loss.clip_cov_lb=5"], "must be below clip_cov_ub=5.0"),
        (["trainer.resume_mode=resume_path"], "with trainer.resume_from_path=None"),
        (["trainer.val_only=true", "data.val_files=[]"], "there is nothing to validate on"),
        (["trainer.launcher=local", "trainer.n_gpus_per_node=2"], "local runs one process"),
        (["actor_rollout_ref.model.lora.rank=600", "actor_rollout_ref.model.lora.merge=false"],
          "lora_rank=600 with actor_rollout_ref.model.lora.merge=False and actor_rollout_ref.rollout.name=vllm"),
        ([f"{A}.checkpoint.save_contents=[model]", f"{A}.checkpoint.load_contents=[model,optimizer]",
          "trainer.save_freq=5"], r"asks for ['optimizer']"),
        (["trainer.best_metric=val-core/a", "data.val_files=[v]", "trainer.test_freq=-1"], "no step is validated"),
        (["trainer.best_metric=val-core/a", "data.val_files=[]", "trainer.test_freq=5"], "no step is validated"),
        (["trainer.best_metric=val-core/a", "trainer.early_stop_patience=2", "data.val_files=[v]",
          "trainer.test_freq=null"], "trainer.early_stop_patience=2 with trainer.test_freq=None"),
    ],
)  # fmt: skip
def test_impossible_combinations(overrides, message):
    with pytest.raises(ValueError) as caught:
        compose_with_warnings(overrides)
    assert message in str(caught.value)


def test_a_restart_keeps_what_it_needs():
    with pytest.raises(ValueError, match=r"max_restarts=2 with trainer.del_local_ckpt_after_load=True"):
        compose_with_warnings(["trainer.max_restarts=2", "trainer.del_local_ckpt_after_load=True"])


def test_all_problems_in_one_error():
    with pytest.raises(ValueError) as caught:
        compose_with_warnings(["critic.enable=false", "trainer.resume_mode=resume_path", "reward_model.enable=true"])
    assert len(caught.value.problems) == 3  # pyright: ignore


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            [f"{A}.use_dynamic_bsz=true", f"{A}.ppo_micro_batch_size_per_gpu=4"],
            f"{A}.ppo_micro_batch_size_per_gpu has no effect in this run: {A}.use_dynamic_bsz=true cuts by tokens",
        ),
        (
            [f"{A}.ppo_micro_batch_size_per_gpu=4", f"{A}.ppo_max_token_len_per_gpu=9000"],
            f"{A}.ppo_micro_batch_size_per_gpu cuts by sequences; for a token budget set {A}.use_dynamic_bsz=true",
        ),
        ([f"{A}.kl_loss_coef=0.1"], f"{A}.use_kl_loss is false"),
        ([f"{A}.fsdp_config.param_offload=true", "trainer.device=cpu"], "everything is in host memory"),
        ([f"{A}.fsdp_config.grad_offload=true"], "gradients are freed after every optimizer step"),
        (["actor_rollout_ref.model.lora_alpha=8"], "actor_rollout_ref.model.lora_rank is 0"),
        (["actor_rollout_ref.model.lora.merge=false"], "actor_rollout_ref.model.lora_rank is 0"),
        (["critic.model.lora.merge=false"], "a critic's weights are not sent"),
        (
            ["actor_rollout_ref.model.lora_rank=8", f"{A}.use_kl_loss=true", f"{F}.fsdp_config.param_offload=true"],
            "with LoRA the reference is the actor's own base model",
        ),
        ([f"{R}.layered_summon=true"], "gathered tensor by tensor"),
        (["trainer.best_mode=min"], "trainer.best_mode has no effect in this run: trainer.best_metric is not set"),
        ([f"{A}.entropy_checkpointing=true"], "recomputes it in the backward pass"),
        (
            [
                "actor_rollout_ref.model.recompute_granularity=selective",
                "actor_rollout_ref.model.enable_gradient_checkpointing=false",
            ],
            "enable_gradient_checkpointing is false",
        ),
        (
            [f"{A}.fsdp_config.wrap_policy={{min_num_params: 5, transformer_layer_cls_to_wrap: [X]}}"],
            "transformer_layer_cls_to_wrap is not empty: it names the modules",
        ),
        ([f"{A}.checkpoint.save_contents=[hf_model]", "trainer.save_freq=5"], "a run cannot be resumed"),
        ([f"{A}.old_log_probs=rollout", f"{R}.top_p=0.9"], "top_p=0.9: the sampler's log-probs"),
        (
            [f"{R}.repetition_penalty=1.2", f"{R}.min_p=0.1"],
            f"{R}.min_p=0.1 with {R}.repetition_penalty=1.2: the sampler's",
        ),
        ([f"{F}.fsdp_config.param_offload=true"], "no KL term needs a reference"),
        (["algorithm.kl_ctrl.kl_coef=0.1"], "algorithm.use_kl_in_reward is false"),
        (["algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.target_kl=0.5"], "algorithm.kl_ctrl.type is fixed"),
        (["algorithm=grpo", f"{R}.n=2", "algorithm.lam=0.9"], "algorithm.adv_estimator does not read it (read by gae)"),
        (
            ["algorithm.adv_estimator=rloo", f"{R}.n=2", "algorithm.gamma=0.9"],
            "(read by gae, reinforce, reinforce_plus_plus)",
        ),
        (["algorithm.adv_estimator=opo"], f"{R}.n=1 with algorithm.adv_estimator=opo"),
        ([f"{A}.tau_pos=2"], "does not read it (read by sapo)"),
        ([f"{A}.policy_loss.dro_beta=2"], "does not read it (read by dro)"),
        ([f"{A}.policy_loss.loss_mode=gspo", f"{A}.clip_ratio_c=2"], "(read by vanilla, dppo_tv, dppo_kl)"),
        (
            [f"{A}.policy_loss.loss_mode=gpg", f"{A}.clip_ratio_low=0.1"],
            "loss_mode does not read it (read by vanilla, ",
        ),
        ([f"{A}.policy_loss.kl_cov_ratio=0.1"], "does not read it (read by kl_cov)"),
        ([f"{A}.policy_loss.topr.negative_weight=0.5"], "does not read it (read by topr)"),
        (
            ["algorithm=grpo", f"{R}.n=2", f"{A}.policy_loss.loss_mode=sapo", f"{A}.loss_agg_mode=token-sum"],
            "prescribes its aggregation",
        ),
        (
            [f"{R}.top_p=0.9"],
            "actor_rollout_ref.rollout.top_p=0.9: the sampler's log-probs are those of the changed distribution",
        ),
        ([f"{R}.top_k=50"], "rollout_corr/* show the change"),
        ([f"{R}.presence_penalty=0.5"], "presence_penalty=0.5: the ratio of the loss knows no penalty"),
        (
            [f"{R}.presence_penalty=0.5", "algorithm.rollout_correction.rollout_is=token"],
            "the correction's weights put that right",
        ),
        ([f"{R}.openai.model=m"], f"{R}.name is not openai"),
        ([f"{R}.use_fire_sampling=true"], "takes the first token of each response, drawn at"),
        ([f"{A}.ppo_mini_batch_size=1024", f"{A}.clip_ratio_high=0.28"], "all ratios are 1"),
        ([f"{A}.ppo_mini_batch_size=1024", f"{A}.ratio_skip_threshold=20"], "all ratios are 1"),
        ([f"{A}.use_kl_loss=true", f"{A}.kl_loss_type=kl"], "has a gradient of mean 0"),
        (["preset=rloo"], "set ppo_mini_batch_size=1024 and ppo_epochs=1"),
        ([f"{A}.use_unbiased_kl=true"], f"{A}.use_kl_loss is false"),
        ([f"{A}.sample_weight.difficulty_key=hard"], f"{A}.sample_weight.difficulty is false"),
        ([f"{A}.sample_weight.scope=batch"], ".difficulty and .length are false"),
        ([f"{A}.optim.l2_coeff=0.1"], "pulled to 0 twice"),
        (["algorithm=grpo", f"{R}.n=2", "critic.optim.lr=1"], "there is no critic"),
        (["algorithm.adv_estimator=grpo"], f"{R}.n=1 with algorithm.adv_estimator=grpo"),
        (
            ["algorithm.norm_adv_by_std_in_grpo=false"],
            "algorithm.adv_estimator does not read it (read by grpo, grpo_passk",
        ),
        ([f"{A}.optim.min_lr_ratio=0.1"], "warmup_style is constant"),
        (["rollout=hf", f"{R}.gpu_memory_utilization=0.9"], f"{R}.name is hf"),
        (["trainer.total_training_steps=5", "trainer.total_epochs=2"], "trainer.total_training_steps is set"),
        ([f"{R}.mode=async"], "the engine always works request by request"),
        (["algorithm.pf_ppo.weight_pow=3"], "algorithm.use_pf_ppo is false"),
        (["trainer.worker_nsight_options.kill=all"], "trainer.profile_steps with trainer.profile_tool=nsys uses it"),
        ([f"{A}.profiler.discrete=true"], "trainer.profile_steps is empty"),
        ([f"{A}.ppo_max_token_len_per_gpu=100"], "is below data.max_prompt_length + data.max_response_length = 1024"),
        ([f"{A}.ppo_max_token_len_per_gpu=1000000000000"], "more than a whole rollout batch can hold (1048576 tokens)"),
        ([f"{R}.val_kwargs.n=4"], f"{R}.val_kwargs.n=4 with {R}.val_kwargs.do_sample=False"),
        (
            ["reward_model.enable=true", "reward_model.model.path=x", f"{R}.agent.agent_loop_config_path=loops.yaml"],
            "a reward_score that a loop returns counts nothing",
        ),
    ],
)
def test_idle_and_risky_settings_are_warned_about(overrides, message):
    assert [w for w in warnings_of(*overrides) if message in w], warnings_of(*overrides)


def test_bounds_count_where_ratios_move():
    assert warnings_of(f"{A}.clip_ratio_high=0.28") == []  # four mini-batches a step
    one_update = [f"{A}.ppo_mini_batch_size=1024", f"{A}.clip_ratio_high=0.28"]
    assert warnings_of(*one_update, f"{A}.ppo_epochs=2") == []
    assert warnings_of(*one_update, f"{A}.old_log_probs=recompute") == []
    assert warnings_of(*one_update, "algorithm.rollout_correction.bypass_mode=true") == []


def test_losses_without_a_ratio_are_for_one_update():
    """...or for updates whose weights carry the ratio."""
    assert warnings_of("preset=rloo", f"{A}.ppo_mini_batch_size=1024") == []
    preset = "algorithm.rollout_correction.preset"
    assert warnings_of(f"{preset}=bypass_pg_is") == []
    assert any("updates after the first are off-policy" in line for line in warnings_of(f"{preset}=bypass_pg_geo_rs"))


@pytest.mark.parametrize("kind", ["kl+", "mse", "low_var_kl"])
def test_kl_losses_with_a_direction_are_not_warned_about(kind):
    assert warnings_of(f"{A}.use_kl_loss=true", f"{A}.kl_loss_type={kind}") == []


GRPO = ["algorithm=grpo", f"{R}.n=2"]
REWARD = ["reward_model.enable=true", "reward_model.model.path=/rm"]
SIZE = f"{A}.ppo_micro_batch_size_per_gpu=4"


@pytest.mark.parametrize(
    "overrides",
    [
        [SIZE],
        [*GRPO, *REWARD, "critic.use_dynamic_bsz=false", "reward_model.micro_batch_size_per_gpu=2"],
        [*GRPO, *REWARD, "critic.ppo_max_token_len_per_gpu=9000"],
        [*GRPO, *REWARD, "critic.forward_max_token_len_per_gpu=9000"],
        [SIZE, f"{R}.log_prob_use_dynamic_bsz=true", f"{A}.ppo_max_token_len_per_gpu=9000"],
        [f"{A}.policy_loss.loss_mode=gspo", f"{A}.loss_agg_mode=token-sum"],  # the critic's follows it
        [f"{A}.use_dynamic_bsz=true", f"{R}.log_prob_use_dynamic_bsz=false", SIZE],
        [f"{A}.ulysses_sequence_parallel_size=4", f"{A}.ppo_max_token_len_per_gpu=256"],
    ],
)  # fmt: skip
def test_what_acts_through_another_key_is_not_warned_about(overrides):
    """A key that follows (reward_model.use_dynamic_bsz), or a pass without a size of its own."""
    assert warnings_of(*overrides) == []


def test_a_follower_that_is_set_apart_carries_nothing():
    overrides = [*GRPO, *REWARD, "critic.forward_max_token_len_per_gpu=9000"]
    (line,) = warnings_of(*overrides, "reward_model.forward_max_token_len_per_gpu=8000")
    assert line.startswith("critic.forward_max_token_len_per_gpu has no effect in this run: there is no critic")


def test_maxrl_may_be_scaled():
    scaled = ["algorithm.reward_norm.kind=running", "algorithm.reward_norm.scale=true"]
    assert warnings_of("algorithm.adv_estimator=maxrl", f"{R}.n=2", *scaled) == []


def test_a_setting_equal_to_the_default_is_not_warned_about():
    assert warnings_of(f"{A}.kl_loss_coef=0.001") == []


def test_every_row_names_real_keys():
    for key in not_yet():
        assert find_key(key), key
    for key in no_effect():
        assert find_key(key), key
    for rule in all_rules():
        for pattern in (*rule.keys, *rule.reads):
            assert any(dataclasses.replace(rule, keys=(pattern,), reads=()).is_about(key) for key in keys()), pattern


@pytest.mark.parametrize(
    ("override", "line"),
    [
        (f"{R}.val_kwargs.min_tokens=999", f"min_tokens=999 with {R}.val_kwargs.max_tokens=None and"),
        (f"{A}.megatron.expert_tensor_parallel_size=foo", "=foo: give a whole number, at least 1, or leave it out"),
        (f"{A}.megatron.expert_tensor_parallel_size=0", "=0: give a whole number, at least 1, or leave it out"),
        (f"{A}.megatron.pipeline_model_parallel_size=0", "fsdp_config.pipeline_parallel_size=0: must be at least 1"),
        (f"{A}.megatron.context_paralel_size=2", f"=2: did you mean {A}.megatron.context_parallel_size?"),
        (f"{A}.megatron.expert_tensor_parallel_size=-3", "=-3: give a whole number, at least 1, or leave it out"),
        (
            f"+{A}.megatron.override_transformer_config.moe_aux_loss_coeff=0.001",
            "=0.001: not available yet; set it to 0, or leave it out (see actor.router.balance_loss_coef)",
        ),
        (f"{A}.megatron.forward_only=True", "=True: not available yet; set it to false, or leave it out (this model"),
        (f"{A}.megatron.xyz=3", "xyz=3: not available yet (a setting of Megatron's whose effect is not known here"),
        (f"+{R}.trace.backend=weave", f"{R}.trace.backend=weave: not available yet (traces in weave, MLflow or"),
        (f"{R}.multi_turn.enable=True", f"{R}.multi_turn.tool_config_path=None and"),
        (f"{R}.agent.default_agent_loop=tool_agent", f"default_agent_loop=tool_agent with {R}.multi_turn.enable=False"),
        (f"{R}.agent.custom_async_server.path=x.py", "not available yet; leave it out: a server of your own"),
        (f"{R}.agent.default_agent_loop=mine", f"{R}.agent.agent_loop_config_path=None: choose single_turn_agent or"),
        ("actor_rollout_ref.hybrid_engine=False", "n_gpus_per_node=0: the pool of rollout needs both sizes"),
        ("+trainer.v1.separate_async.hybrid_rollout.enable_switch=True", "that change between training and rollout"),
    ],
)  # fmt: skip
def test_what_is_not_built_is_refused_by_name(override, line):
    with pytest.raises(ValueError) as caught:
        compose_with_warnings([override])
    assert line in str(caught.value)
    assert len(caught.value.problems) == 1  # pyright: ignore


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("algorithm.adv_estimator=raft", "algorithm.adv_estimator='raft': choose one of gae, "),
        (f"{A}.policy_loss.loss_mode=m2po", f"{A}.policy_loss.loss_mode='m2po': choose one of vanilla, "),
    ],
)
def test_an_unknown_name_is_answered_with_the_known_ones(override, line):
    with pytest.raises(ValueError) as caught:
        compose_with_warnings([override])
    assert line in str(caught.value)


def test_defaults_are_available():
    assert not_available(PPOConfig()) == []
