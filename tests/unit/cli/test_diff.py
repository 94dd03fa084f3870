"""`verl-like diff`: the keys in which two runs differ, from what runs write."""

from __future__ import annotations

from pathlib import Path

import pytest

from verl_like.cli.main import main
from verl_like.trainer.compose import compose, save_resolved


def write_run(folder: Path, *overrides: str) -> Path:
    save_resolved(compose(overrides), folder / "config.yaml")
    return folder


def lines(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines() if "." in line and not line.startswith(("A ", "B "))]


def test_the_keys_that_differ_are_shown_with_their_default(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = write_run(tmp_path / "one", "data.seed=3", "trainer.default_local_dir=one")
    two = write_run(tmp_path / "two", "actor_rollout_ref.rollout.n=8", "+reward_model.reward_kwargs.a=1")
    main(["diff", str(one), str(two)])
    told = capsys.readouterr().out
    assert {line[0]: line[1:] for line in lines(told)} == {
        "actor_rollout_ref.rollout.n": ["1", "8", "1"],
        "data.seed": ["3", "null", "null"],
        "reward_model.reward_kwargs.a": ["(not", "set)", "1", "null"],
    }
    assert "default_local_dir" not in told and "and 1 that name folders" in told
    main(["diff", "--all", str(one), str(two)])
    assert "trainer.default_local_dir" in capsys.readouterr().out


def test_equal_runs_and_the_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = write_run(tmp_path / "one"), write_run(tmp_path / "two")
    main(["diff", "--exit-code", str(one), str(two)])
    assert "no key differs" in capsys.readouterr().out
    write_run(two, "data.seed=4")
    with pytest.raises(SystemExit) as ended:
        main(["diff", str(one), str(two), "--exit-code"])
    assert ended.value.code == 1


def test_a_saved_file_of_an_older_version_has_the_defaults_of_what_it_lacks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "config.yaml").write_text("data:\n  seed: 5\ngone:\n  key: 1\n")
    main(["diff", str(tmp_path / "old"), str(write_run(tmp_path / "new"))])
    assert [line[0] for line in lines(capsys.readouterr().out)] == ["data.seed", "gone.key"]


def test_a_users_own_yaml_is_composed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.yaml").write_text("data:\n  train_batch_size: 64\n")
    main(["diff", str(write_run(tmp_path / "run", "data.train_batch_size=32")), str(tmp_path / "mine.yaml")])
    assert ["data.train_batch_size", "32", "64", "1024"] in lines(capsys.readouterr().out)


def test_what_is_no_run_is_told_with_what_may_be_meant(tmp_path: Path) -> None:
    run = write_run(tmp_path / "runs" / "one")
    with pytest.raises(SystemExit, match=r"holds no config\.yaml.*did you mean .*one\?"):
        main(["diff", str(run), str(tmp_path / "runs")])
    with pytest.raises(SystemExit, match="nowhere does not exist"):
        main(["diff", str(tmp_path / "nowhere"), str(run)])
