"""The doctor's checks of the engine that samples: its sleep, endpoints, outcomes of episodes, determinism."""

from collections.abc import Iterator

from verl_like.config.doctor_environments import has_turns
from verl_like.config.doctor_rewards import scored_together
from verl_like.config.outcomes import OutcomesConfig
from verl_like.config.placement import is_apart, samples_alone
from verl_like.config.ppo import PPOConfig
from verl_like.config.roles import ROLLOUT
from verl_like.config.rollout import runs_agent_loops, runs_programs
from verl_like.config.schema import Idle

_ROLLOUT = "actor_rollout_ref.rollout"
_OUTCOMES = f"{_ROLLOUT}.outcomes"


def impossible_sleep(config: PPOConfig) -> Iterator[str]:
    """rollout.sleep_level=2: who brings the weights back must have all of them, in the same processes."""
    policy, key = config.actor_rollout_ref, f"{_ROLLOUT}.sleep_level=2"
    if policy.rollout.sleep_level == 1:
        return
    otherwise = f", or {_ROLLOUT}.sleep_level=1"
    if not policy.rollout.free_cache_engine:
        yield f"{key} with {_ROLLOUT}.free_cache_engine=False: the engine does not sleep; set it to True{otherwise}"
    if policy.rollout.quantization is not None:
        yield (
            f"{key} with {_ROLLOUT}.quantization={policy.rollout.quantization}: what the engine has quantised stays "
            f"where it is; set quantization=null{otherwise}"
        )
    if policy.model.lora_rank > 0 and not policy.model.lora.merge:
        yield (
            f"{key} with actor_rollout_ref.model.lora.merge=False: a sync brings adapters alone; set it to True"
            f"{otherwise}"
        )
    if is_apart(config, ROLLOUT) and not samples_alone(config):
        yield (
            f"{key} with the rollout engine beside other models than the actor (trainer.placement): nobody there has "
            f"the weights; give the engine a pool of its own{otherwise}"
        )


def impossible_endpoint(config: PPOConfig) -> Iterator[str]:
    """Settings that the endpoint of rollout.name=openai cannot follow: keys, values, fix."""
    rollout, val = config.actor_rollout_ref.rollout, config.actor_rollout_ref.rollout.val_kwargs
    if not rollout.engine.endpoint:
        return
    if rollout.openai.url is None:
        yield f"{_ROLLOUT}.name=openai without {_ROLLOUT}.openai.url: set it, as in http://host:8000/v1"
    conversations = rollout.multi_turn.enable or runs_agent_loops(rollout) or runs_programs(rollout)
    if conversations or config.env.train.tags or config.env.val.tags:
        yield (
            f"{_ROLLOUT}.name=openai with tools, agent loops, programs or environments: the endpoint answers single "
            "prompts; leave them out"
        )
    ids, words = rollout.stop_token_ids or val.stop_token_ids, rollout.bad_words or val.bad_words
    if ids or words or rollout.ignore_eos or val.ignore_eos:
        yield (
            f"{_ROLLOUT}.name=openai with stop_token_ids, bad_words or ignore_eos: the endpoint's tokens are its own; "
            "leave them out (stop takes texts)"
        )


def impossible_outcomes(config: PPOConfig) -> Iterator[str]:
    """Combinations that cannot work: keys, values, fix."""
    if config.actor_rollout_ref.rollout.outcomes.grader_error != "retry":
        return
    if config.reward_model.failure_penalty is not None:
        yield (
            f"{_OUTCOMES}.grader_error=retry with reward_model.failure_penalty={config.reward_model.failure_penalty}: "
            "an answer that cannot be graded either has the penalty, or another one is sampled; leave one of them out"
        )
    elif together := scored_together(config):
        yield (
            f"{_OUTCOMES}.grader_error=retry with {together}: scores are there when all episodes have ended, too late "
            f"to sample one again; set {_OUTCOMES}.grader_error=drop, or change that"
        )


def _retries(outcomes: OutcomesConfig) -> bool:
    return "retry" in (
        *(outcomes.timed_out, outcomes.tool_error, outcomes.environment_error),
        *(outcomes.grader_error, outcomes.aborted),
    )


OUTCOME_IDLE: tuple[Idle, ...] = (
    Idle(
        (f"{_OUTCOMES}.max_retries",),
        lambda c: not _retries(c.actor_rollout_ref.rollout.outcomes),
        f"no outcome in {_OUTCOMES} is sampled again (retry)",
    ),
    Idle(
        (f"{_OUTCOMES}.tool_error", f"{_OUTCOMES}.environment_error"),
        lambda c: not has_turns(c),
        "actor_rollout_ref.rollout.multi_turn.enable is false",
    ),
)


def impossible_determinism(config: PPOConfig) -> Iterator[str]:
    """Settings whose results depend on what happens to end first: keys, values, fix."""
    rollout, key = config.actor_rollout_ref.rollout, "trainer.full_determinism=True"
    if not config.trainer.full_determinism:
        return
    if rollout.scheduler.additional_prompts.enable:
        yield (
            f"{key} with {_ROLLOUT}.scheduler.additional_prompts.enable=True: which groups are used depends on which "
            "end first; set one of them to False"
        )
    if config.algorithm.filter_groups.enable and rollout.scheduler.mode != "batch":
        yield (
            f"{key} with algorithm.filter_groups.enable=True and {_ROLLOUT}.scheduler.mode={rollout.scheduler.mode}: "
            f"when another prompt begins depends on time; set {_ROLLOUT}.scheduler.mode=batch"
        )
    if rollout.n_redundant:
        yield (
            f"{key} with {_ROLLOUT}.n_redundant={rollout.n_redundant}: which responses are used depends on which end "
            "first; set it to 0"
        )
    turns = has_turns(config)
    beside = (
        f"{key} with tools, environments, agent loops or programs: what a request is computed beside depends on how "
        "long they"
    )
    if (turns or rollout.scheduler.max_running_requests is not None) and rollout.max_num_seqs != 1:
        yield (
            f"{beside} take, and so do its last digits; set {_ROLLOUT}.max_num_seqs=1 (one request at a time; it is "
            f"{rollout.max_num_seqs})"
        )
    if turns and rollout.engine.keeps_cache and rollout.enable_prefix_caching:
        yield f"{beside} take, and so does what the cache holds; set {_ROLLOUT}.enable_prefix_caching=False"
