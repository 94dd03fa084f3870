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
    both, with Ulysses, context, tensor or    yes         by a new start: other collectives run inside
    expert parallelism, full_kl or images
    all, with stages of a pipeline                        by a new start: they are at different micro-batches
    units inside of units                     yes         by a new start: their order is another
    backward pass with units smaller than a   yes         by a new start: what is computed again gathers them in an
    block, or with fsdp_size=1                            order of its own; a reduction between whole models is FSDP's

A new start: the rank's error (`PassTooLarge`) ends the workers, and brings the driver the sizes to go on with. With
trainer.max_restarts it begins again from the newest checkpoint, and gives them to the engine in place of this one
(trainer/run.py); without, the run ends, and the error names the keys.

In place the rescue needs FSDP2 and names of torch's that are not public (parallel/broken_pass.py; 2.11 and 2.13 have
them); without them several ranks take a new start, and on one the error goes on as it is, as does one in the
optimizer's step.
"""

from __future__ import annotations

import gc
import logging
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from verl_like.batch import Metric, Sequences
from verl_like.config.micro_batches import Lowered, MicroBatchRule, PassTooLarge
from verl_like.parallel.dist import all_reduce_max
from verl_like.parallel.fsdp import Sharding
from verl_like.parallel.host_memory import is_out_of_memory

log = logging.getLogger(__name__)

Result = TypeVar("Result")


_NOT_RESCUED = (
    "out of memory in the %s, with micro-batches of %s: %s. The other ranks wait for this one in the middle of it, and "
    "nothing can be repeated. With trainer.max_restarts the run goes on by itself from the newest checkpoint, with %s; "
    "or give it a smaller %s"
)


_BY_SEQUENCES = " by sequences"
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

    def __init__(self, sharding: Sharding, lowered: Lowered, *, alone: bool, shares: bool = False) -> None:
        """Begin with what an earlier start of the run had to lower.

        shares: a token budget may hold more whole rows than fit, which begin alike (models/prefix_tree.py).
        """
        self._sharding, self._sizes, self._alone, self._shares = sharding, lowered, alone, shares
        self._gathers_alone = self._in_model = False  # of the forward pass under way
        self._joining = False  # the others, in what is left of a backward pass that failed here
        self._failed = False  # in a backward pass, of which the other ranks know nothing yet

    def repeated(
        self, kind: str, rule: MicroBatchRule, batch: Sequences, attempt: Callable[[MicroBatchRule], Result]
    ) -> Result:
        """Repeat attempt(rule) until it fits into memory, with smaller micro-batches each time (collective).

        Raises PassTooLarge on a rank that must leave the others waiting, torch.OutOfMemoryError where micro-batches are
        single rows already.
        """
        while True:
            lowered = self._lowered(kind, rule)
            try:
                return attempt(lowered)
            except OutOfMemory as error:
                traceback.clear_frames(error.__traceback__)  # they hold the graph
            except Exception as error:
                if self._alone or not (is_out_of_memory(error) or self._joining):
                    raise
                smaller = self._smaller(kind, lowered, _longest(batch))  # of this rank: the others answer no more
                told = kind, lowered, _first_line(error), self._lowered(kind, rule, smaller), _KEYS[kind]
                raise PassTooLarge(_NOT_RESCUED % told, smaller) from error
            gc.collect()
            self._sharding.recover()
            if torch.cuda.is_initialized():
                torch.cuda.empty_cache()
            self._sizes = self._smaller(kind, lowered, all_reduce_max(_longest(batch)))
            log.warning(
                "out of memory: the %s begins again with micro-batches of %s instead of %s, and keeps them for the "
                "rest of the run; the gradient is the same",
                *(kind, self._lowered(kind, rule), lowered),
            )

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
        self._sizes = replace(self._sizes, most={}, apart=frozenset())

    def metrics(self) -> dict[str, Metric]:
        """Metrics once memory ran out.

        perf/out_of_memory: how often in this run; perf/lowered_micro_batch: size since then.
        """
        sizes = self._sizes
        if not sizes.count:
            return {}
        found = {"perf/out_of_memory": Metric(value=float(sizes.count), reduction="max")}
        for name in {"update", f"update{_BY_SEQUENCES}"} & sizes.most.keys():
            found["perf/lowered_micro_batch"] = Metric(value=float(sizes.most[name]), reduction="max")
        return found

    def model_done(self) -> None:
        """Note that this forward pass has no collective left."""
        self._in_model = False

    def _lowered(self, kind: str, rule: MicroBatchRule, sizes: Lowered | None = None) -> MicroBatchRule:
        sizes = sizes or self._sizes
        most = sizes.most.get(_name(kind, rule))
        if most is None:
            return rule
        if rule.max_tokens is not None:
            return MicroBatchRule(max_tokens=min(most, rule.max_tokens), apart=kind in sizes.apart)
        return MicroBatchRule(max_sequences=min(most, rule.max_sequences or most))

    def _smaller(self, kind: str, rule: MicroBatchRule, longest: int) -> Lowered:
        """Halve the size of micro-batches; where rows share tokens, count each whole in the end.

        longest: tokens of the longest row, under which no budget goes. Raises torch.OutOfMemoryError where
        micro-batches are single rows already.
        """
        size, least = (rule.max_sequences, 1) if rule.max_tokens is None else (rule.max_tokens, max(1, longest))
        assert size is not None
        sizes = replace(self._sizes, count=self._sizes.count + 1)
        if size > least:
            return replace(sizes, most={**sizes.most, _name(kind, rule): max(size // 2, least)})
        if rule.max_tokens is not None and self._shares and not rule.apart:
            return replace(sizes, most={**sizes.most, kind: size}, apart=sizes.apart | {kind})
        raise torch.OutOfMemoryError(
            f"out of memory with one row in a micro-batch (the longest has {longest:,} tokens): shorten "
            "data.max_response_length, or see `verl-like plan` for what takes the memory"
        )


def _name(kind: str, rule: MicroBatchRule) -> str:
    """Name the size of a kind of pass: roles that share an engine may count in the other unit."""
    return kind if rule.max_tokens is not None else kind + _BY_SEQUENCES


def _longest(batch: Sequences) -> int:
    """Tokens of the longest row; 0 without rows."""
    return int(batch.num_tokens_B().max()) if len(batch) else 0


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _note(error: Exception) -> None:
    """Log the error, and let go of the tensors in its frames, which hold the graph."""
    log.warning("out of memory: %s", _first_line(error))
    traceback.clear_frames(error.__traceback__)
