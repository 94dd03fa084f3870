"""Command lines of engines' own servers; which ranks start one."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any, cast

import pytest

from verl_like.cluster.worker_group import RankEnv
from verl_like.config import EngineKwargsConfig, PPOConfig
from verl_like.config.reward import RewardRolloutConfig
from verl_like.plugins.reward_models import server
from verl_like.plugins.reward_models.server import RewardServer, server_command, server_environment
from verl_like.workers.spec import WorkerSpec

PLACE: dict[str, Any] = {"host": "127.0.0.1", "port": 8123, "trust_remote_code": False}


def options(command: list[str]) -> dict[str, list[str]]:
    """--name and its values, behind the module."""
    found: dict[str, list[str]] = {}
    for word in command[3:]:
        if word.startswith("--"):
            found[word[2:]] = []
        else:
            found[list(found)[-1]].append(word)
    return found


def test_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.versions, "version", lambda: "0.32.0")
    rollout = RewardRolloutConfig(
        name="vllm",
        prompt_length=100,
        response_length=28,
        enforce_eager=False,
        cudagraph_capture_sizes=[1, 4],
        enable_prefix_caching=False,
        engine_kwargs=EngineKwargsConfig(vllm={"max_loras": 2, "enable_lora": True, "seed": None}),
    )
    command = server_command(rollout, "/m/judge", device="cuda", **PLACE)
    assert command[1:3] == ["-m", "vllm.entrypoints.openai.api_server"]
    found = options(command)
    assert found["model"] == found["served-model-name"] == ["/m/judge"] and found["max-model-len"] == ["128"]
    assert found["cudagraph-capture-sizes"] == ["1", "4"] and found["port"] == ["8123"]
    assert found["no-enable-prefix-caching"] == [] == found["enable-chunked-prefill"] == found["enable-lora"]
    assert found["max-loras"] == ["2"] and found["dtype"] == ["auto"]
    assert not {"enforce-eager", "seed", "trust-remote-code", "enable-prefix-caching"} & found.keys()
    assert options(server_command(rollout, "/m/judge", device="cpu", **PLACE))["dtype"] == ["float32"]
    given = {"enable_prefix_caching": False, "async_scheduling": False, "hf_overrides": {"a": [1, None]}}
    given["disable_log_stats"] = False
    found = options(
        server_command(
            RewardRolloutConfig(name="vllm", engine_kwargs=EngineKwargsConfig(vllm=given)),
            *("/m/judge",),
            device="cuda",
            **PLACE,
        )
    )
    assert found["no-enable-prefix-caching"] == [] == found["no-async-scheduling"]
    assert not {"enable-prefix-caching", "async-scheduling", "disable-log-stats"} & found.keys()
    assert "no-disable-log-stats" not in found
    assert json.loads(found["hf-overrides"][0]) == {"a": [1, None]}
    given = {"enable_prefix_caching": True}
    rollout = RewardRolloutConfig(
        name="vllm", enable_prefix_caching=False, engine_kwargs=EngineKwargsConfig(vllm=given)
    )
    found = options(server_command(rollout, "/m/judge", device="cuda", **PLACE))
    assert "enable-prefix-caching" in found and "no-enable-prefix-caching" not in found


def test_sglang_is_for_cuda() -> None:
    rollout = RewardRolloutConfig(
        name="sglang", max_model_len=64, engine_kwargs=EngineKwargsConfig(sglang={"dp_size": 2})
    )
    command = server_command(rollout, "/m/judge", device="cuda", **PLACE)
    found = options(command)
    assert command[2] == "sglang.launch_server" and found["context-length"] == ["64"] and found["dp-size"] == ["2"]
    assert found["mem-fraction-static"] == ["0.5"] and found["disable-cuda-graph"] == []
    rollout = RewardRolloutConfig(name="sglang", enforce_eager=False, cudagraph_capture_sizes=[1, 4])
    found = options(server_command(rollout, "/m/judge", device="cuda", **PLACE))
    assert found["cuda-graph-bs-decode"] == ["1", "4"]  # SGLang 0.5.23 has one list for each phase
    with pytest.raises(ValueError, match=r"reward_model.rollout.name=sglang on device cpu: .* set reward_model"):
        server_command(rollout, "/m/judge", device="cpu", **PLACE)


def test_environment() -> None:
    assert server_environment("cuda", "2,3")["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert "CUDA_VISIBLE_DEVICES" not in server_environment("cuda", None)
    assert server_environment("cpu", None)["VLLM_CPU_KVCACHE_SPACE"] == "1"


def test_the_first_rank_of_each_group_has_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[list[str], dict[str, str]]] = []

    class Noted:
        pid = 7

        def __init__(self, command: list[str], *, health: str, log: object, environment: dict[str, str]) -> None:
            started.append((command, environment))

        def start(self) -> None: ...

        def wait_ready(self, timeout_s: float) -> None: ...

        def end(self) -> None: ...

    monkeypatch.setattr("verl_like.plugins.reward_models.server.Server", Noted)
    monkeypatch.setattr(server.versions, "version", lambda: "0.32.0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    config = PPOConfig()
    config.reward_model.rollout = RewardRolloutConfig(name="vllm", tensor_model_parallel_size=2)
    config.reward_model.model.path = "/m/judge"
    spec = cast(WorkerSpec, SimpleNamespace(config=config, profile_dir="/tmp/run/profile"))

    def rank(number: int, local_world_size: int = 4) -> RewardServer:
        env = {"world_size": 4, "local_world_size": local_world_size, "node_rank": 0, "run_id": "r", "device": "cuda"}
        return RewardServer(spec, RankEnv(rank=number, local_rank=number, master_address="", master_port=0, **env))

    places = [rank(number).where() for number in range(4)]
    assert [place is not None for place in places] == [True, False, True, False]
    assert [environment["CUDA_VISIBLE_DEVICES"] for _, environment in started] == ["4,5", "6,7"]
    assert places[2] is not None and "/tmp/run/workers/judge2.log" in places[2][1]
    with pytest.raises(ValueError, match="tensor_model_parallel_size=2 does not divide the 3 processes"):
        rank(0, local_world_size=3)
