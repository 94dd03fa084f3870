"""Role of a reward model that writes text: an engine's own HTTP server beside the process, on its devices.

The first rank of every tensor_model_parallel_size neighbours has one. It takes no part in calls between ranks: whoever
grades asks it over HTTP, also while this process samples or trains.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verl_like.cluster.environment import free_port
from verl_like.cluster.worker_group import RankEnv
from verl_like.config.engines import ENGINES
from verl_like.config.reward import RewardRolloutConfig
from verl_like.heartbeat import span
from verl_like.plugins.vllm import versions
from verl_like.remote_storage import local_folder
from verl_like.services.server import Server
from verl_like.user_code import load
from verl_like.workers.spec import WorkerSpec

_IMPORTED = time.monotonic()  # the group counts since about then, and is not to give up first: it knows no log
# Switches of vLLM that are off where they are not given, as all of SGLang's are; the others have a --no-... as well.
_WITHOUT_OPPOSITE = frozenset(
    {
        *("aggregate-engine-logging", "data-parallel-external-lb", "data-parallel-hybrid-lb", "disable-log-stats"),
        *("data-parallel-multi-port-external-lb", "grpc", "headless"),
    }
)
ServerPlace = tuple[str, str]  # host:port, and what to call it in messages


class RewardServer:
    """Server of one rank. Raises ServerError, ValueError where it does not start."""

    def __init__(self, spec: WorkerSpec, env: RankEnv) -> None:
        reward = spec.config.reward_model
        rollout, tp = reward.rollout, reward.rollout.tensor_model_parallel_size
        if env.local_world_size % tp:
            raise ValueError(
                f"reward_model.rollout.tensor_model_parallel_size={tp} does not divide the {env.local_world_size} "
                "processes of the reward model's pool on each machine"
            )
        self.place: ServerPlace | None = None
        self._server: Server | None = None
        if env.local_rank % tp:
            return
        port = free_port(env.address)
        network = reward.model
        command = server_command(
            rollout,
            network.path or "",
            host=env.address,
            port=port,
            device=env.device,
            trust_remote_code=network.trust_remote_code,
        )
        address, log = f"{env.address}:{port}", Path(spec.profile_dir).parent / "workers" / f"judge{env.rank}.log"
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        mine = slice(env.local_rank, env.local_rank + tp)
        devices = ",".join((visible.split(",") if visible else [str(i) for i in range(env.local_world_size)])[mine])
        self._server = Server(
            command,
            health=f"http://{address}/health",
            log=log,
            environment=server_environment(env.device, devices if env.device == "cuda" else None),
        )
        self._server.start()
        self.place = address, f"the reward model's server at {address} (process {self._server.pid}, log {log})"
        try:
            limit_s = spec.config.trainer.worker_start_timeout
            timeout_s = max(limit_s / 2, 0.9 * limit_s - (time.monotonic() - _IMPORTED))
            with span("start of the reward model's server", expected_s=timeout_s):
                self._server.wait_ready(timeout_s)
        except BaseException:
            self.shutdown()
            raise

    def where(self) -> ServerPlace | None:
        """Return the place of this rank's server; None for a rank without one."""
        return self.place

    def shutdown(self) -> None:
        if self._server is not None:
            self._server.end()


# Module; options that follow from rollout's keys; those of rollout.engine_kwargs, which come last.
ServerCommand = tuple[str, dict[str, Any], dict[str, Any]]


def server_command(
    rollout: RewardRolloutConfig, path: str, *, host: str, port: int, device: str, trust_remote_code: bool
) -> list[str]:
    """Command that starts the server of `rollout.name`, which answers under the model's `path`.

    Raises ValueError where it cannot run.
    """
    of_engine = load(ENGINES[str(rollout.name)].server or "", "reward_model.rollout.name")
    module, options, given = of_engine(rollout, local_folder(path), device)
    options |= {"host": host, "port": port, "served-model-name": path, "trust-remote-code": trust_remote_code}
    return [sys.executable, "-m", module, *_arguments(options | given)]


def server_environment(device: str, cuda_devices: str | None) -> dict[str, str]:
    """Environment variables of the server's process.

    cuda_devices: devices that it may see; None: as this process does.
    """
    variables = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_NO_USAGE_STATS": "1"}
    if device == "cpu":
        return variables | {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    return variables if cuda_devices is None else variables | {"CUDA_VISIBLE_DEVICES": cuda_devices}


def vllm(rollout: RewardRolloutConfig, folder: str, device: str) -> ServerCommand:
    """Command of vLLM's server. Raises ValueError where it is not installed."""
    versions.version()
    options: dict[str, Any] = {
        "model": folder,
        "dtype": rollout.dtype if device == "cuda" or rollout.dtype != "auto" else "float32",
        "tensor-parallel-size": rollout.tensor_model_parallel_size,
        "gpu-memory-utilization": rollout.gpu_memory_utilization if device == "cuda" else None,
        "max-model-len": _longest(rollout),
        "max-num-batched-tokens": max(rollout.max_num_batched_tokens, rollout.max_num_seqs),
        "max-num-seqs": rollout.max_num_seqs,
        "enforce-eager": rollout.enforce_eager,
        "enable-chunked-prefill": rollout.enable_chunked_prefill,
        "enable-prefix-caching": rollout.enable_prefix_caching,
        "no-enable-chunked-prefill": not rollout.enable_chunked_prefill,
        "no-enable-prefix-caching": not rollout.enable_prefix_caching,
        "disable-log-stats": rollout.disable_log_stats,
        "generation-config": "vllm",  # who asks says how it samples
        "cudagraph-capture-sizes": None if rollout.enforce_eager else rollout.cudagraph_capture_sizes,
    }
    given: dict[str, Any] = {}
    for name, value in _hyphenated(rollout.engine_kwargs.vllm).items():
        off = value is False and name not in _WITHOUT_OPPOSITE
        given |= {name: None if off else value, f"no-{name}": True if off else None}
    return "vllm.entrypoints.openai.api_server", options, given


def sglang(rollout: RewardRolloutConfig, folder: str, device: str) -> ServerCommand:
    """Command of SGLang's server. Raises ValueError without CUDA."""
    if device != "cuda":
        raise ValueError(
            f"reward_model.rollout.name=sglang on device {device}: SGLang's own server is started on CUDA alone; "
            "set reward_model.rollout.name=vllm"
        )
    options: dict[str, Any] = {
        "model-path": folder,
        "dtype": rollout.dtype,
        "tp-size": rollout.tensor_model_parallel_size,
        "mem-fraction-static": rollout.gpu_memory_utilization,
        "context-length": _longest(rollout),
        "chunked-prefill-size": rollout.max_num_batched_tokens if rollout.enable_chunked_prefill else -1,
        "max-running-requests": rollout.max_num_seqs,
        "disable-cuda-graph": rollout.enforce_eager,
        "disable-radix-cache": not rollout.enable_prefix_caching,
        "enable-metrics": not rollout.disable_log_stats,
        "cuda-graph-bs-decode": None if rollout.enforce_eager else rollout.cudagraph_capture_sizes,
    }
    return "sglang.launch_server", options, _hyphenated(rollout.engine_kwargs.sglang)


def _hyphenated(given: Mapping[str, Any]) -> dict[str, Any]:
    return {key.replace("_", "-"): value for key, value in given.items()}


def _longest(rollout: RewardRolloutConfig) -> int:
    return rollout.max_model_len or rollout.prompt_length + rollout.response_length


def _arguments(options: Mapping[str, Any]) -> list[str]:
    """Write options as --name value; true is a flag alone, false and null are left out, dictionaries are JSON."""
    words: list[str] = []
    for name, value in options.items():
        if value is not None and value is not False:
            values = [] if value is True else value if isinstance(value, list) else [value]
            words += [f"--{name}", *(json.dumps(each) if isinstance(each, dict) else str(each) for each in values)]
    return words
