"""Placement of ranks: nnodes x ranks_per_node slots on the nodes of a Ray cluster.

One placement group with one bundle per node (STRICT_SPREAD) reserves all nodes at once, so that two runs that start
together cannot each hold half of what they need. Nodes are put in the order of their addresses: rank r is on the same
machine after a restart, which checkpoints of shards per rank rely on.
"""

from __future__ import annotations

import ipaddress
import logging
import time
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group

from verl_like.config.errors import ConfigError

logger = logging.getLogger(__name__)

_POLL_SECONDS = 2.0
_FIRST_NOTICE_SECONDS = 10.0


class ResourcesError(ConfigError):
    """The cluster does not have what the run asks for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSlot:
    """One node of an allocation."""

    node_id: str
    address: str
    bundle_index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """Reserved room for `len(nodes) * ranks_per_node` ranks. Give it back with `release`."""

    nodes: tuple[NodeSlot, ...]  # in rank order
    ranks_per_node: int
    device: str
    cpus_per_rank: float
    placement_group: PlacementGroup

    @property
    def world_size(self) -> int:
        return len(self.nodes) * self.ranks_per_node

    def release(self) -> None:
        remove_placement_group(self.placement_group)


def allocate(
    nnodes: int,
    ranks_per_node: int,
    *,
    device: str = "cpu",
    cpus_per_rank: float = 1,
    timeout: float = 300,
    may_grow: bool = True,
    keys: tuple[str, str] = ("trainer.nnodes", "trainer.n_gpus_per_node"),
) -> Allocation:
    """Reserve room for the ranks, waiting up to `timeout` seconds for nodes that are busy or still joining.

    Raises ResourcesError, which says what was asked for and what the cluster has.

    device: "cuda" reserves one GPU per rank, "cpu" only cores.
    may_grow: False when no node can join later (a Ray of our own); room that can never be there is then refused at
        once.
    keys: names of the keys that set the two sizes, for messages.
    """
    if nnodes < 1 or ranks_per_node < 1:
        raise ValueError(f"{keys[0]}={nnodes} and {keys[1]}={ranks_per_node} must be 1 or more")
    bundle = {"CPU": float(ranks_per_node * cpus_per_rank)}
    if device == "cuda":
        bundle["GPU"] = float(ranks_per_node)
    if not may_grow and not _could_fit(nnodes, bundle):
        raise ResourcesError([_explain(nnodes, ranks_per_node, device, bundle, waited=0, keys=keys)])
    group = placement_group([bundle] * nnodes, strategy="STRICT_SPREAD")
    if not _wait(group, timeout, nnodes, bundle):
        message = _explain(nnodes, ranks_per_node, device, bundle, waited=timeout, keys=keys)
        remove_placement_group(group)
        raise ResourcesError([message])
    return Allocation(
        nodes=_nodes_in_order(group),
        ranks_per_node=ranks_per_node,
        device=device,
        cpus_per_rank=cpus_per_rank,
        placement_group=group,
    )


def _wait(group: PlacementGroup, timeout: float, nnodes: int, bundle: dict[str, float]) -> bool:
    started = time.monotonic()
    told = False
    while (waited := time.monotonic() - started) < timeout:
        if group.wait(min(_POLL_SECONDS, timeout - waited)):
            return True
        if not told and waited > _FIRST_NOTICE_SECONDS:
            told = True
            logger.warning("waiting for %d node(s) with %s each; the cluster has: %s", nnodes, bundle, _cluster())
    return False


def _nodes_in_order(group: PlacementGroup) -> tuple[NodeSlot, ...]:
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    node_of_bundle = placement_group_table(group)["bundles_to_node_id"]
    slots = [
        NodeSlot(node_id=node_id, address=addresses[node_id], bundle_index=int(index))
        for index, node_id in node_of_bundle.items()
    ]
    return tuple(sorted(slots, key=lambda slot: (_address_key(slot.address), slot.node_id)))


def _address_key(address: str) -> tuple[int, int, str]:
    """Key that sorts 10.0.0.9 before 10.0.0.10; host names come after addresses."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return (9, 0, address)
    return (parsed.version, int(parsed), address)


def _could_fit(nnodes: int, bundle: dict[str, float]) -> bool:
    fitting = [
        node for node in _alive() if all(node["Resources"].get(name, 0) >= need for name, need in bundle.items())
    ]
    return len(fitting) >= nnodes


def _alive() -> list[dict[str, Any]]:
    return [node for node in ray.nodes() if node["Alive"]]


def _cluster() -> str:
    """Describe the cluster in one line: nodes with their CPUs and GPUs, and the free ones in all."""
    nodes = []
    for node in sorted(_alive(), key=lambda node: _address_key(node["NodeManagerAddress"])):
        has = node["Resources"]
        nodes.append(f"{node['NodeManagerAddress']} (CPU {has.get('CPU', 0):g}, GPU {has.get('GPU', 0):g})")
    free = ray.available_resources()
    return f"{len(nodes)} node(s): {', '.join(nodes)}; free: CPU {free.get('CPU', 0):g}, GPU {free.get('GPU', 0):g}"


def _explain(
    nnodes: int, ranks_per_node: int, device: str, bundle: dict[str, float], *, waited: float, keys: tuple[str, str]
) -> str:
    need = ", ".join(f"{name} {amount:g}" for name, amount in bundle.items())
    patience = f" after waiting {waited:g} s (trainer.ray_wait_register_center_timeout)" if waited else ""
    return (
        f"not enough resources{patience}: {keys[0]}={nnodes} x {keys[1]}={ranks_per_node} ranks on "
        f"{device} need {nnodes} different node(s) with {need} each; the cluster has {_cluster()}. Lower "
        f"{keys[0]} or {keys[1]}, raise ray_init.num_cpus when Ray is started by this run, or let "
        "more nodes join (ray start --address=...)."
    )
