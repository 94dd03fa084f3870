"""Which difference of two recorded steps is told, and under which phase."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from verl_like.config.batch_plan import BatchPlan
from verl_like.config.roles import roles_of
from verl_like.config.schema import to_dict
from verl_like.kit.replaying import Difference, _of_metrics, _of_step, replay_config
from verl_like.trainer.compose import compose
from verl_like.trainer.recording import Recorded


def recorded(weights: dict[str, dict[str, int]], **columns: Any) -> Recorded:
    return Recorded(
        columns={key.replace("__", "."): value for key, value in columns.items()}, facts={"weights": weights}
    )


def differing(first: Recorded, second: Recorded) -> list[Difference]:
    return [each for each in _of_step(1, first, second, 0.0) if not each.same]


def test_what_only_the_second_run_has_is_told_in_the_order_of_a_step() -> None:
    one, other = torch.ones(2), torch.zeros(2)
    plain = recorded({"actor": {"w": 1}}, rollouts__x_B=one, experience__advantages_T=one)
    with_reference = recorded(
        {"actor": {"w": 1}}, rollouts__x_B=one, evaluated__ref_log_probs_T=one, experience__advantages_T=other
    )
    for pair in ((plain, with_reference), (with_reference, plain)):
        assert [each.phase for each in differing(*pair)] == ["evaluated", "experience"]
    first = differing(plain, with_reference)[0]
    assert (first.where, first.first, first.second) == ("ref_log_probs_T", "not there", "2 entries")


def test_roles_and_tensors_that_one_run_has_alone_differ() -> None:
    actor = {"actor": {"w": 1}}
    critic = {**actor, "critic": {"v": 2}}
    for pair in ((actor, critic), (critic, actor)):
        (found,) = differing(*map(recorded, pair))
        assert (
            found.phase == "weights"
            and found.where.startswith("critic: v")
            and "not there"
            in (
                found.first,
                found.second,
            )
        )
    (found,) = differing(recorded(actor), recorded({"actor": {"w": 1, "lora": 3}}))
    assert found.where.startswith("actor: lora")


def test_a_number_that_is_none_is_another_than_one_that_is() -> None:
    """metrics.jsonl has null for it; a step made again has the number itself."""
    spoilt, well = {"actor/grad_norm": None, "actor/lr": 1.0}, {"actor/grad_norm": 0.5, "actor/lr": 1.0}
    for pair in ((spoilt, well), (well, spoilt)):
        assert [each.where for each in _of_metrics(1, *pair, 1e-4) if not each.same] == ["actor/grad_norm"]
    for again in (math.nan, math.inf):
        assert all(each.same for each in _of_metrics(1, spoilt, {"actor/grad_norm": again, "actor/lr": 1.0}, 1e-4))


@pytest.mark.parametrize("axis", ["tensor", "context", "expert", "pipeline"])
def test_a_run_of_any_axis_replays_in_one_process(axis: str, tmp_path: Path) -> None:
    size = f"fsdp_config.{axis}_parallel_size=2"
    keys = ["data.train_files=t.parquet", "trainer.n_gpus_per_node=2", "algorithm.adv_estimator=gae"]
    run = compose([*keys, f"actor_rollout_ref.actor.{size}", f"actor_rollout_ref.ref.{size}", f"critic.model.{size}"])
    assert any([*role.mesh(1).problems()] for role in roles_of(run).values())
    OmegaConf.save(OmegaConf.create(to_dict(run)), tmp_path / "config.yaml")
    config = replay_config(tmp_path, 1, [], str(tmp_path / "out"))
    for role in roles_of(config).values():
        assert [*role.mesh(1).problems()] == []
    BatchPlan.build(config, 1)


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ({}, "recompute"),
        ({"actor_rollout_ref.actor.old_log_probs": "rollout"}, "rollout"),
        ({"algorithm.rollout_correction.bypass_mode": True}, "auto"),  # that is the sampler's
    ],
)
def test_an_asynchronous_run_replays_as_it_was(own: dict[str, object], expected: str, tmp_path: Path) -> None:
    """Without an engine, and with the log-probs that the mode asks for: one update could else take its own."""
    settings = {"data.train_files": "t.parquet", "trainer.mode": "colocate_async", "async_training.max_staleness": 1}
    settings |= {"data.train_batch_size": 64, "actor_rollout_ref.actor.ppo_mini_batch_size": 64} | own
    run = compose([f"{key}={value}" for key, value in settings.items()])
    OmegaConf.save(OmegaConf.create(to_dict(run)), tmp_path / "config.yaml")
    config = replay_config(tmp_path, 1, [], str(tmp_path / "out"))
    assert (config.trainer.mode, config.actor_rollout_ref.actor.old_log_probs) == ("sync", expected)
    assert BatchPlan.build(config, 1).old_log_probs == BatchPlan.build(run, 1).old_log_probs
    if expected == "recompute":  # what the command line asks for wins
        config = replay_config(tmp_path, 1, ["algorithm.rollout_correction.bypass_mode=true"], str(tmp_path / "out"))
        assert config.actor_rollout_ref.actor.old_log_probs == "auto"
