"""Plants faults in a small real run (two ranks, Ray) and measures what becomes of it: the table in docs/faults.md.

    python -m benchmarks.faults --results faults.json             all rows that the file has not
    python -m benchmarks.faults --results faults.json --rows 'rank SIGSTOP update' 'driver SIGKILL save'
    python -m benchmarks.faults --results faults.json --page docs/faults.md

Each row is a run of five steps that saves after each. The fault is planted in the third. Then the same command is given
again without it, and its metrics are compared with those of a run that nothing happened to.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.conftest import ROOT, load_script
from tests.e2e.support import metrics_of, overrides, write_task
from tests.unit.engine.tiny import free_port

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
JUDGE = """
import json, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Judge(BaseHTTPRequestHandler):
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))["messages"][-1]["content"]
        message = {"content": f"Score: {asked.count('7') % 10}"}
        body = json.dumps({"choices": [{"message": message}], "usage": {"total_tokens": 9}}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments):
        pass

ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Judge).serve_forever()
"""


@dataclass(frozen=True, slots=True)
class Fault:
    """whom: rank (1 of 2), driver, all; in a run of one process: run, grader, judge, storage, second run, between (the
    run is killed, and something becomes of its files before the next start). what: a signal, or what its name says."""

    whom: str
    what: str
    phase: str

    @property
    def name(self) -> str:
        return f"{self.whom} {self.what} {self.phase}"

    @property
    def alone(self) -> bool:
        """Whether one process is enough, without Ray."""
        return self.whom not in ("rank", "driver", "all")


FAULTS = (
    *(Fault("rank", what, phase) for what in ("SIGKILL", "SIGSTOP") for phase in PHASES),
    *(Fault("driver", "SIGKILL", phase) for phase in PHASES),
    *(Fault("rank", "hang", phase) for phase in ("rollout", "update", "save")),
    *(Fault(whom, "SIGTERM", "update") for whom in ("rank", "driver", "all")),
    Fault("rank", "nan", "loss"),
    Fault("rank", "disk full", "save"),
    *(Fault("run", "raises", phase) for phase in ("rollout", "update", "save")),
    Fault("run", "nan", "weights"),
    *(Fault("run", what, "update") for what in ("folder removed", "folder read-only", "data gone")),
    *(Fault("grader", what, "score") for what in ("SIGKILL", "hang", "raises", "nan")),
    *(Fault("judge", what, "score") for what in ("SIGKILL", "SIGSTOP")),
    *(Fault("storage", what, "save") for what in ("SIGKILL", "SIGSTOP")),
    Fault("second run", "starts", "update"),
    *(Fault("between", what, "update") for what in ("shard cut short", "bit flipped", "marker gone", "state gone")),
    *(Fault("between", what, "update") for what in ("data changed", "data appended", "data gone")),
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
            kind = fault.whom if fault.whom == "judge" else "alone" if fault.alone else "ranks"
            results[fault.name] = asdict(measure(fault, undisturbed(arguments.results.with_suffix(f".{kind}"), fault)))
            arguments.results.write_text(json.dumps(results, indent=1))
            print(json.dumps(results[fault.name], indent=1), flush=True)


def measure(fault: Fault, reference: dict[str, Any]) -> Result:
    """One row. reference: of `undisturbed`."""
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        out = folder / "out"
        out.mkdir()
        if fault.what == "disk full":
            subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={reference['disk']}", "tmpfs", str(out)], check=True)
        stack.callback(subprocess.run, ["umount", "-q", "-l", str(out)])
        server = stack.enter_context(_Server(fault, folder))
        return _measure(fault, folder, out, reference["facts"], server)


def _measure(fault: Fault, folder: Path, out: Path, expected: list[dict[str, Any]], server: _Server) -> Result:
    command = command_of(folder, out, fault, server)
    began = time.time()
    what = "SIGKILL" if fault.whom == "between" else fault.what
    plant = {"phase": fault.phase, "what": what, "whom": fault.whom, "folder": str(folder)}
    other: list[tuple[int, list[tuple[float, str]]]] = []
    second = threading.Thread(target=_second_run, args=(command, folder, other), daemon=True)
    if fault.whom == "second run":
        second.start()
    status, lines = run(command, {} if fault.what == "disk full" else {"FAULT": json.dumps(plant)})
    ended = time.time()
    if fault.whom == "second run":
        second.join(300)
    planted = float((folder / "planted").read_text()) if (folder / "planted").exists() else began
    if other:
        status, lines = other[0]
        ended = lines[-1][0]
    lines = [(when, line) for when, line in lines if "health:" not in line]  # of the tiny task, not of the fault
    after = [(when, line) for when, line in lines if when >= planted and _TELLING.search(line)]
    newest = out / "latest_checkpointed_iteration.txt"
    checkpoint = int(newest.read_text()) if newest.exists() else 0
    if fault.what == "disk full":
        after, planted = [], next((when for when, _ in after), ended)  # when it was full is not known
        subprocess.run(["mount", "-o", "remount,size=1g", str(out)], check=True)
    elif fault.what == "folder read-only":
        subprocess.run(["umount", "-l", str(out)], check=True)
    if fault.whom == "between":
        damage(fault.what, folder, out)
    server.again()
    again, more = run(command, {})
    done = compared(facts(out), expected) if again == 0 else ""
    told = said(more if fault.whom == "between" else lines, 0.0 if fault.whom == "between" else planted)
    return Result(
        fault=asdict(fault),
        noticed_s=round(after[0][0] - planted, 1) if after and fault.whom != "between" else None,
        ended_s=round(ended - planted, 1),
        status=again if fault.whom == "between" else status,
        said=told.replace(str(folder), "…"),
        checkpoint=checkpoint,
        again=done if again == 0 else "refused" if fault.whom == "between" else f"refused: {said(more, 0.0)}",
    )


def _second_run(command: list[str], folder: Path, found: list[Any]) -> None:
    """The same command once more, when the first is in its third step."""
    while not (folder / "planted").exists():
        time.sleep(0.1)
    found.append(run(command, {}))


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
    elif what == "data gone":
        (folder / "train.parquet").unlink()
    else:
        write_task(folder, {"data changed": 63, "data appended": 72}[what])
        (folder / "reward.py").write_text(REWARD.format(root=ROOT))


class _Server:
    """The judge, or S3, in a process of its own, for the faults that happen to it."""

    def __init__(self, fault: Fault, folder: Path) -> None:
        self.settings: dict[str, Any] = {}
        self.folder, self.port, self.process = folder, free_port(), None
        url = f"http://127.0.0.1:{self.port}"
        if fault.whom == "judge":
            self.settings = {"reward_model.judge.url": f"{url}/v1", "reward_model.judge.timeout": 3}
            self.settings |= {"reward_model.judge.max_retries": 1, "custom_reward_function.path": None}
            self._command = [sys.executable, "-c", JUDGE, str(self.port)]
        elif fault.whom == "storage":
            self.settings = {"trainer.default_hdfs_dir": "s3://bucket/run"}
            self._command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)]
            os.environ |= {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_DEFAULT_REGION": "us-east-1"}
            os.environ |= {"AWS_ENDPOINT_URL": url}

    def __enter__(self) -> _Server:
        if self.settings:
            self._start()
        return self

    def __exit__(self, *error: object) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def again(self) -> None:
        """It runs, whatever became of it."""
        if self.process is not None:
            self.__exit__()
            self._start()

    def _start(self) -> None:
        quiet = subprocess.DEVNULL
        self.process = subprocess.Popen(self._command, stdout=quiet, stderr=quiet)
        (self.folder / "server").write_text(str(self.process.pid))
        for _ in range(600):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port)):
                break
            time.sleep(0.1)
        if "trainer.default_hdfs_dir" in self.settings:
            address = f"http://127.0.0.1:{self.port}/bucket"
            urllib.request.urlopen(urllib.request.Request(address, method="PUT")).close()


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


def command_of(folder: Path, out: Path, fault: Fault, server: _Server | None = None) -> list[str]:
    """Five steps of GRPO by two ranks, or one: a checkpoint after each, a validation after the third."""
    recipe = load_script(ROOT / "recipes" / "quickstart" / "model.py", "quickstart_model")
    tokenizer = recipe.build_tokenizer()
    recipe.save_checkpoint(folder / "model", recipe.build_model(tokenizer, hidden_size=64, num_layers=2), tokenizer)
    task = write_task(folder)
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
        **(server.settings if server else {}),
    }
    return [sys.executable, "-m", "verl_like.trainer.main_ppo", *overrides(task, folder / "model", out, **settings)]


def undisturbed(file: Path, fault: Fault) -> dict[str, Any]:
    """Metrics of the run that nothing happens to, and the bytes of 2.5 of its checkpoints. Kept in `file`."""
    if not file.exists():
        with tempfile.TemporaryDirectory() as name, _Server(fault, Path(name)) as server:
            out = Path(name) / "out"
            status, lines = run(command_of(Path(name), out, fault, server), {})
            assert status == 0, lines[-20:]
            sizes = [path.stat().st_size for path in out.glob("global_step_1/**/*") if path.is_file()]
            file.write_text(json.dumps({"facts": facts(out), "disk": int(2.5 * sum(sizes))}))
    return json.loads(file.read_text())


def compared(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> str:
    """In words, step by step. A step whose validation was lost has fewer numbers."""
    by_step = {record["training/global_step"]: record for record in expected}
    pairs = [(record, by_step[record["training/global_step"]]) for record in found]
    other = {name for a, b in pairs for name in a.keys() & b.keys() if a[name] != b[name]}
    gone = {name for a, b in pairs for name in b.keys() - a.keys()}
    text = f"{len(found)} steps, " + (f"OTHER NUMBERS: {', '.join(sorted(other)[:4])}" if other else "the same numbers")
    validation = all(name.startswith("val") for name in gone)
    return text + (f", without {'the validation' if validation else ', '.join(sorted(gone)[:4])}" if gone else "")


def facts(out: Path) -> list[dict[str, Any]]:
    """What must be the same in two runs."""
    return [{k: v for k, v in record.items() if not k.startswith(MEASURED)} for record in metrics_of(out)]


PAGE = """# What happens when something breaks

Each row was measured: `python -m benchmarks.faults --results faults.json` plants the fault in the third of five steps
of a real run (GRPO, the hf rollout engine, a checkpoint after every step, a validation after the third), writes down
what happens, and gives the same command again without the fault. Of ranks, driver and all: two ranks on CPUs under Ray;
of the others: one process (`trainer.launcher=local`). `trainer.stall_timeout` was {stall} s (its default is 300 s: what
waits for it takes as much longer), the limit of a reward 5 s, of a request to the judge 3 s with one more try; the
machine had other work, so seconds are upper bounds. Without `trainer.max_restarts`, with which a run that lost workers
would have begun again by itself. As root, on Linux.

"noticed" is the time from the fault to the first word on the console (of a stopped process after a sixth of
`stall_timeout`, or 30 s), "ended" to the end of the process; a status of 0 means that the run got through, or ended as
it was asked to. "checkpoint" is the newest whole one afterwards: 2 means that the third step was lost, in which the
fault happened; 3 or more that nothing was. "again" is the next start of the same command: how many steps it has in its
metrics at the end, and whether all numbers are those of a run that nothing happened to. A run that went on without an
update or a reward has other numbers from there on. "between": the run was killed in its third step, then its files were
changed; what was said, and the status, are the next start's.

| who | what | in | noticed s | ended s | status | what was said | checkpoint | again |
|---|---|---|---|---|---|---|---|---|
{rows}
"""


def page(results: dict[str, Any]) -> str:
    """docs/faults.md."""
    rows = []
    for fault in FAULTS:
        if (each := results.get(fault.name)) is not None:
            text = re.sub(r"(host |process |-CONT )\w+", r"\1…", _short(each["said"]))
            told = f"`{text[:220]}{'…' if len(text) > 220 else ''}`" if text else "nothing"
            told = "nothing: it is gone" if each["status"] < 0 and not text else told
            times = (
                ("-", "-")
                if fault.whom == "between"
                else ("-" if each["noticed_s"] is None else each["noticed_s"], each["ended_s"])
            )
            cells = (fault.whom, fault.what, fault.phase, *times, each["status"], told, each["checkpoint"])
            rows.append("| " + " | ".join(map(str, (*cells, _short(each["again"])[:160]))) + " |")
    return PAGE.format(stall=STALL_S, rows="\n".join(rows))


def _short(text: str) -> str:
    """Without what differs from machine to machine, as a cell of a table."""
    return re.sub(r"(?:/\S*/|…/)(?=stall.txt|out|train.parquet)", "…/", text).replace("|", "\\|").replace("`", "'")


if __name__ == "__main__":
    main()
