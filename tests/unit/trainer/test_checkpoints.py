"""When a checkpoint counts, what is refused, and what is saved when the driver fails; with groups that write text."""

from __future__ import annotations

import json
import logging
import threading
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from verl_like import remote_storage
from verl_like.algorithms.kl import KLController
from verl_like.checkpoint.layout import find_latest, read_trainer_state, step_of
from verl_like.cluster.worker_group import GroupStopped
from verl_like.config import PPOConfig
from verl_like.config.errors import ConfigError, RunStopped
from verl_like.remote_storage import RemoteFolder
from verl_like.trainer.checkpoints import Checkpoints, NotFinite
from verl_like.trainer.ppo import PPOTrainer
from verl_like.trainer.state import TrainState


class Group:
    """Actor or critic: one number that grows with each update."""

    def __init__(self) -> None:
        self.weight, self.num_skipped_in_a_row = 0, 0
        self.bad_tensors: list[str] = []
        self.stopped = self.writing = False

    def save(self, path: str) -> list[str]:
        if self.stopped:
            raise GroupStopped("the group is stopped", rank=0, method="save")
        if not self.bad_tensors:
            (Path(path) / "model").mkdir(parents=True)
            (Path(path) / "model" / "shard").write_text(str(self.weight))
        return self.bad_tensors

    def saved(self, *, wait: bool) -> bool:
        self.writing = self.writing and not wait
        return not self.writing

    def load(self, path: str) -> None:
        self.weight = int((Path(path) / "model" / "shard").read_text())


class Source:
    """Counts the batches drawn."""

    def __init__(self) -> None:
        self.drawn = 0

    def state_dict(self) -> dict[str, Any]:
        return {"drawn": self.drawn}

    def load_state_dict(self, state: dict[str, Any], folder: Path | None = None) -> None:
        self.drawn = state["drawn"]

    def trained(self) -> None:
        """Nothing is under way."""

    def save_under_way(self, folder: Path) -> None:
        """Nothing is."""


class Tokenizer:
    def save_pretrained(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "tokenizer.json").write_text("{}")


class Run:
    """The parts of a PPOTrainer that checkpoints touch, and a loop that goes through a step in the trainer's order."""

    def __init__(self, folder: Path, *, resume: Path | None = None, total_steps: int = 5, **trainer: Any) -> None:
        self.config = PPOConfig()
        self.config.trainer.default_local_dir = str(folder)
        for key, value in trainer.items():
            setattr(self.config.trainer, key, value)
        self.state = TrainState(step=0, weight_version=0, kl=KLController.from_config(self.config.algorithm.kl_ctrl))
        self.total_steps, self.source, self.actor, self.critic = total_steps, Source(), Group(), None
        self.reported: list[int] = []
        self.unreported: Callable[[], None] | None = None
        self.checkpoints = Checkpoints(self.config.trainer, Tokenizer(), resume=resume)  # pyright: ignore
        self.checkpoints.restore(self)  # pyright: ignore

    report_step: Any = PPOTrainer.report_step
    stop_when_nothing_is_learnt: Any = PPOTrainer.stop_when_nothing_is_learnt

    def step(self, *, save: bool = False, fails: str = "") -> None:
        """One step; `fails`: where the driver raises ("sampling", "update", "validation", "report")."""

        def point(name: str) -> None:
            if name == fails:
                raise ValueError(f"the judge is down while {name}")

        run: Any = self
        with self.checkpoints.saved_on_error(run):
            self.source.drawn += 1
            point("sampling")
            self.checkpoints.update_begins()
            self.actor.weight += 1
            point("update")
            self.state = self.state.advance({}, num_sequences=1, actor_updated=True)
            step = self.state.step
            self.checkpoints.step_ended(run)
            self.unreported = lambda: (point("report"), self.reported.append(step))[0]
            if save:
                self.checkpoints.write(run)
            point("validation")
            self.report_step()
            self.checkpoints.complete(run, wait=False)
            self.stop_when_nothing_is_learnt()


def saved_step(folder: Path) -> int | None:
    """The step of the newest checkpoint; its weights, sampler and counter are of one moment."""
    path = find_latest(folder)
    if path is None:
        return None
    saved = read_trainer_state(path)
    weight = int((path / "actor" / "model" / "shard").read_text())
    assert (weight, saved["source"]["drawn"], saved["state"]["step"]) == (step_of(path),) * 3
    return step_of(path)


def test_a_folder_that_cannot_be_written_ends_the_run_with_what_is_there(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.step(save=True)
    (tmp_path / "global_step_2.saving").write_text("no folder can be made here")
    with pytest.raises(RunStopped, match=r"step 2 cannot be saved in trainer.default_local_dir=.* exists: .*step_1\. "):
        run.step(save=True)
    assert saved_step(tmp_path) == 1


def test_a_checkpoint_holds_what_a_model_needs(tmp_path: Path) -> None:
    Run(tmp_path).step(save=True)
    path = tmp_path / "global_step_1"
    for name in ("config.yaml", "trainer_state.json", "checksums.json", "actor/huggingface/tokenizer.json"):
        assert (path / name).is_file(), name


def test_a_step_is_reported_before_its_checkpoint_counts(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.step(save=True)
    found_at_report: list[int | None] = []
    run.reported = type("Told", (list,), {"append": lambda self, step: found_at_report.append(saved_step(tmp_path))})()
    run.step(save=True)
    assert found_at_report == [1] and saved_step(tmp_path) == 2


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_tensors_that_are_not_finite_are_not_saved(tmp_path: Path, role: str) -> None:
    """The one before stays the newest although max_actor_ckpt_to_keep=1; a save on error does not try again. The step
    is reported: its metrics may tell why."""
    run = Run(tmp_path, max_actor_ckpt_to_keep=1, max_critic_ckpt_to_keep=1)
    run.critic = Group()
    run.step(save=True)
    bad = run.actor if role == "actor" else run.critic
    bad.bad_tensors = [f"layers.{i}.weight" for i in range(7)]
    with pytest.raises(NotFinite, match=rf"step 2: the {role} holds NaN .*layers.0.weight.*layers.4.weight and 2 more"):
        run.step(save=True)
    assert saved_step(tmp_path) == 1 and run.reported == [1, 2]
    assert sorted(p.name for p in tmp_path.glob("global*")) == ["global_step_1"]


@pytest.mark.parametrize(("fails", "saved", "reported"), [("sampling", 2, 2), ("validation", 3, 3), ("report", 3, 2)])
def test_an_error_of_the_driver_saves_the_last_finished_step(
    tmp_path: Path, fails: str, saved: int, reported: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Without what the failed step drew, and reported; the error itself goes on."""
    run = Run(tmp_path)
    for _ in range(2):
        run.step()
    with pytest.raises(ValueError, match=f"judge is down while {fails}"):
        run.step(fails=fails)
    assert saved_step(tmp_path) == saved and run.reported == list(range(1, reported + 1))
    assert "the run fails after step" in caplog.text
    again = Run(tmp_path, resume=find_latest(tmp_path))
    assert (again.state.step, again.source.drawn, again.actor.weight) == (saved,) * 3
    before = read_trainer_state(tmp_path / f"global_step_{saved}")["run"]
    again.step(save=True)
    assert read_trainer_state(tmp_path / f"global_step_{saved + 1}")["run"] == before


def test_weights_in_the_middle_of_an_update_are_not_saved(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = Run(tmp_path)
    run.step()
    with pytest.raises(ValueError, match="while update"):
        run.step(fails="update")
    assert saved_step(tmp_path) is None and "belong to no step" in caplog.text


def test_a_checkpoint_that_was_written_counts_although_the_workers_died_after_it(tmp_path: Path) -> None:
    run = Run(tmp_path)
    with pytest.raises(GroupStopped), run.checkpoints.saved_on_error(run):  # pyright: ignore
        run.checkpoints.update_begins()
        run.source.drawn = run.actor.weight = 1
        run.state = run.state.advance({}, num_sequences=1, actor_updated=True)
        run.checkpoints.step_ended(run)  # pyright: ignore
        run.checkpoints.write(run)  # pyright: ignore
        run.actor.stopped = True
        run.actor.save("")  # the sync, say
    assert saved_step(tmp_path) == 1


@pytest.mark.parametrize("failure", ["workers", "disk"])
def test_a_save_that_fails_too_does_not_hide_the_error(
    tmp_path: Path, failure: str, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(tmp_path)
    run.step()
    if failure == "workers":
        run.actor.stopped = True
    else:
        (tmp_path / "global_step_1.saving").write_text("in the way")
    with pytest.raises(ValueError, match="judge is down"):
        run.step(fails="sampling")
    assert "not all is saved" in caplog.text


def test_an_abort_saves_nothing(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.step()
    with pytest.raises(KeyboardInterrupt), run.checkpoints.saved_on_error(run):  # pyright: ignore
        raise KeyboardInterrupt
    assert saved_step(tmp_path) is None


def test_a_folder_that_another_run_took_over_is_left_alone(tmp_path: Path) -> None:
    run = Run(tmp_path)

    def confirm() -> None:
        raise RunStopped("another run took over")

    run.checkpoints.confirm = confirm
    with pytest.raises(RunStopped, match="took over"):
        run.step(save=True)
    assert not list(tmp_path.iterdir())


def test_background_writing_counts_when_it_is_done(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.config.actor_rollout_ref.actor.checkpoint.async_save = True
    run.actor.writing = True
    run.step(save=True)
    assert saved_step(tmp_path) is None and run.reported == [1]
    run.actor.writing = False
    run.step()
    assert find_latest(tmp_path) == tmp_path / "global_step_1"


@pytest.mark.parametrize("limit", [3, -1])
def test_updates_that_are_skipped_in_a_row_end_the_run(tmp_path: Path, limit: int) -> None:
    run = Run(tmp_path, max_skipped_updates=limit)
    run.actor.num_skipped_in_a_row = 2
    run.step()
    run.actor.num_skipped_in_a_row = 3
    if limit < 0:
        run.step()
        return
    expected = r"step 2: the last 3 updates of the actor were skipped .*trainer.max_skipped_updates=3.*-1 goes on"
    with pytest.raises(RunStopped, match=expected):
        run.step()
    assert saved_step(tmp_path) == 2 and run.reported == [1, 2]


def test_a_run_that_has_all_its_steps_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    Run(tmp_path).step(save=True)
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        Run(tmp_path, resume=find_latest(tmp_path), total_steps=2)
        assert not caplog.text
        Run(tmp_path, resume=find_latest(tmp_path), total_steps=1)
    assert "step 1 of 1: nothing is left to train" in caplog.text


def test_data_that_do_not_fit_are_refused_before_weights_are_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Run(tmp_path).step(save=True)

    def refuse(self: Source, state: dict[str, Any], folder: Path | None = None) -> None:
        raise ValueError("the training data changed")

    monkeypatch.setattr(Source, "load_state_dict", refuse)
    monkeypatch.delattr(Group, "load")
    with pytest.raises(ConfigError, match=r"global_step_1: the training data changed"):
        Run(tmp_path, resume=find_latest(tmp_path))


@pytest.mark.parametrize("recovers", [True, False])
def test_a_checkpoint_whose_upload_failed_is_not_rotated_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, recovers: bool
) -> None:
    """It is tried again with the next one, after that one's rotation; at the end of the run it is there, or told."""
    url, real, tries, rotated = f"memory://{uuid.uuid4().hex}", RemoteFolder.upload, [], threading.Event()

    def upload(self: RemoteFolder, folder: Path, *whose: Any, **more: Any) -> None:
        tries.append(folder.name)
        if len(tries) <= 3 or not recovers:
            raise ValueError("no network")
        rotated.wait(10)
        real(self, folder, *whose, **more)

    monkeypatch.setattr(RemoteFolder, "upload", upload)
    monkeypatch.setattr(remote_storage, "_PAUSE_S", 0.0)
    run = Run(tmp_path, max_actor_ckpt_to_keep=1, default_hdfs_dir=url)
    run.step(save=True)
    run.step(save=True)
    rotated.set()
    run.checkpoints.close()
    if recovers:
        there = RemoteFolder(url, "k")
        assert there.steps() == [1, 2] and "not uploaded" not in caplog.text
        assert (there.download("global_step_1", tmp_path / "back") / "actor" / "model" / "shard").read_text() == "1"
    else:
        assert f"not uploaded: {tmp_path}/global_step_1, {tmp_path}/global_step_2" in caplog.text


@pytest.mark.parametrize("there", [True, False])
def test_only_a_checkpoint_that_is_on_remote_storage_is_deleted_after_it_was_loaded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, there: bool
) -> None:
    url, here = f"memory://{uuid.uuid4().hex}", tmp_path / "here"
    run = Run(here, default_hdfs_dir=url)
    run.step(save=True)
    run.checkpoints.close()
    assert RemoteFolder(url, "k").steps() == [1]
    if not there:  # its upload was cut, or another run's is there
        storage = RemoteFolder(url, "k")
        storage._fs.rm_file(f"{storage._root}/global_step_1/{remote_storage.MARKER}")
    again = Run(here, resume=here / "global_step_1", default_hdfs_dir=url, del_local_ckpt_after_load=True)
    assert again.actor.weight == 1 and (here / "global_step_1").exists() != there
    assert ("is loaded, and deleted here" in caplog.text) == there
    assert (f"global_step_1 stays, as {url} has it not" in caplog.text) != there


def test_two_runs_in_one_remote_folder_do_not_write_over_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """They began at the same time; one that goes back behind a step on purpose makes that step again."""
    monkeypatch.setattr(remote_storage, "_PAUSE_S", 0.0)
    url = f"memory://{uuid.uuid4().hex}"
    runs = [Run(tmp_path / name, default_hdfs_dir=url) for name in "ab"]
    for run in runs:
        run.step(save=True)
        run.checkpoints.close()
    assert f"not uploaded: {tmp_path}/b/global_step_1" in caplog.text and "of another run (" in caplog.text
    marker = RemoteFolder(url, "k").read(f"global_step_1/{remote_storage.MARKER}")
    assert marker is not None and json.loads(marker)["run"] == runs[0].checkpoints._run
    caplog.clear()
    back = Run(tmp_path / "c", default_hdfs_dir=url, resume_mode="resume_path")
    back.step(save=True)
    back.checkpoints.close()
    assert "not uploaded" not in caplog.text


def test_the_best_goes_only_when_a_better_one_is_whole(tmp_path: Path) -> None:
    """Step 3 is better, but still being written when the save of step 2 completes."""
    run: Any = Run(tmp_path, max_actor_ckpt_to_keep=1, best_metric="val-core/a/acc/mean@1")
    run.step()
    run.checkpoints.validated(run, {"val-core/a/acc/mean@1": 0.1})
    run.config.actor_rollout_ref.actor.checkpoint.async_save = run.actor.writing = True
    run.step(save=True)
    run.actor.writing = True
    run.step()
    run.checkpoints.validated(run, {"val-core/a/acc/mean@1": 0.2})
    assert {path.name for path in tmp_path.glob("global_step_?")} == {"global_step_1", "global_step_2"}
    assert json.loads((tmp_path / "best_checkpoint.json").read_text())["step"] == 1
    run.checkpoints.complete(run, wait=True)
    assert {path.name for path in tmp_path.glob("global_step_?")} == {"global_step_3"}
    assert json.loads((tmp_path / "best_checkpoint.json").read_text())["step"] == 3
