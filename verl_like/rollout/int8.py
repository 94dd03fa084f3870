"""Linear layers whose weights are 8-bit integers with one scale per row (weight-only, symmetric), for the hf engine.

Quantised as they come, at every weight sync; computed with as scale x integer in the input's precision. A quarter of
float32's memory, and no faster: it is there so that quantised rollout, its proof and its correction run on any machine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Int8Linear(nn.Module):
    """Linear layer with 8-bit weights in place of an nn.Linear [outputs, inputs]; its bias stays as it is."""

    weight_int8: Tensor
    scale_O1: Tensor

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        device = linear.weight.device
        self.bias = linear.bias
        shape = linear.weight.shape
        self.register_buffer("weight_int8", torch.zeros(shape, dtype=torch.int8, device=device), persistent=False)
        self.register_buffer("scale_O1", torch.zeros(shape[0], 1, device=device), persistent=False)

    def take(self, weight: Tensor) -> None:
        """Quantise a new weight."""
        largest_O1 = weight.float().abs().amax(1, keepdim=True)
        self.scale_O1.copy_(largest_O1 / 127)
        steps = weight.float() / self.scale_O1.clamp(min=torch.finfo(torch.float32).tiny)
        self.weight_int8.copy_(steps.round().clamp(-127, 127))

    def dequantised(self) -> Tensor:
        """Weight that the layer computes with: float32 [outputs, inputs]."""
        return self.weight_int8.float() * self.scale_O1

    def forward(self, input: Tensor) -> Tensor:
        return functional.linear(input, self.dequantised().to(input.dtype), self.bias)


def quantise_linears(model: PreTrainedModel) -> dict[str, Int8Linear]:
    """Exchange all linear layers but the head; return them by the names of their weights.

    Raises ValueError if there are none.
    """
    head, exchanged = model.get_output_embeddings(), dict[str, Int8Linear]()
    for path, module in list(model.named_modules()):
        if type(module) is nn.Linear and module is not head:
            parent, _, name = path.rpartition(".")
            exchanged[f"{path}.weight"] = quantised = Int8Linear(module)
            setattr(model.get_submodule(parent), name, quantised)
    if not exchanged:
        raise ValueError(f"rollout.quantization=int8: the model ({type(model).__name__}) has no linear layers")
    return exchanged
