"""The share of a pipeline's time in which stages wait: by the formula, by the slots of its order, and as measured."""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch import nn

from verl_like.engine.fsdp import FSDPEngine
from verl_like.parallel.pipeline import Absent, Pipe, order_of

PASS_S = 0.2  # least time of a stage's forward pass; a backward pass takes twice as long


def idle_slots(schedule: str, stages: int, count: int, pieces: int = 1) -> float:
    """Share of a pipeline's time in which stages wait, by its order: forward passes take a slot, backward ones two.

    Where the weights' gradients have passes of their own, these take one of the two.
    """
    slots = {"forward": 1, "backward": 1 if schedule == "zero_bubble" else 2, "weights": 1}
    orders = [deque(order_of(schedule, stage, stages, count, pieces)) for stage in range(stages)]
    ends, clock = dict[tuple[int, str, int], int](), [0] * stages
    while any(orders):
        before = len(ends)
        for stage, order in enumerate(orders):
            while order:
                kind, piece, i = order[0]
                place = piece * stages + stage
                source = {"forward": place - 1, "backward": place + 1}.get(kind, -1)
                needed = [(source, kind, i)] if 0 <= source < stages * pieces else []
                needed += [(place, "forward", i)] if kind != "forward" else []
                if any(each not in ends for each in needed):
                    break
                clock[stage] = max(clock[stage], *(ends[each] for each in needed), 0) + slots[kind]
                ends[place, kind, i] = clock[stage]
                order.popleft()
        assert len(ends) > before, f"{schedule}: each of {stages} stages waits for another"
    return 1 - 3 * count * pieces / max(clock)


def timed_passes(engine: FSDPEngine, pipe: Pipe, update: Callable[[], object]) -> tuple[float, float, float]:
    """Run an update whose passes sleep, so that all stages' take the same time, and the cores' load does not count.

    Returns when this stage's first pass began and its last one ended, and the seconds of waiting for others between.
    """
    begins, waits, ends = list[float](), list[float](), list[float]()
    receive, backward, weights_pass = dist.recv, pipe.backward, engine.sharding.weights_pass
    late = engine.role.fsdp.pipeline_schedule == "zero_bubble"

    def asleep(layer: nn.Module, inputs: Any, output: Any) -> None:
        begins.append(time.perf_counter())
        time.sleep(PASS_S)
        output.register_hook(lambda _: time.sleep((1 if late else 2) * PASS_S))

    def waiting(*args: Any, **kwargs: Any) -> None:
        since = time.perf_counter()
        receive(*args, **kwargs)
        waits.append(time.perf_counter() - since if begins else 0.0)

    def ending(*args: Any) -> None:
        backward(*args)
        ends.append(time.perf_counter())

    def ending_weights() -> None:
        weights_pass()
        time.sleep(PASS_S)
        ends.append(time.perf_counter())

    layers = [part for name, part in engine.model.named_modules() if re.search(r"\.layers\.\d+$", name)]
    held = [not isinstance(layer, Absent) for layer in layers]
    firsts = [layer for layer, before, own in zip(layers, [False, *held], held, strict=False) if own and not before]
    assert len(firsts) == pipe.pieces, "a piece is layers without a break"
    hooks = [layer.register_forward_hook(asleep) for layer in firsts]
    patches = (dist, "recv", waiting), (pipe, "backward", ending), (engine.sharding, "weights_pass", ending_weights)
    with ExitStack() as stack:
        for patch in patches:
            stack.enter_context(mock.patch.object(*patch))
        dist.barrier()
        update()
    for hook in hooks:
        hook.remove()
    return begins[0], ends[-1], sum(waits)


def idle_share(stages: Sequence[tuple[float, float, float]]) -> float:
    """Share of all stages' time, from the first one's begin to the last one's end, that is outside of passes.

    stages: of each, what `timed_passes` returned.
    """
    span = max(end for _, end, _ in stages) - min(begin for begin, _, _ in stages)
    return 1 - sum(end - begin - waited for begin, end, waited in stages) / (span * len(stages))
