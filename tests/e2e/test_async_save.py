"""checkpoint.async_save: the same run, and a checkpoint to go on from."""

from __future__ import annotations

from pathlib import Path

from support import metrics_of, overrides, write_task

from verl_like.trainer.compose import compose
from verl_like.trainer.run import run as train


def test_a_run_goes_on_from_a_checkpoint_written_in_the_background(tmp_path: Path, tiny_model: Path) -> None:
    settings = {"trainer.save_freq": 2, "actor_rollout_ref.actor.checkpoint.async_save": True}
    task = write_task(tmp_path)
    train(compose(overrides(task, tiny_model, tmp_path / "plain")))
    for last in (2, 4):
        steps = {"trainer.total_training_steps": last}
        train(compose(overrides(task, tiny_model, tmp_path / "parts", **settings, **steps)))
    assert (tmp_path / "parts" / "latest_checkpointed_iteration.txt").read_text() == "4"
    plain, parts = metrics_of(tmp_path / "plain"), metrics_of(tmp_path / "parts")
    for name in ("critic/score/mean", "actor/pg_loss", "actor/grad_norm"):
        assert [record[name] for record in parts] == [record[name] for record in plain]
