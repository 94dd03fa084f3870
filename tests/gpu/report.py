"""Runs tests/gpu/checks.py on this machine, piece by piece, and sets what was expected beside what was measured.

    python -m tests.gpu.report                 # what is not done yet, in pieces of at most 8 minutes
    python -m tests.gpu.report --pieces 1      # one piece
    python -m tests.gpu.report --only sync --again
    python -m tests.gpu.report --page          # writes docs/gpu_checks.md

Every row is a process group of its own, ended when its time is over. The state is written before and after each
(outputs/gpu/state.json): a run that was killed goes on where it was; a row that was begun twice and never ended is not
begun again by itself. The exit status is 1 where something failed, ran out of time or differs.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.gpu.checks import CHECKS, PIECE_MINUTES, Check, page, pieces

ROOT = Path(__file__).parents[2]
_MOST_BEGINNINGS = 2
_SLACK = 2.0  # a row may take so many times its minutes, within its piece
DONE = ("passed", "differs", "failed", "out of time", "left out")


@dataclass
class Runner:
    """The rows of a table, their state, and where both are kept.

    piece_s: seconds of a piece. devices: how many CUDA devices there are.
    """

    checks: tuple[Check, ...]
    folder: Path
    devices: int
    piece_s: float = 60 * PIECE_MINUTES

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / "state.json"
        self.state: dict[str, dict[str, Any]] = json.loads(path.read_text()) if path.exists() else {}

    def run(self, most_pieces: int | None = None) -> bool:
        """Run what is not done, piece by piece; False where rows are left or were not as expected."""
        count = 0
        while (left := self.left()) and (most_pieces is None or count < most_pieces):
            count += 1
            ends = time.monotonic() + self.piece_s
            for check in pieces(left)[0]:
                if not self.one(check, ends):
                    break  # no time is left in this piece: the next one begins with it
            self.write_table()
        self.write_table()
        left = self.left()
        print(self.table(), f"\nwritten: {self.folder / 'table.md'}", sep="\n")
        if left:
            minutes = sum(check.minutes for check in left)
            print(f"{len(left)} rows are left, about {minutes:g} minutes: run the same command again")
        return not left and all(self.of(check).get("status") in ("passed", "left out") for check in self.checks)

    def left(self) -> tuple[Check, ...]:
        """Rows that are not done, or whose command has changed since."""
        return tuple(check for check in self.checks if self.of(check).get("status") not in DONE)

    def of(self, check: Check) -> dict[str, Any]:
        """The state of a row; none where its command was another."""
        state = self.state.get(check.name, {})
        return state if state.get("command") == check.command else {}

    def one(self, check: Check, ends: float) -> bool:
        """Run a row within what is left of its piece; False where nearly nothing is left."""
        beginnings = self.of(check).get("beginnings", 0)
        if missing := self._missing(check):
            return self._keep(check, status="left out", said=missing)
        end_group(self.of(check).get("group", 0), check)
        if beginnings >= _MOST_BEGINNINGS:
            return self._keep(check, status="failed", said=f"begun {beginnings} times, and never came to its end")
        limit = min(_SLACK * 60 * check.minutes, ends - time.monotonic())
        if limit < min(30 * check.minutes, self.piece_s / 2):  # half of its time; the first of a piece always has it
            return False
        print(f"== {check.name}: {check.shown}", flush=True)
        figures, printed = self.folder / f"{check.name}.json", self.folder / f"{check.name}.txt"
        figures.unlink(missing_ok=True)
        began = time.monotonic()
        with printed.open("w") as log:
            process = subprocess.Popen(
                check.words(figures), stdout=log, stderr=subprocess.STDOUT, cwd=ROOT, start_new_session=True
            )
            self._keep(check, status="begun", beginnings=beginnings + 1, group=process.pid)
            status = ended(process, limit)
        seconds = time.monotonic() - began
        found = self._judged(check, status, printed.read_text(errors="replace"), figures)
        return self._keep(check, **found, seconds=seconds, beginnings=beginnings + 1)

    def _judged(self, check: Check, status: int | None, printed: str, figures: Path) -> dict[str, Any]:
        """The verdict on a command that has ended, and the figures that it left."""
        measured = {each.name: each.measured(printed, figures) for each in check.expects}
        last = next((line for line in reversed(printed.splitlines()) if line.strip()), "")
        if status is None:
            return {"status": "out of time", "said": last, "measured": measured}
        if status:
            return {"status": "failed", "said": last or f"exit status {status}", "measured": measured}
        if " skipped" in last and " passed" not in last:
            return {"status": "left out", "said": last}
        values = [(each, measured[each.name]) for each in check.expects]
        off = [each.name for each, value in values if value is None or not each.holds(value)]
        return {"status": "differs" if off else "passed", "said": last, "measured": measured, "off": off}

    def _missing(self, check: Check) -> str:
        absent = [name for name in check.needs if importlib.util.find_spec(name) is None]
        if absent:
            return f"needs {', '.join(absent)}"
        return f"needs {check.devices} devices, {self.devices} are here" if check.devices > self.devices else ""

    def _keep(self, check: Check, **state: Any) -> bool:
        self.state[check.name] = {"command": check.command, **state}
        path = self.folder / "state.json"
        path.with_suffix(".new").write_text(json.dumps(self.state, indent=1))
        path.with_suffix(".new").replace(path)  # whole, whenever this process ends
        if (status := state["status"]) != "begun":
            print(f"   {status}: {state.get('said', '')}", flush=True)
        return True

    # The table at the end.

    def table(self) -> str:
        """Every row: expected beside measured."""
        lines = ["| check | verdict | expected | measured | minutes | said |", "|---|---|---|---|---|---|"]
        for check in self.checks:
            state = self.of(check)
            measured = state.get("measured", {})
            values = [measured.get(each.name) for each in check.expects]
            shown = "; ".join("-" if value is None else f"{value:.4g}" for value in values)
            taken = (
                f"{state['seconds'] / 60:.1f} of {check.minutes:g}" if "seconds" in state else f"- of {check.minutes:g}"
            )
            cells = [
                check.name,
                state.get("status", "not run"),
                "; ".join(map(str, check.expects)) or "it passes",
                shown,
            ]
            cells += [taken, state.get("said", "").replace("|", "/")[:120]]
            lines.append(f"| {' | '.join(cells)} |")
        return "\n".join(lines)

    def write_table(self) -> None:
        """Write table.md, also after each piece: a run that is broken off leaves one too."""
        (self.folder / "table.md").write_text(self.table() + "\n")


def end_group(group: int, check: Check) -> None:
    """End what a runner that was killed has left of this row: it would use the device beside what comes now."""
    try:
        words = Path(f"/proc/{group}/cmdline").read_bytes().decode().split("\0")
    except OSError:  # it has ended
        return
    if set(check.command.replace("{json}", "").split()) <= set(words):  # else the number is another process's by now
        os.killpg(group, signal.SIGKILL)


def ended(process: subprocess.Popen[bytes], limit_s: float) -> int | None:
    """Exit status of the first of a process group; None where its time was over. What it has started ends with it."""
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return None
    finally:  # also where this process is interrupted
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def arguments_of(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pieces", type=int, help="run so many pieces at most (default: all)")
    parser.add_argument("--only", nargs="+", metavar="CHECK", choices=[check.name for check in CHECKS])
    parser.add_argument("--again", action="store_true", help="also what is done already")
    parser.add_argument("--out", type=Path, default=ROOT / "outputs" / "gpu", help="state, outputs and table")
    parser.add_argument("--page", action="store_true", help="write docs/gpu_checks.md and end")
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> None:
    arguments = arguments_of(words)
    if arguments.page:
        (ROOT / "docs" / "gpu_checks.md").write_text(page(), encoding="utf-8")
        return
    import torch

    if not torch.cuda.is_available():
        raise SystemExit("gpu-report needs a CUDA device: torch.cuda.is_available() is false")
    chosen = tuple(check for check in CHECKS if arguments.only is None or check.name in arguments.only)
    runner = Runner(chosen, arguments.out, torch.cuda.device_count())
    if arguments.again:
        runner.state = {name: state for name, state in runner.state.items() if name not in {c.name for c in chosen}}
    sys.exit(0 if runner.run(arguments.pieces) else 1)


if __name__ == "__main__":
    main()
