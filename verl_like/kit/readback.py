"""Comparison of what workers built with what the configuration asks: a difference is one line of the start.

Libraries change what they are asked for: transformers falls back to another attention, an engine lowers a length or
chooses a cache's precision by itself, an option of engine_kwargs wins over a key of ours. The objects as they were
built are asked here, not the arguments that they were given.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from verl_like.config.roles import ROLLOUT
from verl_like.engine.fsdp import FSDPEngine
from verl_like.models import attention, families, lora
from verl_like.models.heads import dtype_of
from verl_like.parallel.dist import ProcessInfo
from verl_like.rollout.build import rollout_dtype
from verl_like.workers.spec import WorkerSpec

Reading = tuple[str, Any, Any]  # key, what it asks for, what was built


def differences(spec: WorkerSpec, process: ProcessInfo, roles: Mapping[str, Any]) -> list[str]:
    """List a line for each setting of a rank's roles that was built otherwise than asked: key, asked, got."""
    engines = {name: getattr(role, "engine", None) for name, role in roles.items()}
    readings = [each for engine in engines.values() if isinstance(engine, FSDPEngine) for each in of_model(engine)]
    if ROLLOUT in roles:
        readings += of_rollout(spec, process, roles[ROLLOUT].engine.effective())
    return [f"{key}: {asked} was asked for, but {got} was built" for key, asked, got in readings if asked != got]


def of_rollout(spec: WorkerSpec, process: ProcessInfo, built: Mapping[str, Any]) -> Iterator[Reading]:
    """Compare a rollout engine's settings (RolloutEngine.effective) with rollout.*."""
    rollout = spec.config.actor_rollout_ref.rollout
    derived = {
        "dtype": rollout_dtype(rollout, process.device),
        "max_model_len": spec.max_model_len,
        "kv_cache_dtype": rollout.engine_kwargs.vllm.get("kv_cache_dtype", "auto"),  # no key of ours
    }
    for name, got in built.items():
        yield f"actor_rollout_ref.rollout.{name}", derived[name] if name in derived else getattr(rollout, name), got


def of_model(engine: FSDPEngine) -> Iterator[Reading]:
    """Compare a model, its adapters and its optimizer with the keys of their role."""
    role, optimizer, named = engine.role, engine.optimizer, dict(engine.model.named_parameters())
    section, text = role.sharding_section, engine.model.hf.config.get_text_config()
    packed = attention.EXACT_NAME if role.exact else attention.ATTENTION_NAME
    attends = packed if engine.packed else families.padded_attention(engine.hf_config)
    key = f"{role.model_section}.use_remove_padding={engine.packed}, attention"
    yield key, attends, getattr(text, "_attn_implementation", None)
    if role.optim is None or optimizer is None:
        yield from ((f"{section}.dtype", engine.compute_dtype, each.dtype) for each in named.values())
        return
    with_lora = role.model.lora_rank > 0
    hf, sees = engine.model.hf, families.sees(engine.hf_config)
    frozen = [f".{part}." for part in families.parts_beside_text(hf) if role.freeze_vision_tower or not sees]
    trained = [n for n in named if (lora.is_trained(n) if with_lora else not any(part in n for part in frozen))]
    yield f"{role.section}.optim, tensors", len(trained), sum(len(group["params"]) for group in optimizer.param_groups)
    if with_lora:
        yield from _of_adapters(engine)
    for name in trained:
        if lora.is_adapter(name) or not with_lora:  # the head of a value model is as the base
            yield f"{section}.model_dtype", dtype_of(role.fsdp.model_dtype), named[name].dtype
    groups: list[dict[str, Any]] = optimizer.param_groups
    for group, name in itertools.product(groups, ("lr", "betas", "eps", "weight_decay")):
        asked = getattr(role.optim, name)
        yield f"{role.section}.optim.{name}", tuple(asked) if name == "betas" else asked, group[name]
    for momentum in (group["momentum"] for group in groups if group.get("momentum") is not None):
        yield f"{role.section}.optim.muon_momentum", role.optim.muon_momentum, momentum


def _of_adapters(engine: FSDPEngine) -> Iterator[Reading]:
    """Compare ranks and scales of the adapters with model.lora_*, and what they adapt with target_modules."""
    model, section, adapters = engine.role.model, engine.role.model_section, engine.adapters
    assert adapters is not None
    kinds = (lora.LoRALinear, lora.ParameterAdapter)
    named = zip(adapters.names, adapters.modules, strict=True)
    built = {name: each for name, each in named if isinstance(each, kinds)}
    for each in built.values():
        rank = each.lora_A.out_features // each.experts
        yield f"{section}.lora_rank", model.lora_rank, rank
        yield f"{section}.lora_alpha", model.lora_alpha, each.scale * rank
    if isinstance(model.target_modules, list) and model.exclude_modules is None and not adapters.parameters:
        last = {name.rpartition(".")[2] for name in built}
        for target in model.target_modules:
            yield f"{section}.target_modules, {target}", True, target.rpartition(".")[2] in last
