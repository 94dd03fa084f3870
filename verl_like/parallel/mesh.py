"""One mesh of ranks: every group, coordinate and data-parallel size of a model's training comes from here.

config/mesh.py says what the axes are. What is to be done with a weight follows from the mesh that it is on: FSDP shards
it over `root`, or, where it is split before (`SplitAxis`), over the ranks that hold the same part.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from verl_like.config.mesh import NAMES, MeshSizes
from verl_like.parallel.context import ContextRanks
from verl_like.parallel.pipeline import Pipe
from verl_like.parallel.ulysses import SequenceRanks

SENT_AT_ONCE = 2**26  # bytes


class SplitAxis:
    """Axis along which some weights are split before FSDP shards the parts: "tensor" or "expert".

    shards: the other axes, over which FSDP shards a part: the ranks that hold the same one.
    group: the ranks that hold different parts of one weight.
    first: the first of them, by its number among all ranks.
    """

    def __init__(self, whole: DeviceMesh, name: str) -> None:
        self.name, self._ranks = name, whole[name]
        self.shards = whole[tuple(whole.mesh_dim_names or ())[:-1]]
        self.group = SequenceRanks(
            group=self._ranks.get_group(), size=self._ranks.size(), rank=self._ranks.get_local_rank()
        )
        self.first = int(self._ranks.mesh[0])

    def holds(self, tensor: Tensor) -> bool:
        """True for a weight that is split along this axis, and sharded."""
        return isinstance(tensor, DTensor) and (tensor.device_mesh.mesh_dim_names or ("",))[-1] == self.name

    def split(self, whole: Tensor, dim: int, *, requires_grad: bool) -> nn.Parameter:
        """Make a parameter of this rank's part of a tensor that every rank of the axis has whole."""
        if whole.shape[dim] % self.group.size:
            raise ValueError(f"a weight of shape {tuple(whole.shape)} cannot be split into {self.group.size} parts")
        mine = whole.detach().chunk(self.group.size, dim)[self.group.rank].clone(memory_format=torch.contiguous_format)
        return self.parameter(mine, dim, requires_grad=requires_grad)

    def parameter(self, mine: Tensor, dim: int, *, requires_grad: bool) -> nn.Parameter:
        """Make a parameter of this rank's part of a tensor."""
        return nn.Parameter(DTensor.from_local(mine, self._ranks, [Shard(dim)], run_check=False), requires_grad)

    def dimension(self, tensor: Tensor) -> int:
        """Dimension along which a weight that is also sharded is split."""
        assert isinstance(tensor, DTensor)
        (split,) = tensor.placements[self.shards.ndim :]
        assert isinstance(split, Shard)
        return split.dim

    def own_part(self, tensor: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
        """Gather this rank's part of a weight (or its gradient), cast before it travels (collective)."""
        assert isinstance(tensor, DTensor)
        shape, dim = list(tensor.shape), self.dimension(tensor)
        shape[dim] //= self.group.size
        local = tensor.to_local().detach().to(device=device, dtype=dtype)
        spread = [Replicate()] * (self.shards.ndim - 1) + [Shard(0)]  # shards are rows of the part
        stride = torch.empty(shape, device="meta").stride()
        mine = DTensor.from_local(local, self.shards, spread, run_check=False, shape=torch.Size(shape), stride=stride)
        return mine.full_tensor().contiguous()

    def joined(self, tensor: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
        """Join a split weight (or its gradient) in full, cast before it travels (collective)."""
        part, split = self.own_part(tensor, device, dtype), [Shard(self.dimension(tensor))]
        return DTensor.from_local(part, self._ranks, split, run_check=False).full_tensor()

    def parts(self, tensor: Tensor, device: torch.device, dtype: torch.dtype) -> Iterator[Tensor]:
        """Yield the rows of a weight that is split by rows, in their order, some at a time, from their owners.

        Collective. A rank holds its own part, and SENT_AT_ONCE bytes (or a row) of another's.
        """
        own, rows = self.own_part(tensor, device, dtype), self.sent_rows(tensor.shape, dtype)
        for owner, many in enumerate([rows[: len(rows) // self.group.size]] * self.group.size):
            for mine in own.split(many):
                part = mine if owner == self.group.rank else torch.empty_like(mine)
                dist.broadcast(part, group=self.group.group, group_src=owner)
                yield part

    def sent_rows(self, shape: torch.Size, dtype: torch.dtype) -> list[int]:
        """Count the rows of each tensor that `parts` yields of a weight of this shape."""
        most, own = max(1, SENT_AT_ONCE // (dtype.itemsize * shape[1:].numel())), shape[0] // self.group.size
        return [min(most, own - first) for first in range(0, own, most)] * self.group.size


class ParallelMesh:
    """Groups of ranks of one model (collective: all ranks build it, from the same sizes).

    root: the mesh over which FSDP shards weights that are not split before.
    tensor, expert: axes of weights that are; None where their size is 1.
    slices: ranks that share a row by its tokens (Ulysses, context parallelism); None where there is one.
    pipe: ranks that hold a stage of the layers each; None where there is one. `root` is then this stage's.

    Raises ValueError, naming the keys, where the sizes do not divide the ranks.
    """

    def __init__(self, sizes: MeshSizes, device: torch.device) -> None:
        for axis, total in sizes.problems():
            whole = {"world": f"{sizes.world} ranks", "copy": f"{NAMES['copy']}={sizes.copy}"}
            each = whole.get(total, f"{sizes.beside(axis)} ranks with the same stage")
            raise ValueError(f"{NAMES[axis]}={getattr(sizes, axis)} does not divide the {each}")
        self.sizes, self.rank, self._device = sizes, dist.get_rank(), device
        self.root = self._mesh(sizes.weights())
        self.tensor, self.expert = self._split("tensor", sizes.tensor), self._split("expert", sizes.expert)
        self.slices = self._slices(sizes.context, sizes.ulysses)
        self.pipe = None if sizes.pipe == 1 else self._pipe()

    @property
    def layers(self) -> DeviceMesh:
        """Mesh over which FSDP shards a layer's weights, but for experts."""
        return self.root if self.tensor is None else self.tensor.shards

    @property
    def rows(self) -> SequenceRanks | None:
        """Ranks that share their rows."""
        return self.slices if self.tensor is None else self.tensor.group

    def split_of(self, tensor: Tensor) -> SplitAxis | None:
        """Axis that a sharded weight is split along."""
        return next((axis for axis in (self.tensor, self.expert) if axis is not None and axis.holds(tensor)), None)

    def sharded_over(self, tensor: Tensor) -> DeviceMesh:
        """Mesh that a weight, or its part, is sharded over by FSDP."""
        split = self.split_of(tensor)
        if split is not None:
            return split.shards
        assert isinstance(tensor, DTensor)
        return self.root if tensor.device_mesh == self.root else self.layers

    def group_of_copy(self) -> dist.ProcessGroup:
        """Ranks that hold one copy of the model together."""
        return self.root.get_group("shard")

    def _split(self, name: str, size: int) -> SplitAxis | None:
        return None if size == 1 else SplitAxis(self._mesh(self.sizes.weights(size) | {name: size}), name)

    def _mesh(self, axes: dict[str, int]) -> DeviceMesh:
        """Mesh of the ranks that hold the same stage: neighbours hold different ones."""
        every = axes if self.sizes.pipe == 1 else axes | {"pipe": self.sizes.pipe}
        mesh = init_device_mesh(self._device.type, tuple(every.values()), mesh_dim_names=tuple(every))
        return mesh if every is axes else mesh[tuple(axes)]

    def _pipe(self) -> Pipe:
        every, *ways = (self._neighbours(self.sizes.pipe) for _ in range(3 if self.sizes.virtual == 1 else 5))
        groups = [ranks.group for ranks in ways]
        firsts = range(0, self.sizes.world, self.sizes.pipe)
        ends = [dist.new_group([first, first + self.sizes.pipe - 1]) for first in firsts]
        return Pipe(every, ends[self.rank // self.sizes.pipe], groups[::2], groups[1::2], self.sizes.virtual)

    def _slices(self, context: int, ulysses: int) -> SequenceRanks | None:
        if self.sizes.slices == 1:
            return None
        apart = self.sizes.pipe  # of the same stage
        every = self._neighbours(self.sizes.slices, apart)
        if context == 1:
            return every
        heads = None if ulysses == 1 else self._neighbours(ulysses, apart)
        chunks = every if heads is None else self._neighbours(context, ulysses, apart)
        return ContextRanks(group=every.group, size=every.size, rank=every.rank, context=chunks, heads=heads)

    def _neighbours(self, size: int, *inner: int) -> SequenceRanks:
        """Group this rank with those that stand as far apart as the axes inside of this one take, `size` of them."""
        stride = math.prod(inner)
        span, groups = size * stride, list[Any]()
        for first in (start + i for start in range(0, self.sizes.world, span) for i in range(stride)):
            groups.append(dist.new_group(list(range(first, first + span, stride))))
        own = self.rank // span * stride + self.rank % stride
        return SequenceRanks(group=groups[own], size=size, rank=self.rank % span // stride)
