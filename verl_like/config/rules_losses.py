"""The doctor's checks of the policy's update: keys that the chosen estimator or loss does not read, terms that cannot
work together, and what corrects for the sampler (algorithm.rollout_correction)."""

from collections.abc import Callable, Iterator, Mapping

from verl_like.config import batch_plan
from verl_like.config.actor import ActorConfig
from verl_like.config.batch_plan import takes_own_log_probs
from verl_like.config.correction import corrects
from verl_like.config.engines import ENGINES
from verl_like.config.menus import ESTIMATORS, KL_KINDS, LOSSES, Choice, Loss, readers
from verl_like.config.ppo import PPOConfig
from verl_like.config.roles import needs_critic
from verl_like.config.rollout import distortions
from verl_like.config.schema import Idle

_ACTOR = "actor_rollout_ref.actor"
_SECTION = "algorithm.rollout_correction"
_ROLLOUT = "actor_rollout_ref.rollout"


def two_policies(config: PPOConfig) -> bool:
    """Return True where the loss compares with the sampler's policy (bypass mode)."""
    return batch_plan.two_policies(config.actor_rollout_ref.actor, config.algorithm.rollout_correction)


def is_reinforce(config: PPOConfig) -> bool:
    """Return True where the policy loss is bypass mode's -log-prob x advantage."""
    return two_policies(config) and config.algorithm.rollout_correction.loss_type == "reinforce"


def weights_idle(config: PPOConfig) -> bool:
    """With two policies the ratio of the PPO loss is the correction: further weights would count it twice."""
    return two_policies(config) and not is_reinforce(config)


def impossible_quantization(config: PPOConfig) -> Iterator[str]:
    """rollout.quantization: the engine that has it, and the correction that it needs."""
    rollout, kind = config.actor_rollout_ref.rollout, config.actor_rollout_ref.rollout.quantization
    if kind is None:
        return
    key = f"{_ROLLOUT}.quantization={kind}"
    engine = next(name for name, row in ENGINES.items() if kind in row.quantisations)
    if rollout.name != engine and not rollout.engine.recorded:
        why = rollout.engine.unquantised
        yield f"{key} with {_ROLLOUT}.name={rollout.name}: {why}set name={engine}, or quantization=null"
    if config.actor_rollout_ref.model.lora_rank and not config.actor_rollout_ref.model.lora.merge:
        yield f"{key} with actor_rollout_ref.model.lora.merge=False: set it to True"
    if config.algorithm.rollout_correction.rollout_is is None and not two_policies(config):
        yield (
            f"{key} without {_SECTION}.rollout_is: responses are sampled from other probabilities than the trainer's, "
            f"which truncated importance weights put right; set {_SECTION}.rollout_is=token"
        )


def risky_correction(config: PPOConfig) -> Iterator[str]:
    """Settings that work but are probably not meant."""
    rollout = config.actor_rollout_ref.rollout
    changed = distortions(rollout)
    if not changed:
        return
    corrected = corrects(config.algorithm.rollout_correction)
    cause = (
        f"with {_ROLLOUT}.{', '.join(changed)}: the sampler's log-probs are those of the changed distribution, the "
        "trainer's of the model's own, which is the one that is trained: "
    )
    fix = "leave them at their defaults (top_p=1, top_k=-1, penalties off)"
    yield (
        f"training/rollout_probs_diff_* and rollout_corr/* {cause}they show the change (a mean of 0.02 is usual) even "
        f"if the two engines agree to 1e-5, and cannot warn when they do not; {fix}, or judge the engines by "
        "weight_sync/probe_gap"
    )
    penalties = [each for each in changed if "_penalty" in each]
    if penalties and not two_policies(config):
        yield (
            f"{_ROLLOUT}.{', '.join(penalties)}: the ratio of the loss knows no penalty (old log-probs are the model's "
            "own), so tokens that a penalty made rarer or likelier are trained as if the model had chosen them; "
            + ("the correction's weights put that right" if corrected else f"{_SECTION}.rollout_is=token weighs it")
        )
    if rollout.use_fire_sampling and not corrected and not two_policies(config):
        yield (
            f"{_ROLLOUT}.use_fire_sampling=True: the ratio of the loss takes the first token of each response, drawn "
            f"at a high temperature, for the model's own choice, as verl does; {_SECTION}.rollout_is=token weighs it"
        )
    if corrected and len(penalties) + rollout.use_fire_sampling < len(changed):
        yield f"{_SECTION} {cause}of a cut distribution every weight is below 1; {fix}"


def risky_baseline(config: PPOConfig) -> Iterator[str]:
    """remax compares rewards with that of the greedy response, which enters no statistic of the batch."""
    algorithm, rollout = config.algorithm, config.actor_rollout_ref.rollout
    if not algorithm.estimator.greedy:
        return
    key = f"algorithm.adv_estimator={algorithm.adv_estimator}"
    norm, agent = algorithm.reward_norm, algorithm.agent_reward_norm
    by_statistic = (norm.mean, norm.std, norm.kind) != (None, None, None) or agent.method != "identity"
    if algorithm.reward_scaling.enable or by_statistic:
        yield (
            f"{key} with normalised rewards: the greedy response's reward is not normalised, so "
            "it is a poor baseline; leave reward_norm, reward_scaling and agent_reward_norm out"
        )
    if not rollout.do_sample:
        yield (
            f"{key} with {_ROLLOUT}.do_sample=False: the response is the greedy one, and every "
            f"advantage 0; set {_ROLLOUT}.do_sample=true"
        )


def impossible_losses(actor: ActorConfig) -> Iterator[str]:
    """Combinations that cannot work: keys, values, fix."""
    unbiased = [name for name, kind in KL_KINDS.items() if kind.unbiased]
    if actor.use_kl_loss and actor.use_unbiased_kl and actor.kl_loss_type not in unbiased:
        yield (
            f"{_ACTOR}.use_unbiased_kl=True with {_ACTOR}.kl_loss_type={actor.kl_loss_type}: a ratio corrects an "
            f"estimate that is unbiased on the policy's own samples; use one of {', '.join(unbiased)}"
        )
    if actor.rl_loss_coef == 0 and actor.sft_loss_coef == 0 and actor.entropy_coeff == 0:
        yield (
            f"{_ACTOR}.rl_loss_coef=0 with {_ACTOR}.sft_loss_coef=0: nothing would be trained; set one of them above 0"
        )


def two_decays(config: PPOConfig) -> list[str]:
    """Roles whose weights are pulled to 0 in two ways."""
    roles = [(_ACTOR, config.actor_rollout_ref.actor.optim)]
    if needs_critic(config.critic, config.algorithm):
        roles.append(("critic", config.critic.optim))
    return [
        f"{section}.optim.l2_coeff={optim.l2_coeff} with {section}.optim.weight_decay={optim.weight_decay}: weights "
        "are pulled to 0 twice, by the gradient and by AdamW; set one of them to 0"
        for section, optim in roles
        if optim.l2_coeff > 0 and optim.weight_decay > 0
    ]


def uncorrected_updates(config: PPOConfig) -> list[str]:
    """Several updates by a loss without a ratio: only the first is on the policy that sampled."""
    actor, batch = config.actor_rollout_ref.actor, config.data.train_batch_size
    several = actor.ppo_epochs > 1 or actor.ppo_mini_batch_size < batch
    weighted = is_reinforce(config) and config.algorithm.rollout_correction.rollout_is is not None
    loss = _loss(config)
    if not loss.without_ratio or not several or weighted:
        return []
    return [
        f"{_ACTOR}.ppo_mini_batch_size={actor.ppo_mini_batch_size}, ppo_epochs={actor.ppo_epochs} with a policy loss "
        f"without a ratio ({loss.name}): updates after the first are off-policy, and nothing corrects or bounds "
        f"them; set {_ACTOR}.ppo_mini_batch_size={batch} and ppo_epochs=1, or another policy_loss.loss_mode"
    ]


def aimless_kl(config: PPOConfig) -> list[str]:
    """k1 as a loss: the gradient of d = log_prob - ref is that of log_prob, whose mean over samples is 0."""
    actor = config.actor_rollout_ref.actor
    kind = KL_KINDS.get(actor.kl_loss_type)
    if not actor.use_kl_loss or actor.use_unbiased_kl or kind is None or not kind.aimless:
        return []
    return [
        f"{_ACTOR}.kl_loss_type={actor.kl_loss_type} as a loss has a gradient of mean 0: it pulls nowhere; "
        f"set {_ACTOR}.kl_loss_type=kl+, mse or low_var_kl, or {_ACTOR}.use_unbiased_kl=true"
    ]


def _actor(config: PPOConfig) -> ActorConfig:
    return config.actor_rollout_ref.actor


def _loss(config: PPOConfig) -> Loss:
    return LOSSES["policy_gradient"] if is_reinforce(config) else _actor(config).policy_loss.loss


def _unread(
    menu: Mapping[str, Choice], section: str, key: str, chosen: Callable[[PPOConfig], Choice]
) -> Iterator[Idle]:
    """Rows of the keys that only some choices of a menu read."""

    def idle(knob: str, names: tuple[str, ...]) -> Idle:
        why = f"{key} does not read it (read by {', '.join(names)})"
        return Idle((f"{section}.{knob}",), lambda c: (row := chosen(c)).name in menu and row.name not in names, why)

    return (idle(knob, names) for knob, names in readers(menu).items())


def _at_ratio_one(key: str) -> Idle:
    """A knob that acts on ratios other than 1, in a run that has none."""
    why = (
        "with one update per rollout batch the old log-probs are the update's own: all ratios are 1 "
        f"(smaller {_ACTOR}.ppo_mini_batch_size, more ppo_epochs, or old_log_probs=recompute change that)"
    )
    return Idle((f"{_ACTOR}.{key}",), lambda c: takes_own_log_probs(c) and key in _loss(c).of_ratio, why)


def _has_side_terms(actor: ActorConfig) -> bool:
    return actor.entropy_coeff != 0 or actor.use_kl_loss or actor.sft_loss_coef != 0


LOSS_IDLE: tuple[Idle, ...] = (
    *_unread(ESTIMATORS, "algorithm", "algorithm.adv_estimator", lambda c: c.algorithm.estimator),
    Idle(
        ("algorithm.whiten_advantages",),
        lambda c: c.algorithm.estimator.whitens,
        "algorithm.adv_estimator whitens its advantages anyway",
    ),
    *_unread(LOSSES, _ACTOR, f"{_ACTOR}.policy_loss.loss_mode", _loss),
    *(_at_ratio_one(key) for key in dict.fromkeys(key for loss in LOSSES.values() for key in loss.of_ratio)),
    Idle(
        (f"{_ACTOR}.clip_ratio",),
        lambda c: "clip_ratio" in _loss(c).reads and None not in (_actor(c).clip_ratio_low, _actor(c).clip_ratio_high),
        "clip_ratio_low and clip_ratio_high are both set",
    ),
    Idle(
        (f"{_ACTOR}.loss_agg_mode",),
        lambda c: _loss(c).aggregation is not None and not _has_side_terms(_actor(c)),
        f"{_ACTOR}.policy_loss.loss_mode prescribes its aggregation, and there is no entropy, KL or sft term",
    ),
    Idle(
        (f"{_ACTOR}.ratio_skip_threshold",),
        lambda c: takes_own_log_probs(c) and _actor(c).ratio_skip_threshold is not None,
        "with one update per rollout batch the old log-probs are the update's own: all ratios are 1",
    ),
    Idle(
        (f"{_ACTOR}.sample_weight.scope",),
        lambda c: not (_actor(c).sample_weight.difficulty or _actor(c).sample_weight.length),
        f"{_ACTOR}.sample_weight.difficulty and .length are false",
    ),
)


CORRECTION_IDLE: tuple[Idle, ...] = (
    Idle(
        (f"{_SECTION}.rollout_is", f"{_SECTION}.rollout_is_threshold", f"{_SECTION}.rollout_is_batch_normalize"),
        lambda c: weights_idle(c) and c.algorithm.rollout_correction.rollout_is is not None,
        f"the loss's own ratio is trainer / sampler ({_SECTION}.bypass_mode or actor.old_log_probs=rollout, with "
        "loss_type=ppo_clip)",
    ),
    Idle((f"{_SECTION}.loss_type",), lambda c: not two_policies(c), f"{_SECTION}.bypass_mode is false"),
    Idle(
        ("actor_rollout_ref.actor.policy_loss.loss_mode",),
        is_reinforce,
        f"{_SECTION}.loss_type=reinforce sets the loss",
    ),
)
