"""A worker process imports the user's modules before it builds anything."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from verl_like.cluster.worker_group import RankEnv
from verl_like.config import ActorRolloutRefConfig, ModelConfig, PPOConfig
from verl_like.workers import host
from verl_like.workers.spec import WorkerSpec


def test_modules_separated_by_commas_and_those_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """model.external_lib="a,b" was one module's name here, and two on the driver."""
    ended: list[str] = []
    monkeypatch.setattr(host, "init_distributed", lambda **arguments: "joined")
    monkeypatch.setattr(host, "shutdown_distributed", lambda: ended.append("left"))
    monkeypatch.syspath_prepend(tmp_path)
    names = ["own_library_one", "own_library_two", "own_plugin"]
    for name in names:
        (tmp_path / f"{name}.py").write_text("")
    (tmp_path / "own_broken.py").write_text("1 / 0")
    env: Any = RankEnv(
        rank=0, world_size=1, local_rank=0, local_world_size=1, node_rank=0,
        master_address="127.0.0.1", master_port=1, run_id="test", device="cpu",
    )  # fmt: skip

    def spec(library: str) -> WorkerSpec:
        model = ModelConfig(external_lib=library)
        config = PPOConfig(actor_rollout_ref=ActorRolloutRefConfig(model=model))
        plan: Any = SimpleNamespace()
        sizes = {"tokenizer_size": 1, "max_model_len": 1, "profile_dir": ""}
        return WorkerSpec(config=config, plan=plan, **sizes, external_modules="own_plugin")

    with host.joined(spec("own_library_one,own_library_two"), env) as joined:
        assert joined == "joined" and set(names) <= set(sys.modules) and not ended
    with (
        pytest.raises(ValueError, match=r"(?s)model\.external_lib=own_broken could not.*ZeroDivision"),
        host.joined(spec("own_broken"), env),
    ):
        raise AssertionError("the worker must not be built")
    assert ended == ["left"]
