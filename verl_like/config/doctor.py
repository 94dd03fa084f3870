"""Checks across sections: combinations that cannot work, and settings that can have no effect in this run."""

import math
from collections.abc import Iterator, Mapping, Sequence

from verl_like.config import doctor_rollout, rules_losses
from verl_like.config.doctor_async import impossible_async
from verl_like.config.doctor_environments import ENV_IDLE, has_turns, impossible_environments
from verl_like.config.doctor_paths import impossible_paths
from verl_like.config.doctor_reward_model import REWARD_MODEL_IDLE, impossible_reward_model
from verl_like.config.doctor_rewards import REWARD_IDLE, impossible_rewards, risky_rewards
from verl_like.config.doctor_sharding import SHARDING_IDLE, impossible_sharding
from verl_like.config.engines import SERVERS
from verl_like.config.errors import raise_if_any
from verl_like.config.placement import PLACEMENT_IDLE, impossible_placement, is_apart
from verl_like.config.ppo import PPOConfig
from verl_like.config.roles import ROLLOUT, needs_critic, needs_reference, roles_of
from verl_like.config.rollout import distortions
from verl_like.config.schema import Idle, declared_idle, idle_while, keys
from verl_like.config.spellings import not_available, without_effect

_ACTOR = "actor_rollout_ref.actor"
_REF = "actor_rollout_ref.ref"
_ROLLOUT = "actor_rollout_ref.rollout"
_MANY_TOKENS = 2**20  # no process holds the activations of so many


def check(
    config: PPOConfig, set_keys: frozenset[str] = frozenset(), followers: Mapping[str, Sequence[str]] = {}
) -> list[str]:
    """Warnings about this configuration, one line each.

    set_keys: dotted keys that the user set; only those are warned about. followers: key -> keys that take its value.
    Raises ConfigError listing every combination that cannot work and every feature that is not built.
    """
    raise_if_any(not_available(config) + impossible(config))
    return without_effect(set_keys) + idle(config, set_keys, followers) + risky(config)


def impossible(config: PPOConfig) -> list[str]:
    """Combinations that cannot work: keys, values, fix."""
    return [
        *_roles(config),
        *rules_losses.impossible_losses(config.actor_rollout_ref.actor),
        *impossible_paths(config),
        *_lengths(config),
        *_tools(config),
        *doctor_rollout.impossible_outcomes(config),
        *impossible_environments(config),
        *doctor_rollout.impossible_determinism(config),
        *_run(config),
        *impossible_rewards(config),
        *impossible_reward_model(config),
        *impossible_placement(config),
        *impossible_async(config),
        *doctor_rollout.impossible_endpoint(config),
        *rules_losses.impossible_quantization(config),
        *doctor_rollout.impossible_sleep(config),
    ]


def _roles(config: PPOConfig) -> Iterator[str]:
    policy, algorithm = config.actor_rollout_ref, config.algorithm
    if algorithm.adv_estimator == "gae" and config.critic.enable is False:
        yield (
            "critic.enable=False with algorithm.adv_estimator=gae: gae needs values; "
            "set algorithm.adv_estimator=grpo or critic.enable=true"
        )
    if config.trainer.critic_warmup > 0 and not needs_critic(config.critic, algorithm):
        yield (
            f"trainer.critic_warmup={config.trainer.critic_warmup} without a critic "
            f"(algorithm.adv_estimator={algorithm.adv_estimator}): nothing would be trained; set it to 0"
        )
    if not policy.rollout.do_sample and policy.rollout.n > 1:
        yield (
            f"{_ROLLOUT}.do_sample=False with {_ROLLOUT}.n={policy.rollout.n}: all responses would be "
            f"equal; set do_sample=true or n=1"
        )
    if not policy.rollout.engine.tensor_parallel and policy.rollout.tensor_model_parallel_size > 1:
        size = policy.rollout.tensor_model_parallel_size
        yield (
            f"{_ROLLOUT}.tensor_model_parallel_size={size} with {_ROLLOUT}.name=hf: "
            f"the hf engine has no tensor parallelism; set it to 1 or use name=vllm"
        )
    if policy.rollout.engine.recorded:
        yield from _without_engine(config)
    rollout = policy.rollout
    counting = rollout.presence_penalty or rollout.frequency_penalty or rollout.bad_words or rollout.stop
    if rollout.use_fire_sampling and rollout.engine.first_apart and counting:
        yield (
            f"{_ROLLOUT}.use_fire_sampling=True with presence_penalty, frequency_penalty, bad_words or stop, and "
            f"{_ROLLOUT}.name=vllm: there the first token is a request of its own, which the rest would not count; "
            "leave one out, or use name=hf or sglang"
        )
    drafts = rollout.engine_kwargs.vllm.get("speculative_config") if rollout.engine.drafts else None
    if drafts is not None and (not isinstance(drafts, dict) or drafts.get("method") != "ngram"):
        yield (
            f"{_ROLLOUT}.engine_kwargs.vllm.speculative_config={drafts}: the weights of a draft model would not follow "
            "the policy's; use {method: ngram, num_speculative_tokens: 3, prompt_lookup_max: 4}, or leave it out"
        )
    elif drafts is not None:
        if drafts.get("rejection_sample_method") == "synthetic":
            yield (
                f"{_ROLLOUT}.engine_kwargs.vllm.speculative_config.rejection_sample_method=synthetic: it accepts at a "
                "rate of its own, and so does not sample from the policy; leave it out"
            )
        for key, value in (
            (f"{_ROLLOUT}.min_p", rollout.min_p),
            (f"{_ROLLOUT}.val_kwargs.min_p", rollout.val_kwargs.min_p),
        ):
            if value:
                yield (
                    f"{key}={value} with {_ROLLOUT}.engine_kwargs.vllm.speculative_config: vLLM refuses such requests; "
                    "leave one out"
                )
    yield from dict.fromkeys(impossible_sharding(config))  # with LoRA the reference has the actor's
    yield from _validation_sampling(config)


def _without_engine(config: PPOConfig) -> Iterator[str]:
    trainer, key = config.trainer, f"{_ROLLOUT}.name=recorded"
    if trainer.val_before_train or trainer.val_only or trainer.test_freq != -1:
        yield f"{key}: nothing answers a validation; set trainer.val_before_train=False trainer.test_freq=-1"
    if is_apart(config, ROLLOUT):
        yield f"{key}: there is no engine to be in a pool of its own; leave hybrid_engine and placement out"


def _validation_sampling(config: PPOConfig) -> Iterator[str]:
    rollout = config.actor_rollout_ref.rollout
    val = rollout.val_kwargs
    longest = val.max_tokens or rollout.response_length
    least = rollout.min_tokens if val.min_tokens is None else val.min_tokens
    if not least <= longest <= rollout.response_length:
        inherited = f" (null: {_ROLLOUT}.min_tokens={least})" if val.min_tokens is None and least else ""
        yield (
            f"{_ROLLOUT}.val_kwargs.min_tokens={val.min_tokens}{inherited} and {_ROLLOUT}.val_kwargs.max_tokens="
            f"{val.max_tokens} with {_ROLLOUT}.response_length={rollout.response_length}: each must be the next one's "
            "value at most"
        )
    elif val.do_sample and val.temperature == 0:
        yield (
            f"{_ROLLOUT}.val_kwargs.do_sample=True with temperature=0.0: sampling needs a temperature; "
            f"set {_ROLLOUT}.val_kwargs.temperature above 0 or do_sample=false"
        )


def _lengths(config: PPOConfig) -> Iterator[str]:
    data, rollout = config.data, config.actor_rollout_ref.rollout
    pairs = (
        ("prompt_length", rollout.prompt_length, "max_prompt_length", data.max_prompt_length),
        ("response_length", rollout.response_length, "max_response_length", data.max_response_length),
    )
    for key, value, source, wanted in pairs:
        if value != wanted:
            yield (
                f"{_ROLLOUT}.{key}={value} with data.{source}={wanted}: one length has two values; "
                f"set data.{source} only, and leave {_ROLLOUT}.{key} out (a saved config.yaml holds it)"
            )
    longest = data.max_prompt_length + data.max_response_length
    if not rollout.enable_chunked_prefill and rollout.max_num_batched_tokens < longest and rollout.engine.whole_prompts:
        yield (
            f"{_ROLLOUT}.max_num_batched_tokens={rollout.max_num_batched_tokens} with "
            f"enable_chunked_prefill=False: must be at least max_model_len ({longest})"
        )


def _tools(config: PPOConfig) -> Iterator[str]:
    rollout = config.actor_rollout_ref.rollout
    turns, key = rollout.multi_turn, f"{_ROLLOUT}.multi_turn"
    tools = turns.tool_config_path or turns.function_tool_path or turns.environment_path
    if turns.enable and not (tools or turns.interaction_config_path):
        yield (
            f"{key}.enable=True, but there is nothing that the model could call, and nobody who answers it: set "
            f"{key}.tool_config_path, {key}.function_tool_path, {key}.environment_path or "
            f"{key}.interaction_config_path, or {key}.enable=false"
        )
    if turns.enable and config.data.chat_template == "none":
        yield (
            f"{key}.enable=True with data.chat_template=none: a conversation needs a chat template; use native, or one "
            "of your own"
        )
    default, loops = rollout.agent.default_agent_loop, f"{_ROLLOUT}.agent.agent_loop_config_path"
    if rollout.agent.agent_loop_config_path is None and default not in ("single_turn_agent", "tool_agent"):
        yield (
            f"{_ROLLOUT}.agent.default_agent_loop={default}: choose single_turn_agent or tool_agent, or list it in a "
            f"file of agent loops: {loops}"
        )
    if rollout.agent.agent_loop_config_path is None and not turns.enable and default == "tool_agent":
        yield f"{_ROLLOUT}.agent.default_agent_loop=tool_agent needs {key}.enable=True"


def _run(config: PPOConfig) -> Iterator[str]:
    trainer = config.trainer
    if trainer.resume_mode == "resume_path" and not trainer.resume_from_path:
        yield (
            "trainer.resume_mode=resume_path without trainer.resume_from_path: give the checkpoint's "
            "global_step_N folder, or use resume_mode=auto"
        )
    if trainer.max_restarts and trainer.del_local_ckpt_after_load and trainer.default_hdfs_dir is None:
        yield (
            f"trainer.max_restarts={trainer.max_restarts} with trainer.del_local_ckpt_after_load=True: a restart "
            "before the next checkpoint would begin at step 0; set trainer.default_hdfs_dir, or leave out one of them"
        )
    if (
        trainer.best_metric is not None
        and not trainer.val_only
        and (trainer.test_freq == -1 or not config.data.val_files)
    ):
        yield (
            f"trainer.best_metric={trainer.best_metric} with trainer.test_freq={trainer.test_freq}, data.val_files="
            f"{config.data.val_files}: no step is validated; set both, or leave it out"
        )
    elif trainer.early_stop_patience is not None and trainer.test_freq is None:
        yield (
            f"trainer.early_stop_patience={trainer.early_stop_patience} with trainer.test_freq=null: the first "
            "validation of a step is after the last; set test_freq"
        )
    if trainer.val_only and not config.data.val_files:
        yield "trainer.val_only=True with data.val_files=[]: there is nothing to validate on; set data.val_files"
    if trainer.launcher == "local" and (trainer.nnodes, trainer.n_gpus_per_node) not in ((1, 1), (1, "auto")):
        yield (
            f"trainer.launcher=local with trainer.nnodes={trainer.nnodes}, trainer.n_gpus_per_node="
            f"{trainer.n_gpus_per_node}: local runs one process; set both to 1 or launcher=ray"
        )
    for section, checkpoint in (
        (_ACTOR, config.actor_rollout_ref.actor.checkpoint),
        ("critic", config.critic.checkpoint),
    ):
        missing = sorted(set(checkpoint.load_contents) - set(checkpoint.save_contents) - {"hf_model"})
        if missing and trainer.resume_mode == "auto" and (trainer.save_freq or -1) > 0:
            yield (
                f"{section}.checkpoint.load_contents={checkpoint.load_contents} asks for {missing}, which "
                f"save_contents={checkpoint.save_contents} leaves out: a resume would fail; set them equal"
            )


def _no_critic(config: PPOConfig) -> bool:
    return not needs_critic(config.critic, config.algorithm)


_OF_SERVERS = ("gpu_memory_utilization", "enforce_eager", "cudagraph_capture_sizes", "enable_chunked_prefill")
_OF_SERVERS += ("enable_prefix_caching", "disable_log_stats")

IDLE: tuple[Idle, ...] = (
    *rules_losses.CORRECTION_IDLE,
    Idle(
        (f"{_REF}.",),
        lambda c: not needs_reference(c),
        f"no KL term needs a reference ({_ACTOR}.use_kl_loss and algorithm.use_kl_in_reward are false)",
    ),
    Idle(("critic.",), _no_critic, "there is no critic (algorithm.adv_estimator is not gae)"),
    *rules_losses.LOSS_IDLE,
    Idle(
        (f"{_ACTOR}.optim.lr_warmup_steps_ratio",),
        lambda c: c.actor_rollout_ref.actor.optim.lr_warmup_steps >= 0,
        f"{_ACTOR}.optim.lr_warmup_steps is set",
    ),
    *(
        Idle(
            (f"{_ACTOR}.{name}",),
            lambda c: c.actor_rollout_ref.model.use_fused_kernels,
            f"actor_rollout_ref.model.use_fused_kernels is true: it makes no [tokens x vocabulary] tensor, and {does}",
        )
        for name, does in (
            ("entropy_from_logits_with_chunking", "computes entropy in chunks"),
            ("entropy_checkpointing", "recomputes it in the backward pass"),
        )
    ),
    *SHARDING_IDLE,
    *PLACEMENT_IDLE,
    *doctor_rollout.OUTCOME_IDLE,
    *ENV_IDLE,
    Idle(
        tuple(f"{_ROLLOUT}.{name}" for name in _OF_SERVERS),
        lambda c: not (kind := c.actor_rollout_ref.rollout.engine).keeps_cache or kind.endpoint,
        f"{_ROLLOUT}.name is hf or openai",
    ),
    *(idle_while(f"{_ROLLOUT}.name", f"not {engine}", f"{_ROLLOUT}.engine_kwargs.{engine}") for engine in SERVERS),
    Idle(
        (f"{_ROLLOUT}.gpu_memory_utilization", f"{_ROLLOUT}.cudagraph_capture_sizes"),
        lambda c: c.trainer.device == "cpu" and c.actor_rollout_ref.rollout.engine.leaves_device,
        "trainer.device is cpu",
    ),
    Idle(
        (f"{_ROLLOUT}.multi_turn.", f"{_ROLLOUT}.agent.num_workers"),
        lambda c: not has_turns(c),
        f"{_ROLLOUT}.multi_turn.enable is false",
    ),
    idle_while("data.custom_cls.path", "null", "data.custom_cls.name", "data.custom_cls.kwargs"),
    Idle(
        ("data.extra",),
        lambda c: c.data.custom_cls.path is None and c.data.sampler.class_path is None,
        "no class of your own reads it (data.custom_cls.path, data.sampler.class_path)",
    ),
    Idle(
        ("data.domain_weights", "data.shuffle"),
        lambda c: c.data.sampler.class_path is not None,
        "data.sampler draws the prompts",
    ),
    Idle(("critic.model.custom_chat_template",), lambda c: True, "the critic sees the policy's tokens"),
    Idle(
        ("trainer.total_epochs",),
        lambda c: c.trainer.total_training_steps is not None,
        "trainer.total_training_steps sets the length of the run",
    ),
    Idle(
        ("trainer.profile_tool", *(f"{s}.profiler." for s in (_ACTOR, _REF, "critic", "reward_model"))),
        lambda c: not c.trainer.profile_steps,
        "trainer.profile_steps names no step",
    ),
    Idle(
        ("trainer.controller_nsight_options", "trainer.worker_nsight_options"),
        lambda c: not (c.trainer.profile_steps and c.trainer.profile_tool == "nsys"),
        "trainer.profile_steps with trainer.profile_tool=nsys uses it",
    ),
    Idle(
        (f"{_ROLLOUT}.skip_dump_dir",),
        lambda c: not c.actor_rollout_ref.rollout.skip_rollout and not c.actor_rollout_ref.rollout.engine.recorded,
        f"{_ROLLOUT}.skip_rollout is false",
    ),
    Idle(
        (f"{_ROLLOUT}.n_redundant",),
        lambda c: c.actor_rollout_ref.rollout.engine.recorded,
        f"{_ROLLOUT}.name=recorded: the responses of each group are there",
    ),
    Idle(
        ("reward_model.rule", "reward_model.rule_by_source", "reward_model.rule_kwargs"),
        lambda c: c.custom_reward_function.path is not None and not c.reward_model.weights,
        "custom_reward_function.path grades all rows",
    ),
    *REWARD_IDLE,
    *REWARD_MODEL_IDLE,
    *declared_idle(),
    # Said only where no row above has a better reason
    Idle(("env.val.max_traj_per_env",), lambda c: True, "each start of a validation is played val_kwargs.n times"),
    Idle(
        ("algorithm.reward_norm.scale",),
        lambda c: c.algorithm.reward_norm.shift,
        "algorithm.reward_norm.shift wins over it",
    ),
)


def idle(config: PPOConfig, set_keys: frozenset[str], followers: Mapping[str, Sequence[str]] = {}) -> list[str]:
    """One line for every key the user set that can have no effect in this run.

    followers: key -> keys that take its value. What acts through one of them is not idle.
    """
    sizes, rows = _idle_sizes(config), [row for row in IDLE if row.when(config)]

    def why(key: str) -> str | None:
        return sizes.get(key) or next((row.why for row in rows if covers(row, key)), None)

    def acts(key: str) -> bool:
        return why(key) is None or any(acts(follower) for follower in followers.get(key, ()))

    return [f"{key} has no effect in this run: {why(key)}" for key in keys() if key in set_keys and not acts(key)]


def _idle_sizes(config: PPOConfig) -> dict[str, str]:
    """Sizes of micro-batches that cut no pass of this run, and why; missing roles have rows of their own."""
    used = [cut for role in roles_of(config).values() for cut in role.passes.values()]
    deciding = {cut.deciding_key for cut in used}
    return {key: why for cut in used for key, why in cut.idle_keys.items() if key not in deciding}


def covers(row: Idle, key: str) -> bool:
    """Return True where a row is about this key."""
    return any(key.startswith(p) if p.endswith(".") else key == p for p in row.keys)


def risky(config: PPOConfig) -> list[str]:
    """Settings that work but are probably not meant."""
    return [*_greedy_validation(config), *risky_training(config)]


def risky_training(config: PPOConfig) -> Iterator[str]:
    """Settings of training alone that work but are probably not meant."""
    actor = config.actor_rollout_ref.actor
    yield from _odd_budgets(config)
    estimator = config.algorithm.estimator
    if estimator.compares and config.actor_rollout_ref.rollout.n == 1:
        yield (
            f"{_ROLLOUT}.n=1 with algorithm.adv_estimator={estimator.name}: a group of one has nothing to compare "
            f"with; set {_ROLLOUT}.n to 2 or more"
        )
    rollout = config.actor_rollout_ref.rollout
    yield from rules_losses.risky_correction(config)
    yield from rules_losses.risky_baseline(config)
    if rules_losses.two_policies(config) and distortions(rollout):
        cause, fix = f"{_ACTOR}.old_log_probs=rollout", f"set {_ACTOR}.old_log_probs=recompute"
        if config.algorithm.rollout_correction.bypass_mode:
            cause, fix = "algorithm.rollout_correction.bypass_mode=True", "leave bypass_mode and old_log_probs out"
        yield (
            f"{cause} with {_ROLLOUT}.{', '.join(distortions(rollout))}: the sampler's log-probs are those of the "
            "changed distribution, the trainer's of the model's own: ratios are not 1 before the first update; leave "
            f"them at their defaults, or {fix}"
        )
    yield from rules_losses.two_decays(config)
    yield from rules_losses.uncorrected_updates(config)
    yield from rules_losses.aimless_kl(config)
    yield from risky_rewards(config)
    if (config.trainer.save_freq or -1) > 0 and "model" not in actor.checkpoint.save_contents:
        yield (
            f"{_ACTOR}.checkpoint.save_contents={actor.checkpoint.save_contents} leaves out model: a run cannot be "
            "resumed from such checkpoints"
        )


def _greedy_validation(config: PPOConfig) -> Iterator[str]:
    val = config.actor_rollout_ref.rollout.val_kwargs
    if not val.do_sample and val.n != 1:
        yield (
            f"{_ROLLOUT}.val_kwargs.n={val.n} without sampling: all responses to a validation prompt will be equal; "
            f"set {_ROLLOUT}.val_kwargs.do_sample=true and a temperature, or n=1"
        )


def _odd_budgets(config: PPOConfig) -> Iterator[str]:
    """Token budgets that hold no sequence of full length, or more than there will ever be."""
    longest = config.data.max_prompt_length + config.data.max_response_length
    whole = config.data.train_batch_size * config.actor_rollout_ref.rollout.n * longest
    used = [cut for role in roles_of(config).values() for cut in role.passes.values()]
    budgets = {cut.budget_key: cut for cut in used if cut.by_tokens}
    for key, cut in budgets.items():
        if key.endswith(".ppo_max_token_len_per_gpu") and cut.budget * cut.ulysses < longest:
            yield (
                f"{key}={cut.budget} is below data.max_prompt_length + data.max_response_length = {longest}: a longer "
                "sequence makes a micro-batch of its own and takes more memory than planned; set "
                f"{key}={math.ceil(longest / cut.ulysses)} or more"
            )
        elif cut.budget > max(whole, _MANY_TOKENS):
            yield (
                f"{key}={cut.budget} is more than a whole rollout batch can hold ({whole} tokens): nothing is cut, and "
                "memory is not bounded; set it to what fits one process"
            )
