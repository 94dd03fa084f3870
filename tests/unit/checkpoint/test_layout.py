from __future__ import annotations

import json
from pathlib import Path

import pytest

from verl_like.checkpoint import layout
from verl_like.config import TrainerConfig


def make(root: Path, step: int, *roles: str) -> Path:
    path = layout.step_dir(root, step)
    for role in roles:
        (path / role / "model").mkdir(parents=True)
    layout.write_trainer_state(path, {"step": step})
    layout.write_latest(root, step)
    return path


def test_latest_is_the_declared_one(tmp_path: Path) -> None:
    assert layout.find_latest(tmp_path) is None
    make(tmp_path, 5, "actor")
    make(tmp_path, 10, "actor")
    (layout.step_dir(tmp_path, 15) / "actor").mkdir(parents=True)  # a crash while saving
    assert layout.find_latest(tmp_path) == tmp_path / "global_step_10"
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "10"
    assert layout.step_of(tmp_path / "global_step_10") == 10
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]


def test_latest_without_its_folder_is_an_error(tmp_path: Path) -> None:
    layout.write_latest(tmp_path, 7)
    with pytest.raises(ValueError, match="global_step_7"):
        layout.find_latest(tmp_path)


def test_resume_modes(tmp_path: Path) -> None:
    def trainer(**changes: str) -> TrainerConfig:
        return TrainerConfig(**({"default_local_dir": str(tmp_path)} | changes))  # type: ignore[arg-type]

    assert layout.resolve_resume(trainer(resume_mode="auto")) is None
    early, late = make(tmp_path, 5, "actor"), make(tmp_path, 10, "actor")
    assert layout.resolve_resume(trainer(resume_mode="auto")) == late
    assert layout.resolve_resume(trainer(resume_mode="disable")) is None
    chosen = trainer(resume_mode="resume_path", resume_from_path=str(early))
    assert layout.resolve_resume(chosen) == early
    assert layout.read_trainer_state(early) == {"step": 5}
    for wrong in (str(tmp_path), str(tmp_path / "global_step_99")):
        with pytest.raises(ValueError, match=r"global_step|trainer_state"):
            layout.resolve_resume(trainer(resume_mode="resume_path", resume_from_path=wrong))


def test_rotation(tmp_path: Path) -> None:
    for step in (5, 10, 15, 20):
        make(tmp_path, step, "actor", "critic")
    layout.rotate(tmp_path, keep_actor=2, keep_critic=3)
    present = {
        p.name: sorted(c.name for c in p.iterdir() if c.is_dir()) for p in sorted(tmp_path.glob("global_step_*"))
    }
    assert present == {
        "global_step_10": ["critic"],
        "global_step_15": ["actor", "critic"],
        "global_step_20": ["actor", "critic"],
    }
    assert layout.rotate(tmp_path, keep_actor=None, keep_critic=None) == []


def test_rotation_spares_newest_and_unfinished(tmp_path: Path) -> None:
    make(tmp_path, 5, "actor")
    make(tmp_path, 10, "actor")
    unfinished = layout.step_dir(tmp_path, 15) / "actor"
    unfinished.mkdir(parents=True)
    layout.rotate(tmp_path, keep_actor=1, keep_critic=1)
    assert unfinished.is_dir() and (tmp_path / "global_step_10" / "actor").is_dir()
    assert not (tmp_path / "global_step_5").exists()


def test_state_must_be_plain_json(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON compliant"):
        layout.write_trainer_state(tmp_path, {"kl_coef": float("nan")})
    layout.write_trainer_state(tmp_path, {"kl_coef": 0.1, "sampler": {"epoch": 1}})
    assert json.loads((tmp_path / "trainer_state.json").read_text())["sampler"] == {"epoch": 1}


def test_a_step_that_is_saved_again_is_never_a_mixture(tmp_path: Path) -> None:
    """Until the new checkpoint is whole, neither the marker nor the state file may call it complete."""
    old = layout.prepare_step_dir(tmp_path, 20)
    (old / "actor").mkdir()
    (old / "actor" / "stale").write_text("of the run before")
    layout.write_trainer_state(old, {"step": 20})
    layout.write_latest(tmp_path, 20)
    again = layout.prepare_step_dir(tmp_path, 20)
    assert again == old and list(again.iterdir()) == []
    assert layout.find_latest(tmp_path) is None
    layout.write_latest(tmp_path, 10)
    (tmp_path / "global_step_10").mkdir()
    layout.prepare_step_dir(tmp_path, 20)
    assert layout.find_latest(tmp_path) == tmp_path / "global_step_10"  # another step's marker stays


def test_home_folders_are_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    layout.prepare_step_dir(tmp_path / "runs", 3)
    layout.write_trainer_state(tmp_path / "runs" / "global_step_3", {"step": 3})
    layout.write_latest(tmp_path / "runs", 3)
    found = tmp_path / "runs" / "global_step_3"
    assert layout.resolve_resume(TrainerConfig(default_local_dir="~/runs")) == found
    by_path = TrainerConfig(**{"resume_mode": "resume_path", "resume_from_path": "~/runs/global_step_3"})  # type: ignore[arg-type]
    assert layout.resolve_resume(by_path) == found


def test_an_incomplete_folder_does_not_count_as_one_to_keep(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        (layout.prepare_step_dir(tmp_path, step) / "actor").mkdir()
        if step != 2:
            layout.write_trainer_state(tmp_path / f"global_step_{step}", {"step": step})
    layout.write_latest(tmp_path, 3)
    layout.rotate(tmp_path, 2, None)
    assert (tmp_path / "global_step_1").is_dir()
