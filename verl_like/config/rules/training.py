"""Rules of the models that are trained: checkpoints, micro-batches, sharding, LoRA, the reference, preferences."""

from verl_like.config.actor import ReplayMode
from verl_like.config.batch_plan import two_policies
from verl_like.config.mesh import tokens_apart, tokens_together
from verl_like.config.micro_batches import Cut, cuts
from verl_like.config.optim import OptimizerName
from verl_like.config.ppo import PPOConfig
from verl_like.config.roles import compares_in_driver, every_role, needs_reference, roles_of
from verl_like.config.rollout import NEUTRAL, distortions
from verl_like.config.rule import Findings, idle, rule
from verl_like.config.schema import get_value

_ACTOR, _REF, _P = "actor_rollout_ref.actor", "actor_rollout_ref.ref", "preference"
_MERGE, _BYPASS = "actor_rollout_ref.model.lora.merge", "algorithm.rollout_correction.bypass_mode"
_PACKED, _SAMPLING = "use_remove_padding", tuple(f"actor_rollout_ref.rollout.{name}" for name in NEUTRAL)
_MANY_TOKENS = 2**20  # no process holds the activations of so many
_CHECKPOINTS = (
    *(f"{_ACTOR}.checkpoint.load_contents", f"{_ACTOR}.checkpoint.save_contents"),
    *("critic.checkpoint.load_contents", "critic.checkpoint.save_contents"),
)
_ROLES = tuple(every_role(PPOConfig()).values())
_CUTS = tuple(cut for passes in cuts(PPOConfig()).values() for cut in passes.values())


@rule(*_CHECKPOINTS, reads=("trainer.resume_mode", "trainer.save_freq"))
def checkpoints_hold_what_is_loaded(config: PPOConfig) -> Findings:
    """A resume loads what was saved."""
    resumes = config.trainer.resume_mode == "auto" and (config.trainer.save_freq or -1) > 0
    for names in (_CHECKPOINTS[:2], _CHECKPOINTS[2:]) if resumes else ():
        if missing := sorted(set(get_value(config, names[0])) - set(get_value(config, names[1])) - {"hf_model"}):
            yield names, f"it asks for {missing}, which is not saved: a resume would fail; set them equal"


@rule(f"{_ACTOR}.checkpoint.save_contents", kind="risky", reads=("trainer.save_freq",))
def checkpoints_hold_the_model(config: PPOConfig) -> Findings:
    """A run is resumed from a checkpoint with the model."""
    if (config.trainer.save_freq or -1) > 0 and "model" not in config.actor_rollout_ref.actor.checkpoint.save_contents:
        return "it leaves out model: a run cannot be resumed from such checkpoints"


@rule(
    *dict.fromkeys(key for role in _ROLES for key in (role.tensor_key, role.ulysses_key, role.context_key)),
    *dict.fromkeys(f"{role.model_section}.{_PACKED}" for role in _ROLES),
)
def tensor_parallel_role(config: PPOConfig) -> Findings:
    """Tensor parallelism of a role works on packed tokens, and excludes Ulysses and context parallelism."""
    for role in (role for role in roles_of(config).values() if role.tensor > 1):
        if role.ulysses > 1:
            yield (role.tensor_key, role.ulysses_key), "a role has one of the two; set one to 1"
        if role.context > 1:
            yield (role.tensor_key, role.context_key), "a role has one of the two; set one to 1"
        if not role.model.use_remove_padding:
            yield (role.tensor_key, f"{role.model_section}.{_PACKED}"), "it works on packed tokens; set it to True"


_ROUTES = (f"{_ACTOR}.router_replay.mode", "actor_rollout_ref.rollout.enable_rollout_routing_replay")
_COMPARED = (f"{_ACTOR}.kl_loss_type", "algorithm.kl_penalty", "distillation.distillation_loss.loss_mode")
_OFFLOAD = "enable_activation_offload"


@rule(
    *(role.pipe_key for role in _ROLES),
    *(key for role in _ROLES for key in (role.tensor_key, f"{role.sharding_section}.pipeline_schedule")),
    *dict.fromkeys(f"{role.model_section}.{_OFFLOAD}" for role in _ROLES if role.optim),
    *(f"{section}.use_torch_compile" for section in (_ACTOR, _REF)),
    *_ROUTES,
    *_COMPARED,
)
def pipeline_parallel_role(config: PPOConfig) -> Findings:
    """Stages of a role exclude routes, exact divergences, compiled layers, and late gradients of split ones."""
    policy, with_stages = config.actor_rollout_ref, [r for r in roles_of(config).values() if r.mesh(1).pipe > 1]
    for role in with_stages:
        if role.tensor > 1 and role.fsdp.pipeline_schedule == "zero_bubble":
            key = f"{role.sharding_section}.pipeline_schedule"
            yield (key, role.tensor_key), "split layers have no weights' passes; use 1f1b"
        if role.optim is not None and role.model.enable_activation_offload:
            yield (role.pipe_key, f"{role.model_section}.{_OFFLOAD}"), "not available with stages; leave one out"
        if role.compile_blocks:
            yield (role.pipe_key, f"{role.section}.use_torch_compile"), "not available with stages; set it to False"
    of_policy = [role.pipe_key for role in with_stages if role.kind == "policy"][:1]
    kinds = (policy.actor.use_kl_loss and policy.actor.kl_loss_type == "full", compares_in_driver(config))
    for used, key in zip((*kinds, config.distillation.compares), _COMPARED, strict=True):
        if of_policy and used:
            yield (of_policy[0], key), "it compares whole heads, of which a stage has none; use another estimator"
    replays = (policy.actor.router_replay.mode != ReplayMode.disabled, policy.rollout.enable_rollout_routing_replay)
    for used, key in zip(replays, _ROUTES, strict=True):
        if of_policy and used:
            yield (of_policy[0], key), "routes are those of all layers; leave one out"


_TRAINED = [role for role in _ROLES if role.optim is not None]


@rule(
    *(f"{role.section}.optim.optimizer" for role in _TRAINED),
    *(role.tensor_key for role in _TRAINED),
    *(f"{role.model_section}.lora_rank" for role in _TRAINED),
    *(f"{role.sharding_section}.model_dtype" for role in _TRAINED),
)
def muon_steps_whole_matrices(config: PPOConfig) -> Findings:
    """Muon orthogonalises whole matrices of a model that is trained in full, in float32."""
    for role in roles_of(config).values():
        if role.optim is None or role.optim.optimizer != OptimizerName.muon:
            continue
        key = f"{role.section}.optim.optimizer"
        if role.tensor > 1:
            yield (key, role.tensor_key), "parts of split matrices are not joined for it; use adamw or set one to 1"
        if role.model.lora_rank > 0:
            why = "the two factors of an adapter are no matrices of the model; use adamw or set lora_rank=0"
            yield (key, f"{role.model_section}.lora_rank"), why
        if role.fsdp.model_dtype != "float32":
            why = "small steps would be lost to rounding; use adamw_bf16 or set it to float32"
            yield (key, f"{role.sharding_section}.model_dtype"), why


_ROUTER = f"{_ACTOR}.router"
_OF_ROUTERS = tuple(f"{_ROUTER}.{name}" for name in ("balance_loss_coef", "z_loss_coef", "bias_update_rate"))
_WHOLE = (1, "scores are those of whole sequences; set it to 1")
_UNFIT = {
    f"{_ACTOR}.ulysses_sequence_parallel_size": _WHOLE,
    f"{_ACTOR}.fsdp_config.context_parallel_size": _WHOLE,
    f"{_ACTOR}.fsdp_config.pipeline_parallel_size": (1, "losses are those of all layers; set it to 1"),
    f"actor_rollout_ref.model.{_PACKED}": (True, "padding is routed as well; set it to True"),
    f"{_ACTOR}.use_torch_compile": (False, "scores are noted inside of layers; set it to False"),
}


@rule(*_OF_ROUTERS, *_UNFIT, "actor_rollout_ref.model.lora_rank")
def routers_are_watched(config: PPOConfig) -> Findings:
    """Routers' losses and biases need the scores and loads of packed, whole sequences."""
    for key in _OF_ROUTERS:
        if get_value(config, key) > 0:
            for other, (wanted, why) in _UNFIT.items():
                if get_value(config, other) != wanted:
                    yield (key, other), why
    if config.actor_rollout_ref.actor.router.bias_update_rate > 0 and config.actor_rollout_ref.model.lora_rank > 0:
        yield (_OF_ROUTERS[2], "actor_rollout_ref.model.lora_rank"), "adapters leave the base as it is; set one to 0"


_REPLAY, _RECORDS = f"{_ACTOR}.router_replay.mode", "actor_rollout_ref.rollout.enable_rollout_routing_replay"
_COMPILES = f"{_ACTOR}.use_torch_compile"


@rule(_REPLAY, _RECORDS, f"{_ACTOR}.old_log_probs", _BYPASS, _COMPILES, "trainer.objective")
def routes_are_there_to_replay(config: PPOConfig) -> Findings:
    """Routes that are replayed were noted: by the pass of old log-probs (R2), or by the rollout engine (R3)."""
    actor, correction = config.actor_rollout_ref.actor, config.algorithm.rollout_correction
    mode, records = actor.router_replay.mode, config.actor_rollout_ref.rollout.enable_rollout_routing_replay
    if mode == ReplayMode.R3 and not records:
        yield (_REPLAY, _RECORDS), "it replays the rollout engine's routes, which are not recorded; set it to True"
    if mode == ReplayMode.R2 and two_policies(actor, correction):
        key = _BYPASS if correction.bypass_mode else f"{_ACTOR}.old_log_probs"
        yield (_REPLAY, key), "no pass of the trainer's comes before the update; use R3, or leave the other out"
    for key in [_REPLAY] * (mode != ReplayMode.disabled) + [_RECORDS] * records:
        if actor.use_torch_compile:
            yield (key, _COMPILES), "choices are exchanged inside of layers; set use_torch_compile=False"
    if mode != ReplayMode.disabled and config.trainer.objective != "rl":
        yield (_REPLAY, "trainer.objective"), "answers of the data have no routes; leave it out"


idle(
    _RECORDS,
    when=lambda c: c.actor_rollout_ref.actor.router_replay.mode == ReplayMode.R2,
    why=f"{_REPLAY} is R2, which replays routes of the trainer's own",
)


@rule("actor_rollout_ref.model.lora_rank", _MERGE, "actor_rollout_ref.rollout.name")
def adapters_apart(config: PPOConfig) -> Findings:
    """The engine keeps adapters of that rank apart, or they are merged."""
    rollout, rank = config.actor_rollout_ref.rollout, config.actor_rollout_ref.model.lora_rank
    most = rollout.engine.adapter_rank
    if most is not None and rank > most and not config.actor_rollout_ref.model.lora.merge:
        keeps = f"keeps adapters up to rank {most}" if most else "is sent whole weights"
        return f"{rollout.name} {keeps}; set model.lora.merge=True{'' if most else ', or rollout.name=vllm'}"


@rule(f"{_ACTOR}.old_log_probs", _BYPASS, kind="risky", reads=_SAMPLING)
def ratios_begin_at_one(config: PPOConfig) -> Findings:
    """Old log-probs of the sampler are those of the model's own distribution."""
    correction, changed = config.algorithm.rollout_correction, distortions(config.actor_rollout_ref.rollout)
    bypass = "leave bypass_mode and old_log_probs out"
    key, fix = (
        (_BYPASS, bypass) if correction.bypass_mode else (f"{_ACTOR}.old_log_probs", "set old_log_probs=recompute")
    )
    if changed and two_policies(config.actor_rollout_ref.actor, correction):
        why = "the sampler's log-probs are those of the changed distribution, the trainer's of the model's own"
        names = (key, *(f"actor_rollout_ref.rollout.{each.partition('=')[0]}" for each in changed))
        return names, f"{why}: ratios are not 1 before the first update; leave the others at their defaults, or {fix}"


@rule(*dict.fromkeys(cut.budget_key for cut in _CUTS), kind="risky")
def budgets_fit_sequences(config: PPOConfig) -> Findings:
    """A token budget holds a sequence of full length, and not more than there will ever be."""
    longest = config.data.max_prompt_length + config.data.max_response_length
    whole = config.data.train_batch_size * config.actor_rollout_ref.rollout.n * longest
    for key, cut in {cut.budget_key: cut for cut in _used(config) if cut.by_tokens}.items():
        if key.endswith(".ppo_max_token_len_per_gpu") and tokens_together(cut.budget, cut.slices) < longest:
            less = f"it is below data.max_prompt_length + data.max_response_length = {longest}"
            why = "a longer sequence makes a micro-batch of its own and takes more memory than planned"
            yield (key,), f"{less}: {why}; set it to {tokens_apart(longest, cut.slices)} or more"
        elif cut.budget > max(whole, _MANY_TOKENS):
            why = f"it is more than a whole rollout batch can hold ({whole} tokens)"
            yield (key,), f"{why}: nothing is cut, and memory is not bounded; set it to what fits one process"


def _used(config: PPOConfig) -> list[Cut]:
    return [cut for role in roles_of(config).values() for cut in role.passes.values()]


@rule(*dict.fromkeys(key for cut in _CUTS for key in (cut.budget_key, cut.per_gpu_key, cut.total_key)), kind="idle")
def sizes_that_cut_no_pass(config: PPOConfig) -> Findings:
    """other settings cut the passes of this run (missing roles have rows of their own)"""
    used = _used(config)
    deciding = {cut.deciding_key for cut in used}
    reasons = {key: why for cut in used for key, why in cut.idle_keys.items() if key not in deciding}
    yield from (((key,), why) for key, why in reasons.items())


idle(
    f"{_REF}.",
    when=lambda c: not needs_reference(c),
    why=f"no KL term needs a reference ({_ACTOR}.use_kl_loss and algorithm.use_kl_in_reward are false)",
)
idle(
    *(f"{_REF}.fsdp_config.", f"{_REF}.use_torch_compile"),
    when=lambda c: needs_reference(c) and c.actor_rollout_ref.model.lora_rank > 0,
    why="with LoRA the reference is the actor's own base model (actor_rollout_ref.model.lora_rank)",
)
idle("critic.model.lora.merge", when=lambda c: True, why="a critic's weights are not sent to a rollout engine")
idle("critic.model.custom_chat_template", when=lambda c: True, why="the critic sees the policy's tokens")
idle(
    *("trainer.profile_tool", "actor_rollout_ref.actor.profiler.", "actor_rollout_ref.ref.profiler."),
    *("critic.profiler.", "reward_model.profiler."),
    when="trainer.profile_steps is empty: it names no step",
)


def _acts_with(*losses: str, keys: tuple[str, ...]) -> None:
    """Register keys that act with these losses alone."""
    idle(*keys, when=lambda c: c.preference.loss not in losses, why=f"preference.loss is none of {', '.join(losses)}")


_acts_with("dpo", "simpo", keys=(f"{_P}.label_smoothing",))
_acts_with("dpo", "simpo", "reward", keys=(f"{_P}.margin", f"{_P}.margin_key"))
_acts_with("dpo", "ipo", "orpo", "simpo", keys=(f"{_P}.sft_loss_coef", f"{_P}.sft_prompt"))
_acts_with("dpo", "ipo", "kto", keys=(f"{_P}.reference_free", f"{_P}.reference_cache"))
idle(
    f"{_P}.sft_prompt",
    when=lambda c: not c.preference.sft_loss_coef and (c.preference.loss != "orpo" or c.preference.sft_loss_coef == 0),
    why="preference.sft_loss_coef is 0: no answer is imitated",
)
idle(f"{_P}.reference_cache", when="preference.reference_free is true")
idle(
    *(f"{_ACTOR}.{name}" for name in ("use_kl_loss", "kl_loss_coef", "entropy_coeff", "policy_loss.", "sft_loss_coef")),
    when="trainer.objective is not rl: it has a loss of its own",
)
idle(f"{_ACTOR}.loss_agg_mode", when="trainer.objective is preference: its losses are means over pairs")
idle(
    *("sft.response_key", "sft.prompt_dict_keys", "sft.response_dict_keys", "sft.mask_key", "data.messages_key"),
    when="trainer.objective is preference: its answers are in columns of their own",
)
idle(
    *("data.train_files", "data.train_max_samples", "data.domain_weights", f"{_P}.completion_key", f"{_P}.label_key"),
    when="preference.rollouts is not empty",
)


@rule(f"{_ACTOR}.ppo_mini_batch_size", "ppo_epochs", "data.train_batch_size", reads=("trainer.objective",))
def one_update_for_a_batch_of_preferences(config: PPOConfig) -> Findings:
    """Factors of the rows' gradients hold for the weights that they were computed with, so for one update."""
    actor = config.actor_rollout_ref.actor
    whole = actor.ppo_mini_batch_size == config.data.train_batch_size and actor.ppo_epochs == 1
    if config.trainer.objective == "preference" and not whole:
        return "a batch of preferences is one update: leave the first two out, and set data.train_batch_size"
