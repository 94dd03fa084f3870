"""Checks of `rollout.outcomes.*` against the rest of the configuration."""

from verl_like.config.doctor_environments import has_turns
from verl_like.config.doctor_rewards import scored_together
from verl_like.config.idle import Idle, idle_while
from verl_like.config.outcomes import OutcomesConfig
from verl_like.config.ppo import PPOConfig

_KEY = "actor_rollout_ref.rollout.outcomes"


def impossible_outcomes(config: PPOConfig) -> list[str]:
    """Combinations that cannot work: keys, values, fix."""
    together = scored_together(config)
    if config.actor_rollout_ref.rollout.outcomes.grader_error != "retry":
        return []
    if config.reward_model.failure_penalty is not None:
        return [
            f"{_KEY}.grader_error=retry with reward_model.failure_penalty={config.reward_model.failure_penalty}: an "
            "answer that cannot be graded either has the penalty, or another one is sampled; leave one of them out"
        ]
    if not together:
        return []
    return [
        f"{_KEY}.grader_error=retry with {together}: scores are there when all episodes have ended, too late to sample "
        f"one again; set {_KEY}.grader_error=drop, or change that"
    ]


def _retries(outcomes: OutcomesConfig) -> bool:
    return "retry" in (
        *(outcomes.timed_out, outcomes.tool_error, outcomes.environment_error),
        *(outcomes.grader_error, outcomes.aborted),
    )


OUTCOME_IDLE: tuple[Idle, ...] = (
    Idle(
        (f"{_KEY}.max_retries",),
        lambda c: not _retries(c.actor_rollout_ref.rollout.outcomes),
        f"no outcome in {_KEY} is sampled again (retry)",
    ),
    idle_while(f"{_KEY}.episode_timeout", "null", f"{_KEY}.timed_out"),
    Idle(
        (f"{_KEY}.tool_error", f"{_KEY}.environment_error"),
        lambda c: not has_turns(c),
        "actor_rollout_ref.rollout.multi_turn.enable is false",
    ),
)
