"""Completion of an FSDP2 backward pass that broke off on this rank, so that no other rank waits for it.

The others go from unit to unit and gather weights and add up gradients. This rank does the same with zeros for the
gradients that it has not computed, by FSDP2's own methods, so that the order is theirs. It may have broken off inside
one of these methods, too: a gather that is under way or complete is not repeated by FSDP2, a reduction not by us
(`Reduction`).

The names of torch's FSDP2 that are not public stand in this file alone; `is_possible` looks whether they are there.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

_OF_STATE = ("_fsdp_param_group", "_root_post_backward_final_callback")
_OF_GROUP = (
    *("pre_backward", "post_backward", "reduce_grads", "fsdp_params", "comm_ctx"),
    *("_training_state", "_post_forward_indices", "_reduce_scatter_comm"),
)
# What `forget` needs where torch (2.11) has no `reset_iter_state`.
_OF_OLDER_STATE = ("_comm_ctx", "_state_ctx", "_modules_to_run_forward", "_training_state")
_OF_OLDER_GROUP = ("_all_gather_result", "_post_reduce_event", "_all_reduce_state", "_reshard_after_forward_event")


class Reduction:
    """FSDP2's own reduce-scatter of one unit, with a note whether this backward pass has run it."""

    def __init__(self, own: Any) -> None:
        self._own, self.done = own, False

    def allocate(self, *arguments: Any, **options: Any) -> Tensor:
        """Forward to torch's ReduceScatter."""
        return self._own.allocate(*arguments, **options)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Run torch's ReduceScatter, and note that it ran."""
        work = self._own(*arguments, **options)
        self.done = True
        return work


def is_possible(units: Sequence[nn.Module]) -> bool:
    """Check that this torch has all that forgetting and completing a broken pass needs (2.11 and 2.13 have)."""
    of_state, of_group = _OF_STATE, _OF_GROUP
    if not _resets_itself():
        of_state, of_group = (*of_state, *_OF_OLDER_STATE), (*of_group, *_OF_OLDER_GROUP)
    states = [_state(unit) for unit in units]
    there = all(hasattr(state, name) for state in states for name in of_state)
    return there and all(hasattr(group, name) for group in _groups(units) for name in of_group)


def note_reductions(units: Sequence[nn.Module]) -> None:
    """Wrap the reductions of the units, once, before the first pass: `complete` needs to know which were done."""
    for group in _groups(units):
        group._reduce_scatter_comm = Reduction(group._reduce_scatter_comm)


def begin(units: Sequence[nn.Module]) -> None:
    """Begin a new pass: no unit has reduced its gradients yet."""
    for group in _groups(units):
        group._reduce_scatter_comm.done = False


def complete(units: Sequence[nn.Module], graph: list[Tensor]) -> None:
    """Take part in all that is left of this backward pass (collective with the ranks that go on with it).

    units: the root, then the layers in the order of the forward pass.
    graph: the loss, alone in a list, which is taken out, so that the memory of the tensors it was computed from is free
        before weights are gathered.
    """
    inner, trained = _in_graph(graph[0])
    graph.clear()
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    root, *layers = units
    order = [*_groups([root]), *(group for group in _groups(layers[::-1]) if _takes_part(group, inner, trained))]
    begun = [index for index, group in enumerate(order) if group._training_state.name != "IDLE"]
    newest = max(begun, default=-1)  # the pass goes from unit to unit, so that those before it have begun as well
    for index, group in enumerate(order):
        if index > newest:
            group.pre_backward(True)
        elif index == newest and group._training_state.name == "PRE_BACKWARD":
            _enter_again(group)
        if id(group) in inner:
            _give_zeros(group, trained)
            group.post_backward()
    for group in order:  # of the others the last call does it, where this is not done: it may have broken off there
        if id(group) not in inner:
            _give_zeros(group, trained)
            _set_idle(group)
    _state(root)._root_post_backward_final_callback()


def forget(units: Sequence[nn.Module]) -> None:
    """Make FSDP2 ready for a new pass: drop all that it remembers of one that broke off, gradients included."""
    root, state = units[0], _state(units[0])
    assert isinstance(root, FSDPModule)
    if _resets_itself():
        root.reset_iter_state()
        return
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()  # in place of the events that are dropped
    state._comm_ctx.all_gather_state = state._comm_ctx.reduce_scatter_state = None
    state._comm_ctx.post_forward_order.clear()
    for each in map(_state, units):
        each._modules_to_run_forward.clear()
        each._training_state = type(each._training_state).IDLE
    for group in _groups(units):
        work = getattr(group._all_gather_result, "all_gather_work", None)
        if work is not None:
            work.wait()
        group._all_gather_result = group._post_reduce_event = group._all_reduce_state = None
        group._reshard_after_forward_event = group._partial_reduce_output = None
        group._post_forward_indices.clear()
        _set_idle(group)
        group._to_sharded()
    state._state_ctx.iter_forward_root, state._state_ctx.post_backward_final_callback_queued = None, False


def drop_unsharded_gradients(units: Sequence[nn.Module]) -> None:
    """Drop the gradients that micro-batches without a reduction have added up: torch's own reset leaves them."""
    for group in _groups(units):
        for parameter in group.fsdp_params:
            parameter.unsharded_accumulated_grad = None
            if hasattr(parameter, "_unsharded_param"):
                parameter._unsharded_param.grad = None


def _resets_itself() -> bool:
    return hasattr(FSDPModule, "reset_iter_state")  # torch 2.13


def _state(unit: nn.Module) -> Any:
    assert isinstance(unit, FSDPModule)
    return unit._get_fsdp_state()


def _groups(units: Sequence[nn.Module]) -> Iterator[Any]:
    """Yield FSDP2's group of each unit's own weights; a unit may have none."""
    return (group for unit in units if (group := _state(unit)._fsdp_param_group) is not None)


def _in_graph(loss: Tensor) -> tuple[set[int], set[int]]:
    """Find by id the groups whose input has a gradient, which FSDP2 marks in the graph, and the weights that get one.

    Both are the same on all ranks, which a reduction needs.
    """
    nodes, ahead = set(), [loss.grad_fn]
    while ahead:
        node = ahead.pop()
        if node is not None and node not in nodes:
            nodes.add(node)
            ahead += [earlier for earlier, _ in node.next_functions]
    inner = {id(node.param_group) for node in nodes if hasattr(node, "param_group")}
    return inner, {id(node.variable) for node in nodes if hasattr(node, "variable")}


def _takes_part(group: Any, inner: set[int], trained: set[int]) -> bool:
    """True where the backward pass comes to a layer: below the first one with a trained weight it does not."""
    weights = [getattr(parameter, "_unsharded_param", None) for parameter in group.fsdp_params]  # none before a gather
    return id(group) in inner or any(id(weight) in trained for weight in weights)


def _enter_again(group: Any) -> None:
    """Call the group's `pre_backward` again: it may have broken off before the gather of this unit, or of the next."""
    order = group.comm_ctx.post_forward_order
    group._post_forward_indices[:] = [max(index for index, other in enumerate(order) if other is group)]
    _set_idle(group)
    group.pre_backward(True)


def _set_idle(group: Any) -> None:
    group._training_state = type(group._training_state).IDLE


def _give_zeros(group: Any, trained: set[int]) -> None:
    """Give zero gradients to the weights that have none yet, where they are to be added up and were not."""
    if not group.reduce_grads or group._reduce_scatter_comm.done:
        return
    for parameter in group.fsdp_params:
        weight = parameter._unsharded_param
        if id(weight) in trained and weight.grad is None and parameter.unsharded_accumulated_grad is None:
            weight.grad = torch.zeros_like(weight)
