"""The benchmark runs the real trainer; forced lengths and replayed tokens are what was asked for."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.unit.bench.tiny import bench, use_tiny_shapes
from verl_like.kit.bench import grpo, shapes
from verl_like.kit.bench.bars import bars_of
from verl_like.kit.bench.report import Report, Row
from verl_like.kit.bench.shapes import MODELS, WORKLOADS, BenchError, Workload

LOCAL = [
    "actor_rollout_ref.rollout.name=hf",
    "trainer.launcher=local",
    "trainer.device=cpu",
    "actor_rollout_ref.actor.optim.lr=0",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=64",
]


def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mean: int | None, *options: str) -> Report:
    load = Workload(num_prompts=2, responses_per_prompt=3, prompt_length=4, mean_response=mean, max_response=12)
    use_tiny_shapes(monkeypatch, load)
    return bench(tmp_path / "a.json", "grpo", "--ranks", "1", "--out", str(tmp_path), *options, "--", *LOCAL)


def test_forced_lengths_are_the_drawn_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = run(tmp_path, monkeypatch, 6, "--steps", "2", "--log-prob-pass")
    figures = report.figures
    drawn = [shapes.WORKLOADS["cpu"].draw_lengths(step) for step in (2, 3)]
    means = sorted(sum(lengths) / 6 for lengths in drawn)
    assert figures["response_length_mean"] == pytest.approx(sum(means) / 2)
    assert (report.row("old_log_prob").seconds or 0) > 0 and figures["update_to_gemm_floor"] > 1
    assert figures["steps"] == 2 and report.row("gen").floor_seconds is not None
    work_left = 8 * figures["parameters"] * figures["tokens"] / (0.4 * figures["peak"]["flops"])
    step, generation = report.row("step").seconds or 0, report.row("gen").seconds or 0
    assert figures["step_to_target"] == pytest.approx(step / (generation + work_left))


def test_a_replay_trains_on_the_recorded_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With frozen weights the same tokens give the same gradient at every step, others another one."""
    same = [[3, 4, 1], [5, 6, 7, 8, 1], [9, 1], [4, 4, 4, 1], [5, 1], [6, 7, 1]]
    other = [[11, 12, 1], *same[1:]]
    recording = tmp_path / "tokens.json"
    recording.write_text(json.dumps([same, same, other]))
    options = ["--replay", str(recording), "--warmup", "0", "--steps", "3"]
    first = run(tmp_path, monkeypatch, None, *options).figures
    assert first["grad_norms"][0] != pytest.approx(first["grad_norms"][1], rel=1e-3)  # other prompts
    again = run(tmp_path, monkeypatch, None, *options).figures
    assert again["grad_norms"] == pytest.approx(first["grad_norms"], rel=1e-6)
    recording.write_text(json.dumps([same, other, other]))
    changed = run(tmp_path, monkeypatch, None, *options).figures
    assert changed["grad_norms"][0] == pytest.approx(first["grad_norms"][0], rel=1e-6)
    assert changed["grad_norms"][1] != pytest.approx(first["grad_norms"][1], rel=1e-3)


def step_metrics(**changes: float) -> dict[str, float]:
    metrics = {
        "perf/total_num_tokens": 1000.0,
        "timing_s/step": 4.0,
        "timing_s/gen": 1.0,
        "timing_s/update_actor": 2.0,
        "timing_s/update_weights": 0.25,
        "perf/floor_ratio/gen": 4.0,
        "perf/mfu/actor": 0.45,
        "response_length/mean": 20.0,
        "actor/pg_loss": 0.1,
        "actor/grad_norm": 1.0,
    }
    return metrics | changes


def test_figures_and_bars_by_hand() -> None:
    """10 parameters, 1,000 tokens, 1e5 operations a second: 8PT at 40% are 2 s, 6PT at the peak 0.6 s."""
    peak = {"flops": 1e5, "bandwidth": 1e9, "source": "data sheet"}
    work = {"model": asdict(MODELS["1.5b"]), "workload": asdict(WORKLOADS["w1"]), "ranks": 1}
    steps = [step_metrics(), step_metrics(), step_metrics(**{"timing_s/step": 40.0})]
    report = grpo.summary(steps, peak, 10, work, 0.5)
    assert report.row("gen").floor_seconds == 0.25 and report.row("step").seconds == 4.0
    assert report.figures["step_to_target"] == pytest.approx(4.0 / (0.5 + 2.0))
    assert grpo.summary(steps, peak, 10, work, None).figures["step_to_target"] == pytest.approx(4.0 / 3.0)
    assert report.figures["update_to_gemm_floor"] == pytest.approx(2.0 / 0.6)
    on_gpu = dataclasses.replace(report, hardware={"device": "NVIDIA H200", "devices": 1})
    assert bars_of(on_gpu) == [
        "Bar: step by (generation alone + 8PT at 40%) 1.600, at most 1.3: MISSED.",
        "Bar: MFU of the update 0.450, at least 0.4: met.",
        "Bar: weight sync, seconds 0.250, at most 0.15: MISSED.",
    ]
    assert bars_of(dataclasses.replace(on_gpu, work=work | {"ranks": 2})) == []


@pytest.mark.parametrize(("ranks", "limit"), [(1, "1.35: MISSED"), (2, "1.5: met"), (3, None)])
def test_bars_on_a_cpu(ranks: int, limit: str | None) -> None:
    report = Report(
        bench="grpo",
        work={"model": asdict(MODELS["cpu"]), "workload": asdict(WORKLOADS["cpu"]), "ranks": ranks},
        rows=[],
        figures={"update_to_gemm_floor": 1.4},
        hardware={"device": "some processor", "cores": 2},
    )
    wanted = [] if limit is None else [f"Bar: update by 6 x parameters x tokens 1.400, at most {limit}."]
    assert bars_of(report) == wanted


def test_generation_alone_must_be_of_the_same_work(tmp_path: Path) -> None:
    work = {"model": asdict(MODELS["cpu"]), "workload": asdict(WORKLOADS["w1"]), "ranks": 2}
    path = tmp_path / "rollout.json"
    Report(bench="rollout", work=work, rows=[Row(name="generation", seconds=1.5)]).save(path)
    assert grpo.generation_alone(path, work | {"overrides": ["a=1"]}) == 1.5
    assert grpo.generation_alone(None, work) is None
    with pytest.raises(BenchError, match="ranks is 2, not 1"):
        grpo.generation_alone(path, work | {"ranks": 1})
    Report(bench="update", work=work, rows=[Row(name="generation", seconds=1.5)]).save(path)
    with pytest.raises(BenchError, match="bench is 'update', not 'rollout'"):
        grpo.generation_alone(path, work)
