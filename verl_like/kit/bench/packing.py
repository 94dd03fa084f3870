"""Quality of packing: the number of micro-batches against the least possible, and the share of the budget in use.

    verl-like bench packing
    verl-like bench packing --workloads w2 w3 --budgets 8192 32768 --ranks 1 8

Pure arithmetic, no model: the rows of a workload are balanced over the ranks and cut as the engine cuts them.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from verl_like.config.batch_plan import MicroBatchRule
from verl_like.kit.bench.report import Report, Row, check_comparable, finish
from verl_like.kit.bench.shapes import WORKLOADS
from verl_like.parallel.balance import micro_batches
from verl_like.trainer.dispatch import rows_per_rank

_DRAWS = 5
_MANY = 20  # micro-batches of a rank from which on they are to be full
EXCESS, FILL = 1, 0.95  # the project's targets: micro-batches over the least number; share of the budget in use


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """Packing of one rank's rows.

    count: micro-batches.
    least: lower bound on them.
    fill: share of the token budget in use.
    """

    count: int
    least: int
    fill: float

    @property
    def good(self) -> bool:
        """True where both targets are met."""
        return self.count <= self.least + EXCESS and (self.count < _MANY or self.fill > FILL)


def main(arguments: argparse.Namespace) -> Report:
    """Print the table."""
    work = {"workloads": {name: asdict(WORKLOADS[name]) for name in arguments.workloads}, "draws": _DRAWS}
    work |= {"budgets": arguments.budgets, "ranks": arguments.ranks}
    check_comparable("packing", work, arguments.compare)
    rows, missed = [], []
    for name in arguments.workloads:
        workload = WORKLOADS[name]
        for budget in arguments.budgets:
            for ranks in arguments.ranks:
                draws = [workload.response_lengths(seed) for seed in range(_DRAWS)]
                start = time.perf_counter()
                found = [q for d in draws for q in qualities([workload.prompt_length + n for n in d], budget, ranks)]
                seconds = (time.perf_counter() - start) / _DRAWS
                rows.append(row_of(f"{name}, {budget} tokens, {ranks} rank(s)", found, seconds))
                missed += [] if all(q.good for q in found) else [rows[-1].name]
    notes = [
        f"Worst of {_DRAWS} draws and of all ranks; seconds: balancing over ranks and cutting, of all ranks. Least: no "
        f"packing has fewer micro-batches (lower bound of Martello and Toth). Targets: least + {EXCESS}, and over "
        f"{FILL:.0%} full from {_MANY} micro-batches a rank on: "
        + (f"MISSED by {'; '.join(missed)}." if missed else "met.")
    ]
    return finish(Report(bench="packing", work=work, rows=rows, notes=notes), arguments.json, arguments.compare)


def qualities(num_tokens: Sequence[int], budget: int, num_ranks: int) -> list[Quality]:
    """Rows balanced over ranks by tokens, then cut, on each rank that has rows."""
    shares = rows_per_rank(list(num_tokens), num_ranks, balance=True)
    return [quality([num_tokens[row] for row in share], budget) for share in shares if share]


def quality(num_tokens: Sequence[int], budget: int) -> Quality:
    """Measure the packing of one rank's rows.

    A row longer than the budget is a micro-batch of its own, and fills it.
    """
    parts = micro_batches(num_tokens, MicroBatchRule(max_tokens=budget))
    used = sum(min(budget, sum(num_tokens[row] for row in part)) for part in parts)
    return Quality(count=len(parts), least=least_bins(num_tokens, budget), fill=used / (budget * len(parts)))


def least_bins(sizes: Sequence[int], capacity: int) -> int:
    """Compute a lower bound on the number of bins: L2 of Martello and Toth, Knapsack Problems, 1990, section 8.3.

    For every threshold t up to half the capacity: sizes over capacity - t need a bin of their own, in which nothing of
    size t or more fits beside; sizes over half need one each, and what sizes from t on do not find there fills more.
    A size over the capacity counts as the capacity.
    """
    cut = [min(size, capacity) for size in sizes]
    best = math.ceil(sum(cut) / capacity)
    for t in sorted({size for size in cut if 2 * size <= capacity}):
        alone = sum(size > capacity - t for size in cut)
        large = [size for size in cut if capacity < 2 * size and size <= capacity - t]
        small = sum(size for size in cut if t <= size and 2 * size <= capacity)
        over = small - (len(large) * capacity - sum(large))
        best = max(best, alone + len(large) + max(0, math.ceil(over / capacity)))
    return max(best, sum(2 * size > capacity for size in cut))


def row_of(name: str, found: Sequence[Quality], seconds: float) -> Row:
    """The worst of each figure."""
    columns = {
        "micro-batches a rank": float(max(q.count for q in found)),
        "over the least": float(max(q.count - q.least for q in found)),
        "fill, least": min(q.fill for q in found),
    }
    return Row(name=name, seconds=seconds, figures=columns)
