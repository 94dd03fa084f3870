"""Each phase alone, run for real on a tiny shape: floors by hand, the work that was asked for, refusals."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.bench.tiny import LOAD, MODEL, bench, use_tiny_shapes
from tests.worlds.processes import forks
from verl_like.batch import Metric
from verl_like.cli.main import main
from verl_like.kit.bench import engine_process, log_prob, rollout, shapes, sync, update
from verl_like.kit.bench.inputs import grouped_rows
from verl_like.kit.bench.phase import phase_job
from verl_like.kit.bench.report import Report
from verl_like.kit.bench.sync import WITH, WITHOUT, link_floor
from verl_like.kit.bench.update import RankFigures, Variant
from verl_like.parallel.device_peak import DevicePeak

TP = "actor_rollout_ref.rollout.tensor_model_parallel_size"
BODY = 32 * 32 + 2 * 32 * 32 + 32 * 32 + 3 * 32 * 32  # q, k and v, o, the MLP's three
HEAD = 20 * 32
ALL = BODY + HEAD + 3 * 32 + 3 * 32  # biases of q, k, v; three norms
RESPONSES = LOAD.draw_lengths(1)
LENGTHS = [4 + n for n in RESPONSES]
PEAK = DevicePeak(flops=1e9, bandwidth=1e9, source="measured")
# a multiply and an add for each weight that a token meets, and 4 x width for each pair of attention
FORWARD = 2 * (BODY * sum(LENGTHS) + HEAD * sum(RESPONSES)) + 4 * 32 * sum(n * (n + 1) / 2 for n in LENGTHS)


@pytest.fixture(autouse=True)
def _tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    use_tiny_shapes(monkeypatch)
    for module in (update, log_prob, rollout, sync):
        monkeypatch.setattr(module, "device_peak", lambda *_: PEAK)


def test_update_times_every_variant_against_both_floors(tmp_path: Path) -> None:
    options = ["--token-budgets", "32", "64", "--rounds", "1", "--dtypes", "float32", "bfloat16"]
    report = bench(tmp_path / "a.json", "update", *options)
    kinds = [(path, dtype) for path in ("packed", "padded") for dtype in ("float32", "bfloat16")]
    assert [row.name for row in report.rows] == [f"{p}, {d}, {b} tokens" for p, d in kinds for b in (32, 64)]
    for row in report.rows:
        rate = PEAK.flops
        assert row.seconds is not None and row.floor_seconds is not None
        assert row.floor_seconds == pytest.approx(3 * FORWARD / rate)
        assert row.figures["x 6PT"] == pytest.approx(row.seconds * rate / (6 * ALL * sum(LENGTHS)))
        assert row.figures["MFU"] == pytest.approx(row.floor_seconds / row.seconds)
    assert report.figures["tokens"] == sum(LENGTHS)
    assert report.figures["tokens_prompts_once"] == 2 * 4 + sum(RESPONSES)
    packed, padded = (report.row(f"{path}, float32, 64 tokens").figures for path in ("packed", "padded"))
    assert (
        packed["shared"] == pytest.approx((sum(LENGTHS) - 8 - sum(RESPONSES)) / sum(LENGTHS)) and packed["fill"] > 0.4
    )
    assert "shared" not in padded and "fill" not in padded
    assert any("packed against padded" in note for note in report.notes)
    assert any("bfloat16 against float32" in note for note in report.notes)


@pytest.mark.engines
def test_update_on_two_ranks(tmp_path: Path) -> None:
    options = ["--ranks", "2", "--threads", "1", "--rounds", "1", "--paths", "packed", "--token-budgets", "16"]
    report = bench(tmp_path / "a.json", "update", *options)
    assert report.work["ranks"] == 2
    (row,) = report.rows
    batch = math.ceil(sum(LENGTHS) / 16)
    assert row.figures["micro-batches"] < batch  # of the fuller rank, which has about half of the rows


def test_the_slowest_rank_counts_and_rates_add_up() -> None:
    def rank(seconds: list[float], flops: float) -> RankFigures:
        peaks = [DevicePeak(flops=f, bandwidth=1.0, source="measured") for f in (1.0, flops, flops)]
        metrics = {"perf/micro_batches": Metric(value=2.0, reduction="max")}
        name = "packed, float32, 8 tokens"
        return RankFigures(
            seconds={name: seconds}, metrics={name: metrics}, memory_gb={name: flops}, peaks={"float32": peaks}
        )

    class Arguments:
        workload, model, rows, ranks, overrides = "cpu", "cpu", None, 1, []

    variant = Variant(path="packed", dtype="float32", budget=8)
    arguments: Any = Arguments()
    with phase_job(arguments) as job:
        batch = grouped_rows(LOAD, 20, seed=1)
        report = update.report_of(job, batch, [variant], [rank([9, 2, 1], 3e6), rank([9, 1, 4], 5e6)], {})
    (row,) = report.rows
    assert row.seconds == 3.0  # median of 2 and 4
    assert row.floor_seconds == pytest.approx(3 * FORWARD / 8e6)
    assert row.figures["peak GB"] == 5e6


def test_log_prob_is_one_forward_pass(tmp_path: Path) -> None:
    report = bench(tmp_path / "a.json", "log-prob", "--rounds", "1")
    (row,) = report.rows
    assert row.seconds is not None and row.floor_seconds is not None
    assert row.figures["tokens/s"] == pytest.approx(sum(LENGTHS) / row.seconds)
    assert f"{sum(RESPONSES)} of them through the head" in report.notes[0]
    assert row.floor_seconds == pytest.approx(FORWARD / PEAK.flops)


def test_rollout_forces_the_drawn_lengths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[int]] = []
    build = rollout.requests_of

    def requests_of(*arguments: Any) -> Any:
        requests = build(*arguments)
        seen.append([len(request.prompt_ids) for request in requests])
        assert all(request.sampling.stop_token_ids == () for request in requests)
        assert [request.sampling.max_tokens for request in requests] == RESPONSES
        return requests

    monkeypatch.setattr(rollout, "requests_of", requests_of)
    report = bench(tmp_path / "a.json", "rollout", "--engine", "hf", "--rounds", "2")
    assert seen == [[4] * 6] * 3 and report.figures["sampled_tokens"] == sum(RESPONSES)
    (row,) = report.rows
    assert row.seconds is not None and row.figures["tokens/s"] == pytest.approx(sum(RESPONSES) / row.seconds)


def test_engines_and_workloads_in_one_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(shapes.WORKLOADS, "w1", dataclasses.replace(LOAD, num_prompts=1, mean_response=9))
    options = ["rollout", "--engines", "hf", "--workloads", "cpu", "w1", "--rounds", "1"]
    report = bench(tmp_path / "a.json", *options)
    assert [row.name for row in report.rows] == ["cpu, hf", "w1, hf"]
    for row, sampled in zip(report.rows, (sum(RESPONSES), sum(shapes.WORKLOADS["w1"].draw_lengths(1))), strict=True):
        assert row.seconds is not None and row.figures["tokens/s"] == pytest.approx(sampled / row.seconds)
    assert report.work["engines"] == ["hf"] and [note.partition(":")[0] for note in report.notes] == ["cpu", "w1"]
    assert "cpu, hf: " in capsys.readouterr().out
    with pytest.raises(SystemExit, match="engines is"):
        bench(tmp_path / "b.json", *options, "--engines", "hf", "vllm", "--compare", str(tmp_path / "a.json"))


def test_the_prompts_of_each_replica_and_round() -> None:
    class Arguments:
        workload, model, rows, ranks, overrides = "cpu", "cpu", None, 2, ["actor_rollout_ref.rollout.name=hf"]

    arguments: Any = Arguments()
    with phase_job(arguments) as job:
        first, second = (rollout.requests_of(job, rank, 1) for rank in (0, 1))
        again = rollout.requests_of(job, 0, 2)
    assert len(first) == len(second) == 3
    assert len({tuple(request.prompt_ids) for request in first}) == 1  # a prompt's responses stay together
    assert len({tuple(request.prompt_ids) for request in [*first, *second, *again]}) == 3
    assert sorted(r.sampling.max_tokens for r in [*first, *second]) == sorted(RESPONSES)


def test_sync_counts_bytes_and_names_stages(tmp_path: Path) -> None:
    report = bench(tmp_path / "a.json", "sync", "--engine", "hf", "--rounds", "1")
    assert [row.name for row in report.rows[:2]] == [WITH, WITHOUT]
    assert report.figures["bytes"] == 4 * ALL  # tied weights once
    stages = {row.name.removeprefix("- "): row for row in report.rows[2:]}
    assert {"probe: trainer", "probe: rollout engine", "load and checksums", "gather and cast shards"} <= set(stages)
    assert report.rows[0].floor_seconds == pytest.approx(2 * 4 * ALL / PEAK.bandwidth)  # read once, written once
    assert report.rows[1].figures["peak MB"] == pytest.approx(4 * 32 * 32 / 1e6)  # the largest tensor and no other
    assert sum(row.figures["share"] for row in stages.values()) == pytest.approx(1.0)
    first = report.rows[0]
    assert first.seconds is not None and first.figures["GB/s"] == pytest.approx(4 * ALL / first.seconds / 1e9)


def test_sync_to_an_engine_in_another_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_process, "get_context", lambda method: forks())
    report = bench(tmp_path / "a.json", "sync", "--engine", "hf", "--rounds", "1", "--channel", "broadcast")
    assert [row.name for row in report.rows] == [WITH, WITHOUT]
    assert report.work["channel"] == "broadcast" and report.figures["bytes"] == 4 * ALL
    peaks = report.rows[1].figures
    bucket = 4 * ALL + 16 * 20  # all of them fit in one, which is padded a little
    largest = 4 * 32 * 32
    assert 4 * ALL <= peaks["peak MB"] * 1e6 <= bucket + largest
    assert 4 * ALL <= peaks["engine's peak MB"] * 1e6 <= bucket + largest


def test_floors_of_the_sync_by_hand() -> None:
    assert link_floor(900, 1, 450.0) == 0.0 and link_floor(900, 4, None) == 0.0
    assert link_floor(900, 4, 450.0) == pytest.approx(900 * 3 / 4 / 450)


def test_a_comparison_with_other_work_ends_with_a_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.json"
    Report(bench="log-prob", work={"ranks": 9}, rows=[]).save(path)
    with pytest.raises(SystemExit, match=r"error: the earlier file cannot be compared: .*work\.ranks is 1, was 9"):
        main(["bench", "log-prob", "--compare", str(path)])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["update", "--rows", "4"], "--rows 4 are no whole groups of 3"),
        (["update", "--", "actor_rollout_ref.actor.grad_clpi=1"], "grad_clpi"),
        (["rollout", "--ranks", "2", "--", f"{TP}=3"], f"{TP}=3: must divide"),
    ],
)
def test_options_that_cannot_work(options: list[str], said: str) -> None:
    with pytest.raises(SystemExit, match=said):
        main(["bench", *options])


def test_random_weights_are_the_models(tmp_path: Path) -> None:
    class Arguments:
        workload, model, rows, ranks, overrides = "cpu", "cpu", None, 1, []

    arguments: Any = Arguments()
    with phase_job(arguments) as job:
        found = dict(rollout.random_weights(job, torch.bfloat16, torch.device("cpu")))
    assert sum(tensor.numel() for tensor in found.values()) == ALL == job.cost.all_weights
    assert all(tensor.dtype == torch.bfloat16 for tensor in found.values())
    assert float(found["model.norm.weight"].min()) == 1.0
    assert 0.015 < float(found["model.embed_tokens.weight"].float().std()) < 0.025
    assert MODEL.vocab_size == len(found["model.embed_tokens.weight"])
