"""The doctor's checks of the policy's update: which loss reads which knob, and terms that cannot work together."""

from collections.abc import Iterator

from verl_like.config.actor import ActorConfig
from verl_like.config.batch_plan import takes_own_log_probs
from verl_like.config.doctor_correction import is_reinforce
from verl_like.config.enums import LOSS_MODES
from verl_like.config.idle import Idle, idle_while
from verl_like.config.loss_knobs import FIXED_AGGREGATION, IDLE_AT_RATIO_ONE, READ_BY, UNBIASED_KL_KINDS
from verl_like.config.ppo import PPOConfig
from verl_like.config.roles import needs_critic

_ACTOR = "actor_rollout_ref.actor"


def impossible_losses(actor: ActorConfig) -> Iterator[str]:
    """Combinations that cannot work: keys, values, fix."""
    if actor.use_kl_loss and actor.use_unbiased_kl and actor.kl_loss_type not in UNBIASED_KL_KINDS:
        yield (
            f"{_ACTOR}.use_unbiased_kl=True with {_ACTOR}.kl_loss_type={actor.kl_loss_type}: a ratio corrects an "
            f"estimate that is unbiased on the policy's own samples; use one of {', '.join(UNBIASED_KL_KINDS)}"
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
    if _loss(config) not in ("policy_gradient", "gpg") or not several or weighted:
        return []
    return [
        f"{_ACTOR}.ppo_mini_batch_size={actor.ppo_mini_batch_size}, ppo_epochs={actor.ppo_epochs} with a policy loss "
        f"without a ratio ({_loss(config)}): updates after the first are off-policy, and nothing corrects or bounds "
        f"them; set {_ACTOR}.ppo_mini_batch_size={batch} and ppo_epochs=1, or another policy_loss.loss_mode"
    ]


def aimless_kl(config: PPOConfig) -> list[str]:
    """k1 as a loss: the gradient of d = log_prob - ref is that of log_prob, whose mean over samples is 0."""
    actor = config.actor_rollout_ref.actor
    if not actor.use_kl_loss or actor.use_unbiased_kl or actor.kl_loss_type not in ("kl", "k1"):
        return []
    return [
        f"{_ACTOR}.kl_loss_type={actor.kl_loss_type} as a loss has a gradient of mean 0: it pulls nowhere; "
        f"set {_ACTOR}.kl_loss_type=kl+, mse or low_var_kl, or {_ACTOR}.use_unbiased_kl=true"
    ]


def _actor(config: PPOConfig) -> ActorConfig:
    return config.actor_rollout_ref.actor


def _loss(config: PPOConfig) -> str:
    return "policy_gradient" if is_reinforce(config) else _actor(config).policy_loss.loss_mode


def _read_by(key: str, losses: tuple[str, ...]) -> Idle:
    """A knob that only some losses read."""
    why = f"{_ACTOR}.policy_loss.loss_mode does not read it (read by {', '.join(losses)})"
    return Idle((f"{_ACTOR}.{key}",), lambda c: _loss(c) in LOSS_MODES and _loss(c) not in losses, why)


def _at_ratio_one(key: str) -> Idle:
    """A knob that acts on ratios other than 1, in a run that has none."""
    why = (
        "with one update per rollout batch the old log-probs are the update's own: all ratios are 1 "
        f"(smaller {_ACTOR}.ppo_mini_batch_size, more ppo_epochs, or old_log_probs=recompute change that)"
    )
    return Idle((f"{_ACTOR}.{key}",), lambda c: takes_own_log_probs(c) and _loss(c) in READ_BY[key], why)


def _has_side_terms(actor: ActorConfig) -> bool:
    return actor.entropy_coeff != 0 or actor.use_kl_loss or actor.sft_loss_coef != 0


LOSS_IDLE: tuple[Idle, ...] = (
    *(_read_by(key, losses) for key, losses in READ_BY.items()),
    *(_at_ratio_one(key) for key in IDLE_AT_RATIO_ONE),
    Idle(
        (f"{_ACTOR}.clip_ratio",),
        lambda c: (
            _loss(c) in READ_BY["clip_ratio"] and None not in (_actor(c).clip_ratio_low, _actor(c).clip_ratio_high)
        ),
        "clip_ratio_low and clip_ratio_high are both set",
    ),
    Idle(
        (f"{_ACTOR}.loss_agg_mode",),
        lambda c: _loss(c) in FIXED_AGGREGATION and not _has_side_terms(_actor(c)),
        f"{_ACTOR}.policy_loss.loss_mode prescribes its aggregation, and there is no entropy, KL or sft term",
    ),
    Idle(
        (f"{_ACTOR}.ratio_skip_threshold",),
        lambda c: takes_own_log_probs(c) and _actor(c).ratio_skip_threshold is not None,
        "with one update per rollout batch the old log-probs are the update's own: all ratios are 1",
    ),
    idle_while(f"{_ACTOR}.use_kl_loss", "false", f"{_ACTOR}.use_unbiased_kl"),
    idle_while(f"{_ACTOR}.sample_weight.difficulty", "false", f"{_ACTOR}.sample_weight.difficulty_key"),
    Idle(
        (f"{_ACTOR}.sample_weight.scope",),
        lambda c: not (_actor(c).sample_weight.difficulty or _actor(c).sample_weight.length),
        f"{_ACTOR}.sample_weight.difficulty and .length are false",
    ),
)
