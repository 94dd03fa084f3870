"""Context parallelism: a rank holds chunks of the tokens with all their heads, and gathers the keys that these see.

The packed tokens of a micro-batch are cut into 2 c chunks for c ranks, of which rank r holds number r and number
2c - 1 - r: causal attention costs each about the same (the "zigzag" of ring attention, Zhu 2024; Llama 3, arXiv
2407.21783, section 3.3.2, gathers keys over such chunks too). Nothing depends on the number of heads. Beside Ulysses
(parallel/ulysses.py) each such rank is a few neighbours, which share its tokens, and its heads around attention.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from verl_like.parallel.ulysses import SequenceRanks

# torch 2.13 has given them new names, and warns of the old ones
all_gather = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
reduce_scatter = dist.reduce_scatter_single if hasattr(dist, "reduce_scatter_single") else dist.reduce_scatter_tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ContextRanks(SequenceRanks):
    """Ranks that share rows by chunks of their tokens.

    context: those that hold other chunks, and exchange keys.
    heads: those that hold other tokens of the same chunks, and exchange heads for them; None: this rank alone.
    """

    context: SequenceRanks
    heads: SequenceRanks | None = None

    @property
    def unit(self) -> int:
        """Tokens are filled up to a multiple of this number."""
        return 2 * self.size

    def places(self, total: int) -> Tensor:
        """Number this rank's tokens out of `total`, a multiple of `unit`, in the order in which it holds them: [T]."""
        mine = chunk_places(total, self.context.size)[self.context.rank]
        return mine if self.heads is None else mine.chunk(self.heads.size)[self.heads.rank]


def chunk_places(total: int, size: int) -> Tensor:
    """Number the tokens that each of `size` ranks holds of `total`, a multiple of 2 x size: int64 [size, total / size].

    Rank r has chunks r and 2 size - 1 - r of 2 size.
    """
    chunks = torch.arange(total).view(2 * size, -1)
    return torch.cat([chunks[:size], chunks[size:].flip(0)], 1)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SeenKeys:
    """Keys that a rank's queries see, found in what its group gathers.

    places_U: int64, of these keys among the gathered ones: the tokens of rank 0, those of rank 1, ...
    """

    ranks: SequenceRanks
    places_U: Tensor

    @classmethod
    def of(cls, seen_U: Tensor, total: int, ranks: SequenceRanks) -> SeenKeys:
        """Find keys by their numbers among the `total` tokens that are shared by `chunk_places`."""
        return cls(ranks=ranks, places_U=torch.argsort(chunk_places(total, ranks.size).flatten())[seen_U])

    def to(self, device: torch.device) -> SeenKeys:
        """Move the places; the host does not wait."""
        return replace(self, places_U=self.places_U.to(device, non_blocking=True))

    def gather(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Gather keys and values of the group's tokens, and keep those seen: [1, heads, T, D] -> [1, heads, U, D]."""
        mine = torch.cat([key, value], -1)[0].transpose(0, 1)  # one message
        seen = _GatherSeen.apply(mine, self).transpose(0, 1)[None]
        return seen[..., : key.shape[-1]], seen[..., key.shape[-1] :]


class _GatherSeen(torch.autograd.Function):
    """Tokens of all ranks, of which some are kept; a token's gradient is the sum of those of the ranks that kept it.

    Sums are in float32 at least, as those of copies are (models/token_layout.py).
    """

    @staticmethod
    def forward(ctx: Any, mine: Tensor, keys: SeenKeys) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.keys, ctx.tokens = keys, len(mine)
        whole = mine.new_empty((keys.ranks.size * len(mine), *mine.shape[1:]))
        all_gather(whole, mine.contiguous(), group=keys.ranks.group)
        return whole.index_select(0, keys.places_U)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        keys, dtype = ctx.keys, torch.promote_types(grad.dtype, torch.float32)
        whole = torch.zeros(keys.ranks.size * ctx.tokens, *grad.shape[1:], dtype=dtype, device=grad.device)
        whole.index_copy_(0, keys.places_U, grad.to(dtype))
        mine = whole.new_empty((ctx.tokens, *grad.shape[1:]))
        reduce_scatter(mine, whole, group=keys.ranks.group)
        return mine.to(grad.dtype), None
