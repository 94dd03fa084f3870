"""A worker that serves an engine with fake time, for the tests of `RolloutGroup.sample`; spec: {"ranks_each": n}."""

from __future__ import annotations

import os
import signal
from typing import Any

import torch.distributed as dist

from verl_like.cluster.worker_group import RankEnv
from verl_like.kit.bench.fake_time import FakeTimeEngine, FakeTimeRollout
from verl_like.rollout.link import LinkServer
from verl_like.rollout.orders import lockstep_of


class ToyReplica:
    """As `workers.rollout.RolloutRole` serves, without a model."""

    def __init__(self, spec: dict[str, Any] | None, env: RankEnv) -> None:
        size = (spec or {}).get("ranks_each", 1)
        self.env, self.leads = env, env.rank % size == 0
        self.link: LinkServer | None = None
        if size > 1:
            dist.init_process_group("gloo")
        lockstep = lockstep_of(env.rank, env.world_size, size) if size > 1 else None
        self.fake = FakeTimeEngine(length_of=lambda request: 10**9, max_model_len=10**8)
        self.rollout = FakeTimeRollout(self.fake, lockstep=lockstep)

    def open_link(self) -> tuple[tuple[str, int], bytes] | None:
        if self.link is not None:
            self.link.close()
        if not self.leads:
            return None
        self.link = LinkServer(self.rollout, "127.0.0.1")
        return self.link.address, self.link.authkey

    def serve(self, num_orders: int) -> None:
        if self.link is not None:
            self.link.serve(num_orders)
        else:
            with self.rollout.opened():
                pass

    def run(self, role: str, method: str, *arguments: Any) -> Any:
        assert role == "rollout"
        return getattr(self, method)(*arguments)

    def facts(self) -> dict[str, Any]:
        return {
            "pid": os.getpid(),
            "paused": self.rollout.paused,
            "pending": len(self.rollout._loop._futures),
            "steps": self.fake.num_steps,
            "sampled": self.fake.num_sampled,
            "most_running": self.fake.most_running,
        }

    def break_step(self, rank: int) -> None:
        """Raised by the next step of this rank."""
        if rank == self.env.rank:
            self.fake.failure = KeyError("broken step")

    def die_at_step(self, rank: int) -> None:
        """The process of this rank is killed by its next step."""
        if rank == self.env.rank:
            self.fake.step = lambda: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]

    def load(self) -> None:
        self.rollout.load_weights([], 1)

    def shutdown(self) -> None:
        if self.link is not None:
            self.link.close()
        self.rollout.shutdown()
