"""Rows that the hf engine decodes together, with the cache of what was computed for them: they join and leave it.

The columns of a cache that are a row's own are always its last ones, because every step adds one to each row. So two
caches join when the narrower one is padded on the left, and once the longest row has left, columns are cut off there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import DynamicCache, PreTrainedTokenizerBase
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer

from verl_like.rollout.rollout_engine import Completion, FinishReason, GenerationRequest, Sampled, SamplingParams
from verl_like.rollout.sampling import completes_stop, draw, filtered_log_probs, shape_logits

# Layers of a cache that can be joined, by exact type: what another keeps besides (an index of its keys, numbers in few
# bits) we would lose. States that are carried from token to token have no columns at all.
JOINABLE = frozenset(
    {
        "DynamicLayer",
        "DynamicSlidingWindowLayer",
        "LinearAttentionLayer",
        "LinearAttentionAndFullAttentionLayer",
        "LinearAttentionAndSlidingWindowAttentionLayer",
    }
)


@dataclass(slots=True, eq=False)
class Row:
    """One response under way, or waiting to be."""

    request: GenerationRequest
    place: int  # in the order of arrival
    uniform: NDArray[np.float64]  # [max_tokens]: token i is drawn with number i, wherever a response is resumed
    token_ids: list[int] = field(init=False)
    log_probs: list[float] = field(init=False)
    versions: list[int] = field(init=False)
    begun: bool = False  # taken up before: it lost its cache to other weights, and goes on before all that wait

    def __post_init__(self) -> None:
        resume = self.request.resume
        self.token_ids, self.log_probs = resume.token_ids.tolist(), resume.log_probs.tolist()
        self.versions = resume.weight_versions.tolist()

    @property
    def order(self) -> tuple[bool, int, int]:
        """What is less is taken up earlier."""
        return not self.begun, self.request.priority, self.place

    @property
    def known_ids(self) -> list[int]:
        """Prompt and response so far."""
        return self.request.prompt_ids + self.token_ids

    @property
    def sampled(self) -> Sampled:
        return Sampled.of(self.token_ids, self.log_probs, self.versions)

    def end(self, tokenizer: PreTrainedTokenizerBase | None) -> FinishReason | None:
        """Why the response is over after its last token, or None."""
        sampling = self.request.sampling
        if self.token_ids[-1] in sampling.stop_token_ids:
            return "stop"
        may_stop = tokenizer is not None and sampling.stop and len(self.token_ids) > sampling.min_tokens
        if may_stop and completes_stop(tokenizer, self.token_ids, sampling.stop):
            return "stop"
        return "length" if len(self.token_ids) >= sampling.max_tokens else None

    def completion(self, reason: FinishReason) -> Completion:
        return Completion(request_id=self.request.request_id, sampled=self.sampled, finish_reason=reason)


@dataclass(frozen=True, slots=True, eq=False)
class _Knobs:
    """How each row is sampled: made when rows come or go, not at every token."""

    greedy_b: Tensor
    temperature_b: Tensor
    top_k_b: Tensor
    top_p_b: Tensor
    min_p_b: Tensor
    some_greedy: bool
    all_greedy: bool
    shaped: list[int]  # rows whose logits are changed before the temperature

    @classmethod
    def of(cls, params: Sequence[SamplingParams], vocab: int, device: torch.device) -> _Knobs:
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
        )


@dataclass(slots=True, eq=False)
class Batch:
    """Rows that are decoded together: b rows, S columns in the cache, as many as the longest row has of its own."""

    rows: list[Row]
    cache: DynamicCache
    mask_bS: Tensor  # 1 in a row's own columns
    length_b: Tensor  # how many these are
    shift_b: (
        Tensor  # what the position of the row's next token is more than that: images have fewer positions than tokens
    )
    next_b1: Tensor | None = None  # the token that goes into the next forward pass
    _knobs: _Knobs | None = None

    def sample(self, logits_bV: Tensor, version: int) -> None:
        """One more token for each row; the log-prob is that of the distribution it was drawn from."""
        rows, logits_bV = self.rows, logits_bV.float()
        if self._knobs is None:
            params = [row.request.sampling for row in rows]
            self._knobs = _Knobs.of(params, logits_bV.shape[1], logits_bV.device)
        knobs = self._knobs
        for i in knobs.shaped:
            shape_logits(logits_bV[i], rows[i].request.sampling, rows[i].request.prompt_ids, rows[i].token_ids)
        log_probs_bV = filtered_log_probs(logits_bV, knobs.temperature_b, knobs.top_k_b, knobs.top_p_b, knobs.min_p_b)
        if knobs.all_greedy:
            token_b = log_probs_bV.argmax(dim=-1)
        else:
            uniform = [row.uniform[len(row.token_ids)] for row in rows]
            token_b = draw(log_probs_bV, torch.tensor(uniform, dtype=torch.float64, device=logits_bV.device))
            if knobs.some_greedy:
                token_b = torch.where(knobs.greedy_b, log_probs_bV.argmax(dim=-1), token_b)
        self.next_b1 = token_b[:, None]
        chosen_b = log_probs_bV.gather(1, self.next_b1)[:, 0]
        for row, token, log_prob in zip(rows, token_b.tolist(), chosen_b.tolist(), strict=True):
            row.token_ids.append(token)
            row.log_probs.append(log_prob)
            row.versions.append(version)

    def widen(self) -> Tensor:
        """Positions [b, 1] of the tokens that go into the cache now, whose column is added to the mask."""
        positions_b1 = (self.length_b + self.shift_b)[:, None]
        self.mask_bS = torch.nn.functional.pad(self.mask_bS, (0, 1), value=1)
        self.length_b = self.length_b + 1
        return positions_b1

    def can_join(self) -> bool:
        """Whether its cache can be joined with those of others of the model."""
        return _joinable(self.cache)

    def join(self, others: Sequence[Batch]) -> None:
        """Take up other batches' rows, behind one's own; before the next token of all is sampled."""
        batches = [self, *others]
        for layers in zip(*(batch.cache.layers for batch in batches), strict=True):
            _join(layers)
        width = max(batch.mask_bS.shape[1] for batch in batches)
        self.mask_bS = torch.cat([_padded(batch.mask_bS, width, -1) for batch in batches])
        self.length_b = torch.cat([batch.length_b for batch in batches])
        self.shift_b = torch.cat([batch.shift_b for batch in batches])
        self.rows = [row for batch in batches for row in batch.rows]
        self.next_b1 = self._knobs = None

    def keep(self, index: list[int]) -> None:
        """Drop all other rows, and the columns that were only theirs."""
        self.rows, self._knobs = [self.rows[i] for i in index], None
        if not index:
            return
        chosen_b = torch.tensor(index, device=self.mask_bS.device)
        self.mask_bS, self.length_b = self.mask_bS[chosen_b], self.length_b[chosen_b]
        self.shift_b = self.shift_b[chosen_b]
        if self.next_b1 is not None:
            self.next_b1 = self.next_b1[chosen_b]
        width = int(self.length_b.max())
        if width < self.mask_bS.shape[1] and _joinable(self.cache):
            self.mask_bS = self.mask_bS[:, -width:]
            for layer in self.cache.layers:
                _cut(layer, width)
        self.cache.reorder_cache(chosen_b)  # also of states, which batch_select_indices leaves out


def _joinable(cache: DynamicCache) -> bool:
    return all(type(layer).__name__ in JOINABLE for layer in cache.layers)


def _padded(columns: Tensor, width: int, dim: int) -> Tensor:
    """Zeros on the left of dimension -1 or -2, up to this width."""
    missing = width - columns.shape[dim]
    return torch.nn.functional.pad(columns, (0, 0) * (-1 - dim) + (missing, 0)) if missing else columns


def _join(layers: Sequence[Any]) -> None:
    """Add the rows of the others to the first of these layers."""
    mine = layers[0]
    if isinstance(mine, DynamicLayer) and mine.keys is not None:
        width = max(layer.keys.shape[-2] for layer in layers)
        mine.keys = torch.cat([_padded(layer.keys, width, -2) for layer in layers])
        mine.values = torch.cat([_padded(layer.values, width, -2) for layer in layers])
    if isinstance(mine, DynamicSlidingWindowLayer):
        mine.cumulative_length = max(layer.cumulative_length for layer in layers)
    if isinstance(mine, LinearAttentionLayer):
        for name in ("conv_states", "recurrent_states"):
            own: dict[int, Any] = getattr(mine, name)
            for i, state in own.items():
                if state is not None:
                    own[i] = torch.cat([getattr(layer, name)[i] for layer in layers])


def _cut(layer: Any, width: int) -> None:
    """Leave the last columns of a layer; one with a window may have fewer already."""
    if isinstance(layer, DynamicLayer) and layer.keys is not None and layer.values is not None:
        layer.keys, layer.values = layer.keys[..., -width:, :], layer.values[..., -width:, :]
    if isinstance(layer, DynamicSlidingWindowLayer):
        layer.cumulative_length = width
