"""Header before a stream of weights: it tells the receiver what will come, and what it must hold afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256

import torch

from verl_like.engine.train_engine import WeightChanges, WeightForm
from verl_like.rollout.rollout_engine import HeldWeights
from verl_like.weight_sync.probe import ProbeText


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Requirements of a receiver, told before anything is sent. held: see RolloutEngine. Picklable."""

    dtype: torch.dtype
    keeps_adapters: bool
    tokenizer_size: int
    max_model_len: int
    held: HeldWeights | None

    @classmethod
    def of_all(cls, receivers: Sequence[Wanted]) -> Wanted:
        """Requirements on one stream for all of them: a whole stream unless all hold the same.

        Raises ValueError when they are engines of different kinds.
        """
        first = receivers[0]
        kinds = {(w.dtype, w.keeps_adapters, w.tokenizer_size, w.max_model_len) for w in receivers}
        if len(kinds) > 1:
            raise ValueError(f"rollout engines of one run want different weights: {sorted(map(str, kinds))}")
        return replace(first, held=first.held if all(other.held == first.held for other in receivers) else None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """Header of one update.

    Args:
        shapes: of every tensor of the stream.
        checksums: of the same tensors in `dtype`, computed from the trainer's shards before anything is gathered; None
            where the sync is not proved.
        probe: the probe's tokens with the trainer's log-probs of them; None where the sync is not proved.
        trainer_dtype: the dtype that the trainer computes in.
        changes: the trainer's count of its updates.
        base: the mark of the weights that adapters alone are put on.
        mark: of the weights that the receiver then holds.
    """

    version: int
    form: WeightForm
    dtype: torch.dtype
    shapes: dict[str, torch.Size]
    checksums: dict[str, int] | None
    probe: ProbeText | None = None
    trainer_dtype: torch.dtype = torch.float32
    changes: WeightChanges = field(default_factory=WeightChanges)
    base: str = ""
    mark: str = ""

    def num_changed(self, before: Header | None) -> int | None:
        """Number of tensors that differ from an earlier update's; None where checksums of any of them are missing."""
        earlier = {} if before is None else before.checksums or {}
        if self.checksums is None or not self.checksums.keys() <= earlier.keys():
            return None
        return sum(earlier[name] != number for name, number in self.checksums.items())


def mark_of(checksums: dict[str, int], dtype: torch.dtype, base: str) -> str:
    """A name for weights by what they are: the same for the same numbers on the same base."""
    return sha256(repr((base, str(dtype), sorted(checksums.items()))).encode()).hexdigest()[:16]
