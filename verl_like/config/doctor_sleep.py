"""Checks of `rollout.sleep_level` against the rest of the configuration."""

from verl_like.config.placement import is_apart, samples_alone
from verl_like.config.ppo import PPOConfig
from verl_like.config.roles import ROLLOUT

_ROLLOUT = "actor_rollout_ref.rollout"


def impossible_sleep(config: PPOConfig) -> list[str]:
    """rollout.sleep_level=2: who brings the weights back must have all of them, in the same processes."""
    policy, key = config.actor_rollout_ref, f"{_ROLLOUT}.sleep_level=2"
    if policy.rollout.sleep_level == 1:
        return []
    problems, otherwise = [], f", or {_ROLLOUT}.sleep_level=1"
    if not policy.rollout.free_cache_engine:
        problems.append(
            f"{key} with {_ROLLOUT}.free_cache_engine=False: the engine does not sleep; set it to True{otherwise}"
        )
    if policy.rollout.quantization is not None:
        problems.append(
            f"{key} with {_ROLLOUT}.quantization={policy.rollout.quantization}: what the engine has quantised stays "
            f"where it is; set quantization=null{otherwise}"
        )
    if policy.model.lora_rank > 0 and not policy.model.lora.merge:
        problems.append(
            f"{key} with actor_rollout_ref.model.lora.merge=False: a sync brings adapters alone; set it to True"
            f"{otherwise}"
        )
    if is_apart(config, ROLLOUT) and not samples_alone(config):
        problems.append(
            f"{key} with the rollout engine beside other models than the actor (trainer.placement): nobody there has "
            f"the weights; give the engine a pool of its own{otherwise}"
        )
    return problems
