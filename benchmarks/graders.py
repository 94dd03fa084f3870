"""Graders: agreement with what is right, and responses per second through the reward pool, next to other projects.

    python -m benchmarks.graders                              # ours and math-verify
    pip install --no-deps --target /tmp/peers verl trl
    python -m benchmarks.graders --peers /tmp/peers --workers 2

The responses are the reference answers of GSM8K and MATH, as they are, respelled and perturbed (`grader_rows.py`),
and hand-written pairs of answers that mean the same or nearly do. Every grader runs in the trainer's reward pool;
caches are cold, and the time its workers need to start is not counted.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.grader_rows import GradedRow, cases, gsm8k_rows, math_rows
from verl_like.rewards import graders
from verl_like.rewards.reward_call import RewardCall, RewardOutcome, ScorerSpec
from verl_like.services.pool import WorkerPool

_PEERS = "pkg://benchmarks.peer_graders"
_TIMEOUT_S = 30.0


def main() -> None:
    """Print both tables."""
    arguments = _arguments()
    rows = load_rows(arguments.data, arguments.cases)
    for source in dict.fromkeys(row.data_source for row in rows):
        chosen = [row for row in rows if row.data_source == source]
        random.Random(0).shuffle(chosen)
        chosen = chosen[: arguments.limit]
        for name, spec in scorers(arguments.peers, source):
            outcomes, seconds = grade(spec, chosen, num_workers=arguments.workers)
            print(line(source, name, chosen, outcomes, seconds), flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="folder with gsm8k/ and math/")
    parser.add_argument("--cases", type=Path, default=Path("tests/unit/rewards/data"), help="folder of written cases")
    parser.add_argument("--peers", default="", help="folder that verl and trl were installed into")
    parser.add_argument("--workers", type=int, default=2, help="reward processes")
    parser.add_argument("--limit", type=int, default=None, help="at most so many responses of a source")
    return parser.parse_args()


def load_rows(data: Path, written: Path) -> list[GradedRow]:
    """What is there of: GSM8K, MATH, the written cases."""
    rows: list[GradedRow] = []
    if (data / "gsm8k").exists():
        rows += gsm8k_rows(data / "gsm8k")
    if (data / "math" / "math_train.json").exists():
        rows += math_rows(data / "math" / "math_train.json")
    for form, right in (("equivalent", True), ("near_miss", False)):
        if (written / f"{form}.txt").exists():
            pairs = cases(written / f"{form}.txt")
            rows += [GradedRow("written cases", form, t, f"So $\\boxed{{{a}}}$.", right) for t, a in pairs]
    return rows


def scorers(peers: str, source: str) -> list[tuple[str, ScorerSpec]]:
    """Ours and the others, as the pool takes them."""
    chosen = [("verl_like", ScorerSpec(timeout=_TIMEOUT_S))]
    if "gsm8k" not in source:
        chosen.append(("math-verify", ScorerSpec(path=_PEERS, name="math_verify", timeout=_TIMEOUT_S)))
    if peers:
        kwargs = {"peers": peers}
        chosen.append(("verl", ScorerSpec(path=_PEERS, name="verl", kwargs=kwargs, timeout=_TIMEOUT_S)))
        if "gsm8k" not in source:
            chosen.append(("trl", ScorerSpec(path=_PEERS, name="trl", kwargs=kwargs, timeout=_TIMEOUT_S)))
    return chosen


def grade(spec: ScorerSpec, rows: Sequence[GradedRow], *, num_workers: int) -> tuple[list[RewardOutcome], float]:
    """All rows through a pool of its own: outcomes in order, and seconds."""
    calls = [_call(row, named=spec.path is None) for row in rows]
    pool: WorkerPool[RewardCall, RewardOutcome] = WorkerPool(spec, num_workers=num_workers)
    try:
        pool.start()
        start = time.perf_counter()
        outcomes = [future.result() for future in pool.submit(calls)]
        return outcomes, time.perf_counter() - start
    finally:
        pool.close()


def _call(row: GradedRow, *, named: bool) -> RewardCall:
    grader = (graders.choose().grader_of_row(row.data_source) or "math") if named else None
    return RewardCall(
        data_source=row.data_source, solution_str=row.response, ground_truth=row.truth, extra_info={}, grader=grader
    )


def line(source: str, name: str, rows: Sequence[GradedRow], outcomes: Sequence[RewardOutcome], seconds: float) -> str:
    """One row of a Markdown table: agreement by form, failures, responses per second."""
    total: Counter[str] = Counter(row.form for row in rows)
    agreed: Counter[str] = Counter()
    for row, outcome in zip(rows, outcomes, strict=True):
        agreed[row.form] += outcome.kind is None and says_right(outcome) == row.right
    forms = ", ".join(f"{form} {agreed[form]} of {total[form]}" for form in sorted(total))
    kinds = Counter(outcome.kind for outcome in outcomes if outcome.kind is not None)
    failed = ", ".join(f"{count} {kind}" for kind, count in kinds.items()) or "none"
    slowest = max(outcome.seconds for outcome in outcomes)
    return f"| {source} | {name} | {forms} | {failed} | {len(rows) / seconds:,.0f} | {slowest:.2f} s |"


def says_right(outcome: RewardOutcome) -> bool:
    """Whether the grader held the response for right."""
    right: Any = outcome.extras.get("acc", outcome.score)
    return right is not None and right > 0


if __name__ == "__main__":
    main()
