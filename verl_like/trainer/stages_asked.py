"""Pipeline stages that are asked for by the names of Megatron's keys: which of them can be had here.

Asked for by `fsdp_config.pipeline_parallel_size`, stages that a role cannot have are an error. Megatron's size says how
a run is spread there, beside its other sizes: where stages do not go, FSDP shards the weights over those processes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from verl_like.config import FSDPConfig, PPOConfig
from verl_like.config.mesh import NAMES
from verl_like.config.placement import pools_of
from verl_like.config.roles import RoleConfig, roles_of
from verl_like.config.rule import all_rules
from verl_like.config.schema import get_value
from verl_like.config.spellings import Change, renamed

_ROLE = r"(actor_rollout_ref\.(actor|ref)|critic|reward_model)"
_NAME = re.compile(_ROLE + r"\.megatron\.(virtual_)?pipeline_model_parallel_size")
_INSTEAD = {
    "fsdp_config.pipeline_parallel_size": "FSDP shards the weights over these processes instead; same numbers",
    "fsdp_config.virtual_pipeline_size": "stages have one piece each instead; same numbers",
}
SIZES = tuple(_INSTEAD)  # ends of the keys


def asked_by_megatron(changes: Iterable[Change]) -> dict[str, str]:
    """Find the keys of stages that are set by Megatron's names alone: key -> that name. changes: as they were typed."""
    typed = {change.key: renamed(change.key) for change in changes}
    asked = {key: name for name, key in typed.items() if _NAME.fullmatch(name) and key not in typed}
    return with_follower(asked, typed.values())


def with_follower(asked: dict[str, str], known: Iterable[str]) -> dict[str, str]:
    """Add the reference's keys, which follow the actor's, unless they are among those that are set (`known`)."""
    actor, ref, set_here = "actor_rollout_ref.actor.", "actor_rollout_ref.ref.", set(known)
    follow = {ref + key.removeprefix(actor): name for key, name in asked.items() if key.startswith(actor)}
    return asked | {key: name for key, name in follow.items() if key not in set_here}


def taken_back(
    asked: Mapping[str, str], config: Callable[[], PPOConfig], take_back: Callable[[str], object]
) -> dict[str, str]:
    """Take back, one after the other, the stages that a run cannot have.

    Args:
        asked: key of stages, or of their pieces -> the name that asks for them.
        config: the configuration as it now is.
        take_back: sets a key to 1.

    Returns a line for each key that was taken back.
    """
    told: dict[str, str] = {}
    while asked and (found := _obstacle(now := config(), asked)):
        key, why = found
        instead = next(text for size, text in _INSTEAD.items() if key.endswith(size))
        told[key] = f"{asked[key]}={get_value(now, key)}: {why} {instead}"
        take_back(key)
    return told


def _obstacle(config: PPOConfig, asked: Mapping[str, str]) -> tuple[str, str] | None:
    return next(_obstacles(config, [key for key in asked if get_value(config, key) > 1]), None)


def _obstacles(config: PPOConfig, keys: list[str]) -> Iterator[tuple[str, str]]:
    for rule in all_rules() if keys else ():
        if rule.kind == "impossible" and any(map(rule.is_about, keys)):
            for names, _ in rule.findings(config):
                other = next((name for name in names if name not in keys), None)
                for key in keys:
                    if key in names and other is not None:
                        yield key, f"beside {other}={get_value(config, other)}"
    for name, role in roles_of(config).items():
        if role.pipe_key in keys:
            why = _indivisible(config, name, role) or _of_model(role, replace(role.fsdp, virtual_pipeline_size=1))
            yield from [(role.pipe_key, f"{why}:")] if why else ()
        if role.pieces_key in keys and role.fsdp.pipeline_parallel_size > 1 and (why := _of_model(role, role.fsdp)):
            yield role.pieces_key, f"{why}:"


def _indivisible(config: PPOConfig, name: str, role: RoleConfig) -> str:
    """Say why the stages do not go into the processes; empty where they do, or these are not known yet."""
    per_node = config.trainer.n_gpus_per_node
    if not isinstance(per_node, int):
        return ""
    pools = (pool for pool in pools_of(config, config.trainer.nnodes * per_node) if name in pool.roles)
    sizes = role.mesh(next(pools).world_size)
    for axis, total in sizes.problems():
        if axis == "pipe":
            return f"it does not divide {getattr(sizes, total)} processes"
        if total == "stage":
            return f"{NAMES[axis]}={getattr(sizes, axis)} does not divide the {sizes.beside(axis)} processes of a stage"
    return ""


def _of_model(role: RoleConfig, fsdp: FSDPConfig) -> str:
    """Say why the role's model is not cut; empty where it can be, or where its config is not in a folder here."""
    if not (Path(role.model.path).expanduser() / "config.json").is_file():
        return ""
    from verl_like.models import loading, stages  # torch, which no other command line needs this early

    try:
        hf_config = loading.load_hf_config(role.model, role.path_key)
    except (ValueError, OSError):
        return ""  # which the start tells
    return stages.why_whole(hf_config, fsdp)
