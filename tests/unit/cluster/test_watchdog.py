"""Whom the watchdog blames, and when it keeps quiet, by what it sees of the ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NoReturn

import pytest

from verl_like.cluster import watchdog
from verl_like.cluster.watchdog import Watchdog, Watched
from verl_like.cluster.worker_group import WorkerStalled
from verl_like.heartbeat import DRIVER

LIMIT = 60.0


class Pool:
    """Ranks as the test says: state, what it is at, its age, whom it waits for, collectives begun."""

    def __init__(
        self, folder: Path, name: str, *ranks: tuple[str, str, float, str, int], called: str = "update"
    ) -> None:
        self.folder, self.name, self.ranks, self.called = folder, name, ranks, called
        self.ended: WorkerStalled | None = None
        self.spare = False

    def watched(self) -> list[Watched]:
        about = {"pool": self.name, "size": len(self.ranks), "node_id": "here", "log_path": str(self.folder / "log")}
        called = [self.called] if self.called else []
        return [Watched(**about, rank=i, pid=1000 + i, called=called) for i in range(len(self.ranks))]

    def end(self, error: WorkerStalled) -> NoReturn:
        self.ended = error
        raise error


def look(monkeypatch: pytest.MonkeyPatch, *pools: Pool, seen_s: float = 1e6) -> None:
    """One look at these pools by a watchdog that has looked for so long."""
    found: list[dict[str, Any]] = []
    for state, what, age, whom, begun in (rank for pool in pools for rank in pool.ranks):
        span = {"in": [what], "age_s": age, "allowed_s": None if whom == DRIVER else LIMIT, "whom": whom}
        group = {"default_pg": {"number": begun, "name": "all_gather"}} if begun else {}
        found.append({"state": state, "spans": [span] if what else [], "collective": group})
    monkeypatch.setattr(watchdog, "_AGAIN_S", 0.0)
    answers = {watchdog._look_here: found, watchdog._stacks_here: ["the stack"] * len(found)}
    monkeypatch.setattr(watchdog, "on_node", lambda node, function, jobs: answers[function])
    dog = Watchdog(LIMIT, "run")
    dog.groups += pools
    now = watchdog.time.monotonic()
    dog._looked, dog._since = now, now - seen_s
    dog.look()


@pytest.mark.parametrize(
    ("ranks", "cause", "why"),
    [
        ([("S", "update", 70, "", 5), ("T", "update", 65, "", 5)], 1, "was stopped"),
        ([("R", "update", 59, "", 6), ("T", "update", 65, "", 5)], 1, "was stopped"),  # though another one works yet
        (
            [("S", "update", 70, "", 5), ("R", "update", 65, "", 4)],
            1,
            "has not come to all_gather number 5 of default_pg",
        ),
        ([("S", "update", 70, "", 5), ("S", "update", 99, "", 5)], 1, "makes no progress"),
        ([("S", "orders", 99, "the replica's first rank", 0), ("S", "engine step", 70, "", 0)], 1, "makes no progress"),
        ([("?", "", 0, "", 0), ("S", "update", 70, "", 0)], 0, "is on a machine that does not answer"),
    ],
)
def test_the_cause_is_named_and_not_who_waits_for_it(
    ranks: list[Any], cause: int, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = Pool(tmp_path, "worker", *ranks)
    with pytest.raises(WorkerStalled, match=f"^worker rank {cause} of 2 {why}") as caught:
        look(monkeypatch, pool)
    assert caught.value.ranks == (cause, 1 - cause) and "the stack" in caught.value.log_tail
    assert "in look" in (tmp_path / "stall.txt").read_text()


def test_the_pool_that_others_wait_for_ends_and_theirs_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Pool(tmp_path, "worker", ("S", "weights", 70, "rollout rank 0", 0), called="weights.send")
    engine = Pool(tmp_path, "rollout", ("T", "load", 70, "", 0), called="weights.receive")
    with pytest.raises(WorkerStalled, match=r"^rollout rank 0 of 1 was stopped.*\n.* waits for worker in weights.send"):
        look(monkeypatch, trainer, engine)
    assert engine.ended is not None and trainer.ended is None


def test_who_waits_for_one_that_works_is_not_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica that was just started has a longer limit than its sender knows."""
    trainer = Pool(tmp_path, "worker", ("S", "weights", 70, "rollout2 rank 0", 0), called="weights.send")
    look(monkeypatch, trainer, Pool(tmp_path, "rollout2", ("R", "load", 59, "", 0), called="weights.receive"))


def test_a_machine_that_misses_a_look_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "_AGAIN_S", 0.0)
    monkeypatch.setattr(watchdog, "on_node", lambda node, function, jobs: "(could not be read)")
    monkeypatch.setattr(watchdog, "stacks_below", lambda pid: {})
    pool, dog = Pool(tmp_path, "worker", ("S", "update", 9, "", 0)), Watchdog(LIMIT, "run")
    dog.groups.append(pool)
    now = [1e6]
    monkeypatch.setattr(watchdog.time, "monotonic", lambda: now[0])
    for _ in range(6):
        dog.look()
        now[0] += dog.interval_s
    now[0] += LIMIT / 6
    with pytest.raises(WorkerStalled, match="is on a machine that does not answer"):
        dog.look()


def test_the_run_goes_on_without_a_spare_pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replica = Pool(tmp_path, "rollout1", ("T", "serving", 70, DRIVER, 0), called="rollout.serve")
    replica.spare = True
    look(monkeypatch, Pool(tmp_path, "rollout", ("S", "serving", 9, DRIVER, 0), called="rollout.serve"), replica)
    assert "was stopped" in str(replica.ended)


@pytest.mark.parametrize(
    "ranks",
    [
        [("S", "update", 59, "", 5), ("R", "update", 59, "", 5)],
        [("S", "update", 70, "", 5), ("R", "update", 59, "", 4)],  # waits for one that is busy with more
        [("S", "serving", 9999, DRIVER, 0), ("S", "serving", 9999, DRIVER, 0)],
        [("T", "update", 59, "", 5), ("S", "update", 59, "", 5)],
    ],
)
def test_nobody_is_blamed_before_the_limit_or_while_another_works(
    ranks: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    look(monkeypatch, Pool(tmp_path, "worker", *ranks))


def test_a_run_that_was_stopped_as_a_whole_has_its_limit_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A suspended job: all ages are large at once, that of the driver's looks too."""
    pool = Pool(tmp_path, "worker", ("S", "update", 999, "", 5))
    look(monkeypatch, pool, seen_s=10)
    with pytest.raises(WorkerStalled):
        look(monkeypatch, pool)


def test_a_rank_whose_other_thread_gets_on_is_not_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One waits for the thread that writes its checkpoint."""
    spans = [
        {"in": ["actor.saved"], "age_s": 900.0, "allowed_s": LIMIT, "whom": ""},
        {"in": ["writing"], "age_s": 5.0, "allowed_s": LIMIT, "whom": ""},
    ]
    found = {"state": "S", "spans": spans, "collective": {}}
    monkeypatch.setattr(watchdog, "on_node", lambda node, function, jobs: [found])
    dog = Watchdog(LIMIT, "run")
    dog.groups.append(Pool(tmp_path, "worker", ("S", "", 0, "", 0)))
    dog._looked, dog._since = watchdog.time.monotonic(), -1e9
    dog.look()
