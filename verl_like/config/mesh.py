"""Sizes of one model's mesh of processes: the one place where they are multiplied and divided.

    axis        neighbouring processes that
    replicate   hold a copy of the model each: gradients are added up between copies
    shard       share one copy, by FSDP
    context     share a row: each has chunks of its tokens, with all heads
    ulysses     share those chunks: each has a slice of their tokens, and in attention of the heads. Both cut rows, not
                weights: to FSDP they are processes of `shard`, or of several copies
    tensor      split every matrix, and each row's tokens
    expert      hold a part of the experts each; borrowed from `shard`, of which the experts' own is what is left
    pipe        hold the layers of one stage each, and pass the same rows on to each other

The last axis are the nearest neighbours. parallel/mesh.py makes groups of processes of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

NAMES = {
    "copy": "fsdp_size",
    "context": "context_parallel_size",
    "ulysses": "ulysses_sequence_parallel_size",
    "slices": "context_parallel_size x ulysses_sequence_parallel_size",
    "tensor": "tensor_parallel_size",
    "expert": "expert_parallel_size",
    "pipe": "pipeline_parallel_size",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshSizes:
    """Sizes of one mesh, in processes.

    world: all of them. fsdp_size: those that hold one copy of the model together; below 1 or above world, all.
    copies: of the model, where that is what is known; else 0.
    virtual: pieces of layers of one stage of `pipe`, no processes.
    """

    world: int
    fsdp_size: int = -1
    copies: int = 0
    context: int = 1
    ulysses: int = 1
    tensor: int = 1
    expert: int = 1
    pipe: int = 1
    virtual: int = 1

    @property
    def copy(self) -> int:
        """Processes with one copy of the model."""
        if self.copies:
            return max(1, self.world // self.copies)
        return self.fsdp_size if 0 < self.fsdp_size < self.world else self.world

    @property
    def stage(self) -> int:
        """Processes of one copy that hold the same stage of its layers: all of them where there are no stages."""
        return max(1, self.copy // self.pipe)

    def beside(self, axis: str) -> int:
        """Count the processes with the same stage that `axis` must divide: parts of rows are shared across copies."""
        return (self.world if axis == "slices" else self.copy) // self.pipe

    @property
    def replicate(self) -> int:
        """Copies of the model."""
        return max(1, self.world // self.copy)

    @property
    def slices(self) -> int:
        """Neighbouring processes that have a part of their rows' tokens each."""
        return self.context * self.ulysses

    @property
    def parts_of_row(self) -> int:
        """Neighbouring processes that have a part each of what a layer makes of their rows."""
        return self.slices * self.tensor

    @property
    def ranks_per_row(self) -> int:
        """Neighbouring processes that get the same rows."""
        return self.parts_of_row * self.pipe

    @property
    def together(self) -> int:
        """The fewest processes that these axes can have."""
        return math.lcm(self.ranks_per_row, self.expert * self.pipe)

    @property
    def data_parallel(self) -> int:
        """Groups of processes that get rows of their own."""
        return max(1, self.world // self.ranks_per_row)

    def weights(self, split: int = 1) -> dict[str, int]:
        """Axes, outer ones first, over which FSDP shards weights that are split over `split` processes before."""
        axes = {"replicate": self.replicate} if self.replicate > 1 else {}
        return axes | {"shard": self.stage // split}

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (axis, what its size does not divide); nothing where all fits.

        What: "world", "copy", or, where stages alone would fit, "stage".
        """
        for axis in ("context", "ulysses", "tensor", "pipe"):
            if self.world % getattr(self, axis):
                yield axis, "world"
        if self.world % self.slices and not self.world % self.context and not self.world % self.ulysses:
            yield "slices", "world"
        if self.world % self.copy:
            yield "copy", "world"
        for axis in ("tensor", "expert", "pipe"):
            if self.copy % getattr(self, axis) and not (axis != "expert" and self.copy == self.world):
                yield axis, "copy"
        if self.pipe > 1 and not self.copy % self.pipe:
            for axis in ("slices", "tensor", "expert"):
                size, beside = getattr(self, axis), self.beside(axis)
                if beside % size and not beside * self.pipe % size:
                    yield axis, "stage"


def tokens_together(tokens: int, slices: int) -> int:
    """Tokens of the rows that `slices` processes share, where each may have `tokens`."""
    return tokens * slices


def tokens_apart(tokens: int, slices: int) -> int:
    """Tokens that each of `slices` processes has of so many, at most."""
    return -(-tokens // slices)
