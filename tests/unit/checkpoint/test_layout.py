"""Which checkpoint a run finds: always a whole one, whatever was killed, lost or spoilt."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from verl_like.checkpoint import layout
from verl_like.checkpoint.checksums import collect, find_faults
from verl_like.checkpoint.files import require_writable


def write(root: Path, step: int, content: str, *roles: str) -> Path:
    """Everything up to the moment in which a checkpoint is declared."""
    path = layout.prepare_step_dir(root, step)
    for role in roles or ("actor",):
        (path / role / "model").mkdir(parents=True)
        (path / role / "model" / "shard").write_text(content)
    layout.write_trainer_state(path, {"step": step})
    collect(path)
    return path


def make(root: Path, step: int, *roles: str, content: str = "weights") -> Path:
    return layout.commit(write(root, step, content, *roles))


def faults_of(path: Path) -> list[str]:
    return find_faults(path, ["actor/model"])


def test_latest_is_the_declared_one(tmp_path: Path) -> None:
    assert layout.find_latest(tmp_path) is None and layout.find_latest(tmp_path / "absent") is None
    make(tmp_path, 5)
    path = make(tmp_path, 10)
    (layout.prepare_step_dir(tmp_path, 15) / "actor").mkdir(parents=True)  # a crash while saving
    assert layout.find_latest(tmp_path) == path == tmp_path / "global_step_10"
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "10"
    assert layout.step_of(path) == 10
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]


@pytest.mark.parametrize("marker", [None, "", "ten", "\x00\x00", "12"])
def test_a_marker_that_says_nothing_loses_no_checkpoint(
    tmp_path: Path, marker: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    """Also one that names a step whose folder is gone."""
    for step in (5, 10):
        make(tmp_path, step)
    (tmp_path / layout.LATEST_FILE).unlink()
    if marker is not None:
        (tmp_path / layout.LATEST_FILE).write_text(marker)
    (tmp_path / "global_step_11" / "actor").mkdir(parents=True)  # left half written by an older version
    with caplog.at_level(logging.WARNING):
        assert layout.find_latest(tmp_path) == tmp_path / "global_step_10"
    assert "Resuming from" in caplog.text and "global_step_10, the newest whole checkpoint" in caplog.text
    assert layout.LATEST_FILE in caplog.text or "global_step_12 does not exist" in caplog.text


def test_a_marker_set_back_by_hand_counts(tmp_path: Path) -> None:
    for step in (5, 10):
        make(tmp_path, step)
    (tmp_path / layout.LATEST_FILE).write_text("5\n")
    assert layout.find_latest(tmp_path) == tmp_path / "global_step_5"


def test_checkpoints_of_which_none_is_whole_are_no_fresh_start(tmp_path: Path) -> None:
    (tmp_path / layout.LATEST_FILE).write_text("7")
    with pytest.raises(ValueError, match=r"trainer.default_local_dir=.*global_step_7 does not exist.*resume_mode"):
        layout.find_latest(tmp_path)
    path = make(tmp_path, 7)
    (path / "actor" / "model" / "shard").write_text("weightz")
    (tmp_path / layout.LATEST_FILE).unlink()
    with pytest.raises(ValueError, match=r"is missing; .*shard is damaged"):
        layout.find_latest(tmp_path, faults_of)


def test_a_first_save_that_was_cut_off_is_a_fresh_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "global_step_3" / "actor").mkdir(parents=True)
    assert layout.find_latest(tmp_path) is None
    assert "the run starts at step 0" in caplog.text


@pytest.mark.parametrize("damage", ["flip", "cut", "gone", "list"])
def test_a_damaged_checkpoint_falls_back_and_names_the_file(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    good, bad = make(tmp_path, 5), make(tmp_path, 10)
    shard = bad / "actor" / "model" / "shard"
    if damage == "flip":
        data = bytearray(shard.read_bytes())
        data[3] ^= 1
        shard.write_bytes(data)
    elif damage == "cut":
        os.truncate(shard, 3)
    elif damage == "gone":
        shard.unlink()
    else:
        shard = bad / "checksums.json"
        os.truncate(shard, 20)
    with caplog.at_level(logging.WARNING):
        assert layout.find_latest(tmp_path, faults_of) == good
    assert str(shard) in caplog.text
    with pytest.raises(ValueError, match=rf"resume_from_path=.*not a whole checkpoint: .*{shard.name}"):
        layout.check_checkpoint(bad, faults_of)
    assert layout.check_checkpoint(good, faults_of) == good


@pytest.mark.parametrize("wrong", ["", "global_step_99"])
def test_a_path_that_is_no_checkpoint_is_refused(tmp_path: Path, wrong: str) -> None:
    with pytest.raises(ValueError, match="global_step"):
        layout.check_checkpoint(tmp_path / wrong)


def test_rotation(tmp_path: Path) -> None:
    for step in (5, 10, 15, 20):
        latest = make(tmp_path, step, "actor", "critic")
    layout.rotate(latest, keep_actor=2, keep_critic=3)
    present = {
        p.name: sorted(c.name for c in p.iterdir() if c.is_dir()) for p in sorted(tmp_path.glob("global_step_*"))
    }
    assert present == {
        "global_step_10": ["critic"],
        "global_step_15": ["actor", "critic"],
        "global_step_20": ["actor", "critic"],
    }
    assert layout.rotate(latest, keep_actor=None, keep_critic=None) == []


def test_rotation_spares_newest_and_does_not_count_unfinished(tmp_path: Path) -> None:
    for step in (1, 5, 10):
        latest = make(tmp_path, step)
    for step in (7, 15):  # cut off by a crash
        (layout.step_dir(tmp_path, step) / "actor").mkdir(parents=True)
    layout.rotate(latest, keep_actor=2, keep_critic=1)
    assert [step for step in (1, 5, 7, 10, 15) if layout.step_dir(tmp_path, step).exists()] == [5, 7, 10, 15]
    layout.rotate(latest, keep_actor=1, keep_critic=1)
    assert latest.is_dir() and not layout.step_dir(tmp_path, 5).exists()


def test_state_must_be_plain_json(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON compliant"):
        layout.write_trainer_state(tmp_path, {"kl_coef": float("nan")})
    layout.write_trainer_state(tmp_path, {"kl_coef": 0.1, "sampler": {"epoch": 1}})
    assert layout.read_trainer_state(tmp_path)["sampler"] == {"epoch": 1}


class Killed(BaseException):
    """What ends a process, as seen from inside."""


@contextmanager
def killed_before(operation: int) -> Iterator[list[str]]:
    """Every change of the file system from the given one on fails, as if the process had ended before it."""
    done: list[str] = []
    names = ("mkdir", "rename", "replace", "unlink", "rmdir", "fsync")
    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            real = getattr(os, name)

            def one(*args: Any, _real: Any = real, _name: str = name, **kwargs: Any) -> Any:
                if len(done) >= operation:
                    raise Killed
                done.append(_name)
                return _real(*args, **kwargs)

            patch.setattr(os, name, one)
        yield done


def save(root: Path, step: int, content: str) -> None:
    layout.rotate(layout.commit(write(root, step, content)), keep_actor=1, keep_critic=1)


@pytest.mark.parametrize("again", [False, True], ids=["next step", "same step"])
@pytest.mark.parametrize("marker", [True, False])
def test_a_kill_between_any_two_operations_leaves_a_whole_checkpoint(tmp_path: Path, again: bool, marker: bool) -> None:
    """The old one or the new one, never a mixture; and nothing is left over after the next start."""
    step, num_kills = (10 if again else 15), 0
    for operation in range(1000):
        root = tmp_path / str(operation)
        save(root, 10, "old")
        if not marker:
            (root / layout.LATEST_FILE).unlink()
        with killed_before(operation) as done:
            try:
                save(root, step, "new")
                break
            except Killed:
                num_kills += 1
        layout.recover(root)
        found = layout.find_latest(root, faults_of)
        assert found is not None and faults_of(found) == [], (operation, done)
        content = (found / "actor" / "model" / "shard").read_text()
        assert (content, layout.step_of(found)) in (("old", 10), ("new", step))
        assert {p.suffix for p in root.rglob("*")} <= {"", ".txt", ".json"}, (operation, done)
        shutil.rmtree(root)
    assert num_kills > 10


def test_a_kill_while_recovering_is_recovered_from(tmp_path: Path) -> None:
    for operation in range(1000):
        root = tmp_path / str(operation)
        save(root, 10, "old")
        with killed_before(10**9) as done:  # as commit leaves it between its two renames
            written = write(root, 10, "new")
            (root / "global_step_10").rename(root / "global_step_10.replaced")
            (root / "global_step_9.saving").mkdir()
        assert written.is_dir() and done
        with killed_before(operation):
            try:
                layout.recover(root)
                break
            except Killed:
                pass
        layout.recover(root)
        found = layout.find_latest(root, faults_of)
        assert found is not None and (found / "actor" / "model" / "shard").read_text() == "new"
    assert operation > 3


@pytest.mark.parametrize("below", ["", "deeper/still"])
def test_an_output_folder_that_cannot_be_written_names_its_key(tmp_path: Path, below: str) -> None:
    require_writable("trainer.log_dir", tmp_path / "new" / below)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"^trainer.log_dir='.*file.*file is a file, not a folder"):
        require_writable("trainer.log_dir", tmp_path / "file" / below)
    with pytest.raises(ValueError, match=r"^trainer.log_dir='/proc/.*nothing can be written there"):
        require_writable("trainer.log_dir", Path("/proc") / "no" / below)
