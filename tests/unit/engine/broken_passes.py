"""Backward passes that break off on one of two ranks, wherever they can: the gradient is that of a whole pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from tests.unit.engine import tiny
from verl_like.batch import Denominators, Experience, Metric
from verl_like.config.batch_plan import MicroBatchRule
from verl_like.config.fsdp import FSDPConfig
from verl_like.engine.fsdp import FSDPEngine
from verl_like.engine.microbatch import Objective
from verl_like.parallel.dist import ProcessInfo

RULE, SMALLER = MicroBatchRule(max_sequences=4), MicroBatchRule(max_sequences=2)
EVEN = (tuple(range(0, 16, 2)), tuple(range(1, 16, 2)))  # two micro-batches a rank, then four
UNEVEN = ((0,), tuple(range(1, 16, 2)))  # rank 0 has one row, and then none
LORA = {"lora_rank": 4, "lora_alpha": 8}
CHECKPOINTING = {"enable_gradient_checkpointing": True}
SELECTIVE = {"enable_gradient_checkpointing": True, "recompute_granularity": "selective"}
NUM_LAYERS = 3


@dataclass(frozen=True)
class Break:
    """Memory runs out in the `nth` micro-batch (from 1) at a place:

    loss          before the backward pass comes to the model
    root          in the root, before the first layer
    before/after  in a layer's multi-layer perceptron, before or after its own gradients are there
    again         where a layer is computed again
    embedding     behind the last layer
    gather, copy  of a unit's weights, in the backward pass: nothing was sent, or all of it
    reduce, late  of a unit's gradients: nothing was sent, or all of it
    """

    place: str
    unit: int = 2  # 0 is the root, the layers follow
    nth: int = 1
    error: type[Exception] | None = None  # None: that of torch's allocator

    def happens(self) -> None:
        if self.error is not None:
            raise self.error()
        torch.empty(2**47)


@dataclass(frozen=True)
class Case:
    """keys: of the engine. breaks: by rank."""

    breaks: dict[int, Break]
    keys: dict[str, Any] = field(default_factory=dict)
    rows: tuple[tuple[int, ...], ...] = EVEN


class Watched(tiny.PolicyLoss):
    """`watch` is called when the backward pass begins."""

    def __init__(self, watch: Callable[[], None]) -> None:
        super().__init__()
        self._watch = watch

    def __call__(
        self, outputs: dict[str, Tensor], experience: Experience, denominators: Denominators
    ) -> tuple[Tensor, dict[str, Metric]]:
        loss, metrics = super().__call__(outputs, experience, denominators)
        loss.register_hook(lambda _: self._watch())
        return loss, metrics


@contextmanager
def planted(engine: FSDPEngine, what: Break, seen: list[str]) -> Iterator[tiny.PolicyLoss]:
    """The loss to use inside. `seen` gets the place when it happened."""
    calls = 0

    def watch(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == what.nth:
            seen.append(what.place)
            what.happens()

    def in_backward(*_: Any) -> None:
        if torch._C._current_graph_task_id() != -1:
            watch()

    base = engine.model.hf.base_model
    mlp = base.layers[what.unit - 1].mlp
    group = fsdp_group(engine.model if what.unit == 0 else base.layers[what.unit - 1])
    hooks: dict[str, Callable[[], Any]] = {
        "root": lambda: base.norm.register_full_backward_pre_hook(watch),
        "before": lambda: mlp.register_full_backward_pre_hook(watch),
        "after": lambda: mlp.register_full_backward_hook(watch),
        "again": lambda: mlp.register_forward_pre_hook(in_backward),
        "embedding": lambda: base.embed_tokens.register_full_backward_hook(watch),
    }
    if what.place == "loss":
        yield Watched(watch)
    elif what.place in hooks:
        with hooks[what.place]():
            yield tiny.PolicyLoss()
    else:
        with broken_method(group, what.place, in_backward, watch):
            yield tiny.PolicyLoss()


def fsdp_group(unit: Any) -> Any:
    return unit._get_fsdp_state()._fsdp_param_group


def broken_method(group: Any, place: str, in_backward: Callable[..., None], watch: Callable[..., None]) -> Any:
    """FSDP2's own step of a unit breaks off."""
    if place == "gather":
        return patch.object(group, "_all_gather_comm", Before(group._all_gather_comm, in_backward))
    if place == "copy":
        return patch.object(group, "wait_for_unshard", lambda: (in_backward(), type(group).wait_for_unshard(group)))
    reduction = group._reduce_scatter_comm
    if place == "reduce":
        return patch.object(reduction, "_own", Before(reduction._own, watch))
    return patch.object(group, "_reduce_scatter_comm", Behind(reduction, watch))


class Before:
    """A collective that fails where it makes its buffer."""

    def __init__(self, own: Any, watch: Callable[..., None]) -> None:
        self._own, self._watch = own, watch

    def allocate(self, *arguments: Any, **options: Any) -> Tensor:
        self._watch()
        return self._own.allocate(*arguments, **options)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self._own(*arguments, **options)


class Behind:
    """A collective behind which something fails; else it is `own`."""

    def __init__(self, own: Any, watch: Callable[..., None]) -> None:
        self.__dict__.update(own=own, watch=watch)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.own, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.own, name, value)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        work = self.own(*arguments, **options)
        self.watch()
        return work


def gradient(
    engine: FSDPEngine, loss: tiny.PolicyLoss, rows: tuple[int, ...], rule: MicroBatchRule
) -> dict[str, Tensor]:
    """Of one mini-batch, rescued where that is needed; and its loss."""
    batch = tiny.experience(16, seed=1)
    mine = batch.select(list(rows))
    engine._rescue.forget()
    whole = tiny.denominators(batch)
    metrics = engine._rescue.repeated(
        "update", rule, mine, lambda rule: engine.accumulate(mine, Objective(loss, whole, 1.0), rule)
    )
    found = {name: full.clone() for name, full in engine.sharding.full_gradients()}
    engine.sharding.drop_gradients()
    losses = [each["pg_loss"].value for each in metrics if "pg_loss" in each]
    return found | {"loss": torch.tensor(sum(losses))}


def run_cases(process: ProcessInfo, path: str, cases: dict[str, Case]) -> dict[str, Any]:
    """{case: (what happened on this rank, the gradient, that without a fault)}, an engine for each kind of keys."""
    engines: dict[str, FSDPEngine] = {}
    found = {}
    for name, case in cases.items():
        kind = repr(case.keys)
        if kind not in engines:
            engines[kind] = tiny.build_engine(process, path, **case.keys)
        engine, seen = engines[kind], []
        what = case.breaks.get(process.rank, Break("loss", nth=0))
        rows = case.rows[process.rank]
        with planted(engine, what, seen) as loss:
            rescued = gradient(engine, loss, rows, RULE)
        found[name] = (seen, rescued, gradient(engine, tiny.PolicyLoss(), rows, SMALLER))
    return found


def check(cases: dict[str, Case], ranks: list[dict[str, Any]]) -> None:
    """What `run_cases` gave on each rank."""
    for rank, found in enumerate(ranks):
        for name, (happened, rescued, whole) in found.items():
            assert happened == ([cases[name].breaks[rank].place] if rank in cases[name].breaks else []), name
            tiny.assert_same(rescued, whole, 1e-5)


def _fsdp(**keys: Any) -> dict[str, Any]:
    return {"fsdp": FSDPConfig(**keys)}


def _of_rank_1(*what: Any, **keys: Any) -> Case:
    return Case({1: Break(*what)}, keys)


ONCE = _fsdp(sync_every_micro_batch=False)
BOTH_ONCE = _fsdp(sync_every_micro_batch=False, reshard_after_forward=False)
CASES = {
    "loss": _of_rank_1("loss", 2, 2),
    "gather": _of_rank_1("gather", 2),
    "reduce": _of_rank_1("reduce", 2),
    "late": _of_rank_1("late", 2),
    "reduce root": _of_rank_1("reduce", 0, 2),
    "both": Case({0: Break("after", 1, 2, MemoryError), 1: Break("before", 3, 2, torch.OutOfMemoryError)}),
    "rank without rows": Case({0: Break("after", 2, 2)}, rows=UNEVEN),
    "summed once, gathered once": _of_rank_1("after", 2, 2, **BOTH_ONCE),
    "LoRA, computed again": _of_rank_1("again", 2, model=LORA | CHECKPOINTING),
}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "summed once": ONCE,
    "gathered once": _fsdp(reshard_after_forward=False),
    "both once": BOTH_ONCE,
    "prefetch": _fsdp(forward_prefetch=True),
    "bfloat16": _fsdp(dtype="bfloat16"),
    "bfloat16 summed once": _fsdp(dtype="bfloat16", sync_every_micro_batch=False),
    "offload": _fsdp(offload_policy=True),
    "tied": {"model": {"override_config": {"tie_word_embeddings": True}}},
    "computed again": {"model": CHECKPOINTING} | _fsdp(forward_prefetch=True),
    "partly computed again": {"model": SELECTIVE},
    "LoRA": {"model": LORA},
    "LoRA computed again": {"model": LORA | CHECKPOINTING} | ONCE,
}


def all_cases() -> dict[str, Case]:
    """Each place with each kind of keys where it is one."""
    cases = {}
    for kind, keys in KINDS.items():
        model = keys.get("model", {})
        kept = "fsdp" in keys and not keys["fsdp"].reshard_after_forward
        places = [
            "loss",
            "root",
            "before 1",
            "before 3",
            "after 1",
            "after 3",
            "reduce 1",
            "reduce 2",
            "late 1",
            "late 3",
        ]
        places += [] if "lora_rank" in model else ["embedding", "reduce 0", "late 0"]
        places += [] if kept else ["gather 2", "copy 1", "copy 3"]
        places += ["again 1", "again 3"] if "enable_gradient_checkpointing" in model else []
        for index, place in enumerate(places):
            name, _, unit = place.partition(" ")
            nth = 1 if name in ("reduce", "late") else 1 + index % 2  # of those, the only one where it is done once
            cases[f"{kind}: {place}"] = Case({1: Break(name, int(unit or 2), nth)}, keys)
    return cases
