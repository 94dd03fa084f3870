"""`bench all`: one table of real runs; a failed benchmark is named and the others run."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from verl_like.cli.main import main
from verl_like.kit.bench import everything
from verl_like.kit.bench.everything import Task, tasks_of
from verl_like.kit.bench.report import Report, Row


def arguments_of(*options: str, monkeypatch: pytest.MonkeyPatch) -> argparse.Namespace:
    """What the command line gives `main`."""
    seen: list[argparse.Namespace] = []
    with monkeypatch.context() as patch:
        patch.setattr(everything, "main", seen.append)
        main(["bench", "all", *options])
    return seen[0]


def test_options_reach_every_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each command line is one that its benchmark accepts, with the shape, ranks and keys asked for."""
    given = ["--model", "1.5b", "--workload", "w2", "--ranks", "4", "--rounds", "2", "--engine", "hf", "--", "a.b=1"]
    tasks = {task.name: task for task in tasks_of(arguments_of(*given, monkeypatch=monkeypatch))}
    assert list(tasks) == [
        "packing",
        "attention",
        "head",
        "rollout",
        "log-prob",
        "update",
        "update-kept",
        "sync",
        "grpo",
    ]
    for name, module in (("rollout", "rollout"), ("log-prob", "log_prob"), ("update", "update"), ("sync", "sync")):
        seen: list[argparse.Namespace] = []
        monkeypatch.setattr(f"verl_like.kit.bench.{module}.main", seen.append)
        main(["bench", *tasks[name].options])
        found = seen[0]
        assert (found.model, found.workload, found.ranks, found.rounds) == ("1.5b", "w2", 4, 2)
        assert found.overrides == ["a.b=1"]
    for name in ("packing", "attention", "head", "grpo"):
        seen = []
        monkeypatch.setattr(f"verl_like.kit.bench.{name}.main", seen.append)
        main(["bench", *tasks[name].options])
        assert len(seen) == 1
    assert seen[0].rollout == Path("outputs/bench/all/rollout.json")
    assert seen[0].overrides == ["actor_rollout_ref.rollout.name=hf", "a.b=1"]


def test_fewer_rows_leave_whole_steps_out(monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = tasks_of(arguments_of("--rows", "16", monkeypatch=monkeypatch))
    assert "grpo" not in [task.name for task in tasks]


def test_the_table_of_real_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["bench", "all", "--only", "packing", "--out", str(tmp_path)])
    table = (tmp_path / "table.md").read_text()
    assert table.startswith("# cpu, cpu") and "| packing" in table and "Least:" in table
    assert Report.load(tmp_path / "packing.json").bench == "packing"
    assert "written:" in capsys.readouterr().out


def test_a_failure_is_named_and_the_others_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(task: Task, json_path: Path, log_path: Path) -> str | None:
        if task.name == "attention":
            return "no such kernel\n(exit status 1)"
        Report(bench=task.name, work={}, rows=[Row(name="x", seconds=1.0)]).save(json_path)
        return None

    monkeypatch.setattr(everything, "run", run)
    options = ["--only", "packing", "attention", "head", "--out", str(tmp_path)]
    with pytest.raises(SystemExit, match="failed: attention"):
        main(["bench", "all", *options])
    table = (tmp_path / "table.md").read_text()
    assert "no such kernel" in table and table.index("| packing") < table.index("FAILED") < table.index("| head")


def test_figures_of_a_process_that_crashed_at_its_end_are_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(task: Task, json_path: Path, log_path: Path) -> str | None:
        Report(bench=task.name, work={}, rows=[Row(name="x", seconds=1.0)]).save(json_path)
        return "pure virtual method called\n(exit status -6)"

    monkeypatch.setattr(everything, "run", run)
    with pytest.raises(SystemExit, match="failed: packing"):
        main(["bench", "all", "--only", "packing", "--out", str(tmp_path)])
    table = (tmp_path / "table.md").read_text()
    assert table.index("FAILED") < table.index("| packing") < table.index("(exit status -6)")


def test_whole_steps_run_without_the_generation_alone_where_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[Task] = []

    def run(task: Task, json_path: Path, log_path: Path) -> str | None:
        ran.append(task)
        if task.name == "rollout":
            if len(ran) == 1:
                return "no vllm"
            json_path.write_text(figures)
        return None if task.name == "rollout" else "planted"

    Report(bench="rollout", work={}, rows=[Row(name="x", seconds=1.0)]).save(tmp_path / "made.json")
    figures = (tmp_path / "made.json").read_text()
    monkeypatch.setattr(everything, "run", run)
    for _ in range(2):
        with pytest.raises(SystemExit):
            main(["bench", "all", "--only", "rollout", "grpo", "--out", str(tmp_path)])
    failed, there = (task.options for task in ran if task.name == "grpo")
    assert "--rollout" not in failed and failed[-2:] == there[-2:]
    assert there[there.index("--rollout") + 1] == str(tmp_path / "rollout.json")


def test_the_last_lines_of_a_failed_process(tmp_path: Path) -> None:
    problem = everything.run(Task(name="x", options=["no-such-bench"]), tmp_path / "x.json", tmp_path / "x.log")
    assert problem is not None and "invalid choice" in problem and "(exit status 2)" in problem
