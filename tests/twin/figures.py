"""Figures of docs/gpu_sizing.md that the twin gives: `python -m tests.twin.figures` runs steps and writes the page."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile

from tests.twin.cases import FORECAST

_PHASES = ("old_log_prob", "ref", "values", "update_critic", "update_actor", "update_weights")


def main() -> None:
    """Run the cases in a process of the twin; write peaks and forecasts, in GiB, then the page."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        file.write(json.dumps(FORECAST))
        file.flush()
        command = [sys.executable, "-m", "tests.twin.run", file.name]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    write([json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")])


def write(outcomes: list[dict]) -> None:
    """Write what came of the cases, in their order."""
    from verl_like.kit.forecast import sizing_page

    rows = []
    ranks = {each["name"]: each["world"] for each in FORECAST}
    for each in outcomes:
        phases = {
            name: [round(each["phases"][name]["peak"] / 2**30, 3), round(each["forecast"][name] / 2**30, 3)]
            for name in _PHASES
            if name in each["phases"]
        }
        rows.append({"name": each["name"].rpartition(" on ")[0], "ranks": ranks[each["name"]], "phases": phases})
    sizing_page.TWIN.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    sizing_page.PAGE.write_text(sizing_page.page(), encoding="utf-8")


if __name__ == "__main__":
    main()
