"""Checks of `trainer.mode` against the rest of the configuration."""

from collections.abc import Iterator

from verl_like.config.batch_plan import two_policies
from verl_like.config.correction import corrects
from verl_like.config.doctor_rewards import scored_together
from verl_like.config.placement import samples_alone
from verl_like.config.ppo import PPOConfig

_ROLLOUT = "actor_rollout_ref.rollout"


def uncorrected(config: PPOConfig) -> bool:
    """Return True where responses of older policies would be trained as if the present one had sampled them."""
    correction = config.algorithm.rollout_correction
    corrected = corrects(correction) or two_policies(config.actor_rollout_ref.actor, correction)
    return config.asynchronous and not corrected


def impossible_async(config: PPOConfig) -> Iterator[str]:
    """Settings that cannot work with groups that live through several versions: keys, values, fix."""
    mode, rollout = f"trainer.mode={config.trainer.mode}", config.actor_rollout_ref.rollout
    if not config.asynchronous:
        return
    if config.trainer.mode == "separate_async" and not samples_alone(config):
        yield (
            f"{mode}: the rollout engine needs processes of its own; set actor_rollout_ref.hybrid_engine=false with "
            f"{_ROLLOUT}.nnodes=1 {_ROLLOUT}.n_gpus_per_node=<processes>, or use trainer.mode=colocate_async"
        )
    if config.trainer.mode == "colocate_async" and samples_alone(config):
        yield (
            f"{mode} with a pool of the rollout engine's own: it would be idle while the actor trains; set "
            "trainer.mode=separate_async"
        )
    if uncorrected(config):
        yield (
            f"{mode} without a correction (algorithm.rollout_correction.rollout_is=null): responses are up to "
            f"async_training.max_staleness={config.async_training.max_staleness} versions older than the policy they "
            "train; leave rollout_is out (token: truncated importance weights, one more forward pass), or set "
            "algorithm.rollout_correction.bypass_mode=true (the clipped ratio is taken to the sampler, no further pass)"
        )
    if rollout.scheduler.additional_prompts.enable:
        yield (
            f"{mode} with {_ROLLOUT}.scheduler.additional_prompts.enable=True: async_training.over_sample_rate says "
            "how many groups are under way; leave additional_prompts out"
        )
    if rollout.skip_rollout or rollout.engine.recorded:
        yield (
            f"{mode} with recorded steps ({_ROLLOUT}.skip_rollout, name=recorded): their responses are of another "
            "run's weights; set trainer.mode=sync"
        )
    rules = config.algorithm.filter_groups
    if rules.enable and rules.resample and (together := scored_together(config)):
        yield (
            f"{mode} with algorithm.filter_groups.enable=True: groups are judged as they end, but {together} gives "
            "scores to whole batches; disable one of them, or set trainer.mode=sync"
        )
    if config.trainer.full_determinism:
        yield (
            f"{mode} with trainer.full_determinism=True: which groups a step trains depends on time; set trainer.mode="
            "sync"
        )
