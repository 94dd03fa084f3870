"""The likely cause among several ranks' failures."""

from __future__ import annotations

import pytest

from verl_like.cluster.failures import Failure, likely_cause, raise_for
from verl_like.cluster.worker_group import WorkerDied, WorkerError


def _failure(rank: int, kind: str, message: str) -> Failure:
    return Failure(rank=rank, method="update", kind=kind, message=message, traceback="Traceback ...")


ECHO = _failure(0, "RuntimeError", "[gloo/transport/tcp/pair.cc] Connection closed by peer [127.0.0.1]:1234")
ERROR = _failure(1, "ValueError", "bad batch")
DEAD = _failure(2, "died", "killed by SIGKILL")


def test_echo_of_a_lost_partner_is_not_the_cause() -> None:
    assert likely_cause([ECHO, ERROR]) is ERROR
    assert likely_cause([ECHO, DEAD]) is DEAD
    assert likely_cause([ECHO]) is ECHO


def test_dead_process_counts_before_an_exception() -> None:
    assert likely_cause([ERROR, DEAD]) is DEAD


def test_a_stopped_process_is_the_cause_of_echoes() -> None:
    stopped = Failure.of_stopped_process(3, "update", 77)
    assert likely_cause([ECHO, stopped]) is stopped
    with pytest.raises(WorkerError, match=r"rank 3 of 4 was stopped \(process 77: .* during update\(\)") as caught:
        raise_for([ECHO, stopped], world_size=4, logs={3: ""}, tails={3: ""})
    assert caught.value.error_type == "stopped"


def test_death_with_the_nodes_ray_is_told_as_such() -> None:
    lost = DEAD.on_lost_node("10.0.0.9", 55)
    assert likely_cause([ERROR, lost]) is lost
    with pytest.raises(WorkerDied, match=r"rank 2 of 4: its node was lost .* on node 10.0.0.9 \(raylet, process 55\)"):
        raise_for([ECHO, lost], world_size=4, logs={2: ""}, tails={2: ""})


def test_lowest_rank_of_equal_failures() -> None:
    again = _failure(0, "ValueError", "bad batch")
    assert likely_cause([ERROR, again]) is again


def test_error_names_everybody() -> None:
    logs, tails = {0: "/x/0.log", 1: "/x/1.log"}, {0: "zero", 1: "one"}
    with pytest.raises(WorkerError, match=r"rank 1 of 4 failed in update.*ValueError: bad batch") as caught:
        raise_for([ECHO, ERROR], world_size=4, logs=logs, tails=tails)
    assert caught.value.ranks == (1, 0)
    assert "also: worker rank 0 of 4" in str(caught.value)
    assert "/x/1.log" in str(caught.value) and "one" in str(caught.value)


def test_dead_process_has_its_own_type_and_ray_speech_is_cut() -> None:
    long = RuntimeError("The actor is dead because its worker process has died. Worker exit detail: SIGKILL\n  by x")
    away = RuntimeError("The actor 8a is unavailable: The actor is temporarily unavailable: RPC error: Socket closed")
    assert "its machine is gone or out of reach, or" in Failure.of_dead_process(0, "step", away).message
    failure = Failure.of_dead_process(0, "step", long)
    with pytest.raises(WorkerDied, match=r"its process died during step\(\): SIGKILL by x"):
        raise_for([failure], world_size=1, logs={0: ""}, tails={0: ""})
