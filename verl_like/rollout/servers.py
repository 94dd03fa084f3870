"""Command lines of the engines' own HTTP servers, for models whose weights stay as they are (a reward model's)."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

from verl_like.config.engines import ENGINES
from verl_like.config.reward_rollout import RewardRolloutConfig
from verl_like.remote_storage import local_folder
from verl_like.rollout import vllm_versions
from verl_like.user_code import load

# Switches of vLLM that are off where they are not given, as all of SGLang's are; the others have a --no-... as well.
_WITHOUT_OPPOSITE = frozenset(
    {
        *("aggregate-engine-logging", "data-parallel-external-lb", "data-parallel-hybrid-lb", "disable-log-stats"),
        *("data-parallel-multi-port-external-lb", "grpc", "headless"),
    }
)


# Module; options that follow from rollout's keys; those of rollout.engine_kwargs, which come last.
ServerCommand = tuple[str, dict[str, Any], dict[str, Any]]


def server_command(
    rollout: RewardRolloutConfig, path: str, *, host: str, port: int, device: str, trust_remote_code: bool
) -> list[str]:
    """What starts the server of `rollout.name`; it answers under the model's `path`. ValueError where it cannot run."""
    of_engine = load(ENGINES[str(rollout.name)].server or "", "reward_model.rollout.name")
    module, options, given = of_engine(rollout, local_folder(path), device)
    options |= {"host": host, "port": port, "served-model-name": path, "trust-remote-code": trust_remote_code}
    return [sys.executable, "-m", module, *_arguments(options | given)]


def server_environment(device: str, cuda_devices: str | None) -> dict[str, str]:
    """Variables of the server's process. cuda_devices: that it may see; None: as this process does."""
    variables = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_NO_USAGE_STATS": "1"}
    if device == "cpu":
        return variables | {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    return variables if cuda_devices is None else variables | {"CUDA_VISIBLE_DEVICES": cuda_devices}


def vllm(rollout: RewardRolloutConfig, folder: str, device: str) -> ServerCommand:
    """vLLM's. ValueError where it is not installed."""
    vllm_versions.version()
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
    """SGLang's. ValueError without CUDA."""
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
        "cuda-graph-bs": None if rollout.enforce_eager else rollout.cudagraph_capture_sizes,
    }
    return "sglang.launch_server", options, _hyphenated(rollout.engine_kwargs.sglang)


def _hyphenated(given: Mapping[str, Any]) -> dict[str, Any]:
    return {key.replace("_", "-"): value for key, value in given.items()}


def _longest(rollout: RewardRolloutConfig) -> int:
    return rollout.max_model_len or rollout.prompt_length + rollout.response_length


def _arguments(options: Mapping[str, Any]) -> list[str]:
    """--name value; true is a flag alone, false and null are left out, dictionaries are JSON."""
    words: list[str] = []
    for name, value in options.items():
        if value is not None and value is not False:
            values = [] if value is True else value if isinstance(value, list) else [value]
            words += [f"--{name}", *(json.dumps(each) if isinstance(each, dict) else str(each) for each in values)]
    return words
