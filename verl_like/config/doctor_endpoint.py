"""Checks of `rollout.name=openai`: a model that is asked for text, and is nobody's to train."""

from verl_like.config.idle import Idle, idle_while
from verl_like.config.ppo import PPOConfig
from verl_like.config.rollout import runs_agent_loops, runs_programs

_ROLLOUT = "actor_rollout_ref.rollout"


def impossible_endpoint(config: PPOConfig) -> list[str]:
    """What the endpoint cannot be asked for."""
    rollout, val = config.actor_rollout_ref.rollout, config.actor_rollout_ref.rollout.val_kwargs
    if rollout.name != "openai":
        return []
    problems = []
    if rollout.openai.url is None:
        problems.append(f"{_ROLLOUT}.name=openai without {_ROLLOUT}.openai.url: set it, as in http://host:8000/v1")
    conversations = rollout.multi_turn.enable or runs_agent_loops(rollout) or runs_programs(rollout)
    if conversations or config.env.train.tags or config.env.val.tags:
        problems.append(
            f"{_ROLLOUT}.name=openai with tools, agent loops, programs or environments: the endpoint answers single "
            "prompts; leave them out"
        )
    ids, words = rollout.stop_token_ids or val.stop_token_ids, rollout.bad_words or val.bad_words
    if ids or words or rollout.ignore_eos or val.ignore_eos:
        problems.append(
            f"{_ROLLOUT}.name=openai with stop_token_ids, bad_words or ignore_eos: the endpoint's tokens are its own; "
            "leave them out (stop takes texts)"
        )
    return problems


ENDPOINT_IDLE: tuple[Idle, ...] = (idle_while(f"{_ROLLOUT}.name", "not openai", f"{_ROLLOUT}.openai."),)
