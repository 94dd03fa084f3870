"""`actor_rollout_ref.rollout.outcomes.*`: how episodes end, and what becomes of those that end so."""

from dataclasses import dataclass

from verl_like.config.base import ConfigNode, above, at_least, between, key, such_that

GRADED = ("solved", "failed", "truncated")
LOST = ("timed_out", "tool_error", "environment_error", "grader_error", "aborted")
_FATE = such_that(
    lambda fate: fate in ("train", "mask", "drop"),
    "choose one of train, mask, drop; it is the policy's own answer: sampling it again would choose among its answers",
    "train, mask, drop",
)
_FATE_OF_LOST = such_that(
    lambda fate: fate in ("drop", "retry"),
    "choose one of drop, retry; its reward is not known, so that it can be no part of any statistic",
    "drop, retry",
)


@dataclass(kw_only=True, slots=True)
class OutcomesConfig(ConfigNode):
    """`rollout.outcomes.*`: what becomes of episodes, by how they end ([outcomes](outcomes.md))."""

    solved: str = key("train", _FATE)
    """Graded above solved_above. train; mask: the score counts in the group's statistics, and no token is trained on;
    drop: as if it had not been sampled."""
    failed: str = key("train", _FATE)
    """Graded, and neither solved nor truncated: train, mask, drop."""
    truncated: str = key("train", _FATE)
    """Graded, not solved, and cut off by the length or a number of turns: train, mask, drop."""
    timed_out: str = key("drop", _FATE_OF_LOST, idle="episode_timeout is null")
    """Not ended within episode_timeout. drop; retry: the prompt is sampled again in the same step, with another
    seed."""
    tool_error: str = key("drop", _FATE_OF_LOST)
    """A tool's process or service was lost, or gave no answer in time: drop, retry."""
    environment_error: str = key("drop", _FATE_OF_LOST)
    """What begins, ends or is an environment failed, or a chat template did: drop, retry."""
    grader_error: str = key("drop", _FATE_OF_LOST)
    """No reward could be computed, and reward_model.failure_penalty gives none: drop, retry."""
    aborted: str = key("drop", _FATE_OF_LOST)
    """The engine gave a request up: drop, retry."""
    solved_above: float = key(0.0, unit="score")
    """An episode is solved when the grader's acc, where it gives one, or else its score is above this."""
    max_retries: int = key(2, at_least(0), unit="episodes")
    """How often an episode is sampled again; the last one is dropped if that is lost too."""
    episode_timeout: float | None = key(None, above(0), unit="s")
    """Longest time of an episode, while replicas serve: the time in which they sleep or load weights is not counted.
    Null: any."""
    max_lost_fraction: float | None = key(None, between(0, 1), unit="share")
    """More episodes lost stop the run, those that were sampled again included. Null:
    reward_model.max_failure_fraction."""
