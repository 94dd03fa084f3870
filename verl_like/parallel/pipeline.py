"""Pipeline parallelism: neighbouring ranks hold the layers of one stage each, and hand micro-batches on to each other.

torch.distributed.pipelining's schedules send tensors of one shape a step, agreed on before it, and take their loss
from one output alone. Here every micro-batch has packed rows of its own length and rows of its own for the loss. All
ranks of a pipeline have the same rows and cut them alike, so each knows every shape without a message, and sending is
all that is left. Source of the orders: Huang et al., GPipe (arXiv 1811.06965); Narayanan et al., PipeDream-Flush,
"1F1B" (arXiv 2006.09503).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from verl_like.parallel.sharding import saved_buffers
from verl_like.parallel.ulysses import SequenceRanks


def order_of(schedule: str, stage: int, stages: int, count: int) -> Iterator[tuple[bool, int]]:
    """Yield (backward pass?, micro-batch) in the order in which a stage works at `count` micro-batches.

    schedule: "1f1b": a backward pass as soon as there can be one, so that a stage keeps the activations of as many
        micro-batches as there are stages from it on; "gpipe": all forward passes first.
    """
    ahead = count if schedule == "gpipe" else min(stages - 1 - stage, count)
    yield from ((False, i) for i in range(ahead))
    for i in range(count - ahead):
        yield False, ahead + i
        yield True, i
    yield from ((True, i) for i in range(count - ahead, count))


class Pipe:
    """Ranks of one pipeline: number `rank` of `size` stages is this rank's, and its neighbours are the next ones.

    Activations go forth in a group of their own and gradients back in another, each in the order of the micro-batches:
    so neighbours that send to each other at once never wait in one queue (NCCL has one for each group and pair).

    ends: the ranks of the first and the last stage, which may hold one weight both.
    """

    def __init__(
        self, ranks: SequenceRanks, forth: dist.ProcessGroup, back: dist.ProcessGroup, ends: dist.ProcessGroup
    ) -> None:
        self.group, self.size, self.rank, self.ends = ranks.group, ranks.size, ranks.rank, ends
        self.is_first, self.is_last = ranks.rank == 0, ranks.rank == ranks.size - 1
        self.forth, self.back = forth, back
        self._received: deque[Tensor | None] = deque()  # of micro-batches without their backward pass
        self._sent: list[tuple[Any, Tensor]] = []  # what must stay until it has left

    def receive(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor | None:
        """Wait for the next micro-batch's activations of the stage before; None for the first."""
        hidden = None
        if not self.is_first:
            hidden = torch.empty(tuple(shape), dtype=dtype, device=device)
            dist.recv(hidden, group=self.forth, group_src=self.rank - 1)
            hidden.requires_grad_(torch.is_grad_enabled())
        if torch.is_grad_enabled():
            self._received.append(hidden)
        return hidden

    def send(self, hidden: Tensor) -> None:
        """Send a micro-batch's activations to the stage behind."""
        self._send(hidden.detach(), self.forth, self.rank + 1)

    def backward(self, output: Tensor, loss_backward: Callable[[], None]) -> None:
        """Run the backward pass of the oldest micro-batch that had none: from the loss, or from the stage behind.

        output: what the stage gave; of the last, the loss is behind it, and `loss_backward` runs.
        """
        received = self._received.popleft()
        if self.is_last:
            loss_backward()
        else:
            gradient = torch.empty_like(output)
            dist.recv(gradient, group=self.back, group_src=self.rank + 1)
            output.backward(gradient)
        if received is not None:
            assert received.grad is not None
            self._send(received.grad, self.back, self.rank - 1)

    def finish(self) -> None:
        """Wait until all that was sent has left."""
        for work, _ in self._sent:
            work.wait()
        self._sent.clear()

    def of_last(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        """Give every rank of the pipeline what the last has (collective); on the CPU."""
        told: list[Any] = [{name: value.cpu() for name, value in values.items()} if self.is_last else None]
        dist.broadcast_object_list(told, group=self.group, group_src=self.size - 1)
        return told[0]

    def _send(self, tensor: Tensor, group: dist.ProcessGroup, to: int) -> None:
        self._sent = [(work, kept) for work, kept in self._sent if not work.is_completed()]
        tensor = tensor.contiguous()
        self._sent.append((dist.isend(tensor, group=group, group_dst=to), tensor))


class Absent(nn.Module):
    """Stand-in for a layer or norm that another stage holds: hands on what it is given."""

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        """Return the first argument."""
        return hidden_states


class Stage:
    """Parts of a model that this rank's stage holds, and who holds the others.

    Args:
        model: the whole model, on the meta device on all ranks but the first.
        parts: the stages that hold a module, by its name; every weight is in one of them.
        pipe: the ranks.

    weights, buffers: (name, shape, the first stage that holds it) of all weights, and of all saved buffers, in the
        order of the unsharded model.
    """

    def __init__(self, model: nn.Module, parts: Mapping[str, frozenset[int]], pipe: Pipe) -> None:
        self.pipe, self._model, self._parts = pipe, model, parts
        self._names = {id(model.get_submodule(name)): name for name in parts}
        self.weights, self.buffers = (
            [(name, tensor.shape, min(self._holders(name))) for name, tensor in named]
            for named in (model.named_parameters(), saved_buffers(model))
        )

    def _holders(self, name: str) -> frozenset[int]:
        return next(stages for part, stages in self._parts.items() if name.startswith(f"{part}."))

    def drop(self, module: nn.Module) -> bool:
        """Take a module out of the model where other stages hold it; True where it was."""
        name = self._names[id(module)]
        absent = self.pipe.rank not in self._parts[name]
        if absent:
            parent, _, own = name.rpartition(".")
            setattr(self._model.get_submodule(parent), own, Absent())
            for part in module.modules():  # whoever still holds it, its memory is needed for the next one
                part._parameters.clear()
                part._buffers.clear()
        return absent

    def drop_the_rest(self) -> None:
        """Take out all that other stages hold, and was not yet taken out."""
        for module in [self._model.get_submodule(name) for name in self._parts]:
            if id(module) in self._names and not isinstance(module, Absent):
                self.drop(module)

    def counts(self, name: str) -> bool:
        """True where this is the stage at which a weight of the model counts: its first holder's."""
        return min(self._holders(name)) == self.pipe.rank

    def is_shared(self, name: str) -> bool:
        """True for a weight that the first stage and the last hold both."""
        return len(self._holders(name)) > 1

    def anywhere(self, names: Iterable[str]) -> set[str]:
        """Names that any stage has (collective)."""
        told: list[Any] = [None] * self.pipe.size
        dist.all_gather_object(told, list(names), group=self.pipe.group)
        return {name for some in told for name in some}

    def from_holder(self, tensor: Tensor | None, shape: torch.Size, holder: int, **like: Any) -> Tensor:
        """Give every stage a tensor that one has (collective). like: its dtype and device."""
        tensor = torch.empty(shape, **like) if tensor is None else tensor.contiguous()
        dist.broadcast(tensor, group=self.pipe.group, group_src=holder)
        return tensor
