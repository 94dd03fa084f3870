"""Bytes that one rank sends in an update of the actor, by axis of the mesh: formulas, from the models' shapes.

Of rings and exchanges between n ranks each sends (n - 1) / n of what all have in the end. Weights and activations
travel in the precision of the passes, gradients in that of their reduction.
"""

from __future__ import annotations

from verl_like.config import FSDPConfig
from verl_like.config.mesh import MeshSizes
from verl_like.config.roles import RoleConfig
from verl_like.kit.forecast.memory import SIZES, Machine, model_of
from verl_like.models.memory import Shape


def by_axis(role: RoleConfig, shape: Shape, machine: Machine, tokens: int, count: int) -> dict[str, float]:
    """Compute the bytes that a rank in the middle of its axes sends in one update, by axis that has several ranks.

    Args:
        role: the actor.
        shape: its shape.
        machine: number of ranks.
        tokens: that a rank has of a micro-batch.
        count: micro-batches.
    """
    mesh, model = role.mesh(machine.world), model_of(role, shape, machine, machine.world)
    stage, c = model.shape, model.path.c
    borders = mesh.virtual - (mesh.pipe == 2) / 2  # of two stages each has one end less
    chosen, again = stage.chosen * _share(mesh.expert), model.path.recompute == "full"
    found = of_tokens(stage, mesh, c, count * tokens, chosen=chosen, borders=borders, again=again)
    experts = min(stage.expert_weights, stage.layer_weights) * stage.layers
    others = stage.all_weights - stage.root_weights - experts
    for numbers, split in ((stage.root_weights, 0), (others, mesh.tensor), (experts, mesh.expert)):
        held, ranks = numbers / model.shards, model.shards // max(1, split)
        sent = of_weights(held, ranks, mesh, role.fsdp, c, count, layers=split > 0)
        found |= {axis: found.get(axis, 0.0) + nbytes for axis, nbytes in sent.items()}
    return {axis: nbytes for axis, nbytes in found.items() if nbytes}


def of_tokens(
    shape: Shape, mesh: MeshSizes, c: int, tokens: float, *, chosen: float, borders: float, again: bool = False
) -> dict[str, float]:
    """Compute what a rank sends of activations, forth and back, by axis.

    Args:
        shape: the rank's own stage.
        mesh: sizes of the axes.
        c: bytes of a number.
        tokens: that the rank has, of its slice of rows, over all micro-batches.
        chosen: experts of other ranks that a token visits in a layer.
        borders: between pieces of stages, that the rank passes.
        again: a layer is computed again before its backward pass, with all that it receives; sums that it ends with
            are not.
    """
    hidden = c * tokens * shape.hidden
    through = (2 + again) * c * tokens * shape.layers
    return {
        # A token's queries, keys and values go to the owners of their heads, and its answers come back; 1 / n stay.
        "ulysses": through * 2 * (shape.queries + shape.keys) * _share(mesh.ulysses),
        # A token's keys and values go to every other rank, in a ring or a gather alike.
        "context": through * 2 * shape.keys * (mesh.context - 1),
        # Attention and the MLP begin with a gather of the tokens and end with a sum of parts; each rank keeps its own.
        "tensor": (8 + 3 * again) * shape.layers * hidden * (mesh.tensor - 1),
        # A copy of the token for each chosen expert that lives elsewhere, there and back.
        "expert": 2 * through * shape.hidden * chosen,
        "pipe": 2 * hidden * borders if mesh.pipe > 1 else 0.0,
    }


def of_weights(
    held: float, ranks: int, mesh: MeshSizes, fsdp: FSDPConfig, c: int, count: int, *, layers: bool
) -> dict[str, float]:
    """Compute what a rank sends for the weights that it holds `held` numbers of: {"shard": bytes, "replicate": bytes}.

    ZeRO-3 gathers a layer's weights for each forward pass and again for the backward pass, the root's once for both,
    and scatters the sums of gradients; copies then add up their shards. Where weights stay gathered: once an update.

    ranks: that share the weights; c: bytes of a gathered number; count: micro-batches; layers: they are the layers'.
    """
    passes = count if fsdp.reshard_after_forward else 1
    gathers = 2 * passes if layers and fsdp.reshard_after_forward else passes
    sums = SIZES[fsdp.mixed_precision.reduce_dtype] * (count if fsdp.sync_every_micro_batch else 1)
    shard, copies = held * (ranks - 1) * (gathers * c + sums), 2 * held * sums * _share(mesh.replicate)
    return {"shard": shard, "replicate": copies}


def bubble(stages: int, count: int, pieces: int = 1, *, late: bool = False) -> float:
    """The least share for `count` equal micro-batches, of GPipe and 1F1B alike, whose stages have so many pieces each.

    A stage works at all of them with each piece; the first waits for the last one's first pass to come back, the last
    for its first to arrive: (stages - 1) passes of (pieces x count + stages - 1). Fewer micro-batches than stages leave
    a stage waiting between two pieces as well. Sources: Huang et al., GPipe (arXiv 1811.06965), section 2.3; Narayanan
    et al., Megatron-LM (arXiv 2104.04473), section 2.2.

    late: the gradients of weights have passes of their own, which fill what is left of a wait when backward passes of
    two parts out of three begin. All three kinds take a slot each, and (stages - 1) are idle of (3 x pieces x count +
    stages - 1), where micro-batches are no fewer than stages. Source: Qi et al. (arXiv 2401.10241), section 2.2.
    """
    waits = stages - 1 + (pieces - 1 + late) * max(0, stages - count)
    return waits / ((3 if late else 1) * pieces * count + waits)


def _share(ranks: int) -> float:
    return (ranks - 1) / ranks
