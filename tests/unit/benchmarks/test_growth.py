"""Computed growth and memory: formulas by hand, activations against what autograd keeps, the command."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import growth_measured
from benchmarks.growth import main
from benchmarks.growth_measured import BASE, SHAPE, sizes, wider
from tests.unit.bench.tiny import MODEL
from verl_like.kit.bench.inputs import model_config
from verl_like.kit.bench.report import Report
from verl_like.kit.bench.shapes import WORKLOADS, Workload
from verl_like.models.cost import ModelCost
from verl_like.parallel.device_peak import DevicePeak


def growth(out: Path, *options: str) -> Report:
    return main(["--json", str(out), *options])


def test_floors_of_1_5b_on_an_h200_by_hand(tmp_path: Path) -> None:
    options = ["--models", "1.5b", "--workloads", "w1", "--gpu", "H200"]
    report = growth(tmp_path / "a.json", *options)
    figures = report.row("1.5b, w1").figures
    lengths = [100 + n for n in WORKLOADS["w1"].draw_lengths(1)]
    body = 28 * (2 * 1536 * 1536 + 2 * 1536 * 256 + 3 * 1536 * 8960)
    head = 151_936 * 1536
    pairs = 28 * sum(n * (n + 1) / 2 for n in lengths)
    forward = 2 * (body * sum(lengths) + head * (sum(lengths) - 51_200)) + 4 * 1536 * pairs
    assert figures["log-prob s"] == pytest.approx(forward / 989e12)
    assert figures["update s"] == pytest.approx(3 * forward / 989e12)
    assert figures["at 40%"] == pytest.approx(3 * forward / 989e12 / 0.4)
    assert figures["sync ms"] == pytest.approx(1000 * 2 * 2 * (body + head) / 4.8e12, rel=1e-3)  # norms and biases
    longest = max(lengths) - 100
    decode_pairs = 28 * (sum(n * (n + 1) / 2 for n in lengths) - 512 * 100 * 101 / 2)
    read = 2 * (longest * (body + head) + 2 * 2 * 128 * decode_pairs)
    prefill = (2 * (body * 6400 + head * 64) + 64 * 28 * 4 * 1536 * 5050) / 989e12
    assert figures["gen s"] == pytest.approx(prefill + read / 4.8e12)
    assert figures["KV GB"] == pytest.approx(28 * 1024 * (6400 + sum(lengths) - 51_200) / 1e9)
    memory = Report.load(tmp_path / "a_memory.json").row("1.5b").figures
    assert memory["weights"] == memory["gradients"] == memory["optimizer"] / 2 == pytest.approx(4 * 1.5437, rel=1e-3)


def test_more_gpus_share_the_shards_and_the_work(tmp_path: Path) -> None:
    options = ["--models", "4b", "--workloads", "w2", "--gpu", "H100"]
    one = growth(tmp_path / "1.json", *options).rows[0].figures
    eight = growth(tmp_path / "8.json", *options, "--gpus", "8").rows[0].figures
    assert eight["update s"] == pytest.approx(one["update s"] / 8)
    assert eight["sync ms"] > one["sync ms"]  # seven eighths come over the links
    of_one, of_eight = (Report.load(tmp_path / f"{n}_memory.json").rows[0].figures for n in (1, 8))
    assert of_eight["optimizer"] == pytest.approx(of_one["optimizer"] / 8)
    assert of_eight["activations"] == of_one["activations"]


def test_sizes_are_doubled_alone(tmp_path: Path) -> None:
    points = sizes()
    tokens = {name: sum(size.workload.response_lengths(1)) for name, size in points.items()}
    assert tokens["sequences x 4, as many tokens"] == pytest.approx(tokens[BASE], rel=0.02)
    assert tokens["rows x 4"] == pytest.approx(4 * tokens[BASE], rel=0.02)
    assert points["width x 2"].workload == points[BASE].workload
    assert points["layers x 4"].shape.num_layers == 4 * SHAPE.num_layers
    wide = wider(SHAPE, 2)
    assert wide.hidden_size // wide.num_heads == SHAPE.hidden_size // SHAPE.num_heads
    body = [ModelCost.of(model_config(shape, 128)).body_weights for shape in (SHAPE, wide)]
    assert body[1] == 4 * body[0]


def test_the_measured_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load = Workload(num_prompts=2, responses_per_prompt=2, prompt_length=4, mean_response=6, max_response=12)
    monkeypatch.setattr(growth_measured, "SHAPE", MODEL)
    monkeypatch.setattr(growth_measured, "LOAD", load)
    peak = DevicePeak(flops=1e9, bandwidth=1e9, source="measured")
    monkeypatch.setattr(growth_measured, "device_peak", lambda *_: peak)
    monkeypatch.setattr(growth_measured, "sizes", lambda: sizes((2,)))
    report = growth(tmp_path / "a.json", "--measure", "--rounds", "1")
    assert [row.name for row in report.rows] == [BASE, *(name for name in sizes((2,)) if name != BASE)]
    assert report.row(BASE).figures == {"grew": 1.0, "operations grew": 1.0}
    grown = report.row("rows x 2").figures["operations grew"]
    assert 1.6 < grown < 2.4
    lengths = [4 + n for n in load.response_lengths(1)]
    body, head, pairs = 7 * 32 * 32, 20 * 32, sum(n * (n + 1) / 2 for n in lengths)
    flops = 3 * (2 * (body * sum(lengths) + head * (sum(lengths) - 16)) + 4 * 32 * pairs)
    assert report.row(BASE).floor_seconds == pytest.approx(flops / 1e9)
