"""Layers in stages give what one rank's model gives: gradients, outputs, norms, steps, checkpoints, exports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.unit.engine import pipeline_scenarios as scenarios
from tests.unit.engine import row_groups, tiny
from tests.unit.engine.pipeline_scenarios import Line
from tests.unit.engine.tiny import assert_same, by_parameter
from tests.unit.models import zoo
from verl_like.config import FSDPConfig, ModelConfig
from verl_like.engine.train_engine import WeightChanges
from verl_like.models import loading, stages
from verl_like.models.adapter_config import WEIGHTS
from verl_like.parallel.dist import ProcessInfo
from verl_like.parallel.pipeline import order_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("stages")


@pytest.fixture(scope="module")
def paths(folder: Path) -> dict[str, str]:
    return {
        "plain": tiny.model_folder(folder / "plain", num_hidden_layers=5),
        "tied": tiny.model_folder(folder / "tied", num_hidden_layers=4, tie_word_embeddings=True),
        "experts": zoo.folder(folder / "experts", "qwen3_moe", num_hidden_layers=4),
    }


pytestmark = pytest.mark.timeout(900)  # four ranks make all scenarios in one start
# Four ranks make all scenarios in eight minutes on two cores: the meshes that only four can have are apart.
one, two, four, staged = row_groups.fixtures(scenarios, lambda process: Line(process, 1), pytest.mark.slow)


def test_gradients_are_one_ranks(one: dict[str, Any], staged: list[dict[str, Any]], paths: dict[str, str]) -> None:
    ways = [key for key in one if key.startswith("gradients_")]
    assert len(ways) == 2 * len(paths) + len(scenarios.WAYS) + 2
    for rank in staged:
        for key in ways:
            by_parameter(rank[key], one[key], 1e-5)
        for name in paths:
            assert {tensor.dtype for tensor in rank[f"double_{name}"].values()} == {torch.float64}
            by_parameter(rank[f"double_{name}"], one[f"double_{name}"], 1e-10)


def test_outputs_norms_and_the_change_of_weights(
    one: dict[str, Any], staged: list[dict[str, Any]], paths: dict[str, str]
) -> None:
    lines = len(staged) // 2
    for number, rank in enumerate(staged):
        for name, rows in one["outputs"].items():
            torch.testing.assert_close(rank["outputs"][name], rows[number // 2 :: lines], rtol=0, atol=1e-5)
    for name in paths:
        for rank in staged:
            norms = [step["grad_norm"] for step in rank[f"told_{name}"]]
            assert norms == pytest.approx([step["grad_norm"] for step in one[f"told_{name}"]], rel=1e-5)
            by_parameter(rank[f"change_{name}"], one[f"change_{name}"], 1e-3)
        losses = [sum(rank[f"told_{name}"][i].get("pg_loss", 0) for rank in staged) for i in range(3)]
        assert losses == pytest.approx([step["pg_loss"] for step in one[f"told_{name}"]], rel=1e-5)
    loss = sum(rank["told_watched"].get("pg_loss", 0) for rank in staged)  # of rows without a gradient too
    assert loss == pytest.approx(one["told_watched"]["pg_loss"], rel=1e-5)


def test_a_checkpoint_goes_on_with_another_number_of_stages(
    process: ProcessInfo, paths: dict[str, str], folder: Path, one: dict[str, Any], staged: list[dict[str, Any]]
) -> None:
    """Two ranks resume what one has saved, one and four what two have."""
    for name in paths:
        for rank in staged:
            assert_same(rank[f"uninterrupted_{name}"], one[f"uninterrupted_{name}"], 1e-5)
            assert_same(rank[f"resumed_{name}"], one[f"uninterrupted_{name}"], 1e-5)
        again = Line(process, 1).resumed(paths[name], str(folder / f"two_{name}"))
        assert_same(again, one[f"uninterrupted_{name}"], 1e-5)


def test_a_stage_holds_its_own_weights_and_exports_all(
    one: dict[str, Any], two: list[dict[str, Any]], folder: Path
) -> None:
    held = [set(rank["held"]) for rank in two]
    assert not held[0] & held[1] and held[0] | held[1] == set(one["held"])
    assert all("layers.3" not in name for name in held[0]) and "hf.lm_head.weight" in held[1]
    for name in ("plain", "tied", "experts"):
        read = AutoModelForCausalLM.from_pretrained(folder / f"two_{name}" / "huggingface").state_dict()
        expected = AutoModelForCausalLM.from_pretrained(folder / f"one_{name}" / "huggingface").state_dict()
        assert_same(dict(read), dict(expected), 1e-5)


def test_stages_in_pieces_are_one_rank(
    process: ProcessInfo, paths: dict[str, str], folder: Path, one: dict[str, Any], staged: list[dict[str, Any]]
) -> None:
    """Gradients, outputs, steps and checkpoints of stages whose two pieces take turns; resumed on another mesh."""
    lines = len(staged) // 2
    for number, pieces in enumerate(rank["pieces"] for rank in staged):
        of_one = {f"gradients_{way}": one["gradients_tied"] for way in scenarios.WAYS_IN_PIECES}
        ways = [key for key in pieces if key.startswith("gradients_")]
        assert len(ways) == len(paths) + len(of_one) + 2
        for key in ways:
            by_parameter(pieces[key], of_one.get(key, one.get(key, {})), 1e-5)
        by_parameter(pieces["double"], one["double_tied"], 1e-10)
        for name, rows in one["outputs_tied"].items():
            torch.testing.assert_close(pieces["outputs"][name], rows[number // 2 :: lines], rtol=0, atol=1e-5)
        norms = [step["grad_norm"] for step in pieces["told"]]
        assert norms == pytest.approx([step["grad_norm"] for step in one["told_tied"]], rel=1e-5)
        by_parameter(pieces["change"], one["change_tied"], 1e-3)
        for key in ("uninterrupted", "resumed"):
            assert_same(pieces[key], one["uninterrupted_tied"], 1e-5)
        own = [layer for layer in range(4) if any(f"layers.{layer}." in name for name in pieces["held"])]
        assert own == ([0, 2], [1, 3])[number % 2]
    again = Line(process, 1).resumed(paths["tied"], str(folder / "two_pieces"))
    assert_same(again, one["uninterrupted_tied"], 1e-5)


@pytest.mark.parametrize(("name", "pieces"), [("Adapted", False), ("AdaptedLate", False), ("Adapted", True)])
def test_adapters_in_stages_are_one_ranks(
    one: dict[str, Any], staged: list[dict[str, Any]], folder: Path, name: str, pieces: bool
) -> None:
    """LoRA: gradients, steps, exports merged and apart, peft's folder, resume; also where a stage trains nothing."""
    expected, lines = one[name], len(staged) // 2
    for number, result in enumerate(rank["pieces"] if pieces else rank for rank in staged):
        found = result[name]
        for gradients in found["gradients"]:
            by_parameter(gradients, expected["gradients"][0], 1e-5)
        by_parameter(found["double"], expected["double"], 1e-10)
        norms = [step["grad_norm"] for step in found["told"]]
        assert norms == pytest.approx([step["grad_norm"] for step in expected["told"]], rel=1e-5)
        by_parameter(found["change"], expected["change"], 1e-3)
        for key in ("uninterrupted", "resumed"):
            assert_same(found[key], expected["uninterrupted"], 1e-5)
        for key, rows in expected["base"].items():
            torch.testing.assert_close(found["base"][key], rows[number // 2 :: lines], rtol=0, atol=1e-5)
        assert found["unlike"] == []
        assert_same(found["apart"], expected["apart"], 0)
        held = set(found["trained"])
        assert held < set(expected["trained"]) if name == "Adapted" else len(held) == 2 * (number % 2)
    saved = folder / f"{'two' if lines == 1 else 'four'}{'_pieces' * pieces}_{name}" / "adapter"
    alone = folder / f"one_{name}" / "adapter"
    assert_same(load_file(saved / WEIGHTS), load_file(alone / WEIGHTS), 1e-5)
    assert (saved / "adapter_config.json").read_text() == (alone / "adapter_config.json").read_text()


def test_stages_agree_whether_a_step_must_have_changed_weights(
    one: dict[str, Any], staged: list[dict[str, Any]]
) -> None:
    """bfloat16 may lose a step, of which a stage without trained weights sees none: one that thought otherwise would
    refuse a sync that the others go on with."""
    expected = WeightChanges(steps=1, sure=0)
    assert [rank["changes"] for rank in (one, *staged)] == [expected] * (1 + len(staged))


@pytest.mark.parametrize("way", ["late", "late_pieces"])
def test_late_gradients_are_one_ranks(
    one: dict[str, Any], staged: list[dict[str, Any]], paths: dict[str, str], way: str
) -> None:
    """Zero bubble: gradients of weights in passes of their own, with adapters and checkpointing too; three steps."""
    expected = {f"gradients_{name}": one["gradients_tied"] for name in scenarios.LATE_WAYS}
    expected["gradients_adapters"] = one["Adapted"]["gradients"][0]
    for found in (rank[way] for rank in staged):
        ways = [key for key in found if key.startswith("gradients_")]
        assert len(ways) == len(paths) + len(expected) + 2
        for key in ways:
            by_parameter(found[key], expected.get(key, one.get(key, {})), 1e-5)
        for name in paths:
            by_parameter(found[f"double_{name}"], one[f"double_{name}"], 1e-10)
        norms = [step["grad_norm"] for step in found["told"]]
        assert norms == pytest.approx([step["grad_norm"] for step in one["told_tied"]], rel=1e-5)
        assert_same(found["weights"], one["uninterrupted_tied"], 1e-5)


@pytest.mark.engines
def test_meshes_of_four_ranks(process: ProcessInfo, folder: Path, one: dict[str, Any], paths: dict[str, str]) -> None:
    """Two copies of the model in two stages each; four stages; four stages of two pieces each."""
    four = tiny.spawn_ranks(4, scenarios.meshes, folder / "meshes4", paths, str(folder / "meshes"))
    line, path = Line(process, 1), scenarios.deep(folder / "deep")
    whole = line.gradients(line.engine(path), scenarios.batch_of())
    double = line.in_float64(path, scenarios.batch_of())
    for rank in four:
        for name in ("copies", "stages"):
            by_parameter(rank[f"{name}_gradients"], one["gradients_tied"], 1e-5)
            assert rank[f"{name}_told"]["grad_norm"] == pytest.approx(one["told_tied"][0]["grad_norm"], rel=1e-5)
        by_parameter(rank["stages_late"], one["gradients_tied"], 1e-5)
        by_parameter(rank["deep"], whole, 1e-5)
        by_parameter(rank["deep_double"], double, 1e-10)


def test_orders_of_passes() -> None:
    """By hand, of two stages and three micro-batches; f, b and w: forward, backward and weights' pass."""

    def told(schedule: str, stage: int, count: int = 3, pieces: int = 1) -> str:
        order = order_of(schedule, stage, 2, count, pieces)
        return " ".join(kind[0].upper() * piece + kind[0] * (1 - piece) + str(i) for kind, piece, i in order)

    assert told("1f1b", 0) == "f0 f1 b0 f2 b1 b2"
    assert told("1f1b", 1) == "f0 b0 f1 b1 f2 b2"
    assert told("gpipe", 0) == told("gpipe", 1) == "f0 f1 f2 b0 b1 b2"
    assert told("1f1b", 0, 1) == "f0 b0"
    assert told("zero_bubble", 0) == "f0 f1 b0 w0 f2 b1 w1 b2 w2"
    assert told("zero_bubble", 1) == "f0 b0 f1 b1 w0 f2 b2 w1 w2"
    # F and B are passes of a second piece, whose turn comes when two micro-batches are round.
    assert told("1f1b", 0, 4, 2) == "f0 f1 F0 F1 f2 B0 f3 B1 F2 b0 F3 b1 B2 B3 b2 b3"
    assert told("1f1b", 1, 4, 2) == "f0 f1 F0 B0 F1 B1 f2 b0 f3 b1 F2 B2 F3 B3 b2 b3"
    assert told("gpipe", 1, 3, 2) == "f0 f1 f2 F0 F1 F2 B0 B1 B2 b0 b1 b2"
    assert told("1f1b", 1, 1, 2) == "f0 F0 B0 b0"
    assert told("zero_bubble", 1, 2, 2) == "f0 f1 F0 B0 F1 B1 W0 b0 W1 b1 w0 w1"


@pytest.mark.parametrize(
    ("name", "sizes", "told"),
    [
        ("bamba", (2, 1), "pipeline_parallel_size=2: a 'bamba' model is not cut into stages"),
        ("qwen3", (9, 2), "pipeline_parallel_size=9: the model has 2 layers.*; use as many stages at most"),
        ("qwen3", (2, 3), "virtual_pipeline_size=3: the model has 2 layers for 2 stages; use 1 at most"),
    ],
)
def test_what_cannot_be_cut_is_refused(tmp_path: Path, name: str, sizes: tuple[int, int], told: str) -> None:
    config = ModelConfig(path=zoo.folder(tmp_path, name))
    key = "fsdp_config.pipeline_parallel_size"
    fsdp = FSDPConfig(pipeline_parallel_size=sizes[0], virtual_pipeline_size=sizes[1])
    with pytest.raises(ValueError, match=f"^fsdp_config.{told}"):
        stages.check_stages(loading.load_hf_config(config), fsdp, key)
