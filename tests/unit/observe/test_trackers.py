from __future__ import annotations

import html
import json
import logging
import re
import sqlite3
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from verl_like.config import TrainerConfig
from verl_like.observe.run_folder import read_metrics
from verl_like.observe.samples import Sample
from verl_like.observe.trackers import (
    ConsoleTracker,
    JsonlTracker,
    Trackers,
    build_trackers,
)


@pytest.fixture(autouse=True)
def _package_log_reaches_caplog(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("verl_like"), "propagate", True)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def test_jsonl_is_always_written_also_without_any_logger(tmp_path: Path) -> None:
    trackers = build_trackers(TrainerConfig(logger=[]), {}, tmp_path, resumed_at=None)
    assert trackers.names == ["jsonl"]
    trackers.log(1, {"actor/pg_loss": 0.25, "n": np.int64(3), "t": torch.tensor(0.5)})
    # Read before finish: each line is on disk at once.
    (record,) = lines(tmp_path / "metrics.jsonl")
    assert record.pop("time") > 0
    assert record == {"step": 1, "actor/pg_loss": 0.25, "n": 3.0, "t": 0.5}  # flat, as pandas wants it


def test_values_that_are_not_finite_become_null_and_are_warned_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trackers = build_trackers(TrainerConfig(logger=[]), {}, tmp_path, resumed_at=None)
    for step in (1, 2):
        trackers.log(step, {"actor/grad_norm": float("inf"), "critic/kl": float("nan"), "fine": 1.0})
    raw = (tmp_path / "metrics.jsonl").read_text()
    assert "NaN" not in raw and "Infinity" not in raw
    assert read_metrics(tmp_path / "metrics.jsonl")[2] == {"actor/grad_norm": None, "critic/kl": None, "fine": 1.0}
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "actor/grad_norm=inf" in warnings[0] and "critic/kl=nan" in warnings[0]
    trackers.log(3, {"another": float("-inf")})
    assert "another=-inf" in caplog.records[-1].getMessage()


def test_resume_continues_the_file_and_mends_a_line_that_was_cut_off(tmp_path: Path) -> None:
    first = JsonlTracker(tmp_path)
    for step in (1, 2, 3):
        first.log(step, {"x": float(step)})
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text() + '{"step": 4, "da')  # killed while writing
    resumed = JsonlTracker(tmp_path)  # from the checkpoint of step 2
    resumed.log(3, {"x": 30.0})
    resumed.log(4, {"x": 40.0})
    assert [record["step"] for record in lines(path)] == [1, 2, 3, 3, 4]
    assert read_metrics(path) == {1: {"x": 1.0}, 2: {"x": 2.0}, 3: {"x": 30.0}, 4: {"x": 40.0}}


def test_steps_that_a_resumed_run_does_again_are_in_the_file_once(tmp_path: Path) -> None:
    """The file as the killed run left it is kept under a number. Responses may hold Unicode's line ends."""
    first = JsonlTracker(tmp_path)
    for step in (1, 2, 3):
        first.log(step, {"x": float(step)})
        text = "\u2028\u2029\x85\x0b\r\n"
        first.log_samples(step, [{"input": str(step), "output": text, "gts": "", "score": 0.0, "step": step}])
    for _ in range(2):  # the second time there is nothing to cut
        resumed = JsonlTracker(tmp_path, last_step=2)
    resumed.log(3, {"x": 30.0})
    assert [record["step"] for record in lines(tmp_path / "metrics.jsonl")] == [1, 2, 3]
    assert [record["step"] for record in lines(tmp_path / "val_generations.jsonl")] == [1, 2]
    assert read_metrics(tmp_path / "metrics.jsonl.1")[3] == {"x": 3.0}
    assert not (tmp_path / "metrics.jsonl.2").exists()


def test_a_new_run_sets_the_files_of_an_old_one_aside(tmp_path: Path) -> None:
    for value in (1.0, 2.0, 3.0):
        build_trackers(TrainerConfig(logger=[]), {}, tmp_path, resumed_at=None).log(1, {"x": value})
    names = ["metrics.jsonl", "metrics.jsonl.1", "metrics.jsonl.2"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert [read_metrics(tmp_path / name)[1]["x"] for name in names] == [3.0, 1.0, 2.0]
    build_trackers(TrainerConfig(logger=[]), {}, tmp_path, resumed_at=1).log(2, {"x": 4.0})
    assert read_metrics(tmp_path / "metrics.jsonl") == {1: {"x": 3.0}, 2: {"x": 4.0}}


def test_read_metrics_joins_a_step_and_its_validation(tmp_path: Path) -> None:
    tracker = JsonlTracker(tmp_path)
    tracker.log(1, {"x": 1.0, "y": 2.0})
    tracker.log(1, {"val-core/toy/reward/mean@1": 0.5, "y": 3.0})
    assert read_metrics(tmp_path / "metrics.jsonl") == {1: {"x": 1.0, "y": 3.0, "val-core/toy/reward/mean@1": 0.5}}


def test_read_metrics_ignores_the_line_being_written(tmp_path: Path) -> None:
    tracker = JsonlTracker(tmp_path)
    tracker.log(1, {"x": 1.0})
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text() + '{"step": 2')
    assert read_metrics(path) == {1: {"x": 1.0}}


def test_a_metric_that_is_no_number_is_named(tmp_path: Path) -> None:
    trackers = build_trackers(TrainerConfig(logger=[]), {}, tmp_path, resumed_at=None)
    with pytest.raises(TypeError, match="actor/lr must be one number, got str"):
        trackers.log(1, {"actor/lr": "1e-6"})
    with pytest.raises(TypeError, match="got Tensor"):
        trackers.log(1, {"actor/lr": torch.ones(3)})


@pytest.mark.parametrize("name", ["clearml", "vemlp_wandb", "rl_insight"])
def test_other_trackers_of_verl_are_refused_by_name(name: str, tmp_path: Path) -> None:
    trainer = TrainerConfig()
    trainer.logger = ["console", name]  # past the dataclass's own check
    with pytest.raises(ValueError, match=rf"trainer\.logger=.*{name} not available yet.*console, jsonl"):
        build_trackers(trainer, {}, tmp_path, resumed_at=None)


@pytest.mark.parametrize(
    ("logger", "module"),
    [("tensorboard", "torch.utils.tensorboard"), *((name, name) for name in ("wandb", "mlflow", "swanlab", "trackio"))],
)
def test_missing_package_names_the_extra(
    logger: str, module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)  # what an uninstalled package looks like to import
    with pytest.raises(ValueError, match=rf"trainer\.logger contains {logger}.*pip install 'verl_like\[{logger}\]'"):
        build_trackers(TrainerConfig(logger=[logger]), {}, tmp_path, resumed_at=None)


def test_tensorboard_event_file_is_read_back(tmp_path: Path) -> None:
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    trackers = build_trackers(TrainerConfig(logger=["tensorboard"]), {}, tmp_path, resumed_at=None)
    trackers.log(1, {"critic/score/mean": 0.25})
    trackers.log(2, {"critic/score/mean": 0.5, "actor/grad_norm": float("nan")})
    answer = "2*3*4 = `24`\n<think>a\\|b</think> [x](y)"
    cut = {"pred": ["\ud83d"], "deep": ("\ude00",)}  # as a grader may read it out of a response
    trackers.log_samples(2, [{"input": "_1_|1", "output": answer + "\ud83d", "gts": "\u2028\r2", "score": 1.0, **cut}])
    trackers.finish()
    events = reader.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("critic/score/mean")] == [(1, 0.25), (2, 0.5)]
    text = events.Tensors("val/generations/text_summary")[0].tensor_proto.string_val[0].decode()
    page = pytest.importorskip("tensorboard.plugin_util").markdown_to_safe_html(text)  # what its page shows
    cells = [html.unescape(cell.replace("<br>", "\n")) for cell in re.findall(r"<td>(.*?)</td>", page, re.S)]
    assert cells == ["_1_|1", answer + "\ufffd", "\u2028\n2", "1.0"]


class FakeRun:
    def __init__(self, **kwargs: Any) -> None:
        self.kwargs, self.logged, self.finished = kwargs, [], False
        self.id = kwargs["id"] or "abc123"

    def define_metric(self, *args: Any, **kwargs: Any) -> None:
        self.logged.append(("define", args, kwargs))

    def log(self, data: dict[str, Any]) -> None:
        self.logged.append(data)

    def finish(self) -> None:
        self.finished = True


@pytest.fixture
def fake_wandb(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    module = SimpleNamespace(runs=[], Table=lambda columns, data: ("table", columns, data))

    def init(**kwargs: Any) -> FakeRun:
        module.runs.append(FakeRun(**kwargs))
        return module.runs[-1]

    module.init = init
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def test_wandb_gets_names_config_steps_and_continues_after_a_resume(
    fake_wandb: SimpleNamespace, tmp_path: Path
) -> None:
    trainer = TrainerConfig(logger=["wandb"], project_name="mine", experiment_name="first")
    trackers = build_trackers(trainer, {"data": {"train_batch_size": 8}}, tmp_path, resumed_at=None)
    trackers.log(5, {"actor/lr": 0.5})
    trackers.log_samples(5, [{"input": "q", "output": "a", "gts": "t", "score": 1.0}])
    trackers.finish()
    run = fake_wandb.runs[0]
    assert (run.kwargs["project"], run.kwargs["name"]) == ("mine", "first")
    assert run.kwargs["config"] == {"data": {"train_batch_size": 8}}
    assert run.logged[1] == ("define", ("*",), {"step_metric": "training/global_step"})
    assert run.logged[2] == {"actor/lr": 0.5, "training/global_step": 5}
    assert run.logged[3]["val/generations"] == (
        "table", ["step", "input", "output", "gts", "score"], [[5, "q", "a", "t", "1.0"]],
    )  # fmt: skip
    assert run.finished and run.kwargs["id"] is None
    build_trackers(trainer, {}, tmp_path, resumed_at=5)
    assert fake_wandb.runs[1].kwargs["id"] == "abc123"
    build_trackers(trainer, {}, tmp_path, resumed_at=None)
    assert fake_wandb.runs[2].kwargs["id"] is None  # a new run in an old folder


def test_wandb_that_cannot_start_says_what_to_do(
    fake_wandb: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def init(**kwargs: Any) -> None:
        raise RuntimeError("no API key")

    monkeypatch.setattr(fake_wandb, "init", init)
    trainer = TrainerConfig(logger=["wandb"], logger_kwargs={"wandb": {"entity": "me"}})
    with pytest.raises(ValueError, match=r"logger_kwargs.wandb=\['entity'\]: no API key.*WANDB_MODE=offline"):
        build_trackers(trainer, {}, tmp_path, resumed_at=None)


def test_arguments_of_a_tracker_that_is_not_used_are_refused(tmp_path: Path) -> None:
    trainer = TrainerConfig(logger=["console"], logger_kwargs={"wandb": {"entity": "me"}})
    with pytest.raises(ValueError, match=r"trainer.logger_kwargs has arguments of \['wandb'\], but trainer.logger="):
        build_trackers(trainer, {}, tmp_path, resumed_at=None)


OWN = """
class Own:
    def __init__(self, config, folder, resumed_at, color):
        self.color = color
        (folder / "color.txt").write_text(color)

    def log(self, step, metrics):
        pass
"""


def test_a_class_of_the_users_takes_arguments_too(tmp_path: Path) -> None:
    (tmp_path / "own_tracker.py").write_text(OWN)
    name = f"{tmp_path}/own_tracker.py:Own"
    build_trackers(TrainerConfig(logger=[name], logger_kwargs={name: {"color": "red"}}), {}, tmp_path, resumed_at=None)
    assert (tmp_path / "color.txt").read_text() == "red"
    with pytest.raises(ValueError, match=r"missing a required argument: 'color'"):
        build_trackers(TrainerConfig(logger=[name]), {}, tmp_path, resumed_at=None)


BOUND = """
import sqlite3

class Bound:
    def __init__(self, config, folder, resumed_at):
        self.path = folder / "own.db"
        self.connection = sqlite3.connect(self.path)
        self.connection.execute("create table metrics (step, name, value)")

    def log(self, step, metrics):
        self.connection.executemany("insert into metrics values (?, ?, ?)", [(step, *each) for each in metrics.items()])
        self.connection.commit()

    def finish(self):
        self.connection.close()
"""


def test_a_tracker_may_be_tied_to_its_thread(tmp_path: Path) -> None:
    (tmp_path / "bound.py").write_text(BOUND)
    config = TrainerConfig(logger=[f"{tmp_path}/bound.py:Bound"])
    trackers = build_trackers(config, {}, tmp_path, resumed_at=None)
    for step in (1, 2):
        trackers.log(step, {"x": float(step)})
    assert len(trackers.names) == 2
    trackers.finish()
    with sqlite3.connect(tmp_path / "own.db") as database:
        assert database.execute("select * from metrics").fetchall() == [(1, "x", 1.0), (2, "x", 2.0)]
    assert not [thread for thread in threading.enumerate() if "bound.py" in thread.name and _stays(thread)]


def test_a_tracker_that_ends_the_process_is_told_at_once(tmp_path: Path) -> None:
    (tmp_path / "ends.py").write_text(BOUND.replace("self.path =", "raise SystemExit('no login'); self.path ="))
    with pytest.raises(RuntimeError, match=r"SystemExit.*no login"):
        build_trackers(TrainerConfig(logger=[f"{tmp_path}/ends.py:Bound"]), {}, tmp_path, resumed_at=None)


def _stays(thread: threading.Thread) -> bool:
    thread.join(5)
    return thread.is_alive()


SECRETS = {
    "reward_model": {"judge": {"api_key": "k-1"}},
    "data": {"train_files": ["https://me:pass@host/a"], "token": ""},
}


def test_services_get_names_arguments_and_the_configuration_without_secrets(
    fake_wandb: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The seam to each package's `init`; test_services.py has the packages themselves, where they are installed."""
    monkeypatch.delenv("SWANLAB_LOG_DIR", raising=False)
    for name in ("swanlab", "trackio"):
        monkeypatch.setitem(sys.modules, name, fake_wandb)
    names = ["wandb", "swanlab", "trackio"]
    own = {name: {"id": None, "name": "other", "tags": ["a"]} for name in names}
    for resumed_at in (None, 3):
        own = own if resumed_at is None else {}
        trainer = TrainerConfig(logger=names, logger_kwargs=own, project_name="mine", experiment_name="first")
        fake_wandb.runs.clear()
        if resumed_at is not None:  # trackio has no ids: its runs go on by name
            monkeypatch.setattr(fake_wandb, "init", lambda **given: fake_wandb.runs.append(given) or FakeRun(id="abc"))
        build_trackers(trainer, SECRETS, tmp_path, resumed_at=resumed_at)
        given = [run if isinstance(run, dict) else run.kwargs for run in fake_wandb.runs]
        hidden = {"judge": {"api_key": "(hidden)"}}, {"train_files": ["https://(hidden)@host/a"], "token": ""}
        assert [call["config"] for call in given] == [dict(zip(("reward_model", "data"), hidden, strict=True))] * 3
        assert {call["project"] for call in given} == {"mine"}
        if resumed_at is None:
            assert {call["name"] for call in given} == {"other"} and given[0]["tags"] == ["a"]
        else:
            assert [call.get("id") for call in given] == ["abc123", "abc123", None]
            assert [call["resume"] for call in given] == ["allow"] * 3


class Flaky:
    name = "flaky"

    def __init__(self, failing: Sequence[int]) -> None:
        self.failing, self.calls = failing, []

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.calls.append(step)
        if step in self.failing:
            raise ConnectionError("service is down")

    def log_samples(self, step: int, samples: Sequence[Sample]) -> None: ...

    def finish(self) -> None: ...


def test_a_service_that_fails_does_not_stop_the_run_but_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    flaky = Flaky(failing=[1, 2, 4, 5, 6])
    trackers = Trackers([JsonlTracker(tmp_path), flaky])
    for step in range(1, 9):
        trackers.log(step, {"x": 1.0})
    assert flaky.calls == [1, 2, 3, 4, 5, 6]  # a success in between counts; three in a row end it
    assert trackers.names == ["jsonl"]
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 8
    errors = [r for r in caplog.records if r.levelno == logging.ERROR]
    assert len(errors) == 5 and errors[0].exc_info is not None and "is off now" in errors[-1].getMessage()


def test_a_record_that_cannot_be_written_stops_the_run(tmp_path: Path) -> None:
    trackers = Trackers([JsonlTracker(tmp_path)])
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(IsADirectoryError):
        trackers.log(1, {"x": 1.0})


def test_console_gives_one_line_at_info_and_all_metrics_at_debug(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="verl_like"):
        ConsoleTracker().log(1, {"actor/lr": 1e-6, "critic/score/mean": 0.5})
    assert [r.getMessage().split() for r in caplog.records] == [["step", "score"], ["1", "0.500"]]
    caplog.clear()
    with caplog.at_level(logging.DEBUG, logger="verl_like"):
        ConsoleTracker().log(1, {"actor/lr": 1e-6, "critic/score/mean": 0.5})
    assert "  actor/lr = 1e-06\n  critic/score/mean = 0.5" in caplog.records[-1].getMessage()


def test_console_samples_cannot_smuggle_control_characters(caplog: pytest.LogCaptureFixture) -> None:
    told = {"gts": "t", "score": 0.5, "response_tokens": 2000, "outcome": "finished", "data_source": "toy"}
    sample = {"input": "q\n", "output": "\x1b[2J" + "a" * 2000, **told}
    with caplog.at_level(logging.INFO, logger="verl_like"):
        ConsoleTracker().log_samples(2, [sample])
    message = caplog.records[0].getMessage()
    assert "\x1b" not in message and "prompt: q\\n" in message and "a ... a" in message
    assert len(message) < 1200


def test_a_service_that_does_not_come_back_holds_up_one_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("verl_like.observe.trackers._PATIENCE_S", 0.05)
    hanging, freed = Flaky(failing=[]), threading.Event()
    hanging.log = lambda step, metrics: hanging.calls.append(step) or freed.wait(60)
    trackers = Trackers([JsonlTracker(tmp_path), hanging])
    for step in (1, 2):
        trackers.log(step, {"x": 1.0})
    freed.set()
    assert hanging.calls == [1] and trackers.names == ["jsonl"] and "is off now" in caplog.text
    assert "no answer within 0.05 s" in caplog.text and len(read_metrics(tmp_path / "metrics.jsonl")) == 2
