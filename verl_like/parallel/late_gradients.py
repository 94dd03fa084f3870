"""Gradients of linear layers' weights, computed apart from the backward pass: what a pipeline fills its waits with.

A backward pass hands the gradient of its input on, for which another stage waits; nobody waits for the gradient of a
weight before the update. Here the pass keeps what that takes, the layer's input and its output's gradient, and a later
"weights" pass multiplies them. Source: Qi et al., Zero Bubble Pipeline Parallelism (arXiv 2401.10241), section 2.

FSDP2 reduces the gradients that are there when a layer's backward pass ends, which these are not: they are added up
whole on each rank, and summed over the ranks once, at the end of an update.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, Partial
from torch.nn import functional


class LateGradients:
    """Late gradients of all linear layers with trained weights in some units of FSDP's.

    Whose product is another one (exact sums), or is not a linear layer's at all (stacked experts, the fused head), has
    its gradient in the backward pass, as have biases, norms and embeddings.

    Args:
        units: the modules.
        dtype: precision in which gradients are added up.
    """

    def __init__(self, units: Iterable[nn.Module], dtype: torch.dtype) -> None:
        self._dtype, self._sums = dtype, dict[int, Tensor]()
        # Of each backward pass whose weights' pass has not been: layer, input, gradient of its output.
        self._kept = deque[list[tuple[int, Tensor, Tensor]]]()
        self._layers = [
            part
            for unit in units
            for part in unit.modules()
            if type(part) is nn.Linear and part.weight.requires_grad and "forward" not in vars(part)
        ]
        for number, layer in enumerate(self._layers):
            layer.forward = partial(self._forward, layer, partial(self._keep, number))

    def begin(self) -> None:
        """Note that a backward pass begins."""
        self._kept.append([])

    @torch.no_grad()
    def weights_pass(self) -> None:
        """Compute the weights' gradients of the oldest backward pass that has none."""
        for number, input, gradient in self._kept.popleft():
            found = gradient.flatten(0, -2).T @ input.flatten(0, -2)
            if number in self._sums:
                self._sums[number] += found
            else:
                self._sums[number] = found.to(self._dtype)

    @torch.no_grad()
    def reduce(self) -> None:
        """Add the sums up over the ranks, into the gradients of their shards (collective); once, at the end."""
        assert not self._kept, "every backward pass is followed by its weights' pass"
        for number, whole in sorted(self._sums.items()):
            weight = self._layers[number].weight
            assert isinstance(weight, DTensor), "weights are resharded before"
            parts = [Partial()] * weight.device_mesh.ndim
            mine = DTensor.from_local(whole, weight.device_mesh, parts, run_check=False)
            weight.grad = mine.redistribute(placements=weight.placements).to(device=weight.device, dtype=weight.dtype)
        self._sums.clear()

    def _keep(self, number: int, input: Tensor, gradient: Tensor) -> None:
        self._kept[-1].append((number, input.detach(), gradient))

    @staticmethod
    def _forward(layer: nn.Linear, keep: Any, input: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return functional.linear(input, layer.weight, layer.bias)
        return _Linear.apply(input, layer.weight, layer.bias, keep)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, keep: Any) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(input, weight)
        ctx.keep = keep
        return functional.linear(input, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, Tensor | None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        input, weight = ctx.saved_tensors
        ctx.keep(input, gradient)
        wants = ctx.needs_input_grad
        of_bias = gradient.flatten(0, -2).sum(0) if wants[2] else None
        return gradient @ weight if wants[0] else None, None, of_bias, None
