"""`actor_rollout_ref.rollout.outcomes.*`: how episodes end, and what becomes of those that end so."""

from dataclasses import dataclass

from verl_like.config.base import ConfigNode, above, at_least, between, require

GRADED = ("solved", "failed", "truncated")
LOST = ("timed_out", "tool_error", "environment_error", "grader_error", "aborted")
_OF_GRADED = ("train", "mask", "drop")
_OF_LOST = ("drop", "retry")


@dataclass(kw_only=True, slots=True)
class OutcomesConfig(ConfigNode):
    """`rollout.outcomes.*`: what becomes of episodes, by how they end ([outcomes](outcomes.md))."""

    solved: str = "train"
    """Graded above solved_above. train; mask: the score counts in the group's statistics, and no token is trained on;
    drop: as if it had not been sampled."""
    failed: str = "train"
    """Graded, and neither solved nor truncated: train, mask, drop."""
    truncated: str = "train"
    """Graded, not solved, and cut off by the length or a number of turns: train, mask, drop."""
    timed_out: str = "drop"
    """Not ended within episode_timeout. drop; retry: the prompt is sampled again in the same step, with another
    seed."""
    tool_error: str = "drop"
    """A tool's process or service was lost, or gave no answer in time: drop, retry."""
    environment_error: str = "drop"
    """What begins, ends or is an environment failed, or a chat template did: drop, retry."""
    grader_error: str = "drop"
    """No reward could be computed, and reward_model.failure_penalty gives none: drop, retry."""
    aborted: str = "drop"
    """The engine gave a request up: drop, retry."""
    solved_above: float = 0.0
    """[score] An episode is solved when the grader's acc, where it gives one, or else its score is above this."""
    max_retries: int = 2
    """[episodes] How often an episode is sampled again; the last one is dropped if that is lost too."""
    episode_timeout: float | None = None
    """[s] Longest time of an episode, while replicas serve: the time in which they sleep or load weights is not
    counted. Null: any."""
    max_lost_fraction: float | None = None
    """[share] More episodes lost stop the run, those that were sampled again included. Null:
    reward_model.max_failure_fraction."""

    def check(self) -> None:
        why = "it is the policy's own answer: sampling it again would choose among its answers"
        for key, value in (("solved", self.solved), ("failed", self.failed), ("truncated", self.truncated)):
            require(value in _OF_GRADED, key, value, f"choose one of {', '.join(_OF_GRADED)}; {why}")
        why = "its reward is not known, so that it can be no part of any statistic"
        for key, value in (
            ("timed_out", self.timed_out),
            ("tool_error", self.tool_error),
            ("environment_error", self.environment_error),
            ("grader_error", self.grader_error),
            ("aborted", self.aborted),
        ):
            require(value in _OF_LOST, key, value, f"choose one of {', '.join(_OF_LOST)}; {why}")
        at_least(self, 0, "max_retries")
        above(self, 0, "episode_timeout")
        between(self, 0, 1, "max_lost_fraction")
