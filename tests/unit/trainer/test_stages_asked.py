"""Stages that Megatron's pipeline keys ask for: had where a role can have them, else sharded by FSDP with a line."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.models import zoo
from verl_like.config.batch_plan import BatchPlan
from verl_like.config.errors import ConfigError
from verl_like.trainer.compose import compose_with_warnings

A, REF = "actor_rollout_ref.actor", "actor_rollout_ref.ref"
PIECES = "megatron.virtual_pipeline_model_parallel_size"
PIPE, TENSOR = "megatron.pipeline_model_parallel_size", "megatron.tensor_model_parallel_size"
BASE = (
    "data.train_files=t.parquet",
    "actor_rollout_ref.rollout.n=8",
    f"{A}.use_kl_loss=true",
    "trainer.n_gpus_per_node=8",
)
GRPO = (*BASE, "algorithm.adv_estimator=grpo")


EXPERT = "megatron.expert_model_parallel_size"
NOT_DIVIDED = "does not divide the {} processes of a stage: FSDP"


@pytest.mark.parametrize(
    ("asked", "sizes", "told"),
    [
        ((f"{A}.{PIPE}=2",), (2, 2), []),
        ((f"{A}.{PIPE}=2", f"{REF}.{PIPE}=1"), (2, 1), []),
        ((f"{A}.{PIPE}=2", f"{A}.{TENSOR}=2"), (2, 2), []),
        ((f"{A}.{PIPE}=2", f"{A}.{EXPERT}=4", f"{A}.megatron.context_parallel_size=2"), (2, 2), []),
        ((f"{A}.{PIPE}=4", f"{A}.{TENSOR}=4", f"{REF}.{PIPE}=1"), (1, 1), [NOT_DIVIDED.format(2)]),
        ((f"{A}.{PIPE}=2", f"{A}.{EXPERT}=8", f"{REF}.{PIPE}=2", f"{REF}.{EXPERT}=4"), (1, 2), [NOT_DIVIDED.format(4)]),
        ((f"{A}.{PIPE}=2", "actor_rollout_ref.model.lora_rank=8"), (2, 2), []),
        ((f"{A}.{PIPE}=2", f"{A}.kl_loss_type=full"), (1, 1), ["kl_loss_type=full"]),
        ((f"{A}.{PIPE}=2", f"{A}.router.balance_loss_coef=0.1"), (1, 1), ["balance_loss_coef=0.1"]),
        ((f"{A}.{PIPE}=3",), (1, 1), ["=3: it does not divide 8 processes: FSDP"]),
        ((f"{A}.{PIPE}=4", f"{A}.fsdp_config.fsdp_size=2"), (1, 1), ["=4: it does not divide 2 processes: FSDP"]),
    ],
)  # fmt: skip
def test_stages_are_had_where_rules_let_them(asked: tuple[str, ...], sizes: tuple[int, int], told: list[str]) -> None:
    config, warnings = compose_with_warnings([*GRPO, *asked])
    policy = config.actor_rollout_ref
    found = [role.fsdp_config.pipeline_parallel_size for role in (policy.actor, policy.ref)]
    lines = [line for line in warnings if line.endswith("instead; same numbers")]
    assert tuple(found) == sizes
    assert len(lines) == len(told) and all(text in line for text, line in zip(told, lines, strict=True))
    BatchPlan.build(config, 8)


def test_what_the_own_key_asks_for_is_refused_as_ever() -> None:
    with pytest.raises(ConfigError, match="it compares whole heads"):
        compose_with_warnings([*GRPO, f"{A}.fsdp_config.pipeline_parallel_size=2", f"{A}.kl_loss_type=full"])


def test_the_critic_has_stages_of_its_own() -> None:
    config, _ = compose_with_warnings([*BASE, "algorithm.adv_estimator=gae", f"critic.{PIPE}=2", f"critic.{TENSOR}=1"])
    assert config.critic.model.fsdp_config.pipeline_parallel_size == 2
    assert config.actor_rollout_ref.actor.fsdp_config.pipeline_parallel_size == 1


@pytest.mark.parametrize(
    ("pieces", "found", "told"),
    [("null", 1, []), (2, 2, []), (3, 1, [f"{A}.{PIECES}=3: the model has 4 layers for 2 stages: "])],
)
def test_pieces_are_had_where_the_layers_let_them(tmp_path: Path, pieces: object, found: int, told: list[str]) -> None:
    model = f"actor_rollout_ref.model.path={zoo.folder(tmp_path, 'qwen3', num_hidden_layers=4)}"
    config, warnings = compose_with_warnings([*GRPO, model, f"{A}.{PIPE}=2", f"{A}.{PIECES}={pieces}"])
    policy = config.actor_rollout_ref
    for role in (policy.actor, policy.ref):
        assert (role.fsdp_config.pipeline_parallel_size, role.fsdp_config.virtual_pipeline_size) == (2, found)
    lines = [line for line in warnings if line.endswith("stages have one piece each instead; same numbers")]
    assert [text in line for text, line in zip(told, lines, strict=True)] == [True] * len(told)


def test_pieces_of_stages_that_are_taken_back_have_no_effect() -> None:
    config, warnings = compose_with_warnings([*GRPO, f"{A}.{PIPE}=2", f"{A}.{PIECES}=2", f"{A}.kl_loss_type=full"])
    assert config.actor_rollout_ref.actor.fsdp_config.pipeline_parallel_size == 1
    assert any("virtual_pipeline_size" in line and "no stages" in line for line in warnings), warnings


@pytest.mark.parametrize(
    ("kind", "size", "told"),
    [("qwen3", 2, None), ("qwen3", 4, "the model has 2 layers: FSDP"), ("bamba", 2, "a 'bamba' model is not cut")],
)
def test_a_model_in_a_folder_says_whether_it_is_cut(tmp_path: Path, kind: str, size: int, told: str | None) -> None:
    model = f"actor_rollout_ref.model.path={zoo.folder(tmp_path, kind)}"
    config, warnings = compose_with_warnings([*GRPO, model, f"{A}.{PIPE}={size}"])
    lines = [line for line in warnings if line.endswith("instead; same numbers")]
    assert config.actor_rollout_ref.actor.fsdp_config.pipeline_parallel_size == (1 if told else size)
    assert [told in line for line in lines if told] == [True] * len(lines) and bool(lines) == (told is not None)
