"""Bytes that one rank sends in an update of the actor, by axis of the mesh: formulas, from the models' shapes.

Of rings and exchanges between n ranks each sends (n - 1) / n of what all have in the end. Weights and activations
travel in the precision of the passes, gradients in that of their reduction. What copies of the model (`fsdp_size`),
Ulysses and context parallelism send is not counted.
"""

from __future__ import annotations

from verl_like.config.roles import RoleConfig
from verl_like.kit.forecast.memory import SIZES, Machine, model_of
from verl_like.models.memory import Shape


def by_axis(
    role: RoleConfig, shape: Shape, machine: Machine, tokens: int, count: int, chosen: int = 0
) -> dict[str, float]:
    """Compute the bytes that a rank in the middle of its axes sends in one update, by axis that has several ranks.

    Args:
        role: the actor.
        shape: its shape.
        machine: number of ranks.
        tokens: that a rank has of a micro-batch.
        count: micro-batches.
        chosen: experts that a token visits in each layer.
    """
    mesh, model = role.mesh(machine.world), model_of(role, shape, machine, machine.world)
    stage, c, reduced = model.shape, model.path.c, SIZES[role.fsdp.mixed_precision.reduce_dtype]
    again = model.path.recompute == "full"  # what a layer receives comes again before its backward pass
    hidden = float(c * tokens * stage.hidden)
    experts = min(stage.expert_weights, stage.layer_weights) * stage.layers
    others = stage.all_weights - stage.root_weights - experts
    gathers = 2 if role.fsdp.reshard_after_forward else 1
    root, layers = (n * c + reduced for n in (1, gathers))
    weights = (root * stage.root_weights + layers * others / mesh.tensor) * _share(model.shards // mesh.tensor)
    weights += layers * experts / mesh.expert * _share(model.shards // mesh.expert)
    found = {"shard": weights * count} if weights else {}
    if mesh.expert > 1:  # to the experts and back, and their gradients
        found["expert"] = count * (4 + 2 * again) * stage.layers * chosen * hidden * _share(mesh.expert)
    if mesh.tensor > 1:  # attention and MLP each gather tokens and scatter sums; no last sum again; then the head
        times = (8 + 3 * again) * stage.layers + 2
        found["tensor"] = count * times * mesh.tensor * hidden * _share(mesh.tensor)
    if mesh.pipe > 1:  # on to the next stage's piece, gradients to the one before; of two stages each has one end less
        found["pipe"] = count * (2 * mesh.virtual - (mesh.pipe == 2)) * hidden
    return found


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
