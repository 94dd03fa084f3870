"""algorithm.rollout_correction: bounds, presets, spellings, which passes they need, what is idle or refused."""

from __future__ import annotations

import re
from typing import Any

import pytest

from verl_like.config import RolloutCorrectionConfig
from verl_like.config.batch_plan import BatchPlan
from verl_like.config.correction import Bounds, Rejection, parse_rejections, weight_bounds
from verl_like.config.spellings import Change, correction_spellings, presets
from verl_like.trainer.compose import compose, compose_with_warnings

INT8 = "actor_rollout_ref.rollout.quantization=int8"
S, A, R = "algorithm.rollout_correction", "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
GRPO = ["algorithm=grpo", f"{R}.n=2", "data.train_batch_size=256"]


def section(*overrides: str) -> RolloutCorrectionConfig:
    return compose([*GRPO, *overrides]).algorithm.rollout_correction


def plan(*overrides: str, updates: int = 1) -> str:
    size = f"{A}.ppo_mini_batch_size={256 // updates}"
    return BatchPlan.build(compose([*GRPO, size, *overrides]), 1).old_log_probs


def test_bounds_by_hand() -> None:
    assert weight_bounds(2) == Bounds(None, 2.0) and weight_bounds(None) == Bounds(None, None)
    assert weight_bounds("0.5_5.0") == Bounds(0.5, 5.0)
    assert parse_rejections("token_k1, seq_max_k2", "0.5_3,0.1") == (
        Rejection("token", "k1", Bounds(0.5, 3.0)),
        Rejection("seq_max", "k2", Bounds(None, 0.1)),
    )
    assert parse_rejections("seq_sum_k1,seq_mean_k1", 4) == (
        Rejection("seq_sum", "k1", Bounds(0.25, 4.0)),
        Rejection("seq_mean", "k1", Bounds(0.25, 4.0)),
    )
    assert parse_rejections("segment_mean_diff", "-0.2_0.3") == (Rejection("segment_mean", "diff", Bounds(-0.2, 0.3)),)
    assert parse_rejections(None, 3.0) == () == parse_rejections("", None)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rollout_is": "turn"}, "rollout_is='turn': choose one of token, segment, geometric, sequence"),
        ({"rollout_is_threshold": 0.55}, '"0.5_5.0"'),  # what YAML makes of 0.5_5
        ({"rollout_is_threshold": "2.0_5.0"}, "must enclose 1"),
        ({"rollout_is_threshold": "much"}, "rollout_is_threshold='much': write a number, or \"low_high\""),
        ({"rollout_rs": "token_k1"}, "rollout_rs_threshold=None: rollout_rs='token_k1' needs a bound"),
        ({"rollout_rs": "token_k4", "rollout_rs_threshold": 2.0}, "rollout_rs='token_k4': choose from"),
        ({"rollout_rs": "seq_max_k1", "rollout_rs_threshold": 2.0}, "rollout_rs='seq_max_k1'"),
        ({"rollout_rs": "token_k1", "rollout_rs_threshold": 0.5}, "one number of 1 or more"),
        ({"rollout_rs": "token_k2", "rollout_rs_threshold": "0.5_2.0"}, "token_k2 takes one upper bound"),
        ({"rollout_rs": "token_diff", "rollout_rs_threshold": 0.2}, "token_diff takes differences"),
        ({"rollout_rs": "token_k1,token_k2", "rollout_rs_threshold": "2,3,4"}, "one for each of the 2 options"),
        ({"rollout_token_veto_threshold": 0.0}, "must be above 0"),
        ({"loss_type": "ppo"}, "loss_type='ppo': choose one of ppo_clip, reinforce"),
    ],
)
def test_what_cannot_be_meant_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        RolloutCorrectionConfig(**settings)
    assert message in str(caught.value)


@pytest.mark.parametrize("name", presets())
def test_presets(name: str) -> None:
    found = section(f"{S}.preset={name}")
    assert {key: getattr(found, key) for key in presets()[name]} == presets()[name]
    assert found.bypass_mode == name.startswith("bypass")
    assert (found.rollout_is is None) == (not name.endswith(("_is", "_tis", "_is_rs", "_icepop")))
    assert (found.rollout_rs is None) == ("_rs" not in name)


def test_a_later_setting_wins_over_a_preset_and_a_later_preset_over_everything() -> None:
    assert section(f"{S}.preset=decoupled_seq_is_rs", f"{S}.rollout_is_threshold=5").rollout_is_threshold == 5
    config, warnings = compose_with_warnings([*GRPO, f"{S}.rollout_is_threshold=5", f"{S}.preset=decoupled_seq_is_rs"])
    assert config.algorithm.rollout_correction.rollout_is_threshold == 2.0
    assert any("overrides" in line and "rollout_is_threshold=5" in line for line in warnings)
    both = section(f"{S}.preset=bypass_pg_geo_rs", f"{S}.preset=decoupled_token_is")
    assert both == RolloutCorrectionConfig(rollout_is="token")
    with pytest.raises(ValueError, match=r"preset=token_is: choose one of disabled, decoupled_token_is"):
        section(f"{S}.preset=token_is")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({f"{A}.tis_imp_ratio_cap": 3.0}, {"rollout_is": "token", "rollout_is_threshold": 3.0}),
        ({f"{A}.tis_imp_ratio_cap": -1}, {}),
        ({f"{S}.use_policy_gradient": True}, {"loss_type": "reinforce"}),
        (
            {f"{S}.rollout_rs": "sequence", f"{S}.rollout_rs_threshold": 2.0},
            {"rollout_rs": "seq_sum_k1", "rollout_rs_threshold": 2.0},
        ),
        (  # verl 0.6 bounds trainer / sampler, k1 bounds sampler / trainer
            {f"{S}.rollout_rs": "geometric", f"{S}.rollout_rs_threshold": 2.0, f"{S}.rollout_rs_threshold_lower": 0.8},
            {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.5_1.25"},
        ),
        (
            {f"{S}.rollout_rs": ["token_k1", "seq_max_k2"], f"{S}.rollout_rs_threshold": ["0.5_2.0", 3]},
            {"rollout_rs": "token_k1,seq_max_k2", "rollout_rs_threshold": "0.5_2.0,3"},
        ),
        (  # ROLL
            {
                "algorithm.train_infer_correction.is_weight.enabled": True,
                "algorithm.train_infer_correction.is_weight.weight_type": "segment",
                "algorithm.train_infer_correction.filters": [
                    {"enabled": True, "agg_type": "sequence", "ratio_low": 0.5, "ratio_high": 4.0},
                    {"enabled": True, "ratio_enabled": False, "diff_enabled": True},
                    {"enabled": False, "agg_type": "geometric"},
                ],
            },
            {
                "rollout_is": "segment",
                "rollout_is_threshold": 1.2,
                "rollout_rs": "seq_sum_k1,token_diff",
                "rollout_rs_threshold": "0.25_2.0,-0.2_0.2",
            },
        ),
    ],
)
def test_other_spellings(old: dict[str, Any], new: dict[str, Any]) -> None:
    changes, _ = correction_spellings([Change(key, value) for key, value in old.items()])
    assert {change.key.removeprefix(f"{S}."): change.value for change in changes} == new
    RolloutCorrectionConfig(**new)


def test_which_old_log_probs_a_correction_needs() -> None:
    """A pass only where it changes something: weights alone are the same inside the one update."""
    assert plan() == "detach" and plan(updates=2) == "recompute"
    assert plan(f"{S}.preset=decoupled_token_is") == "detach"
    assert plan(f"{S}.preset=decoupled_token_is", updates=2) == "recompute"
    assert plan(f"{S}.preset=decoupled_geo_rs") == "recompute"
    assert plan(f"{S}.rollout_token_veto_threshold=1e-4") == "recompute"
    assert plan(f"{S}.preset=decoupled_token_is", f"{S}.rollout_is_batch_normalize=true") == "recompute"
    assert plan("algorithm.adv_estimator=optimal_token_baseline") == "recompute"
    assert plan(f"{S}.bypass_mode=true", updates=4) == plan(f"{A}.old_log_probs=rollout", updates=4) == "rollout"
    for overrides, message in (
        ([f"{A}.old_log_probs=detach", f"{S}.preset=decoupled_geo_rs"], "a rejection of algorithm.rollout_correction"),
        (
            ["algorithm.adv_estimator=optimal_token_baseline", f"{S}.bypass_mode=true"],
            "needs the trainer's probabilities",
        ),
        ([f"{A}.old_log_probs=recompute", f"{S}.bypass_mode=true"], "bypass_mode=True with .*old_log_probs=recompute"),
    ):
        with pytest.raises(ValueError, match=message):
            plan(*overrides)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([f"{S}.rollout_is_threshold=3"], "rollout_is_threshold has no effect in this run"),
        ([f"{S}.rollout_rs_threshold=3"], "rollout_rs_threshold has no effect in this run"),
        ([f"{S}.loss_type=reinforce"], "bypass_mode is false"),
        ([f"{S}.bypass_mode=true", f"{S}.rollout_is=token"], "the loss's own ratio is trainer / sampler"),
        ([f"{S}.preset=bypass_pg_is", f"{A}.policy_loss.loss_mode=gspo"], "loss_type=reinforce sets the loss"),
        ([f"{S}.preset=bypass_pg_is", f"{A}.clip_ratio=0.1"], "loss_mode does not read it"),
        ([f"{S}.preset=decoupled_token_is", f"{R}.top_p=0.9"], "every weight is below 1"),
        (["algorithm.adv_estimator=remax", "algorithm.reward_norm.mean=group"], "so it is a poor baseline"),
        (["algorithm.adv_estimator=remax", f"{R}.n=1", f"{R}.do_sample=false"], "every advantage 0"),
        (["algorithm.adv_estimator=remax", "algorithm.gamma=0.9"], "(read by gae, reinforce, reinforce_plus_plus)"),
        (["algorithm.adv_estimator=optimal_token_baseline", f"{R}.n=1"], "a group of one has nothing to compare with"),
    ],
)
def test_idle_and_risky_settings_warn(overrides: list[str], message: str) -> None:
    assert any(message in line for line in compose_with_warnings([*GRPO, *overrides])[1])


@pytest.mark.parametrize("name", presets())
def test_presets_compose_quietly(name: str) -> None:
    assert compose_with_warnings([*GRPO, f"{S}.preset={name}"])[1] == []


def test_a_whole_batch_mean_is_taken_before_the_update() -> None:
    """verl's only example of it: bypass mode with reinforce. Its weights are those of a pass on the driver."""
    normalised = [f"{S}.preset=bypass_pg_is", f"{S}.rollout_is_batch_normalize=true"]
    assert compose_with_warnings([*GRPO, *normalised])[1] == []
    assert plan(*normalised, updates=4) == plan(*normalised, f"{A}.old_log_probs=rollout") == "recompute"
    assert plan(f"{S}.preset=bypass_ppo_clip", f"{S}.rollout_is_batch_normalize=true") == "rollout"


def test_remax_alone_is_not_warned_about() -> None:
    assert not [line for line in compose_with_warnings([*GRPO, "algorithm.adv_estimator=remax"])[1] if "remax" in line]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([INT8, f"{R}.name=hf"], f"quantization=int8 with {S}.rollout_is=None: responses are sampled from other"),
        ([INT8, f"{R}.name=vllm", f"{S}.rollout_is=token"], "set name=hf, or quantization=null"),
        ([f"{R}.quantization=fp8", f"{R}.name=sglang", f"{S}.rollout_is=token"], "SGLang takes no weights after"),
        ([f"{R}.quantization=int4"], "quantization='int4': Did you mean 'int8'"),
        (
            [f"{R}.engine_kwargs.vllm.speculative_config={{method: eagle}}", f"{R}.name=vllm"],
            "a draft model would not follow the policy's",
        ),
        (
            [f"{R}.engine_kwargs.vllm.speculative_config={{method: ngram}}", f"{R}.name=vllm", f"{R}.min_p=0.1"],
            "rollout.min_p=0.1 with actor_rollout_ref.rollout.engine_kwargs.vllm.speculative_config={",
        ),
        (
            [
                f"{R}.engine_kwargs.vllm.speculative_config={{method: ngram, rejection_sample_method: synthetic}}",
                f"{R}.name=vllm",
            ],
            "rejection_sample_method=synthetic: it accepts at a rate of its own",
        ),
    ],
)
def test_what_engines_cannot_be_asked_for(overrides: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        compose([*GRPO, *overrides])


def test_quantised_rollout_composes_with_its_correction() -> None:
    assert (
        compose([*GRPO, INT8, f"{R}.name=hf", f"{S}.rollout_is=token"]).actor_rollout_ref.rollout.quantization == "int8"
    )
    compose([*GRPO, INT8, f"{R}.name=hf", f"{S}.bypass_mode=true"])
