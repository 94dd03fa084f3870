"""Every axis of the mesh on processes of this machine: bytes by the least, waiting stages by the formula, drops.

    verl-like bench mesh --ranks 2
    verl-like bench mesh --ranks 4 --only pipe shard-pipe pipe-context

One update of the trainer's own actor with each mesh: float32, activations kept, micro-batches of 512 tokens. What is
counted, and what the least is: wires.py.
"""

from __future__ import annotations

import argparse
import re
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch import Tensor, nn

from verl_like.algorithms.minibatch import denominators_of
from verl_like.engine import microbatch
from verl_like.engine.fsdp import FSDPEngine
from verl_like.engine.microbatch import computed_tokens
from verl_like.kit.bench.bars import bar
from verl_like.kit.bench.inputs import grouped_rows
from verl_like.kit.bench.phase import POLICY, Job, build_job, share_of_rank
from verl_like.kit.bench.ranks import on_ranks
from verl_like.kit.bench.report import Report, Row, check_comparable, finish
from verl_like.kit.bench.shapes import MODELS, BenchError, Workload
from verl_like.kit.bench.wires import Wires, by_axis, least_bytes
from verl_like.kit.forecast.traffic import bubble
from verl_like.models.lora_experts import stacks_of
from verl_like.parallel.dist import ProcessInfo
from verl_like.parallel.mesh import SplitAxis
from verl_like.parallel.pipeline import Absent, Pipe, order_of
from verl_like.workers.roles import ActorRole

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


BYTES, BUBBLE = 1.1, 1.15  # at most, by the least and by the formula
SHAPE = replace(MODELS["cpu"], hidden_size=128, num_layers=4, intermediate_size=256, tied_embeddings=False)
LOAD = Workload(num_prompts=8, responses_per_prompt=4, prompt_length=32, mean_response=96, max_response=96)
BUDGET = 512  # tokens of a micro-batch
BY_LEAST = "by least"
_ACTOR = f"{POLICY}.actor"
_FSDP = f"{_ACTOR}.fsdp_config"
KEYS = {  # axis -> its key
    "replicate": f"{_FSDP}.fsdp_size",
    "ulysses": f"{_ACTOR}.ulysses_sequence_parallel_size",
    **{name: f"{_FSDP}.{name}_parallel_size" for name in ("context", "tensor", "expert")},
    "pipe": f"{_FSDP}.pipeline_parallel_size",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """One rank's figures of an update.

    sent, least: bytes by axis.
    dropped: pairs of a token and an expert, those that routers chose here less those that experts computed here.
    micro_batches: of this rank.
    passes: times of its stage (timed_passes); None without stages.
    """

    sent: dict[str, int]
    least: dict[str, float]
    dropped: int
    micro_batches: int
    passes: tuple[float, float, float] | None


def main(arguments: argparse.Namespace) -> Report:
    """Measure the meshes of so many ranks; print a table of ratios, and whether they meet their bars."""
    named = meshes(arguments.ranks)
    if wrong := [name for name in arguments.only or () if name not in named]:
        raise BenchError(f"--only {' '.join(wrong)}: with --ranks {arguments.ranks} there are {', '.join(named)}")
    named = {name: keys for name, keys in named.items() if not arguments.only or name in arguments.only}
    work = {"ranks": arguments.ranks, "meshes": named, "shape": asdict(SHAPE), "load": asdict(LOAD), "budget": BUDGET}
    check_comparable("mesh", work, arguments.compare)
    with tempfile.TemporaryDirectory() as folder:
        jobs = {name: job_of(Path(folder) / name, keys, arguments.ranks) for name, keys in named.items()}
        device = next(iter(jobs.values())).device
        ranks = on_ranks(measure, jobs, num_ranks=arguments.ranks, device=device, threads=arguments.threads)
    rows = [row for name, job in jobs.items() for row in rows_of(name, [rank[name] for rank in ranks], job)]
    notes = [
        "One update, all ranks together. sent, least: megabytes, and those that the axis needs; waiting, formula: "
        "share of the stages' time, by the slots of their order and as measured in passes of equal length; dropped: "
        "pairs of a token and an expert.",
        *bars_of(rows),
    ]
    return finish(Report(bench="mesh", work=work, rows=rows, notes=notes), arguments.json, arguments.compare)


def bars_of(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the verdicts: of the worst row of each kind."""
    for kind, limit in {"": BYTES, "bubble, order": BUBBLE, "bubble, measured": BUBBLE}.items():
        own = [row for row in rows if row.name.partition(": ")[2] == kind or (not kind and "bubble" not in row.name)]
        if worst := max(own, key=lambda row: row.figures[BY_LEAST], default=None):
            yield bar(f"{worst.name}, the worst, by the least", worst.figures[BY_LEAST], limit)
    yield bar("dropped", sum(row.figures.get("dropped", 0) for row in rows), 0)


def meshes(ranks: int) -> dict[str, dict[str, Any]]:
    """Each axis over all ranks, and of four over two, beside FSDP's over what is left or two stages: name -> keys."""
    kept = {f"{_FSDP}.reshard_after_forward": False, f"{_FSDP}.sync_every_micro_batch": False}
    found: dict[str, dict[str, Any]] = {axis: {key: 1 if axis == "replicate" else ranks} for axis, key in KEYS.items()}
    pieces = {KEYS["pipe"]: 2, f"{_FSDP}.virtual_pipeline_size": 2}
    found["pipe-virtual" if ranks == 2 else "shard-pipe-virtual"] = pieces
    found["pipe-zero-bubble"] = {KEYS["pipe"]: ranks, f"{_FSDP}.pipeline_schedule": "zero_bubble"}
    if ranks > 2:
        found |= {f"shard-{axis}": {key: 2} for axis, key in KEYS.items()}
        found |= {f"pipe-{axis}": {KEYS["pipe"]: 2, key: ranks // 2} for axis, key in KEYS.items() if axis != "pipe"}
        found["context-ulysses"] = {KEYS["context"]: 2, KEYS["ulysses"]: 2}
    return {"shard": {}, "shard-kept": kept, **found}


def job_of(folder: Path, keys: dict[str, Any], ranks: int) -> Job:
    """Describe an update with these keys; where experts are handed out, of a mixture of them."""
    more = {f"{_ACTOR}.ppo_max_token_len_per_gpu": BUDGET, f"{_ACTOR}.optim.lr": 0} | keys
    more[f"{POLICY}.model.enable_gradient_checkpointing"] = False
    shape = replace(SHAPE, num_experts=8) if KEYS["expert"] in keys else SHAPE
    return build_job(folder, shape, LOAD, [f"{key}={value}" for key, value in more.items()], ranks=ranks)


def measure(process: ProcessInfo, run_id: str, jobs: dict[str, Job]) -> dict[str, Found]:
    """Run an update with each mesh (collective)."""
    return {name: _measured(process, job) for name, job in jobs.items()}


def _measured(process: ProcessInfo, job: Job) -> Found:
    actor, whole = ActorRole(job.spec, process), grouped_rows(job.workload, job.spec.tokenizer_size, seed=1)
    engine, rows, rule = actor.engine, share_of_rank(job, whole, process), actor.sizes.update
    assert rule is not None
    mesh = engine.sharding.mesh
    parts = [part[1] for part in microbatch.cut(rows, rule, share_prompts=engine.shares_prompts) if part is not None]
    update = partial(actor.update, [(rows, denominators_of(whole, job.workload.max_response))])
    with _watched_experts(engine, mesh.expert) as pairs, Wires() as wires:
        update()
    tokens = sum(computed_tokens(part) - len(part) for part in parts)  # a row's last token has no place in the model
    return Found(
        sent=by_axis(wires.sent, mesh),
        least=least_bytes(engine, len(parts), tokens / mesh.sizes.ranks_per_row, pairs["elsewhere"]),
        dropped=pairs["chosen"] - pairs["computed"],
        micro_batches=len(parts),
        passes=None if mesh.pipe is None else timed_passes(engine, mesh.pipe, update),
    )


@contextmanager
def _watched_experts(engine: FSDPEngine, axis: SplitAxis | None) -> Iterator[Counter[str]]:
    """Count pairs of a token and an expert: those that routers choose here, those whose expert is elsewhere, and those
    that the experts' own forward pass computes here."""
    pairs = Counter[str]()
    if axis is None:
        yield pairs
        return
    stacks = list(stacks_of(engine.model.hf)[0].values())

    def note(stack: Any, inputs: tuple[Any, ...]) -> None:
        pairs["chosen"] += inputs[1].numel()
        pairs["elsewhere"] += int((inputs[1] // stack.num_experts != axis.group.rank).sum())

    def forward(stack: Any, hidden_MH: Tensor, chosen_M1: Tensor, weights_M1: Tensor) -> Tensor:
        pairs["computed"] += chosen_M1.numel()
        return own(stack, hidden_MH, chosen_M1, weights_M1)

    hooks, own = [stack.register_forward_pre_hook(note) for stack in stacks], type(stacks[0]).forward
    with mock.patch.object(type(stacks[0]), "forward", forward):
        yield pairs
    for hook in hooks:
        hook.remove()


def rows_of(name: str, ranks: Sequence[Found], job: Job) -> Iterator[Row]:
    """Yield a row for each axis of a mesh that has something to send, then for its stages."""
    for axis in ranks[0].least:
        sent, least = sum(rank.sent.get(axis, 0) for rank in ranks), sum(rank.least[axis] for rank in ranks)
        if least:
            figures = {"sent": sent / 1e6, "least": least / 1e6, BY_LEAST: sent / least}
            figures |= {"dropped": sum(rank.dropped for rank in ranks)} if axis == "expert" else {}
            yield Row(name=f"{name}: {axis}", figures=figures)
    timed = [rank.passes for rank in ranks if rank.passes is not None]
    if timed:
        fsdp = job.spec.config.actor_rollout_ref.actor.fsdp_config
        sizes = (fsdp.pipeline_parallel_size, ranks[0].micro_batches, fsdp.virtual_pipeline_size)
        least = bubble(*sizes, late=fsdp.pipeline_schedule == "zero_bubble")
        shares = {"order": idle_slots(fsdp.pipeline_schedule, *sizes), "measured": idle_share(timed)}
        for way, share in shares.items():
            figures = {"waiting": share, "formula": least, BY_LEAST: share / least}
            yield Row(name=f"{name}: bubble, {way}", figures=figures)
