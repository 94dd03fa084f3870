"""Layout of packed tokens in slots, for batched attention calls (`Groups`) and for rows that begin alike.

Batched calls take rows of similar length. What rows begin with in common is present once for each row that reads it.

The rows of a GRPO group answer one prompt. Packed, that prompt is there once, so every linear layer computes it once;
attention alone needs its keys and values in front of each response. A layout copies them there, and adds up what comes
back in the backward pass: in float32 and always in the same order, by gathers alone, so that a gradient does not depend
on how a device orders atomic additions.

Letters: T packed tokens, K slots, C tokens that have more than one slot.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenLayout:
    """Map of slots to packed tokens. A slot of padding repeats some token; nothing that is read comes from it."""

    gather_K: Tensor  # packed token of each slot
    home_T: Tensor  # the slot in which a packed token's own query stands
    copied_C: Tensor | None = None  # packed tokens with further slots, those with most first
    further: tuple[Tensor, ...] = ()  # their second slots, third slots ...: each covers the first so many of copied_C

    @classmethod
    def of(cls, token_K: Tensor, home_T: Tensor) -> TokenLayout:
        """Make the layout of slots that hold these tokens, -1 for one that nobody reads.

        All other slots of a token return their gradient to it.
        """
        copied = token_K >= 0
        copied[home_T] = False
        slots = copied.nonzero()[:, 0]
        tokens, order = torch.sort(token_K[slots], stable=True)
        slots = slots[order]
        copied_C, number, count_C = torch.unique_consecutive(tokens, return_inverse=True, return_counts=True)
        most_first = torch.argsort(count_C, descending=True, stable=True)
        place_C = torch.argsort(most_first)
        nth = torch.arange(len(tokens)) - (count_C.cumsum(0) - count_C)[number]
        by_place = torch.argsort(nth * len(count_C) + place_C[number])  # all second slots, all third ones ...
        return cls(
            gather_K=token_K.clamp(min=0),
            home_T=home_T,
            copied_C=copied_C[most_first] if len(copied_C) else None,
            further=tuple(slots[by_place].split(torch.bincount(nth).tolist())) if len(copied_C) else (),
        )

    def spread(self, packed: Tensor) -> Tensor:
        """Copy packed tokens into their slots: [T, ...] -> [K, ...]. Home slots and `further` ones return gradient."""
        return _Spread.apply(packed, self)

    def collect(self, slots: Tensor) -> Tensor:
        """Read packed tokens from their home slots: [K, ...] -> [T, ...]."""
        return _Collect.apply(slots, self)

    def split(self, spot_KH: Tensor) -> TokenLayout:
        """Layout of (token, head) pairs: pair h of slot k stands in slot `spot_KH[k, h]`.

        Pairs are numbered head by head inside a token.
        """
        heads = spot_KH.shape[1]
        head, spots = torch.arange(heads, device=spot_KH.device), spot_KH.flatten()

        def pairs(tokens: Tensor) -> Tensor:
            return (tokens[:, None] * heads + head).flatten()

        gather = torch.empty_like(spots)
        gather[spots] = pairs(self.gather_K)
        return TokenLayout(
            gather_K=gather,
            home_T=spot_KH[self.home_T].flatten(),
            copied_C=None if self.copied_C is None else pairs(self.copied_C),
            further=tuple(spot_KH[slots].flatten() for slots in self.further),
        )

    def appended(self, count: int) -> TokenLayout:
        """Layout with `count` more packed tokens at the end, each with a slot of its own at the end."""
        more = torch.arange(count, device=self.gather_K.device)
        gather_K = torch.cat([self.gather_K, len(self.home_T) + more])
        return replace(self, gather_K=gather_K, home_T=torch.cat([self.home_T, len(self.gather_K) + more]))

    def to(self, device: torch.device) -> TokenLayout:
        """The layout on another device. The host waits for what comes to it, and not for what goes."""
        whole, ahead = [self.gather_K, self.home_T, *self.further], device.type != "cpu"
        gather_K, home_T, *further = (slots.to(device, non_blocking=ahead) for slots in whole)
        copied = None if self.copied_C is None else self.copied_C.to(device, non_blocking=ahead)
        return TokenLayout(gather_K=gather_K, home_T=home_T, copied_C=copied, further=tuple(further))


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, packed: Tensor, layout: TokenLayout) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.layout = layout
        return packed.index_select(0, layout.gather_K)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        layout: TokenLayout = ctx.layout
        result = grad.index_select(0, layout.home_T)
        if layout.copied_C is not None:
            total = result.index_select(0, layout.copied_C).to(_sum_dtype(grad))
            for slots in layout.further:
                total[: len(slots)] += grad.index_select(0, slots)
            result.index_copy_(0, layout.copied_C, total.to(grad.dtype))
        return result, None


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, slots: Tensor, layout: TokenLayout) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.layout, ctx.shape = layout, slots.shape
        return slots.index_select(0, layout.home_T)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad.new_zeros(ctx.shape).index_copy_(0, ctx.layout.home_T, grad), None


def _sum_dtype(grad: Tensor) -> torch.dtype:
    return torch.float64 if grad.dtype == torch.float64 else torch.float32


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Groups:
    """Layout of packed tokens for batched calls.

    `layout` is None where no token moves, and may be on any device: calls use `for_heads`.
    """

    shapes: tuple[tuple[int, int], ...]  # (count, width) of each group
    layout: TokenLayout | None
    by_heads: dict[int, TokenLayout | None] = field(default_factory=dict)  # `for_heads`, kept for the next layer

    def for_heads(self, heads: int, device: torch.device) -> TokenLayout | None:
        """Layout of (token, key-value head) pairs: in each group row by row, head by head, token by token."""
        if heads not in self.by_heads:
            layout = self.layout if heads == 1 else _whole(self.layout, self._num_slots()).split(self._spots(heads))
            self.by_heads[heads] = None if layout is None else layout.to(device)
        return self.by_heads[heads]

    def _num_slots(self) -> int:
        return sum(count * width for count, width in self.shapes)

    def _spots(self, heads: int) -> Tensor:
        """Slots of each slot's pair with each head: [K, heads]."""
        spots, start = [], 0
        for count, width in self.shapes:
            size = count * width * heads
            spots.append(torch.arange(start, start + size).view(count, heads, width).transpose(1, 2).reshape(-1, heads))
            start += size
        return torch.cat(spots)

    def lay_out(self, packed: Tensor, heads: int) -> tuple[Tensor, ...]:
        """Lay out [1, r * heads, T, D] as one [count * heads, width * r, D] a group.

        A token's r queries of one key-value head stand together.
        """
        tokens = packed.squeeze(0).transpose(0, 1)  # [T, heads * r, D], contiguous as models compute it
        repeats, dim = tokens.shape[1] // heads, tokens.shape[2]
        rows, layout = tokens.reshape(-1, repeats * dim), self.for_heads(heads, packed.device)
        if layout is not None:
            rows = layout.spread(rows)
        parts = rows.split([count * width * heads for count, width in self.shapes])
        pairs = zip(parts, self.shapes, strict=True)
        return tuple(part.view(count * heads, width * repeats, dim) for part, (count, width) in pairs)

    def join(self, outputs: list[Tensor], heads: int, repeats: int) -> Tensor:
        """Join the outputs of the groups, the way back: [count * heads, width * r, D] each -> [T, heads * r, D]."""
        dim = outputs[0].shape[-1]
        rows = [output.reshape(-1, repeats * dim) for output in outputs]
        joined, layout = rows[0] if len(rows) == 1 else torch.cat(rows), self.for_heads(heads, outputs[0].device)
        return (joined if layout is None else layout.collect(joined)).view(-1, heads * repeats, dim)


def _whole(layout: TokenLayout | None, num_slots: int) -> TokenLayout:
    """Return the layout on the CPU; without one every token has the slot of its own number."""
    number = torch.arange(num_slots)
    return TokenLayout(gather_K=number, home_T=number) if layout is None else layout.to(torch.device("cpu"))
