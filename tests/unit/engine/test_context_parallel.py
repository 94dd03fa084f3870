"""Rows shared by chunks of their tokens give what whole rows give: gradients, outputs, norms, steps, checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.engine import context_scenarios as scenarios
from tests.unit.engine import row_groups, tiny
from tests.unit.engine.context_scenarios import Group
from tests.unit.engine.tiny import assert_same, by_parameter
from verl_like.config import ModelConfig
from verl_like.models import loading
from verl_like.parallel.dist import ProcessInfo


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("context")


@pytest.fixture(scope="module")
def paths(folder: Path) -> dict[str, str]:
    return {name: tiny.model_folder(folder / name, kind, **keys) for name, (kind, keys) in scenarios.MODELS.items()}


one, two, four, shared = row_groups.fixtures(scenarios, lambda process: Group(process, 1))


def test_gradients_are_one_ranks(one: dict[str, Any], shared: list[dict[str, Any]]) -> None:
    ways = [key for key in one if key.startswith("gradients_")]
    assert len(ways) == 3 * len(scenarios.MODELS) + len(scenarios.WAYS) + 1
    for rank in shared:
        for key in ways:
            by_parameter(rank[key], one[key], 1e-5)
        for name in scenarios.MODELS:
            assert {tensor.dtype for tensor in rank[f"double_{name}"].values()} == {torch.float64}
            by_parameter(rank[f"double_{name}"], one[f"double_{name}"], 1e-10)


def test_outputs_norms_and_the_change_of_weights(one: dict[str, Any], shared: list[dict[str, Any]]) -> None:
    for rank in shared:
        for name, rows in one["outputs"].items():
            torch.testing.assert_close(rank["outputs"][name], rows, rtol=0, atol=1e-5)
        norms = [step["grad_norm"] for step in rank["told"]]
        assert norms == pytest.approx([step["grad_norm"] for step in one["told"]], rel=1e-5)
        by_parameter(rank["change"], one["change"], 1e-3)


def test_one_long_row_is_shared(one: dict[str, Any], shared: list[dict[str, Any]]) -> None:
    """It trains where no rank could have more than its share: a whole number of tokens for each chunk."""
    length = one["tokens"] % 1000
    assert one["tokens"] == 1001 * length and length > 20
    size = len(shared)
    assert {rank["tokens"] for rank in shared} == {-(-length // (2 * size)) * 2 * 1000 + length}


def test_a_checkpoint_goes_on_with_another_number_of_ranks(
    process: ProcessInfo, paths: dict[str, str], folder: Path, one: dict[str, Any], shared: list[dict[str, Any]]
) -> None:
    """Two ranks resume what one has saved, one and four what two have."""
    for rank in shared:
        assert_same(rank["uninterrupted"], one["uninterrupted"], 1e-5)
        assert_same(rank["resumed"], one["uninterrupted"], 1e-5)
    again = Group(process, 1).resumed(paths["plain"], str(folder / "two"))
    assert_same(again, one["uninterrupted"], 1e-5)


@pytest.mark.engines
def test_meshes_of_four_ranks(
    process: ProcessInfo, paths: dict[str, str], one: dict[str, Any], four: list[dict[str, Any]]
) -> None:
    """Two groups, also one of them without rows; two copies of the model; chunks whose heads two ranks share."""
    heads = {"override_config": {"num_attention_heads": 2}}
    whole = Group(process, 1)
    alone = whole.gradients(whole.engine(paths["plain"], model=heads), scenarios.batch_of())
    for rank in four:
        for name in ("groups", "groups_first", "copies", "copies_first"):
            by_parameter(rank[f"meshes_{name}"], one["gradients_plain"], 1e-5)
        by_parameter(rank["ulysses"], alone, 1e-5)


def test_what_cannot_be_shared_by_chunks_is_refused(tmp_path: Path) -> None:
    """Padded rows; RoPE whose frequencies follow the largest position, which is another on each rank."""
    key = "fsdp_config.context_parallel_size"
    rope: dict[str, Any] = {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}
    plain = tiny.model_folder(tmp_path / "plain")
    stretched = tiny.model_folder(tmp_path / "stretched", "qwen2", **rope)
    for path, packed, told in ((plain, False, "needs packed"), (stretched, True, "=2 with RoPE of type 'dynamic'")):
        model = ModelConfig(path=path, use_remove_padding=packed)
        with pytest.raises(ValueError, match=f"^{key}.*{told}"):
            loading.check_context(model, loading.load_hf_config(model), 2, key)
        loading.check_context(model, loading.load_hf_config(model), 1, key)
