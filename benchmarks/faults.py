"""Plants faults in a small real run (two ranks, Ray) and measures what becomes of it: the table in docs/faults.md.

    python -m benchmarks.faults --results faults.json             all rows that the file has not
    python -m benchmarks.faults --results faults.json --rows 'rank SIGSTOP update' 'driver SIGKILL save'
    python -m benchmarks.faults --results faults.json --page docs/faults.md

Each row is a run of five steps that saves after each. The fault is planted in the third. Then the same command is given
again without it, and its metrics are compared with those of a run that nothing happened to.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.conftest import ROOT, load_script
from tests.e2e.support import metrics_of, overrides, write_task

PHASES = ("rollout", "score", "old log-probs", "update", "save", "sync", "validation")
MEASURED = ("timing", "perf/", "weight_sync/", "reward/seconds/", "time")  # differ by nature
STALL_S = 10
REWARD = """
import sys
sys.path.insert(0, "{root}")
from benchmarks.fault_plant import act

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    act("score")
    return solution_str.count(ground_truth) / 6
"""


@dataclass(frozen=True, slots=True)
class Fault:
    """whom: rank (1 of 2), driver, all. what: a signal, or hang, nan, disk full."""

    whom: str
    what: str
    phase: str

    @property
    def name(self) -> str:
        return f"{self.whom} {self.what} {self.phase}"


FAULTS = (
    *(Fault("rank", what, phase) for what in ("SIGKILL", "SIGSTOP") for phase in PHASES),
    *(Fault("driver", "SIGKILL", phase) for phase in PHASES),
    *(Fault("rank", "hang", phase) for phase in ("rollout", "update", "save")),
    *(Fault(whom, "SIGTERM", "update") for whom in ("rank", "driver", "all")),
    Fault("rank", "nan", "loss"),
    Fault("rank", "disk full", "save"),
)


@dataclass(slots=True, kw_only=True)
class Result:
    """seconds: from the fault to the first word about it, and to the end of the run. again: of the next start."""

    fault: dict[str, str]
    noticed_s: float | None
    ended_s: float
    status: int
    said: str
    checkpoint: int
    again: str


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, required=True, help="file of results; rows are added")
    parser.add_argument("--rows", nargs="*", help="names of rows, to be measured also where they are there already")
    parser.add_argument("--page", type=Path, help="write the page of these results, and measure nothing")
    arguments = parser.parse_args()
    results = json.loads(arguments.results.read_text()) if arguments.results.exists() else {}
    if arguments.page:
        arguments.page.write_text(page(results))
        return
    for fault in FAULTS:
        if fault.name in arguments.rows if arguments.rows else fault.name not in results:
            print(fault.name, "...", flush=True)
            results[fault.name] = asdict(measure(fault, undisturbed(arguments.results.with_suffix(".reference"))))
            arguments.results.write_text(json.dumps(results, indent=1))
            print(json.dumps(results[fault.name], indent=1), flush=True)


def measure(fault: Fault, reference: dict[str, Any]) -> Result:
    """One row. reference: of `undisturbed`."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        out = folder / "out"
        out.mkdir()
        if fault.what == "disk full":
            subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={reference['disk']}", "tmpfs", str(out)], check=True)
        try:
            return _measure(fault, folder, out, reference["facts"])
        finally:
            if fault.what == "disk full":
                subprocess.run(["umount", "-l", str(out)], check=True)


def _measure(fault: Fault, folder: Path, out: Path, expected: list[dict[str, Any]]) -> Result:
    command = command_of(folder, out)
    began = time.time()
    plant = {"phase": fault.phase, "what": fault.what, "whom": fault.whom, "folder": str(folder)}
    status, lines = run(command, {} if fault.what == "disk full" else {"FAULT": json.dumps(plant)})
    ended = time.time()
    planted = float((folder / "planted").read_text()) if (folder / "planted").exists() else began
    after = [(when, line) for when, line in lines if when >= planted and _TELLING.search(line)]
    newest = out / "latest_checkpointed_iteration.txt"
    checkpoint = int(newest.read_text()) if newest.exists() else 0
    if fault.what == "disk full":
        after, planted = [], next((when for when, _ in after), ended)  # when it was full is not known
        subprocess.run(["mount", "-o", "remount,size=1g", str(out)], check=True)
    again, more = run(command, {})
    done = compared(facts(out), expected) if again == 0 else ""
    return Result(
        fault=asdict(fault),
        noticed_s=round(after[0][0] - planted, 1) if after else None,
        ended_s=round(ended - planted, 1),
        status=status,
        said=said(lines, planted),
        checkpoint=checkpoint,
        again=done if again == 0 else "FAILED: " + said(more, 0.0),
    )


_TELLING = re.compile(r"ERROR|WARNING|Error|error|Traceback|worker rank|rank \d")


def said(lines: list[tuple[float, str]], since: float) -> str:
    """The message that explains the end: what the exception says, or the last warning."""
    texts = [line for when, line in lines if when >= since]
    for pattern in (
        r"(?:Worker\w+|RunStopped|NotFinite|GroupStopped): (.*)",
        r"(error: .*)",
        r"(?:ERROR|WARNING)\S* (.*)",
    ):
        if found := [match[1] for line in texts if (match := re.search(pattern, line))]:
            return found[0]
    return ""


def run(command: list[str], environment: dict[str, str]) -> tuple[int, list[tuple[float, str]]]:
    """Exit status, and all lines with the times at which they came."""
    settings = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "400"} | environment
    process = subprocess.Popen(
        command, cwd=ROOT, env=settings, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    lines: list[tuple[float, str]] = []
    assert process.stdout is not None
    pipe = process.stdout
    reader = threading.Thread(target=lambda: lines.extend((time.time(), line.rstrip()) for line in pipe), daemon=True)
    reader.start()
    try:
        process.wait(timeout=300)
    finally:
        process.kill()
    reader.join(10)
    return process.returncode, lines


def command_of(folder: Path, out: Path) -> list[str]:
    """Five steps of GRPO by two ranks: a checkpoint after each, a validation after the third."""
    recipe = load_script(ROOT / "recipes" / "quickstart" / "model.py", "quickstart_model")
    tokenizer = recipe.build_tokenizer()
    recipe.save_checkpoint(folder / "model", recipe.build_model(tokenizer, hidden_size=64, num_layers=2), tokenizer)
    task = write_task(folder)
    (folder / "reward.py").write_text(REWARD.format(root=ROOT))
    settings: dict[str, Any] = {
        "trainer.launcher": "ray",
        "trainer.n_gpus_per_node": 2,
        "trainer.save_freq": 1,
        "trainer.test_freq": 3,
        "trainer.total_training_steps": 5,
        "trainer.stall_timeout": STALL_S,
        "trainer.trainer_class": f"{ROOT}/benchmarks/fault_plant.py:Planted",
        "actor_rollout_ref.model.external_lib": "benchmarks.fault_plant",
        "actor_rollout_ref.actor.old_log_probs": "recompute",
        "reward_model.launch_reward_fn_async": False,
    }
    return [sys.executable, "-m", "verl_like.trainer.main_ppo", *overrides(task, folder / "model", out, **settings)]


def undisturbed(file: Path) -> dict[str, Any]:
    """Metrics of the run that nothing happens to, and the bytes of 2.5 of its checkpoints. Kept in `file`."""
    if not file.exists():
        with tempfile.TemporaryDirectory() as name:
            out = Path(name) / "out"
            status, lines = run(command_of(Path(name), out), {})
            assert status == 0, lines[-20:]
            sizes = [path.stat().st_size for path in out.glob("global_step_1/**/*") if path.is_file()]
            file.write_text(json.dumps({"facts": facts(out), "disk": int(2.5 * sum(sizes))}))
    return json.loads(file.read_text())


def compared(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> str:
    """In words. A step whose validation was lost has fewer numbers."""
    other = {name for a, b in zip(found, expected, strict=False) for name in a.keys() & b.keys() if a[name] != b[name]}
    gone = {name for a, b in zip(found, expected, strict=False) for name in b.keys() - a.keys()}
    text = f"{len(found)} steps, " + (f"OTHER NUMBERS: {', '.join(sorted(other)[:4])}" if other else "the same numbers")
    validation = all(name.startswith("val") for name in gone)
    return text + (f", without {'the validation' if validation else ', '.join(sorted(gone)[:4])}" if gone else "")


def facts(out: Path) -> list[dict[str, Any]]:
    """What must be the same in two runs."""
    return [{k: v for k, v in record.items() if not k.startswith(MEASURED)} for record in metrics_of(out)]


PAGE = """# What happens when something breaks

Each row was measured: `python -m benchmarks.faults --results faults.json` plants the fault in the third of five steps
of a real run (GRPO, two ranks on CPUs, Ray, the hf rollout engine, a checkpoint after every step), writes down what
happens, and gives the same command again without the fault. `trainer.stall_timeout` was {stall} s (its default is
300 s: what waits for it takes as much longer); the machine had other work, so seconds are upper bounds. Without
`trainer.max_restarts`, with which the run would have begun again by itself.

"noticed" is the time from the fault to the first word on the console (of a stopped process after a sixth
of `stall_timeout`, or 30 s), "ended" to the end of the process. "checkpoint"
is the newest whole one afterwards: 2 means that the third step was lost, in which the fault happened; 3 or more that
nothing was. "again" is the next start of the same command: how many steps it has in its metrics at the end, and whether
all numbers are those of a run that nothing happened to.

| who | what | in | noticed s | ended s | status | what was said | checkpoint | again |
|---|---|---|---|---|---|---|---|---|
{rows}
"""


def page(results: dict[str, Any]) -> str:
    """docs/faults.md."""
    rows = []
    for fault in FAULTS:
        if (each := results.get(fault.name)) is not None:
            text = re.sub(r"\(process \d+:", "(process …:", each["said"]).replace("|", "\\|")
            text = re.sub(r"/\S*/(?=stall.txt|out)", "…/", text)
            cells = (fault.whom, fault.what, fault.phase, each["noticed_s"], each["ended_s"], each["status"])
            told = f"`{text[:220]}{'…' if len(text) > 220 else ''}`" if text else "nothing: it is gone"
            rows.append("| " + " | ".join(map(str, (*cells, told, each["checkpoint"], each["again"]))) + " |")
    return PAGE.format(stall=STALL_S, rows="\n".join(rows))


if __name__ == "__main__":
    main()
