"""`verl-like report` and `verl-like compare`: files where they were asked for, errors that say what is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.observe.run_factory import write_run
from verl_like.cli.main import main


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    root = tmp_path_factory.mktemp("runs")
    return [str(write_run(root / name, steps=4, sample_every=2)) for name in ("a", "b")]


def test_a_report_is_written_into_the_run_or_elsewhere(
    folders: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["report", folders[0]])
    main(["report", folders[0], "--out", str(tmp_path / "new" / "r.html")])
    printed = capsys.readouterr().out.split()
    assert printed == [f"{folders[0]}/report.html", str(tmp_path / "new" / "r.html")]
    assert all(Path(path).read_text().startswith("<!doctype html>") for path in printed)


def test_runs_are_compared(folders: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["compare", *folders, "--out", str(tmp_path / "c.html")])
    assert capsys.readouterr().out.strip() == str(tmp_path / "c.html")
    assert "<title>a / b" in (tmp_path / "c.html").read_text()


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["report", "nowhere"], "nowhere is no run's folder"),
        (["compare", "a"], "1 runs were named; two or three"),
        (["compare", "a", "b"], "there is no such folder"),
    ],
)
def test_what_is_wrong_is_told(argv: list[str], told: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert str(ended.value.code).startswith("error: ") and told in str(ended.value.code)


def test_a_damaged_file_is_named(folders: list[str]) -> None:
    (Path(folders[0]) / "environment.json").write_text("")
    with pytest.raises(SystemExit, match=r"environment\.json is damaged"):
        main(["report", folders[0]])
