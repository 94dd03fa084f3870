"""verl.workers.rollout.replica: what the policy answers."""

from verl_like.plugins.verl_agents.policy import TokenOutput

__all__ = ["TokenOutput"]
