"""Whole runs and benchmarks on cuda:0, in this process and in processes of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.support import metrics_of, overrides, write_task
from tests.twin import as_cpu
from tests.unit.bench.tiny import bench, use_tiny_shapes
from verl_like.kit.bench import log_prob, rollout, sync, update
from verl_like.kit.bench.shapes import BenchError
from verl_like.models import attention_groups
from verl_like.parallel.device_peak import DevicePeak
from verl_like.trainer.compose import compose
from verl_like.trainer.run import run

PEAK = DevicePeak(flops=1e9, bandwidth=1e9, source="measured")
ACTOR = "actor_rollout_ref.actor"
SETTINGS: dict[str, Any] = {
    "trainer.total_training_steps": 2,
    "trainer.n_gpus_per_node": 1,
    f"{ACTOR}.fsdp_config.dtype": "float32",
    f"{ACTOR}.fsdp_config.param_offload": True,
    f"{ACTOR}.fsdp_config.optimizer_offload": True,
    f"{ACTOR}.old_log_probs": "recompute",
    "actor_rollout_ref.rollout.dtype": "float32",
    "actor_rollout_ref.model.enable_activation_offload": True,
    "trainer.save_freq": 2,
}
SAME = ("actor/pg_loss", "actor/grad_norm", "critic/score/mean", "response_length/mean", "weight_sync/probe_gap_mean")


def test_a_run_on_the_card_is_one_on_a_cpu(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sampling, sync, log-probs and updates with everything offloaded in between: two steps, the same numbers."""
    monkeypatch.setattr(attention_groups, "_by_products", lambda key, first: False)  # the CPU's own way of attention
    task, found = write_task(tmp_path), {}
    for device in ("cpu", "cuda"):
        as_cpu.forget()
        run(compose(overrides(task, tiny_model, tmp_path / device, **SETTINGS, **{"trainer.device": device})))
        assert as_cpu.faults() == []
        found[device] = metrics_of(tmp_path / device)
    for ours, expected in zip(found["cuda"], found["cpu"], strict=True):
        for name in SAME:
            assert ours[name] == pytest.approx(expected[name], rel=1e-6, abs=1e-6), name
        assert ours["perf/max_memory_allocated_gb"] > 0
        assert any(name.startswith("perf/memory_peak/") for name in ours)
    (last,) = [path for path in (tmp_path / "cuda").rglob("*") if path.is_dir() and path.name == "global_step_2"]
    assert (last / "actor").is_dir()


@pytest.fixture(autouse=True)
def nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The peak of a card that is not there would be that of a CPU with a card's sizes."""
    monkeypatch.setattr("verl_like.parallel.device_peak.measured_peak", lambda *_: PEAK)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    use_tiny_shapes(monkeypatch)
    for module in (update, log_prob, rollout, sync):
        monkeypatch.setattr(module, "device_peak", lambda *_: PEAK)


# in half precision where the peak is looked up by processes of their own: it is in the data sheets then
COMMANDS = {
    "head": ["--tokens", "32", "--vocab", "64", "--hidden", "32", "--ways", "torch", "--dtype", "bfloat16"],
    "attention": ["--tokens", "64", "--dtype", "bfloat16"],
    "rollout": ["--rounds", "1", "--engine", "hf"],
    "log-prob": ["--rounds", "1"],
    "update": ["--rounds", "1", "--token-budgets", "32", "--dtypes", "float32"],
    "sync": ["--rounds", "1", "--engine", "hf", "--channel", "ipc"],
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_benchmark_runs_and_tells_the_card(name: str, tiny: None, tmp_path: Path) -> None:
    report = bench(tmp_path / "a.json", name, *COMMANDS[name])
    assert report.hardware["device"] == "NVIDIA H200" and report.rows
    if name == "update":
        assert report.rows[0].figures["peak GB"] > 0


def test_a_broadcast_needs_a_second_card(tiny: None, tmp_path: Path) -> None:
    with pytest.raises((BenchError, SystemExit), match=r"needs a GPU for the engine|1"):
        bench(tmp_path / "a.json", "sync", "--rounds", "1", "--engine", "hf", "--channel", "broadcast")
