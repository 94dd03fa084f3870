"""What a run resumes from is found, checked and compared before any process starts."""

from __future__ import annotations

import json
import logging
import shutil
import uuid
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from verl_like.checkpoint import layout
from verl_like.checkpoint.checksums import collect
from verl_like.config import PPOConfig
from verl_like.config.errors import ConfigError
from verl_like.config.schema import to_dict
from verl_like.remote_storage import RemoteFolder
from verl_like.trainer.build import started
from verl_like.trainer.compose import save_resolved
from verl_like.trainer.resume import changed_keys, fetch_resume, find_resume, processes_text, run_of


def config_of(folder: Path, **changes: Any) -> PPOConfig:
    """The defaults with changes by dotted key (`__` for dots)."""
    config = PPOConfig()
    config.critic.enable = False
    for name, value in {"trainer__default_local_dir": str(folder), **changes}.items():
        *sections, key = name.split("__")
        node: Any = config
        for section in sections:
            node = getattr(node, section)
        setattr(node, key, value)
    return config


PLACE = Path("/where/a/run/is")
RESOLVED: dict[str, str] = {}


def save_config(folder: Path, path: Path, changes: dict[str, Any]) -> None:
    """config.yaml of a run in `folder`. YAML of a whole configuration takes a fifth of a second: written once each."""
    key = repr(changes)
    if key not in RESOLVED:
        save_resolved(config_of(PLACE, **changes), path)
        RESOLVED[key] = path.read_text()
    path.write_text(RESOLVED[key].replace(str(PLACE), str(folder)))


def checkpoint(folder: Path, step: int = 4, *, lora_rank: int = 0, critic: bool = False, **changes: Any) -> Path:
    """What a run of this configuration leaves behind, with text for tensors."""
    path = layout.prepare_step_dir(folder, step)
    for role in ("actor", "critic")[: 1 + critic]:
        for part in ("model", "optimizer", "extra"):
            (path / role / part).mkdir(parents=True)
            (path / role / part / "shard").write_text(f"{role} {part}")
    if lora_rank:
        (path / "actor" / "adapter").mkdir()
        (path / "actor" / "adapter" / "adapter_config.json").write_text(json.dumps({"r": lora_rank}))
    save_config(folder, path / "config.yaml", changes)
    layout.write_trainer_state(path, {"state": {"step": step}, "source": None})
    collect(path)
    return layout.commit(path)


def test_modes(tmp_path: Path) -> None:
    assert find_resume(config_of(tmp_path)) is None
    early, late = checkpoint(tmp_path, 4), checkpoint(tmp_path, 8)
    assert find_resume(config_of(tmp_path)) == late
    assert find_resume(config_of(tmp_path, trainer__resume_mode="disable")) is None
    by_path = {"trainer__resume_mode": "resume_path", "trainer__resume_from_path": str(early)}
    assert find_resume(config_of(tmp_path / "other", **by_path)) == early
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"file is a file; .*name a folder"):
        find_resume(config_of(tmp_path, **by_path | {"trainer__resume_from_path": str(tmp_path / "file")}))


def test_home_folders_are_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    found = checkpoint(tmp_path / "runs")
    assert find_resume(config_of(Path("~/runs"))) == found
    by_path = {"trainer__resume_mode": "resume_path", "trainer__resume_from_path": "~/runs/global_step_4"}
    assert find_resume(config_of(tmp_path, **by_path)) == found


def test_only_what_the_run_loads_must_be_whole(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    early, late = checkpoint(tmp_path, 4, critic=True), checkpoint(tmp_path, 8, critic=True)
    (late / "critic" / "model" / "shard").write_text("critic modem")
    with caplog.at_level(logging.WARNING):
        assert find_resume(config_of(tmp_path)) == late
        assert f"the critic in {late} is left out" in caplog.text
        assert find_resume(config_of(tmp_path, critic__enable=True)) == early
    assert f"{late / 'critic' / 'model' / 'shard'} is damaged" in caplog.text
    config = config_of(tmp_path, critic__enable=True)
    config.critic.checkpoint.load_contents = ["optimizer"]
    with pytest.raises(ConfigError, match=r"critic.checkpoint.load_contents=\['optimizer'\] leaves out the weights"):
        find_resume(config)


def test_a_rotated_away_actor_is_no_checkpoint(tmp_path: Path) -> None:
    """Of a checkpoint without checksums too."""
    path = checkpoint(tmp_path)
    (path / "checksums.json").unlink()
    (path / "actor").rename(tmp_path / "gone")
    with pytest.raises(ValueError, match=r"no checkpoint .* is whole: .*actor is missing"):
        find_resume(config_of(tmp_path))


@pytest.mark.parametrize(
    ("saved", "now", "message"),
    [
        (
            {},
            {"actor_rollout_ref__model__lora_rank": 8},
            r"lora_rank=8, but .* holds no adapters: set lora_rank=0",
        ),
        ({"lora_rank": 8}, {}, r"model.lora_rank=0, but .* holds adapters of rank 8: set lora_rank=8 again"),
        ({"lora_rank": 8}, {"actor_rollout_ref__model__lora_rank": 4}, r"lora_rank=4, but .* rank 8"),
        (
            {"lora_rank": 8},
            {"actor_rollout_ref__model__lora_rank": 8, "actor_rollout_ref__model__target_modules": ["q_proj"]},
            r"actor_rollout_ref.model.target_modules=\['q_proj'\], but .* was saved with all-linear",
        ),
        (
            {},
            {"actor_rollout_ref__actor__optim__optimizer": "adamw_8bit"},
            r"actor.optim.optimizer=adamw_8bit, but .* holds the states of adamw: .*load_contents=\[model,extra\]",
        ),
        (
            {},
            {"actor_rollout_ref__actor__checkpoint__load_contents": ["hf_model"]},
            r"actor.checkpoint.load_contents=\['hf_model'\] leaves out the weights of .*global_step_4",
        ),
    ],
)
def test_models_that_do_not_fit_are_refused_by_key(
    tmp_path: Path, saved: dict[str, Any], now: dict[str, Any], message: str
) -> None:
    checkpoint(tmp_path, **saved)
    with pytest.raises(ConfigError, match=message):
        find_resume(config_of(tmp_path, **now))


def test_a_critic_that_was_added_is_refused(tmp_path: Path) -> None:
    checkpoint(tmp_path, algorithm__adv_estimator="rloo")
    config = config_of(tmp_path, algorithm__adv_estimator="gae", critic__enable=None)
    with pytest.raises(ConfigError, match=r"trains a critic .*estimator=gae.* holds none: .*adv_estimator=rloo"):
        find_resume(config)


def test_a_part_that_was_not_saved_is_named(tmp_path: Path) -> None:
    path = checkpoint(tmp_path)
    (path / "checksums.json").unlink()
    (path / "actor" / "optimizer").rename(tmp_path / "optimizer")
    with pytest.raises(ConfigError, match=r"load_contents=.*, but .*actor was saved without optimizer: leave that out"):
        find_resume(config_of(tmp_path))


def test_changed_keys_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoint(tmp_path)
    changes = {
        "actor_rollout_ref__actor__optim__lr": 3e-4,
        "actor_rollout_ref__actor__optim__betas": [0.8, 0.9],
        "data__train_batch_size": 7,
        "actor_rollout_ref__rollout__n": 5,
        "algorithm__adv_estimator": "rloo",
        "trainer__resume_mode": "auto",
    }
    with caplog.at_level(logging.INFO):
        find_resume(config_of(tmp_path))
        assert "resuming from" in caplog.text and "changed since" not in caplog.text
        find_resume(config_of(tmp_path, **changes))
    assert "5 key(s) changed since" in caplog.text and "(data.seed, data.shuffle)" in caplog.text
    for line in (
        "actor_rollout_ref.actor.optim.lr: 1e-06 -> 0.0003",
        "actor_rollout_ref.actor.optim.betas: [0.9, 0.999] -> [0.8, 0.9]",
        "actor_rollout_ref.rollout.n: 1 -> 5",
        "algorithm.adv_estimator: gae -> rloo",
    ):
        assert line in caplog.text


def test_a_key_that_is_new_since_counts_with_its_default() -> None:
    config = PPOConfig()
    saved = to_dict(config)
    del saved["trainer"]["save_freq"]
    saved["trainer"]["of_an_older_version"] = 1
    assert changed_keys(saved, config) == []
    config.trainer.save_freq = 5
    assert changed_keys(saved, config) == ["trainer.save_freq: None -> 5"]


def test_other_training_data_are_refused_before_the_workers(tmp_path: Path) -> None:
    """The workers' start may take minutes: it has not begun when the data are compared."""
    path = checkpoint(tmp_path)
    layout.write_trainer_state(path, layout.read_trainer_state(path) | {"source": {"identity": {"rows": 64}}})
    collect(path)
    data = SimpleNamespace(identity=lambda: {"rows": 32})
    ready: Any = SimpleNamespace(config=config_of(tmp_path), plan=None, train=data, tool_usage=dict)
    expected = r"global_step_4: the training data changed .* Then: 64 .* Now: 32"
    with pytest.raises(ConfigError, match=expected), started(ready, pytest.fail):
        pass


def test_a_checkpoint_of_an_older_version_is_taken(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = checkpoint(tmp_path)
    (path / "checksums.json").unlink()
    (path / "config.yaml").unlink()
    with caplog.at_level(logging.WARNING):
        assert find_resume(config_of(tmp_path)) == path
    assert "without checksums" in caplog.text and "without its configuration" in caplog.text


def test_only_this_runs_checkpoints_are_fetched(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An older run left step 100 on remote storage, this one is at 20 there and at 10 here."""
    url, here = f"memory://{uuid.uuid4().hex}", tmp_path / "here"

    def saved(root: Path, step: int, run: str) -> Path:
        folder = layout.prepare_step_dir(root, step)
        layout.write_trainer_state(folder, {"run": run})
        return layout.commit(folder)

    for step, run in ((100, "old"), (20, "new")):
        RemoteFolder(url, "k").upload(saved(tmp_path / "there", step, run))
    saved(here, 10, "new")
    settings = config_of(here, trainer__default_hdfs_dir=url).trainer
    fetch_resume(settings)
    assert layout.find_latest(here) == here / "global_step_20"
    fetch_resume(settings)
    assert layout.find_latest(here) == here / "global_step_20" and "step(s) 100 are of another run" in caplog.text
    shutil.rmtree(here)
    here.mkdir()
    with pytest.raises(ValueError, match=r"trainer.default_hdfs_dir=.*step 20 of new; 100 of old.*resume_from_path"):
        fetch_resume(settings)
    there = RemoteFolder(url, "k")
    there._fs.rm(f"{there._root}/global_step_20", recursive=True)
    fetch_resume(settings)
    assert layout.find_latest(here) == here / "global_step_100"
    with pytest.raises(ValueError, match=r"of another run, up to step 100, which a fresh start .* name another folder"):
        fetch_resume(config_of(here, trainer__default_hdfs_dir=url, trainer__resume_mode="disable").trainer)


def test_a_run_keeps_its_name_when_it_goes_on(tmp_path: Path) -> None:
    folder = layout.prepare_step_dir(tmp_path, 5)
    layout.write_trainer_state(folder, {"run": "vl1"})
    path = layout.commit(folder)
    by_path = {"trainer__resume_mode": "resume_path", "trainer__resume_from_path": str(path)}
    assert run_of(path, config_of(tmp_path).trainer) == "vl1"
    assert run_of(path, config_of(tmp_path, **by_path).trainer) != "vl1" != run_of(None, config_of(tmp_path).trainer)


def test_a_damaged_configuration_of_a_checkpoint_is_named(tmp_path: Path) -> None:
    folder = layout.prepare_step_dir(tmp_path, 5)
    (folder / "actor").mkdir()
    layout.write_trainer_state(folder, {"state": {"step": 5}, "source": None})
    (folder / "config.yaml").write_text("trainer: !!python/object/apply:os.system ['true']")
    layout.commit(folder)
    with pytest.raises(ValueError, match=r"global_step_5/config.yaml is damaged: could not determine a constructor"):
        find_resume(config_of(tmp_path))


def test_another_number_of_processes_is_told(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, 4)
    assert processes_text(path, 2) == ""  # it does not say how many there were
    for rank in range(4):
        (path / "actor" / "extra" / f"rank_{rank}.pt").touch()
    assert processes_text(path, 4) == ""
    assert processes_text(path, 2).startswith("global_step_4 was saved by 4 process(es) and is taken up by 2: ")
    assert "has more to hold" in processes_text(path, 2) and "has less to hold" in processes_text(path, 8)
