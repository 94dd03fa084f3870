"""A small driver for test_driver_ends.py: starts two ranks, tells their ids, loops until it is asked to stop."""

from __future__ import annotations

import sys

from verl_like.cluster.launch import connect
from verl_like.cluster.lifecycle import graceful_interrupt
from verl_like.cluster.ray_group import RayWorkerGroup
from verl_like.cluster.resources import allocate

WORKER = "tests.contracts.toy_worker:ToyWorker"


def main(log_dir: str) -> None:
    with connect(num_cpus=2, object_store_memory=100 * 1024**2) as session, graceful_interrupt() as flag:
        allocation = allocate(1, 2, may_grow=False, timeout=30)
        group = RayWorkerGroup(WORKER, {}, allocation=allocation, run_id=session.run_id, log_dir=log_dir)
        try:
            names = group.call_all("leave_shared_memory").wait(30)
            assert all(session.run_id in name for name in names)
            print("run", session.run_id, *group.pids, flush=True)
            while not flag.requested:
                group.call_all("sleep", 0.5).wait(30)  # a signal in here must not end the call
            print("saved:", group.call_all("add", 1).wait(30), flush=True)
        finally:
            group.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
