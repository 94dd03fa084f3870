"""Checks of what a run asks of this machine, its packages, its network, its model and its data, before anything starts.

`problems` is the list of a start. Each part's own check stands in its package, and takes the facts that it needs.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from transformers import PretrainedConfig

from verl_like.config import DataConfig, PPOConfig, RolloutConfig
from verl_like.config.engines import ENGINES, EngineKind
from verl_like.config.errors import ConfigError, problems_of
from verl_like.config.reward import RewardRolloutConfig
from verl_like.config.roles import ACTOR, REWARD, RoleConfig, generates, needs_critic, roles_of
from verl_like.config.rollout import runs_agent_loops, runs_programs
from verl_like.data.dataset import Dataset, make_encoder
from verl_like.data.foreign import ForeignDataset
from verl_like.data.media import DEFAULT_MEDIA_KEYS
from verl_like.data.prompt_truth import own_text
from verl_like.engine.router_losses import check_router
from verl_like.models import blocks, exact, families, loading, lora, stages, tensor_plan
from verl_like.registry import part
from verl_like.remote_storage import is_remote
from verl_like.rollout.build import require_heads, require_model, require_plain_cache, require_quantization
from verl_like.rollout.sampling import require_tokens_left, train_sampling, validation_sampling
from verl_like.trainer.facts import Facts, resolve_world, train_loader, train_sampler
from verl_like.trainer.folders import check_output_folders
from verl_like.trainer.nsight import check_nsight
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
_GRADERS = "custom_reward_function.num_workers"
# What starts the processes that a key counts
_STARTED = {_GRADERS: ["rewards"], f"{_ROLLOUT}.agent.num_workers": ["toolbox", "runner"], _FILTER: ["room"]}


def early_problems(config: PPOConfig) -> list[str]:
    """List what is looked at before a run makes its folders: places of files, folders, a profiler, a checkpoint."""
    mode, resume = config.trainer.resume_mode, str(config.trainer.resume_from_path)
    absent = mode == "resume_path" and not (is_remote(resume) or os.path.isdir(os.path.expanduser(resume)))
    return [
        *Facts(config, ExitStack()).missing.values(),
        *problems_of(lambda: check_output_folders(config, make=False)),
        *problems_of(lambda: check_nsight(config, resolve_world(config)[0])),
        *problems_of(lambda: find_resume(config) if absent else None),
    ]


def problems(facts: Facts) -> Iterator[str]:
    """Yield all that is wrong with a run, as far as it can be told without workers.

    A fact that cannot be loaded is told where it is read first; checks that need it are left out.
    """
    config, rollout = facts.config, facts.config.actor_rollout_ref.rollout
    if facts.trains and rollout.engine.endpoint:
        yield (
            "actor_rollout_ref.rollout.name=openai: an endpoint takes no weights, so there is nothing to train or to "
            "validate in a run; `verl-like eval` asks it, or set name=vllm"
        )
    if facts.trains:
        yield from problems_of(
            lambda: require_quantization(rollout, facts.device),
            lambda: check_machine(config, facts),
            lambda: require_heads(rollout, facts.hf_config, facts.device),
            lambda: require_model(rollout, facts.hf_config, facts.device, facts.max_model_len),
            lambda: require_plain_cache(rollout, facts.hf_config),
            lambda: check_sampling(config, facts),
            lambda: facts.plan,
            lambda: check_order(config, facts),
        )
    yield from problems_of(
        lambda: facts.device,
        lambda: check_own_code(config),
        lambda: check_models(config, facts),
        lambda: check_data(config, facts),
        lambda: facts.max_model_len,
        lambda: check_rewards(facts),
        lambda: check_best(config, facts),
        lambda: facts.runner,
    )


def check_best(config: PPOConfig, facts: Facts, also: Sequence[str] = ()) -> Iterator[str]:
    """Compare trainer.best_metric with what a validation can give: metrics of its data sources, and `also` these."""
    best, val = config.trainer.best_metric, facts.known("val")
    if best is None or best in also or config.trainer.trainer_class is not None:
        return
    files = config.data.val_files
    sources = files if isinstance(files, dict) else None if val is None else val.domains()
    ends = [""] if sources is None else [f"{source}/" for source in sorted(set(sources))]
    if not best.startswith(tuple(kind + end for kind in ("val-core/", "val-aux/") for end in ends)):
        given = ", ".join([*also, *(f"val-core/{end}..." for end in ends)])
        yield f"trainer.best_metric={best}: a validation of this run gives {given}"


def check_machine(config: PPOConfig, facts: Facts) -> Iterator[str]:
    """Compare counts with this machine's memory, engines with its packages, and ask addresses for an answer."""
    yield from problems_of(lambda: _check_engines(config))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for key, value, times, (each, what) in _counts(config, facts.known("device")):
        if value * times * each > memory:
            crowd = (
                f"{key}={value}: {value * times:,} {what} of at least {each / 1e6:g} MB are more than this machine's "
                f"{memory / 1e9:.0f} GB of memory; lower it to {memory / each / times:,.0f} at most"
            )
            facts.failed |= dict.fromkeys(_STARTED.get(key, ()), ConfigError([crowd]))  # not to be started
            yield crowd
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
    ranks, encodes = config.trainer.n_gpus_per_node, data.filter_overlong_prompts or config.trainer.objective != "rl"
    rows: list[tuple[Any, str, Any, int, tuple[float, str]]] = [
        (True, _GRADERS, config.custom_reward_function.num_workers, 1, _HELPER),
        (helps, f"{_ROLLOUT}.agent.num_workers", rollout.agent.num_workers, 1, _HELPER),
        (encodes, _FILTER, data.filter_overlong_prompts_workers, 1, _RANK),
        (device == "cpu" and ranks != "auto", "trainer.n_gpus_per_node", ranks, 1, _RANK),
        (config.ray_init.num_cpus, "ray_init.num_cpus", config.ray_init.num_cpus, 1, _HELPER),
        (True, f"{_ROLLOUT}.n", rollout.n, data.train_batch_size, _RESPONSE),
        (True, f"{_ROLLOUT}.n_redundant", rollout.n_redundant, data.train_batch_size, _RESPONSE),
        (data.val_files, f"{_ROLLOUT}.val_kwargs.n", rollout.val_kwargs.n, 1, _RESPONSE),
        (reward.judge.url, "reward_model.judge.max_concurrent", reward.judge.max_concurrent, 1, _THREAD),
        (rollout.engine.rows_of_tokens, f"{_ROLLOUT}.max_num_seqs", rollout.max_num_seqs, 1, row),
    ]
    return [(key, value, times, takes) for used, key, value, times, takes in rows if used]


def _check_engines(config: PPOConfig) -> Iterator[str]:
    """Check that chosen engines are installed, and that vLLM takes its arguments."""
    chosen: dict[str, RolloutConfig | RewardRolloutConfig] = {_ROLLOUT: config.actor_rollout_ref.rollout}
    if generates(config.reward_model, config.custom_reward_function):
        chosen["reward_model.rollout"] = config.reward_model.rollout
    for section, rollout in chosen.items():
        kind, key = ENGINES[str(rollout.name)], f"{section}.name"
        if kind.installed is not None:
            yield from problems_of(partial(load(kind.installed, key), key))
        if section == _ROLLOUT and kind.require_arguments is not None:
            yield from problems_of(partial(load(kind.require_arguments, key), rollout, section))


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


def check_models(config: PPOConfig, facts: Facts) -> Iterator[str]:
    """Check tokenizer and models: places, files, kinds, sizes, modules that keys name, backends, a compiler."""
    yield from facts.missing.values()
    for path, key in {role.model.path: role.model_section for role in reversed(roles_of(config).values())}.items():
        if (f"{key}.path", path) not in facts.missing and not loading.has_weights(path):
            what = "%s.path=%s HOLDS NO WEIGHTS: THEY WILL BE RANDOM. Where that is not meant, download the model again"
            logger.warning(what, key, path)
    yield from problems_of(
        lambda: facts.toolbox,
        lambda: facts.eos_ids,
        lambda: facts.vision,
        lambda: check_vision(config, facts.hf_config),
        *(partial(_check_role, role, facts) for role in roles_of(config).values()),
        lambda: _check_vocabulary(config, facts),
        lambda: part("teachers", "check")(config, facts) if config.distillation.enabled else None,
        lambda: facts.reward_tokenizers,
    )


def _check_role(role: RoleConfig, facts: Facts) -> Iterator[str]:
    """Check that the processes of a role can split its model and its rows, and build and train it."""
    model, hf_config, device = role.model, facts.hf_config_of(role), facts.known("device")
    if role.kind == "value":
        families.refuse_vision(hf_config, role.path_key, "name a text model")
    yield from problems_of(
        lambda: problems_of(lambda: loading.check_ulysses(model, hf_config, role.ulysses), prefix=f"{role.section}."),
        lambda: loading.check_context(model, hf_config, role.context, role.context_key),
        lambda: tensor_plan.check_model(model, hf_config, role.tensor, role.tensor_key),
        lambda: exact.check(hf_config, torch.device(device)) if role.exact and device is not None else None,
        lambda: tensor_plan.check_experts(
            model, hf_config, role.fsdp.expert_parallel_size, role.expert_key, trained=role.optim is not None
        ),
        lambda: stages.check_stages(hf_config, role.fsdp, role.pipe_key),
    )
    longest, positions = facts.known("max_model_len"), loading.num_positions(hf_config)
    stretched = positions < getattr(hf_config.get_text_config(), "max_position_embeddings", positions)
    if role.name != ACTOR and stretched and longest is not None and longest > positions:
        yield (
            f"{role.path_key}={model.path}: prompt plus response may have {longest} tokens, but "
            f"{loading.tell_positions(hf_config)}; lower the lengths, or name another model"
        )
    if role.name == REWARD:
        if facts.config.reward_model.worker_class is not None:
            return  # it may load what it likes
        loading.check_score_head(model, hf_config, role.path_key)
    section = role.model_section.removesuffix("model")
    samples = facts.config.actor_rollout_ref.rollout.engine if role.name == ACTOR else None  # it is sent the actor's
    for text in problems_of(lambda: _check_modules(role, hf_config, facts.trains, samples), prefix=section):
        yield text.replace(f"{section}model.path", role.path_key)
    if facts.trains and device is not None:
        yield from problems_of(
            lambda: loading.check_backend(model, hf_config, torch.device(device)),
            lambda: blocks.check_compiler(torch.device(device)) if role.compile_blocks else None,
            prefix=section,
        )


def _check_modules(
    role: RoleConfig, hf_config: PretrainedConfig, trains: bool, engine: EngineKind | None
) -> Iterator[str]:
    """Check a role's weights and adapters, and the modules that its keys name; keys begin with the role's section."""
    model, whole = role.model, loading.build_meta_model(role.model, hf_config, kind=role.kind)
    if trains:
        yield from problems_of(lambda: loading.check_weights(model, whole))
        inside = role.sharding_section.removeprefix(role.model_section.removesuffix("model"))
        yield from problems_of(lambda: loading.sharding_units(whole, role.fsdp), prefix=f"{inside}.")
    yield from problems_of(lambda: check_router(whole.hf, role.router, role.routes_key))
    if role.optim is not None and model.lora_rank > 0:
        tower = families.frozen_tower(whole.hf, frozen=role.freeze_vision_tower)
        adapters = lora.attach(whole.hf, model, dtype=torch.float32, seed=0, left_out=tower)
        if adapters.parameters and lora.adapters_apart(model) and engine is not None and not engine.adapts_experts:
            yield (
                f"model.lora.merge=False: the rollout engine keeps no adapters of experts and routers ("
                f"{', '.join(adapters.parameters)}) apart; set it to True, or leave them out by model.exclude_modules="
                "['experts','gate'] (names of this model's)"
            )
        if model.lora_adapter_path is not None:
            lora.load_adapter(whole.hf, model)


def check_vision(config: PPOConfig, hf_config: PretrainedConfig) -> None:
    """Refuse options that a vision-language model cannot have, before anything heavy is started (ValueError)."""
    model, actor = config.actor_rollout_ref.model, config.actor_rollout_ref.actor
    if lora.adapters_apart(model):
        families.refuse_vision(hf_config, "model.lora.merge=False", "set it to True")
    if actor.use_torch_compile:
        families.refuse_vision(hf_config, "actor_rollout_ref.actor.use_torch_compile=True", "set it to False")
    if needs_critic(config.critic, config.algorithm):
        fix = "use an estimator without one, for instance algorithm.adv_estimator=grpo"
        families.refuse_vision(hf_config, "a critic", fix)


def _check_vocabulary(config: PPOConfig, facts: Facts) -> None:
    model, vocab_size = config.actor_rollout_ref.model, facts.hf_config.get_text_config().vocab_size
    if (known := max(facts.tokenizer.get_vocab().values()) + 1) > vocab_size:
        raise ValueError(
            f"actor_rollout_ref.model.path={model.path}: its vocabulary has {vocab_size} ids, but the tokenizer "
            f"({config.data.tokenizer or model.path}) knows {known}; set data.tokenizer to the model's own tokenizer"
        )


def check_order(config: PPOConfig, facts: Facts) -> None:
    """Check what draws the training prompts, as far as it can be known where their files or sizes are at fault."""
    if config.data.sampler.class_path is not None:
        part("sampler", "class")(config.data)
    if (train := facts.known("train")) is not None:
        train_loader(config, train, facts.plan) if facts.known("plan") else train_sampler(config, train, 1)


def check_sampling(config: PPOConfig, facts: Facts) -> Iterator[str]:
    """Check that bad words leave something to sample, and that tokens that stop are the model's."""
    rollout, size = config.actor_rollout_ref.rollout, facts.hf_config.get_text_config().vocab_size
    for section, keys in ((_ROLLOUT, rollout), (f"{_ROLLOUT}.val_kwargs", rollout.val_kwargs)):
        if max(keys.stop_token_ids or [0]) >= size:
            yield (
                f"{section}.stop_token_ids={keys.stop_token_ids}: the model's tokens are 0 to {size - 1}; leave the "
                "others out"
            )
    for section, make in ((_ROLLOUT, train_sampling), (f"{_ROLLOUT}.val_kwargs", validation_sampling)):
        require_tokens_left(make(rollout, facts.eos_ids, facts.tokenizer), len(facts.tokenizer), f"{section}.")


def check_data(config: PPOConfig, facts: Facts) -> Iterator[str]:
    """Check the rows, and what they name, against model, tools and agent loops.

    One fault of rows at a time: it is mostly a key that does not fit, and so a fault of both sets.
    """
    yield from problems_of(lambda: facts.val, lambda: facts.train, lambda: facts.data)
    sets, teaches = (facts.known("train"), facts.known("val")), facts.trains and config.distillation.enabled
    yield from problems_of(
        lambda: part("loops", "check")(sets, config.actor_rollout_ref.rollout),
        lambda: part("tools", "check")(sets, facts.toolbox),
        lambda: teaches and sets[0] is not None and part("teachers", "rows")(config.distillation, sets[0]),
    )
    for split, dataset in zip(("train", "val"), sets, strict=True):
        if dataset is not None and (facts.trains or split == "val"):
            refuse_media(dataset, f"data.{split}_files", facts.hf_config)
            dataset.check_rows()
    refuse_media_keys(facts.data, facts.hf_config)
    if adds := own_text(make_encoder(facts.data, facts.tokenizer)):
        logger.info("the chat template adds where there is no system message: %r", adds)


def refuse_media(dataset: Dataset, key: str, hf_config: PretrainedConfig) -> None:
    """Refuse rows with images or videos that the model, or the data set's class, has no use for (ValueError)."""
    if not dataset.num_media():
        return
    if not families.sees(hf_config):
        raise ValueError(
            f"{key}: {dataset.num_media()} rows have images or videos (data.image_key, data.video_key), but the model "
            f"(model_type {hf_config.model_type}) reads text only. Leave such rows out"
        )
    if isinstance(dataset, ForeignDataset):
        raise ValueError(
            f"{key}: the class of data.custom_cls gives pixels (multi_modal_data), which are not available: derive it "
            "from PromptDataset, whose rows name their images"
        )


def refuse_media_keys(data: DataConfig, hf_config: PretrainedConfig) -> None:
    """Refuse columns of images or videos that were named for a model which reads text only (ValueError)."""
    for kind, column in (("image", data.image_key), ("video", data.video_key)):
        if column not in (None, DEFAULT_MEDIA_KEYS[kind]) and not families.sees(hf_config):
            raise ValueError(
                f"data.{kind}_key={column}: the model (model_type {hf_config.model_type}) reads text only; set the key "
                "to null, or choose a model that sees"
            )
