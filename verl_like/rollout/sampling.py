"""Sampling parameters from the config (`rollout.*`, `rollout.val_kwargs.*`), and sampling itself for the hf engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from verl_like.config import RolloutConfig
from verl_like.rollout.rollout_engine import SamplingParams

FIRE_TEMPERATURE = 30.0  # verl's; FIRE: Chen et al. 2024, https://arxiv.org/abs/2410.21236


def train_sampling(
    rollout: RolloutConfig, eos_ids: tuple[int, ...], tokenizer: PreTrainedTokenizerBase | None = None
) -> SamplingParams:
    """Sampling parameters of training responses.

    tokenizer: for the tokens of rollout.bad_words, where there are any.
    """
    return SamplingParams(
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        min_p=rollout.min_p,
        repetition_penalty=rollout.repetition_penalty,
        presence_penalty=rollout.presence_penalty,
        frequency_penalty=rollout.frequency_penalty,
        bad_words=bad_word_tokens(rollout.bad_words, tokenizer),
        max_tokens=rollout.response_length,
        min_tokens=rollout.min_tokens,
        stop_token_ids=(*(() if rollout.ignore_eos else eos_ids), *rollout.stop_token_ids),
        stop=tuple(rollout.stop),
        do_sample=rollout.do_sample,
        first_temperature=FIRE_TEMPERATURE if rollout.use_fire_sampling else None,
    )


def validation_sampling(
    rollout: RolloutConfig, eos_ids: tuple[int, ...], tokenizer: PreTrainedTokenizerBase | None = None
) -> SamplingParams:
    """Sampling parameters of validation responses: `rollout.val_kwargs`, else as in training."""
    val = rollout.val_kwargs
    given: dict[str, Any] = {
        "min_p": val.min_p,
        "repetition_penalty": val.repetition_penalty,
        "presence_penalty": val.presence_penalty,
        "frequency_penalty": val.frequency_penalty,
        "bad_words": None if val.bad_words is None else bad_word_tokens(val.bad_words, tokenizer),
        "max_tokens": val.max_tokens,
        "min_tokens": val.min_tokens,
        "stop": None if val.stop is None else tuple(val.stop),
    }
    ignore_eos = rollout.ignore_eos if val.ignore_eos is None else val.ignore_eos
    ids = rollout.stop_token_ids if val.stop_token_ids is None else val.stop_token_ids
    return dataclasses.replace(
        train_sampling(rollout, eos_ids, tokenizer),
        temperature=val.temperature,
        top_p=val.top_p,
        top_k=val.top_k,
        do_sample=val.do_sample,
        first_temperature=None,  # for exploration
        stop_token_ids=(*(() if ignore_eos else eos_ids), *ids),
        **{name: value for name, value in given.items() if value is not None},
    )


def bad_word_tokens(words: Sequence[str], tokenizer: PreTrainedTokenizerBase | None) -> tuple[tuple[int, ...], ...]:
    """Token sequences that write a text, at the start of a word and inside one.

    Raises ValueError without a tokenizer.
    """
    if not words:
        return ()
    if tokenizer is None:
        raise ValueError(f"rollout.bad_words={list(words)} cannot be used here: there is no tokenizer")
    blank = [word for word in words if not tokenizer.encode(word.lstrip(), add_special_tokens=False)]
    if blank:
        raise ValueError(f"rollout.bad_words={list(words)}: the tokenizer makes no tokens of {blank}; leave them out")
    texts = [prefix + word.lstrip() for word in words for prefix in ("", " ")]
    return tuple(dict.fromkeys(tuple(tokenizer.encode(text, add_special_tokens=False)) for text in texts))


def require_tokens_left(sampling: SamplingParams, num_ids: int, what: str) -> None:
    """Check that bad words (and before `min_tokens` the tokens that stop) leave one of the `num_ids` ids.

    Raises ValueError otherwise.
    """
    alone = {word[0] for word in sampling.bad_words if len(word) == 1}
    ruled_out = alone.union(sampling.stop_token_ids if sampling.min_tokens else ())
    if alone and len(ruled_out) >= num_ids and ruled_out.issuperset(range(num_ids)):
        early = f", and before min_tokens={sampling.min_tokens} the tokens that stop," if sampling.min_tokens else ""
        raise ValueError(
            f"{what}bad_words: its {len(alone)} single tokens{early} rule out all {num_ids} tokens of the vocabulary, "
            "and nothing is left to sample; leave some out"
        )


def completes_stop(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int], stop: Sequence[str]) -> bool:
    """Check whether the last token completes one of these texts.

    Reads as few tokens as can hold the longest of them: a character is 4 tokens at most, and a few more stand before.
    """
    tail = list(token_ids[-(4 * max(map(len, stop)) + 8) :])
    text, before = (
        tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        for ids in (tail, tail[:-1])
    )
    return any(text.count(each) > before.count(each) for each in stop)


def shape_logits(logits_V: Tensor, params: SamplingParams, prompt_ids: Sequence[int], sampled: list[int]) -> None:
    """Rule out bad words and too early ends, then take off penalties, in place: one row, in vLLM's order."""
    if not params.shapes_logits:
        return
    vocab, device = len(logits_V), logits_V.device
    ruled_out = [word[-1] for word in params.bad_words if list(word[:-1]) == sampled[len(sampled) + 1 - len(word) :]]
    if len(sampled) < params.min_tokens:
        ruled_out += params.stop_token_ids
    logits_V[torch.tensor([i for i in ruled_out if i < vocab], dtype=torch.int64, device=device)] = -torch.inf
    if params.repetition_penalty != 1:
        seen = torch.tensor([i for i in {*prompt_ids, *sampled} if i < vocab], dtype=torch.int64, device=device)
        old = logits_V[seen]
        penalty = params.repetition_penalty
        logits_V[seen] = torch.where(old > 0, old / penalty, old * penalty)
    if params.presence_penalty or params.frequency_penalty:
        count_V = torch.bincount(torch.tensor(sampled, dtype=torch.int64, device=device), minlength=vocab)
        logits_V -= params.frequency_penalty * count_V + params.presence_penalty * (count_V > 0)


def filtered_log_probs(
    logits_BV: Tensor, temperature_B: Tensor, top_k_B: Tensor, top_p_B: Tensor, min_p_B: Tensor
) -> Tensor:
    """Log-probs [B, V] float32 of the distribution that is sampled from: temperature, min-p, top-k, then top-p.

    top_k_B int64, V or more is off; top_p_B 1.0 and min_p_B 0.0 are off. Ties at the k-th place are all kept, as vLLM
    does; top-p keeps the smallest set of most likely tokens whose probability reaches p, never none.
    """
    logits_BV = logits_BV.float() / temperature_B[:, None]
    vocab = logits_BV.shape[1]
    if bool((min_p_B > 0).any()):
        probs_BV = logits_BV.softmax(dim=-1)
        logits_BV = logits_BV.masked_fill(probs_BV < min_p_B[:, None] * probs_BV.amax(dim=-1, keepdim=True), -torch.inf)
    if bool((top_k_B < vocab).any()) or bool((top_p_B < 1.0).any()):
        sorted_BV, order_BV = logits_BV.sort(dim=-1)
        kth_B1 = sorted_BV.gather(1, (vocab - top_k_B.clamp(1, vocab))[:, None])
        sorted_BV = sorted_BV.masked_fill(sorted_BV < kth_B1, -torch.inf)
        cumulative_BV = sorted_BV.softmax(dim=-1).cumsum(dim=-1)
        dropped_BV = cumulative_BV <= 1 - top_p_B[:, None]
        dropped_BV[:, -1] = False
        dropped_BV &= (top_p_B < 1.0)[:, None]
        logits_BV = torch.empty_like(logits_BV).scatter_(1, order_BV, sorted_BV.masked_fill(dropped_BV, -torch.inf))
    return logits_BV.log_softmax(dim=-1)


def draw(log_probs_BV: Tensor, uniform_B: Tensor) -> Tensor:
    """Token ids [B] by inverse transform of one uniform number per row (float64, in [0, 1)).

    One number decides one token, so a tiny numerical difference in the probabilities (another batch, another padding)
    changes the token only if the number lies within that difference of a boundary.
    """
    cumulative_BV = log_probs_BV.double().exp().cumsum(dim=-1)
    target_B1 = uniform_B.to(cumulative_BV)[:, None] * cumulative_BV[:, -1:]
    chosen_B = torch.searchsorted(cumulative_BV, target_B1, right=True)[:, 0]
    return chosen_B.clamp(max=log_probs_BV.shape[1] - 1)
