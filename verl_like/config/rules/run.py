"""Rules of `trainer.*` and `data.*`: the length of a run, checkpoints, determinism, asynchronous modes, profiles,
sampling in validations."""

from verl_like.config.batch_plan import uncorrected
from verl_like.config.fsdp import resolve_dtype
from verl_like.config.paths import model_paths
from verl_like.config.placement import POOL_KEYS, pools_by, samples_alone
from verl_like.config.ppo import PPOConfig
from verl_like.config.rollout import distortions
from verl_like.config.rule import Findings, idle, rule
from verl_like.config.rules.groups import SCORED_BY, scored_together
from verl_like.config.rules.rollout import TURN_KEYS, turns_by
from verl_like.config.schema import get_value

_ROLLOUT, _FILTER = "actor_rollout_ref.rollout", "algorithm.filter_groups.enable"
_MODELS = ("actor_rollout_ref.model.path", "critic.model.path", "reward_model.model.path")
_ADDITIONAL, _IS = f"{_ROLLOUT}.scheduler.additional_prompts.enable", "algorithm.rollout_correction.rollout_is"


@rule(*_MODELS, "reward_model.model.input_tokenizer", "data.tokenizer")
def paths_are_not_empty(config: PPOConfig) -> Findings:
    """The path of a model or tokenizer names something."""
    for key in (key for key, path in model_paths(config).items() if not path.strip()):
        yield (key,), "it is empty (an unset shell variable?): name a folder or a model on the hub"


@rule("trainer.resume_mode", "resume_from_path")
def checkpoint_to_resume_from(config: PPOConfig) -> Findings:
    """resume_mode=resume_path has a path."""
    if config.trainer.resume_mode == "resume_path" and not config.trainer.resume_from_path:
        return "give the checkpoint's global_step_N folder, or use resume_mode=auto"


@rule("trainer.max_restarts", "del_local_ckpt_after_load", "default_hdfs_dir")
def restarts_keep_what_they_need(config: PPOConfig) -> Findings:
    """A run that restarts keeps the checkpoint it was loaded from."""
    trainer = config.trainer
    if trainer.max_restarts and trainer.del_local_ckpt_after_load and trainer.default_hdfs_dir is None:
        why = "a restart before the next checkpoint would begin at step 0"
        return f"{why}; set default_hdfs_dir, or leave out one of the others"


@rule("trainer.best_metric", "test_freq", "data.val_files", reads=("val_only",))
def best_step_is_validated(config: PPOConfig) -> Findings:
    """The best step is found by validations."""
    trainer, unseen = config.trainer, config.trainer.test_freq == -1 or not config.data.val_files
    if trainer.best_metric is not None and not trainer.val_only and unseen:
        return "no step is validated; set both, or leave best_metric out"


@rule("trainer.early_stop_patience", "test_freq")
def stop_before_the_last_step(config: PPOConfig) -> Findings:
    """An early stop needs validations before the last step."""
    if config.trainer.early_stop_patience is not None and config.trainer.test_freq is None:
        return "the first validation of a step is after the last; set test_freq"


@rule("trainer.val_only", "data.val_files")
def something_to_validate_on(config: PPOConfig) -> Findings:
    """A run that only validates has files to validate on."""
    if config.trainer.val_only and not config.data.val_files:
        return "there is nothing to validate on; set data.val_files"


@rule("trainer.launcher", "nnodes", "n_gpus_per_node")
def local_runs_one_process(config: PPOConfig) -> Findings:
    """trainer.launcher=local runs one process."""
    trainer = config.trainer
    if trainer.launcher == "local" and (trainer.nnodes, trainer.n_gpus_per_node) not in ((1, 1), (1, "auto")):
        return "local runs one process; set both to 1 or launcher=ray"


_DETERMINISM = (
    f"{_ROLLOUT}.n_redundant",
    f"{_ROLLOUT}.max_num_seqs",
    f"{_ROLLOUT}.enable_prefix_caching",
    *SCORED_BY[:1],
)


@rule("trainer.full_determinism", _ADDITIONAL, _FILTER, *_DETERMINISM, *TURN_KEYS)
def nothing_depends_on_time(config: PPOConfig) -> Findings:
    """With full determinism no result depends on what happens to end first."""
    rollout, key, turns = config.actor_rollout_ref.rollout, "trainer.full_determinism", turns_by(config)
    if not config.trainer.full_determinism:
        return
    if rollout.scheduler.additional_prompts.enable:
        yield (key, _ADDITIONAL), "which groups are used depends on which end first; set one of them to False"
    if config.algorithm.filter_groups.enable and rollout.scheduler.mode != "batch":
        yield (key, _FILTER, SCORED_BY[0]), "when another prompt begins depends on time; set scheduler.mode=batch"
    if rollout.n_redundant:
        yield (key, f"{_ROLLOUT}.n_redundant"), "which responses are used depends on which end first; set it to 0"
    most = rollout.scheduler.max_running_requests
    beside = [*turns, *([] if most is None else [f"{_ROLLOUT}.scheduler.max_running_requests"])]
    why = "what a request is computed beside depends on how long others take, and so"
    if beside and rollout.max_num_seqs != 1:
        fix = "set max_num_seqs=1 (one request at a time)"
        yield (key, *beside, f"{_ROLLOUT}.max_num_seqs"), f"{why} do its last digits; {fix}"
    if turns and rollout.engine.keeps_cache and rollout.enable_prefix_caching:
        fix = "set enable_prefix_caching=False"
        yield (key, *turns, f"{_ROLLOUT}.enable_prefix_caching"), f"{why} does what the cache holds; {fix}"


@rule("trainer.mode", *POOL_KEYS)
def pool_that_samples_alone(config: PPOConfig) -> Findings:
    """trainer.mode=separate_async has processes that sample alone, colocate_async has none."""
    mode, alone = config.trainer.mode, samples_alone(config)
    if mode == "separate_async" and not alone:
        sizes = f"hybrid_engine=false with {_ROLLOUT}.nnodes=1 {_ROLLOUT}.n_gpus_per_node=<processes>"
        fix = f"set {sizes}, or use trainer.mode=colocate_async"
        return ("trainer.mode", POOL_KEYS[1]), f"the rollout engine needs processes of its own; {fix}"
    if mode == "colocate_async" and alone:
        why = "the pool of the rollout engine's own would be idle while the actor trains"
        return ("trainer.mode", *pools_by(config)), f"{why}; set trainer.mode=separate_async"


@rule("trainer.mode", _IS, "async_training.max_staleness", reads=("algorithm.rollout_correction.bypass_mode",))
def older_responses_are_corrected_for(config: PPOConfig) -> Findings:
    """Responses of older policies are corrected for."""
    if uncorrected(config):
        token = "leave rollout_is out (token: truncated importance weights, one more forward pass)"
        bypass = (
            "algorithm.rollout_correction.bypass_mode=true (the clipped ratio is taken to the sampler, no further pass)"
        )
        return f"responses are up to so many versions older than the policy they train; {token}, or set {bypass}"


@rule(
    "trainer.mode", _ADDITIONAL, f"{_ROLLOUT}.skip_rollout", f"{_ROLLOUT}.name", "full_determinism", _FILTER, *SCORED_BY
)
def groups_in_flight_across_steps(config: PPOConfig) -> Findings:
    """Groups in flight across steps are sampled now, and judged as they end, which depends on time."""
    rollout, filtered, key = config.actor_rollout_ref.rollout, config.algorithm.filter_groups, "trainer.mode"
    if not config.asynchronous:
        return
    if rollout.scheduler.additional_prompts.enable:
        why = "async_training.over_sample_rate says how many groups are under way"
        yield (key, _ADDITIONAL), f"{why}; leave additional_prompts out"
    if rollout.skip_rollout or rollout.engine.recorded:
        why = "the responses of recorded steps are of another run's weights"
        recorded = f"{_ROLLOUT}.{'name' if rollout.engine.recorded else 'skip_rollout'}"
        yield (key, recorded), f"{why}; set trainer.mode=sync"
    if filtered.enable and filtered.resample and (together := scored_together(config)):
        why = f"groups are judged as they end, but {together} gives scores to whole batches"
        yield (key, _FILTER, together), f"{why}; disable one of them, or set trainer.mode=sync"
    if config.trainer.full_determinism:
        yield (key, "full_determinism"), "which groups a step trains depends on time; set trainer.mode=sync"


idle(
    "data.extra",
    when=lambda c: c.data.custom_cls.path is None and c.data.sampler.class_path is None,
    why="no class of your own reads it (data.custom_cls.path, data.sampler.class_path)",
)
idle(
    *("trainer.controller_nsight_options", "worker_nsight_options"),
    when=lambda c: not (c.trainer.profile_steps and c.trainer.profile_tool == "nsys"),
    why="trainer.profile_steps with trainer.profile_tool=nsys uses it",
)

_ACTOR, _CORRECTION = "actor_rollout_ref.actor", "algorithm.rollout_correction"
_MODEL, _FSDP, _PARITY = "actor_rollout_ref.model", f"{_ACTOR}.fsdp_config", "trainer.parity"
_OTHERS = "the engine's weights are then others than the trainer's"
_SPLIT = "what is summed over several processes has an order of its own"
_NOTHING = "there is no mismatch to correct"
_EXACT: dict[str, tuple[object, str]] = {  # key -> the one value that goes with exact parity, and why
    "trainer.objective": ("rl", "nothing is sampled"),
    "trainer.mode": ("sync", "responses are of several versions of the weights"),
    f"{_ROLLOUT}.quantization": (None, _OTHERS),
    f"{_ROLLOUT}.tensor_model_parallel_size": (1, _SPLIT),
    f"{_MODEL}.lora_rank": (0, _OTHERS),
    f"{_MODEL}.use_remove_padding": (True, "padded rows have other sums"),
    f"{_MODEL}.use_liger": (False, "its kernels are for GPUs"),
    f"{_ACTOR}.use_torch_compile": (False, "compiled sums have another order"),
    f"{_ACTOR}.ulysses_sequence_parallel_size": (1, _SPLIT),
    **dict.fromkeys(
        (f"{_FSDP}.{axis}_parallel_size" for axis in ("context", "tensor", "expert", "pipeline")), (1, _SPLIT)
    ),
    f"{_CORRECTION}.rollout_is": (None, _NOTHING),
    f"{_CORRECTION}.rollout_rs": (None, _NOTHING),
    f"{_CORRECTION}.rollout_token_veto_threshold": (None, _NOTHING),
}
_DTYPES = (f"{_FSDP}.dtype", f"{_ROLLOUT}.dtype")


@rule(_PARITY, f"{_ROLLOUT}.name", "trainer.device", *_DTYPES, *_EXACT)
def log_probs_can_be_the_same(config: PPOConfig) -> Findings:
    """Exact parity: the hf engine, a CPU, whole models in one precision, tokens of the model's own distribution."""
    if config.trainer.parity == "off":
        return
    rollout = config.actor_rollout_ref.rollout
    if not rollout.engine.exact:
        yield (_PARITY, f"{_ROLLOUT}.name"), "that engine sums in an order of its own; set name=hf, or parity=off"
    if config.trainer.device == "cuda":
        yield (_PARITY, "trainer.device"), "its kernels are for CPUs; set device=cpu, or parity=off"
    for key, (wanted, why) in _EXACT.items():
        if get_value(config, key) != wanted:
            fix = "null" if wanted is None else wanted
            yield (_PARITY, key), f"{why}; set {key.rpartition('.')[2]}={fix}, or parity=off"
    dtypes = {resolve_dtype(str(get_value(config, key)), "cpu") for key in _DTYPES}
    if dtypes not in ({"float32"}, {"bfloat16"}):
        yield (_PARITY, *_DTYPES), "both must have one precision: set both to float32 or bfloat16, or parity=off"
    if changed := [f"{_ROLLOUT}.{each.partition('=')[0]}" for each in distortions(rollout)]:
        why = "the sampler's log-probs are those of the changed distribution"
        yield (_PARITY, *changed), f"{why}; leave the others at their defaults, or set parity=off"


_VAL = "actor_rollout_ref.rollout.val_kwargs"
_LENGTHS = ("actor_rollout_ref.rollout.min_tokens", "actor_rollout_ref.rollout.response_length")


@rule(f"{_VAL}.min_tokens", "max_tokens", _LENGTHS[1], reads=_LENGTHS[:1])
def lengths_of_a_validation(config: PPOConfig) -> Findings:
    """In a validation min_tokens <= max_tokens <= response_length holds."""
    rollout, val = config.actor_rollout_ref.rollout, config.actor_rollout_ref.rollout.val_kwargs
    longest = val.max_tokens or rollout.response_length
    least = rollout.min_tokens if val.min_tokens is None else val.min_tokens
    if not least <= longest <= rollout.response_length:
        inherited = _LENGTHS[:1] if val.min_tokens is None and least else ()
        names = (f"{_VAL}.min_tokens", *inherited, "max_tokens", _LENGTHS[1])
        return names, "each must be the next one's value at most (null: the training's)"


@rule(f"{_VAL}.do_sample", "temperature")
def temperature_of_a_validation(config: PPOConfig) -> Findings:
    """Sampling needs a temperature."""
    val = config.actor_rollout_ref.rollout.val_kwargs
    if val.do_sample and val.temperature == 0:
        return f"sampling needs a temperature; set {_VAL}.temperature above 0 or do_sample=false"


@rule(f"{_VAL}.n", "do_sample", kind="risky")
def responses_of_a_validation_differ(config: PPOConfig) -> Findings:
    """Several responses to a validation prompt are sampled, not greedy."""
    val = config.actor_rollout_ref.rollout.val_kwargs
    if not val.do_sample and val.n != 1:
        return (
            f"all responses to a validation prompt will be equal; set {_VAL}.do_sample=true and a temperature, or n=1"
        )
