"""Checks of what a run asks of this machine, its packages, its network and its model, before anything is started."""

from __future__ import annotations

import logging
import os
import socket
import sys
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from verl_like.config import PPOConfig, RolloutConfig
from verl_like.config.engines import ENGINES
from verl_like.config.errors import problems_of
from verl_like.config.reward_rollout import RewardRolloutConfig
from verl_like.config.roles import CRITIC, REWARD, RoleConfig, generates, roles_of
from verl_like.config.rollout import runs_agent_loops, runs_programs
from verl_like.data.dataset import make_encoder
from verl_like.data.prompt_truth import own_text
from verl_like.models import blocks, families, loading, lora
from verl_like.models.tensor_plan import check_model
from verl_like.registry import part
from verl_like.remote_storage import is_remote
from verl_like.rollout.build import require_heads, require_quantization
from verl_like.rollout.sampling import require_tokens_left, train_sampling, validation_sampling
from verl_like.trainer.facts import Facts, resolve_world
from verl_like.trainer.folders import check_output_folders
from verl_like.trainer.inputs import check_adapter, check_vision, refuse_media, refuse_media_keys, train_loader
from verl_like.trainer.nsight import check_nsight, wants_nsight
from verl_like.trainer.own_code import check_own_code
from verl_like.trainer.resume import find_resume
from verl_like.trainer.reward_check import check_rewards
from verl_like.user_code import load

logger = logging.getLogger(__name__)
_ROLLOUT = "actor_rollout_ref.rollout"
_FILTER = "data.filter_overlong_prompts_workers"
_REACH_S = 2.0
# What each takes at least: a rank has imported torch, a helper the standard library; a response in flight is a
# coroutine, its request and its arrays; a thread has touched some of its stack.
_RANK, _HELPER, _RESPONSE, _THREAD = (200e6, "processes"), (25e6, "processes"), (4e3, "responses"), (5e4, "threads")


def early_problems(config: PPOConfig) -> list[str]:
    """List what is known before a run has a log: folders that cannot be written, a profiler, an absent checkpoint."""
    mode, resume = config.trainer.resume_mode, str(config.trainer.resume_from_path)
    absent = mode == "resume_path" and not (is_remote(resume) or Path(resume).expanduser().is_dir())
    return list(
        problems_of(
            lambda: check_output_folders(config, make=False),
            lambda: check_nsight(config, resolve_world(config)[0]) if wants_nsight(config) else None,
            lambda: find_resume(config) if absent else None,
        )
    )


def problems(facts: Facts) -> Iterator[str]:
    """Yield all that is wrong with a run, as far as it can be told without workers.

    A fact that cannot be loaded is told where it is read first; checks that need it are left out.
    """
    config, rollout = facts.config, facts.config.actor_rollout_ref.rollout
    if rollout.engine.endpoint:
        yield (
            "actor_rollout_ref.rollout.name=openai: an endpoint takes no weights, so there is nothing to train or to "
            "validate in a run; `verl-like eval` asks it, or set name=vllm"
        )
    yield from problems_of(
        lambda: require_quantization(rollout, facts.device),
        lambda: check_machine(config, facts),
        lambda: check_own_code(config),
        lambda: check_inputs(config, facts),
        lambda: require_heads(rollout, facts.hf_config, facts.device),
        lambda: check_sampling(config, facts),
        lambda: check_models(config, facts),
        lambda: facts.plan,
        lambda: check_sampler(config, facts),
        lambda: facts.max_model_len,
        lambda: facts.rewards,
        lambda: check_rewards(facts),
        lambda: facts.runner,
    )


def check_machine(config: PPOConfig, facts: Facts) -> Iterator[str]:
    """Compare counts with this machine's memory, engines with its packages, and ask addresses for an answer."""
    yield from problems_of(*_engines(config))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for key, value, times, (each, what) in _counts(config, facts.known("device")):
        if value * times * each > memory:
            yield (
                f"{key}={value}: {value * times:,} {what} of at least {each / 1e6:g} MB are more than this machine's "
                f"{memory / 1e9:.0f} GB of memory; lower it to {memory / each / times:,.0f} at most"
            )
    yield from (text for key, url in _urls(config).items() if (text := unreachable(key, url)))
    ray, nodes = config.ray_init, config.trainer.nnodes
    if config.trainer.launcher == "local":
        return
    if ray.address not in (None, "", "local"):
        from verl_like.cluster.launch import check_joining  # which imports ray

        check_joining(ray.address, ray.num_cpus, ray.temp_dir)
    elif nodes > 1 and not getattr(sys.modules.get("ray"), "is_initialized", bool)():
        yield (
            f"trainer.nnodes={nodes} with ray_init.address=null: a Ray of our own is this machine; start one on all "
            "machines (ray start) and set ray_init.address=auto, or set nnodes=1"
        )


def _counts(config: PPOConfig, device: str | None) -> list[tuple[str, int, int, tuple[float, str]]]:
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


def _engines(config: PPOConfig) -> Iterator[Callable[[], object]]:
    """Yield the checks that the chosen engines are installed, and that vLLM takes its arguments."""
    chosen: dict[str, RolloutConfig | RewardRolloutConfig] = {_ROLLOUT: config.actor_rollout_ref.rollout}
    if generates(config.reward_model, config.custom_reward_function):
        chosen["reward_model.rollout"] = config.reward_model.rollout
    for section, rollout in chosen.items():
        kind, key = ENGINES[str(rollout.name)], f"{section}.name"
        if kind.installed is not None:
            yield partial(load(kind.installed, key), key)
        if section == _ROLLOUT and kind.require_arguments is not None:
            yield partial(load(kind.require_arguments, key), rollout, section)


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


def check_inputs(config: PPOConfig, facts: Facts) -> Iterator[str]:
    """Check tokenizer, models, tools and data, each by itself and against each other."""
    yield from facts.missing.values()
    yield from problems_of(
        lambda: facts.toolbox,
        lambda: facts.tokenizer,
        lambda: facts.hf_config,
        lambda: facts.eos_ids,
        lambda: check_vision(config, facts.hf_config),
        *(partial(_role_inputs, role, facts) for role in roles_of(config).values()),
        lambda: _check_vocabulary(config, facts),
        lambda: facts.reward_tokenizers,
        lambda: check_data(config, facts),
    )


def _role_inputs(role: RoleConfig, facts: Facts) -> Iterator[str]:
    """Check that a role's processes can split its model and its rows, and that its adapters fit."""
    model, hf_config = role.model, facts.hf_config_of(role)
    if role.name == CRITIC:
        families.refuse_vision(hf_config, "critic.model.path", "name a text model")
    yield from problems_of(
        lambda: loading.check_ulysses(model, hf_config, role.ulysses if role.kind == "policy" else 1),
        lambda: check_model(model, hf_config, role.tensor, role.tensor_key),
        lambda: check_adapter(role, hf_config),
    )


def _check_vocabulary(config: PPOConfig, facts: Facts) -> None:
    model, vocab_size = config.actor_rollout_ref.model, facts.hf_config.get_text_config().vocab_size
    if (known := max(facts.tokenizer.get_vocab().values()) + 1) > vocab_size:
        raise ValueError(
            f"actor_rollout_ref.model.path={model.path}: its vocabulary has {vocab_size} ids, but the tokenizer "
            f"({config.data.tokenizer or model.path}) knows {known}; set data.tokenizer to the model's own tokenizer"
        )


def check_data(config: PPOConfig, facts: Facts) -> Iterator[str]:
    """Check the rows, and what they name, against model, tools and agent loops.

    One fault of rows at a time, as it is mostly a key that does not fit, and so that of both sets.
    """
    yield from problems_of(lambda: (facts.val, facts.train))
    sets = facts.known("train"), facts.known("val")

    def check_rows() -> None:
        for split, dataset in zip(("train", "val"), sets, strict=True):
            if dataset is not None and (facts.trains or split == "val"):
                refuse_media(dataset, f"data.{split}_files", facts.hf_config)
                dataset.check_rows()
        refuse_media_keys(facts.data, facts.hf_config)
        if adds := own_text(make_encoder(facts.data, facts.tokenizer)):
            logger.info("the chat template adds where there is no system message: %r", adds)

    yield from problems_of(
        lambda: part("loops", "check")(sets, config.actor_rollout_ref.rollout),
        lambda: part("tools", "check")(sets, facts.toolbox),
        check_rows,
    )


def check_sampler(config: PPOConfig, facts: Facts) -> None:
    """Check that prompts can be drawn; raises ValueError otherwise."""
    if (train := facts.known("train")) is not None:
        learns = train_loader(config, train, facts.plan).learns
        if config.asynchronous and learns:
            raise ValueError(
                f"trainer.mode={config.trainer.mode} with a data.sampler that learns from each batch: prompts are "
                "drawn before the batches that it would learn from; set trainer.mode=sync"
            )


def check_models(config: PPOConfig, facts: Facts) -> Iterator[str]:
    """Check the trainer's models: modules that keys name, weights, backends, a compiler."""
    own_class = config.reward_model.worker_class is not None  # it may load what it likes
    roles = [role for role in roles_of(config).values() if role.name != REWARD or not own_class]
    yield from problems_of(*(partial(_role_model, role, facts) for role in roles))


def _role_model(role: RoleConfig, facts: Facts) -> Iterator[str]:
    model, hf_config, section = role.model, facts.hf_config_of(role), role.model_section.removesuffix("model")

    def check_whole() -> Iterator[str]:
        built = loading.build_meta_model(model, hf_config, kind=role.kind)
        yield from problems_of(lambda: loading.check_weights(model, built))
        frozen = role.freeze_vision_tower and families.sees(hf_config)
        tower = built.hf.base_model.get_submodule("visual") if frozen else None
        if role.optim is not None and model.lora_rank > 0 and not role.is_base_of_actor:
            yield from problems_of(lambda: lora.attach(built.hf, model, dtype=torch.float32, seed=0, left_out=tower))
        inside = f"{role.sharding_section.removeprefix(section)}."
        yield from problems_of(lambda: loading.sharding_units(built, role.fsdp), prefix=inside)

    yield from problems_of(
        lambda: loading.check_backend(model, hf_config, torch.device(facts.device)),
        lambda: blocks.check_compiler(torch.device(facts.device)) if role.compile_blocks else None,
        check_whole,
        prefix=section,
    )


def check_sampling(config: PPOConfig, facts: Facts) -> None:
    """Check that bad words leave something to sample, and that tokens that stop are the model's.

    Raises ValueError otherwise.
    """
    tokenizer, size = facts.tokenizer, facts.hf_config.get_text_config().vocab_size
    rollout = config.actor_rollout_ref.rollout
    for section, keys, make in (
        (_ROLLOUT, rollout, train_sampling),
        (f"{_ROLLOUT}.val_kwargs", rollout.val_kwargs, validation_sampling),
    ):
        require_tokens_left(make(rollout, facts.eos_ids, tokenizer), len(tokenizer), f"{section}.")
        if max(keys.stop_token_ids or [0]) >= size:
            raise ValueError(
                f"{section}.stop_token_ids={keys.stop_token_ids}: the model's tokens are 0 to {size - 1}; leave the "
                "others out"
            )
