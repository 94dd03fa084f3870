"""verl.workers.rollout.replica: what the policy answers."""

from verl_like.episodes.agent_loops.policy import TokenOutput

__all__ = ["TokenOutput"]
