"""A whole step on fake devices: every configuration runs, and waits for the device as often as it must.

The whole matrix runs in `make twin`; one configuration at 64 ranks, and one comparison of ranks, in `make test`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from tests.twin.cases import CASES, TWO_MICRO_BATCHES, case
from tests.twin.conftest import Outcomes
from tests.twin.inner import TIMEOUT_S

Run = Callable[[list[dict[str, Any]]], Outcomes]
PASSES = {"old_log_prob": 2, "ref": 1, "values": 1, "reward": 1}  # phase: columns that are copied to the host
# Waits of an update of one mini-batch: a micro-batch's metrics, and the gradient norm that decides about the step.
PER_MICRO_BATCH, PER_STEP = (
    Counter(["copy algorithms/objectives.py as_metrics"]),
    Counter(["read engine/fsdp.py FSDPEngine._step"]),
)
SPREAD = Counter({"copy parallel/experts.py _exchanged_counts": 2})  # of a pass of two layers: how many tokens come
MOVES = ("parallel/fsdp.py", "parallel/sharding.py", "parallel/activation_offload.py")  # what is parked, and comes back


def unnumbered(where: str) -> str:
    """A place without its line, and without the comprehension, which from Python 3.12 on is no function of its own."""
    return re.sub(r":\d+|\.<locals>\.<\w+comp>", "", where)


def waits(phase: dict[str, Any]) -> Counter[str]:
    """How often each place waited, by kind, file and function."""
    found: Counter[str] = Counter()
    for where, count in phase["waits"].items():
        found[unnumbered(where)] += count
    return found


def over_budget(outcome: dict[str, Any], micro_batches: int = 1) -> dict[str, list[str]]:
    """Waits beyond those that a phase may have, with their lines."""
    wrong = {}
    for name, phase in outcome["phases"].items():
        if name.startswith("update_") and name != "update_weights":
            allowed = PER_STEP + Counter(dict.fromkeys(PER_MICRO_BATCH, micro_batches))
            allowed["copy engine/expert_load.py ExpertLoad.counted"] = 1
            allowed += Counter({key: 2 * micro_batches * count for key, count in SPREAD.items()})  # computed again too
        elif name in PASSES:
            allowed = Counter({"copy engine/fsdp.py FSDPEngine.forward": PASSES[name]}) + SPREAD
        else:
            continue
        beyond = {key for key, count in waits(phase).items() if count > allowed[key] and key.split()[1] not in MOVES}
        lines = [f"{n} x {at}" for at, n in phase["waits"].items() if unnumbered(at) in beyond]
        wrong |= {name: lines} if lines else {}
    return wrong


def test_64_ranks_and_the_budget_of_waits(on_twin: Run) -> None:
    """The same number of waits with two micro-batches, but for one a micro-batch."""
    (outcome,) = on_twin([case("64", "Qwen__Qwen2.5-1.5B-Instruct", *TWO_MICRO_BATCHES, world=64)]).values()
    assert "error" not in outcome, outcome["error"]
    assert over_budget(outcome, 2) == {}
    update = outcome["phases"]["update_actor"]
    assert update["copied"]["to host"] < 1000  # [bytes] numbers, no columns
    shard = 1536 * 151_936 // 64 * 4  # of the embedding; weights, gradient and two states are float32
    assert 4 * shard < outcome["kept"]["update_actor"] < update["peak"]


def test_ranks_issue_the_same_collectives(on_twin: Run, tiny: str) -> None:
    """With unequal rows, other numbers of micro-batches, and a rank without rows."""
    ranks = [[[4, 30]] * 6, [], [[9, 200], [3, 2]]]
    keys = ("actor_rollout_ref.actor.ppo_max_token_len_per_gpu=256",)
    given = case("apart", "-", *keys, ranks=ranks, layers=None)
    (outcome,) = on_twin([given | {"model": tiny}]).values()
    assert "error" not in outcome, outcome["error"]
    assert outcome["differs"] == []
    assert len(outcome["phases"]["update_actor"]["collectives"]) > 10


@pytest.mark.twin
@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.parametrize("number", range(0, len(CASES), 6))
def test_every_configuration_runs(on_twin: Run, number: int) -> None:
    """Whole steps: built and sharded, passes, update, sleep, weights into buckets."""
    cases = CASES[number : number + 6]
    outcomes = on_twin(cases)
    problems = {name: each["error"] for name, each in outcomes.items() if "error" in each}
    for name, each in outcomes.items():
        problems |= {f"{name}: waits": found for found in [over_budget(each, 4)] if found}
    assert problems == {}
    assert outcomes.keys() == {each["name"] for each in cases}
