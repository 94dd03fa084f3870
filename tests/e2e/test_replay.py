"""Recorded steps: made again to the last bit, trained without an engine, and searched for where two runs part."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from safetensors.torch import save_file
from support import main_ppo, metrics_of, overrides, write_task

from verl_like.cli.main import main
from verl_like.config.errors import ConfigError
from verl_like.kit.replaying import parting, replay
from verl_like.trainer.compose import compose
from verl_like.trainer.dry_run import dry_run
from verl_like.trainer.run import run as train

SETTINGS: dict[str, Any] = {"trainer.save_freq": 1, "trainer.record_freq": 1, "trainer.total_training_steps": 3}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """A run of three steps with a critic, two optimizer steps each."""
    folder = tmp_path_factory.mktemp("recorded")
    keys = {"algorithm.adv_estimator": "gae", "critic.model.path": tiny_model, "critic.ppo_mini_batch_size": 8}
    keys |= {"actor_rollout_ref.actor.ppo_mini_batch_size": 4, "critic.ppo_max_token_len_per_gpu": 256}
    train(compose(overrides(write_task(folder), tiny_model, folder / "out", **SETTINGS, **keys)))
    return folder / "out"


def test_steps_are_made_again_to_the_last_bit(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["replay", str(recorded), "1", "--tolerance", "0"])
    told = capsys.readouterr().out
    for what in ("actor/grad_norm", "actor/pg_loss", "critic/vf_loss", "advantages_T", "critic: "):
        assert what in told
    found = replay(recorded, 3, [], 0.0)
    assert all(each.same for each in found), [each for each in found if not each.same]
    grad = next(each for each in found if each.where == "actor/grad_norm")
    assert grad.first == metrics_of(recorded)[2]["actor/grad_norm"] > 0


def test_what_was_changed_is_found(recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = replay(recorded, 2, ["actor_rollout_ref.actor.clip_ratio=0.0001", "algorithm.lam=0.5"], 1e-6)
    assert {each.where.split(" ")[0] for each in found if not each.same and each.phase == "experience"} >= {
        "advantages_T"
    }
    assert all(each.same for each in found if each.phase in ("weights", "rollouts", "scores", "evaluated"))
    other = tmp_path / "other"
    shutil.copytree(recorded, other, ignore=shutil.ignore_patterns("global_step_*"))
    assert parting(recorded, other, 0.0) is None
    _change(other / "recorded" / "step_2.safetensors", "rollouts.response_ids_T", 20)
    with pytest.raises(SystemExit):
        main(["bisect", str(recorded), str(other)])
    assert "step 2, rollouts: response_ids_T at row " in capsys.readouterr().out
    (other / "recorded" / "step_2.safetensors").unlink()
    (other / "recorded" / "step_1.safetensors").unlink()
    assert parting(recorded, other, 0.0) is None


def _change(file: Path, name: str, at: int) -> None:
    with safe_open(file, framework="pt") as opened:
        header = opened.metadata()
        tensors = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
    tensors[name][at] += 1
    save_file(tensors, file, header)


def test_recorded_rollouts_train_without_an_engine(recorded: Path, tmp_path: Path, tiny_model: Path) -> None:
    keys = [
        "actor_rollout_ref.rollout.name=recorded",
        f"actor_rollout_ref.rollout.skip_dump_dir={recorded / 'recorded'}",
        f"trainer.default_local_dir={tmp_path / 'out'}",
    ]
    train(compose(keys, [recorded / "config.yaml"]))
    for then, now in zip(metrics_of(recorded), metrics_of(tmp_path / "out"), strict=True):
        for name in (
            "actor/pg_loss",
            "actor/grad_norm",
            "critic/vf_loss",
            "critic/score/mean",
            "critic/advantages/max",
        ):
            assert then[name] == now[name], name
    assert parting(recorded, tmp_path / "out", 0.0) is None
    with pytest.raises(ConfigError, match=r"name=recorded: nothing answers a validation; set trainer.val_before_train"):
        compose([*keys, "trainer.test_freq=1"], [recorded / "config.yaml"])


def test_skip_rollout_takes_what_is_there_and_records_what_is_not(
    recorded: Path, tmp_path: Path, tiny_model: Path
) -> None:
    """verl's keys, old and new."""
    dump = tmp_path / "dump"
    dump.mkdir()
    shutil.copy(recorded / "recorded" / "step_1.safetensors", dump)
    keys = ["skip.rollout.enable=true", f"skip.rollout.dump_dir={dump}", "trainer.record_freq=-1"]
    out = tmp_path / "out"
    train(
        compose(
            [*keys, f"trainer.default_local_dir={out}", "trainer.total_training_steps=2"], [recorded / "config.yaml"]
        )
    )
    assert sorted(path.name for path in dump.iterdir()) == ["step_1.safetensors", "step_2.safetensors"]
    assert metrics_of(out)[0]["actor/grad_norm"] == metrics_of(recorded)[0]["actor/grad_norm"]


def test_a_plan_tells_that_there_are_other_processes_than_before(recorded: Path) -> None:
    keys = ["trainer.launcher=ray", "trainer.n_gpus_per_node=2", "trainer.total_training_steps=9"]
    told = dict(dry_run(compose(keys, [recorded / "config.yaml"])))["beginning"]
    assert "resumes from" in told and "global_step_3 was saved by 1 process(es) and is taken up by 2: " in told


def test_a_step_whose_checkpoint_is_gone_is_refused(recorded: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(recorded, bare, ignore=shutil.ignore_patterns("global_step_*"))
    config = (bare / "config.yaml").read_text().replace(str(recorded), str(bare))
    (bare / "config.yaml").write_text(config)
    with pytest.raises(ConfigError, match=r"step 2 began with the weights of .*global_step_1, which is not there"):
        replay(bare, 2, [], 0.0)
    with pytest.raises(ConfigError, match=r"step_9.safetensors holds no recorded step"):
        replay(bare, 9, [], 0.0)


@pytest.mark.engines
def test_a_step_of_two_ranks_is_made_again_by_one(tmp_path: Path, tiny_model: Path) -> None:
    out = tmp_path / "out"
    settings = SETTINGS | {"trainer.launcher": "ray", "trainer.n_gpus_per_node": 2, "trainer.total_training_steps": 2}
    done = main_ppo(overrides(write_task(tmp_path), tiny_model, out, **settings))
    assert done.returncode == 0, done.stdout[-3000:]
    found = replay(out, 2, [], 1e-4)
    assert all(each.same for each in found), [each for each in found if not each.same]
    assert {"actor/grad_norm", "actor/pg_loss"} <= {each.where for each in found}
    assert next(each for each in found if each.phase == "weights").same  # however they were sharded
