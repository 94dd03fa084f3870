"""For test_driver_ends.py: a Ray of our own whose daemon is killed is left, and the driver starts another one."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from tests.unit.cluster.driver_script import WORKER
from verl_like.cluster.launch import RaySession, connect
from verl_like.cluster.ray_group import RayWorkerGroup
from verl_like.cluster.resources import Allocation, allocate
from verl_like.cluster.worker_group import WorkerDied


def started(session: RaySession, log_dir: str) -> tuple[Allocation, RayWorkerGroup]:
    allocation = allocate(1, 1, may_grow=False, timeout=60)
    return allocation, RayWorkerGroup(WORKER, {}, allocation=allocation, run_id=session.run_id, log_dir=log_dir)


def main(log_dir: str) -> None:
    ray = {"num_cpus": 1, "object_store_memory": 100 * 1024**2}
    with connect(**ray) as session:
        allocation, group = started(session, log_dir)
        print("lost:", session.lost, flush=True)
        raylet = Path(f"/proc/{group.pids[0]}/stat").read_text().rsplit(")", 1)[1].split()[1]
        under_way = group.call_all("sleep", 60)  # who asks a dead daemon for something is ended by Ray
        os.kill(int(raylet), signal.SIGKILL)
        try:
            under_way.wait(60)
        except WorkerDied:
            print("lost:", session.lost, flush=True)
        allocation.release()
    with connect(run_id=session.run_id, **ray) as session:
        _, group = started(session, log_dir)
        print("again:", group.call_all("add", 1).wait(60), flush=True)
        group.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
