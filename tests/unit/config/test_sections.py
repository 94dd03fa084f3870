"""Dataclasses: defaults, ranges, enums, doc strings, the seed list, and the light import."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from verl_like.config import (
    ActorConfig,
    AlgorithmConfig,
    CheckpointConfig,
    DataConfig,
    OptimConfig,
    PolicyLossConfig,
    PPOConfig,
    RolloutConfig,
    Strategy,
    TrainerConfig,
    resolve_dtype,
)
from verl_like.config.schema import find_key, keys, sections, suggest

SEED_KEYS = Path(__file__).with_name("seed_keys.txt").read_text().split()


def test_import_is_light():
    code = "import sys, verl_like.config.rules, verl_like.config.batch_plan, verl_like.config.spellings;"
    code += "heavy = {'torch', 'omegaconf', 'hydra', 'ray', 'numpy'} & set(sys.modules); assert not heavy, heavy"
    root = Path(__file__).resolve().parents[3]
    subprocess.run([sys.executable, "-c", code], check=True, cwd=root)


@pytest.mark.parametrize("key", SEED_KEYS)
def test_seed_key_exists_or_is_an_alias(key):
    from verl_like.config.spellings import Change, canonical

    path = key.removesuffix(".*")
    (change,) = canonical([Change(path, "x")])[0]
    assert find_key(change.key) or change.key in sections(), key


def test_seed_list_is_complete():
    assert len(SEED_KEYS) == 217


def test_every_key_has_a_doc_string():
    assert [path for path, key in keys().items() if not key.doc] == []


def test_strings_become_enums_and_wrong_ones_name_the_choices():
    assert ActorConfig(strategy="fsdp2").strategy is Strategy.fsdp2  # pyright: ignore
    with pytest.raises(ValueError, match=r"strategy='deepspeed': choose one of fsdp2, megatron"):
        ActorConfig(strategy="deepspeed")  # pyright: ignore


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: ActorConfig(clip_ratio=-0.1), r"clip_ratio=-0.1: must be at least 0"),
        (lambda: ActorConfig(grad_clip=0), r"grad_clip=0: must be above 0"),
        (lambda: ActorConfig(clip_ratio_c=1.0), r"clip_ratio_c=1.0: must be above 1"),
        (lambda: ActorConfig(loss_agg_mode="mean"), r"loss_agg_mode='mean': choose one of token-mean"),
        (lambda: ActorConfig(ppo_micro_batch_size=8, ppo_micro_batch_size_per_gpu=2), r"remove ppo_micro_batch_size"),
        (lambda: OptimConfig(betas=[0.9]), r"betas=\[0.9\]: give two numbers"),
        (lambda: OptimConfig(lr=float("nan")), r"lr=nan"),
        (lambda: OptimConfig(lr_warmup_steps_ratio=1.5), r"lr_warmup_steps_ratio=1.5: must lie between 0 and 1"),
        (lambda: DataConfig(train_files=[]), r"train_files=\[\]: give at least one"),
        (lambda: DataConfig(train_max_samples=0), r"train_max_samples=0: must be -1"),
        (lambda: RolloutConfig(top_k=0), r"top_k=0: must be -1"),
        (lambda: RolloutConfig(top_p=0.0), r"top_p=0.0: must be above 0"),
        (lambda: RolloutConfig(min_p=1.5), r"min_p=1.5: must lie between 0 and 1"),
        (lambda: RolloutConfig(repetition_penalty=0.0), r"repetition_penalty=0.0: must be above 0"),
        (lambda: RolloutConfig(presence_penalty=3.0), r"presence_penalty=3.0: must lie between -2 and 2"),
        (lambda: RolloutConfig(min_tokens=600), r"min_tokens=600: must lie between 0 and 512"),
        (lambda: RolloutConfig(stop=["a", ""]), r"stop=\['a', ''\]: an empty text"),
        (lambda: RolloutConfig(stop_token_ids=[-1]), r"stop_token_ids=\[-1\]: ids are 0 or more"),
        (lambda: RolloutConfig(temperature=0.0), r"temperature=0.0: must be above 0"),
        (lambda: RolloutConfig(max_model_len=100), r"max_model_len=100: must hold prompt_length .* = 1024"),
        (lambda: RolloutConfig(mode="both"), r"mode='both': choose one of sync, async"),
        (lambda: TrainerConfig(n_gpus_per_node="all"), r"n_gpus_per_node='all': must be auto"),
        (lambda: TrainerConfig(n_gpus_per_node=0), r"n_gpus_per_node=0: must be auto"),
        (
            lambda: TrainerConfig(logger=["clearml"]),
            r"logger=\['clearml'\]: unknown .* choose from console",
        ),
        (
            lambda: TrainerConfig(logger_kwargs={"console": {}}),
            r"={'console': {}}: .*console and jsonl take none",
        ),
        (
            lambda: TrainerConfig(logger_kwargs={"wandb": "a"}),
            r"logger_kwargs={'wandb': 'a'}: write {tracker: ",
        ),
        (
            lambda: TrainerConfig(health={"skiped_updates": "stop"}),
            r"health='skiped_updates': no such rule, did you mean skipped_updates\?; the rules: mismatch_drift, .*",
        ),
        (
            lambda: TrainerConfig(health={"clip_storm": "halt"}),
            r"health.clip_storm='halt': choose one of warn, stop, off",
        ),
        (lambda: TrainerConfig(worker_nsight_options={"trase": "cuda"}), r"unknown \['trase'\]"),
        (lambda: CheckpointConfig(save_contents=["weights"]), r"unknown \['weights'\]"),
    ],
)
def test_a_value_out_of_range_names_key_value_and_fix(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_defaults_that_depart_from_verl():
    config = PPOConfig()
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    assert (actor.strategy, actor.use_dynamic_bsz, actor.clip_ratio_low) == ("fsdp2", None, None)
    assert (rollout.tensor_model_parallel_size, rollout.enforce_eager) == (1, False)
    assert (config.trainer.logger, config.trainer.n_gpus_per_node, config.trainer.device) == (
        ["console"], "auto", "auto")  # fmt: skip


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("actor_rollout_ref.rollout.temprature", "actor_rollout_ref.rollout.temperature"),
        ("actor_rollout_ref.rollout.N", "actor_rollout_ref.rollout.n"),
        ("rollout.gpu_memory_utilization", "actor_rollout_ref.rollout.gpu_memory_utilization"),
        ("model.path", "actor_rollout_ref.model.path"),
        ("actor_rollout_ref.actor.lr", "actor_rollout_ref.actor.optim.lr"),
        ("trainer.gpus", "trainer.n_gpus_per_node"),
        ("data.kl_coef", "algorithm.kl_ctrl.kl_coef"),
        ("actor_rolout_ref.rollout.temperatur", "actor_rollout_ref.rollout.temperature"),
        ("actor_rollout_ref.actor.profiler.enabled", "actor_rollout_ref.actor.profiler.enable"),
        ("reward_model.path", "reward_model.model.path"),
        ("actor_rollout_ref.actor.loss_mode", "actor_rollout_ref.actor.policy_loss.loss_mode"),
        ("use_remove_padding", "actor_rollout_ref.model.use_remove_padding"),
    ],
)
def test_did_you_mean(typed, meant):
    assert suggest(typed) == f"; did you mean {meant}?"


@pytest.mark.parametrize(
    ("make", "typed", "meant"),
    [
        (AlgorithmConfig, "GRPO", "grpo"),
        (AlgorithmConfig, "AdvantageEstimator.GRPO", "grpo"),
        (AlgorithmConfig, "ppo", "gae"),
        (AlgorithmConfig, "reinforce++", "reinforce_plus_plus"),
        (AlgorithmConfig, "REINFORCE++-baseline", "reinforce_plus_plus_baseline"),
        (PolicyLossConfig, "GSPO", "gspo"),
        (PolicyLossConfig, "ppo", "vanilla"),
        (PolicyLossConfig, "dapo", "vanilla"),
    ],
)
def test_a_name_of_a_menu_in_other_letters_or_of_a_whole_algorithm(make, typed, meant):
    with pytest.raises(ValueError, match=f"Did you mean '{meant}'"):
        make(**{"adv_estimator" if make is AlgorithmConfig else "loss_mode": typed})


@pytest.mark.parametrize("typed", ["my.py", "my.py:", "pkg://mine"])
def test_a_file_without_a_name_is_told_what_it_lacks(typed):
    with pytest.raises(ValueError, match=rf"'{re.escape(typed)}': it names a file .* add what it holds behind a colon"):
        AlgorithmConfig(adv_estimator=typed)


@pytest.mark.parametrize(
    "typed",
    [
        "actor_rollout_ref.ref.router.enable",
        "reward_model.model.type",
        "environment.train.seed",
        "actor_rollout_ref.rollout.seed",
        "actor_rollout_ref.actor.fsdp_config.tool_config.contents",
        "critic.model.tiled.method",
    ],
)
def test_a_word_in_common_is_no_suggestion(typed):
    assert "did you mean" not in suggest(typed)


def test_nothing_near_points_to_the_list():
    assert "docs/configuration.md" in suggest("qqqqqq.zzzzzz")
    assert "docs/configuration.md" in suggest("trainer.foo")  # `trainer` is right; saying it again would not help


def test_auto_dtype():
    assert resolve_dtype("auto", "cuda") == "bfloat16"
    assert resolve_dtype("auto", "cpu") == "float32"
    assert resolve_dtype("float16", "cpu") == "float16"
