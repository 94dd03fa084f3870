"""A run that goes on from the adapter of another: the same answers at first, then its own checkpoints and exports."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.e2e.support import metrics_of, overrides, write_task
from verl_like.cli.main import main
from verl_like.trainer.compose import compose
from verl_like.trainer.run import run


def test_a_run_goes_on_from_an_adapter(
    make_tiny_model: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task, model, adapter = write_task(tmp_path, num_rows=16), make_tiny_model(), tmp_path / "adapter"
    steps = {"trainer__total_training_steps": 2, "trainer__save_freq": 2, "trainer__test_freq": 2}
    lora = {"actor_rollout_ref__model__lora_rank": 4, "actor_rollout_ref__model__lora_alpha": 12}
    run(compose(overrides(task, model, tmp_path / "first", **steps, **lora)))
    main(["export", str(tmp_path / "first"), str(adapter), "--lora", "apart"])
    steps |= {"trainer__total_training_steps": 1, "trainer__save_freq": 1, "trainer__val_before_train": True}
    go_on = {"actor_rollout_ref__model__lora_adapter_path": adapter}
    config = compose(overrides(task, model, tmp_path / "second", **steps, **go_on))
    run(config)
    before, after = metrics_of(tmp_path / "first")[-1], metrics_of(tmp_path / "second")[0]
    scores = {name: value for name, value in before.items() if name.startswith("val-core")}
    assert scores and {name: after[name] for name in scores} == scores
    saved = json.loads((tmp_path / "second/global_step_1/actor/adapter/adapter_config.json").read_text())
    assert (saved["r"], saved["lora_alpha"]) == (4, 12)
    old, new = (
        load_file(folder / "adapter_model.safetensors")
        for folder in (adapter, tmp_path / "second/global_step_1/actor/adapter")
    )
    assert old.keys() == new.keys()
    moved = max(float((old[name] - new[name]).abs().max()) for name in old)
    assert 0 < moved < 0.02, "one step of 3e-3 from the adapter, not from a new one"
    main(["export", str(tmp_path / "second"), str(tmp_path / "merged")])
    name = "model.layers.0.self_attn.q_proj"
    base, merged = (
        load_file(folder / "model.safetensors")[f"{name}.weight"] for folder in (model, tmp_path / "merged")
    )
    b, a = (new[f"base_model.model.{name}.lora_{part}.weight"] for part in "BA")
    torch.testing.assert_close(merged, base + 12 / 4 * b @ a)
    capsys.readouterr()
    main(["eval", str(tmp_path / "second"), "--json", str(tmp_path / "all.json")])  # by its own config.yaml
    last = {k: v for k, v in metrics_of(tmp_path / "second")[-1].items() if k.startswith("val-core")}
    assert {k: v for k, v in json.loads((tmp_path / "all.json").read_text()).items() if k in last} == last
    # taken up again, with the adapter's settings from the saved configuration
    more = [*overrides(task, model, tmp_path / "second", **steps, **go_on), "trainer.total_training_steps=2"]
    run(compose(more))
    assert len(metrics_of(tmp_path / "second")) >= 2
