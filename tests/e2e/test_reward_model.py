"""Training on the scores of a reward model: in the policy's process, with its own template, beside a rule."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT, load_script
from tests.e2e.support import MEASURED, main_ppo, metrics_of, overrides, write_task
from verl_like.models.loading import load_tokenizer
from verl_like.trainer.compose import compose
from verl_like.trainer.main_ppo import train
from verl_like.workers.weights import WeightsRole


@pytest.fixture(scope="module")
def judge(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reward model that learnt from pairs to prefer the answer with more sevens."""
    recipe = load_script(ROOT / "recipes" / "reward_model" / "train.py", "reward_model_recipe")
    generator = random.Random(1)
    texts = [["".join(generator.choices("0123456777", k=6)) for _ in range(2)] for _ in range(400)]
    ordered = [sorted(pair, key=lambda text: text.count("7")) for pair in texts]
    rows = [
        {"prompt": f"{generator.randrange(10)}+1=", "chosen": more, "rejected": fewer}
        for fewer, more in ordered
        if more.count("7") > fewer.count("7")
    ]
    settings = recipe.Settings(hidden_size=64, num_layers=1, steps=120, batch_size=32, learning_rate=3e-3)
    folder = tmp_path_factory.mktemp("judge")
    plain = {"data.chat_template": "none"}
    assert recipe.train(folder, load_tokenizer(str(tiny_model)), rows[50:], rows[:50], settings, **plain) > 0.9
    return folder / "model"


def run(tmp_path: Path, model: Path, judge: Path, **settings: Any) -> list[dict[str, Any]]:
    task = write_task(tmp_path)
    values = {"reward_model.enable": True, "reward_model.model.path": str(judge)} | settings
    train(compose(overrides(task, model, tmp_path / "out", **values)))
    return metrics_of(tmp_path / "out")


def test_the_policy_learns_what_the_reward_model_likes(tmp_path: Path, tiny_model: Path, judge: Path) -> None:
    """Rules do not grade the training, but the validation's samples show that sevens come."""
    settings = {
        "custom_reward_function.path": None,
        "reward_model.model.input_tokenizer": str(tiny_model),
        "data.val_files": "[]",
        "trainer.total_training_steps": 20,
        "trainer.rollout_data_dir": str(tmp_path / "samples"),
        "actor_rollout_ref.model.use_remove_padding": True,
    }
    records = run(tmp_path, tiny_model, judge, **settings)
    early, late = (sum(r["reward/model_score/mean"] for r in part) / 4 for part in (records[:4], records[-4:]))
    assert late > early + 0.5
    first, last = ((tmp_path / "samples" / f"{step:06d}.jsonl").read_text().count("7") for step in (1, 20))
    assert last > 1.5 * first


def test_a_rule_counts_beside_the_model_also_in_validation(tmp_path: Path, tiny_model: Path, judge: Path) -> None:
    settings = {
        "reward_model.rule_weight": 2.0,
        "reward_model.model_weight": 0.5,
        "trainer.test_freq": 1,
        "trainer.total_training_steps": 2,
    }
    for record in run(tmp_path, tiny_model, judge, **settings):
        expected = 0.5 * record["reward/model_score/mean"] + 2.0 * record["reward/rule_score/mean"]
        assert record["critic/score/mean"] == pytest.approx(expected, rel=1e-5)
        assert "val-core/sevens/acc/mean@1" in record


def test_weights_that_a_sleeping_engine_throws_away_change_nothing(
    tmp_path: Path, tiny_model: Path, judge: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model that scores a validation puts the engine to sleep, and no sync comes before the next responses."""
    restore, restored, ways = WeightsRole._restore, [], []
    monkeypatch.setattr(WeightsRole, "_restore", lambda *given: restored.append(restore(*given)))
    for level in (1, 2):
        (tmp_path / str(level)).mkdir()
        settings = {"actor_rollout_ref.rollout.sleep_level": level, "trainer.total_training_steps": 3}
        settings["reward_model.rule_weight"] = 1.0
        ways.append(run(tmp_path / str(level), tiny_model, judge, **settings, **{"trainer.test_freq": 1}))
    assert len(ways[0]) == 3 and len(restored) == 2 and ways[1][-1]["weight_sync/num_changed"] > 0
    for one, two in zip(*ways, strict=True):
        other = {name for name in one.keys() | two.keys() if one.get(name) != two.get(name)}
        assert not {name for name in other if not name.startswith(MEASURED)}


@pytest.mark.engines
@pytest.mark.parametrize(
    "split",
    [
        pytest.param("ulysses_sequence_parallel_size", marks=pytest.mark.slow),
        "model.fsdp_config.tensor_parallel_size",
    ],
)
def test_two_ranks_that_share_a_reward_model_score_as_one(
    tmp_path: Path, tiny_model: Path, judge: Path, split: str
) -> None:
    """Its sequences, or its matrices, are split between the two processes of a pool of its own."""
    settings = {"custom_reward_function.path": None, "data.val_files": "[]", "trainer.total_training_steps": 1}
    (tmp_path / "alone").mkdir()
    (alone,) = run(tmp_path / "alone", tiny_model, judge, **settings)
    placement = "{judges:{roles:[reward],n_gpus_per_node:2}}"
    shared = {"trainer.launcher": "ray", "trainer.placement": placement, f"reward_model.{split}": 2}
    values = {"reward_model.enable": True, "reward_model.model.path": str(judge)} | settings | shared
    result = main_ppo(overrides(write_task(tmp_path), tiny_model, tmp_path / "out", **values))
    assert result.returncode == 0, result.stdout[-3000:]
    (two,) = metrics_of(tmp_path / "out")
    for name in ("reward/model_score/mean", "critic/score/max", "critic/score/min"):
        assert two[name] == pytest.approx(alone[name], abs=1e-4)


@pytest.mark.engines
def test_a_pool_of_its_own_scores_for_two_ranks(tmp_path: Path, tiny_model: Path, judge: Path) -> None:
    settings = {
        "trainer.launcher": "ray",
        "trainer.n_gpus_per_node": 2,
        "reward_model.enable_resource_pool": True,
        "reward_model.nnodes": 1,
        "reward_model.n_gpus_per_node": 1,
        "custom_reward_function.path": None,
        "data.val_files": "[]",
        "trainer.total_training_steps": 2,
    }
    task = write_task(tmp_path)
    values = {"reward_model.enable": True, "reward_model.model.path": str(judge)} | settings
    result = main_ppo(overrides(task, tiny_model, tmp_path / "out", **values))
    assert result.returncode == 0, result.stdout[-3000:]
    records = metrics_of(tmp_path / "out")
    assert [r["critic/score/mean"] for r in records] == pytest.approx([r["reward/model_score/mean"] for r in records])
    assert sorted(path.name for path in (tmp_path / "out" / "workers").glob("*rank*")) == [
        "reward_rank0.log",
        "worker_rank0.log",
        "worker_rank1.log",
    ]
