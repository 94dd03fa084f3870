"""The engine benchmark takes the same rows through the packed and the padded path."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from verl_like.bench import shapes, update
from verl_like.bench.shapes import ModelShape, Workload

MODEL = ModelShape(
    hidden_size=32,
    num_layers=1,
    num_heads=1,
    num_kv_heads=1,
    intermediate_size=32,
    vocab_size=20,
    tied_embeddings=True,
)
LOAD = Workload(num_prompts=2, responses_per_prompt=4, prompt_length=4, mean_response=None, max_response=12)


def test_both_paths_are_timed_on_the_same_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(shapes.MODELS, "cpu", MODEL)
    monkeypatch.setitem(shapes.WORKLOADS, "cpu", LOAD)
    arguments = argparse.Namespace(
        model="cpu", rows=8, token_budgets=[32, 64], dtype="float32", threads=None, rounds=2, json=tmp_path / "a.json"
    )
    rows = update.main(arguments)
    assert [row["variant"] for row in rows] == [
        "packed, 32 tokens",
        "packed, 64 tokens",
        "padded, 32 tokens",
        "padded, 64 tokens",
    ]
    assert all(float(row["seconds"]) > 0 and float(row["to_floor"]) > 1 for row in rows)
    assert json.loads((tmp_path / "a.json").read_text()) == rows


def test_rows_are_short_and_long() -> None:
    batch = update.mixed_rows(shapes.WORKLOADS["cpu"], 64, 400, seed=1)
    lengths = batch.response_length_B
    assert int(lengths.max()) == 128 and 50 < float(lengths.float().mean()) < 62
    assert bool((batch.response_mask_BR.sum(dim=1) == lengths).all())
