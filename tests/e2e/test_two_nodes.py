"""A cluster of two Ray nodes on one machine, joined by address: placement, collectives, failures across nodes."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from ray.cluster_utils import Cluster
from support import main_ppo, metrics_of, overrides, write_task

from verl_like.cluster.launch import RaySession, connect
from verl_like.cluster.ray_group import RayWorkerGroup
from verl_like.cluster.resources import ResourcesError, allocate
from verl_like.cluster.worker_group import WorkerDied

pytestmark = [pytest.mark.timeout(180), pytest.mark.engines]

WORKER = "tests.contracts.toy_worker:ToyWorker"


@pytest.fixture(scope="module")
def session() -> Iterator[RaySession]:
    if ray.is_initialized():
        pytest.skip("a Ray is already connected in this process")
    folder = Path(tempfile.mkdtemp(dir="/tmp"))  # short, for Ray's sockets
    (folder / "ray").mkdir()
    node = {"num_cpus": 1, "object_store_memory": 100 * 1024**2, "include_dashboard": False}
    with pytest.MonkeyPatch.context() as environment:
        # Cluster writes its address into Ray's folder below this one: it need not exist from an earlier Ray, and
        # nobody else's ray.init() follows an address that stands here.
        environment.setenv("RAY_TMPDIR", str(folder))
        cluster = Cluster(initialize_head=True, head_node_args=node)
        try:
            cluster.add_node(num_cpus=1, object_store_memory=100 * 1024**2)
            cluster.wait_for_nodes(60)
            with connect(address=cluster.address) as joined:
                yield joined
        finally:
            cluster.shutdown()
            shutil.rmtree(folder, ignore_errors=True)


def test_the_address_is_written_where_no_other_ray_looks(session: RaySession) -> None:
    """Ray's test cluster writes its address for every `ray.init()` of this machine to find."""
    from ray._common.utils import get_ray_address_file

    address_file = Path(get_ray_address_file(None))
    assert address_file.read_text().strip() == session.address
    assert address_file.parent.parent == Path(os.environ["RAY_TMPDIR"])


def test_one_rank_on_each_node(session: RaySession, tmp_path: Path) -> None:
    assert not session.owned
    allocation = allocate(2, 1, timeout=60)
    assert len({node.node_id for node in allocation.nodes}) == 2
    group = RayWorkerGroup(WORKER, {}, allocation=allocation, run_id=session.run_id, log_dir=tmp_path)
    try:
        envs = [fact["env"] for fact in group.call_all("describe").wait(60)]
        assert [(e.rank, e.node_rank, e.local_rank, e.local_world_size) for e in envs] == [(0, 0, 0, 1), (1, 1, 0, 1)]
        assert envs[0].master_address == allocation.nodes[0].address  # not loopback: other machines must reach it
        group.call_all("init_collective").wait(60)
        assert group.call("all_reduce", [(1.0,), (2.0,)]).wait(60) == [3.0, 3.0]
        with pytest.raises(WorkerDied, match="last words") as caught:
            group.call_all("fail_then_reduce", 1, "kill").wait(60)
        assert caught.value.rank == 1
    finally:
        group.shutdown()
        allocation.release()


def test_two_ranks_per_node_are_refused_with_numbers(session: RaySession) -> None:
    with pytest.raises(ResourcesError, match=r"after waiting 3 s .*2 different node\(s\) with CPU 2 each.*2 node\(s\)"):
        allocate(2, 2, timeout=3)


def test_same_order_of_nodes_every_time(session: RaySession) -> None:
    orders = []
    for _ in range(2):
        allocation = allocate(2, 1, timeout=60)
        orders.append([node.node_id for node in allocation.nodes])
        allocation.release()
    assert orders[0] == orders[1]


def test_the_main_job_on_both_nodes(session: RaySession, tmp_path: Path, tiny_model: Path) -> None:
    """One rank on each node trains and generates; the driver joins the running cluster by its address."""
    settings = {
        "trainer.launcher": "ray",
        "trainer.nnodes": 2,
        "trainer.n_gpus_per_node": 1,
        "ray_init.address": session.address,
        "trainer.total_training_steps": 2,
    }
    result = main_ppo(overrides(write_task(tmp_path), tiny_model, tmp_path / "out", **settings))
    assert result.returncode == 0, result.stdout
    records = metrics_of(tmp_path / "out")
    assert len(records) == 2 and all(record["actor/grad_norm"] > 0 for record in records)
    assert "2 process(es)" in result.stdout


def test_a_machine_that_is_missing_ends_the_run_with_a_message(
    session: RaySession, tmp_path: Path, tiny_model: Path
) -> None:
    """As after a restart for which no other machine has joined."""
    settings = {
        "trainer.launcher": "ray",
        "trainer.nnodes": 3,
        "trainer.n_gpus_per_node": 1,
        "trainer.ray_wait_register_center_timeout": 1,
        "ray_init.address": session.address,
    }
    result = main_ppo(overrides(write_task(tmp_path), tiny_model, tmp_path / "out", **settings))
    assert result.returncode == 1 and "Traceback" not in result.stdout
    assert "error: not enough resources after waiting 1 s" in result.stdout


def test_rollout_on_another_node_than_training(session: RaySession, tmp_path: Path, tiny_model: Path) -> None:
    """Each node has room for one process: the weights go from the first to the second, requests and answers too."""
    settings = {
        "trainer.launcher": "ray",
        "trainer.n_gpus_per_node": 1,
        "actor_rollout_ref.hybrid_engine": False,
        "actor_rollout_ref.rollout.nnodes": 1,
        "actor_rollout_ref.rollout.n_gpus_per_node": 1,
        "ray_init.address": session.address,
        "trainer.total_training_steps": 2,
    }
    result = main_ppo(overrides(write_task(tmp_path), tiny_model, tmp_path / "out", **settings))
    assert result.returncode == 0, result.stdout
    records = metrics_of(tmp_path / "out")
    assert len(records) == 2 and all(record["actor/grad_norm"] > 0 for record in records)
