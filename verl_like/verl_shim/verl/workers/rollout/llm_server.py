"""verl.workers.rollout.llm_server: the policy, as agent loops of verl 0.9 name its type."""

from verl_like.episodes.agent_loops.policy import Policy as LLMServerClient

__all__ = ["LLMServerClient"]
