"""Responses under way in an engine whose tokens we draw ourselves (hf, SGLang).

One uniform number decides one token, so tokens depend neither on the batch nor on where a response was cut.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from verl_like.models.cost import ModelCost
from verl_like.rollout.rollout_engine import Completion, FinishReason, GenerationRequest, Sampled, SamplingParams
from verl_like.rollout.sampling import completes_stop, draw, filtered_log_probs, shape_logits

_SEED_MASK = 2**63 - 1
# What a decode step costs for any number of rows, and for each token: on a GPU weights are read (in tokens); on a CPU
# also modules are called (in operations of a layer, at 50 GFLOP/s and 10 GB/s; docs/rollout.md).
_FIXED_TOKENS = 300.0
_LAYER_OPERATIONS, _WEIGHT_OPERATIONS, _TOKEN_OPERATIONS = 4e7, 20.0, 5e5


@dataclass(slots=True, eq=False)
class Row:
    """Response under way, or waiting to be."""

    request: GenerationRequest
    seed: int
    place: int = 0  # in the order of arrival
    uniform: NDArray[np.float64] = field(init=False)  # [max_tokens]: token i is drawn with number i
    token_ids: list[int] = field(init=False)
    log_probs: list[float] = field(init=False)
    versions: list[int] = field(init=False)
    routes: list[NDArray[Any]] = field(init=False)  # [some tokens, layers, k] each: of those in the cache
    drafting: Any = None  # what the proposer of drafts keeps of it
    drafted: int = 0  # tokens that were guessed ahead,
    kept: int = 0  # and those of them that were drawn
    begun: bool = False  # taken up before: it lost its cache to other weights, and goes on before all that wait

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed & _SEED_MASK)
        count = self.request.sampling.max_tokens
        self.uniform = torch.rand(count, generator=generator, dtype=torch.float64).numpy()
        resume = self.request.resume
        self.token_ids, self.log_probs = resume.token_ids.tolist(), resume.log_probs.tolist()
        self.versions = resume.weight_versions.tolist()
        self.routes = [] if resume.routes is None else [resume.routes]

    @property
    def order(self) -> tuple[bool, int, int]:
        """Sorting key: rows of lower order are taken up earlier."""
        return not self.begun, self.request.priority, self.place

    @property
    def known_ids(self) -> list[int]:
        """Prompt and response so far."""
        return self.request.prompt_ids + self.token_ids

    @property
    def sampled(self) -> Sampled:
        sampled = Sampled.of(self.token_ids, self.log_probs, self.versions)
        if self.routes:
            self.routes = [np.concatenate(self.routes)]
        return dataclasses.replace(sampled, routes=self.routes[0]) if self.routes else sampled

    def went(self, routes: NDArray[Any]) -> None:
        """Note the routes of the tokens that a pass took, up to the last; of those computed again the first count."""
        known = sum(map(len, self.routes))
        self.routes.append(routes[max(0, known - (len(self.known_ids) - len(routes))) :])

    def take(self, token: int, log_prob: float, version: int) -> None:
        """Append one more token, drawn from weights of this version."""
        self.token_ids.append(token)
        self.log_probs.append(log_prob)
        self.versions.append(version)

    def end(self, tokenizer: PreTrainedTokenizerBase | None) -> FinishReason | None:
        """Reason for which the response is over after its last token, or None."""
        sampling = self.request.sampling
        if self.token_ids[-1] in sampling.stop_token_ids:
            return "stop"
        may_stop = tokenizer is not None and sampling.stop and len(self.token_ids) > sampling.min_tokens
        if may_stop and completes_stop(tokenizer, self.token_ids, sampling.stop):
            return "stop"
        return "length" if len(self.token_ids) >= sampling.max_tokens else None

    def completion(self, reason: FinishReason, cached_tokens: int = 0) -> Completion:
        return Completion(
            request_id=self.request.request_id,
            sampled=self.sampled,
            finish_reason=reason,
            cached_tokens=cached_tokens,
            drafted=self.drafted,
            kept=self.kept,
        )


class Drafted(Protocol):
    """Response under way, as far as its next tokens are guessed from it. drafting: what the proposer keeps of it."""

    request: GenerationRequest
    token_ids: list[int]
    drafting: Any


class Proposer(Protocol):
    """Guesses the next tokens of rows that an engine decodes together (`rollout.speculative`)."""

    def propose(self, rows: Sequence[Drafted]) -> list[list[int]]:
        """Return drafts of each row, often none; called before each decode step."""
        ...


def fixed_tokens(cost: ModelCost, device: torch.device) -> float:
    """Tokens of one row that are as much work as what a decode step does for any number of rows."""
    if device.type != "cpu":
        return _FIXED_TOKENS
    weights = (cost.body_weights + cost.head_weights) / len(cost.windows)  # of a layer
    return (_LAYER_OPERATIONS + _WEIGHT_OPERATIONS * weights) / (_TOKEN_OPERATIONS + 2 * weights)


@dataclass(frozen=True, slots=True, eq=False)
class Knobs:
    """Sampling parameters of each row as tensors: made when rows come or go, not at every token."""

    greedy_b: Tensor
    temperature_b: Tensor
    top_k_b: Tensor
    top_p_b: Tensor
    min_p_b: Tensor
    some_greedy: bool
    all_greedy: bool
    shaped: list[int]  # rows whose logits are changed before the temperature
    hot: list[int]  # rows whose first token is drawn in another way

    @classmethod
    def of(cls, params: Sequence[SamplingParams], vocab: int, device: torch.device) -> Knobs:
        greedy = [p.greedy for p in params]
        top_k = [vocab if p.greedy or p.top_k < 1 else p.top_k for p in params]
        return cls(
            greedy_b=torch.tensor(greedy, device=device),
            temperature_b=torch.tensor([1.0 if p.greedy else p.temperature for p in params], device=device),
            top_k_b=torch.tensor(top_k, device=device),
            top_p_b=torch.tensor([1.0 if p.greedy else p.top_p for p in params], device=device),
            min_p_b=torch.tensor([0.0 if p.greedy else p.min_p for p in params], device=device),
            some_greedy=any(greedy),
            all_greedy=all(greedy),
            shaped=[i for i, p in enumerate(params) if p.shapes_logits],
            hot=[i for i, p in enumerate(params) if p.of_hot_token is not None],
        )

    def repeated(self, row_N: Tensor, rows: list[int]) -> Self:
        """Parameters of these rows, some several times; those in `shaped` and `hot` are there once."""
        tensors = ("greedy_b", "temperature_b", "top_k_b", "top_p_b", "min_p_b")
        places = {"shaped": self.shaped, "hot": self.hot}
        return dataclasses.replace(
            self,
            **{name: getattr(self, name)[row_N] for name in tensors},
            **{name: [rows.index(i) for i in found] for name, found in places.items()},
        )


def draw_tokens(
    rows: Sequence[Row], knobs: Knobs, logits_bV: Tensor, ahead: Sequence[int] | None = None
) -> tuple[Tensor, Tensor]:
    """Draw the next token [b] of each row, with its log-prob in the distribution that it was drawn from.

    Args:
        rows: one for each token; a row of which several are drawn is there as often.
        knobs: their sampling parameters.
        logits_bV: logits of the tokenizer's ids alone, float32; they are changed in place.
        ahead: how many tokens behind its row's next one each is; None: all are next ones.
    """
    for i in knobs.shaped:
        shape_logits(logits_bV[i], rows[i].request.sampling, rows[i].request.prompt_ids, rows[i].token_ids)
    temperature_b, top_k_b = knobs.temperature_b, knobs.top_k_b
    for i in knobs.hot:
        first = None if rows[i].token_ids else rows[i].request.hot_start
        if first is not None:
            if temperature_b is knobs.temperature_b:
                temperature_b, top_k_b = temperature_b.clone(), top_k_b.clone()
            temperature_b[i], top_k_b[i] = first.temperature, first.top_k
    log_probs_bV = filtered_log_probs(logits_bV, temperature_b, top_k_b, knobs.top_p_b, knobs.min_p_b)
    if knobs.all_greedy:
        token_b = log_probs_bV.argmax(dim=-1)
    else:
        places = [0] * len(rows) if ahead is None else ahead
        uniform = [row.uniform[len(row.token_ids) + i] for row, i in zip(rows, places, strict=True)]
        token_b = draw(log_probs_bV, torch.tensor(uniform, dtype=torch.float64, device=logits_bV.device))
        if knobs.some_greedy:
            token_b = torch.where(knobs.greedy_b, log_probs_bV.argmax(dim=-1), token_b)
    return token_b, log_probs_bV.gather(1, token_b[:, None])[:, 0]
