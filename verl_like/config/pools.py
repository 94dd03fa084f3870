"""A pool of processes, and the forms of trainer.placement: pools with roles and sizes, or roles with their devices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

MAIN_POOL = "main"  # the pool of trainer.nnodes x trainer.n_gpus_per_node
ACTOR_IN_TABLE = "actor"

_POOL = "{pool: {roles: [critic], nnodes: 1, n_gpus_per_node: 2}}"
_ROLE = "{rollout: 2} (a number of devices), {rollout: [2, 3]} or {rollout: [[0, 1], [0, 1]]} (those of each node)"


class PlacementError(ValueError):
    """trainer.placement cannot be read; says what to write."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """Processes that host the same roles. nnodes x ranks_per_node of them."""

    name: str
    roles: tuple[str, ...]
    nnodes: int
    ranks_per_node: int
    keys: tuple[str, str]  # that say its two sizes

    @property
    def world_size(self) -> int:
        """Its processes."""
        return self.nnodes * self.ranks_per_node

    @property
    def size_text(self) -> str:
        """`trainer.nnodes x trainer.n_gpus_per_node = 8`, for messages."""
        return f"{self.keys[0]} x {self.keys[1]} = {self.world_size}"


def named_pools(placement: dict[str, Any]) -> list[Pool]:
    """The pools of trainer.placement. Roles with the same devices are in one pool; those with the actor's are in the
    main one, which is named only where the actor is. Raises PlacementError."""
    by_devices: dict[tuple[tuple[int, ...], ...], list[str]] = {}
    found = []
    for name, value in placement.items():
        if name in (MAIN_POOL, "worker"):
            raise PlacementError(
                f"{name}: write {_POOL} or {_ROLE}; any name but worker and {MAIN_POOL}, the pool of trainer.nnodes"
            )
        if isinstance(value, dict):
            found.append(_pool(name, value))
        elif isinstance(value, int) and not isinstance(value, bool):
            if value < 1 or name == ACTOR_IN_TABLE:
                raise PlacementError(f"{name}: write {_ROLE}; the actor's number is trainer.n_gpus_per_node")
            keys = (f"1 node of trainer.placement.{name}", f"trainer.placement.{name}")
            found.append(Pool(name=name, roles=(name,), nnodes=1, ranks_per_node=value, keys=keys))
        else:
            by_devices.setdefault(_devices(name, value), []).append(name)
    _refuse_partial_overlap(by_devices)
    for devices, roles in by_devices.items():
        where = f"trainer.placement.{roles[0]}"
        found.append(
            Pool(
                name=MAIN_POOL if ACTOR_IN_TABLE in roles else "_".join(roles),
                roles=tuple(roles),
                nnodes=len(devices),
                ranks_per_node=len(devices[0]),
                keys=(f"nodes of {where}", f"devices of each node in {where}"),
            )
        )
    return found


def _pool(name: str, value: dict[str, Any]) -> Pool:
    if not name.isidentifier():
        raise PlacementError(f"{name}: write {_POOL}; a name of letters and digits")
    unknown = sorted(set(value) - {"roles", "nnodes", "n_gpus_per_node"})
    nnodes, each = (value.get(key, 1) for key in ("nnodes", "n_gpus_per_node"))
    if unknown or not all(isinstance(size, int) and size >= 1 for size in (nnodes, each)):
        raise PlacementError(
            f"{name}: {f'unknown {unknown}; ' if unknown else ''}write {_POOL}, with sizes of at least 1"
        )
    roles = value.get("roles")
    if not isinstance(roles, list) or not roles or not all(isinstance(role, str) for role in roles):
        raise PlacementError(f"{name}.roles: write {_POOL}")
    keys = (f"trainer.placement.{name}.nnodes", f"trainer.placement.{name}.n_gpus_per_node")
    return Pool(name=name, roles=tuple(roles), nnodes=nnodes, ranks_per_node=each, keys=keys)


def _devices(name: str, value: Any) -> tuple[tuple[int, ...], ...]:
    """[node][device] of one role."""
    nodes = value if isinstance(value, list) and value and all(isinstance(node, list) for node in value) else [value]
    for node in nodes:
        numbers = node if isinstance(node, list) else []
        legal = numbers and all(type(number) is int and number >= 0 for number in numbers)
        if not legal or len(set(numbers)) < len(numbers):
            raise PlacementError(f"{name}: {value}: write {_ROLE}, each number once, or {_POOL}")
    if len({len(node) for node in nodes}) > 1:
        raise PlacementError(f"{name}: {value}: every node gives as many devices")
    return tuple(tuple(sorted(node)) for node in nodes)


def _refuse_partial_overlap(by_devices: dict[tuple[tuple[int, ...], ...], list[str]]) -> None:
    seen: dict[tuple[int, int], str] = {}
    for devices, roles in by_devices.items():
        for place in ((node, number) for node, numbers in enumerate(devices) for number in numbers):
            other = seen.setdefault(place, roles[0])
            if other != roles[0]:
                raise PlacementError(
                    f"{other} and {roles[0]} share device {place[1]} of node {place[0]}, but not all of their devices: "
                    "a device belongs to one pool, whose roles are on all of its devices. Give both roles the same "
                    "devices, or none in common"
                )
