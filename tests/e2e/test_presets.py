"""Every composed preset (`preset=<name>`) really trains: a few steps of the tiny task, in this process."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import metrics_of, overrides, write_task

from verl_like.trainer.compose import compose
from verl_like.trainer.config_files import CONFIG_DIR
from verl_like.trainer.run import run as train

PRESETS = sorted(path.stem for path in (CONFIG_DIR / "preset").glob("*.yaml") if path.stem != "none")
# What depends on lengths or on the reward function of the task, as each preset's file says.
OF_THE_TASK = {
    "dapo": {"reward_model.overlong_buffer.len": 2},
    "coati_dapo": {
        "reward_model.overlong_buffer.len": 2,
        "reward_model.overlong_buffer.truncated": "penalise",  # a random model ends no answer: all would score 0
        "actor_rollout_ref.actor.mask_truncated": False,  # or be masked
        "algorithm.filter_groups.metric": "score",
    },
}
# A metric that only the preset's own settings give, and what must hold of it.
SIGNS = {
    "ppo": ("critic/vf_loss", lambda value: value > 0),
    "grpo": ("actor/kl_loss", lambda value: value >= 0),
    "dr_grpo": ("critic/advantages/max", lambda value: 0 < value < 1),
    "dapo": ("train/num_gen_batches", lambda value: value >= 1),
    "gspo": ("actor/pg_clipfrac", lambda value: value > 0),
    "cispo": ("actor/pg_clipfrac", lambda value: value < 0.5),
    "reinforce_plus_plus": ("critic/kl_coeff", lambda value: value == 0.001),
    "rloo": ("critic/kl_coeff", lambda value: value == 0.03),
    "lite_ppo": ("critic/advantages/max", lambda value: value > 1),
    "topr": ("actor/pg_clipfrac", lambda value: value >= 0),
    "roll_v0": ("critic/advantage_clip_frac", lambda value: value > 0),
    "coati": ("actor/kl_loss", lambda value: value >= 0),
    "coati_dapo": ("filter_groups/signal_fraction", lambda value: 0 < value <= 1),
}


def command(preset: str, folder: Path, model: Path) -> list[str]:
    """The task's command line with everything that the preset decides left to it."""
    settings = {"trainer.total_training_steps": 2, **OF_THE_TASK.get(preset, {})}
    if preset not in ("rloo", "topr"):  # the others: two updates a step, so that ratios and clips matter
        settings["actor_rollout_ref.actor.ppo_mini_batch_size"] = 4
    own = ("algorithm.adv_estimator=", "actor_rollout_ref.rollout.n=")
    words = [w for w in overrides(write_task(folder), model, folder / "out", **settings) if not w.startswith(own)]
    return [f"preset={preset}", *words]


@pytest.mark.parametrize("preset", PRESETS)
def test_preset_trains(tmp_path: Path, tiny_model: Path, preset: str) -> None:
    train(compose(command(preset, tmp_path, tiny_model)))
    records = metrics_of(tmp_path / "out")
    assert len(records) == 2
    assert all(record["actor/grad_norm"] > 0 and record["actor/skipped_steps"] == 0 for record in records)
    name, holds = SIGNS[preset]
    assert any(holds(record[name]) for record in records), (name, [record[name] for record in records])
