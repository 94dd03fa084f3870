"""What a run asks of this machine, its packages, its network and its model, checked before anything is started."""

from __future__ import annotations

import ast
import difflib
import importlib.util
import os
import socket
import sys
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from verl_like.config import PPOConfig, RolloutConfig
from verl_like.config.errors import raise_if_any
from verl_like.config.reward_rollout import RewardRolloutConfig
from verl_like.config.roles import generates, roles_of
from verl_like.config.rollout import runs_agent_loops, runs_programs
from verl_like.models import blocks, families, loading, lora
from verl_like.rollout.sampling import require_tokens_left, train_sampling, validation_sampling
from verl_like.rollout.sglang import compat

_ROLLOUT = "actor_rollout_ref.rollout"
_REACH_S = 2.0
# What each one takes at least, in bytes: a rank has imported torch, a helper the standard library; a response in flight
# is a coroutine, its request and its arrays; a thread has touched some of its stack.
_RANK, _HELPER, _RESPONSE, _THREAD = 200e6, 25e6, 4e3, 50e3


def check_machine(config: PPOConfig, device: str) -> None:
    """ConfigError for counts that this machine's memory cannot hold, packages that it lacks, addresses where nobody
    answers."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    raise_if_any(
        [
            f"{key}={value}: {count:,} {what} of at least {each / 1e6:g} MB are more than this machine's "
            f"{memory / 1e9:.0f} GB of memory, which hold {memory / each:,.0f}; lower it"
            for key, value, count, each, what in _counts(config, device)
            if count * each > memory
        ]
        + [*_engines(config)]
        + [text for key, url in _urls(config).items() if (text := unreachable(key, url))]
    )
    joins = config.ray_init.address is not None or getattr(sys.modules.get("ray"), "is_initialized", bool)()
    if config.trainer.launcher == "ray" and config.trainer.nnodes > 1 and not joins:
        raise ValueError(
            f"trainer.nnodes={config.trainer.nnodes} with ray_init.address=null: a Ray of our own is this machine alone; "
            "start one on all machines (ray start) and set ray_init.address=auto, or set nnodes=1"
        )
    if config.ray_init.address is not None and config.trainer.launcher == "ray":
        from verl_like.cluster.launch import check_joining  # which imports ray

        check_joining(config.ray_init.address, config.ray_init.num_cpus, config.ray_init.temp_dir)


def _counts(config: PPOConfig, device: str) -> Iterator[tuple[str, int, int, float, str]]:
    """Key, value, how many of what it makes, and the bytes of each."""
    rollout, data, ray = config.actor_rollout_ref.rollout, config.data, config.ray_init
    custom, judge, fusion = config.custom_reward_function, config.reward_model.judge, config.reward_model.sandbox_fusion
    yield "custom_reward_function.num_workers", custom.num_workers, custom.num_workers, _HELPER, "processes"
    if rollout.multi_turn.enable or runs_agent_loops(rollout) or runs_programs(rollout) or config.env.train.tags:
        yield (
            f"{_ROLLOUT}.agent.num_workers",
            rollout.agent.num_workers,
            rollout.agent.num_workers,
            _HELPER,
            "processes",
        )
    if data.filter_overlong_prompts:
        workers = data.filter_overlong_prompts_workers
        yield "data.filter_overlong_prompts_workers", workers, workers, _RANK, "processes"
    ranks = config.trainer.n_gpus_per_node
    if device == "cpu" and isinstance(ranks, int):
        yield "trainer.n_gpus_per_node", ranks, ranks, _RANK, "processes"
    if ray.num_cpus is not None:
        yield "ray_init.num_cpus", ray.num_cpus, ray.num_cpus, _HELPER, "processes"
    for key, value, prompts in (
        ("n", rollout.n, data.train_batch_size),
        ("n_redundant", rollout.n_redundant, data.train_batch_size),
        ("val_kwargs.n", rollout.val_kwargs.n if data.val_files else 0, data.val_batch_size or 1),
    ):
        yield f"{_ROLLOUT}.{key}", value, value * prompts, _RESPONSE, "responses at a time"
    for section, url, most in (
        ("judge", judge.url, judge.max_concurrent),
        ("sandbox_fusion", fusion.url, fusion.max_concurrent),
    ):
        if url is not None:
            yield f"reward_model.{section}.max_concurrent", most, most, _THREAD, "threads"
    if rollout.name == "vllm":
        length = rollout.max_model_len or data.max_prompt_length + data.max_response_length
        yield (
            f"{_ROLLOUT}.max_num_seqs",
            rollout.max_num_seqs,
            rollout.max_num_seqs,
            4.0 * length,
            "rows of vLLM's table",
        )


def _engines(config: PPOConfig) -> Iterator[str]:
    """Engines that are chosen and not installed, and arguments that the installed one does not take."""
    chosen: dict[str, RolloutConfig | RewardRolloutConfig] = {_ROLLOUT: config.actor_rollout_ref.rollout}
    if generates(config.reward_model, config.custom_reward_function):
        chosen["reward_model.rollout"] = config.reward_model.rollout
    for section, rollout in chosen.items():
        name, vllm = str(rollout.name), importlib.util.find_spec("vllm")
        if name == "sglang" and compat.installed() is None:
            yield f"{section}.name=sglang: {compat.how_to_install()}"
        if name != "vllm":
            continue
        if vllm is None or vllm.origin is None:
            yield f"{section}.name=vllm: vLLM is not installed: pip install 'verl_like[vllm]', or set name=hf"
        elif given := rollout.engine_kwargs.vllm:
            known = _fields(Path(vllm.origin).parent / "engine" / "arg_utils.py", "EngineArgs")
            for unknown in sorted(set(given) - known if known else ()):
                near = "".join(f"; did you mean {each}?" for each in difflib.get_close_matches(unknown, known, n=1))
                yield f"{section}.engine_kwargs.vllm.{unknown}={given[unknown]}: vLLM has no such argument{near}"


def _fields(file: Path, name: str) -> set[str]:
    """The fields of a dataclass in a file, which importing would take seconds; none where it is not there."""
    body = ast.parse(file.read_text(encoding="utf-8")).body if file.is_file() else []
    (fields,) = [each.body for each in body if isinstance(each, ast.ClassDef) and each.name == name] or [[]]
    return {each.target.id for each in fields if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)}


def _urls(config: PPOConfig) -> dict[str, str]:
    """Key -> address of the services that this run asks."""
    reward, trainer = config.reward_model, config.trainer
    tracking = trainer.logger_kwargs.get("mlflow", {}).get("tracking_uri") or os.environ.get("MLFLOW_TRACKING_URI", "")
    named = {
        "reward_model.judge.url": reward.judge.url,
        "reward_model.sandbox_fusion.url": reward.sandbox_fusion.url,
        "trainer.logger_kwargs.mlflow.tracking_uri": tracking if "mlflow" in trainer.logger else None,
    }
    return {key: url for key, url in named.items() if url and url.startswith("http")}


def unreachable(key: str, url: str) -> str | None:
    """What is wrong with an address where nothing takes a connection; None where something does, or a proxy leads."""
    parts = urllib.parse.urlsplit(url)
    try:
        host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
        if parts.scheme in urllib.request.getproxies() and not urllib.request.proxy_bypass(host):
            return None
        socket.create_connection((host, port), timeout=_REACH_S).close()
    except (OSError, ValueError) as error:
        return f"{key}={url}: nothing answers there ({error}); start the server first, or correct the address"
    return None


def check_models(config: PPOConfig, device: str) -> None:
    """ValueError, naming the key, for what the trainer's models lack: modules that keys name, backends, a compiler."""
    for role in roles_of(config).values():
        model, policy = role.model, role.fsdp.wrap_policy
        try:
            hf_config = loading.load_hf_config(model)
            loading.check_backend(model, hf_config, torch.device(device))
            with_lora = role.optim is not None and model.lora_rank > 0
            if role.is_base_of_actor or not (with_lora or policy.transformer_layer_cls_to_wrap):
                continue
            built = loading.build_meta_model(model, hf_config, kind=role.kind)
            if with_lora:
                tower = built.hf.base_model.get_submodule("visual") if families.sees(hf_config) else None
                lora.attach(
                    built.hf, model, dtype=torch.float32, seed=0, left_out=tower if role.freeze_vision_tower else None
                )
        except ValueError as error:
            raise ValueError(f"{role.model_section.removesuffix('model')}{error}") from error
        try:
            loading.sharding_units(built, role.fsdp)
        except ValueError as error:
            raise ValueError(f"{role.sharding_section}.{error}") from error
        if role.compile_blocks:
            blocks.check_compiler(torch.device(device))


def check_sampling(
    config: PPOConfig, tokenizer: PreTrainedTokenizerBase, hf_config: PretrainedConfig, eos_ids: tuple[int, ...]
) -> None:
    """ValueError where bad words leave nothing to sample, or a token that stops is none of the model's."""
    rollout, size = config.actor_rollout_ref.rollout, hf_config.get_text_config().vocab_size
    for section, keys, make in (
        (_ROLLOUT, rollout, train_sampling),
        (f"{_ROLLOUT}.val_kwargs", rollout.val_kwargs, validation_sampling),
    ):
        require_tokens_left(make(rollout, eos_ids, tokenizer), len(tokenizer), f"{section}.")
        if max(keys.stop_token_ids or [0]) >= size:
            raise ValueError(
                f"{section}.stop_token_ids={keys.stop_token_ids}: the model's tokens are 0 to {size - 1}; leave the "
                "others out"
            )
