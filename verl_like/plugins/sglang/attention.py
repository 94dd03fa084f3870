"""Attention for SGLang (0.5.23) on a CPU without its kernels, in place of the loop over sequences of its own backend.

That loop makes a dozen calls for each sequence in every layer: with small models it is where the time goes. Here
sequences of about the same length are padded and attend together. Source: layers/attention/torch_native_backend.py.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding, scaled_dot_product_attention

_BACKEND = "sglang.srt.layers.attention.torch_native_backend"
_REGISTRY = "sglang.srt.layers.attention.attention_registry"
USED = (  # as compat.py's: what is looked for at the start
    *(
        (_BACKEND, f"TorchNativeAttnBackend.{name}")
        for name in ("_run_sdpa_forward_decode", "_run_sdpa_forward_extend")
    ),
    (_BACKEND, "TorchNativeAttnBackend.init_forward_metadata"),
    (_REGISTRY, "register_attention_backend"),
)
_MOST_PAIRS = 2**22  # of query and key in one block, whose mask is kept: beyond, SGLang's loop needs less memory
_MOST_KEYS = 2**17  # tokens whose keys and values are copied at once, if they are not one sequence's


@dataclass(frozen=True, slots=True, eq=False)
class _Block:
    """Sequences of a step that attend together: b of them, at most Q new tokens and S tokens in all. What is missing
    to these is padded with the sequence's own last token, whose place is written twice."""

    token_bQ: Tensor  # the new tokens among those of the step
    position_bQ: Tensor  # where they stand in their sequence
    slot_bS: Tensor  # of each token's key and value in the cache

    def mask(self, heads: int, window: int, dtype: torch.dtype) -> Tensor:
        """Build the mask [b, 1, Q x heads, S]: 0 for what a query sees, else -inf; a token's `heads` heads in a row."""
        key_S, position_bQ1 = torch.arange(self.slot_bS.shape[1]), self.position_bQ[..., None]
        hidden_bQS = key_S > position_bQ1
        if window > -1:
            hidden_bQS |= key_S < position_bQ1 - window
        mask_bQS = torch.zeros(hidden_bQS.shape, dtype=dtype).masked_fill_(hidden_bQS, -torch.inf)
        return mask_bQS.repeat_interleave(heads, dim=1)[:, None]


def use_blocks() -> None:
    """Let `attention_backend=torch_native` be this one."""
    backend: Any = importlib.import_module(_BACKEND)
    registry: Any = importlib.import_module(_REGISTRY)

    class InBlocks(backend.TorchNativeAttnBackend):
        blocks: list[_Block] | None = None  # None: nothing is known of how a step of this kind attends
        masks: dict[tuple[int, int], list[Tensor]]

        def init_forward_metadata(self, forward_batch: Any) -> None:
            super().init_forward_metadata(forward_batch)
            self.masks = {}
            self.blocks = None
            mode = forward_batch.forward_mode
            if forward_batch.encoder_lens is None and not self.use_sliding_window_kv_pool and not mode.is_idle():
                self.blocks = _blocks(forward_batch, self.req_to_token_pool.req_to_token)

        def _run_sdpa_forward_decode(self, *tensors: Any, **options: Any) -> Tensor:
            if self.blocks is None or options["is_cross_attn"]:
                return super()._run_sdpa_forward_decode(*tensors, **options)
            return self._attend(*tensors[:4], **options)

        def _run_sdpa_forward_extend(self, *tensors: Any, **options: Any) -> Tensor:
            if self.blocks is None or options["is_cross_attn"] or not options["causal"]:
                return super()._run_sdpa_forward_extend(*tensors, **options)
            return self._attend(*tensors[:4], **options)

        def _attend(
            self, query_THD: Tensor, output_THD: Tensor, keys_NHD: Tensor, values_NHD: Tensor, **options: Any
        ) -> Tensor:
            assert self.blocks is not None
            window = -1 if options["sliding_window_size"] is None else options["sliding_window_size"]
            heads = query_THD.shape[1] // keys_NHD.shape[1]
            if (heads, window) not in self.masks:  # the same in all layers, or in those of a kind
                self.masks[heads, window] = [b.mask(heads, window, query_THD.dtype) for b in self.blocks]
            for block, mask in zip(self.blocks, self.masks[heads, window], strict=True):
                attended = _attention(block, query_THD, keys_NHD, values_NHD, mask, options["scaling"])
                output_THD[block.token_bQ.flatten()] = attended
            return output_THD

    registry.register_attention_backend("torch_native")(InBlocks)


def _attention(
    block: _Block, query_THD: Tensor, keys_NHD: Tensor, values_NHD: Tensor, mask: Tensor, scale: float | None
) -> Tensor:
    """Attend, and return [b x Q, H, D] of the values: query heads that share a head of keys are rows of one matrix."""
    b, q = block.token_bQ.shape
    query_bQHD, kept = query_THD[block.token_bQ], keys_NHD.shape[1]
    query = query_bQHD.unflatten(2, (kept, -1)).transpose(1, 2).flatten(2, 3)  # [b, kept, Q x heads, D]
    keys, values = (_gathered(each, block.slot_bS).to(query.dtype) for each in (keys_NHD, values_NHD))
    attended = scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scale)
    return attended.unflatten(2, (q, -1)).transpose(1, 2).reshape(b * q, query_THD.shape[1], -1)


def _gathered(cache_NHD: Tensor, slot_bS: Tensor) -> Tensor:
    """Gather [b, H, S, D] of what the cache holds in the slots."""
    rows = embedding(slot_bS, cache_NHD.flatten(1))  # on a CPU twice as fast as indexing
    return rows.unflatten(2, cache_NHD.shape[1:]).transpose(1, 2)


def _blocks(forward_batch: Any, slots: Tensor) -> list[_Block] | None:
    """The blocks of a step; None where one sequence alone would need too large a mask. slots [sequences, longest]."""
    length_b = forward_batch.seq_lens.long()
    if forward_batch.forward_mode.is_decode():
        new_b = torch.ones_like(length_b)
    else:
        new_b = forward_batch.extend_seq_lens.long()
    if int((length_b * new_b).max()) > _MOST_PAIRS:
        return None
    first_b = new_b.cumsum(0) - new_b
    return [
        _block(first_b[rows], new_b[rows], length_b[rows], slots[forward_batch.req_pool_indices[rows]])
        for rows in _alike(length_b, new_b)
    ]


def _block(first_b: Tensor, new_b: Tensor, length_b: Tensor, slots_bN: Tensor) -> _Block:
    index_bQ = torch.minimum(torch.arange(int(new_b.max())), new_b[:, None] - 1)
    index_bS = torch.minimum(torch.arange(int(length_b.max())), length_b[:, None] - 1)
    return _Block(
        token_bQ=first_b[:, None] + index_bQ,
        position_bQ=(length_b - new_b)[:, None] + index_bQ,
        slot_bS=slots_bN.gather(1, index_bS).long(),
    )


def _alike(length_b: Tensor, new_b: Tensor) -> Iterator[Tensor]:
    """Indices of sequences that differ by no more than a factor of two (and a little) in both numbers, and whose mask
    is small enough."""
    rows: list[int] = []
    least = shortest = longest = 0
    for new, length, row in sorted(zip(new_b.tolist(), length_b.tolist(), range(len(new_b)), strict=True)):
        if rows:
            shorter, longer = min(shortest, length), max(longest, length)
            alike = new <= 2 * least + 16 and longer <= 2 * shorter + 64
            keys = (len(rows) + 1) * longer
            if alike and keys * new <= _MOST_PAIRS and keys <= _MOST_KEYS:
                shortest, longest = shorter, longer
                rows.append(row)
                continue
            yield torch.tensor(rows)
        rows, least, shortest, longest = [row], new, length, length
    yield torch.tensor(rows)
