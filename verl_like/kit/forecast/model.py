"""Memory of one model on one rank, by phase: what stays, and the largest moment of a pass and of an update."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from verl_like.config import FSDPConfig
from verl_like.config.roles import ACTOR
from verl_like.models import memory
from verl_like.parallel.pipeline import passes_ahead


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """One model on one rank: its shape, how it is computed, how it is spread.

    Of a model that is cut into stages it is the largest of them, with the first stage's activations (of as many
    micro-batches as there are stages) and the last one's head.
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
        there = self.path.c * (2 * self.shape.root_weights + 2 * self.layer())
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
        activations = self._activations(tokens, row, micro_batches)
        find = self._cpu_peak if self.path.on_cpu else self._gpu_peak
        return self.own(optimizer=True) | {
            "gradients": self.gradients(micro_batches),
            "gathered weights": self.gathered(backward=True),
            "activations": activations,
            "work": find(activations, tokens, row, micro_batches) - activations,
        }

    def _activations(self, tokens: int, row: int, micro_batches: int) -> float:
        """Bytes that are kept at most between forward and backward passes."""
        shape, path = self.shape, self.path
        stages, pieces = self.fsdp.pipeline_parallel_size, self.fsdp.virtual_pipeline_size
        kept = min(passes_ahead(0, stages, micro_batches, pieces) + 1, micro_batches * pieces)  # of the first stage
        in_flight = replace(shape, layers=-(-shape.layers * kept // pieces))
        size = partial(memory.activation_bytes, tokens=tokens, row=row)
        activations = size(in_flight, path)
        if self.late():  # the last stage keeps parts of gradients, about as large as activations that are all kept
            behind = min(stages - 1, micro_batches * pieces)
            parts, one = (replace(shape, layers=-(-shape.layers * n // pieces)) for n in (behind, 1))
            whole = replace(path, recompute="none")
            activations = max(activations, size(parts, whole) + size(one, path))
        return activations

    def _cpu_peak(self, activations: float, tokens: int, row: int, micro_batches: int) -> float:
        """Bytes of activations and work at most, beside gradients and gathered weights, on a CPU."""
        shape, path = self.shape, self.path
        layer, root = self.trained_share() * self.layer(), self.trained_share() * shape.root_weights
        head = 0.0 if self.values else memory.head_work_bytes(shape, path, tokens, backward=True)
        # Bytes of a weight's gradient that are not among the kept: it is added to them at once in their own precision.
        new = 0 if self.whole(micro_batches) and path.c == 4 else path.c
        came = 4 / self.shards
        at_layers = (
            memory.recomputed_bytes(shape, path, tokens, row)
            + memory.layer_work_bytes(shape, path, tokens, backward=True)
            + (path.c + 4 + came) * layer  # gradient, what is sent, what comes
            + new * root
        )
        none_yet = self.gradients(micro_batches) if micro_batches == 1 else 0.0
        at_root = max(new + 4, 4 + came) * root + 4 * layer  # a gradient goes when it is copied to be sent
        return max(activations + head - none_yet, activations + at_layers, at_root)

    def _gpu_peak(self, activations: float, tokens: int, row: int, micro_batches: int) -> float:
        """Bytes of activations and work at most, beside gradients and gathered weights, on a GPU.

        The largest of the moments of the head, of the layers, which are done from the last to the first, and of the
        root. What a layer sends stays until the next one sends. Shards of a single micro-batch's gradients are there
        from their unit's moment on. A rank alone has three float32 copies of a unit's gradients in place of what is
        sent: together, summed and divided.
        """
        shape, path, c = self.shape, self.path, self.path.c
        layer, root = self.trained_share() * self.layer(), self.trained_share() * shape.root_weights
        head, of_head = 0.0, 0.0
        if not self.values:
            head = memory.head_work_bytes(shape, path, tokens, backward=True) - self.last_layer()
            of_head = min(root, self.trained_share() * shape.vocab * shape.hidden)
        gradients, none_yet = self.gradients(micro_batches), 0.0
        new = 0 if self.whole(micro_batches) and c == 4 else c
        left = -4.0 * layer if self.whole(micro_batches) else 0.0  # by a layer that is done: its sum is not needed
        if micro_batches == 1:
            none_yet, left = gradients, gradients * self.trained_share() * shape.layer_weights / max(1.0, self.trained)
        bare, one = (memory.activation_bytes(replace(shape, layers=n), path, tokens, row) for n in (0, 1))
        at_layer = activations - bare + new * of_head + memory.recomputed_bytes(shape, path, tokens, row)
        work = memory.layer_gradient_bytes(shape, path, tokens, layer, self._experts() * self.trained_share())
        at_layers = [
            at_layer + max(work + (4 * layer if done else 0.0), (12 - c) * layer * self.alone)
            + done * (left - one + bare) - (self.last_layer() if done == shape.layers - 1 else 0.0)
            for done in {0, min(1, shape.layers - 1), max(0, shape.layers - 2), shape.layers - 1}
        ]  # fmt: skip
        gone = self.gathered(backward=True) if self.fsdp.reshard_after_forward else 0.0
        at_root = shape.layers * left + max(new + 4, 12 * self.alone) * root - gone
        return max(activations + head, *at_layers, at_root, self._at_roots_gather(backward=True)) - none_yet

    def trained_share(self) -> float:
        """Factor for the units' gradients: 1 where they are as large as the units, 0 for adapters, whose are small."""
        return 0.0 if self.path.lora else 1.0

    def gradients(self, micro_batches: int) -> float:
        """Bytes of the gradients that stay between micro-batches."""
        if self.fsdp.offload_policy:  # shards go to the host at once
            return 4.0 * self.trained if self.whole(micro_batches) else 0.0
        shard = self.master * self.trained / self.shards
        return max(shard, 4.0 * self.trained) if self.whole(micro_batches) else shard

    def whole(self, micro_batches: int) -> bool:
        """True where gradients are reduced once, after all micro-batches."""
        return self.late() or (micro_batches > 1 and (self.alone or not self.fsdp.sync_every_micro_batch))

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
