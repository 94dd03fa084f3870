"""The benchmark runs the real trainer; forced lengths and replayed tokens are what was asked for."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from verl_like.bench import grpo, shapes
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
LOCAL = [
    "actor_rollout_ref.rollout.name=hf",
    "trainer.launcher=local",
    "trainer.device=cpu",
    "actor_rollout_ref.actor.optim.lr=0",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=64",
]


def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mean: int | None, **options: Any) -> dict[str, Any]:
    load = Workload(num_prompts=2, responses_per_prompt=3, prompt_length=4, mean_response=mean, max_response=12)
    monkeypatch.setitem(shapes.MODELS, "cpu", MODEL)
    monkeypatch.setitem(shapes.WORKLOADS, "cpu", load)
    defaults: dict[str, Any] = {
        "model": "cpu",
        "workload": "cpu",
        "ranks": 1,
        "steps": 2,
        "warmup": 1,
        "log_prob_pass": False,
        "replay": None,
        "out": tmp_path,
        "json": None,
        "compare": None,
        "overrides": LOCAL,
    }
    return grpo.main(argparse.Namespace(**(defaults | options)))


def test_forced_lengths_are_the_drawn_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures = run(tmp_path, monkeypatch, 6, json=tmp_path / "a.json", log_prob_pass=True)
    drawn = [shapes.WORKLOADS["cpu"].draw_lengths(step) for step in (2, 3)]
    means = sorted(sum(lengths) / 6 for lengths in drawn)
    assert figures["response_length_mean"] == pytest.approx(sum(means) / 2)
    assert figures["phases"]["old_log_prob"]["seconds"] > 0 and figures["update_to_gemm_floor"] > 1
    assert json.loads((tmp_path / "a.json").read_text())["steps"] == 2


def test_a_replay_trains_on_the_recorded_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With frozen weights the same tokens give the same gradient at every step, others another one."""
    same = [[3, 4, 1], [5, 6, 7, 8, 1], [9, 1], [4, 4, 4, 1], [5, 1], [6, 7, 1]]
    other = [[11, 12, 1], *same[1:]]
    recording = tmp_path / "tokens.json"
    recording.write_text(json.dumps([same, same, other]))
    first = run(tmp_path, monkeypatch, None, replay=recording, warmup=0, steps=3)
    assert first["grad_norms"][0] != pytest.approx(first["grad_norms"][1], rel=1e-3)  # other prompts
    again = run(tmp_path, monkeypatch, None, replay=recording, warmup=0, steps=3)
    assert again["grad_norms"] == pytest.approx(first["grad_norms"], rel=1e-6)
    recording.write_text(json.dumps([same, other, other]))
    changed = run(tmp_path, monkeypatch, None, replay=recording, warmup=0, steps=3)
    assert changed["grad_norms"][0] == pytest.approx(first["grad_norms"][0], rel=1e-6)
    assert changed["grad_norms"][1] != pytest.approx(first["grad_norms"][1], rel=1e-3)


def test_table_compares_with_an_earlier_run() -> None:
    figures = {
        "phases": {"gen": {"seconds": 2.0, "floor_ratio": 4.0}},
        "step_seconds": 3.0,
        "steps": 5,
        "tokens": 1000.0,
        "response_length_mean": 10.0,
        "tokens_per_second": 333.3,
        "update_to_gemm_floor": 1.5,
        "mfu_update": 0.6,
        "step_to_target": 1.1,
        "peak": {"source": "measured", "flops": 1e11, "bandwidth": 1e10},
        "parameters": 7,
        "environment": {},
    }
    earlier = {"phases": {"gen": {"seconds": 4.0}}, "step_seconds": 6.0}
    lines = grpo.table(figures, earlier).splitlines()
    assert lines[1].split() == ["gen", "2.000", "4.00", "0.500"]
    assert lines[2].split() == ["step", "3.000", "0.500"]
