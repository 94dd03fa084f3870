"""Command of the twin, for a process that has the native library: cases from a file, an outcome a line."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import json
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.twin import stand_in, step, world
from tests.twin.mode import Collective, Twin

_TIMEOUT_S = 30.0  # of ranks that wait for each other


def main() -> None:
    """Run the cases of the file that the command line names, one after the other, in processes of their own."""
    for given in json.loads(Path(sys.argv[1]).read_text()):
        case = step.Case(**given)
        with tempfile.TemporaryDirectory() as folder:
            ranks = range(len(case.ranks)) if case.ranks else [min(1, case.world - 1)]
            children = [_forked(_one, case, rank, Path(folder)) for rank in ranks]
            for child in children:
                os.waitpid(child, 0)
            found = [pickle.loads((Path(folder) / f"outcome{rank}").read_bytes()) for rank in ranks]
        told = next((each for each in found if "error" in each), found[-1])
        if case.ranks and "error" not in told:
            told["differs"] = [
                f"{name}: {text}"
                for name in told["phases"]
                for text in disagreements([r["phases"][name] for r in found])
            ]
        print(json.dumps(told, default=dataclasses.asdict), flush=True)


def _forked(work: Callable[..., None], *arguments: Any) -> int:
    child = os.fork()
    if child == 0:
        work(*arguments)
        os._exit(0)
    return child


def _one(case: step.Case, rank: int, folder: Path) -> None:
    """One rank of a case: its outcome, or its error, is left in the folder."""
    stand_in.install(min(8, case.world))
    try:
        if case.before:
            module, _, name = case.before.partition(":")
            getattr(importlib.import_module(module), name)(rank)
        join = (
            world.together(len(case.ranks), rank, str(folder), _TIMEOUT_S)
            if case.ranks
            else world.alone(case.world, rank)
        )
        own = folder / str(rank)
        found: dict[str, Any] = vars_of(step.run(case, own, join, Twin()))
    except Exception as error:
        traceback.print_tb(error.__traceback__)
        found = {"error": f"{type(error).__name__}: {error}"[:2000]}
    found |= {"name": case.name, "seconds": time.process_time()}
    (folder / f"outcome{rank}").write_bytes(pickle.dumps(found))


def vars_of(outcome: step.Outcome) -> dict[str, Any]:
    """The outcome's fields by name."""
    return {each.name: getattr(outcome, each.name) for each in dataclasses.fields(outcome)}


def disagreements(of_ranks: Sequence[Any]) -> list[str]:
    """Pairs of ranks that would wait for each other for ever, with the first collective in which they differ.

    of_ranks: counts of each rank. Two ranks must issue the same collectives of the groups that hold both, in one order.
    """
    found = []
    for a, b in itertools.combinations(range(len(of_ranks)), 2):
        ours, theirs = ([c for c in of_ranks[r].collectives if a in c.group and b in c.group] for r in (a, b))
        for number, (mine, other) in enumerate(itertools.zip_longest(ours, theirs)):
            if mine != other:
                found.append(f"ranks {a} and {b}, collective {number}: {_told(mine)} against {_told(other)}")
                break
    return found


def _told(one: Collective | None) -> str:
    return "none" if one is None else f"{one.name} of {list(one.shapes)} {one.dtype} on {one.device} at {one.place}"
