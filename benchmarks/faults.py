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
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.fault_servers import Server, movable_clock
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
    planted = act("score")
    return float("nan") if planted == "nan" else solution_str.count(ground_truth) / 6
"""


@dataclass(frozen=True, slots=True)
class Fault:
    """whom: rank (1 of 2), driver, all, raylet and GCS (Ray's daemons on the driver's machine), node (another one, of
    rank 1); in a run of one process: run, grader, judge, storage, tracker, second run, between (the run is killed, and
    something becomes of its files before the next start). what: a signal, or what its name says."""

    whom: str
    what: str
    phase: str

    @property
    def name(self) -> str:
        return f"{self.whom} {self.what} {self.phase}"

    @property
    def alone(self) -> bool:
        """Whether one process is enough, without Ray."""
        return self.whom not in ("rank", "driver", "all", "raylet", "GCS", "node")

    @property
    def kind(self) -> str:
        """Of the run that nothing happens to."""
        return "judge" if self.whom == "judge" else "alone" if self.alone else "ranks"


FAULTS = (
    *(Fault("rank", what, phase) for what in ("SIGKILL", "SIGSTOP") for phase in PHASES),
    *(Fault("driver", "SIGKILL", phase) for phase in PHASES),
    *(Fault("rank", "hang", phase) for phase in ("rollout", "update", "save")),
    *(Fault(whom, "SIGTERM", "update") for whom in ("rank", "driver", "all")),
    *(Fault(whom, "SIGKILL", "update") for whom in ("raylet", "GCS", "node")),
    Fault("node", "SIGKILL, another joins", "update"),
    *(Fault("rank", "out of memory", phase) for phase in ("forward", "backward", "optimizer", "rollout")),
    Fault("driver", "out of memory", "credit"),
    *(Fault("rank", "nan", phase) for phase in ("loss", "rollout", "old log-probs")),
    Fault("rank", "garbage", "rollout"),
    Fault("rank", "disk full", "save"),
    *(Fault("run", "disk full", phase) for phase in ("samples", "metrics")),
    *(Fault("run", "raises", phase) for phase in ("rollout", "update", "save")),
    *(Fault("run", "out of memory", phase) for phase in ("forward", "backward")),
    Fault("run", "nan", "weights"),
    *(Fault("run", what, "update") for what in ("folder removed", "folder read-only", "data gone")),
    *(Fault("run", what, "update") for what in ("clock a day on", "clock a day back")),
    *(Fault("grader", what, "score") for what in ("SIGKILL", "hang", "raises", "nan", "leaks", "floods")),
    *(Fault("judge", what, "score") for what in ("SIGKILL", "SIGSTOP", "slow", "wrong")),
    *(Fault("tracker", what, "update") for what in ("SIGKILL", "SIGSTOP")),
    *(Fault("storage", what, "save") for what in ("SIGKILL", "SIGSTOP")),
    Fault("second run", "starts", "update"),
    *(Fault("between", what, "update") for what in ("shard cut short", "bit flipped", "marker gone", "state gone")),
    *(Fault("between", what, "update") for what in ("data changed", "data appended", "data gone", "half uploaded")),
)
ROUNDING = 1e-4  # of a metric, or of its share: float32 sums of other parts, over several steps
TIMEOUT = 124  # status of a run that had to be ended
LONGEST_S = 600


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
            expected = undisturbed(arguments.results.with_suffix(f".{fault.kind}"), fault)
            results[fault.name] = asdict(measure(fault, expected))
            arguments.results.write_text(json.dumps(results, indent=1))
            print(json.dumps(results[fault.name], indent=1), flush=True)


def measure(fault: Fault, expected: list[dict[str, Any]]) -> Result:
    """One row. expected: of `undisturbed`."""
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder, out = Path(name), Path(name) / "out"
        out.mkdir()
        if fault.what == "disk full":
            subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(out)], check=True)
        stack.callback(subprocess.run, ["umount", "-q", "-l", str(out)])
        what = "SIGKILL" if fault.whom == "between" else fault.what
        plant = {"phase": fault.phase, "what": what, "whom": fault.whom, "folder": str(folder)}
        variables = {"FAULT": json.dumps(plant)}
        server = stack.enter_context(Server(fault.whom, folder, variables))
        return _measure(fault, folder, out, expected, server, variables)


def _measure(
    fault: Fault,
    folder: Path,
    out: Path,
    expected: list[dict[str, Any]],
    server: Server,
    variables: dict[str, str],
) -> Result:
    command = command_of(folder, out, fault, server)
    began, between = time.time(), fault.whom == "between"
    clock = movable_clock(folder) if "clock" in fault.what else {}
    other: list[tuple[int, list[tuple[float, str]]]] = []
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(run, command, clock | variables)
        if fault.whom == "second run" or fault.what.endswith("joins"):
            while not (folder / "planted").exists() and not first.done():
                time.sleep(0.1)
            other = [run(command, {})] if fault.whom == "second run" else []
            if fault.what.endswith("joins"):
                server.one_joins()
        status, lines = first.result()
    ended = time.time()
    planted = float((folder / "planted").read_text()) if (folder / "planted").exists() else began
    if other:
        status, lines = other[0]
        ended = lines[-1][0]
    lines = [(when, line) for when, line in lines if "health:" not in line]  # of the tiny task, not of the fault
    after = [when for when, line in lines if when >= planted and _TELLING.search(line)]
    newest = out / "latest_checkpointed_iteration.txt"
    checkpoint = int(newest.read_text()) if newest.exists() else 0
    if fault.what == "folder read-only":
        subprocess.run(["umount", "-l", str(out)], check=True)
    (out / "filler").unlink(missing_ok=True)
    if between:
        damage(fault.what, folder, out)
    server.again()
    again, more = run(command, {})
    done = compared(facts(out), expected) if again == 0 else ""
    told = said(more if between else lines, 0.0 if between else planted)
    return Result(
        fault=asdict(fault),
        noticed_s=round(after[0] - planted, 1) if after and not between else None,
        ended_s=round(ended - planted, 1),
        status=again if between else status,
        said=told.replace(str(folder), "…"),
        checkpoint=checkpoint,
        again=done if again == 0 else "refused" if between else f"refused: {said(more, 0.0)}",
    )


def damage(what: str, folder: Path, out: Path) -> None:
    """To the newest checkpoint, 2, or to the data."""
    shard = out / "global_step_2" / "actor" / "model" / "__0_0.distcp"
    content = bytearray(shard.read_bytes())
    if what == "shard cut short":
        shard.write_bytes(content[: len(content) // 2])
    elif what == "bit flipped":
        content[len(content) // 2] ^= 16
        shard.write_bytes(content)
    elif what == "marker gone":
        (out / "latest_checkpointed_iteration.txt").unlink()
    elif what == "state gone":
        (out / "global_step_2" / "trainer_state.json").unlink()
    elif what == "half uploaded":  # and this machine is lost
        remote = max((folder / "remote").glob("global_step_*"), key=lambda path: int(path.name.rpartition("_")[2]))
        (remote / "verl_like_upload.json").unlink(missing_ok=True)
        shutil.rmtree(out)
    elif what == "data gone":
        (folder / "train.parquet").unlink()
    else:
        write_task(folder, {"data changed": 63, "data appended": 72}[what])
        (folder / "reward.py").write_text(REWARD.format(root=ROOT))


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
        status = process.wait(timeout=LONGEST_S)
    except subprocess.TimeoutExpired:
        status = TIMEOUT
    finally:
        process.kill()
    reader.join(10)
    return status, lines


_MORE = {
    "leaks": {"custom_reward_function.memory_limit_mb": 16_384},
    "SIGKILL, another joins": {"trainer.max_restarts": 1, "trainer.restart_delay": 1},
}


def command_of(folder: Path, out: Path, fault: Fault, server: Server) -> list[str]:
    """Five steps of GRPO by two ranks, or one: a checkpoint after each, a validation after the third."""
    task, model = write_task(folder), write_model(folder)
    (folder / "reward.py").write_text(REWARD.format(root=ROOT))
    settings: dict[str, Any] = {
        "trainer.launcher": "local" if fault.alone else "ray",
        "trainer.n_gpus_per_node": 1 if fault.alone else 2,
        "trainer.save_freq": 1,
        "trainer.test_freq": 3,
        "trainer.total_training_steps": 5,
        "trainer.stall_timeout": STALL_S,
        "trainer.trainer_class": f"{ROOT}/benchmarks/fault_plant.py:Planted",
        "actor_rollout_ref.model.external_lib": "benchmarks.fault_plant",
        "actor_rollout_ref.actor.old_log_probs": "recompute",
        "reward_model.launch_reward_fn_async": False,
        "custom_reward_function.timeout": 5,
        **server.settings,
        **_MORE.get(fault.what, {}),
    }
    if fault.what == "half uploaded":
        settings["trainer.default_hdfs_dir"] = f"file://{folder}/remote"
    return [sys.executable, "-m", "verl_like.trainer.main_ppo", *overrides(task, model, out, **settings)]


def write_model(folder: Path) -> Path:
    """A model of two layers in a folder of this one."""
    recipe = load_script(ROOT / "recipes" / "quickstart" / "model.py", "quickstart_model")
    tokenizer = recipe.build_tokenizer()
    recipe.save_checkpoint(folder / "model", recipe.build_model(tokenizer, hidden_size=64, num_layers=2), tokenizer)
    return folder / "model"


def undisturbed(file: Path, fault: Fault) -> list[dict[str, Any]]:
    """Metrics of the run of its kind that nothing happens to. Kept in `file`."""
    if not file.exists():
        fault = replace(fault, whom="judge" if fault.kind == "judge" else "run" if fault.alone else "rank", what="")
        with tempfile.TemporaryDirectory() as name, Server(fault.whom, Path(name)) as server:
            out = Path(name) / "out"
            status, lines = run(command_of(Path(name), out, fault, server), {})
            assert status == 0, lines[-20:]
            file.write_text(json.dumps(facts(out)))
    return json.loads(file.read_text())


def compared(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> str:
    """In words, step by step. A step whose validation was lost has fewer numbers."""
    by_step = {record["training/global_step"]: record for record in expected}
    pairs = [(record, by_step[record["training/global_step"]]) for record in found]
    both = [(name, a[name], b[name]) for a, b in pairs for name in a.keys() & b.keys()]
    other = {name for name, one, another in both if one != another}
    gaps = [abs(x - y) / max(abs(x), abs(y), 1) for _, x, y in both if x != y and None not in (x, y)]
    gone = {name for a, b in pairs for name in b.keys() - a.keys()}
    text = f"{len(found)} steps, "
    if gaps and max(gaps) < ROUNDING:
        text += f"the same numbers but for rounding (by {max(gaps):.0e} at most)"
    else:
        text += f"OTHER NUMBERS: {', '.join(sorted(other)[:4])}" if other else "the same numbers"
    validation = all(name.startswith("val") for name in gone)
    return text + (f", without {'the validation' if validation else ', '.join(sorted(gone)[:4])}" if gone else "")


def facts(out: Path) -> list[dict[str, Any]]:
    """What must be the same in two runs."""
    return [{k: v for k, v in record.items() if not k.startswith(MEASURED)} for record in metrics_of(out)]


PAGE = """# What happens when something breaks

Each row was measured: `python -m benchmarks.faults --results faults.json` plants the fault in the third of five steps
of a real run (GRPO, the hf rollout engine, a checkpoint after every step, a validation after the third), writes down
what happens, and gives the same command again without the fault. Of ranks, driver, all, raylet and GCS (Ray's daemons
on the driver's machine): two ranks on CPUs under Ray; of node: the same in a Ray cluster of three on one machine, each
rank on one, the driver on the third, and all processes of rank 1's are killed ("another joins": with
`trainer.max_restarts=1`, and a further node joins then); of the others: one process
(`trainer.launcher=local`). `trainer.stall_timeout` was {stall} s (its default is 300 s: what waits for it takes as much
longer), the limit of a reward 5 s, of a request to the judge 3 s with one more try; the machine had other work, so
seconds are upper bounds. All but "another joins" without `trainer.max_restarts`, with which a run that lost workers
would have begun again by itself. As root, on Linux.

"noticed" is the time from the fault to the first word on the console (of a stopped process after a sixth of
`stall_timeout`, or 30 s), "ended" to the end of the process; a status of 0 means that the run got through, or ended as
it was asked to, {timeout} that it had to be ended after {longest} s. "checkpoint" is the newest whole one afterwards: 2
means that the third step was lost, in which the fault happened; 3 or more that nothing was. "again" is the next start
of the same command: how many steps it has in its metrics at the end, and whether all numbers are those of a run that
nothing happened to. A run that went on without an update or a reward has other numbers from there on. "between": the
run was killed in its third step, then its files were changed; what was said, and the status, are the next start's.

The clock is that of the run's processes (time of day; a library in front of the C library's). The tracker is a class
that posts each step to a server and waits for it without a limit of its own. The grader that leaks has
`custom_reward_function.memory_limit_mb`: its row is tried again in another process.

| who | what | in | noticed s | ended s | status | what was said | checkpoint | again |
|---|---|---|---|---|---|---|---|---|
{rows}

Not measured yet: {missing}.
"""


def page(results: dict[str, Any]) -> str:
    """docs/faults.md."""
    rows = []
    for fault in FAULTS:
        if (each := results.get(fault.name)) is not None:
            text = re.sub(r"(host |process |-CONT |run (?=vl))\w+", r"\1…", _short(each["said"]))
            told = f"`{text[:220]}{'…' if len(text) > 220 else ''}`" if text else "nothing"
            told = "nothing: it is gone" if each["status"] < 0 and not text else told
            times = (
                ("-", "-")
                if fault.whom == "between"
                else ("-" if each["noticed_s"] is None else each["noticed_s"], each["ended_s"])
            )
            cells = (fault.whom, fault.what, fault.phase, *times, each["status"], told, each["checkpoint"])
            rows.append("| " + " | ".join(map(str, (*cells, _short(each["again"])[:160]))) + " |")
    missing = ", ".join(fault.name for fault in FAULTS if fault.name not in results) or "none"
    about = {"stall": STALL_S, "timeout": TIMEOUT, "longest": LONGEST_S, "missing": missing}
    return PAGE.format(**about, rows="\n".join(rows))


def _short(text: str) -> str:
    """Without what differs from machine to machine, as a cell of a table."""
    text = text.replace(f"{ROOT}/", "")
    return re.sub(r"(?:…?/\S*/|…/)(?=stall.txt|out|train.parquet)", "…/", text).replace("|", "\\|").replace("`", "'")


if __name__ == "__main__":
    main()
