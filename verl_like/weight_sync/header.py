"""What goes before a stream of weights: it tells the receiver what will come, and what it must hold afterwards."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from verl_like.engine.train_engine import WeightForm


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """Of one update. shapes: every tensor of the stream. checksums: of the same tensors in `dtype`, computed from the
    trainer's shards before anything is gathered; None where the sync is not proved."""

    version: int
    form: WeightForm
    dtype: torch.dtype
    shapes: dict[str, torch.Size]
    checksums: dict[str, int] | None

    def num_changed(self, before: Header | None) -> int | None:
        """How many tensors are others than in an earlier update; None where that did not have them all."""
        earlier = {} if before is None else before.checksums or {}
        if self.checksums is None or not self.checksums.keys() <= earlier.keys():
            return None
        return sum(earlier[name] != number for name, number in self.checksums.items())
