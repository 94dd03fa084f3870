"""Bytes that the axes of a mesh send: counted by their groups as a step runs, and the least that each axis needs.

Counted is what a ring has to send for a collective, whatever the backend does: a gather of W bytes by n ranks has each
send W (n-1) / n. The least is computed from shapes and placements alone: without fill-up, counts, flags and answers.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from verl_like.engine.fsdp import FSDPEngine
from verl_like.kit.bench.meters import group_of, place
from verl_like.kit.forecast.traffic import of_tokens, of_weights
from verl_like.models.cost import ModelCost
from verl_like.models.memory import Shape
from verl_like.parallel.context import ContextRanks
from verl_like.parallel.mesh import ParallelMesh
from verl_like.parallel.sharding import local_tensor


class Wires(TorchDispatchMode):
    """Meter of the bytes that this rank sends inside, by the group's name and the trainer's file.

    Operations run as they are.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sent: Counter[tuple[str, str]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor | AsyncCollectiveTensor) for kind in types):
            return NotImplemented  # it comes again with the tensors inside
        group = group_of(func, tree_leaves([*args, *(kwargs or {}).values()]))
        if group is not None:
            file = place(sys._getframe(1)).partition(":")[0]
            self.sent[group.group_name, file] += sent_bytes(func._schema.name, args, group.size(), group.rank())
        return func(*args, **(kwargs or {}))


def sent_bytes(name: str, args: Any, size: int, rank: int) -> int:
    """Count the bytes that rank `rank` of `size` sends for an operator of torch's c10d library.

    args: its arguments, results first. Raises NotImplementedError for an operator that is not known.
    """
    nbytes = [sum(part.nbytes for part in tree_leaves([arg]) if isinstance(part, Tensor)) for arg in args[:2]]
    match name.partition("::")[2]:
        case "_allgather_base_" | "allgather_" | "all_gather_single_":
            return nbytes[1] * (size - 1)
        case "_reduce_scatter_base_" | "reduce_scatter_single_":
            return nbytes[0] * (size - 1)
        case "allreduce_" | "all_reduce":  # scattered sums, then gathered
            return 2 * nbytes[0] * (size - 1) // size
        case "broadcast_":
            return nbytes[0] * (size - 1) // size  # handed on in pieces: all ranks but the last send
        case "alltoall_base_":
            to_each, sent = args[4], args[1]
            return nbytes[1] - (sent[0].nbytes * to_each[rank] if to_each and len(sent) else nbytes[1] // size)
        case "send":
            return nbytes[0]
        case "recv_" | "barrier":
            return 0
    raise NotImplementedError(f"{name}: what a rank sends for it is not known")


def by_axis(sent: Mapping[tuple[str, str], int], mesh: ParallelMesh) -> Counter[str]:
    """Add up what `Wires` counted by the mesh's axes, and what is none's: flags and metrics.

    An axis over all ranks may share its group with FSDP's, as DeviceMesh makes them: then the file tells them apart.
    """
    splits, slices, pipe = [axis for axis in (mesh.tensor, mesh.expert) if axis is not None], mesh.slices, mesh.pipe
    meshes = [mesh.root, *(axis.shards for axis in splits)]
    named: list[tuple[Any, str]] = [
        (each.get_group(name), name) for each in meshes for name in each.mesh_dim_names or ()
    ]
    named += [(axis.group.group, axis.name) for axis in splits]
    if isinstance(slices, ContextRanks):
        named += [(slices.group, "context"), (slices.context.group, "context")]
        named += [(slices.heads.group, "ulysses")] if slices.heads is not None else []
    elif slices is not None:
        named.append((slices.group, "ulysses"))
    if pipe is not None:  # its ends are a group of two alone
        named += [(group, "pipe") for group in (pipe.group, *pipe.forth, *pipe.back, pipe.ends)]
    axes = {group.group_name: name for group, name in reversed(named) if isinstance(group, dist.ProcessGroup)}
    files = {"parallel/tensor.py": "tensor", "parallel/experts.py": "expert"}
    if mesh.tensor is not None:
        files["parallel/ulysses.py"] = "tensor"  # answers of its rows' tokens are joined there
    found = Counter[str]()
    for (group, file), nbytes in sent.items():
        found[files.get(file) or axes.get(group, "none")] += nbytes
    return found


def least_bytes(engine: FSDPEngine, micro_batches: int, tokens: float, elsewhere: int) -> dict[str, float]:
    """Compute this rank's share of the least bytes of each axis for one update, forward and backward passes.

    Activations are kept, and travel in the compute precision.

    tokens: computed ones, divided by the ranks that have the same rows.
    elsewhere: pairs of a token and an expert that another rank holds.
    """
    mesh, c = engine.sharding.mesh, engine.compute_dtype.itemsize
    shape = Shape.of(engine.hf_config, ModelCost.of(engine.hf_config))
    borders, chosen = mesh.sizes.pipe * mesh.sizes.virtual - 1, elsewhere / tokens / shape.layers
    found = {"shard": 0.0, "replicate": 0.0} | of_tokens(shape, mesh.sizes, c, tokens, chosen=chosen, borders=borders)
    for name, parameter in engine.sharding.root.named_parameters():
        ranks, held = mesh.sharded_over(parameter)["shard"].size(), local_tensor(parameter).numel()
        layers = ".layers." in name
        sent = of_weights(held, ranks, mesh.sizes, engine.role.fsdp, c, micro_batches, layers=layers)
        found = {axis: nbytes + sent.get(axis, 0.0) for axis, nbytes in found.items()}
    return found
