"""Load of a mixture of experts: how evenly it spreads the tokens that it is trained on.

Counted are the tokens that learn, prompts included, over all micro-batches and ranks of a mini-batch, once each time
they are computed: what rows begin with in common is once, and recomputation does not count. Beside them stand only the
filling tokens of slices and chunks of rows, and of ranks without rows. Padded rows are not counted: their padding is
routed as well.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from verl_like.batch import Metric
from verl_like.models.checkpoint_names import is_router_bias


class ExpertLoad:
    """Counts per layer and expert, taken by hooks on the modules that hold the experts of a layer."""

    def __init__(self, layers: list[nn.Module], num_experts: int, device: torch.device) -> None:
        self._counts_LE = torch.zeros(len(layers), num_experts, dtype=torch.int64, device=device)
        self._counting = False
        self._biases: list[tuple[nn.Module, str]] = []  # of each layer: its owner, and its name there
        for index, layer in enumerate(layers):
            layer.register_forward_pre_hook(self._hook(index))

    @classmethod
    def of(cls, model: nn.Module, num_experts: int, device: torch.device) -> ExpertLoad | None:
        """Hook a counter to the experts of `model`.

        None for a dense model, and for one whose experts are not called as transformers' shared ones are.
        """
        stacks = {"gate_up_proj", "down_proj"}
        layers = {name: part for name, part in model.named_modules() if stacks <= part._parameters.keys()}
        if not layers or not num_experts:
            return None
        load = cls([*layers.values()], num_experts, device)
        for name in layers:
            for owner in model.get_submodule(name.rpartition(".")[0]).modules():
                load._biases += [(owner, leaf) for leaf in owner._buffers if is_router_bias(leaf)]
        return load

    @torch.no_grad()
    def correct_biases(self, rate: float) -> None:
        """Move each bias by `rate`, up where an expert had fewer tokens than the mean, down where more.

        Counts are those of the last `counted` pass. Source: arXiv 2408.15664, algorithm 1.
        """
        for (owner, leaf), count_E in zip(self._biases, self._counts_LE.double(), strict=True):
            bias_E = owner.get_buffer(leaf)
            bias_E += rate * (count_E.mean() - count_E).sign().to(bias_E)

    @contextmanager
    def counted(self) -> Iterator[dict[str, Metric]]:
        """Count the tokens of the passes inside; the dictionary is filled at the end, over all ranks (collective)."""
        found: dict[str, Metric] = {}
        self._counts_LE.zero_()
        self._counting = True
        try:
            yield found
        finally:
            self._counting = False
        dist.all_reduce(self._counts_LE)
        found |= load_metrics(self._counts_LE.cpu())

    def _hook(self, index: int) -> Any:
        @torch.compiler.disable
        def count(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            recomputing = torch._C._current_graph_task_id() != -1  # inside a backward pass
            if self._counting and torch.is_grad_enabled() and not recomputing:
                chosen = inputs[1].flatten().long()  # hidden states, experts of each token, their weights
                self._counts_LE[index].scatter_add_(0, chosen, torch.ones_like(chosen))

        return count


def load_metrics(counts_LE: Tensor) -> dict[str, Metric]:
    """Metrics of the load, from counts by layer and expert; empty where nothing was counted.

    moe_max_load: tokens of the busiest expert by those of a mean one, in the worst layer (1 is even, experts / top-k
    the most).
    moe_load_entropy: entropy of the load by log(experts), mean of the layers.
    moe_idle_experts: share of all experts that got no token.
    """
    total_L1 = counts_LE.sum(-1, keepdim=True)
    if not bool((total_L1 > 0).all()):
        return {}
    share_LE = counts_LE.double() / total_L1
    experts = counts_LE.shape[1]
    entropy_L = -torch.xlogy(share_LE, share_LE).sum(-1) / math.log(experts)
    return {
        "moe_max_load": Metric(value=float(share_LE.max()) * experts),
        "moe_load_entropy": Metric(value=float(entropy_L.mean())),
        "moe_idle_experts": Metric(value=float((counts_LE == 0).float().mean())),
    }
