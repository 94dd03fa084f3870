"""The loop in one process (trainer.launcher=local, hf rollout): what must hold of any run, checked number by number."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support import MEASURED, main_ppo, metrics_of, overrides, write_task

from verl_like.checkpoint.layout import find_latest
from verl_like.trainer.compose import compose
from verl_like.trainer.run import run as train

# Clock and memory readings: everything else must be equal when two runs are.
WITH_WEIGHTS = {"actor_rollout_ref.actor.checkpoint.save_contents": "[model,optimizer,extra,hf_model]"}


def run(folder: Path, model: Path, name: str = "out", **settings: Any) -> list[dict[str, float]]:
    """One whole run in this process; its metrics, step by step."""
    train(compose(overrides(write_task(folder), model, folder / name, **settings)))
    return metrics_of(folder / name)


def facts(record: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in record.items() if not name.startswith(MEASURED)}


def weights_of(folder: Path, step: int) -> dict[str, torch.Tensor]:
    return load_file(folder / f"global_step_{step}" / "actor" / "huggingface" / "model.safetensors")


def test_a_resumed_run_equals_the_uninterrupted_one(tmp_path: Path, tiny_model: Path) -> None:
    schedule = {"actor_rollout_ref.actor.optim.total_training_steps": 4}
    settings = {
        **WITH_WEIGHTS,
        **schedule,
        "actor_rollout_ref.actor.optim.warmup_style": "cosine",
        "algorithm.use_kl_in_reward": True,
        "algorithm.kl_ctrl.type": "adaptive",
        "algorithm.kl_ctrl.horizon": 100,
        "algorithm.reward_norm.kind": "running",
        "trainer.save_freq": 2,
    }
    whole = run(tmp_path, tiny_model, "whole", **settings)
    run(tmp_path, tiny_model, "parts", **settings, **{"trainer.total_training_steps": 2})
    parts = run(tmp_path, tiny_model, "parts", **settings)
    assert len(whole) == len(parts) == 4
    for expected, actual in zip(whole, parts, strict=True):
        assert facts(actual) == facts(expected)
    assert whole[0]["critic/kl_coeff"] != whole[3]["critic/kl_coeff"]  # the controller did move
    assert whole[0]["critic/running_reward/mean"] != whole[3]["critic/running_reward/mean"]
    expected_weights, actual_weights = weights_of(tmp_path / "whole", 4), weights_of(tmp_path / "parts", 4)
    assert all(torch.equal(actual_weights[name], tensor) for name, tensor in expected_weights.items())


def test_a_health_rule_stops_the_run_and_keeps_a_checkpoint_of_before(tmp_path: Path, tiny_model: Path) -> None:
    task = write_task(tmp_path)
    (tmp_path / "reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    assert solution_str.count('7') < 4, 'the judge cannot read this'\n"
        "    return solution_str.count('7') / 6\n"
    )
    settings = {
        "trainer.health.failed_rewards": "stop",
        "trainer.save_freq": 1,
        "trainer.max_actor_ckpt_to_keep": 1,
        "trainer.total_training_steps": 20,
    }
    command = overrides(task, tiny_model, tmp_path / "out", **settings)
    with pytest.raises(SystemExit) as ended:
        train(compose(command))
    text = str(ended.value)
    said = (
        r"error: step (\d+): trainer.health.failed_rewards=stop: failed rewards: more than 1% of the rewards .*"
        r"reward/failure_fraction=0\.\d+ \(threshold 0.01\), at step\(s\) \1\. Responses: "
    )
    step = int(re.findall(said, text)[0])
    assert 1 < step < 20
    samples = tmp_path / "out" / "samples" / "train"
    assert str(samples) in text and (samples / re.findall(r"train/(\d+\.jsonl)", text)[0]).exists()
    before = tmp_path / "out" / f"global_step_{step - 1}"
    assert f"trainer.resume_mode=resume_path trainer.resume_from_path={before}" in text and before.is_dir()
    assert find_latest(tmp_path / "out") == tmp_path / "out" / f"global_step_{step}"
    train(compose([*command, "trainer.health.failed_rewards=off", f"trainer.total_training_steps={step + 1}"]))
    assert len(metrics_of(tmp_path / "out")) == step + 1


DYNAMIC = {
    "algorithm.filter_groups.enable": True,
    "algorithm.filter_groups.std_threshold": 0.095,  # about half of an untrained model's groups
    "data.gen_batch_size": 6,
}


@pytest.mark.parametrize("mode", ["batch", "request"])
def test_dynamic_sampling_fills_its_batches_and_resumes(tmp_path: Path, tiny_model: Path, mode: str) -> None:
    settings = {**WITH_WEIGHTS, **DYNAMIC, "trainer.save_freq": 2, "actor_rollout_ref.rollout.scheduler.mode": mode}
    settings["actor_rollout_ref.actor.optim.total_training_steps"] = 4
    whole = run(tmp_path, tiny_model, "whole", **settings)
    run(tmp_path, tiny_model, "parts", **settings, **{"trainer.total_training_steps": 2})
    parts = run(tmp_path, tiny_model, "parts", **settings)
    for part, record in zip(parts, whole, strict=True):
        expected, actual = (
            {name: value for name, value in facts(each).items() if not name.startswith("scheduler/")}
            for each in (record, part)
        )
        if mode == "batch":
            assert actual == expected
        else:  # what a response was computed beside depends on time, so the last bits of its log-probs may
            assert actual == pytest.approx(expected, rel=1e-5, abs=1e-6)
    expected, actual = weights_of(tmp_path / "whole", 4), weights_of(tmp_path / "parts", 4)
    assert all(torch.equal(actual[name], tensor) for name, tensor in expected.items())
    assert sum(record["filter_groups/num_dropped"] for record in whole) > 0
    assert sum(record["scheduler/num_unused"] for record in whole) > 0  # went back to the sampler
    for record in whole:
        assert record["train/num_gen_batches"] > 1 and record["critic/group_zero_std_fraction"] == 0
        assert record["filter_groups/num_drawn"] - record["filter_groups/num_dropped"] == 8  # data.train_batch_size


def test_additional_prompts_and_a_limit_of_requests_train(tmp_path: Path, tiny_model: Path) -> None:
    scheduler = "actor_rollout_ref.rollout.scheduler"
    settings = {
        f"{scheduler}.additional_prompts.enable": True,
        f"{scheduler}.additional_prompts.max": 3,
        f"{scheduler}.max_running_requests": 20,
        f"{scheduler}.expand_n": True,
        "algorithm.min_group_size": 2,
        "trainer.total_training_steps": 3,
    }
    for record in run(tmp_path, tiny_model, **settings):
        assert record["scheduler/num_unused"] >= 0 and record["scheduler/response_length/used"] > 0
        assert record["groups/too_small"] == 0 and record["critic/score/mean"] >= 0


def test_dynamic_sampling_gives_up_with_the_keys(tmp_path: Path, tiny_model: Path) -> None:
    settings = {
        **DYNAMIC,
        "algorithm.filter_groups.std_threshold": 5.0,
        "algorithm.filter_groups.max_num_gen_batches": 2,
    }
    told = r"^error: step 1: 2 draws \(12 prompts.*data.train_batch_size=8.*max_num_gen_batches=16 \(now 2\)"
    with pytest.raises(SystemExit, match=told):
        run(tmp_path, tiny_model, **settings)


def test_keep_and_mask_trains_the_other_groups(tmp_path: Path, tiny_model: Path) -> None:
    settings = {**DYNAMIC, "algorithm.filter_groups.resample": False, "trainer.total_training_steps": 2}
    for record in run(tmp_path, tiny_model, **settings):
        assert record["train/num_gen_batches"] == 1 and 0 < record["filter_groups/num_dropped"] < 8
        assert record["actor/grad_norm"] > 0 and record["actor/skipped_steps"] == 0


def test_a_batch_without_any_signal_is_survived_and_said(tmp_path: Path, tiny_model: Path) -> None:
    settings = {**DYNAMIC, "algorithm.filter_groups.resample": False, "trainer.total_training_steps": 1}
    settings |= {"algorithm.filter_groups.std_threshold": 5.0, "actor_rollout_ref.actor.use_kl_loss": True}
    (record,) = run(tmp_path, tiny_model, **settings)
    assert record["filter_groups/num_dropped"] == 8 and record["filter_groups/signal_fraction"] == 0
    assert record["actor/empty_minibatches"] == 1 and "actor/grad_norm" not in record  # no step, of the KL term neither
    assert "step 1: no group has a signal" in (tmp_path / "out" / "verl_like.log").read_text()


def test_ppo_with_a_critic_learns_values(tmp_path: Path, tiny_model: Path) -> None:
    settings = {
        "algorithm.adv_estimator": "gae",
        "critic.ppo_mini_batch_size": 4,
        "critic.optim.lr": 3e-3,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 4,
        "actor_rollout_ref.actor.use_kl_loss": True,
        "actor_rollout_ref.actor.optim.lr": 1e-3,
        "trainer.critic_warmup": 4,
        "trainer.total_training_steps": 12,
    }
    records = run(tmp_path, tiny_model, **settings)
    assert "actor/pg_loss" not in records[3] and "actor/pg_loss" in records[4]  # the critic trains alone at first
    assert records[11]["critic/vf_loss"] < 0.5 * records[0]["critic/vf_loss"]
    assert records[11]["actor/kl_loss"] > records[4]["actor/kl_loss"]  # two updates a step move away from the start
    early, late = (sum(r["critic/score/mean"] for r in part) / 4 for part in (records[:4], records[8:]))
    assert late > early + 0.05


def test_rows_whose_reward_fails_are_left_out_and_counted(tmp_path: Path, tiny_model: Path) -> None:
    task = write_task(tmp_path)
    (tmp_path / "reward.py").write_text(
        "import time\n"
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    if extra_info['index'] % 8 == 0:\n        raise RuntimeError('no verdict')\n"
        "    if extra_info['index'] % 8 == 1:\n        time.sleep(600)\n"
        "    return 1.0 if '7' in solution_str else 0.5\n"
    )
    settings = {
        "custom_reward_function.timeout": 0.3,
        "data.shuffle": False,
        "actor_rollout_ref.rollout.n": 2,
        "trainer.total_training_steps": 1,
    }
    train(compose(overrides(task, tiny_model, tmp_path / "out", **settings)))
    (record,) = metrics_of(tmp_path / "out")
    assert record["reward/failures"] == 4 and record["reward/timeouts"] == 2
    assert record["training/rows_without_reward"] == 4
    assert record["critic/score/min"] >= 0.5  # a missing reward is not a 0


def test_what_is_wrong_is_said_before_anything_starts(tmp_path: Path, tiny_model: Path) -> None:
    task = write_task(tmp_path)
    arguments = overrides(task, tiny_model, tmp_path / "out", **{"actor_rollout_ref.rollout.temprature": 1.0})
    result = main_ppo(arguments)
    assert result.returncode != 0 and "actor_rollout_ref.rollout.temperature" in result.stdout
    assert "Traceback" not in result.stdout
    too_many = {"data.train_batch_size": 128, "actor_rollout_ref.actor.ppo_mini_batch_size": 128}
    with pytest.raises(SystemExit, match=r"error: .*data\.train_batch_size=128.* 64 training prompts"):
        run(tmp_path, tiny_model, **too_many)
    with pytest.raises(SystemExit, match=r"error: .*data\.train_files.*absent\.parquet"):
        train(compose(overrides(task | {"data.train_files": "absent.parquet"}, tiny_model, tmp_path / "out")))


def test_a_reward_function_that_gives_no_rewards_is_found_before_the_workers(tmp_path: Path, tiny_model: Path) -> None:
    task = write_task(tmp_path)
    for returned in ("None", "'1.0'"):
        (tmp_path / "reward.py").write_text(f"def compute_score(**arguments): return {returned}\n")
        message = rf"(?s)reward\.py, name=compute_score: tried with row 0 .*2 of 2 calls failed.* not {returned} \("
        with pytest.raises(SystemExit, match=message):
            train(compose(overrides(task, tiny_model, tmp_path / "out")))


def test_validation_only_trains_nothing(tmp_path: Path, tiny_model: Path) -> None:
    settings = {"trainer.val_only": True, "actor_rollout_ref.rollout.val_kwargs.n": 2}
    settings["actor_rollout_ref.rollout.val_kwargs.do_sample"] = True
    settings["actor_rollout_ref.rollout.val_kwargs.temperature"] = 1.0
    (record,) = run(tmp_path, tiny_model, **settings)
    assert "val-core/sevens/acc/mean@2" in record and "actor/pg_loss" not in record


@pytest.mark.parametrize("rollout", ["hf"])
def test_one_rank_and_two_make_the_same_run(tmp_path: Path, tiny_model: Path, rollout: str) -> None:
    """Same rollouts (a seed per request), same denominators, same update: the metrics agree to rounding."""
    settings = {
        "actor_rollout_ref.rollout.name": rollout,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 4,
        "actor_rollout_ref.actor.optim.eps": 1e-3,
        "trainer.total_training_steps": 2,
    }
    one = run(tmp_path, tiny_model, "one", **settings)
    on_ray = {"trainer.launcher": "ray", "trainer.n_gpus_per_node": 2}
    result = main_ppo(overrides(write_task(tmp_path), tiny_model, tmp_path / "two", **settings, **on_ray))
    assert result.returncode == 0, result.stdout
    for single, double in zip(one, metrics_of(tmp_path / "two"), strict=True):
        for name in ("critic/score/mean", "response_length/mean", "actor/entropy", "actor/pg_loss", "actor/grad_norm"):
            assert double[name] == pytest.approx(single[name], rel=2e-4, abs=1e-6), name


@pytest.mark.parametrize(
    ("estimator", "loss"),
    [
        ("rloo", "cispo"),
        ("dr_grpo", "gspo"),
        ("opo", "gspo_token"),
        ("lite_ppo", "geo_mean"),
        ("maxrl", "sapo"),
        ("grpo_passk", "policy_gradient"),
        ("gpg", "gpg"),
        ("reinforce", "dro"),
        ("reinforce_plus_plus", "clip_cov"),
        ("grpo", "kl_cov"),
        ("grpo", "dppo_tv"),
        ("grpo", "dppo_kl"),
        ("rloo", "luspo"),
        ("grpo", "vespo"),
        ("reinforce", "topr"),
        ("grpo", "kimi"),
        ("reinforce_plus_plus_baseline", "vanilla"),
    ],
)
def test_the_menu_trains(tmp_path: Path, tiny_model: Path, estimator: str, loss: str) -> None:
    settings = {
        "algorithm.adv_estimator": estimator,
        "actor_rollout_ref.actor.policy_loss.loss_mode": loss,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 4,
        "trainer.total_training_steps": 2,
    }
    records = run(tmp_path, tiny_model, **settings)
    assert len(records) == 2
    assert all(record["actor/grad_norm"] > 0 and record["actor/skipped_steps"] == 0 for record in records)


def test_options_of_the_update_together(tmp_path: Path, tiny_model: Path) -> None:
    """Everything the driver prepares and the objective adds, in one real run of two mini-batches a step."""
    actor = "actor_rollout_ref.actor"
    settings = {
        f"{actor}.policy_loss.loss_mode": "kl_cov",
        f"{actor}.ppo_mini_batch_size": 4,
        f"{actor}.sft_loss_coef": 0.1,
        f"{actor}.rl_loss_coef": 0.5,
        f"{actor}.sample_weight.length": True,
        f"{actor}.ratio_skip_threshold": 20.0,
        f"{actor}.mask_truncated": True,
        f"{actor}.use_kl_loss": True,
        f"{actor}.use_unbiased_kl": True,
        f"{actor}.optim.l2_coeff": 1e-4,
        f"{actor}.optim.weight_decay": 0.0,
        "trainer.total_training_steps": 2,
    }
    for record in run(tmp_path, tiny_model, **settings):
        assert record["actor/selected_frac"] > 0 and record["actor/skip_ratio"] == 0
        assert record["actor/sft_loss"] >= 0 and record["actor/kl_loss"] >= 0 and record["actor/grad_norm"] > 0


def test_a_step_whose_responses_were_all_cut_off_trains_nothing(tmp_path: Path, tiny_model: Path) -> None:
    settings = {
        **WITH_WEIGHTS,
        "actor_rollout_ref.actor.mask_truncated": True,
        "actor_rollout_ref.actor.optim.lr": 1.0,  # any step would show
        "data.max_response_length": 1,
        "actor_rollout_ref.rollout.ignore_eos": True,
        "trainer.total_training_steps": 2,
        "trainer.save_freq": 1,
    }
    for record in run(tmp_path, tiny_model, **settings):
        assert record["actor/empty_minibatches"] >= 1 and "actor/grad_norm" not in record
    first, second = (weights_of(tmp_path / "out", step) for step in (1, 2))
    assert all(torch.equal(first[name], second[name]) for name in first)
