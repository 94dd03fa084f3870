"""Rescue of a pass that runs out of memory: all ranks agree and begin it again with smaller micro-batches, which stay.

What a rank computes is cut smaller; denominators belong to the mini-batch, so loss and gradient stay what they were.
A micro-batch is a row of collectives (the gathers and reductions of FSDP's units), and a rank that leaves it alone
would leave the others waiting. What can be rescued, therefore:

    where memory runs out                     one rank    several ranks
    forward pass                              yes         yes: the rank still takes part in the gathers that it has not
                                                          reached, then a flag is reduced over all ranks
    loss                                      yes         yes
    backward pass                             yes         yes: the rank still takes part in the gathers and reductions
                                                          that it has not reached, with zeros for gradients. The flag
                                                          is that of the next forward pass; behind the last backward
                                                          pass there is one of its own
    both, with Ulysses, context, tensor or    yes         no: other collectives run inside. The rank's error ends the
    expert parallelism, full_kl or images                 run, and names the key to lower
    all, with stages of a pipeline                        no: they are at different micro-batches
    units inside of units                     yes         no: their order is another
    backward pass with units smaller than a   yes         no: what is computed again gathers them in an order of its
    block, or with fsdp_size=1                            own; a reduction between whole models is FSDP's alone

The rescue needs FSDP2 and names of torch's that are not public (parallel/broken_pass.py; 2.11 and 2.13 have them);
without them the error goes on as it is, as does one in the optimizer's step.
"""

from __future__ import annotations

import gc
import logging
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor

from verl_like.batch import Metric, Sequences
from verl_like.config.batch_plan import MicroBatchRule
from verl_like.parallel.dist import all_reduce_max
from verl_like.parallel.fsdp import Sharding
from verl_like.parallel.host_memory import is_out_of_memory

log = logging.getLogger(__name__)

Result = TypeVar("Result")


_NOT_RESCUED = (
    "The other ranks wait for this one in the middle of the %s, and nothing can be repeated. Go on from the last "
    "checkpoint with a smaller %s"
)


_KEYS = {  # by kind of pass
    "update": "actor_rollout_ref.actor.ppo_max_token_len_per_gpu (or ppo_micro_batch_size_per_gpu; the critic has its "
    "own)",
    "forward pass": "log_prob_max_token_len_per_gpu of actor_rollout_ref.rollout and .ref (the critic and the reward "
    "model have forward_max_token_len_per_gpu; or the like *_micro_batch_size_per_gpu)",
}


class OutOfMemory(Exception):
    """Error of a pass that ran out of memory on some rank, raised on every rank."""


class Rescue:
    """State of one engine's rescues: how large its micro-batches may be since memory ran out, and how often it did."""

    def __init__(self, sharding: Sharding, *, alone: bool, shares: bool = False) -> None:
        """shares: a token budget may hold more whole rows than fit, which begin alike (models/prefix_tree.py)."""
        self._sharding, self._alone, self._shares = sharding, alone, shares
        self._gathers_alone = self._in_model = False  # of the forward pass under way
        self._joining = False  # the others, in what is left of a backward pass that failed here
        self._failed = False  # in a backward pass, of which the other ranks know nothing yet
        self._most: dict[str, int] = {}  # by kind of pass: tokens, or sequences, of a micro-batch
        self._apart: set[str] = set()  # kinds of pass whose budget counts every row whole
        self._count = 0

    def repeated(
        self, kind: str, rule: MicroBatchRule, batch: Sequences, attempt: Callable[[MicroBatchRule], Result]
    ) -> Result:
        """Repeat attempt(rule) until it fits into memory, with smaller micro-batches each time (collective)."""
        while True:
            lowered = self._lowered(kind, rule)
            try:
                return attempt(lowered)
            except OutOfMemory as error:
                traceback.clear_frames(error.__traceback__)  # they hold the graph
            except Exception as error:
                if not self._alone and (is_out_of_memory(error) or self._joining):
                    error.add_note(_NOT_RESCUED % (kind, _KEYS[kind]))
                raise
            gc.collect()
            self._sharding.recover()
            if torch.cuda.is_initialized():
                torch.cuda.empty_cache()
            self._cut(kind, lowered, batch)

    @contextmanager
    def forward(self, *, gathers_alone: bool) -> Iterator[None]:
        """Run one micro-batch up to its loss inside (collective).

        Raises OutOfMemory on all ranks where this pass, or the backward pass before it, fails on any rank. After a
        failed backward pass nothing inside runs.

        gathers_alone: the model's own gathers are its only collectives; else call `model_done` behind the others.
        """
        self._gathers_alone, self._in_model = gathers_alone, True
        self._sharding.forward_begins()
        failed, self._failed = self._failed, False
        if not failed:
            try:
                yield
            except Exception as error:
                joins = self._alone or not self._in_model or (gathers_alone and self._sharding.gathers_the_rest)
                if not (is_out_of_memory(error) and self._sharding.recovers and joins):
                    raise
                _note(error)
                failed = True
        if failed and self._in_model and not self._alone:
            gc.collect()
            self._sharding.gather_the_rest()
        if failed if self._alone else all_reduce_max(int(failed)):
            raise OutOfMemory("a micro-batch's forward pass, or the backward pass before it")

    def backward(self, graph: list[Tensor]) -> None:
        """Run the backward pass of one micro-batch.

        graph: the loss, alone in a list. Where memory runs out it is taken out of the list, so nobody else should hold
        the tensors it was computed from.

        A rank alone then raises OutOfMemory. One of several still does what the others wait for: the next `forward`, or
        `agree`, raises on all. Raises the rank's own error where that cannot be done.
        """
        try:
            graph[0].backward()
            return
        except Exception as error:
            joins = self._alone or (self._gathers_alone and self._sharding.reduces_the_rest)
            if not (is_out_of_memory(error) and self._sharding.recovers and joins):
                raise
            _note(error)
        if self._alone:
            raise OutOfMemory("a micro-batch's backward pass")
        self._joining = True
        self._sharding.reduce_the_rest(graph)
        self._joining = False
        self._failed = True

    def agree(self) -> None:
        """Agree behind the last backward pass: raises OutOfMemory on all ranks where one failed on any (collective)."""
        failed, self._failed = self._failed, False
        if self._sharding.reduces_the_rest and not self._alone and all_reduce_max(int(failed)):
            raise OutOfMemory("the last micro-batch's backward pass")

    def forget(self) -> None:
        """Begin the next pass with micro-batches of the size that was asked for."""
        self._most.clear()
        self._apart.clear()

    def metrics(self) -> dict[str, Metric]:
        """Metrics once memory ran out.

        perf/out_of_memory: how often in this run; perf/lowered_micro_batch: size since then.
        """
        if not self._count:
            return {}
        found = {"perf/out_of_memory": Metric(value=float(self._count), reduction="max")}
        if "update" in self._most:
            found["perf/lowered_micro_batch"] = Metric(value=float(self._most["update"]), reduction="max")
        return found

    def model_done(self) -> None:
        """Note that this forward pass has no collective left."""
        self._in_model = False

    def _lowered(self, kind: str, rule: MicroBatchRule) -> MicroBatchRule:
        most = self._most.get(kind)
        if most is None:
            return rule
        if rule.max_tokens is not None:
            return MicroBatchRule(max_tokens=min(most, rule.max_tokens), apart=kind in self._apart)
        return MicroBatchRule(max_sequences=min(most, rule.max_sequences or most))

    def _cut(self, kind: str, rule: MicroBatchRule, batch: Sequences) -> None:
        """Halve the size of micro-batches from now on; where rows share tokens, count each whole in the end.

        Raises torch.OutOfMemoryError where micro-batches are single rows already.
        """
        longest = all_reduce_max(int(batch.num_tokens_B().max()) if len(batch) else 0)
        size, least = (rule.max_sequences, 1) if rule.max_tokens is None else (rule.max_tokens, longest)
        assert size is not None
        if size <= least and rule.max_tokens is not None and self._shares and not rule.apart:
            self._count += 1
            self._most[kind] = size
            self._apart.add(kind)
            log.warning("out of memory: the %s begins again, %d tokens of whole rows at a time from now on", kind, size)
            return
        if size <= least:
            raise torch.OutOfMemoryError(
                f"out of memory with one row in a micro-batch (the longest has {longest:,} tokens): shorten "
                "data.max_response_length, or see `verl-like plan` for what takes the memory"
            )
        self._count += 1
        self._most[kind] = max(size // 2, least)
        unit = "tokens" if rule.max_tokens is not None else "sequences"
        log.warning(
            "out of memory: the %s begins again with micro-batches of %d %s instead of %d, and keeps them for the rest "
            "of the run; the gradient is the same",
            *(kind, self._most[kind], unit, size),
        )


def _note(error: Exception) -> None:
    """Log the error, and let go of the tensors in its frames, which hold the graph."""
    log.warning("out of memory: %s", (str(error).splitlines() or [type(error).__name__])[0])
    traceback.clear_frames(error.__traceback__)
