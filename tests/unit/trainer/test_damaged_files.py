"""Small files of a run that are damaged, by a flipped bit or by hand: the newest whole step is found all the same."""

from __future__ import annotations

import json
import os
import pickle
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.unit.trainer.test_resume import checkpoint, config_of
from verl_like.checkpoint import layout
from verl_like.checkpoint.checksums import collect
from verl_like.checkpoint.files import linked_folders
from verl_like.checkpoint.lock import RunLock, RunLocked
from verl_like.config import TrainerConfig
from verl_like.config.errors import ConfigError
from verl_like.kit.stored_weights import SafetensorsFolder
from verl_like.observe.run_folder import read_metrics, read_run
from verl_like.trainer.best import BEST_FILE, Best
from verl_like.trainer.checkpoints import Checkpoints
from verl_like.trainer.recording import read_step, recorded_steps, step_file
from verl_like.trainer.resume import find_resume

MARKER = layout.LATEST_FILE
DEEP = "[" * 100_000
MALFORMED = ["", "{", "[]", "null", "7", '"text"', DEEP, '{"a": ' * 2000, "\x00" * 64, "{}", '{"state": 1}']


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Three checkpoints, of steps 3, 6 and 7, the newest of which is declared."""
    for step in (3, 6, 7):
        checkpoint(tmp_path, step)
    return tmp_path


@pytest.mark.parametrize("flips", [20, pytest.param(1000, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])])
def test_a_flipped_bit_loses_at_most_the_step_whose_file_it_is_in(run: Path, flips: int) -> None:
    """Flips over all files, drawn by a seed: never a traceback, and never a step with a damaged file."""
    draw = random.Random(11)
    files = sorted(path for path in run.rglob("*") if path.is_file())
    newest = run / "global_step_7"
    for _ in range(flips):
        path = draw.choice(files)
        data = path.read_bytes()
        bit = draw.randrange(8 * len(data))
        path.write_bytes(data[: bit // 8] + bytes([data[bit // 8] ^ 1 << bit % 8]) + data[bit // 8 + 1 :])
        found = find_resume(config_of(run))
        assert found is not None and (newest not in path.parents or found == run / "global_step_6" or in_a_name(path))
        if path.name == MARKER:  # 7 becomes 3 or 6, which are whole, by one flip: as if set back by hand
            named = path.read_bytes().decode(errors="replace")
            assert found == (run / f"global_step_{named}" if named in ("3", "6") else newest)
        elif newest not in path.parents:
            assert found == newest
        path.write_bytes(data)


def in_a_name(path: Path) -> bool:
    """A flip in the name of a file that the run does not read, or in its list, changes nothing that is loaded."""
    return path.name == "checksums.json"


@pytest.mark.parametrize("text", MALFORMED)
@pytest.mark.parametrize("name", ["trainer_state.json", "checksums.json"])
@pytest.mark.parametrize("listed", [True, False], ids=["in the list", "without a list"])
def test_a_malformed_file_of_the_newest_step(run: Path, name: str, text: str, listed: bool) -> None:
    newest = run / "global_step_7"
    if not listed:
        (newest / "checksums.json").unlink()
    (newest / name).write_text(text)
    harmless = name == "checksums.json" and text == "{}"  # it lists nothing
    assert find_resume(config_of(run)) == (newest if harmless else run / "global_step_6")


@pytest.mark.parametrize(
    ("marker", "found"),
    [("2", 7), ("8", 7), ("77777777777777777777777", 7), ("", 7), ("-3", 7), ("6", 6), ("٣", 7), (None, 7)],
)
def test_the_newest_whole_step_is_found_below_above_or_without_the_marker(
    run: Path, marker: str | None, found: int, caplog: pytest.LogCaptureFixture
) -> None:
    (run / MARKER).unlink()
    if marker is not None:
        (run / MARKER).write_text(marker)
    assert find_resume(config_of(run)) == run / f"global_step_{found}"
    assert marker != "6" or f"{run / MARKER} names step 6, though step 7 is whole" in caplog.text


def test_a_step_above_the_marker_counts_where_the_marked_one_is_damaged(run: Path) -> None:
    (run / MARKER).write_text("6")
    (run / "global_step_6" / "actor" / "model" / "shard").write_text("other")
    assert find_resume(config_of(run)) == run / "global_step_7"


def test_a_damaged_export_is_told_and_the_run_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = checkpoint(tmp_path)
    exported = path / "actor" / "huggingface"
    exported.mkdir()
    (exported / "model.safetensors").write_text("weights")
    collect(path)
    (exported / "model.safetensors").write_text("wEights")
    assert find_resume(config_of(tmp_path)) == path
    assert f"{exported / 'model.safetensors'} is damaged" in caplog.text and "verl-like export" in caplog.text


class Stranger:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("echo run > ran",)


@pytest.mark.parametrize("name", ["model/.metadata", "optimizer/.metadata", "extra/rank_0.pt"])
def test_a_strangers_pickle_is_a_fault_of_its_step(
    run: Path, name: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it stands in the list of checksums; it is not run."""
    monkeypatch.chdir(run)
    newest = run / "global_step_7"
    (newest / "actor" / name).write_bytes(pickle.dumps(Stranger()))
    collect(newest)
    assert find_resume(config_of(run)) == run / "global_step_6"
    assert f"{newest / 'actor' / name} cannot be read" in caplog.text and not (run / "ran").exists()


def test_a_state_of_another_step_is_not_loaded(run: Path) -> None:
    (run / "global_step_7").rename(run / "global_step_9")
    (run / MARKER).write_text("9")
    assert find_resume(config_of(run)) == run / "global_step_6"


@pytest.mark.parametrize("text", [DEEP[:5000], "- a", "a: ["])  # PyYAML takes its time
def test_a_damaged_configuration_says_what_to_do(tmp_path: Path, text: str) -> None:
    path = checkpoint(tmp_path)
    (path / "checksums.json").unlink()
    (path / "config.yaml").write_text(text)
    with pytest.raises(ValueError, match=r"config.yaml is damaged: .*Remove it"):
        find_resume(config_of(tmp_path))


@pytest.mark.parametrize(
    "text",
    [*MALFORMED, '{"metric": "val-core/m", "step": "x", "value": 1}', '{"metric": "val-core/m", "validations": [[1]]}'],
)
def test_a_damaged_record_of_the_best_step_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / BEST_FILE).write_text(text)
    with pytest.raises(ValueError, match=r"best_checkpoint.json is damaged"):
        Best(TrainerConfig(best_metric="val-core/m"), tmp_path, resumed_at=3)


def test_a_saved_state_without_an_entry_is_refused_by_its_file(tmp_path: Path) -> None:
    class Source:
        def load_state_dict(self, state: dict[str, object], folder: Path) -> None:
            state["sampler"]

    class Run:
        source = Source()

    path = checkpoint(tmp_path)
    layout.write_trainer_state(path, {"state": {"step": 4}, "source": {}, "run": "r"})
    with pytest.raises(ConfigError, match=r"trainer_state.json is damaged \(KeyError: 'sampler'\)"):
        Checkpoints(TrainerConfig(default_local_dir=str(tmp_path)), None, resume=path).restore(Run())  # pyright: ignore


@pytest.mark.parametrize("line", [*(text for text in MALFORMED if text), '{"step": "x"}'])
def test_a_damaged_line_of_metrics_is_named(tmp_path: Path, line: str) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "a": 2}\n' + line + "\n")
    with pytest.raises(ValueError, match=r"metrics.jsonl, line 2 is damaged"):
        read_metrics(tmp_path / "metrics.jsonl")


@pytest.mark.parametrize("text", ["[]", "{", DEEP, "\udcff"])
def test_a_damaged_environment_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "metrics.jsonl").touch()
    (tmp_path / "environment.json").write_text(text, errors="surrogateescape")
    with pytest.raises(ValueError, match=r"environment.json is damaged"):
        _ = read_run(tmp_path).environment


def test_a_step_that_was_moved_and_linked_back_is_unlinked_when_its_time_has_come(
    run: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """What it points to stays; no link of another name is left, and a new save of that step replaces the link."""
    kept = tmp_path_factory.mktemp("kept") / "global_step_3"
    (run / "global_step_3").rename(kept)
    (run / "global_step_3").symlink_to(kept)
    linked_role = tmp_path_factory.mktemp("kept") / "actor"
    (run / "global_step_6" / "actor").rename(linked_role)
    (run / "global_step_6" / "actor").symlink_to(linked_role)
    assert find_resume(config_of(run)) == run / "global_step_7"
    layout.rotate(run / "global_step_7", 1, 1)
    assert sorted(path.name for path in run.glob("global_step*")) == ["global_step_7"]
    assert (kept / "trainer_state.json").exists() and (linked_role / "model" / "shard").exists()
    (run / "global_step_8").symlink_to(kept)
    assert checkpoint(run, 8) == run / "global_step_8" and not (run / "global_step_8").is_symlink()
    (run / "global_step_9").symlink_to(run / "nowhere")
    assert checkpoint(run, 9) == run / "global_step_9" and json.loads((kept / "trainer_state.json").read_text())
    (run / "global_step_5.deleted").symlink_to(kept)  # left by an older version
    layout.recover(run)
    assert not (run / "global_step_5.deleted").is_symlink() and kept.is_dir()


def test_links_in_a_runs_folder_are_followed_or_refused_and_said(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "samples").symlink_to(elsewhere)
    assert linked_folders("trainer.log_dir", folder) == [
        f"{folder / 'samples'} is a link: what belongs there goes to {elsewhere}"
    ]
    for name in ("verl_like.log", "metrics.jsonl"):
        (folder / name).symlink_to(elsewhere / name)
        with pytest.raises(ValueError, match=rf"trainer.log_dir='.*/run': .*{name} is a link to .*Remove the link"):
            linked_folders("trainer.log_dir", folder)
        (folder / name).unlink()


def to_itself(path: Path) -> None:
    path.symlink_to(path.name)


@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir, to_itself])
@pytest.mark.parametrize("name", ["trainer_state.json", "checksums.json"])
def test_what_is_no_file_is_a_fault_of_its_step_and_nobody_waits_for_it(run: Path, name: str, make: Any) -> None:
    path = run / "global_step_7" / name
    path.unlink()
    make(path)
    assert find_resume(config_of(run)) == run / "global_step_6"


@pytest.mark.parametrize(
    "text",
    [
        '{"state": {"step": 7, "kl": NaN}, "source": null}',
        '{"state": {"step": 7, "kl": 1e999}, "source": null}',
        '{"state": {"step": 7.0}, "source": null}',
        '{"state": {"step": 7}, "state": {"step": 7}, "source": null}',
    ],
)
def test_a_state_that_no_run_writes_is_not_loaded(run: Path, text: str) -> None:
    newest = run / "global_step_7"
    (newest / "checksums.json").unlink()
    (newest / "trainer_state.json").write_text(text)
    assert find_resume(config_of(run)) == run / "global_step_6"


@pytest.mark.parametrize("name", ["008", "٨", "+8", "8e0"])
def test_a_step_has_one_name(run: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    (run / "global_step_7").rename(run / f"global_step_{name}")
    (run / MARKER).unlink()
    assert find_resume(config_of(run)) == run / "global_step_6"
    assert f"global_step_{name} is left out" in caplog.text
    assert [path.name for path in layout.whole_checkpoints(run)] == ["global_step_3", "global_step_6"]


@pytest.mark.parametrize(
    "text",
    [
        "a: ${",
        "a: &a [1]\nb: *a",
        "a: &x [*x]",
        "a0: &a0 [1]\n" + "".join(f"a{n}: &a{n} [{f'*a{n - 1},' * 10}]\n" for n in range(1, 9)),
    ],
)
def test_yaml_that_stands_for_more_than_it_is(tmp_path: Path, text: str) -> None:
    path = checkpoint(tmp_path)
    (path / "checksums.json").unlink()
    (path / "config.yaml").write_text(text)
    with pytest.raises(ValueError, match=r"config.yaml is damaged: .*Remove it"):
        find_resume(config_of(tmp_path))


def test_a_name_that_no_file_can_have_is_a_fault_of_its_step(run: Path) -> None:
    (run / "global_step_7" / "checksums.json").write_text(json.dumps({"x" * 300: {"bytes": 1, "crc32": "0"}}))
    assert find_resume(config_of(run)) == run / "global_step_6"


@pytest.mark.parametrize("name", [MARKER, "metrics.jsonl", "best_checkpoint.json"])
@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir])
def test_what_is_in_the_way_is_told_before_a_run(tmp_path: Path, name: str, make: Any) -> None:
    make(tmp_path / name)
    with pytest.raises(ValueError, match=rf"trainer.default_local_dir=.*{name} is no file, and a run keeps one there"):
        linked_folders("trainer.default_local_dir", tmp_path)


def test_a_file_in_place_of_a_step_is_told_before_a_run(tmp_path: Path) -> None:
    (tmp_path / "global_step_4.saving").touch()
    with pytest.raises(ValueError, match=r"global_step_4.saving is no folder"):
        linked_folders("trainer.default_local_dir", tmp_path)


@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir])
def test_pipes_and_folders_in_a_runs_folder_are_named(tmp_path: Path, make: Any) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "data": 5}\n')
    for name in ("config.yaml", "environment.json", BEST_FILE, "run.lock"):
        make(tmp_path / name)
    run = read_run(tmp_path)
    with pytest.raises(ValueError, match=r"config.yaml is damaged: it is no file|config.yaml cannot be read"):
        _ = run.config
    with pytest.raises(ValueError, match=r"environment.json is damaged: it is no file|environment.json cannot be read"):
        _ = run.environment
    with pytest.raises(ValueError, match=r"metrics.jsonl, line 1 is damaged: data=5"):
        _ = run.steps
    with pytest.raises(ValueError, match=BEST_FILE):
        Best(TrainerConfig(best_metric="val-core/m"), tmp_path, resumed_at=3)
    with pytest.raises(RunLocked, match=r"run.lock"):
        RunLock(tmp_path, "r").acquire()


@pytest.mark.parametrize("data", [b"", b"abc", (1 << 62).to_bytes(8, "little") + b"{}"])
def test_damaged_safetensors_are_named(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(ValueError, match=r"model.safetensors is damaged"):
        SafetensorsFolder(tmp_path)


@pytest.mark.parametrize("header", ["[]", "{}", '{"order": ["b"], "lists": {}, "facts": {}}', '{"order": 5}'])
def test_a_damaged_recorded_step_is_named(tmp_path: Path, header: str) -> None:
    save_file({"a": torch.zeros(1)}, step_file(tmp_path, 1), {"step": header})
    (tmp_path / "step_x.safetensors").touch()
    assert recorded_steps(tmp_path) == [1]
    with pytest.raises(ConfigError, match=r"step_1.safetensors holds no recorded step"):
        read_step(step_file(tmp_path, 1))
