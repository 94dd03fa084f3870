"""What a worker built otherwise than it was asked for is told, and nothing else is."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.e2e.support import main_ppo, overrides, write_task
from tests.unit.engine.tiny import build_engine, model_folder
from verl_like.config import ModelConfig, RolloutConfig
from verl_like.config.optim import OptimConfig, OptimizerName
from verl_like.kit.readback import differences, of_model, of_rollout
from verl_like.parallel.dist import ProcessInfo

A = "actor_rollout_ref.actor"
OTHER_RATE = """
import torch

made = torch.optim.AdamW.__init__


def other(self, parameters, **settings):
    made(self, parameters, **{**settings, "lr": 0.5})


torch.optim.AdamW.__init__ = other
"""


def told(engine: Any) -> list[str]:
    return differences(Any, Any, {"actor": SimpleNamespace(engine=engine)})  # pyright: ignore[reportArgumentType]


def test_what_is_as_it_was_asked_for_is_not_told(process: ProcessInfo, tmp_path: Path) -> None:
    folder = model_folder(tmp_path)
    lora = {"lora_rank": 2, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}
    muon = OptimConfig(optimizer=OptimizerName.muon, muon_momentum=0.9)
    cases: tuple[dict[str, Any], ...] = (
        {},
        {"model": {"use_remove_padding": False}},
        {"model": lora},
        {"kind": "value"},
        {"kind": "value", "model": {"lora_rank": 2}},
        {"optim": None},
        {"optim": muon},
    )
    for changes in cases:
        engine = build_engine(process, folder, **changes)
        assert told(engine) == [] and len(list(of_model(engine))) > 2
    assert engine.optimizer is not None
    engine.optimizer.param_groups[0]["momentum"] = 0.8
    assert told(engine) == [f"{A}.optim.muon_momentum: 0.9 was asked for, but 0.8 was built"]


def test_planted_differences(process: ProcessInfo, tmp_path: Path) -> None:
    engine = build_engine(
        process, model_folder(tmp_path), model={"lora_rank": 2, "target_modules": ["q_proj", "v_proj"]}
    )
    assert engine.optimizer is not None and engine._adapters is not None
    group = engine.optimizer.param_groups[0]
    group["lr"], group["betas"] = 1.0, (0.5, 0.5)
    group["params"].pop()
    engine.model.hf.config._attn_implementation = "eager"
    for module in engine._adapters.modules:
        if module.out_features == 32:  # v_proj
            module.scale, module.__class__ = 1.0, torch.nn.Linear
    assert told(engine) == [
        "actor_rollout_ref.model.use_remove_padding=True, attention: verl_like_packed was asked for, "
        "but eager was built",
        f"{A}.optim, tensors: 8 was asked for, but 7 was built",
        "actor_rollout_ref.model.target_modules, v_proj: True was asked for, but False was built",
        f"{A}.optim.lr: 0.01 was asked for, but 1.0 was built",
        f"{A}.optim.betas: (0.9, 0.999) was asked for, but (0.5, 0.5) was built",
    ]


def test_an_engine_that_chose_otherwise(process: ProcessInfo) -> None:
    policy = SimpleNamespace(model=ModelConfig(), rollout=RolloutConfig(max_num_seqs=8))
    spec: Any = SimpleNamespace(config=SimpleNamespace(actor_rollout_ref=policy), max_model_len=12)
    as_asked = {"dtype": torch.float32, "max_model_len": 12, "max_num_seqs": 8, "kv_cache_dtype": "auto"}
    assert all(asked == got for _, asked, got in of_rollout(spec, process, as_asked))
    other = {"dtype": torch.bfloat16, "max_model_len": 4, "max_num_seqs": 2, "kv_cache_dtype": "fp8"}
    role = SimpleNamespace(engine=SimpleNamespace(effective=lambda: other))
    assert differences(spec, process, {"rollout": role}) == [
        "actor_rollout_ref.rollout.dtype: torch.float32 was asked for, but torch.bfloat16 was built",
        "actor_rollout_ref.rollout.max_model_len: 12 was asked for, but 4 was built",
        "actor_rollout_ref.rollout.max_num_seqs: 8 was asked for, but 2 was built",
        "actor_rollout_ref.rollout.kv_cache_dtype: auto was asked for, but fp8 was built",
    ]


@pytest.mark.parametrize("planted", [True, False])
def test_a_run_says_so_when_it_starts(planted: bool, tmp_path: Path, tiny_model: Path) -> None:
    """A module of the user's changes the optimizer of all workers."""
    (tmp_path / "other.py").write_text(OTHER_RATE if planted else "")
    argv = overrides(write_task(tmp_path, 16), tiny_model, tmp_path / "out", trainer__total_training_steps=1)
    done = main_ppo([*argv, f"actor_rollout_ref.model.external_lib={tmp_path}/other.py"])
    assert done.returncode == 0, done.stdout
    said = [line for line in done.stdout.splitlines() if "was asked for, but" in line]
    assert len(said) == planted and all(
        f"{A}.optim.lr: 0.003 was asked for, but 0.5 was built" in line for line in said
    )
