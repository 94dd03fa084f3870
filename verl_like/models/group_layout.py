"""Where packed tokens stand in batched attention calls of rows of similar length."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from verl_like.models.token_layout import TokenLayout


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Groups:
    """How packed tokens are laid out for batched calls. `layout` is None where no token moves, and on any device: what
    is used is `for_heads`."""

    shapes: tuple[tuple[int, int], ...]  # (count, width) of each group
    layout: TokenLayout | None
    by_heads: dict[int, TokenLayout | None] = field(default_factory=dict)  # `for_heads`, kept for the next layer

    def for_heads(self, heads: int, device: torch.device) -> TokenLayout | None:
        """The layout of (token, key-value head) pairs: in each group row by row, head by head, token by token."""
        if heads not in self.by_heads:
            layout = self.layout if heads == 1 else _whole(self.layout, self._num_slots()).split(self._spots(heads))
            self.by_heads[heads] = None if layout is None else layout.to(device)
        return self.by_heads[heads]

    def _num_slots(self) -> int:
        return sum(count * width for count, width in self.shapes)

    def _spots(self, heads: int) -> Tensor:
        """[K, heads]: where each slot's pair with each head stands."""
        spots, start = [], 0
        for count, width in self.shapes:
            size = count * width * heads
            spots.append(torch.arange(start, start + size).view(count, heads, width).transpose(1, 2).reshape(-1, heads))
            start += size
        return torch.cat(spots)

    def lay_out(self, packed: Tensor, heads: int, *, queries: bool = False) -> tuple[Tensor, ...]:
        """[1, r * heads, T, D] -> one [count * heads, width * r, D] a group: a token's r queries of one key-value head
        stand together."""
        tokens = packed[0].transpose(0, 1)  # [T, heads * r, D], contiguous as models compute it
        repeats, dim = tokens.shape[1] // heads, tokens.shape[2]
        rows, layout = tokens.reshape(-1, repeats * dim), self.for_heads(heads, packed.device)
        if layout is not None:
            rows = layout.spread(rows, queries=queries)
        parts = rows.split([count * width * heads for count, width in self.shapes])
        pairs = zip(parts, self.shapes, strict=True)
        return tuple(part.view(count * heads, width * repeats, dim) for part, (count, width) in pairs)

    def join(self, outputs: list[Tensor], heads: int, repeats: int) -> Tensor:
        """The way back: [count * heads, width * r, D] each -> [T, heads * r, D]."""
        dim = outputs[0].shape[-1]
        rows = [output.reshape(-1, repeats * dim) for output in outputs]
        joined, layout = rows[0] if len(rows) == 1 else torch.cat(rows), self.for_heads(heads, outputs[0].device)
        return (joined if layout is None else layout.collect(joined)).view(-1, heads * repeats, dim)


def _whole(layout: TokenLayout | None, num_slots: int) -> TokenLayout:
    """The layout on the CPU; without one every token has the slot of its own number."""
    number = torch.arange(num_slots)
    return TokenLayout(gather_K=number, home_T=number) if layout is None else layout.to(torch.device("cpu"))
