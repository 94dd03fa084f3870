"""What the axes of a mesh send and how long stages wait: counts by hand, and the whole benchmark on two ranks."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.bench.tiny import bench
from verl_like.cli.main import main
from verl_like.kit.bench import mesh
from verl_like.kit.bench.wires import sent_bytes
from verl_like.kit.forecast import traffic
from verl_like.parallel import pipeline
from verl_like.parallel.pipeline import order_of, passes_ahead


def test_bytes_of_an_operator() -> None:
    """By hand, of four ranks: a row has 12 bytes, eight rows are 96, and a rank's two of them 24."""
    whole, mine = torch.zeros(8, 3), torch.zeros(2, 3)
    assert sent_bytes("c10d::_allgather_base_", (whole, mine, None), 4, 0) == 3 * 24
    assert sent_bytes("c10d::_reduce_scatter_base_", (mine, whole, None), 4, 0) == 3 * 24
    assert sent_bytes("c10d::allreduce_", ([whole, mine], None), 4, 0) == 2 * 3 * (96 + 24) // 4
    assert sent_bytes("c10d::alltoall_base_", (whole, whole, None, [], []), 4, 0) == 3 * 24
    uneven = (mine, whole, None, [1, 1, 0, 0], [5, 1, 0, 2])
    assert [sent_bytes("c10d::alltoall_base_", uneven, 4, rank) for rank in range(4)] == [36, 84, 96, 72]
    assert sent_bytes("c10d::send", ([mine], None, 1, 0), 4, 0) == 24
    assert sent_bytes("c10d::recv_", ([mine], None, 1, 0), 4, 0) == 0
    with pytest.raises(NotImplementedError, match="c10d::gather_"):
        sent_bytes("c10d::gather_", ([mine], None), 4, 0)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_the_orders_wait_as_long_as_the_formula_says(schedule: str) -> None:
    """With any number of micro-batches, multiples of the stages or not; and none of them waits for ever."""
    for stages, count, pieces in itertools.product((2, 3, 4, 8), (1, 2, 3, 7, 8, 9, 18), (1, 2, 3)):
        least = traffic.bubble(stages, count, pieces)
        if count >= stages or pieces == 1:
            assert least == (stages - 1) / (pieces * count + stages - 1)
        assert mesh.idle_slots(schedule, stages, count, pieces) == pytest.approx(least)


def test_late_gradients_leave_a_third_of_the_wait() -> None:
    """By the formula, exactly, where micro-batches are no fewer than stages, or a stage has one piece."""
    for stages, count, pieces in itertools.product((2, 3, 4, 8), (1, 2, 3, 7, 8, 9, 18), (1, 2, 3)):
        least, waits = traffic.bubble(stages, count, pieces, late=True), mesh.idle_slots
        if count >= stages:
            assert least == (stages - 1) / (3 * pieces * count + stages - 1)
        if count >= stages or pieces == 1:
            assert waits("zero_bubble", stages, count, pieces) == pytest.approx(least)
        else:
            assert least - 1e-9 < waits("zero_bubble", stages, count, pieces) <= waits("1f1b", stages, count, pieces)


def test_what_a_stage_keeps_of_1f1b() -> None:
    """By its order: with several pieces, where micro-batches are a multiple, (stages - 1) passes more than with one."""
    for stages, count, pieces in itertools.product((2, 4), (1, 3, 8, 9), (1, 2, 3)):
        change = [-1 if kind == "backward" else 1 for kind, *_ in order_of("1f1b", 0, stages, count, pieces)]
        most = min(passes_ahead(0, stages, count, pieces) + 1, count * pieces)
        assert max(itertools.accumulate(change)) == most
        assert count % stages or most == stages * pieces + (pieces > 1) * (stages - 1)


def test_an_order_that_waits_longer_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """One micro-batch after the other: a stage of two is idle half of the time."""

    def one_by_one(_: str, stage: int, stages: int, count: int, pieces: int) -> Any:
        return ((kind, 0, i) for i in range(count) for kind in ("forward", "backward"))

    monkeypatch.setattr(mesh, "order_of", one_by_one)
    assert mesh.idle_slots("none", 2, 8) == pytest.approx(0.5)


def test_an_order_that_waits_for_ever_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many passes ahead as of stages in one piece: the first piece's come back before the last one's have begun."""
    monkeypatch.setattr(pipeline, "passes_ahead", lambda stage, stages, *_: stages - 1 - stage)
    with pytest.raises(AssertionError, match="each of 2 stages waits for another"):
        mesh.idle_slots("1f1b", 2, 8, 2)
    monkeypatch.setattr(mesh, "order_of", lambda *about: reversed([*order_of(*about)]))
    with pytest.raises(AssertionError, match="waits for another"):
        mesh.idle_slots("1f1b", 2, 8)


def test_measured_waiting() -> None:
    """Of 2 stages for 10 s: one waits 2 s in between, the other begins 1 s later and ends 1 s sooner."""
    assert mesh.idle_share([(5.0, 15.0, 2.0), (6.0, 14.0, 0.0)]) == pytest.approx(4 / 20)


def test_a_mesh_that_is_none_is_refused() -> None:
    with pytest.raises(SystemExit, match="--only shard-pipe: with --ranks 2 there are shard, shard-kept, replicate, "):
        main(["bench", "mesh", "--ranks", "2", "--only", "shard-pipe"])


@pytest.mark.engines
def test_every_axis_of_two_ranks(tmp_path: Path) -> None:
    report = bench(tmp_path / "mesh.json", "mesh", "--ranks", "2")
    axes = {row.name: row for row in report.rows if "bubble" not in row.name}
    assert axes.keys() >= {f"{axis}: {axis}" for axis in ("shard", *mesh.KEYS)}
    for name, row in axes.items():  # nobody can send less than must be sent
        assert 1 <= row.figures["by least"] <= mesh.BYTES, name
    assert report.row("expert: expert").figures["dropped"] == 0
    assert report.row("pipe: bubble, order").figures["by least"] == pytest.approx(1)
    assert report.row("pipe: bubble, measured").figures["by least"] > 0.9  # a busy machine makes it longer
    # Weights and gradients by hand: 4 micro-batches x (2 gathers, of the root 1, + 1 sum), 4 bytes, half by each.
    layer = 2 * 128 + 2 * 128 * 128 + 2 * 128 * 64 + 128 + 2 * 64 + 3 * 128 * 256
    root = 128 + 2 * 64 * 128
    least = 2 * (12 * 4 * layer + 8 * root) * 4 / 2 / 1e6
    assert report.row("shard: shard").figures["least"] == pytest.approx(least)
