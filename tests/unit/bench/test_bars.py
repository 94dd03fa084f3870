"""Targets are stated for the work that they are set for, with the right side of the limit."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from verl_like.kit.bench.bars import bars_of
from verl_like.kit.bench.report import Report, Row
from verl_like.kit.bench.shapes import MODELS

CPU: dict[str, Any] = {"device": "some processor", "cores": 2}
GPU: dict[str, Any] = {"device": "NVIDIA H200", "devices": 1}


def row(name: str, seconds: float, **figures: float) -> Row:
    return Row(name=name, seconds=seconds, figures={"x 6PT": seconds / 2, "MFU": 1 / seconds} | figures)


def report(bench: str, model: str, hardware: dict[str, Any], rows: list[Row], ranks: int = 1) -> Report:
    work = {"model": asdict(MODELS[model]), "ranks": ranks}
    return Report(bench=bench, work=work, rows=rows, hardware=hardware)


def test_an_update_on_a_cpu() -> None:
    """The fastest budget of each kind counts: 2.6 s packed, 4.0 s padded, 1.3 s in bfloat16."""
    rows = [
        row("packed, float32, 1024 tokens", 9.0),
        row("packed, float32, 2048 tokens", 2.6),
        row("packed, bfloat16, 2048 tokens", 1.3),
        row("padded, float32, 2048 tokens", 4.0),
    ]
    assert bars_of(report("update", "cpu", CPU, rows)) == [
        "Bar: update by 6 x parameters x tokens 1.300, at most 1.35: met.",
        "Bar: packed, float32, times as fast as padded, float32 1.538, at least 1.8: MISSED.",
        "Bar: packed, bfloat16, times as fast as packed, float32 2.000, at least 1.8: met.",
    ]
    assert len(bars_of(report("update", "cpu", CPU, rows, ranks=3))) == 2
    assert bars_of(report("update", "0.5b", CPU, rows)) == []


def test_an_update_on_a_gpu_counts_no_shared_token() -> None:
    rows = [row("packed, bfloat16, 16384 tokens", 2.0, shared=0.25), row("unshared, bfloat16, 16384 tokens", 1.0)]
    assert bars_of(report("update", "1.5b", GPU, rows)) == ["Bar: MFU of the update 0.375, at least 0.4: MISSED."]
    assert bars_of(report("update", "1.5b", GPU, rows, ranks=2)) == []
    assert bars_of(report("update", "4b", GPU, rows)) == []


def test_a_sync_on_a_gpu() -> None:
    rows = [row("with the proof", 0.12), row("without", 0.2)]
    assert bars_of(report("sync", "1.5b", GPU, rows)) == ["Bar: weight sync, seconds 0.120, at most 0.15: met."]
    assert bars_of(report("sync", "1.5b", CPU, rows)) == []
