"""rollout.name=auto: the first engine that is installed and can do what the other keys ask."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.models import zoo
from verl_like.plugins.sglang import compat as sglang
from verl_like.trainer.compose import compose_with_warnings

KEY = "actor_rollout_ref.rollout.name"
BASE = ["data.train_files=x.parquet", f"{KEY}=auto"]
SMALL = 64 * 2**20
INT8 = ["actor_rollout_ref.rollout.quantization=int8", "algorithm.rollout_correction.rollout_is=token"]
FP8 = ["actor_rollout_ref.rollout.quantization=fp8", "algorithm.rollout_correction.rollout_is=token"]
SPLIT = ["actor_rollout_ref.rollout.tensor_model_parallel_size=2"]


@pytest.mark.parametrize(
    ("keys", "packages", "cuda", "size", "chosen"),
    [
        ([], ["vllm", "sglang"], False, SMALL, "hf"),
        ([], ["vllm", "sglang"], False, SMALL + 1, "vllm"),
        ([], ["vllm", "sglang"], False, 0, "vllm"),  # nobody knows how large the model is
        ([], ["sglang"], False, SMALL + 1, "hf"),
        (["trainer.device=cpu"], ["vllm", "sglang"], True, SMALL, "hf"),
        ([], ["vllm", "sglang"], True, SMALL, "vllm"),
        ([], ["sglang"], True, SMALL, "sglang"),
        ([], [], True, SMALL, "hf"),
        (SPLIT, ["vllm"], False, SMALL, "vllm"),  # hf keeps the whole model in each process
        (INT8, ["vllm"], True, SMALL, "hf"),  # which alone has it
        (FP8, ["vllm"], False, SMALL, "vllm"),
    ],
)
def test_the_engine_that_is_there_and_can(
    keys: list[str],
    packages: list[str],
    cuda: bool,
    size: int,
    chosen: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    find = importlib.util.find_spec

    def found(name: str, package: str | None = None) -> Any:
        if name == "vllm":
            return find("torch") if name in packages else None
        return find(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", found)
    monkeypatch.setattr(sglang, "installed", lambda: "0.5.9" if "sglang" in packages else None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    if size:
        with open(tmp_path / "model.safetensors", "wb") as file:
            file.truncate(size)
    config, warnings = compose_with_warnings([*BASE, f"actor_rollout_ref.model.path={tmp_path}", *keys])
    assert config.actor_rollout_ref.rollout.name == chosen
    device = "CUDA" if cuda and "trainer.device=cpu" not in keys else "CPU"
    assert [line for line in warnings if KEY in line] == [f"{KEY}=auto: {chosen}, on {device}"]


@pytest.mark.parametrize(("kind", "chosen"), [("llama", "vllm"), ("qwen2", "hf"), ("gpt_oss", "hf"), (None, "vllm")])
def test_the_engine_that_runs_such_a_model(
    kind: str | None, chosen: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gpt_oss: vLLM's CPU build has no kernel for its experts; qwen2, here with windows in part: its model has none."""
    monkeypatch.setattr("verl_like.trainer.compose.is_installed", lambda name: name != "sglang")
    if kind is not None:
        zoo.config(kind).save_pretrained(tmp_path)
    keys = [f"actor_rollout_ref.model.path={tmp_path}", "trainer.device=cpu"]
    assert compose_with_warnings([*BASE, *keys])[0].actor_rollout_ref.rollout.name == chosen


def test_a_named_engine_is_left_alone() -> None:
    config, warnings = compose_with_warnings([BASE[0], "actor_rollout_ref.model.path=x", f"{KEY}=vllm"])
    assert config.actor_rollout_ref.rollout.name == "vllm" and not any(KEY in line for line in warnings)
