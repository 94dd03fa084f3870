"""Check at the start that the rollout engine's routes are those of its tokens: replayed, they must bring it nearer.

A capture that is off by a token, a layer or a row would train silently on experts that were never chosen. Right routes
leave what differs between the two engines' kernels; wrong ones change the function itself, by far more than the few
live choices that differ in 16 bits. So one difference is measured by the other, whatever the model and its precision.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from verl_like.batch import Prompt, PromptRow, Rollouts
from verl_like.config import PPOConfig
from verl_like.episodes.answering import Answering
from verl_like.episodes.collector import Collector
from verl_like.episodes.episode import SingleTurn
from verl_like.rollout.rollout_engine import SamplingParams, request_seed
from verl_like.trainer.roles import ActorHandle

logger = logging.getLogger(__name__)

_PROMPTS, _RESPONSES, _LONGEST, _IDS = 4, 2, 24, 10
_LARGER, _ROUNDING = 2.0, 1e-4  # [times, nats] that the difference may be larger with replay than without


def check_routes(config: PPOConfig, collector: Collector, actor: ActorHandle) -> None:
    """Sample a few tokens, and score them with the routes that came along, and without.

    Prompts come twice each, so that the second response may begin in the engine's cache. Both differences go to the
    log. Raises ValueError where replay takes the log-probs further from the engine's: the routes are of other tokens.
    """
    length, most = (min(_LONGEST, n) for n in (config.data.max_prompt_length, config.data.max_response_length))
    rows = sampled_rows(config, collector, made_up_prompts([length] * _PROMPTS), _RESPONSES, most, purpose="routes")
    replayed, live = _gap(actor, rows), _gap(actor, rows.with_routes(None))
    if rows.routes_T is None or not replayed <= _LARGER * live + _ROUNDING:
        raise ValueError(
            "actor_rollout_ref.actor.router_replay.mode=R3: routes that the rollout engine records are not those of "
            f"its tokens: the trainer's log-probs differ from the engine's by {replayed:.3g} nats on average where "
            f"they are replayed, by {live:.3g} where not; set mode=R2 or disabled"
        )
    logger.info("router replay: %.3g nats on average from the engine's log-probs, %.3g without it", replayed, live)


def made_up_prompts(lengths: Sequence[int]) -> list[list[int]]:
    """Make prompts of these lengths [tokens], of ids that every tokenizer has; the same in every run."""
    return [[request_seed(0, i, j) % _IDS for j in range(length)] for i, length in enumerate(lengths)]


def sampled_rows(
    config: PPOConfig, collector: Collector, prompts: Sequence[list[int]], n: int, most: int, *, purpose: str
) -> Rollouts:
    """Sample n responses of at most `most` tokens to each prompt, at the run's temperature, for a check at start."""
    row = PromptRow(index=0, data_source=purpose, messages=[])
    how = Answering(
        runner=SingleTurn(),
        sampling=SamplingParams(temperature=config.actor_rollout_ref.rollout.temperature, max_tokens=most),
        n=n,
        seed=config.trainer.seed,
        purpose=purpose,
        grade_at_end=True,
    )
    return collector.probe([Prompt(ids=ids, row=row, group=i, position=i) for i, ids in enumerate(prompts)], how)


def _gap(actor: ActorHandle, rows: Rollouts) -> float:
    trained_T, sampled_T = actor.log_probs(rows).old_log_probs_T, rows.rollout_log_probs_T
    assert trained_T is not None and sampled_T is not None
    return float((trained_T - sampled_T).abs().mean())
