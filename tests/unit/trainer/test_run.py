"""How a whole run ends: one folder, one live run, and messages instead of tracebacks."""

from __future__ import annotations

import dataclasses
import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from verl_like.checkpoint.lock import LOCK_FILE, held
from verl_like.cli.main import main
from verl_like.cluster.lifecycle import StopFlag
from verl_like.config import PPOConfig
from verl_like.config.errors import RunStopped
from verl_like.config.preference import PreferenceConfig
from verl_like.kit.verbs import diff
from verl_like.trainer import command_line, main_ppo, start_messages
from verl_like.trainer import run as run_module
from verl_like.trainer.reporting import writing
from verl_like.trainer.run import run
from verl_like.trainer.start_messages import closing_text

live: list[Any] = []  # trainers of the fixture, the newest last


@pytest.fixture
def fits(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What a run does instead of building and training: the functions in the list, in order."""
    todo: list[Any] = []

    @contextmanager
    def build(ready: Any, launcher: Any, confirm: Any, kind: Any, *, again: bool, lowered: Any) -> Iterator[Any]:
        config = ready.config
        trainer = SimpleNamespace(config=config, state=SimpleNamespace(step=3), total_steps=3)
        trainer.plan, trainer.stop, trainer.first_step = SimpleNamespace(world_size=1), StopFlag(), 0
        live.append(trainer)

        def fit() -> None:
            trainer.on_start()
            for function in todo:
                function(config, launcher, confirm)

        trainer.fit = fit
        yield trainer

    monkeypatch.setattr(
        run_module, "prepared", lambda config: nullcontext(SimpleNamespace(config=config, device="cpu"))
    )
    monkeypatch.setattr(run_module, "started", build)
    monkeypatch.setattr("verl_like.trainer.facts.missing_places", lambda config, *keys: {})  # model and data
    monkeypatch.setattr(run_module, "setup_driver_logging", lambda folder, **_: None)  # it would stay for other tests
    return todo


def config_of(folder: Path, **trainer: Any) -> PPOConfig:
    config = PPOConfig()
    config.trainer.default_local_dir, config.trainer.device = str(folder), trainer.pop("device", config.trainer.device)
    for key, value in trainer.items():
        setattr(config.trainer, key, value)
    return config


@pytest.mark.parametrize("key", ["default_local_dir", "log_dir", "rollout_data_dir", "validation_data_dir"])
def test_a_file_in_place_of_an_output_folder_names_the_key(tmp_path: Path, fits: list[Any], key: str) -> None:
    (tmp_path / "file").write_text("")
    fits.append(lambda *_: pytest.fail("it must not begin"))
    with pytest.raises(
        SystemExit, match=rf"^error: (.*\n.*)?trainer.{key}='.*file/below': .*file is a file, not a folder"
    ):
        run(config_of(tmp_path / "out", **{key: str(tmp_path / "file" / "below")}))


def test_a_second_run_in_the_folder_ends_before_it_changes_anything(tmp_path: Path, fits: list[Any]) -> None:
    fits.append(lambda *_: pytest.fail("it must not begin"))
    (tmp_path / "config.yaml").write_text("of the live run")
    with held(tmp_path, "vl12345678"), pytest.raises(SystemExit, match=r"^error: .*live run \(.*run vl12345678"):
        run(config_of(tmp_path))
    assert (tmp_path / "config.yaml").read_text() == "of the live run"


@pytest.mark.parametrize("error", [None, RunStopped("step 3: nothing is learnt"), KeyError("a bug")])
def test_the_folder_is_free_after_the_run(tmp_path: Path, fits: list[Any], error: Exception | None) -> None:
    """The workers get the run id that stands in the lock."""

    def train(config: PPOConfig, groups: Any, confirm: Any) -> None:
        assert json.loads((tmp_path / LOCK_FILE).read_text())["run_id"] == groups.run_id
        confirm()
        if error is not None:
            raise error

    fits.append(train)
    if error is None:
        run(config_of(tmp_path))
    elif isinstance(error, RunStopped):
        with pytest.raises(SystemExit, match=r"^error: step 3: nothing is learnt"):
            run(config_of(tmp_path))
    else:
        with pytest.raises(KeyError):
            run(config_of(tmp_path))
    assert not (tmp_path / LOCK_FILE).exists()


@pytest.mark.parametrize(
    ("signal_name", "step", "val_only", "status"),
    [
        ("SIGINT", 1, False, 130),
        ("SIGTERM", 1, False, 143),
        ("SIGINT", 3, False, None),  # it came in the last step: all is done
        ("SIGTERM", 0, True, None),  # the validation that was asked for is done
        (None, 1, False, None),  # trainer.early_stop_patience
    ],
)
def test_the_status_of_a_run_that_a_signal_stopped(
    tmp_path: Path, fits: list[Any], signal_name: str | None, step: int, val_only: bool, status: int | None
) -> None:
    def train(*_: Any) -> None:
        live[-1].stop.signal_name, live[-1].state.step = signal_name, step

    fits.append(train)
    if status is None:
        run(config_of(tmp_path, val_only=val_only))
    else:
        with pytest.raises(SystemExit) as ended:
            run(config_of(tmp_path))
        assert ended.value.code == status


@pytest.mark.parametrize(
    ("error", "status", "told"),
    [
        (KeyboardInterrupt(), 130, "error: interrupted\n"),
        (KeyboardInterrupt("second SIGINT: aborted", signal.SIGINT), 130, "error: second SIGINT: aborted\n"),
        (KeyboardInterrupt("second SIGTERM: aborted", signal.SIGTERM), 143, "error: second SIGTERM: aborted\n"),
    ],
)
@pytest.mark.parametrize("verb", ["diff", "main_ppo"])
def test_an_interrupt_ends_every_verb_in_one_line(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    verb: str,
    error: BaseException,
    status: int,
    told: str,
) -> None:
    def interrupted(*_: Any) -> None:
        raise error

    monkeypatch.setattr(diff, "read_configuration", interrupted)
    monkeypatch.setattr(command_line, "run_main", interrupted)
    with pytest.raises(SystemExit) as ended:
        main_ppo.main() if verb == "main_ppo" else main(["diff", "a", "b"])
    assert ended.value.code == status and capsys.readouterr().err == told


@pytest.mark.parametrize(
    ("step", "first", "total", "told"),
    [(30, 0, 30, "30 steps in 12s"), (30, 10, 30, "30 steps, 20 of them in 12s"), (5, 0, 30, "5 of 30 steps in 12s"),
     (15, 10, 30, "15 of 30 steps, 5 of them in 12s"), (30, 30, 30, "30 steps, 0 of them in 12s")],
)  # fmt: skip
def test_the_end_tells_how_many_steps_these_seconds_made(
    tmp_path: Path, step: int, first: int, total: int, told: str
) -> None:
    text = closing_text(config_of(tmp_path), tmp_path, step=step, first_step=first, total_steps=total, seconds=12.0)
    assert text.splitlines()[1].split(maxsplit=1)[1] == told


def test_nobody_is_told_to_chat_with_a_reward_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start_messages, "find_latest", lambda root: root / "global_step_3")
    for loss, chats in (("dpo", True), ("reward", False)):
        config = dataclasses.replace(config_of(tmp_path), preference=PreferenceConfig(loss=loss))
        config = dataclasses.replace(config, trainer=dataclasses.replace(config.trainer, objective="preference"))
        text = closing_text(config, tmp_path, step=3, first_step=0, total_steps=3, seconds=1.0)
        assert ("  look " in text) == chats and "  export" in text


def metrics_in(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("{}\n")
    return folder


def test_a_run_that_does_not_resume_leaves_anothers_files_alone(tmp_path: Path, fits: list[Any]) -> None:
    """Its own folders move along, also those of samples elsewhere; the next run takes the next number, and a failed
    start does not count."""
    root, taken = metrics_in(tmp_path / "run"), []
    below = {"rollout_data_dir": str(root / "samples"), "validation_data_dir": str(tmp_path / "elsewhere")}
    fits.append(lambda config, *_: taken.append(config.trainer))
    run(config_of(root, **below))
    run(config_of(root, **below))  # nothing was trained in the first one's folder
    metrics_in(tmp_path / "run-2")
    (tmp_path / "run-2" / "global_step_5").mkdir()
    run(config_of(root, resume_mode="disable"))
    assert [Path(each.default_local_dir).name for each in taken] == ["run-2", "run-2", "run-3"]
    assert taken[0].rollout_data_dir == str(tmp_path / "run-2" / "samples")
    assert taken[0].validation_data_dir == str(tmp_path / "elsewhere-2")
    assert sorted(path.name for path in root.iterdir()) == ["metrics.jsonl"]
    assert (tmp_path / "run-2" / "config.yaml").exists()


def test_a_run_that_resumes_goes_where_the_checkpoint_is(tmp_path: Path, fits: list[Any]) -> None:
    """In the folder, or, for a job that is started again and again, in the one that an earlier start moved to."""
    root, taken = metrics_in(tmp_path / "run"), []
    fits.append(lambda config, *_: taken.append(Path(config.trainer.default_local_dir).name))
    metrics_in(tmp_path / "run-2")
    (metrics_in(tmp_path / "run-3") / "global_step_7").mkdir()
    run(config_of(root))
    (root / "global_step_2").mkdir()
    run(config_of(root))
    run(config_of(root, resume_mode="resume_path", resume_from_path=str(root / "global_step_2")))
    assert taken == ["run-3", "run", "run"]


def test_a_start_that_fails_leaves_the_saved_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def build(*_: Any) -> Iterator[Any]:
        raise RunStopped("the model is not there")
        yield

    monkeypatch.setattr(run_module, "prepared", build)
    monkeypatch.setattr("verl_like.trainer.facts.missing_places", lambda config, *keys: {})
    monkeypatch.setattr(run_module, "setup_driver_logging", lambda folder, **_: None)
    (metrics_in(tmp_path) / "global_step_2").mkdir()
    (tmp_path / "config.yaml").write_text("of the run")
    with pytest.raises(SystemExit, match="the model is not there"):
        run(config_of(tmp_path))
    assert (tmp_path / "config.yaml").read_text() == "of the run"


def test_a_run_folder_that_was_removed_is_said_with_its_key(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    with (
        pytest.raises(RunStopped, match=r"^trainer.log_dir='.*gone': .*removed while the run"),
        writing("trainer.log_dir", gone),
    ):
        (gone / "metrics.jsonl").open("a")
    with pytest.raises(RunStopped, match=r"No space left on device$"), writing("trainer.log_dir", tmp_path):
        raise OSError(28, "No space left on device")
