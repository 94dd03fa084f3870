"""Minutes of the suite by folder: seconds of CPU of every test and of all processes it starts, summed into a table.

`make test-minutes` runs the suite with this plugin of pytest and writes tests/minutes.txt: folders, and under each its
files of at least FILE_S seconds. tests/conftest.py begins with the longest of these, tests/architecture/test_minutes.py
holds their sum. CPU and not wall time, so that other work on the host changes little. With ARGS=tests/e2e it
replaces that folder's rows alone.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "tests" / "minutes.txt"
COLLECTION = "collection"  # of all processes of tests together
FILE_S = 4.0
_HEAD = "# Seconds of CPU of `make test`; written by `make test-minutes`, read by tests/worlds/ledger.py\n"
_TICKS = os.sysconf("SC_CLK_TCK")


def read_table(path: Path = TABLE) -> dict[str, float]:
    """Seconds by folder, by file, and of the collection."""
    rows = [line.split() for line in path.read_text().splitlines() if not line.startswith("#")]
    return {name: float(seconds) for seconds, name in rows}


def write_table(seconds: Mapping[str, float], path: Path = TABLE) -> None:
    """Write the table: from seconds by file, and of the collection, the folders' sums and the long files.

    Without those of the collection it is a part of the suite, and folders of which there are none keep their rows.
    """
    folders = defaultdict[str, float](float)
    for name, each in seconds.items():
        folders[folder_of(name)] += each
    before = {} if COLLECTION in seconds else read_table(path)
    kept = {name: each for name, each in before.items() if folder_of(name) not in folders}
    seconds, totals = {**kept, **seconds}, {**by_folder(kept), **folders}
    lines = []
    for folder, total in sorted(totals.items(), key=lambda row: -row[1]):
        long = [row for row in seconds.items() if folder_of(row[0]) == folder != row[0] and row[1] >= FILE_S]
        rows = [(folder, total), *sorted(long, key=lambda row: -row[1])]
        lines += [f"{each:8.1f}  {name}\n" for name, each in rows]
    path.write_text(_HEAD + "".join(lines))


def folder_of(name: str) -> str:
    """The folder of a test file; the collection is its own."""
    return name.rpartition("/")[0] if name.endswith(".py") else name


def by_folder(seconds: Mapping[str, float]) -> dict[str, float]:
    """The folders' rows alone, and the collection's."""
    return {name: each for name, each in seconds.items() if not name.endswith(".py")}


def cpu_of_tree(process: int) -> float:
    """Seconds of CPU of a living process, its living descendants, and those that these have waited for."""
    try:
        status = Path(f"/proc/{process}/stat").read_text()
        children = [task.read_text() for task in Path(f"/proc/{process}/task").glob("*/children")]
    except OSError:  # it has ended since its parent named it
        return 0.0
    ticks = sum(map(int, status.rpartition(")")[2].split()[11:15]))
    return ticks / _TICKS + sum(cpu_of_tree(int(child)) for child in " ".join(children).split())


class Ledger:
    """The plugin: in a process of tests it measures, in the one that gathers reports it sums (with -n0 that is one)."""

    def __init__(self) -> None:
        self._last = 0.0
        self._seconds = defaultdict[str, float](float)

    def _since(self) -> float:
        """Seconds since the last call, never below 0: what nobody waited for leaves the sum."""
        now = cpu_of_tree(os.getpid())
        since, self._last = now - self._last, now
        return max(since, 0.0)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Note what imports and collection took."""
        seconds = self._since()
        output: dict[str, Any] | None = getattr(session.config, "workeroutput", None)
        if output is None:
            self._seconds[COLLECTION] += seconds
        else:
            output["collection_cpu_s"] = seconds

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self) -> Iterator[None]:
        """Give a report of a set-up, call or tear-down its seconds; pytest-xdist carries them along."""
        report = yield
        report.cpu_s = self._since()
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add a report's seconds to its file."""
        self._seconds[report.nodeid.partition("::")[0]] += getattr(report, "cpu_s", 0.0)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Add a process's collection."""
        self._seconds[COLLECTION] += getattr(node, "workeroutput", {}).get("collection_cpu_s", 0.0)

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Write the table of a run that went to its end."""
        if session.config.args_source == pytest.Config.ArgsSource.ARGS:
            self._seconds.pop(COLLECTION, None)  # of a part
        ended = exitstatus in (
            pytest.ExitCode.OK,
            pytest.ExitCode.TESTS_FAILED,
        )  # test_minutes.py may, before there is a row
        if not hasattr(session.config, "workeroutput") and ended:
            write_table(self._seconds)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Say the minutes."""
        table = by_folder(read_table())
        for name, seconds in table.items():
            terminalreporter.write_line(f"{seconds / 60:6.2f} minutes of CPU  {name}")
        terminalreporter.write_line(f"{sum(table.values()) / 60:6.2f} minutes of CPU in all; the table: {TABLE}")


def pytest_configure(config: pytest.Config) -> None:
    """Measure where /proc names a process's children."""
    if not Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").is_file():
        raise pytest.UsageError(
            "the minutes of tests are measured with /proc/<pid>/task/<tid>/children, which only Linux has"
        )
    config.pluginmanager.register(Ledger(), "ledger")
