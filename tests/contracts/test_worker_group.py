"""One suite for both worker groups, and what only processes of their own can show."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.listeners import listening, strangers, with_descendants
from verl_like.batch import Evaluated
from verl_like.cluster import ray_group, watchdog
from verl_like.cluster.launch import RaySession, connect
from verl_like.cluster.local import LocalWorkerGroup
from verl_like.cluster.ray_group import RayWorkerGroup
from verl_like.cluster.resources import Allocation, ResourcesError, allocate
from verl_like.cluster.watchdog import Watchdog
from verl_like.cluster.worker_group import GroupStopped, WorkerDied, WorkerError, WorkerStalled, WorkerTimeout
from verl_like.config.micro_batches import Lowered

TOY = f"{__name__.rpartition('.')[0] + '.' if '.' in __name__ else ''}toy_worker:ToyWorker"
pytestmark = pytest.mark.timeout(120)

Group = RayWorkerGroup | LocalWorkerGroup


@pytest.fixture(scope="module")
def session() -> Iterator[RaySession]:
    # Ray believes in the two GPUs it is told of: enough to see which device numbers ranks are given.
    with connect(num_cpus=6, object_store_memory=200 * 1024**2, extra={"num_gpus": 2}) as ray_session:
        yield ray_session


@pytest.fixture
def start(second_room: Allocation, session: RaySession, tmp_path: Path) -> Iterator[Callable[..., RayWorkerGroup]]:
    """Starts Ray groups of two ranks and stops them after the test."""
    groups: list[RayWorkerGroup] = []

    def make(spec: Any = None, worker: str = TOY, **kwargs: Any) -> RayWorkerGroup:
        group = RayWorkerGroup(
            worker,
            spec,
            allocation=second_room,
            run_id=session.run_id,
            log_dir=tmp_path,
            **{"start_timeout": 60, **kwargs},
        )
        groups.append(group)
        return group

    yield make
    for group in groups:
        group.shutdown()


def test_ranks_have_the_priority_of_their_driver(start: Callable[..., RayWorkerGroup]) -> None:
    """Ray lowers that of its workers: a busy neighbour would leave them next to no time."""
    assert {os.getpriority(os.PRIO_PROCESS, pid) for pid in start().pids} == {os.getpriority(os.PRIO_PROCESS, 0)}


@pytest.fixture(scope="module", params=["local", "ray"])
def group(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Group]:
    """A healthy group, shared by the tests that leave it so."""
    made: Group
    if request.param == "local":
        made = LocalWorkerGroup(TOY, {"x": 1})
    else:
        session, room = request.getfixturevalue("session"), request.getfixturevalue("room")
        logs = tmp_path_factory.mktemp("logs")
        made = RayWorkerGroup(TOY, {"x": 1}, allocation=room, run_id=session.run_id, log_dir=logs)
    yield made
    made.shutdown()


class TestBothGroups:
    def test_ranks_are_numbered_in_order(self, group: Group) -> None:
        facts = group.call_all("describe").wait()
        assert [fact["env"].rank for fact in facts] == list(range(group.world_size))
        assert {fact["env"].world_size for fact in facts} == {group.world_size}
        assert len({fact["pid"] for fact in facts}) == group.world_size

    def test_call_all_gives_every_rank_the_same(self, group: Group) -> None:
        assert group.call_all("add", 10, right=5).wait() == [15 + rank for rank in range(group.world_size)]

    def test_call_gives_every_rank_its_own(self, group: Group) -> None:
        per_rank = [(100 * rank,) for rank in range(group.world_size)]
        assert group.call("add", per_rank, {"right": 2}).wait() == [101 * r + 2 for r in range(group.world_size)]

    def test_results_can_be_collected_late_and_twice(self, group: Group) -> None:
        first, second = group.call_all("add", 1), group.call_all("add", 2)
        assert second.wait()[0] == 3
        assert first.wait()[0] == first.wait()[0] == 2
        assert first.done()

    def test_structs_of_tensors_travel(self, group: Group) -> None:
        sent = Evaluated(response_length_B=torch.tensor([1, 3]), values_T=torch.tensor([1.5, 2, 3, 4]))
        for arrived in group.call_all("double", sent).wait():
            assert arrived.response_length_B.tolist() == [2, 6]
            assert arrived.values_T.tolist() == [1.5, 1.5, 2, 2, 3, 3, 4, 4]

    def test_wrong_number_of_arguments_is_told(self, group: Group) -> None:
        with pytest.raises(ValueError, match=f"for 5 ranks, but the group has {group.world_size}"):
            group.call("add", [(1,)] * 5)

    def test_variables_are_set_before_the_worker_is_imported(self, group: Group) -> None:
        for rank, fact in enumerate(group.call_all("describe").wait()):
            variables = fact["variables"]
            assert variables["RANK"] == str(rank)
            assert variables["WORLD_SIZE"] == str(group.world_size)
            assert variables["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
            assert variables["CUDA_VISIBLE_DEVICES"] == ""
            assert int(variables["MASTER_PORT"]) == fact["env"].master_port
            if isinstance(group, RayWorkerGroup):
                assert fact["rank_at_import"] == str(rank)
                assert not fact["torch_at_import"]  # or its threads would be counted before the environment is set
                assert fact["threads_at_import"] == variables["OMP_NUM_THREADS"]


@pytest.fixture(params=["local", "ray"])
def fresh(request: pytest.FixtureRequest) -> Iterator[Callable[..., Group]]:
    """Makes groups that a test may break."""
    if request.param == "ray":
        yield request.getfixturevalue("start")
        return
    made: list[LocalWorkerGroup] = []

    def make(spec: Any = None, worker: str = TOY) -> LocalWorkerGroup:
        made.append(LocalWorkerGroup(worker, spec))
        return made[-1]

    yield make
    for each in made:
        each.shutdown()


class TestFailuresInBothGroups:
    def test_error_is_told_and_stops_the_group(self, fresh: Callable[..., Group]) -> None:
        broken = fresh()
        pending = broken.call_all("boom")
        with pytest.raises(WorkerError, match=r"rank 0 of \d failed in boom\(\): KeyError: 'missing thing'") as caught:
            pending.wait()
        assert (caught.value.rank, caught.value.method, caught.value.error_type) == (0, "boom", "KeyError")
        assert "def boom" in caught.value.remote_traceback or "in boom" in caught.value.remote_traceback
        with pytest.raises(GroupStopped, match="stopped: worker rank 0"):
            broken.call_all("add", 1).wait()

    def test_what_a_new_start_must_lower_comes_with_the_error(self, fresh: Callable[..., Group]) -> None:
        with pytest.raises(WorkerError, match=r"run_out\(\): PassTooLarge: too much") as caught:
            fresh().call_all("run_out").wait()
        assert caught.value.lowered == Lowered(role="actor", most={"update": 50}, apart=frozenset({"update"}), count=1)

    def test_constructor_error_is_the_workers_own(self, fresh: Callable[..., Group]) -> None:
        with pytest.raises(WorkerError, match=r"failed in start\(\): RuntimeError: no weights in /nowhere"):
            fresh({"fail": 0})

    def test_import_error_is_the_workers_own(self, fresh: Callable[..., Group]) -> None:
        with pytest.raises(WorkerError, match="No module named 'no_such_package'"):
            fresh(worker="no_such_package.workers:Worker")
        with pytest.raises(WorkerError, match="has no 'NoSuchClass'"):
            fresh(worker=TOY.replace("ToyWorker", "NoSuchClass"))

    def test_shutdown_closes_the_worker_and_shared_memory(self, fresh: Callable[..., Group], tmp_path: Path) -> None:
        closing = fresh({"marker": str(tmp_path / "marker")})
        entries = closing.call_all("touch_shm").wait()
        assert all(map(os.path.exists, entries))
        closing.shutdown()
        closing.shutdown()
        assert (tmp_path / "marker.0").read_text() == "closed"
        assert not any(map(os.path.exists, entries))
        with pytest.raises(GroupStopped, match=r"shutdown\(\) was called"):
            closing.call_all("add", 1)


class TestProcesses:
    def test_nothing_of_a_run_on_one_machine_listens_to_the_network(self, start: Callable[..., RayWorkerGroup]) -> None:
        start()
        assert listening(with_descendants(os.getpid())) and strangers(os.getpid()) == set()

    def test_collective_then_error_while_the_other_waits(self, start: Callable[..., RayWorkerGroup]) -> None:
        group = start({"collective": True})
        assert group.call("all_reduce", [(1.0,), (2.0,)]).wait(30) == [3.0, 3.0]
        pids, began = group.pids, time.monotonic()
        with pytest.raises(WorkerError, match=r"rank 1 of 2 failed in fail_then_reduce.*the true cause"):
            group.call_all("fail_then_reduce", 1, "raise").wait(60)
        assert time.monotonic() - began < 20
        assert not any(map(_alive, pids))

    def test_kill_9_is_named_and_not_its_echo(self, start: Callable[..., RayWorkerGroup]) -> None:
        group = start({"collective": True})
        pids, began = group.pids, time.monotonic()
        with pytest.raises(WorkerDied, match="rank 0 of 2: its process died") as caught:
            group.call_all("fail_then_reduce", 0, "kill").wait(60)
        assert time.monotonic() - began < 20
        assert caught.value.rank == 0
        assert caught.value.log_path.endswith("worker_rank0.log")
        assert not any(map(_alive, pids))

    def test_death_at_start_shows_the_last_output(self, start: Callable[..., RayWorkerGroup]) -> None:
        with pytest.raises(WorkerDied, match="native code says goodbye") as caught:
            start({"exit": 1})
        assert caught.value.rank == 1

    def test_one_rank_hanging_at_start_is_named(self, start: Callable[..., RayWorkerGroup]) -> None:
        with pytest.raises(WorkerTimeout, match=r"worker_start_timeout\) by worker rank\(s\) 1 of 2") as caught:
            start({"hang": 1}, start_timeout=6)
        assert "in __init__" in caught.value.log_tail  # the stack of the hanging rank

    def test_a_stopped_rank_is_named_and_not_those_that_wait_for_it(
        self, start: Callable[..., RayWorkerGroup], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(ray_group, "_LOOK_SECONDS", 0.5)
        group = start({"collective": True})
        os.kill(group.pids[1], signal.SIGSTOP)
        with pytest.raises(
            WorkerTimeout, match=r"by worker rank\(s\) 0, 1 of 2; rank 1 was stopped \(process \d+"
        ) as caught:
            group.call_all("all_reduce", 1.0).wait(3)
        assert (caught.value.rank, caught.value.ranks) == (1, (1, 0))
        assert len(re.findall(r"rank 1 was stopped \(process .*; all_reduce\(\) waits for it", caplog.text)) == 1

    @pytest.mark.parametrize("how", ["stopped", "elsewhere"])
    def test_the_watchdog_names_the_rank_that_the_others_wait_for(
        self,
        start: Callable[..., RayWorkerGroup],
        session: RaySession,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        how: str,
    ) -> None:
        monkeypatch.setattr(watchdog, "_AGAIN_S", 3.0)
        group = start({"collective": True}, watchdog=Watchdog(1.0, session.run_id))
        group.call_all("all_reduce", 1.0).wait()
        if how == "stopped":
            os.kill(group.pids[1], signal.SIGSTOP)
            pending, reason = group.call_all("all_reduce", 1.0), r"was stopped \(process \d+"
        else:  # it computes, and never comes to where the others are
            pending, reason = group.call_all("reduce_or_spin", 1), "has not come to all_reduce number 2 of default_pg"
        began = time.monotonic()
        with pytest.raises(WorkerStalled, match=f"^worker rank 1 of 2 {reason}") as caught:
            pending.wait(60)
        assert caught.value.ranks == (1, 0) and time.monotonic() - began < 20
        method, text = pending.method, str(caught.value)
        assert re.search(rf"\n  worker rank 0 .*: {method} for \d+ s of \d+ s", text)
        if how == "elsewhere":
            assert re.search(r"\n  worker rank 0 .*; last collective: all_reduce number 2 of default_pg", text)
        told = (tmp_path / "stall.txt").read_text()
        for part in ("--- worker rank 0 ---", f"in {method}", "--- worker rank 1 ---", "--- the driver ---", "in look"):
            assert part in told

    @pytest.mark.engines
    def test_slow_ranks_that_get_on_are_left_alone(
        self, start: Callable[..., RayWorkerGroup], session: RaySession
    ) -> None:
        """In parts that each keep a limit that all of them do not, beside four busy processes for each core."""
        group = start(watchdog=Watchdog(1.0, session.run_id))
        others = [
            subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(4 * (os.cpu_count() or 1))
        ]
        try:
            assert group.call_all("advance", 20, 0.3).wait(60) == [20, 20]
        finally:
            for each in others:
                each.kill()
                each.wait()

    @pytest.mark.slow
    def test_a_stopped_rank_is_named_when_the_others_give_up_first(self, start: Callable[..., RayWorkerGroup]) -> None:
        group = start({"collective": True, "timeout_s": 2})
        os.kill(group.pids[0], signal.SIGSTOP)
        with pytest.raises(WorkerError, match=r"^worker rank 0 of 2 was stopped .*\n  also: worker rank 1") as caught:
            group.call_all("all_reduce", 1.0).wait(60)
        assert caught.value.rank == 0

    def test_failure_of_an_earlier_call_is_seen_by_a_later_wait(self, start: Callable[..., RayWorkerGroup]) -> None:
        group = start({"collective": True})
        group.call_all("fail_then_reduce", 0, "raise")
        with pytest.raises(WorkerError, match="rank 0 of 2 failed in fail_then_reduce"):
            group.call_all("add", 1).wait(60)

    def test_result_that_cannot_travel_is_an_error(self, start: Callable[..., RayWorkerGroup]) -> None:
        group = start()
        with pytest.raises(WorkerError, match=r"failed in unpicklable\(\)|failed in all_reduce"):
            group.call("unpicklable", [(), ()]).wait(30)
            group.call_all("all_reduce", 1.0).wait(30)

    def test_chatter_goes_to_files_and_warnings_to_the_user(
        self, start: Callable[..., RayWorkerGroup], capfd: pytest.CaptureFixture[str]
    ) -> None:
        group = start(name="policy")
        group.call_all("chatter").wait(30)
        time.sleep(1.5)  # Ray tails the workers' stderr
        shown = "".join(capfd.readouterr())
        log = Path(group.log_paths[1]).read_text()
        assert group.log_paths[1].endswith("policy_rank1.log")
        for text in ("chatter on stdout", "chatter of a child", "library chatter"):
            assert text in log
            assert text not in shown
        assert "a warning for the user" in shown

    def test_gpu_ranks_see_all_gpus_of_their_node(self, session: RaySession, tmp_path: Path) -> None:
        allocation = allocate(1, 2, device="cuda", timeout=30)
        group = RayWorkerGroup(TOY, {}, allocation=allocation, run_id=session.run_id, log_dir=tmp_path)
        try:
            facts = group.call_all("describe").wait(30)
            assert [fact["variables"]["CUDA_VISIBLE_DEVICES"] for fact in facts] == ["0,1", "0,1"]
            assert [fact["variables"]["LOCAL_RANK"] for fact in facts] == ["0", "1"]
            assert {fact["env"].device for fact in facts} == {"cuda"}
        finally:
            group.shutdown()
            allocation.release()

    def test_too_few_resources_say_what_is_asked_and_there(self, session: RaySession) -> None:
        with pytest.raises(ResourcesError, match=r"trainer.nnodes=3 .*need 3 different node.*cluster has 1 node"):
            allocate(3, 1, may_grow=False)
        began = time.monotonic()
        with pytest.raises(ResourcesError, match=r"n_gpus_per_node=8 .*GPU 8 each.*register_center_timeout|after wait"):
            allocate(1, 8, device="cuda", timeout=3)
        assert time.monotonic() - began < 20


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
