"""Memory of one model on one rank, by phase: what stays, and the largest moment of a pass and of an update."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from verl_like.config import FSDPConfig
from verl_like.config.roles import ACTOR
from verl_like.models import memory
from verl_like.parallel.pipeline import passes_ahead


@dataclass(frozen=True, slots=True)
class Late:
    """Bytes of gradients that are computed apart from the backward pass, on one stage, at the last backward pass.

    part: what a layer keeps of one micro-batch; layers: that keep it in one pass; kept: by the passes before.
    missing: of the sums, which come in the weights' passes. input: of the part what is else freed in the layer's pass.
    """

    part: float = 0.0
    layers: int = 0
    kept: float = 0.0
    missing: float = 0.0
    input: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """One model on one rank: its shape, how it is computed, how it is spread.

    Of a model that is cut into stages it is the largest of them. Updates are looked at on the first stage, with the
    activations of as many micro-batches as there are stages, and on the last one, with the head.
    """

    name: str
    shape: memory.Shape
    path: memory.Path
    fsdp: FSDPConfig
    shards: int  # ranks that hold its weights, those of a stage, together
    master: int  # bytes of a trained weight
    trained: float  # numbers that have a gradient; 0: forward only
    state: float  # bytes of the optimizer's states of one of them
    values: bool  # it tells one number a token, in place of a distribution over the vocabulary
    alone: bool  # one rank: gradients are reduced once, and on a CPU gathered weights stay

    def weights(self) -> float:
        """Bytes of this rank's shards."""
        if not self.trained:
            return self.path.c * self.shape.all_weights / self.shards
        frozen = self.path.c * self.shape.all_weights if self.path.lora else 0.0
        return (frozen + self.master * self.trained) / self.shards

    def states(self) -> float:
        return self.state * self.trained / self.shards

    def between(self) -> dict[str, float]:
        """Bytes that stay on the device while other models work, by name."""
        if self.fsdp.offload_policy:
            return {}
        weights = {} if self.fsdp.param_offload else {f"{self.name} weights": self.weights()}
        if not self.trained or self.fsdp.optimizer_offload:
            return weights
        return weights | {f"{self.name} optimizer": self.states()}

    def gathered(self, *, backward: bool) -> float:
        """Whole weights in the compute precision: the root and two layers, or all where they are kept.

        On a GPU a layer's are there twice from its gather until the next one's.
        """
        keeps = not self.fsdp.reshard_after_forward or (self.alone and self.path.on_cpu)
        if keeps and (backward or self.alone or not self.path.on_cpu):
            twice = 0.0 if self.alone or self.path.on_cpu or backward else self.layer()
            return self.path.c * (self.shape.all_weights + twice)
        return self.path.c * (self.shape.root_weights + 2 * self.layer())

    def last_layer(self) -> float:
        """Bytes of one layer's weights that are gone from a GPU when the head works, of the two that are counted."""
        return 0.0 if self.path.on_cpu or not self.fsdp.reshard_after_forward else self.path.c * self.layer()

    def layer(self) -> float:
        """Weights of one layer that a rank gathers: of those that are split, or experts handed out, its own part."""
        others = self.shape.layer_weights - min(float(self.shape.expert_weights), self.shape.layer_weights)
        return others / self.fsdp.tensor_parallel_size + self._experts()

    def _experts(self) -> float:
        return min(float(self.shape.expert_weights), self.shape.layer_weights) / self.fsdp.expert_parallel_size

    def _at_roots_gather(self, *, backward: bool) -> float:
        """Bytes of the root's gather, which FSDP2 holds beside its copy until the first layer's weights are there."""
        if self.alone or self.path.on_cpu or self.fsdp.offload_policy:
            return 0.0
        # Where experts or layers are split over ranks, experts are units of their own, gathered later.
        units = max(self.fsdp.expert_parallel_size, self.fsdp.tensor_parallel_size) > 1
        first = self.layer() - (self._experts() if units else 0.0)
        there = self.path.c * (2 * self.shape.root_weights + 2 * first)
        return max(0.0, there - self.gathered(backward=backward))

    def forward(self, tokens: int) -> dict[str, float]:
        """A pass without gradient."""
        head = partial(memory.head_work_bytes, self.shape, self.path, tokens, backward=False)
        work = max(
            memory.layer_work_bytes(self.shape, self.path, tokens, backward=False),
            head(entropy=self.name == ACTOR) - self.last_layer() if not self.values else 0.0,
            self._at_roots_gather(backward=False),
        )
        return self.own(optimizer=False) | {
            "gathered weights": self.gathered(backward=False),
            "work": work + self.path.c * tokens * self.shape.hidden,
        }

    def update(self, tokens: int, row: int, micro_batches: int) -> dict[str, float]:
        """Forward and backward pass and the optimizer's step: the largest moment of the backward pass."""
        find = self._cpu_peak if self.path.on_cpu else self._gpu_peak
        told = []
        for stage in {0, self.fsdp.pipeline_parallel_size - 1}:
            activations = self._activations(stage, tokens, row, micro_batches)
            late = self._late(stage, tokens, micro_batches)
            told.append((find(stage, activations, late, tokens, row, micro_batches), activations + late.kept))
        peak, kept = max(told)
        return self.own(optimizer=True) | {
            "gradients": self.gradients(micro_batches),
            "gathered weights": self.gathered(backward=True),
            "activations": kept,
            "work": peak - kept,
        }

    def _activations(self, stage: int, tokens: int, row: int, micro_batches: int) -> float:
        """Bytes that a stage keeps at most between forward and backward passes."""
        stages, pieces = self.fsdp.pipeline_parallel_size, self.fsdp.virtual_pipeline_size
        passes = min(passes_ahead(stage, stages, micro_batches, pieces) + 1, micro_batches * pieces)
        in_flight = replace(self.shape, layers=-(-self.shape.layers * passes // pieces))
        return memory.activation_bytes(in_flight, self.path, tokens, row)

    def _late(self, stage: int, tokens: int, micro_batches: int) -> Late:
        """Parts of weights' gradients, and sums of them, that a stage has: none where backward passes give them."""
        if not self.late():
            return Late()
        part, turns = tokens * memory.late_bytes(self.shape, self.path), micro_batches * self.fsdp.virtual_pipeline_size
        layers = -(-self.shape.layers // self.fsdp.virtual_pipeline_size)
        behind = min(stage, turns - 1)
        summed = min(self.shape.layers, (turns - 1 - behind) * layers)  # layers, when the last backward pass begins
        return Late(
            part=part,
            kept=behind * layers * part,
            layers=layers,
            missing=self._late_sums() * (1 - summed / self.shape.layers),
            input=self.path.c * tokens * (0 if self.shape.chosen else self.shape.inner),
        )

    def _cpu_peak(self, stage: int, activations: float, late: Late, tokens: int, row: int, micro_batches: int) -> float:
        """Bytes of activations and work at most, beside gradients and gathered weights, on a CPU."""
        shape, path = self.shape, self.path
        layer, root = self._layer_gradient(), self.trained_share() * shape.root_weights
        head = memory.head_work_bytes(shape, path, tokens, backward=True) if self._has_head(stage) else 0.0
        # Bytes of a weight's gradient that are not among the kept: it is added to them at once in their own precision.
        new = 0 if self.whole(micro_batches) and path.c == 4 else path.c
        came = 4 / self.shards
        at_layers = (
            memory.recomputed_bytes(shape, path, tokens, row)
            + memory.layer_work_bytes(shape, path, tokens, backward=True)
            + (path.c + 4 + came) * layer  # gradient, what is sent, what comes
            + new * root
            + late.input
        )
        none_yet = self.gradients(micro_batches) - self._late_sums() if micro_batches == 1 else 0.0
        at_root = max(new + 4, 4 + came) * root + 4 * layer  # a gradient goes when it is copied to be sent
        parts = late.layers * late.part
        peak = max(activations + head - none_yet, activations + at_layers + parts, at_root + parts)
        return late.kept + max(peak - late.missing, parts)

    def _gpu_peak(self, stage: int, activations: float, late: Late, tokens: int, row: int, micro_batches: int) -> float:
        """Bytes of activations and work at most, beside gradients and gathered weights, on a GPU.

        The largest of the moments of the head, of the layers, which are done from the last to the first, and of the
        root. What a layer sends stays until the next one sends. Shards of a single micro-batch's gradients are there
        from their unit's moment on. A rank alone has three float32 copies of a unit's gradients in place of what is
        sent: together, summed and divided. Parts of late gradients grow by layers, and are all there in the weights'
        pass, whose sums may be the first.
        """
        shape, path, c = self.shape, self.path, self.path.c
        layer, root = self._layer_gradient(), self.trained_share() * shape.root_weights
        head, of_head = 0.0, 0.0
        if self._has_head(stage):
            head = memory.head_work_bytes(shape, path, tokens, backward=True) - self.last_layer()
            of_head = min(root, self.trained_share() * shape.vocab * shape.hidden)
        gradients, none_yet = self.gradients(micro_batches), 0.0
        new = 0 if self.whole(micro_batches) and c == 4 else c
        left = -4.0 * layer if self.whole(micro_batches) else 0.0  # by a layer that is done: its sum is not needed
        if micro_batches == 1:
            of_layer = self.trained_share() * (shape.expert_weights if self.late() else shape.layer_weights)
            none_yet, left = gradients - self._late_sums(), self.master * of_layer / self.shards
        bare, one = (memory.activation_bytes(replace(shape, layers=n), path, tokens, row) for n in (0, 1))
        at_layer = activations - bare + new * of_head + memory.recomputed_bytes(shape, path, tokens, row) + late.input
        work = memory.layer_gradient_bytes(shape, path, tokens, layer, self._experts() * self.trained_share())
        at_layers = [
            at_layer + max(work + (4 * layer if done else 0.0), (12 - c) * layer * self.alone)
            + done * (left - one + bare) + min(done, late.layers) * late.part
            - (self.last_layer() if done == shape.layers - 1 else 0.0)
            for done in {0, min(1, shape.layers - 1), max(0, shape.layers - 2), shape.layers - 1}
        ]  # fmt: skip
        gone = self.gathered(backward=True) if self.fsdp.reshard_after_forward else 0.0
        parts = late.layers * late.part
        at_root = shape.layers * left + parts + max(new + 4, 12 * self.alone) * root - gone
        peak = max(activations + head, *at_layers, at_root, self._at_roots_gather(backward=True)) - none_yet
        at_weights = parts + c * min(shape.layer_weights, shape.hidden * shape.inner) - gone if parts else 0.0
        return late.kept + max(peak - late.missing, at_weights)

    def trained_share(self) -> float:
        """Factor for the units' gradients: 1 where they are as large as the units, 0 for adapters, whose are small."""
        return 0.0 if self.path.lora else 1.0

    def _has_head(self, stage: int) -> bool:
        return not self.values and stage == self.fsdp.pipeline_parallel_size - 1

    def _layer_gradient(self) -> float:
        """Numbers of a layer's gradients that its backward pass gives this rank; an adapter's are few."""
        return self.trained_share() * (self._experts() if self.late() else self.layer())

    def _late_sums(self) -> float:
        """Bytes of the sums of gradients that are computed apart from the backward pass: whole on each rank."""
        shape = self.shape
        layers = shape.layers * (shape.layer_weights - min(float(shape.expert_weights), shape.layer_weights))
        return 4.0 * (self.trained if self.path.lora else min(layers, self.trained)) if self.late() else 0.0

    def gradients(self, micro_batches: int) -> float:
        """Bytes of the gradients that stay between micro-batches."""
        sums = self._late_sums()
        rest = self.trained - sums / 4
        if self.fsdp.offload_policy:  # shards go to the host at once
            return sums + (4.0 * rest if self.whole(micro_batches) else 0.0)
        shard = self.master * rest / self.shards
        return sums + (max(shard, 4.0 * rest) if self.whole(micro_batches) else shard)

    def whole(self, micro_batches: int) -> bool:
        """True where the gradients of backward passes are reduced once, after all micro-batches."""
        return micro_batches > 1 and (self.alone or not self.fsdp.sync_every_micro_batch)

    def late(self) -> bool:
        """True where a stage computes the gradients of weights apart from its backward passes."""
        return self.fsdp.pipeline_parallel_size > 1 and self.fsdp.pipeline_schedule == "zero_bubble"

    def own(self, *, optimizer: bool) -> dict[str, float]:
        if self.fsdp.offload_policy:
            return {}
        found = {f"{self.name} weights": self.weights()}
        if self.trained and (optimizer or not self.fsdp.optimizer_offload):
            found[f"{self.name} optimizer"] = self.states()
        return found
