"""The table of what only a card can tell (tests/gpu/checks.py): commands exist, figures are computed, a run resumes."""

from __future__ import annotations

import argparse
import ast
import importlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import growth
from tests.gpu.checks import (
    CHECKS,
    FIRST_MINUTES,
    PIECE_MINUTES,
    UPDATE_GB,
    UPDATE_SECONDS,
    Check,
    Expect,
    page,
    pieces,
)
from tests.gpu.report import Runner, ended
from tests.twin.dry_run_list import LEFT_OUT, SUITES
from verl_like.cli.main import VERBS

ROOT = Path(__file__).parents[3]


def test_the_page_is_the_table() -> None:
    text = (ROOT / "docs" / "gpu_checks.md").read_text(encoding="utf-8")
    assert text == page(), "python -m tests.gpu.report --page"
    assert all(check.claim in text for check in CHECKS)


def test_pieces_are_short_and_the_telling_rows_come_first() -> None:
    cut = pieces()
    assert [check for piece in cut for check in piece] == list(CHECKS)
    assert all(sum(check.minutes for check in piece) <= PIECE_MINUTES for piece in cut)
    assert len({check.name for check in CHECKS}) == len(CHECKS)
    ends = itertools.accumulate(check.minutes for check in CHECKS)
    first = {check.name for check, end in zip(CHECKS, ends, strict=True) if end <= FIRST_MINUTES + 1}
    assert {"attention", "fused-head", "train-engine", "memory", "update", "rollout", "main-job", "sync"} <= first


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_a_rows_command_exists(check: Check) -> None:
    assert why_not(check.command) == ""


def test_every_file_of_tests_for_cards_is_in_the_table() -> None:
    named = {word for check in CHECKS for word in check.command.split() if word.startswith("tests/gpu/")}
    assert named == {path.relative_to(ROOT).as_posix() for path in (ROOT / "tests/gpu").glob("test_*_gpu.py")}


def test_every_file_is_tried_without_a_card_or_left_out_with_a_reason() -> None:
    tried = {name for suite in SUITES.values() for name in suite.files}
    known = tried | {beginning.partition("::")[0] for beginning in LEFT_OUT}
    assert {path.name for path in (ROOT / "tests/gpu").glob("test_*.py")} == known


def why_not(command: str) -> str:
    """What of a command is not there: a file, a test, a verb, an option; empty if it could be started."""
    words = command.format(json="figures.json").split()
    if words[0] != "-m":
        return "" if (ROOT / words[0]).is_file() else f"no file {words[0]}"
    if words[1] == "pytest":
        files = [ROOT / word for word in words if word.endswith(".py")]
        return next((f"no test in {file.name}" for file in files if not file.is_file() or not gpu_tests_in(file)), "")
    assert words[1] == "verl_like.cli"
    verb = next((verb for verb in VERBS if verb.name == words[2]), None)
    if verb is None:
        return f"no verb {words[2]}"
    parser = argparse.ArgumentParser(exit_on_error=False)
    importlib.import_module(verb.module).add_arguments(parser)
    try:
        parser.parse_args(words[3:])
    except (argparse.ArgumentError, SystemExit) as error:
        return f"its arguments do not parse: {error}"
    return ""


def gpu_tests_in(file: Path) -> list[str]:
    """Names of the tests of a file, where it is marked gpu."""
    text = file.read_text()
    names = [node.name for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
    return [name for name in names if name.startswith("test_") and "pytest.mark.gpu" in text]


def test_the_check_of_commands_can_fail() -> None:
    assert "no test in" in why_not("-m pytest -m gpu tests/gpu/test_none_gpu.py")
    assert why_not("-m verl_like.cli none") == "no verb none"
    assert "do not parse" in why_not("-m verl_like.cli bench sync --channels ipc")
    assert why_not("benchmarks/none.py") == "no file benchmarks/none.py"


def test_expected_figures_are_computed() -> None:
    """By the table of operations and the memory forecast for an H200."""
    options = growth._arguments(["--gpu", "H200", "--models", "1.5b", "--workloads", "w1"])
    (row,), (memory,) = growth.floors(options).rows, growth.memory_of(options).rows
    assert row.figures["at 40%"] == pytest.approx(UPDATE_SECONDS, rel=0.01)
    assert memory.figures["total"] == pytest.approx(UPDATE_GB, rel=0.01)


EXPECTS = [(check, expect) for check in CHECKS for expect in check.expects]


@pytest.mark.parametrize(("check", "expect"), EXPECTS, ids=[f"{c.name}, {e.name}" for c, e in EXPECTS])
def test_what_is_measured_is_printed_somewhere(check: Check, expect: Expect) -> None:
    """A column stands in the benchmark's source, a printed figure in the test's, around a number."""
    words = check.command.split()
    assert sum(side is not None for side in (expect.most, expect.least, expect.about)) == 1
    if expect.column:
        source = (ROOT / "verl_like/kit/bench" / f"{words[3].replace('-', '_')}.py").read_text()
        assert expect.column == "seconds" or f'"{expect.column}"' in source
        return
    (file,) = (ROOT / word for word in words if word.endswith(".py"))
    printed = re.findall(r'print\(f"([^"]*)"', file.read_text())
    filled = [re.sub(r"\{backend\}", expect.name.rpartition(" ")[2].lower(), text) for text in printed]
    assert any(expect.measured(re.sub(r"\{[^}]*\}", "1.25", text), Path("none")) == 1.25 for text in filled)


# The runner, with quick rows.


def row(name: str, code: str, minutes: float = 1.0, expects: tuple[Expect, ...] = (), **more: object) -> Check:
    """A row that runs a file of Python code."""
    return Check(name, f"{name} is so.", code, minutes, expects, **more)  # type: ignore[arg-type]


@pytest.fixture
def made(tmp_path: Path) -> dict[str, Check]:
    """Quick rows: passing, differing, failing, too long, without its package."""
    texts = {
        "good": "import json, sys; print('speed 2.5'); json.dump({'rows': [{'name': 'a b', 'seconds': 2, 'figures': "
        "{'GB': 3}}], 'figures': {'mfu': 0.5}}, open(sys.argv[1], 'w'))",
        "bad": "raise SystemExit('it broke')",
        "long": "import time; print('begun', flush=True); time.sleep(60)",
        "skips": "print('1 skipped in 0.1s')",
    }
    for name, text in texts.items():
        (tmp_path / f"{name}.py").write_text(text)
    good = f"{tmp_path}/good.py {{json}}"
    figures = (
        Expect("GB", row="a", column="GB", about=3.1),
        Expect("mfu", column="mfu", least=0.4),
        Expect("speed", text=r"speed (\S+)", most=3),
    )
    return {
        "good": row("good", good, expects=figures),
        "off": row("off", good, expects=(Expect("GB", row="a", column="GB", most=2),)),
        "silent": row("silent", good, expects=(Expect("GB", row="none", column="GB", most=2),)),
        "bad": row("bad", f"{tmp_path}/bad.py"),
        "long": row("long", f"{tmp_path}/long.py", minutes=0.01),
        "skips": row("skips", f"{tmp_path}/skips.py"),
        "absent": row("absent", good, needs=("no_such_package",)),
        "two": row("two", good, devices=2),
    }


def test_each_end_of_a_row_is_told(made: dict[str, Check], tmp_path: Path) -> None:
    runner = Runner(tuple(made.values()), tmp_path / "out", devices=1)
    assert not runner.run()
    found = {name: (state["status"], state["said"]) for name, state in runner.state.items()}
    assert found == {
        "good": ("passed", "speed 2.5"),
        "off": ("differs", "speed 2.5"),
        "silent": ("differs", "speed 2.5"),
        "bad": ("failed", "it broke"),
        "long": ("out of time", "begun"),
        "skips": ("left out", "1 skipped in 0.1s"),
        "absent": ("left out", "needs no_such_package"),
        "two": ("left out", "needs 2 devices, 1 are here"),
    }
    table = (tmp_path / "out" / "table.md").read_text()
    assert "| good | passed | GB: 3.1 within 15%; mfu: at least 0.4; speed: at most 3 | 3; 0.5; 2.5 |" in table
    assert "| off | differs | GB: at most 2 | 3 |" in table and "| silent | differs | GB: at most 2 | - |" in table
    again = Runner(tuple(made.values()), tmp_path / "out", devices=1)
    assert again.left() == () and Runner((made["good"], made["two"]), tmp_path / "out", devices=1).run()


def test_a_row_whose_command_changed_runs_again(made: dict[str, Check], tmp_path: Path) -> None:
    Runner((made["bad"],), tmp_path / "out", devices=1).run()
    changed = row("bad", made["good"].command)
    assert Runner((changed,), tmp_path / "out", devices=1).left() == (changed,)


def test_one_piece_at_a_time(made: dict[str, Check], tmp_path: Path) -> None:
    """Each call runs one piece; a row that took the piece's time leaves the rest to the next."""
    rows = [row(name, made["good"].command, minutes=5.0) for name in ("first", "second")]
    assert not Runner(tuple(rows), tmp_path / "out", devices=1).run(most_pieces=1)
    assert Runner(tuple(rows), tmp_path / "out", devices=1).left() == (rows[1],)
    assert Runner(tuple(rows), tmp_path / "out", devices=1).run(most_pieces=1)
    slow = (row("slow", made["long"].command, minutes=2.0), row("next", made["good"].command, minutes=2.0))
    runner = Runner(slow, tmp_path / "other", devices=1, piece_s=1.5)
    runner.run(most_pieces=1)
    assert runner.of(slow[0])["status"] == "out of time" and runner.left() == (slow[1],)


def test_a_killed_run_goes_on_and_gives_up_the_second_time(made: dict[str, Check], tmp_path: Path) -> None:
    """The row that was running is begun again once; one that kills its runner each time does not stop the others."""
    out = tmp_path / "out"
    wait = row("wait", made["long"].command, minutes=1.0)
    good = row("good", made["good"].command)
    code = (
        "from pathlib import Path; from tests.gpu.checks import Check; from tests.gpu.report import Runner\n"
        f"Runner((Check('good', '', {good.command!r}, 1.0), Check('wait', '', {wait.command!r}, 1.0)),"
        f" Path({str(out)!r}), 1).run()"
    )
    groups: list[int] = []
    for times in (1, 2):
        process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.DEVNULL)
        until = time.monotonic() + 60
        while json.loads(state(out)).get("wait", {}).get("beginnings") != times:
            assert time.monotonic() < until and process.poll() is None
            time.sleep(0.05)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        kept = json.loads(state(out))
        groups.append(kept["wait"]["group"])
        assert kept["good"]["status"] == "passed" and kept["wait"]["status"] == "begun"
    runner = Runner((good, wait), out, devices=1)
    assert runner.left() == (wait,) and running(groups[1]) and not runner.run()
    assert runner.of(wait)["said"] == "begun 2 times, and never came to its end"
    assert [running(group) for group in groups] == [False, False]  # a run that goes on ends what the other left


def state(out: Path) -> str:
    path = out / "state.json"
    return path.read_text() if path.exists() else "{}"


def running(pid: int) -> bool:
    """Whether a process is there and has not ended, waited for up to two seconds."""
    until = time.monotonic() + 2
    while time.monotonic() < until:
        path = Path(f"/proc/{pid}/stat")
        if not path.exists() or path.read_text().rpartition(")")[2].split()[0] == "Z":
            return False
        time.sleep(0.05)
    return True


def test_what_a_row_started_ends_with_it(tmp_path: Path) -> None:
    code = "import subprocess, sys, time; print(subprocess.Popen(['sleep', '60']).pid, flush=True); time.sleep(60)"
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen([sys.executable, "-c", code], stdout=log, start_new_session=True)
        assert ended(process, 3.0) is None
    assert not running(int((tmp_path / "log").read_text()))
