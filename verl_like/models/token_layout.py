"""Packed tokens laid out in slots: moved, and where a prompt is shared, present once for each row that reads it.

The rows of a GRPO group answer one prompt. Packed, that prompt is there once, so every linear layer computes it once;
attention alone needs its keys and values in front of each response. A layout copies them there, and adds up what comes
back in the backward pass: in float32 and always in the same order, by gathers alone, so that a gradient does not depend
on how a device orders atomic additions.

Letters: T packed tokens, K slots, C tokens that have more than one slot.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenLayout:
    """Which packed token each slot holds. A slot of padding repeats some token; nothing that is read comes from it."""

    gather_K: Tensor  # packed token of each slot
    home_T: Tensor  # the slot in which a packed token's own query stands
    copied_C: Tensor | None = None  # packed tokens with further slots, those with most first
    further: tuple[Tensor, ...] = ()  # their second slots, third slots ...: each covers the first so many of copied_C

    def spread(self, packed: Tensor, *, queries: bool = False) -> Tensor:
        """[T, ...] -> [K, ...]. `queries`: only home slots are read afterwards, so that only they return gradient."""
        return _Spread.apply(packed, self, not queries)

    def collect(self, slots: Tensor) -> Tensor:
        """[K, ...] -> [T, ...], from the home slots."""
        return _Collect.apply(slots, self)

    def moved(self, slot_K: Tensor, gather_P: Tensor) -> TokenLayout:
        """The same tokens in another order of slots: slot k becomes slot `slot_K[k]`; `gather_P` as `gather_K`."""
        further = tuple(slot_K[slots] for slots in self.further)
        return TokenLayout(gather_K=gather_P, home_T=slot_K[self.home_T], copied_C=self.copied_C, further=further)

    def split(self, spot_KH: Tensor) -> TokenLayout:
        """The layout of (token, head) pairs, numbered head by head inside a token: pair h of slot k stands in slot
        `spot_KH[k, h]`."""
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
        """The same with `count` more packed tokens at the end, each with a slot of its own at the end."""
        more = torch.arange(count, device=self.gather_K.device)
        return TokenLayout(
            gather_K=torch.cat([self.gather_K, len(self.home_T) + more]),
            home_T=torch.cat([self.home_T, len(self.gather_K) + more]),
            copied_C=self.copied_C,
            further=self.further,
        )

    def to(self, device: torch.device) -> TokenLayout:
        """The layout on another device."""
        return TokenLayout(
            gather_K=self.gather_K.to(device),
            home_T=self.home_T.to(device),
            copied_C=None if self.copied_C is None else self.copied_C.to(device),
            further=tuple(slots.to(device) for slots in self.further),
        )


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, packed: Tensor, layout: TokenLayout, add_copies: bool) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.layout, ctx.add_copies = layout, add_copies
        return packed.index_select(0, layout.gather_K)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        layout: TokenLayout = ctx.layout
        result = grad.index_select(0, layout.home_T)
        if ctx.add_copies and layout.copied_C is not None:
            total = result.index_select(0, layout.copied_C).to(_sum_dtype(grad))
            for slots in layout.further:
                total[: len(slots)] += grad.index_select(0, slots)
            result.index_copy_(0, layout.copied_C, total.to(grad.dtype))
        return result, None, None


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
