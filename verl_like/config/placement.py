"""Pools of processes that roles share: a run is one or several pools, and a role belongs to one of them.

The main pool has trainer.nnodes x trainer.n_gpus_per_node processes and hosts every role that no other pool names: all
of them in the hybrid engine. trainer.placement gives roles pools of their own; hybrid_engine=False and
reward_model.enable_resource_pool are its short forms for the rollout engine and the reward model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from verl_like.config.pools import MAIN_POOL, Pool, named_pools
from verl_like.config.ppo import PPOConfig
from verl_like.config.roles import ACTOR, REF, REWARD, ROLLOUT, compares_policies, every_role, hosted_roles, roles_of
from verl_like.config.schema import Idle

_ROLLOUT_KEYS = "actor_rollout_ref.rollout"


def pools_of(config: PPOConfig, world_size: int) -> tuple[Pool, ...]:
    """All pools, the main one first; those without a role of this run are left out. world_size: of the main pool."""
    present = hosted_roles(config)
    others = [pool for pool in _others(config) if set(pool.roles) & set(present)]
    elsewhere = {role for pool in others for role in pool.roles}
    main = Pool(
        name=MAIN_POOL,
        roles=tuple(role for role in present if role not in elsewhere),
        nnodes=config.trainer.nnodes,
        ranks_per_node=max(1, world_size // config.trainer.nnodes),
        keys=("trainer.nnodes", "trainer.n_gpus_per_node"),
    )
    return (main, *(replace(pool, roles=tuple(role for role in present if role in pool.roles)) for pool in others))


def impossible_placement(config: PPOConfig) -> Iterator[str]:
    """Settings whose placement of roles cannot work: keys, values, fix."""
    others, movable = _others(config), [*(role for role in every_role(config) if role != ACTOR), ROLLOUT]
    for pool in named_pools(config.trainer.placement):
        for role in pool.roles:
            if role not in movable and (pool.name, role) != (MAIN_POOL, ACTOR):
                yield (
                    f"trainer.placement: {role} in the pool {pool.name}: choose among {', '.join(movable)}; the actor "
                    f"stays in the pool {MAIN_POOL}"
                )
    for pool in others:
        if pool.world_size < 1:
            yield f"{pool.size_text}: the pool of {', '.join(pool.roles)} needs both sizes above 0"
    if others and config.trainer.launcher == "local":
        yield (
            f"trainer.launcher=local with pools of their own for {', '.join(r for p in others for r in p.roles)}: "
            "there is one process; set trainer.launcher=ray, or leave trainer.placement, hybrid_engine=false and "
            "reward_model.enable_resource_pool out"
        )
    names = [pool.name for pool in others]
    for name in dict.fromkeys(names):
        if names.count(name) > 1:
            yield (
                f"trainer.placement.{name}: another pool has this name already (hybrid_engine=false names one rollout, "
                "reward_model.enable_resource_pool one reward); choose another"
            )
    counts: dict[str, list[str]] = {}
    for pool in (*(pool for pool in named_pools(config.trainer.placement) if pool.name == MAIN_POOL), *others):
        for role in pool.roles:
            counts.setdefault(role, []).append(pool.name)
    for role, names in counts.items():
        if len(names) > 1:
            yield (
                f"{role} is in the pools {', '.join(names)}: name it in one of trainer.placement, and leave "
                "hybrid_engine=false (rollout) and reward_model.enable_resource_pool (reward) out where a pool names "
                "the role"
            )
    if is_apart(config, REF) and REF in roles_of(config):
        why = ""
        if config.actor_rollout_ref.model.lora_rank > 0:
            why = f"with actor_rollout_ref.model.lora_rank={config.actor_rollout_ref.model.lora_rank} it is the actor"
        elif compares_policies(config):
            why = "for the exact KL (kl_penalty or kl_loss_type=full) it reads the rows together with the actor"
        if why:
            yield f"trainer.placement puts ref into {counts[REF][0]}, but {why}; leave it in the main pool"


def has_further_pools(config: PPOConfig) -> bool:
    """Return True where there are pools beside the main one."""
    return bool(_others(config))


def idle_placement(config: PPOConfig) -> list[str]:
    """Pools that no role of this run is in."""
    present = set(hosted_roles(config))
    return [
        f"trainer.placement.{pool.name} has no effect in this run: it has no {' and no '.join(pool.roles)}"
        for pool in _named(config)
        if not set(pool.roles) & present
    ]


def _others(config: PPOConfig) -> list[Pool]:
    """Every pool beside the main one that the configuration names."""
    pools, rollout, reward = _named(config), config.actor_rollout_ref.rollout, config.reward_model
    if _rollout_has_own_keys(config):
        sizes = {"nnodes": rollout.nnodes, "ranks_per_node": rollout.n_gpus_per_node}
        keys = (f"{_ROLLOUT_KEYS}.nnodes", f"{_ROLLOUT_KEYS}.n_gpus_per_node")
        pools.append(Pool(name=ROLLOUT, roles=(ROLLOUT,), **sizes, keys=keys))
    if reward.enable and reward.enable_resource_pool:
        sizes = {"nnodes": reward.nnodes, "ranks_per_node": reward.n_gpus_per_node}
        pools.append(
            Pool(name=REWARD, roles=(REWARD,), **sizes, keys=("reward_model.nnodes", "reward_model.n_gpus_per_node"))
        )
    return pools


def _roles_named(config: PPOConfig) -> set[str]:
    return {role for pool in _named(config) for role in pool.roles}


def _named(config: PPOConfig) -> list[Pool]:
    return [pool for pool in named_pools(config.trainer.placement) if pool.name != MAIN_POOL]


def _rollout_has_own_keys(config: PPOConfig) -> bool:
    return not config.actor_rollout_ref.hybrid_engine and ROLLOUT not in _roles_named(config)


def is_apart(config: PPOConfig, role: str) -> bool:
    """Return True where a role is in another pool than the main one."""
    return any(role in pool.roles for pool in _others(config))


def samples_alone(config: PPOConfig) -> bool:
    """Return True where the rollout engine has its processes for itself."""
    return any(pool.roles == (ROLLOUT,) for pool in _others(config))


PLACEMENT_IDLE: tuple[Idle, ...] = (
    Idle(
        (f"{_ROLLOUT_KEYS}.nnodes", f"{_ROLLOUT_KEYS}.n_gpus_per_node"),
        lambda c: not _rollout_has_own_keys(c),
        "the rollout engine is in the actor's processes (hybrid_engine), or in a pool of trainer.placement",
    ),
    Idle(
        (f"{_ROLLOUT_KEYS}.free_cache_engine", f"{_ROLLOUT_KEYS}.sleep_level"),
        samples_alone,
        "the rollout engine has its processes for itself",
    ),
    Idle(
        (f"{_ROLLOUT_KEYS}.update_weights_bucket_megabytes",),
        lambda c: not any(ROLLOUT in pool.roles for pool in _others(c)),
        "trainer and rollout engine share memory: tensors go one by one",
    ),
)
