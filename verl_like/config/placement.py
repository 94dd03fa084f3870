"""Pools of processes that roles share: a run is one or several pools, and a role belongs to one of them.

The main pool has trainer.nnodes x trainer.n_gpus_per_node processes and hosts every role that no other pool names: all
of them in the hybrid engine. trainer.placement gives roles pools of their own; hybrid_engine=False and
reward_model.enable_resource_pool are its short forms for the rollout engine and the reward model.
"""

from __future__ import annotations

from dataclasses import replace

from verl_like.config.distillation import is_teacher
from verl_like.config.pools import MAIN_POOL, Pool, named_pools
from verl_like.config.ppo import PPOConfig
from verl_like.config.roles import ACTOR, REF, REWARD, ROLLOUT, compares_policies, every_role, hosted_roles, roles_of
from verl_like.config.rule import Findings, idle, rule

_ROLLOUT_KEYS = "actor_rollout_ref.rollout"
_SIZES = (
    *(f"{_ROLLOUT_KEYS}.nnodes", f"{_ROLLOUT_KEYS}.n_gpus_per_node"),
    *("reward_model.nnodes", "reward_model.n_gpus_per_node"),
    *("distillation.nnodes", "distillation.n_gpus_per_node"),
)
_LORA_OR_KL = ("actor_rollout_ref.model.lora_rank", "algorithm.kl_penalty", "actor_rollout_ref.actor.kl_loss_type")


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
        pools.append(Pool(name=ROLLOUT, roles=(ROLLOUT,), **sizes, keys=_SIZES[:2]))
    if reward.enable and reward.enable_resource_pool:
        sizes = {"nnodes": reward.nnodes, "ranks_per_node": reward.n_gpus_per_node}
        pools.append(Pool(name=REWARD, roles=(REWARD,), **sizes, keys=_SIZES[2:4]))
    distillation = config.distillation
    if distillation.nnodes and (teachers := tuple(n for n, each in distillation.teachers().items() if each.local)):
        sizes = {"nnodes": distillation.nnodes, "ranks_per_node": distillation.n_gpus_per_node}
        pools.append(Pool(name="teacher", roles=teachers, **sizes, keys=_SIZES[4:]))
    return pools


def _named(config: PPOConfig) -> list[Pool]:
    return [pool for pool in named_pools(config.trainer.placement) if pool.name != MAIN_POOL]


def _rollout_has_own_keys(config: PPOConfig) -> bool:
    named = {role for pool in _named(config) for role in pool.roles}
    return not config.actor_rollout_ref.hybrid_engine and ROLLOUT not in named


def is_apart(config: PPOConfig, role: str) -> bool:
    """Return True where a role is in another pool than the main one."""
    return any(role in pool.roles for pool in _others(config))


def samples_alone(config: PPOConfig) -> bool:
    """Return True where the rollout engine has its processes for itself."""
    return any(pool.roles == (ROLLOUT,) for pool in _others(config))


POOL_KEYS = (
    *("trainer.placement", "actor_rollout_ref.hybrid_engine", "reward_model.enable_resource_pool"),
    "distillation.nnodes",
)


def pools_by(config: PPOConfig) -> list[str]:
    """The keys that ask for pools beside the main one."""
    asks = (
        config.trainer.placement,
        not config.actor_rollout_ref.hybrid_engine,
        config.reward_model.enable_resource_pool,
        config.distillation.enabled and config.distillation.nnodes,
    )
    return [key for key, asked in zip(POOL_KEYS, asks, strict=True) if asked]


@rule(*POOL_KEYS, *(key for key in _SIZES if key not in POOL_KEYS))
def roles_have_one_pool(config: PPOConfig) -> Findings:
    """A pool has a name and processes, and a role is in one of them; the actor stays in the main pool."""
    named, others = named_pools(config.trainer.placement), _others(config)
    movable = [*(role for role in every_role(config) if role != ACTOR), ROLLOUT]
    for name, role in ((pool.name, role) for pool in named for role in pool.roles):
        if role not in movable and (name, role) != (MAIN_POOL, ACTOR):
            fix = f"choose among {', '.join(movable)}; the actor stays in the pool {MAIN_POOL}"
            yield ("trainer.placement",), f"{role} in the pool {name}: {fix}"
    for pool in (pool for pool in others if pool.world_size < 1):
        yield pool.keys, f"the pool of {', '.join(pool.roles)} needs both sizes above 0 ({', '.join(pools_by(config))})"
    pools = [*(pool for pool in named if pool.name == MAIN_POOL), *others]
    names = [pool.name for pool in pools]
    for name in dict.fromkeys(name for name in names if names.count(name) > 1):
        short = "hybrid_engine=false names one rollout, enable_resource_pool one reward"
        yield pools_by(config), f"another pool has the name {name} already ({short}); choose another"
    for role in dict.fromkeys(role for pool in pools for role in pool.roles):
        if len(names := [pool.name for pool in pools if role in pool.roles]) > 1:
            short = "hybrid_engine=false (rollout) and enable_resource_pool (reward) out where a pool names the role"
            if is_teacher(role):
                short = "distillation.nnodes at 0"
            fix = f"name it in one of trainer.placement, and leave {short}"
            yield pools_by(config), f"{role} is in the pools {', '.join(names)}: {fix}"


@rule("trainer.launcher", *POOL_KEYS)
def pools_need_processes(config: PPOConfig) -> Findings:
    """trainer.launcher=local has one process, and so no further pool."""
    if config.trainer.launcher == "local" and (others := _others(config)):
        why = f"there is one process, and none for a pool of {', '.join(r for pool in others for r in pool.roles)}"
        return ("trainer.launcher", *pools_by(config)), f"{why}; set trainer.launcher=ray, or leave the others out"


@rule("trainer.placement", *_LORA_OR_KL)
def reference_beside_the_actor(config: PPOConfig) -> Findings:
    """The reference is in the actor's pool where it is the actor (LoRA), or reads the rows together with it."""
    if not is_apart(config, REF) or REF not in roles_of(config):
        return
    if config.actor_rollout_ref.model.lora_rank > 0:
        yield ("trainer.placement", _LORA_OR_KL[0]), "with LoRA ref is the actor; leave it in the main pool"
    elif compares_policies(config):
        why = "for the exact KL (full) ref reads the rows together with the actor"
        yield ("trainer.placement", *_LORA_OR_KL[1:]), f"{why}; leave it in the main pool"


idle(
    *_SIZES[:2],
    when=lambda c: not _rollout_has_own_keys(c),
    why="the rollout engine is in the actor's processes (hybrid_engine), or in a pool of trainer.placement",
)
idle(
    *(f"{_ROLLOUT_KEYS}.free_cache_engine", "sleep_level"),
    when=samples_alone,
    why="the rollout engine has its processes for itself",
)
idle(
    f"{_ROLLOUT_KEYS}.update_weights_bucket_megabytes",
    when=lambda c: not is_apart(c, ROLLOUT),
    why="trainer and rollout engine share memory: tensors go one by one",
)
