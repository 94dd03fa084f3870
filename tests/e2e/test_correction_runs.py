"""Rollout correction, ReMax and the optimal token baseline in whole runs of one process, with a planted mismatch."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from support import metrics_of, overrides, write_task

from verl_like.batch import Rollouts
from verl_like.episodes import collector
from verl_like.trainer.compose import compose
from verl_like.trainer.run import run as train

S, A = "algorithm.rollout_correction", "actor_rollout_ref.actor"
SHIFT = 0.3


def run(folder: Path, model: Path, name: str = "out", **settings: Any) -> list[dict[str, float]]:
    settings = {"data.train_batch_size": 4, f"{A}.ppo_mini_batch_size": 4, "trainer.total_training_steps": 1} | settings
    train(compose(overrides(write_task(folder), model, folder / name, **settings)))
    return metrics_of(folder / name)


@pytest.fixture
def shifted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted fault: the rollout engine reports log-probs that are SHIFT too high."""
    honest = collector.assemble_rollouts

    def assemble(*arguments: Any) -> Rollouts:
        rollouts = honest(*arguments)
        assert rollouts.rollout_log_probs_BR is not None
        off = rollouts.rollout_log_probs_BR + SHIFT * rollouts.response_mask_BR
        return rollouts.replace(rollout_log_probs_BR=off)

    monkeypatch.setattr(collector, "assemble_rollouts", assemble)


def test_engines_that_agree_need_no_correction(tmp_path: Path, tiny_model: Path) -> None:
    """Token weights and rejections of an honest engine change nothing, with and without a pass of old log-probs."""
    (plain,) = run(tmp_path, tiny_model, "plain")
    (inside,) = run(tmp_path, tiny_model, "inside", **{f"{S}.preset": "decoupled_token_is"})
    (passed,) = run(tmp_path, tiny_model, "passed", **{f"{S}.preset": "decoupled_geo_rs_token_tis"})
    assert "timing_s/old_log_prob" not in plain and "timing_s/old_log_prob" not in inside
    assert passed["timing_s/old_log_prob"] > 0
    for record in (plain, inside, passed):
        assert abs(record["rollout_corr/kl"]) < 1e-5 and record["training/rollout_probs_diff_max"] < 1e-4
        assert record["rollout_corr/eff_sample_size"] == pytest.approx(1)
        for name in ("actor/pg_loss", "actor/grad_norm"):
            assert record[name] == pytest.approx(plain[name], rel=1e-3, abs=1e-6)
        for name in (name for name in plain if name.startswith(("rollout_corr/", "training/rollout"))):
            assert record[name] == pytest.approx(plain[name], abs=1e-4), name  # measured by update and driver alike
    assert passed["rollout_corr/rollout_rs_masked_fraction"] == 0
    assert inside["rollout_corr/rollout_is_mean"] == pytest.approx(1, abs=1e-4)


@pytest.mark.usefixtures("shifted")
def test_a_shifted_engine_is_seen_and_corrected(tmp_path: Path, tiny_model: Path) -> None:
    (plain,) = run(tmp_path, tiny_model, "plain")
    (weighted,) = run(tmp_path, tiny_model, "weighted", **{f"{S}.rollout_is": "token"})
    normed = {f"{S}.rollout_is": "token", f"{S}.rollout_is_batch_normalize": True}
    (normalised,) = run(tmp_path, tiny_model, "normalised", **normed)
    normed |= {f"{S}.bypass_mode": True, f"{S}.loss_type": "reinforce"}
    (two_policies,) = run(tmp_path, tiny_model, "two_policies", **normed)
    for record in (plain, weighted, normalised, two_policies):
        assert record["rollout_corr/kl"] == pytest.approx(SHIFT, abs=1e-4)
        assert record["rollout_corr/ppl_ratio"] == pytest.approx(math.exp(SHIFT), abs=1e-3)
    factor = math.exp(-SHIFT)
    assert weighted["rollout_corr/rollout_is_mean"] == pytest.approx(factor, abs=1e-4)
    assert weighted["actor/grad_norm"] == pytest.approx(factor * plain["actor/grad_norm"], rel=1e-3)
    for record in (normalised, two_policies):
        assert record["rollout_corr/rollout_is_batch_norm_factor"] == pytest.approx(factor, abs=1e-4)
        assert record["actor/grad_norm"] == pytest.approx(plain["actor/grad_norm"], rel=1e-3)
    with pytest.raises(ValueError, match=r"rejected all \d+ sampled tokens \(rollout_rs=seq_mean_k1"):
        run(tmp_path, tiny_model, "rejected", **{f"{S}.preset": "decoupled_geo_rs"})


def test_rejected_rows_go_through_actor_and_critic(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of four prompts all responses but the first's are rejected: rows of the first mini-batch, all of the second."""
    honest = collector.assemble_rollouts

    def assemble(*arguments: Any) -> Rollouts:
        rollouts = honest(*arguments)
        assert rollouts.rollout_log_probs_BR is not None
        off_BR = rollouts.response_mask_BR & (rollouts.group_B > rollouts.group_B.min())[:, None]
        return rollouts.replace(rollout_log_probs_BR=rollouts.rollout_log_probs_BR + SHIFT * off_BR)

    monkeypatch.setattr(collector, "assemble_rollouts", assemble)
    settings = {
        f"{S}.rollout_rs": "seq_mean_k1",
        f"{S}.rollout_rs_threshold": 1.1,
        f"{A}.loss_agg_mode": "seq-mean-token-mean",
        f"{A}.ppo_mini_batch_size": 2,
        "algorithm.adv_estimator": "gae",
    }
    (record,) = run(tmp_path, tiny_model, **settings)
    assert record["rollout_corr/rollout_rs_seq_dropped_fraction"] == 0.75
    assert record["actor/empty_minibatches"] == record["critic/empty_minibatches"] == 1
    assert record["actor/grad_norm"] > 0 and record["critic/vf_loss"] > 0


@pytest.mark.parametrize("preset", ["bypass_ppo_clip_k3_rs", "bypass_pg_is"])
def test_bypass_mode_runs_no_pass_of_its_own(tmp_path: Path, tiny_model: Path, preset: str) -> None:
    """Two updates a step: the engines are compared at the first, on the policy that sampled; the second has moved."""
    settings = {f"{S}.preset": preset, f"{A}.ppo_mini_batch_size": 2, "trainer.total_training_steps": 2}
    for record in run(tmp_path, tiny_model, **settings):
        assert "timing_s/old_log_prob" not in record
        assert abs(record["rollout_corr/kl"]) < 1e-5 and record["training/rollout_probs_diff_max"] < 1e-4
        assert abs(record["actor/ppo_kl"]) > 1e-4
        assert record["actor/grad_norm"] > 0
        assert ("rollout_corr/rollout_is_mean" in record) == (preset == "bypass_pg_is")
        assert "rollout_corr/rollout_rs_masked_fraction" in record


def test_remax_compares_with_the_greedy_response(tmp_path: Path, tiny_model: Path) -> None:
    settings = {
        "algorithm.adv_estimator": "remax",
        "actor_rollout_ref.rollout.n": 2,
        "data.train_batch_size": 16,
        f"{A}.ppo_mini_batch_size": 16,
        "trainer.total_training_steps": 6,
    }
    records = run(tmp_path, tiny_model, **settings)
    for record in records:
        assert record["remax/response_length/mean"] > 0 and record["remax/failures"] == 0
        difference = record["critic/score/mean"] - record["critic/baseline/mean"]
        assert record["critic/advantages/max"] >= difference >= record["critic/advantages/min"]
        # 16 prompts x 2 responses of at most 14 tokens, and not a greedy one among them
        assert record["perf/total_num_tokens"] <= 32 * 14
        for phase in ("gen", "update_actor", "update_weights"):
            assert record[f"perf/memory_forecast/{phase}"] > 0 and record[f"perf/memory_peak/{phase}"] > 0
    assert records[0]["critic/score/mean"] < records[-1]["critic/score/mean"]


@pytest.mark.parametrize("estimator", ["optimal_token_baseline", "tir_optimal_token_baseline"])
def test_the_optimal_token_baseline_learns(tmp_path: Path, tiny_model: Path, estimator: str) -> None:
    settings = {
        "algorithm.adv_estimator": estimator,
        "data.train_batch_size": 8,
        f"{A}.ppo_mini_batch_size": 8,
        "trainer.total_training_steps": 5,
    }
    records = run(tmp_path, tiny_model, **settings)
    assert all(record["timing_s/old_log_prob"] > 0 for record in records)  # the pass that gives sums of squares
    assert records[-1]["critic/score/mean"] > records[0]["critic/score/mean"]


def test_quantised_responses_are_proved_and_weighed(tmp_path: Path, tiny_model: Path) -> None:
    """8-bit weights sample from slightly other probabilities, in every step alike: weights stay near 1."""
    quantised = {"actor_rollout_ref.rollout.quantization": "int8", f"{S}.rollout_is": "token"}
    records = run(tmp_path, tiny_model, **quantised, **{"trainer.total_training_steps": 3})
    for record in records:
        assert 1e-5 < record["training/rollout_probs_diff_max"] < 0.05
        assert record["rollout_corr/rollout_is_mean"] == pytest.approx(1, abs=0.02)
        assert record["weight_sync/probe_gap"] > 1e-5
    assert records[-1]["training/rollout_probs_diff_mean"] < 3 * records[0]["training/rollout_probs_diff_mean"]


def test_fp8_is_refused_on_a_cpu_before_anything_starts(tmp_path: Path, tiny_model: Path) -> None:
    settings = {"actor_rollout_ref.rollout.quantization": "fp8", "actor_rollout_ref.rollout.name": "vllm"}
    with pytest.raises(SystemExit, match=r"rollout.quantization=fp8 on device cpu: vLLM's kernels for 8-bit floats"):
        run(tmp_path, tiny_model, **settings, **{f"{S}.rollout_is": "token"})
