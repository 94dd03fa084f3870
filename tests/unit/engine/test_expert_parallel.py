"""Experts handed out to ranks give what whole layers give: routes, gradients, norms, steps, checkpoints, exports."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.unit.engine import expert_scenarios as scenarios
from tests.unit.engine import tiny
from tests.unit.engine.tiny import assert_same, by_parameter
from tests.unit.models import zoo
from verl_like.config import ModelConfig
from verl_like.models import loading, tensor_plan
from verl_like.models.tensor_plan import check_experts
from verl_like.parallel.dist import ProcessInfo

# Of the routers: plain; with a bias and shared experts (no auxiliary loss); with stacks that are transposed and biased.
TYPES = ("qwen3_moe", "deepseek_v3", "gpt_oss")
FIRST = TYPES[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("experts")


@pytest.fixture(scope="module")
def paths(folder: Path) -> dict[str, str]:
    return {name: zoo.folder(folder / name, name) for name in TYPES}


@pytest.fixture(scope="module")
def one(process: ProcessInfo, paths: dict[str, str], folder: Path) -> dict[str, Any]:
    found = scenarios.everything(process, paths, 1, str(folder / "one"), None, tuple(scenarios.WAYS))
    return found | {"gradients_float64": scenarios.in_float64(process, paths[FIRST], 1)}


@pytest.fixture(scope="module")
def two(folder: Path, paths: dict[str, str], one: dict[str, Any]) -> list[dict[str, Any]]:
    saved = str(folder / "two")
    return tiny.spawn_ranks(2, scenarios.two, folder / "ranks2", paths, saved, str(folder / "one"))


@pytest.fixture(scope="module")
def four(folder: Path, paths: dict[str, str], two: list[dict[str, Any]]) -> list[dict[str, Any]]:
    saved = str(folder / "four")
    return tiny.spawn_ranks(4, scenarios.four, folder / "ranks4", paths, saved, str(folder / "two"))


@pytest.fixture(scope="module", params=["two", pytest.param("four", marks=pytest.mark.engines)])
def spread(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """What each rank says."""
    return request.getfixturevalue(request.param)


def test_gradients_are_one_ranks_and_every_token_goes_to_the_same_experts(
    one: dict[str, Any], spread: list[dict[str, Any]]
) -> None:
    for rank in spread:
        for name in TYPES:
            wanted, found = Counter(one[f"routes_{name}"]), Counter(rank[f"routes_{name}"])
            assert wanted.total() > 100 and not wanted - found
            assert (found - wanted).total() <= 8  # tokens of ranks that have no rows left
        ways = [key for key in rank if key.startswith("gradients_") and key in one and "float64" not in key]
        assert len(ways) >= 2 * len(TYPES) + 1
        for key in ways:
            by_parameter(rank[key], one[key], 1e-5)
        for way in ("ulysses", "tensor"):
            by_parameter(rank[f"gradients_{way}"], one[f"gradients_{FIRST}"], 1e-5)
        assert rank["norm_tensor"] == pytest.approx(one[f"norms_{FIRST}"][0], rel=1e-5)
        assert_same(rank["weights_tensor"], spread[0]["weights_tensor"], 0)


def test_every_way_of_a_pass_and_double_precision(one: dict[str, Any], two: list[dict[str, Any]]) -> None:
    """The gradient of a stack is summed over other ranks than the rest: an error there would show at any precision."""
    for rank in two:
        assert {f"gradients_{way}" for way in scenarios.WAYS} <= rank.keys()
        found = rank["gradients_float64"]
        assert {tensor.dtype for tensor in found.values()} == {torch.float64}
        by_parameter(found, one["gradients_float64"], 1e-10)


def test_norms_and_the_change_of_exported_weights_after_three_steps(
    one: dict[str, Any], spread: list[dict[str, Any]]
) -> None:
    for name in TYPES:
        for rank in spread:
            assert rank[f"norms_{name}"] == pytest.approx(one[f"norms_{name}"], rel=1e-5)
            by_parameter(rank[f"changes_{name}"], one[f"changes_{name}"], 1e-3)


def test_each_rank_holds_its_share_and_exports_without_holding_all(
    one: dict[str, Any], two: list[dict[str, Any]], folder: Path
) -> None:
    """Weights leave by their owners: beside its own four experts a rank gets one more at a time."""
    assert [rank["held"] for rank in two] == [0.5, 0.5] and one["held"] == 1
    assert [rank["most_held"] for rank in two] == [(4, 1), (4, 1)]
    assert two[0]["names"] == one["names"] and len(one["names"]) == len(set(one["names"]))
    read = AutoModelForCausalLM.from_pretrained(folder / "two" / "huggingface").state_dict()
    expected = AutoModelForCausalLM.from_pretrained(folder / "one" / "huggingface").state_dict()
    assert_same(dict(read), dict(expected), 1e-5)


def test_a_checkpoint_goes_on_with_another_number_of_ranks(one: dict[str, Any], spread: list[dict[str, Any]]) -> None:
    """Two ranks resume what one has saved, four what two have."""
    for rank in spread:
        assert_same(rank["uninterrupted"], one["uninterrupted"], 1e-5)
        assert_same(rank["resumed"], one["uninterrupted"], 1e-5)


def test_one_rank_resumes_what_two_have_saved(
    process: ProcessInfo, paths: dict[str, str], folder: Path, one: dict[str, Any], two: list[dict[str, Any]]
) -> None:
    engine = scenarios.engine_of(process, paths[FIRST], 1, seed=50)
    engine.load(str(folder / "two"), contents=scenarios.ALL)
    scenarios.step(engine, 2)
    assert_same(tiny.weights(engine), one["uninterrupted"], 1e-5)


@pytest.mark.engines
def test_meshes_of_four_ranks(one: dict[str, Any], four: list[dict[str, Any]]) -> None:
    """Experts over all four; two copies of the model; and slices of the tokens."""
    for rank in four:
        assert rank["held"] == 0.25
        for way in ("by_four", "copies"):
            by_parameter(rank[f"gradients_{way}"], one[f"gradients_{FIRST}"], 1e-5)
        assert rank["norm_copies"] == pytest.approx(one[f"norms_{FIRST}"][0], rel=1e-5)
        assert_same(rank["weights_copies"], four[0]["weights_copies"], 0)


@pytest.mark.parametrize(
    ("name", "model", "size", "told"),
    [
        ("qwen3", {}, 2, "a 'qwen3' model has no experts; set it to 1"),
        ("qwen3_moe", {}, 3, r"does not divide the model's 8 experts: use one of \[1, 2, 4, 8\]"),
        ("qwen3_moe", {"lora_rank": 4}, 2, r"adapters of experts are not handed out; .*exclude_modules=\[experts\]"),
    ],
)
def test_what_cannot_be_handed_out_is_refused(
    tmp_path: Path, name: str, model: dict[str, Any], size: int, told: str
) -> None:
    config = ModelConfig(path=zoo.folder(tmp_path, name), **model)
    with pytest.raises(ValueError, match=rf"^fsdp_config.expert_parallel_size={size}.*{told}"):
        check_experts(config, loading.load_hf_config(config), size, trained=True)
    if not model:  # what trains no adapter may have experts handed out
        return
    check_experts(config, loading.load_hf_config(config), size, trained=False)
    with mock.patch.object(tensor_plan, "stacks_of", lambda hf: ({}, {})), pytest.raises(ValueError, match="not stack"):
        check_experts(config, loading.load_hf_config(config), size, trained=False)
