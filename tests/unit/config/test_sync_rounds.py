"""What verl's fully_async_main and one_step_off_policy ask for: prompts of a step and its number, mode, correction."""

from __future__ import annotations

from typing import Any

import pytest

from verl_like.config import PPOConfig
from verl_like.config.errors import ConfigError
from verl_like.config.spellings import Change, canonical
from verl_like.trainer.command_line import run_main

ROUNDS = {"async_training.trigger_parameter_sync_step": 4, "async_training.require_batches": "2"}
MINI, TOTAL = "actor_rollout_ref.actor.ppo_mini_batch_size", "rollout.total_rollout_steps"
BYPASS = "algorithm.rollout_correction.bypass_mode"


def settings(**typed: Any) -> tuple[dict[str, Any], list[str]]:
    changes, warnings = canonical([Change(key, value) for key, value in typed.items()])
    return {each.key: each.value for each in changes}, warnings


def test_a_step_trains_what_lies_between_two_syncs_and_the_prompts_of_the_run_are_counted() -> None:
    found, (line,) = settings(**ROUNDS, **{MINI: 32, TOTAL: 2600, "data.train_batch_size": 0})
    assert found == {
        "trainer.mode": "separate_async",
        "actor_rollout_ref.hybrid_engine": False,
        BYPASS: True,
        "data.train_batch_size": 256,
        "trainer.total_training_steps": 10,
        MINI: 32,
    }
    assert "rollout.total_rollout_steps=2600, async_training.require_batches=2" in line
    assert "this sets trainer.mode=separate_async" in line and "data.train_batch_size=256" in line


def test_what_is_given_stands() -> None:
    own = {BYPASS: False, "trainer.v1.trainer_mode": "separate_async", "trainer.total_training_steps": 7}
    found, _ = settings(**{TOTAL: 640}, **own)
    assert (found[BYPASS], found["trainer.total_training_steps"], found["data.train_batch_size"]) == (False, 7, 1024)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("data.train_batch_size", 64),
        ("trainer.mode", "colocate_async"),
        ("trainer.mode", "sync"),
        ("actor_rollout_ref.hybrid_engine", "True"),
    ],
)
def test_beside_what_that_program_would_not_run_with_nothing_but_the_length_changes(key: str, value: Any) -> None:
    found, (line,) = settings(**{TOTAL: 2048}, **ROUNDS, **{key: value})
    steps = 2048 // (64 if key == "data.train_batch_size" else 1024)
    assert found == {key: value, "trainer.total_training_steps": steps} and f"beside {key}={value}: " in line
    assert settings(**ROUNDS, **{key: value})[0] == {key: value}


def test_verls_defaults_of_rounds_fill_in_and_no_round_is_no_change() -> None:
    assert settings(**{TOTAL: 1, MINI: "8"})[0]["data.train_batch_size"] == 32
    assert settings(**{TOTAL: 1, MINI: "8"})[0]["trainer.total_training_steps"] == 1
    assert settings(**{MINI: 8}) == ({MINI: 8}, [])


@pytest.mark.parametrize("key", [*ROUNDS, TOTAL])
@pytest.mark.parametrize("value", [0, -1, "many"])
def test_what_is_no_number_above_0_is_refused_by_name(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{key}={value}: give a whole number above 0"):
        settings(**{key: value})


def test_null_is_not_given() -> None:
    assert settings(**dict.fromkeys((*ROUNDS, TOTAL))) == ({}, [])


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("fully_async_ppo_trainer", ("separate_async", 4 * 64, 0.1, 4)),
        ("fully_async_ppo_megatron_trainer.yaml", ("separate_async", 4 * 64, 0.1, 4)),
        ("one_step_off_ppo_megatron_trainer", ("separate_async", 1024, 1.0, 1)),
    ],
)
def test_verls_own_files_of_these_programs_are_known_by_name(name: str, expected: tuple[Any, ...]) -> None:
    seen: list[PPOConfig] = []
    run_main(seen.append, ["--config-path=config", f"--config-name={name}", f"{MINI}=64", "data.shuffle=False"])
    (config,) = seen
    own = config.async_training
    found = (config.trainer.mode, config.data.train_batch_size, own.over_sample_rate, own.max_staleness)
    assert found == expected and config.algorithm.rollout_correction.bypass_mode
    assert not config.actor_rollout_ref.hybrid_engine and config.actor_rollout_ref.rollout.n_gpus_per_node == 8
