"""Expert parallelism: the ranks of a group hold some of a layer's experts each, and tokens travel to them and back.

A rank sends each of its tokens to the owners of the experts that the router has chosen for it, and gets as many other
tokens as were sent to its experts: an all-to-all of uneven parts, whose gradient is the way back. Nothing is dropped,
and nothing filled up. The owner's own forward pass computes them (`model.experts_implementation`), each token as if it
had chosen one expert with the weight 1; the weights are applied where the token came from. Source: Lepikhin et al.,
GShard (arXiv 2006.16668), section 3, without its capacities.

Letters: N tokens of this rank, k experts of each, S = N x k, M tokens that this rank's experts are sent, H hidden.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from verl_like.parallel.sharding import local_tensor
from verl_like.parallel.ulysses import SequenceRanks


def spread_experts(experts: nn.Module, group: SequenceRanks) -> None:
    """Let a module of stacked experts, which holds this rank's own, compute all tokens of the group, in place."""
    own: Any = experts
    own.num_experts //= group.size  # what its own forward pass counts
    own.forward = partial(_forward, experts, group)


@torch.compiler.disable
def _forward(experts: Any, group: SequenceRanks, hidden_NH: Tensor, chosen_Nk: Tensor, weights_Nk: Tensor) -> Tensor:
    """Compute what the module's own forward pass would with the experts of all ranks (collective)."""
    expert_S, order_S = torch.sort(chosen_Nk.flatten(), stable=True)  # by owner, and there by expert
    count_E = count_each(expert_S, experts.num_experts * group.size)
    sent, received, expert_M = _exchanged_counts(count_E.view(group.size, -1), group)
    tokens_SH = hidden_NH[order_S // chosen_Nk.shape[1]]
    computed_MH = _computed(experts, _Exchange.apply(tokens_SH, sent, received, group), expert_M)
    back_SH = _Exchange.apply(computed_MH, received, sent, group)
    place_S = torch.empty_like(order_S).scatter_(0, order_S, torch.arange(len(order_S), device=order_S.device))
    weighted_SH = back_SH[place_S] * weights_Nk.reshape(-1, 1)
    return weighted_SH.view(*chosen_Nk.shape, -1).sum(1).to(hidden_NH.dtype)


def count_each(number_S: Tensor, most: int) -> Tensor:
    """Count each of the numbers below `most`, [most] int64; torch.bincount has the host wait for its own length."""
    number_S = number_S.long()
    return number_S.new_zeros(most).scatter_add_(0, number_S, torch.ones_like(number_S))


def _exchanged_counts(count_GE: Tensor, group: SequenceRanks) -> tuple[list[int], list[int], Tensor]:
    """Tell each owner how many tokens come for which of its experts (collective).

    Returns the tokens sent to each rank, those received from each, and the expert, here, of each one received.
    """
    from_GE = torch.empty_like(count_GE)
    dist.all_to_all_single(from_GE, count_GE, group=group.group)
    numbers_E = torch.arange(from_GE.shape[1], device=from_GE.device).repeat(group.size)
    sent, received = torch.stack([count_GE.sum(1), from_GE.sum(1)]).tolist()  # the host waits once
    return sent, received, numbers_E.repeat_interleave(from_GE.flatten(), output_size=sum(received))


def _computed(experts: Any, tokens_MH: Tensor, expert_M: Tensor) -> Tensor:
    """Run the module's own forward pass, [M, H], with its parameters as plain tensors of this rank."""
    gathered = experts._parameters
    experts._parameters = {name: local_tensor(parameter) for name, parameter in gathered.items()}
    try:
        if not len(tokens_MH):
            # Nobody needs these experts now, but all ranks reduce their gradients, and tokens' gradients travel on.
            firsts = [parameter.flatten()[0] for parameter in experts._parameters.values()]
            return tokens_MH + torch.stack(firsts).sum().to(tokens_MH.dtype)
        ones_M1 = torch.ones(len(tokens_MH), 1, dtype=tokens_MH.dtype, device=tokens_MH.device)
        return type(experts).forward(experts, tokens_MH, expert_M[:, None], ones_M1)
    finally:
        experts._parameters = gathered


class _Exchange(torch.autograd.Function):
    """Send rows to the ranks of a group, so many to each; the gradient comes back the same way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: list[int], received: list[int], group: SequenceRanks) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.splits = sent, received, group
        return _exchanged(x, sent, received, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        sent, received, group = ctx.splits
        return _exchanged(grad, received, sent, group), None, None, None


def _exchanged(x: Tensor, sent: list[int], received: list[int], group: SequenceRanks) -> Tensor:
    out = x.new_empty((sum(received), *x.shape[1:]))
    dist.all_to_all_single(out, x.contiguous(), received, sent, group=group.group)
    return out
