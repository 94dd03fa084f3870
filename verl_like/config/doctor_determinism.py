"""Checks of `trainer.full_determinism`: what would make a run depend on time."""

from verl_like.config.doctor_environments import has_turns
from verl_like.config.ppo import PPOConfig

_KEY = "trainer.full_determinism=True"
_ROLLOUT = "actor_rollout_ref.rollout"


def impossible_determinism(config: PPOConfig) -> list[str]:
    """Settings whose results depend on what happens to end first: keys, values, fix."""
    rollout = config.actor_rollout_ref.rollout
    if not config.trainer.full_determinism:
        return []
    problems = []
    if rollout.scheduler.additional_prompts.enable:
        problems.append(
            f"{_KEY} with {_ROLLOUT}.scheduler.additional_prompts.enable=True: which groups are used depends on which "
            "end first; set one of them to False"
        )
    if config.algorithm.filter_groups.enable and rollout.scheduler.mode != "batch":
        problems.append(
            f"{_KEY} with algorithm.filter_groups.enable=True and {_ROLLOUT}.scheduler.mode={rollout.scheduler.mode}: "
            f"when another prompt begins depends on time; set {_ROLLOUT}.scheduler.mode=batch"
        )
    if rollout.n_redundant:
        problems.append(
            f"{_KEY} with {_ROLLOUT}.n_redundant={rollout.n_redundant}: which responses are used depends on which end "
            "first; set it to 0"
        )
    turns = has_turns(config)
    beside = (
        f"{_KEY} with tools, environments, agent loops or programs: what a request is computed beside depends on how "
        "long they"
    )
    if (turns or rollout.scheduler.max_running_requests is not None) and rollout.max_num_seqs != 1:
        problems.append(
            f"{beside} take, and so do its last digits; set {_ROLLOUT}.max_num_seqs=1 (one request at a time; it is "
            f"{rollout.max_num_seqs})"
        )
    if turns and str(rollout.name) != "hf" and rollout.enable_prefix_caching:
        problems.append(f"{beside} take, and so does what the cache holds; set {_ROLLOUT}.enable_prefix_caching=False")
    return problems
