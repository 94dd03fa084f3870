"""Checks of what a run asks of this machine, its packages, its network and its model, before anything is started."""

from __future__ import annotations

import os
import socket
import sys
import urllib.parse
import urllib.request
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from verl_like.config import PPOConfig, RolloutConfig
from verl_like.config.engines import ENGINES
from verl_like.config.errors import raise_if_any
from verl_like.config.reward_rollout import RewardRolloutConfig
from verl_like.config.roles import REWARD, generates, roles_of
from verl_like.config.rollout import runs_agent_loops, runs_programs
from verl_like.models import blocks, families, loading, lora
from verl_like.rollout.sampling import require_tokens_left, train_sampling, validation_sampling
from verl_like.user_code import load

_ROLLOUT = "actor_rollout_ref.rollout"
_FILTER = "data.filter_overlong_prompts_workers"
_REACH_S = 2.0
# What each takes at least: a rank has imported torch, a helper the standard library; a response in flight is a
# coroutine, its request and its arrays; a thread has touched some of its stack.
_RANK, _HELPER, _RESPONSE, _THREAD = (200e6, "processes"), (25e6, "processes"), (4e3, "responses"), (5e4, "threads")


def check_machine(config: PPOConfig, device: str) -> None:
    """Check counts against this machine's memory, engines against its packages, and addresses for an answer.

    Raises ValueError, naming keys and values, for what does not hold.
    """
    _check_engines(config)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    raise_if_any(
        [
            f"{key}={value}: {value * times:,} {what} of at least {each / 1e6:g} MB are more than this machine's "
            f"{memory / 1e9:.0f} GB of memory; lower it to {memory / each / times:,.0f} at most"
            for key, value, times, (each, what) in _counts(config, device)
            if value * times * each > memory
        ]
        + [text for key, url in _urls(config).items() if (text := unreachable(key, url))]
    )
    ray, nodes = config.ray_init, config.trainer.nnodes
    if config.trainer.launcher == "local":
        return
    if ray.address not in (None, "", "local"):
        from verl_like.cluster.launch import check_joining  # which imports ray

        check_joining(ray.address, ray.num_cpus, ray.temp_dir)
    elif nodes > 1 and not getattr(sys.modules.get("ray"), "is_initialized", bool)():
        raise ValueError(
            f"trainer.nnodes={nodes} with ray_init.address=null: a Ray of our own is this machine; start one on all "
            "machines (ray start) and set ray_init.address=auto, or set nnodes=1"
        )


def _counts(config: PPOConfig, device: str) -> list[tuple[str, int, int, tuple[float, str]]]:
    """List key, value, factor, and (bytes, name) of one of them, for the things that this run makes."""
    rollout, data, reward = config.actor_rollout_ref.rollout, config.data, config.reward_model
    helps = rollout.multi_turn.enable or runs_agent_loops(rollout) or runs_programs(rollout) or config.env.train.tags
    row = 4.0 * (rollout.max_model_len or data.max_prompt_length + data.max_response_length), "rows of tokens"
    ranks = config.trainer.n_gpus_per_node
    rows: list[tuple[Any, str, Any, int, tuple[float, str]]] = [
        (True, "custom_reward_function.num_workers", config.custom_reward_function.num_workers, 1, _HELPER),
        (helps, f"{_ROLLOUT}.agent.num_workers", rollout.agent.num_workers, 1, _HELPER),
        (data.filter_overlong_prompts, _FILTER, data.filter_overlong_prompts_workers, 1, _RANK),
        (device == "cpu" and ranks != "auto", "trainer.n_gpus_per_node", ranks, 1, _RANK),
        (config.ray_init.num_cpus, "ray_init.num_cpus", config.ray_init.num_cpus, 1, _HELPER),
        (True, f"{_ROLLOUT}.n", rollout.n, data.train_batch_size, _RESPONSE),
        (True, f"{_ROLLOUT}.n_redundant", rollout.n_redundant, data.train_batch_size, _RESPONSE),
        (data.val_files, f"{_ROLLOUT}.val_kwargs.n", rollout.val_kwargs.n, 1, _RESPONSE),
        (reward.judge.url, "reward_model.judge.max_concurrent", reward.judge.max_concurrent, 1, _THREAD),
        (rollout.engine.rows_of_tokens, f"{_ROLLOUT}.max_num_seqs", rollout.max_num_seqs, 1, row),
    ]
    return [(key, value, times, takes) for used, key, value, times, takes in rows if used]


def _check_engines(config: PPOConfig) -> None:
    """Check that chosen engines are installed, and that vLLM takes its arguments; raises ValueError otherwise."""
    chosen: dict[str, RolloutConfig | RewardRolloutConfig] = {_ROLLOUT: config.actor_rollout_ref.rollout}
    if generates(config.reward_model, config.custom_reward_function):
        chosen["reward_model.rollout"] = config.reward_model.rollout
    for section, rollout in chosen.items():
        kind = ENGINES[str(rollout.name)]
        if kind.installed is not None:
            load(kind.installed, f"{section}.name")(f"{section}.name")
        if section == _ROLLOUT and kind.require_arguments is not None:
            load(kind.require_arguments, f"{section}.name")(rollout, section)


def _urls(config: PPOConfig) -> dict[str, str]:
    """Map keys to the addresses of the services that this run asks."""
    tracking = config.trainer.logger_kwargs.get("mlflow", {}).get("tracking_uri")
    named = {
        "reward_model.judge.url": config.reward_model.judge.url,
        "reward_model.sandbox_fusion.url": config.reward_model.sandbox_fusion.url,
        "trainer.logger_kwargs.mlflow.tracking_uri": tracking if "mlflow" in config.trainer.logger else None,
    }
    return {key: url for key, url in named.items() if url and url.startswith("http")}


def unreachable(key: str, url: str) -> str | None:
    """Say what is wrong with an address where nothing takes a connection.

    None where something does, or a proxy leads.
    """
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
    """Check the trainer's models: modules that keys name, backends, a compiler. Raises ValueError, naming the key."""
    for role in roles_of(config).values():
        if role.name == REWARD and config.reward_model.worker_class is not None:
            continue  # of a class of the user's, which may load what it likes
        model, section = role.model, role.model_section.removesuffix("model")
        with_lora = role.optim is not None and model.lora_rank > 0 and not role.is_base_of_actor
        try:
            hf_config = loading.load_hf_config(model)
            loading.check_backend(model, hf_config, torch.device(device))
            if role.compile_blocks:
                blocks.check_compiler(torch.device(device))
            built = loading.build_meta_model(model, hf_config, kind=role.kind)
            loading.check_weights(model, built)
            frozen = role.freeze_vision_tower and families.sees(hf_config)
            tower = built.hf.base_model.get_submodule("visual") if frozen else None
            if with_lora:
                lora.attach(built.hf, model, dtype=torch.float32, seed=0, left_out=tower)
            section = f"{role.sharding_section}."
            loading.sharding_units(built, role.fsdp)
        except ValueError as error:
            raise ValueError(f"{section}{error}") from error


def check_sampling(
    config: PPOConfig, tokenizer: PreTrainedTokenizerBase, hf_config: PretrainedConfig, eos_ids: tuple[int, ...]
) -> None:
    """Check that bad words leave something to sample, and that tokens that stop are the model's.

    Raises ValueError otherwise.
    """
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
