"""Proof of `trainer.parity=exact`: tokens that were sampled have the trainer's log-probs to the last bit."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable

import numpy as np
import torch

from verl_like.batch import Evaluated, Rollouts, Sequences
from verl_like.config import PPOConfig
from verl_like.config.batch_plan import MicroBatchRule
from verl_like.engine.fsdp import FSDPEngine
from verl_like.engine.train_engine import LOG_PROBS
from verl_like.episodes.collector import Collector
from verl_like.kit.selfcheck.report import Finding
from verl_like.models.loading import load_hf_config
from verl_like.rollout.rollout_engine import GenerationRequest, SamplingParams
from verl_like.trainer.roles import ActorHandle
from verl_like.trainer.route_check import made_up_prompts, sampled_rows
from verl_like.workers.rollout import start_engine

logger = logging.getLogger(__name__)

_PROMPTS, _RESPONSES = 6, 2
_LONGEST_PROMPT, _LONGEST_RESPONSE = 70, 40  # [tokens] beyond one block of keys


def _prompts(longest: int) -> list[list[int]]:
    """Make prompts of several lengths."""
    return made_up_prompts([max(1, min(longest, _LONGEST_PROMPT) * (i + 1) // _PROMPTS) for i in range(_PROMPTS)])


def prove_at_start(config: PPOConfig, collector: Collector, actor: ActorHandle) -> float:
    """Sample prompts of several lengths, twice each, and let the trainer score the tokens.

    Returns how many times as long as with torch's usual kernels the trainer's pass takes; it goes to the log, too.
    Raises ValueError where a log-prob differs in any bit.
    """
    most = min(config.data.max_response_length, _LONGEST_RESPONSE)
    rows = sampled_rows(config, collector, _prompts(config.data.max_prompt_length), _RESPONSES, most, purpose="parity")
    trained_T, sampled_T = actor.log_probs(rows).old_log_probs_T, rows.rollout_log_probs_T
    assert trained_T is not None and sampled_T is not None
    if different := int((trained_T != sampled_T).sum()):
        raise ValueError(
            f"trainer.parity=exact: {different} of {len(trained_T)} sampled tokens have other log-probs in the trainer "
            f"than in the rollout engine, by {float((trained_T - sampled_T).abs().max()):.3g} nats at most; set "
            "trainer.parity=off"
        )
    cost = _seconds(actor.log_probs, rows) / _seconds(actor.usual_log_probs, rows)
    logger.info(
        "trainer.parity=exact: the trainer's log-probs of %d sampled tokens are the engine's to the last bit; its pass "
        "takes %.2f times as long as with torch's usual kernels",
        *(len(trained_T), cost),
    )
    return cost


def _seconds(function: Callable[[Rollouts], Evaluated], rows: Rollouts) -> float:
    """Measure a call: the shorter of two."""
    taken = list[float]()
    for _ in range(2):
        began = time.perf_counter()
        function(rows)
        taken.append(time.perf_counter() - began)
    return min(taken)


def finding(config: PPOConfig, engine: FSDPEngine, vocab_size: int) -> Finding:
    """Largest difference between what a rollout engine with these weights samples, and the trainer's log-probs."""
    policy = config.actor_rollout_ref
    sampler = start_engine(
        *(policy.rollout, policy.model),
        process=engine.process,
        hf_config=load_hf_config(policy.model),
        run_id="selfcheck",
        tokenizer_size=vocab_size,
        max_model_len=_LONGEST_PROMPT + _LONGEST_RESPONSE,
        seed=config.trainer.seed,
        exact=True,
    )
    params, prompts = SamplingParams(max_tokens=_LONGEST_RESPONSE), _prompts(_LONGEST_PROMPT)
    try:
        sampler.load_weights(engine.export_weights(sampler.dtype), version=0)
        asked = [
            GenerationRequest(request_id=str(i), prompt_ids=ids, sampling=params, seed=i)
            for i, ids in enumerate(prompts)
        ]
        sampled = [completion.sampled for completion in sampler.generate(asked)]
    finally:
        sampler.shutdown()
    ids_T, length_B = np.concatenate([each.token_ids for each in sampled]), [len(each.token_ids) for each in sampled]
    rows = Sequences(
        prompt_ids_T=torch.tensor([token for ids in prompts for token in ids], dtype=torch.int32),
        prompt_length_B=torch.tensor([len(ids) for ids in prompts]),
        response_ids_T=torch.from_numpy(ids_T),
        response_length_B=torch.tensor(length_B),
        response_mask_T=torch.ones(len(ids_T), dtype=torch.bool),
    )
    trained_T = engine.forward(rows, want=frozenset({LOG_PROBS}), rule=MicroBatchRule(max_sequences=4))[LOG_PROBS]
    gap_T = trained_T - torch.from_numpy(np.concatenate([each.log_probs for each in sampled]))
    return Finding(name="rollout engine: log-probs", difference=float(gap_T.abs().max()), limit=sys.float_info.min)
