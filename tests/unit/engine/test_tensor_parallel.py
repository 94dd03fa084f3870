"""Layers split among ranks give what whole layers give: gradients, norms, weights after steps, checkpoints, exports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.engine import tensor_scenarios as scenarios
from tests.unit.engine import tiny
from tests.unit.engine.test_ranks import assert_same
from tests.unit.models import zoo
from verl_like.parallel.dist import ProcessInfo

PLANNED = (
    *("qwen3", "llama", "ministral3", "gemma", "cohere", "olmo", "olmo2", "smollm3", "phi", "phi3", "granite", "glm"),
    *("glm4", "starcoder2", "arcee", "seed_oss", "ernie4_5", "gpt_neox", "mistral", "ministral", "gemma2"),
    *("gemma3_text", "vaultgemma", "cohere2", "olmo3", "exaone4", "gemma3", "mistral3"),
    *("qwen2_moe", "mixtral", "olmoe", "flex_olmo", "glm4_moe", "dots1", "minimax_m2", "qwen3_vl_moe"),
)
FAMILIES = ("qwen2", "qwen3", "llama", "phi3", "qwen3_moe")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tensor")


@pytest.fixture(scope="module")
def paths(folder: Path) -> dict[str, str]:
    return scenarios.folders(folder)


@pytest.fixture(scope="module")
def one(process: ProcessInfo, paths: dict[str, str], folder: Path) -> dict[str, Any]:
    return scenarios.everything(process, paths, 1, str(folder / "one"), None, all_options=True)


@pytest.fixture(scope="module")
def four(folder: Path, paths: dict[str, str], one: dict[str, Any]) -> list[dict[str, Any]]:
    """Four ranks, two groups of two, which go on from what one rank has saved."""
    saved = str(folder / "four")
    return tiny.spawn_ranks(4, scenarios.two_by_two, folder / "ranks4", paths, saved, str(folder / "one"))


@pytest.fixture(scope="module")
def two(folder: Path, paths: dict[str, str], four: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Two ranks, one group, which goes on from what the four have saved."""
    return tiny.spawn_ranks(2, scenarios.one_group, folder / "ranks2", paths, str(folder / "two"), str(folder / "four"))


pytestmark = pytest.mark.engines  # four processes, on two cores in most places
RANKS = ["four", pytest.param("two", marks=pytest.mark.slow)]


@pytest.fixture(scope="module", params=RANKS)
def split(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """What each rank says."""
    results = request.getfixturevalue(request.param)
    return [result["all"] for result in results] if request.param == "four" else results


@pytest.mark.parametrize("name", [*FAMILIES, "lora", "keep_gathered", "critic"])
def test_gradients_are_those_of_whole_layers(one: dict[str, Any], split: list[dict[str, Any]], name: str) -> None:
    for result in split:
        assert_same(one[f"gradients_{name}"], result[f"gradients_{name}"], 5e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", scenarios.OPTIONS)
def test_gradients_under_every_option(one: dict[str, Any], two: list[dict[str, Any]], name: str) -> None:
    for result in two:
        assert_same(one[f"gradients_{name}"], result[f"gradients_{name}"], 5e-6)


@pytest.mark.parametrize("share", ["gradients_alone", "gradients_sync_last"])
def test_gradients_do_not_depend_on_who_has_rows(one: dict[str, Any], split: list[dict[str, Any]], share: str) -> None:
    for result in split:
        assert_same(one["gradients_qwen3"], result[share], 5e-6)


@pytest.mark.parametrize("name", [*FAMILIES, "critic"])
def test_norms_and_weights_after_a_clipped_step(one: dict[str, Any], split: list[dict[str, Any]], name: str) -> None:
    assert one[f"norm_{name}"] > 1.0  # so it is clipped
    for result in split:
        assert result[f"norm_{name}"] == pytest.approx(one[f"norm_{name}"], rel=1e-6)
        assert_same(one[f"weights_{name}"], result[f"weights_{name}"], 2e-5)


def test_shared_prompts(one: dict[str, Any], split: list[dict[str, Any]]) -> None:
    for result in split:
        assert_same(one["gradients_shared_prompts"], result["gradients_shared_prompts"], 5e-6)


def test_each_rank_holds_its_part(one: dict[str, Any], split: list[dict[str, Any]]) -> None:
    """Of weights, over all ranks; of the tokens between blocks, over the group."""
    assert one["held"] == {"root": 1.0, "matrices": 1.0} and one["tokens"][0] == one["tokens"][1]
    assert sum(result["held"]["root"] for result in split) == pytest.approx(1.0)
    for result in split:
        assert result["held"]["matrices"] == 1 / len(split)
        assert result["tokens"][0] == -(-result["tokens"][1] // 2)


@pytest.mark.slow
def test_every_family_whose_plan_is_known(process: ProcessInfo, folder: Path) -> None:
    paths = {name: zoo.folder(folder / "zoo", name) for name in PLANNED}
    whole = scenarios.families(process, paths, 1)
    for result in tiny.spawn_ranks(2, scenarios.families, folder / "families", paths, 2):
        for name in PLANNED:
            assert_same(whole[name], result[name], 5e-6)


@pytest.mark.slow
def test_compiled_layers(folder: Path, paths: dict[str, str]) -> None:
    for compiled, plain in tiny.spawn_ranks(2, scenarios.compiled, folder / "compiled", paths["qwen2"]):
        assert_same(plain, compiled, 5e-6)


def test_two_replicas_of_split_layers(one: dict[str, Any], four: list[dict[str, Any]]) -> None:
    for result in four:
        assert_same(one["gradients_qwen2"], result["hybrid"]["gradients"], 5e-6)
        assert result["hybrid"]["norm"] == pytest.approx(one["norm_qwen2"], rel=1e-6)
        assert_same(four[0]["hybrid"]["weights"], result["hybrid"]["weights"], 0.0)


def test_layers_split_in_four(process: ProcessInfo, paths: dict[str, str], four: list[dict[str, Any]]) -> None:
    whole = scenarios.whole_by_four(process, paths)
    for result in four:
        assert_same(whole, result["by_four"], 5e-6)


def test_outputs_and_metrics_come_once(one: dict[str, Any], four: list[dict[str, Any]]) -> None:
    for rank, result in enumerate(four):
        for name, whole in one["outputs"].items():
            torch.testing.assert_close(whole[rank // 2 :: 2], result["all"]["outputs"][name], rtol=0, atol=2e-5)
        torch.testing.assert_close(one["values"][rank // 2 :: 2], result["all"]["values"], rtol=0, atol=2e-5)
        assert result["all"]["reports_loss"] == (rank % 2 == 0)


def test_an_optimizer_with_small_states(one: dict[str, Any], split: list[dict[str, Any]]) -> None:
    for result in split:
        check_lean(one, split[0], result, "adamw_8bit")


@pytest.mark.slow
def test_the_other_optimizer_with_small_states(one: dict[str, Any], two: list[dict[str, Any]]) -> None:
    for result in two:
        check_lean(one, two[0], result, "adamw_bf16")


def check_lean(one: dict[str, Any], first: dict[str, Any], result: dict[str, Any], name: str) -> None:
    """Replicas of a weight round alike; the first step is that of whole layers, later ones differ by the rounding."""
    assert_same(one[f"weights_{name}"], result[f"weights_{name}"], 2e-5)
    assert_same(first[f"rounded_{name}"], result[f"rounded_{name}"], 0.0)
    assert_same(one[f"rounded_{name}"], result[f"rounded_{name}"], 0.2)


def test_ranks_agree_exactly_under_the_whole_models_names(one: dict[str, Any], split: list[dict[str, Any]]) -> None:
    for result in split:
        assert_same(split[0]["uninterrupted"], result["uninterrupted"], 0.0)
        assert {name: tensor.shape for name, tensor in result["uninterrupted"].items()} == one["shapes"]


def test_a_run_goes_on_at_another_size(one: dict[str, Any], split: list[dict[str, Any]]) -> None:
    """From one rank to two by two, from those to two: each time the step that the writer made."""
    for result in split:
        assert_same(one["uninterrupted"], result["resumed"], 2e-5)


def test_one_rank_goes_on_from_split_layers(
    process: ProcessInfo, paths: dict[str, str], folder: Path, four: list[dict[str, Any]]
) -> None:
    ranks = scenarios.Ranks(process, 1)
    engine = ranks.engine(paths["qwen2"], seed=99)
    engine.load(str(folder / "four"), contents=scenarios.ALL)
    assert engine.schedule is not None and engine.schedule.steps_done == 2
    ranks.step(engine, 2)
    assert_same(tiny.weights(engine), four[0]["all"]["uninterrupted"], 2e-5)


def test_exported_folder_starts_an_engine(
    process: ProcessInfo, folder: Path, paths: dict[str, str], four: list[dict[str, Any]]
) -> None:
    exported = scenarios.Ranks(process, 1).engine(str(folder / "four" / "huggingface"), seed=99)
    saved = scenarios.Ranks(process, 1).engine(paths["qwen2"], seed=98)
    saved.load(str(folder / "four"), contents=["model"])
    assert_same(tiny.weights(exported), tiny.weights(saved), 0.0)
