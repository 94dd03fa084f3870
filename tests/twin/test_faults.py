"""Planted faults are seen by what the suite looks at; without them it finds nothing."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.twin.cases import PARKED, SMALL, case
from tests.twin.inner import TIMEOUT_S
from tests.twin.test_step import Run, over_budget

WEIGHTS = 151_936 * 896 + 2 * 14_912_384 + 896  # of two layers of Qwen2.5-0.5B
NO_REF = ["actor_rollout_ref.actor.use_kl_loss=false"]


def complaints(outcome: dict[str, Any], world: int = 0, copies: int = 3) -> str:
    """Tell what the suite finds, in one text. copies: of the shard that a rank of `world` keeps while it sleeps."""
    if "error" in outcome:
        return outcome["error"]
    found = [f"over budget: {name} {lines}" for name, lines in over_budget(outcome).items()]
    found += outcome.get("differs", [])
    if world:
        kept = outcome["kept"]["sleep"] / (4 * WEIGHTS / world)  # [float32 copies of a shard] weights and two states
        if not 0.98 * copies <= kept <= 1.03 * copies + 0.02:
            found.append(f"{kept:.2f} float32 copies of a shard stay on the device, {copies} should")
    slots = outcome["phases"]["update_weights"]["made"].get("weight_sync/wired.py", 0)
    if slots > min(2 * 512 * 2**20, 1.02 * 2 * WEIGHTS):  # two buckets, or one that holds all in bfloat16
        found.append(f"buckets take {slots >> 20} MB")
    return "\n".join(found)


def planted(name: str, *keys: str, **more: Any) -> dict[str, Any]:
    """A case with the fault of this name, "" for none."""
    before = f"tests.twin.faults:{name}" if name else ""
    return case(name or "sound", SMALL, *NO_REF, *keys) | {"before": before} | more


@pytest.mark.twin
@pytest.mark.timeout(TIMEOUT_S)
def test_one_rank_of_many_sees_faults(on_twin: Run) -> None:
    """Devices, waits, memory."""
    faults = ("tensor_on_the_cpu", "item_per_micro_batch", "bucket_twice_as_large", "float64_optimizer_states")
    found = on_twin([planted("", world=64), *(planted(name) for name in faults), planted("shards_of_eight", world=64)])
    assert complaints(found["sound"], 64) == ""
    told = {name: complaints(each, 64 if name == "shards_of_eight" else 8) for name, each in found.items()}
    assert re.search("on the same device|two different devices", told["tensor_on_the_cpu"])  # torch 2.13, torch 2.11
    assert "read engine/fsdp.py:" in told["item_per_micro_batch"]
    assert "FSDPEngine._loss" in told["item_per_micro_batch"]
    assert "buckets take" in told["bucket_twice_as_large"]
    assert "copies of a shard stay on the device" in told["float64_optimizer_states"]
    assert "copies of a shard stay on the device" in told["shards_of_eight"]


@pytest.mark.twin
@pytest.mark.timeout(TIMEOUT_S)
def test_what_is_parked_leaves_the_device(on_twin: Run) -> None:
    """An offload that keeps a reference frees nothing."""
    found = on_twin([planted("", *PARKED), planted("offload_keeps_a_reference", *PARKED)])
    assert complaints(found["sound"], 8, 0) == ""
    assert "stay on the device" in complaints(found["offload_keeps_a_reference"], 8, 0)


@pytest.mark.twin
@pytest.mark.timeout(TIMEOUT_S)
def test_ranks_that_would_wait_for_ever(on_twin: Run, tiny: str) -> None:
    """A sum that one rank leaves out; a rank without rows that takes no part."""
    ulysses = ["actor_rollout_ref.actor.ulysses_sequence_parallel_size=2"]
    pair = {"model": tiny, "ranks": [[[9, 50], [4, 7]]] * 2, "layers": None}
    uneven = {"model": tiny, "ranks": [[[9, 50], [4, 7]], []], "layers": None}
    cases = [planted("", *ulysses, **pair), planted("forgotten_all_reduce", *ulysses, **pair)]
    found = on_twin([*cases, planted("empty_micro_batch_skips", **uneven)])
    assert complaints(found["sound"]) == ""
    assert "ranks 0 and 1, collective" in complaints(found["forgotten_all_reduce"])
    assert "allreduce_" in complaints(found["forgotten_all_reduce"])
    told = complaints(found["empty_micro_batch_skips"])
    assert "ranks 0 and 1, collective" in told or "imed out" in told or "gloo" in told
