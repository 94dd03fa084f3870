"""The menu of losses through the real engine, in each of several processes: comparable gradients for every cut.

In float64. In float32 a packed forward pass moves this model's log-probs by up to 7e-6 against a padded one, and was
seen to move a gradient by 2e-5 of its largest number: each was 1e-5 from float64, where one row weighed much (dppo_kl
with rollout_is=sequence), and no threshold or kink was near. No limit tells that from a small fault.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from transformers.models.qwen2 import modeling_qwen2

from tests.unit.algorithms.combinations import LOSSES, SUBSETS, Combination, covering
from tests.unit.engine import scenarios
from tests.unit.engine.tiny import WideTorch, experience, wide_engine
from verl_like.algorithms.minibatch import denominators_of
from verl_like.algorithms.preparation import prepare_batch, prepare_minibatch
from verl_like.batch import Denominators, Experience
from verl_like.config import OptimConfig
from verl_like.config.batch_plan import MicroBatchRule
from verl_like.engine.fsdp import FSDPEngine
from verl_like.engine.train_engine import LossFn
from verl_like.parallel.dist import ProcessInfo
from verl_like.parallel.fsdp import gather

NUM_ROWS = 7
STRIDE = 41  # step through a loss's combinations: neighbours differ in one option only
L2 = 0.5
WHOLE = MicroBatchRule(max_tokens=10_000)
Job = tuple[Combination, Experience, Denominators]


@contextlib.contextmanager
def wide() -> Iterator[None]:
    """Engines that are built and called meanwhile have their angles, norms and softmax in float64 too."""
    with mock.patch.object(modeling_qwen2, "torch", WideTorch()):
        yield


def chosen() -> list[Combination]:
    """For each loss one of its combinations, in turn, so that modes, KL terms and options change from loss to loss."""
    return [
        next(itertools.islice(covering(loss, whole=True), i * STRIDE % len(SUBSETS), None))
        for i, loss in enumerate(LOSSES)
    ]


def jobs(engine: FSDPEngine) -> list[Job]:
    """What the driver sends: prepared mini-batches whose old log-probs lie near those of the engine's weights."""
    found = []
    for seed, combination in enumerate(chosen()):
        actor = combination.actor
        g = torch.Generator().manual_seed(seed)
        rows = experience(NUM_ROWS, seed=seed)
        rows = rows.replace(advantages_T=rows.advantages_T.double())  # some losses take their mean over a row
        current = engine.forward(rows, want=frozenset({"log_probs"}), rule=WHOLE)["log_probs"]
        near = [current + 0.25 * torch.randn(current.shape, generator=g) for _ in range(3)]
        rows = rows.replace(
            old_log_probs_T=near[0],
            ref_log_probs_T=near[1],
            rollout_log_probs_T=near[2],
            score_B=torch.randint(-1, 2, (NUM_ROWS,), generator=g).float(),
            truncated_B=torch.arange(NUM_ROWS) == 2,
            difficulty_B=torch.rand(NUM_ROWS, generator=g),
        )
        kept = prepare_minibatch(prepare_batch(rows, actor), actor, seed=(seed,))
        found.append((combination, kept, denominators_of(kept, 64)))
    return found


def gradients(engine: FSDPEngine, rows: Experience, loss: LossFn, counts: Denominators, rule: MicroBatchRule) -> Any:
    """Full gradient of one mini-batch, before clipping, as one vector, and the metrics; no weight changes."""
    kept: list[Tensor] = []

    def keep() -> dict[str, Any]:
        for p in engine.model.parameters():
            assert p.grad is not None
            kept.append(gather(p.grad, engine.device, p.grad.dtype).flatten().clone())
        return {}

    real, engine._step = engine._step, keep  # type: ignore[method-assign]
    metrics = engine.train_minibatch(rows, loss, counts, rule=rule)
    engine._step = real  # type: ignore[method-assign]
    numbers = {name: (m.value, m.reduction) for name, m in metrics.items() if not name.startswith("perf/")}
    return torch.cat(kept), numbers


def run(engine: FSDPEngine, process: ProcessInfo, work: list[Job], rule: MicroBatchRule, share: str) -> list[Any]:
    """Gradient and metrics of each job on this rank's share of its rows."""
    return [
        gradients(engine, scenarios.my_rows(process, rows, share), combination.objective(), counts, rule)
        for combination, rows, counts in work
    ]


def norm_with_l2(process: ProcessInfo, path: str, job: Job) -> float:
    """Reported gradient norm of a real step with coupled L2."""
    combination, rows, counts = job
    engine = wide_engine(process, path, optim=OptimConfig(lr=1e-2, l2_coeff=L2))
    part = scenarios.my_rows(process, rows, "even")
    return engine.train_minibatch(part, combination.objective(), counts, rule=scenarios.RULE)["grad_norm"].value


@wide()
def on_rank(process: ProcessInfo, path: str, work_path: str) -> dict[str, Any]:
    """Every job with its rows spread over the ranks, and with all rows on the first; the norm of one with L2."""
    engine, work = wide_engine(process, path), torch.load(work_path, weights_only=False)
    answers: dict[str, Any] = {s: run(engine, process, work, scenarios.RULE, s) for s in ("even", "first")}
    return answers | {"l2": norm_with_l2(process, path, work[0])}
