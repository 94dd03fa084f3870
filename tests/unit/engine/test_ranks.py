"""One rank and two gloo ranks must agree: gradients, weights after steps, skipped steps, checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.engine import scenarios, tiny
from tests.unit.engine.tiny import assert_same, build_engine, weights
from verl_like.parallel.dist import ProcessInfo

ALL = ["model", "optimizer", "extra"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("saved_on_two")


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory, path: str, saved: Path) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    return tiny.spawn_ranks(2, scenarios.everything, folder, path, str(saved))


@pytest.fixture(scope="module")
def one(process: ProcessInfo, path: str, two: list[dict[str, Any]]) -> dict[str, Any]:
    return scenarios.everything(process, path, None)


@pytest.mark.parametrize("share", ["gradients_even", "gradients_first", "gradients_sync_last"])
def test_gradients_do_not_depend_on_ranks(one: dict[str, Any], two: list[dict[str, Any]], share: str) -> None:
    for result in two:
        assert_same(one["update"]["gradients_even"], result["update"][share], 2e-6)


def test_replicated_sharding_gives_the_same_gradients(one: dict[str, Any], two: list[dict[str, Any]]) -> None:
    assert_same(one["hybrid"], two[0]["hybrid"], 2e-6)


def test_tied_embeddings_and_checkpointing(one: dict[str, Any], two: list[dict[str, Any]]) -> None:
    assert "lm_head.weight" not in one["tied"]
    assert_same(one["tied"], two[1]["tied"], 2e-6)


def test_weights_after_steps_agree(one: dict[str, Any], two: list[dict[str, Any]]) -> None:
    assert_same(two[0]["update"]["weights"], two[1]["update"]["weights"], 0.0)
    assert_same(one["update"]["weights_1"], two[0]["update"]["weights_1"], 1e-5)  # AdamW divides by small gradients
    assert_same(one["update"]["weights"], two[0]["update"]["weights"], 1e-5)  # differences grow over three steps
    for seed in (1, 2, 3):
        assert one["update"][f"grad_norm_{seed}"] == pytest.approx(two[1]["update"][f"grad_norm_{seed}"], rel=1e-5)


def test_forward_gives_each_rank_its_own_rows(one: dict[str, Any], two: list[dict[str, Any]]) -> None:
    whole = one["update"]["log_probs"]
    for rank, result in enumerate(two):
        torch.testing.assert_close(whole[rank::2], result["update"]["log_probs"], rtol=0, atol=1e-5)


def test_step_is_skipped_on_all_ranks(one: dict[str, Any], two: list[dict[str, Any]]) -> None:
    for result in [one, *two]:
        assert result["non_finite"]["unchanged"] and result["non_finite"]["changed_after"]
        assert result["non_finite"]["skipped_after"] == 0
    assert one["non_finite"]["skipped"] == 1
    assert sum(result["non_finite"]["skipped"] for result in two) == 1


def test_checkpoint_of_two_ranks_loads_on_one(
    process: ProcessInfo, path: str, saved: Path, two: list[dict[str, Any]]
) -> None:
    engine = build_engine(process, path, seed=99)
    engine.load(str(saved), contents=ALL)
    assert_same(weights(engine), two[0]["update"]["weights"], 0.0)
    assert engine.schedule is not None and engine.schedule.steps_done == 3
    assert_same(scenarios.one_more_step(process, engine), two[0]["update"]["weights_later"], 1e-5)


def test_each_rank_notes_the_files_it_wrote(saved: Path, two: list[dict[str, Any]]) -> None:
    noted = {
        f"{part}/{name}": rank
        for part in (*ALL, "huggingface")
        for rank in (0, 1)
        if (notes := saved / part / f".checksums_{rank}.json").exists()
        for name in json.loads(notes.read_text())
    }
    expected = {f"{part}/__{rank}_0.distcp": rank for part in ("model", "optimizer") for rank in (0, 1)}
    expected |= {"model/.metadata": 0, "optimizer/.metadata": 0, "huggingface/model.safetensors": 0}
    assert noted == expected | {f"extra/rank_{rank}.pt": rank for rank in (0, 1)}


def test_one_spoilt_number_on_one_rank_stops_the_save_of_all(saved: Path, two: list[dict[str, Any]]) -> None:
    assert [len(result["update"]["spoilt"]) for result in two] == [0, 1]
    assert "embed_tokens" in two[1]["update"]["spoilt"][0]
    assert not (saved / "spoilt").exists()


def test_exported_folder_starts_an_engine(process: ProcessInfo, saved: Path, two: list[dict[str, Any]]) -> None:
    engine = build_engine(process, str(saved / "huggingface"), seed=99)
    assert_same(weights(engine), two[0]["update"]["weights"], 0.0)
