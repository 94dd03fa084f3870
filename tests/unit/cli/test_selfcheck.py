"""`verl-like selfcheck` from the command line."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.unit.models import tiny_vision
from verl_like.algorithms.objectives import PolicyObjective
from verl_like.cli.main import main


@pytest.mark.engines  # two more processes
def test_without_keys_a_tiny_model_is_made_and_said(capsys: pytest.CaptureFixture[str]) -> None:
    """A critic is in it (the default estimator is gae), and two processes; then two whole steps with both."""
    main(["selfcheck"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("model: none given (actor_rollout_ref.model.path); a tiny Qwen2")
    assert lines[1] == "longest row: 600 tokens; the sliding window has 256"
    assert lines[-1].startswith("largest relative difference") and lines[-1].endswith("passed")
    parts = lines[: lines.index("")]
    passed = [line for line in parts if line.endswith("ok")]
    assert len(passed) == 16 and sum("critic" in line for line in passed) == 3
    assert sum(line.startswith("2 processes") for line in passed) == 3
    assert parts[-1].startswith("largest relative difference") and parts[-1].endswith("passed")
    steps = [line for line in lines[len(parts) :] if line.endswith("ok")]
    for name in ("actor", "critic"):
        assert sum(f"{name}: change of every weight" in line for line in steps) == 2


def test_a_difference_ends_with_status_1(
    tiny_model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    loss = PolicyObjective.__call__

    def doubled(*given: object) -> object:
        value, metrics = loss(*given)  # pyright: ignore[reportArgumentType]
        return 2 * value, metrics

    monkeypatch.setattr(PolicyObjective, "__call__", doubled)
    keys = [f"actor_rollout_ref.model.path={tiny_model}", "algorithm.adv_estimator=grpo", "data.train_files=x.parquet"]
    keys.append("actor_rollout_ref.rollout.n=4")
    with pytest.raises(SystemExit, match="1"):
        main(["selfcheck", "--rows", "6", "--ranks", "1", *keys])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"model: {tiny_model}" and "256 tokens; the model has no more positions" in lines[1]
    wrong = [line.split("  ")[0] for line in lines if line.endswith("DIFFERENT")]
    assert next(name for name in wrong if name.startswith("step")) == "step 1: actor: mini-batch 1: gradient norm"
    assert {name for name in wrong if name.startswith("plain")} == {
        "plain model: loss",
        "plain model: gradient",
        "plain model: a row of 256 tokens: loss",
        "plain model: a row of 256 tokens: gradient",
    }
    assert lines[-1].endswith("FAILED")


@pytest.mark.parametrize("frozen", [False, True])
def test_a_model_that_sees_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str], frozen: bool) -> None:
    tiny_vision.save(tmp_path, "qwen3_vl")
    keys = [f"actor_rollout_ref.model.path={tmp_path}", "algorithm.adv_estimator=grpo", "data.train_files=x.parquet"]
    keys += ["actor_rollout_ref.rollout.n=2", f"actor_rollout_ref.actor.freeze_vision_tower={frozen}"]
    main(["selfcheck", "--rows", "6", "--ranks", "1", *keys])
    found = capsys.readouterr().out
    assert "images, which the two whole steps have" in found and found.splitlines()[-1].endswith("passed")


def test_a_large_model_is_checked_by_a_process_that_keeps_its_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same command, once more and no oftener; nobody else's process is replaced."""
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(2**28)
    begun = list[tuple[str, list[str], dict[str, str]]]()

    def replaced(*given: Any) -> None:
        begun.append(given)
        raise SystemExit("replaced")

    def times_begun() -> int:
        with pytest.raises(SystemExit):  # a file of weights alone is no model
            main(["selfcheck", f"actor_rollout_ref.model.path={tmp_path}", "data.train_files=x.parquet"])
        return len(begun)

    monkeypatch.setattr(os, "execve", replaced)
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    monkeypatch.setattr(platform, "libc_ver", lambda: ("glibc", "2.36"))
    assert times_begun() == 0
    monkeypatch.setattr(sys, "argv", ["verl-like", "selfcheck"])
    assert times_begun() == 1
    program, words, variables = begun[0]
    assert words == [program, *sys.orig_argv[1:]] and variables.items() > os.environ.items()
    monkeypatch.setenv("GLIBC_TUNABLES", variables["GLIBC_TUNABLES"])
    assert times_begun() == 1


def test_what_no_plain_step_has_is_refused(tmp_path: Path) -> None:
    keys = ["distillation.enabled=True", "distillation.teacher_model.model_path=t", "data.train_files=x.parquet"]
    with pytest.raises(SystemExit, match=r"distillation.enabled=True: selfcheck knows no teachers; leave it out"):
        main(["selfcheck", *keys])
