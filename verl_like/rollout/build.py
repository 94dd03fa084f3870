"""Construction of a rollout engine from the configuration."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PretrainedConfig

from verl_like.config import ModelConfig, RolloutConfig
from verl_like.models.families import sees
from verl_like.models.loading import load_hf_config
from verl_like.parallel.dist import ProcessInfo
from verl_like.rollout import hf_cache
from verl_like.rollout.base import EngineSpec, RolloutEngine
from verl_like.user_code import load

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def rollout_dtype(rollout: RolloutConfig, device: torch.device) -> torch.dtype:
    """Precision of `rollout.dtype`; auto is float32 on CPU and bfloat16 on CUDA."""
    if rollout.dtype == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    if rollout.dtype not in _DTYPES:
        raise ValueError(f"rollout.dtype={rollout.dtype!r} is not one of auto, {', '.join(_DTYPES)}")
    return _DTYPES[rollout.dtype]


def require_quantization(rollout: RolloutConfig, device_type: str) -> None:
    """Check that this device can do rollout.quantization; raises ValueError otherwise."""
    if rollout.quantization == "fp8" and device_type == "cpu":
        raise ValueError(
            "actor_rollout_ref.rollout.quantization=fp8 on device cpu: vLLM's kernels for 8-bit floats are CUDA's; set "
            "quantization=int8 with name=hf, or null"
        )


def require_heads(rollout: RolloutConfig, hf_config: PretrainedConfig, device_type: str) -> None:
    """Check that the ranks of a replica can share the model's heads so that a sync can be proved.

    Raises ValueError otherwise.
    """
    size, text = rollout.tensor_model_parallel_size, hf_config.get_text_config()
    heads = getattr(text, "num_attention_heads", None)
    if size == 1 or not isinstance(heads, int):
        return
    kept = getattr(text, "num_key_value_heads", None) or heads
    problem, sizes = "", [n for n in range(1, heads + 1) if heads % n == 0 and (kept % n == 0 or n % kept == 0)]
    if heads % size:
        problem = f"does not divide the model's {heads} attention heads"
    elif kept % size and size % kept:
        problem = f"neither divides the model's {kept} key-value heads nor is a multiple of them"
    elif kept % size and rollout.engine.pads_heads and device_type == "cpu":
        sizes = [n for n in sizes if kept % n == 0]
        problem = (
            f"does not divide the model's {kept} key-value heads: SGLang on a CPU fills up heads with zeros, and what "
            "its ranks hold cannot be proved"
        )
    if problem:
        raise ValueError(f"actor_rollout_ref.rollout.tensor_model_parallel_size={size} {problem}; use one of {sizes}")


def require_model(rollout: RolloutConfig, hf_config: PretrainedConfig, device_type: str, max_model_len: int) -> None:
    """Check that the engine can run such a model on this device. Raises ValueError otherwise."""
    if rollout.engine.require_model is not None:
        load(rollout.engine.require_model, "rollout.name")(rollout, hf_config, device_type, max_model_len)


def refuses_model(rollout: RolloutConfig, model: ModelConfig, device_type: str, max_model_len: int) -> bool:
    """Return True where `require_model` raises for the model in a local folder; of others nothing is known yet.

    What is wrong with the folder itself is told when the run loads it.
    """
    if not (Path(model.path or "").expanduser() / "config.json").is_file():
        return False
    try:
        hf_config = load_hf_config(model)
    except (OSError, ValueError):
        return False
    try:
        require_model(rollout, hf_config, device_type, rollout.max_model_len or max_model_len)
    except ValueError:
        return True
    return False


def require_plain_cache(rollout: RolloutConfig, hf_config: PretrainedConfig) -> None:
    """Check that the engine can take back what it computed for guesses that were wrong.

    Raises ValueError otherwise.
    """
    method = rollout.speculative.method
    if method == "none" or not rollout.engine.guesses:
        return
    key = f"actor_rollout_ref.rollout.speculative.method={method}"
    if sees(hf_config):
        raise ValueError(f"{key}: not built for models that see images; use method=none")
    layers = hf_cache.new_cache(hf_config.get_text_config()).layers
    if rollout.engine.proposer is not None:  # its cache has pages, from which tokens of windows can be taken back
        layers = [layer for layer in layers if not layer.is_sliding]
    if other := sorted({type(layer).__name__ for layer in layers} - {hf_cache.GrowingLayer.__name__}):
        raise ValueError(
            f"{key}: layers of this model keep windows or states ({', '.join(other)}), from which tokens cannot be "
            "taken back; use method=none"
        )


def build_rollout_engine(
    rollout: RolloutConfig,
    model: ModelConfig,
    *,
    process: ProcessInfo,
    hf_config: PretrainedConfig,
    tokenizer_size: int,
    max_model_len: int,
    seed: int,
    run_id: str,
    tokenizer: str | None = None,
    address: tuple[str, int] | None = None,
    exact: bool = False,
) -> RolloutEngine:
    """Build the engine that `rollout.name` asks for, in this process, unloaded.

    Collective: every rank of the worker group calls it. SGLang's is not for the trainer's own process
    (workers/rollout.py, start_engine).

    Args:
        rollout: rollout section of the configuration.
        model: model section.
        process: place of this process in its worker group.
        hf_config: the model's Hugging Face config.
        tokenizer_size: ids from here on are never sampled.
        max_model_len: most tokens of prompt + response.
        seed: seed of the engine.
        run_id: names shared memory, different for every run on this machine.
        tokenizer: folder or name, for the texts of rollout.stop; None: the model's.
        address: host and port where the ranks of an SGLang replica meet.
        exact: log-probs are to be the trainer's to the last bit (trainer.parity).

    Raises ValueError for an engine or a combination that is not there.
    """
    tp = rollout.tensor_model_parallel_size
    if process.world_size % tp:
        raise ValueError(
            f"rollout.tensor_model_parallel_size={tp} does not divide the {process.world_size} processes of the run"
        )
    require_quantization(rollout, process.device.type)
    require_heads(rollout, hf_config, process.device.type)
    require_model(rollout, hf_config, process.device.type, max_model_len)
    if rollout.quantization == "fp8" and torch.cuda.get_device_capability(process.device) < (8, 9):
        raise ValueError(
            f"actor_rollout_ref.rollout.quantization=fp8 on {torch.cuda.get_device_name(process.device)}: it has no "
            "8-bit floats, and what vLLM packs instead cannot be proved; set quantization=null (Ada and Hopper have)"
        )
    require_plain_cache(rollout, hf_config)
    spec = EngineSpec(
        rollout=rollout,
        model=model,
        process=process,
        hf_config=hf_config,
        dtype=rollout_dtype(rollout, process.device),
        tokenizer_size=tokenizer_size,
        max_model_len=max_model_len,
        seed=seed,
        tokenizer=tokenizer or model.path,
        run_id=run_id,
        address=address,
        exact=exact,
    )
    if rollout.engine.code is None or (rollout.engine.own_process and address is None):
        raise ValueError(f"rollout.name={rollout.name!r} is no engine for this process")
    engine: RolloutEngine = load(rollout.engine.code, "rollout.name")(spec)
    return engine
