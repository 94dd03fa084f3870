"""Replicas as groups of their own: calls, losses, replacements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from verl_like.cluster.worker_group import WorkerDied, WorkerError
from verl_like.trainer.replica_group import Fleet, Replica, ReplicaLost


class Pending:
    def __init__(self, group: Group, values: list[Any]) -> None:
        self.group, self.values = group, values

    def done(self) -> bool:
        return self.group.dead or not self.group.busy

    def wait(self, timeout: float | None = None) -> list[Any]:
        if self.group.dead:
            raise WorkerDied(f"replica {self.group.number}: its process died", rank=0, method="any")
        return self.values


class Group:
    """Two ranks that answer with their arguments."""

    world_size = 2

    def __init__(self, number: int, *, built: bool = True, broken: bool = False) -> None:
        self.number, self.built, self.broken = number, built, broken
        self.dead = self.closed = self.busy = False

    def call(
        self, method: str, per_rank: Sequence[tuple[Any, ...]], kwargs: Mapping[str, Any] | None = None
    ) -> Pending:
        return Pending(self, [(self.number, *arguments) for arguments in per_rank])

    def call_all(self, method: str, *args: Any, **kwargs: Any) -> Pending:
        return self.call(method, [args] * self.world_size, kwargs)

    def started(self) -> bool:
        return self.built

    def wait_started(self) -> None:
        if self.broken:
            raise WorkerError("no memory", rank=0, method="start")

    def shutdown(self) -> None: ...

    def close(self) -> None:
        self.closed = True


def fleet(size: int = 2, **later: Any) -> tuple[Fleet, list[Group]]:
    """Replicas, and every group that was ever started; `later`: of those that come after the first."""
    groups: list[Group] = []

    def start(number: int) -> Replica:
        group = Group(number, **(later if number >= size else {}))
        groups.append(group)
        return Replica(number, group, group.close)  # type: ignore[arg-type]

    return Fleet(start, size), groups


def test_arguments_and_results_are_those_of_all_ranks_in_order() -> None:
    made, _ = fleet()
    made.wait_started()
    assert made.world_size == 4
    assert made.call("m", [("a",), ("b",), ("c",), ("d",)]).wait() == [(0, "a"), (0, "b"), (1, "c"), (1, "d")]
    assert made.call_all("m", 7).wait() == [(0, 7), (0, 7), (1, 7), (1, 7)]


def test_a_replica_that_dies_is_left_out_and_its_devices_are_given_back() -> None:
    made, groups = fleet()
    groups[0].dead = True
    with pytest.raises(ReplicaLost, match="replica 0: its process died"):
        made.call_all("m").wait()
    assert groups[0].closed and not groups[1].closed and made.num_lost == 1
    assert made.call_all("m", 1).wait() == [(1, 1), (1, 1)]


def test_the_last_ones_error_is_the_fleets() -> None:
    made, groups = fleet(1)
    groups[0].dead = True
    with pytest.raises(WorkerDied, match="replica 0"):
        made.call_all("m").wait()


def test_a_long_call_tells_of_replicas_that_ended_it() -> None:
    made, groups = fleet()
    groups[0].busy = groups[1].busy = True
    serving = made.call_all("serve")
    serving.look()
    assert made.num_lost == 0 and not serving.done()
    groups[1].dead = True
    serving.look()
    assert made.num_lost == 1 and made.world_size == 2


def test_another_one_joins_when_it_is_built() -> None:
    made, groups = fleet(built=False)
    groups[1].dead = True
    with pytest.raises(ReplicaLost):
        made.call_all("m").wait()
    made.refill()
    made.refill()  # one was enough
    assert len(groups) == 3 and made.newcomers() == [] and made.world_size == 2
    groups[2].built = True
    assert [replica.number for replica in made.newcomers()] == [2] and made.world_size == 4
    assert made.call_all("m").wait() == [(0,), (0,), (2,), (2,)]


def test_replacements_that_do_not_start_are_tried_ever_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    made, groups = fleet(broken=True)
    now = [1000.0]
    monkeypatch.setattr("verl_like.trainer.replica_group.time.monotonic", lambda: now[0])
    groups[1].dead = True
    with pytest.raises(ReplicaLost):
        made.call_all("m").wait()
    tried = []
    for _ in range(400):
        now[0] += 1
        before = len(groups)
        made.refill()
        assert made.newcomers() == []
        tried += [now[0] - 1000] * (len(groups) - before)
    assert tried == [1, 31, 91, 211] and all(group.closed for group in groups[1:]) and made.world_size == 2


def test_the_end_stops_also_what_is_still_being_built() -> None:
    made, groups = fleet(built=False)
    groups[0].dead = True
    with pytest.raises(ReplicaLost):
        made.call_all("m").wait()
    made.refill()
    made.shutdown()
    assert all(group.closed for group in groups)
