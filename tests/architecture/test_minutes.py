"""The minutes of `make test` are a decision: tests/minutes.txt has them by folder, and their sum has a bound.

`make test-minutes` measures and writes the table. Who adds minutes of tests raises MOST_MINUTES here in the same change
and says why in its message; who saves some lowers it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.worlds import ledger

MOST_MINUTES = (
    43.2  # of CPU in all, measured beside other work, which adds to it (the aim is 28, and what each capability adds)
)
LEFT_OUT = ("tests/gpu",)  # by `make test`
NOT_MEASURED: tuple[str, ...] = ()  # before the next make test-minutes
FOLDERS = sorted(
    {ledger.folder_of(str(path.relative_to(ledger.ROOT))) for path in ledger.TABLE.parent.rglob("test_*.py")}
)


def test_each_folder_has_its_minutes() -> None:
    named = ledger.by_folder(ledger.read_table()).keys()
    wanted = {*FOLDERS, ledger.COLLECTION} - {*LEFT_OUT}
    again = "make test-minutes writes the table anew"
    assert sorted(wanted - named - {*NOT_MEASURED}) == [], again
    assert sorted(named - wanted) == [], again


def test_the_sum_is_within_its_bound() -> None:
    folders = ledger.by_folder(ledger.read_table())
    minutes = sum(folders.values()) / 60
    assert minutes <= MOST_MINUTES, (
        f"{minutes:.1f} minutes of CPU, {MOST_MINUTES} are allowed: make tests quicker, or decide"
    )


def test_long_files_are_there_and_within_their_folders() -> None:
    table = ledger.read_table()
    files = {name: seconds for name, seconds in table.items() if name.endswith(".py")}
    assert [name for name in files if not (ledger.ROOT / name).is_file()] == []
    for folder, seconds in ledger.by_folder(table).items():
        assert sum(each for name, each in files.items() if ledger.folder_of(name) == folder) <= seconds + 0.1 * len(
            files
        )


def test_a_table_keeps_what_was_not_run(tmp_path: Path) -> None:
    path = tmp_path / "minutes.txt"
    ledger.write_table({"a/test_x.py": 7.0, "a/test_y.py": 1.5, "b/test_z.py": 2.0, ledger.COLLECTION: 30.0}, path)
    whole = {"collection": 30.0, "a": 8.5, "a/test_x.py": 7.0, "b": 2.0}
    assert ledger.read_table(path) == whole and list(ledger.read_table(path)) == list(whole)
    ledger.write_table({"b/test_z.py": 9.0}, path)
    assert ledger.read_table(path) == {**whole, "b": 9.0, "b/test_z.py": 9.0}
    assert ledger.by_folder(ledger.read_table(path)) == {"collection": 30.0, "a": 8.5, "b": 9.0}
    ledger.write_table({"c/test_x.py": 1.0, ledger.COLLECTION: 30.0}, path)  # the whole suite
    assert ledger.read_table(path) == {"collection": 30.0, "c": 1.0}


def test_the_cpu_of_children_counts(tmp_path: Path) -> None:
    """Of one that has ended and of one that lives."""
    if not Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").is_file():
        pytest.skip("only Linux names a process's children")
    burn = "import time\nwhile time.process_time() < 0.4: pass\nprint(flush=True)\ninput()"
    before = ledger.cpu_of_tree(os.getpid())
    with subprocess.Popen([sys.executable, "-c", burn], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stdout.readline()
        assert 0.35 <= ledger.cpu_of_tree(child.pid) < 2
        living = ledger.cpu_of_tree(os.getpid()) - before
        child.communicate(b"\n")
    assert living >= 0.35 and ledger.cpu_of_tree(os.getpid()) - before >= living - 0.05
