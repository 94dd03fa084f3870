"""Checks of `algorithm.rollout_correction` against the rest of the configuration."""

from collections.abc import Iterator

from verl_like.config import batch_plan
from verl_like.config.correction import corrects
from verl_like.config.idle import Idle, idle_while
from verl_like.config.ppo import PPOConfig
from verl_like.config.rollout import distortions

_SECTION = "algorithm.rollout_correction"
_ROLLOUT = "actor_rollout_ref.rollout"


def two_policies(config: PPOConfig) -> bool:
    """Whether the loss compares with the sampler's policy (bypass mode)."""
    return batch_plan.two_policies(config.actor_rollout_ref.actor, config.algorithm.rollout_correction)


def is_reinforce(config: PPOConfig) -> bool:
    """Whether the policy loss is bypass mode's -log-prob x advantage."""
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
    engine = {"fp8": "vllm", "int8": "hf"}[kind]
    if rollout.name not in (engine, "recorded"):
        why = "SGLang takes no weights after it has quantised its own; " if rollout.name == "sglang" else ""
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
    if algorithm.adv_estimator != "remax":
        return
    norm, agent = algorithm.reward_norm, algorithm.agent_reward_norm
    by_statistic = (norm.mean, norm.std, norm.kind) != (None, None, None) or agent.method != "identity"
    if algorithm.reward_scaling.enable or by_statistic:
        yield (
            "algorithm.adv_estimator=remax with normalised rewards: the greedy response's reward is not normalised, so "
            "it is a poor baseline; leave reward_norm, reward_scaling and agent_reward_norm out"
        )
    if not rollout.do_sample:
        yield (
            f"algorithm.adv_estimator=remax with {_ROLLOUT}.do_sample=False: the response is the greedy one, and every "
            f"advantage 0; set {_ROLLOUT}.do_sample=true"
        )


CORRECTION_IDLE: tuple[Idle, ...] = (
    idle_while(
        f"{_SECTION}.rollout_is",
        "not set",
        f"{_SECTION}.rollout_is_threshold",
        f"{_SECTION}.rollout_is_batch_normalize",
    ),
    idle_while(f"{_SECTION}.rollout_rs", "not set", f"{_SECTION}.rollout_rs_threshold"),
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
