"""Pipeline parallelism: neighbouring ranks hold the layers of one stage each, and hand micro-batches on to each other.

torch.distributed.pipelining's schedules send tensors of one shape a step, agreed on before it, and take their loss
from one output alone. Here every micro-batch has packed rows of its own length and rows of its own for the loss. All
ranks of a pipeline have the same rows and cut them alike, so each knows every shape without a message, and sending is
all that is left. Source of the orders: Huang et al., GPipe (arXiv 1811.06965); Narayanan et al., PipeDream-Flush,
"1F1B" (arXiv 2006.09503), and of stages in several pieces, "interleaved" (arXiv 2104.04473, section 2.2); Qi et al.,
Zero Bubble Pipeline Parallelism (arXiv 2401.10241).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from verl_like.parallel.sharding import saved_buffers
from verl_like.parallel.ulysses import SequenceRanks


def rounds(stages: int, count: int) -> list[range]:
    """Cut `count` micro-batches into rounds: a piece of a stage works at all of a round, then its next piece does.

    None is smaller than the number of stages, where there are so many: its first micro-batch has then gone through all
    of them when the next piece's turn comes.
    """
    number = max(1, count // stages)
    return [range(count * i // number, count * (i + 1) // number) for i in range(number)]


def turns(stages: int, count: int, pieces: int, *, back: bool = False) -> Iterator[tuple[int, int]]:
    """Yield (piece, micro-batch) in the order of forward passes, or (`back`) of backward ones: the same on all stages.

    So what neighbours send each other needs no name: it comes in the order in which it is waited for.
    """
    for some in rounds(stages, count):
        for piece in range(pieces)[:: -1 if back else 1]:
            yield from ((piece, i) for i in some)


def passes_ahead(stage: int, stages: int, count: int, pieces: int) -> int:
    """Count the forward passes of a stage before its first backward pass follows one, of 1F1B.

    With several pieces, as Megatron does, twice those that the stages behind need: messages then leave a pass before
    they are waited for. With once these neighbours would wait for each other's last message all the time.
    """
    round_trips = (pieces - 1) * max(map(len, rounds(stages, count)))
    return min((stages - 1 - stage) * min(2, pieces) + round_trips, pieces * count)


def order_of(schedule: str, stage: int, stages: int, count: int, pieces: int = 1) -> Iterator[tuple[str, int, int]]:
    """Yield (kind of pass, piece, micro-batch) in the order in which a stage works at `count` micro-batches.

    Kinds are "forward", "backward" and "weights".

    schedule: "1f1b": a backward pass as soon as there can be one, so that a stage keeps the activations of as many
        micro-batches as there are stages from it on; "gpipe": all forward passes first; "zero_bubble": as 1f1b, but the
        weights' gradients have passes of their own, of which a stage is behind by its number (ZB-H1): a stage that has
        few activations keeps so many micro-batches' parts of gradients, and works at them when it would wait.
    pieces: of each stage, every one as many layers behind the one before as all stages have of one.
    """
    forth, back = (list(turns(stages, count, pieces, back=back)) for back in (False, True))
    ahead = len(forth) if schedule == "gpipe" else passes_ahead(stage, stages, count, pieces)
    yield from (("forward", *turn) for turn in forth[:ahead])
    late = deque[tuple[int, int]]()
    rest = iter(forth[ahead:])
    for again in back:
        yield from (("forward", *turn) for turn in islice(rest, 1))
        yield "backward", *again
        if schedule == "zero_bubble":
            late.append(again)
            if len(late) > stage:
                yield "weights", *late.popleft()
    yield from (("weights", *turn) for turn in late)


class Pipe:
    """Ranks of one pipeline: number `rank` of `size` stages is this rank's, and its neighbours are the next ones.

    Activations go forth in a group of their own and gradients back in another, each in the order of the micro-batches:
    so neighbours that send to each other at once never wait in one queue (NCCL has one for each group and pair).

    ends: the ranks of the first and the last stage, which may hold one weight both.
    forth, back: groups; where stages have several pieces, each a second one between the last stage and the first.
    pieces: of a stage's layers: the last stage's piece hands on to the first stage's next one.
    piece: the one that is at work.
    """

    def __init__(
        self,
        ranks: SequenceRanks,
        ends: dist.ProcessGroup,
        forth: Sequence[dist.ProcessGroup],
        back: Sequence[dist.ProcessGroup],
        pieces: int,
    ) -> None:
        self.group, self.size, self.rank, self.ends = ranks.group, ranks.size, ranks.rank, ends
        self.forth, self.back, self.pieces, self.piece = forth, back, pieces, 0
        # Of each piece's micro-batches without their backward pass.
        self._received = [deque[Tensor | None]() for _ in range(pieces)]
        self._sent: list[tuple[Any, Tensor]] = []  # what must stay until it has left

    @property
    def is_first(self) -> bool:
        """True for the piece that has no other before it."""
        return self.rank == self.piece == 0

    @property
    def is_last(self) -> bool:
        """True for the piece that has no other behind it."""
        return (self.rank + 1, self.piece + 1) == (self.size, self.pieces)

    def receive(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor | None:
        """Wait for the next micro-batch's activations of the piece before; None for the first."""
        hidden = None
        if not self.is_first:
            hidden = torch.empty(tuple(shape), dtype=dtype, device=device)
            self._wait_for(hidden, self.forth, -1)
            hidden.requires_grad_(torch.is_grad_enabled())
        if torch.is_grad_enabled():
            self._received[self.piece].append(hidden)
        return hidden

    def send(self, hidden: Tensor) -> None:
        """Send a micro-batch's activations to the piece behind."""
        self._send(hidden.detach(), self.forth, 1)

    def backward(self, output: Tensor, loss_backward: Callable[[], None]) -> None:
        """Run the backward pass of the oldest micro-batch that had none: from the loss, or from the piece behind.

        output: what the piece gave; of the last, the loss is behind it, and `loss_backward` runs.
        """
        received = self._received[self.piece].popleft()
        if self.is_last:
            loss_backward()
        else:
            gradient = torch.empty_like(output)
            self._wait_for(gradient, self.back, 1)
            if output.requires_grad:  # else nothing up to here is trained: LoRA's adapters stand further on
                output.backward(gradient)
        if received is not None:
            assert received.grad is not None
            self._send(received.grad, self.back, -1)

    def finish(self) -> None:
        """Wait until all that was sent has left."""
        for work, _ in self._sent:
            work.wait()
        self._sent.clear()

    def of_last(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        """Give every rank of the pipeline what the last has (collective); on the CPU."""
        told: list[Any] = [
            {name: value.cpu() for name, value in values.items()} if self.rank == self.size - 1 else None
        ]
        dist.broadcast_object_list(told, group=self.group, group_src=self.size - 1)
        return told[0]

    def _neighbour(self, groups: Sequence[dist.ProcessGroup], step: int) -> tuple[dist.ProcessGroup, int]:
        other = self.rank + step
        return groups[not 0 <= other < self.size], other % self.size

    def _wait_for(self, tensor: Tensor, groups: Sequence[dist.ProcessGroup], step: int) -> None:
        group, source = self._neighbour(groups, step)
        dist.recv(tensor, group=group, group_src=source)

    def _send(self, tensor: Tensor, groups: Sequence[dist.ProcessGroup], step: int) -> None:
        self._sent = [(work, kept) for work, kept in self._sent if not work.is_completed()]
        group, to = self._neighbour(groups, step)
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
        parts: the places that hold a module, by its name, counted along the model: stage `place % size` does, in its
            piece `place // size`. Every weight is in one of them.
        pipe: the ranks.

    weights, buffers: (name, shape, the first stage that holds it) of all weights, and of all saved buffers, in the
        order of the unsharded model.
    """

    def __init__(self, model: nn.Module, parts: Mapping[str, frozenset[int]], pipe: Pipe) -> None:
        self.pipe, self._model = pipe, model
        self._parts = {name: frozenset(place % pipe.size for place in places) for name, places in parts.items()}
        self._pieces = {name: {p // pipe.size for p in ps if p % pipe.size == pipe.rank} for name, ps in parts.items()}
        self._resting: list[tuple[nn.Module, str, nn.Module]] = []  # parent, name there, what another piece has
        self._names = {id(module): name for name, module in model.named_modules()}
        self.weights, self.buffers = (
            [(name, tensor.shape, min(self._holders(name))) for name, tensor in named]
            for named in (model.named_parameters(), saved_buffers(model))
        )

    def _holders(self, name: str) -> frozenset[int]:
        return next(stages for part, stages in self._parts.items() if f"{name}.".startswith(f"{part}."))

    def drop(self, module: nn.Module) -> bool:
        """Take a module out of the model where other stages hold it, or the layer that it is in; True where it was."""
        name = self._names[id(module)]
        absent = self.pipe.rank not in self._holders(name)
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
        if self.pipe.pieces > 1:  # inside of FSDP's hooks, which find all of the stage's units at the first pass
            self._model.register_forward_pre_hook(lambda *_: self._begin_piece())
            self._model.register_forward_hook(lambda *_: self._end_piece(), always_call=True)

    def _begin_piece(self) -> None:
        """Take out, for a forward pass, what the other pieces of this stage have."""
        for name, pieces in self._pieces.items():
            if pieces and self.pipe.piece not in pieces:
                parent, _, own = name.rpartition(".")
                holder = self._model.get_submodule(parent)
                self._resting.append((holder, own, holder.get_submodule(own)))
                holder._modules[own] = Absent()

    def _end_piece(self) -> None:
        while self._resting:
            holder, own, module = self._resting.pop()
            holder._modules[own] = module

    def runs(self, layers: Iterable[nn.Module]) -> list[list[nn.Module]]:
        """Sort this stage's layers by piece."""
        named = [(self._pieces[self._names[id(layer)]], layer) for layer in layers]
        return [[layer for pieces, layer in named if piece in pieces] for piece in range(self.pipe.pieces)]

    def counts(self, name: str) -> bool:
        """True where this is the stage at which a weight of the model counts: its first holder's."""
        return min(self._holders(name)) == self.pipe.rank

    def is_shared(self, name: str) -> bool:
        """True for a weight that the first stage and the last hold both."""
        return len(self._holders(name)) > 1

    def anywhere(self, values: Iterable[Any]) -> set[Any]:
        """Names, or other values, that any stage has (collective)."""
        told: list[Any] = [None] * self.pipe.size
        dist.all_gather_object(told, list(values), group=self.pipe.group)
        return {value for some in told for value in some}

    def from_holder(self, tensor: Tensor | None, shape: torch.Size, holder: int, **like: Any) -> Tensor:
        """Give every stage a tensor that one has (collective). like: its dtype and device."""
        tensor = torch.empty(shape, **like) if tensor is None else tensor.contiguous()
        dist.broadcast(tensor, group=self.pipe.group, group_src=holder)
        return tensor
