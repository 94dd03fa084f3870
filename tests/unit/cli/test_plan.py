"""`verl-like plan`: everything checked, nothing started but the graders, nothing written."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.support import ROOT, overrides, write_task
from tests.worlds.processes import run_module
from verl_like.cli.main import main
from verl_like.kit.forecast import memory
from verl_like.kit.forecast.memory import Machine


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return write_task(tmp_path_factory.mktemp("task"), num_rows=16)


def test_a_run_that_can_be_is_told(task: dict[str, str], tiny_model: Path, tmp_path: Path) -> None:
    """In a process of its own: nothing is imported that only a run needs, and no folder is made."""
    argv = overrides(task, tiny_model, tmp_path / "out", trainer__launcher="ray", trainer__save_freq=2)
    unused = ("ray", "vllm", "sglang", "pandas", "pyarrow.dataset", "aiohttp", "datasets", "tensorboard", "wandb")
    code = (
        "import sys\nfrom verl_like.cli.main import main\nmain(sys.argv[1:])\n"
        f"print([name for name in {unused} if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "plan", *argv], cwd=ROOT, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    told = done.stdout
    assert "1 on cpu, started by ray" in told and "16 rows (sevens 16)" in told
    assert "end tokens     1 '<eos>'\n" in told
    assert "8 prompts x 8 = 64 sequences" in told and "first prompt has 5 tokens: '00+0='" in told
    assert "sevens          16      0       0" in told  # the reference answers were graded, and better than wrong ones
    assert "at full lengths each phase takes" in told and "update_actor    0." in told
    assert "a fresh start" in told and told.splitlines()[-1] == "[]"
    assert not (tmp_path / "out").exists()


def test_a_run_without_room_is_not_said_to_run(
    task: dict[str, str], tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """On a pretended device of 10 kB."""
    pretended = Machine(on_cpu=False, world=1, capacity=1e4)
    monkeypatch.setattr(memory, "this_machine", lambda *arguments: pretended)
    main(["plan", *overrides(task, tiny_model, tmp_path / "out")])
    told = capsys.readouterr().out
    assert "DOES NOT FIT" in told and "By the memory forecast this runs out of memory" in told.splitlines()[-1]
    monkeypatch.setattr(memory, "this_machine", lambda *arguments: replace(pretended, capacity=8e9))
    main(["plan", *overrides(task, tiny_model, tmp_path / "out")])
    assert capsys.readouterr().out.splitlines()[-1].startswith("This can run.")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("actor_rollout_ref.actor.ppo_mini_batch_sise=8", "unknown key actor_rollout_ref.actor.ppo_mini_batch_sise"),
        ("data.prompt_key=question", "question"),
        ("data.max_prompt_length=3", "data.max_prompt_length"),
        ("data.train_batch_size=7", "7"),
        ("trainer.default_local_dir={here}/file/out", "file is a file, not a folder"),
        ("custom_reward_function.path={here}/none.py", "compute_score"),
    ],
)
def test_what_cannot_be_ends_with_status_1(
    change: str, message: str, task: dict[str, str], tiny_model: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "none.py").write_text("def compute_score(data_source, solution_str, ground_truth): pass\n")
    key = change.partition("=")[0]
    argv = [each for each in overrides(task, tiny_model, tmp_path / "out") if each.partition("=")[0] != key]
    with pytest.raises(SystemExit) as ended:
        main(["plan", *argv, change.format(here=tmp_path)])
    assert str(ended.value.code).startswith("error: ") and message in str(ended.value.code)
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_that_would_be_taken_up_is_told_and_left_alone(
    task: dict[str, str], tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    half_done = tmp_path / "out" / "global_step_3.saving"
    half_done.mkdir(parents=True)
    main(["plan", *overrides(task, tiny_model, tmp_path / "out")])
    assert "a fresh start" in capsys.readouterr().out and half_done.is_dir()


def test_a_plan_on_a_command_line_ends_with_all_that_it_says_and_status_0(
    task: dict[str, str], tiny_model: Path, tmp_path: Path
) -> None:
    """It leaves without the interpreter's own end: nothing that stands in a buffer may be lost, nobody may be left."""
    argv = overrides(task, tiny_model, tmp_path / "out", trainer__launcher="ray", trainer__save_freq=2)
    done = run_module("verl_like.cli", ["plan", *argv], timeout=200)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("This can run. Nothing was started but the graders, and nothing was written.\n")
