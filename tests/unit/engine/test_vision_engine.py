"""Vision-language models in the training engine: ranks, parts of the tower, a frozen tower, adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.unit.engine import tiny, vision_scenarios
from tests.unit.engine.tiny import assert_same
from tests.unit.models import tiny_vision
from verl_like.parallel.dist import ProcessInfo


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folders = {family: tmp_path_factory.mktemp(family) for family in tiny_vision.FAMILIES}
    for family, folder in folders.items():
        tiny_vision.save(folder, family)
    return {family: str(folder) for family, folder in folders.items()}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory, paths: dict[str, str]) -> list[dict[str, Any]]:
    return tiny.spawn_ranks(2, vision_scenarios.everything, tmp_path_factory.mktemp("ranks"), paths)


@pytest.fixture(scope="module")
def one(process: ProcessInfo, paths: dict[str, str], two: Any) -> dict[str, Any]:
    return vision_scenarios.everything(process, paths)


@pytest.mark.parametrize("share", ["even", "first"])
@pytest.mark.parametrize("family", tiny_vision.FAMILIES)
def test_two_ranks_give_the_gradients_of_one(
    one: dict[str, Any], two: list[dict[str, Any]], family: str, share: str
) -> None:
    """Ranks with other numbers of images, and one that has no row at all."""
    assert any("visual" in name and gradient.any() for name, gradient in one[family]["even"].items())
    for result in two:
        assert_same(one[family]["even"], result[family][share], 2e-5)


@pytest.mark.parametrize("way", ["small_parts", "checkpointed", "padded"])
def test_gradients_do_not_depend_on_the_way(one: dict[str, Any], two: list[dict[str, Any]], way: str) -> None:
    assert_same(one["qwen2_vl"]["even"], one["qwen2_vl"][way], 2e-5)
    assert_same(one["qwen2_vl"]["even"], two[1]["qwen2_vl"][way], 2e-5)


def test_a_frozen_tower_stays_and_the_language_model_learns_the_same(
    one: dict[str, Any], two: list[dict[str, Any]]
) -> None:
    whole, frozen = one["qwen2_vl"]["even"], one["qwen2_vl"]["frozen"]
    assert_same({name: g for name, g in whole.items() if "visual" not in name}, frozen, 2e-5)
    assert_same(frozen, two[0]["qwen2_vl"]["frozen"], 2e-5)
    moved = one["qwen2_vl"]["moved"]
    assert moved and not any("visual" in name for name in moved) and moved == two[0]["qwen2_vl"]["moved"]


def test_adapters_are_trained_in_both_towers(
    one: dict[str, Any], two: list[dict[str, Any]], paths: dict[str, str]
) -> None:
    """Merged, they leave under the names of checkpoints; where the tower is frozen it has none."""
    adapters = one["qwen2_vl"]["adapters"]
    assert_same(adapters, two[1]["qwen2_vl"]["adapters"], 2e-5)
    for tower in ("visual", "language_model"):
        assert any(tower in name and "lora_B" in name and gradient.any() for name, gradient in adapters.items())
    assert one["qwen2_vl"]["half"] == [name for name in adapters if "visual" not in name]
    stored = load_file(Path(paths["qwen2_vl"]) / "model.safetensors")
    for result in (one, *two):
        assert result["qwen2_vl"]["told"] == result["qwen2_vl"]["sent"]
        assert result["qwen2_vl"]["sent"].keys() == stored.keys()
