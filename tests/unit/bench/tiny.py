"""A model and a workload so small that every benchmark runs in a moment, and the command line to run it."""

from __future__ import annotations

from pathlib import Path

import pytest

from verl_like.cli.main import main
from verl_like.kit.bench import shapes
from verl_like.kit.bench.report import Report
from verl_like.kit.bench.shapes import ModelShape, Workload

MODEL = ModelShape(
    hidden_size=32,
    num_layers=1,
    num_heads=1,
    num_kv_heads=1,
    intermediate_size=32,
    vocab_size=20,
    tied_embeddings=True,
)
LOAD = Workload(num_prompts=2, responses_per_prompt=3, prompt_length=4, mean_response=6, max_response=12)


def use_tiny_shapes(monkeypatch: pytest.MonkeyPatch, load: Workload = LOAD) -> None:
    """Put them in the place of the CPU shape and workload."""
    monkeypatch.setitem(shapes.MODELS, "cpu", MODEL)
    monkeypatch.setitem(shapes.WORKLOADS, "cpu", load)


def bench(out: Path, *options: str) -> Report:
    """Run `verl-like bench ...` and read the JSON that it wrote."""
    main(["bench", options[0], "--json", str(out), *options[1:]])
    return Report.load(out)
