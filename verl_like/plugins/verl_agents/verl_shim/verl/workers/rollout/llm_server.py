"""verl.workers.rollout.llm_server: the policy, as agent loops of verl 0.9 name its type."""

from verl_like.plugins.verl_agents.policy import Policy as LLMServerClient

__all__ = ["LLMServerClient"]
