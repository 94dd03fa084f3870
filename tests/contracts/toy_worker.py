"""Small workers for the cluster tests; imported inside worker processes by import path."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from datetime import timedelta
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

from verl_like.cluster.worker_group import RankEnv
from verl_like.config.micro_batches import Lowered, PassTooLarge
from verl_like.heartbeat import advance, span

THREADS_AT_IMPORT = os.environ.get("OMP_NUM_THREADS")
RANK_AT_IMPORT = os.environ.get("RANK")
TORCH_AT_IMPORT = "torch" in sys.modules


class ToyWorker:
    """Calls that the contract suite needs. spec: {"fail": rank, "exit": rank, "hang": rank, "marker": path}."""

    def __init__(self, spec: dict[str, Any] | None, rank_env: RankEnv) -> None:
        self.spec = spec or {}
        self.env = rank_env
        if self.spec.get("fail") == rank_env.rank:
            raise RuntimeError("no weights in /nowhere")
        if self.spec.get("exit") == rank_env.rank:
            sys.stderr.write("native code says goodbye\n")
            sys.stderr.flush()
            os._exit(3)
        if self.spec.get("hang") == rank_env.rank:
            time.sleep(3600)
        if self.spec.get("collective"):
            self.init_collective()

    def init_collective(self) -> None:
        import torch.distributed as dist  # here: most tests need no torch, and importing it takes seconds

        dist.init_process_group("gloo", timeout=timedelta(seconds=self.spec.get("timeout_s", 600)))

    def describe(self) -> dict[str, Any]:
        return {
            "env": self.env,
            "pid": os.getpid(),
            "variables": dict(os.environ),
            "threads_at_import": THREADS_AT_IMPORT,
            "rank_at_import": RANK_AT_IMPORT,
            "torch_at_import": TORCH_AT_IMPORT,
        }

    def add(self, left: Any, right: Any = 1) -> Any:
        return left + right + self.env.rank

    def double(self, batch: Any) -> Any:
        values_T = batch.values_T.repeat_interleave(2)
        return batch.replace(response_length_B=batch.response_length_B * 2, values_T=values_T)

    def run_out(self) -> None:
        raise PassTooLarge("too much", Lowered(role="actor", most={"update": 50}, apart=frozenset({"update"}), count=1))

    def boom(self) -> None:
        raise KeyError("missing thing")

    def unpicklable(self) -> Any:
        return lambda: (yield)

    def all_reduce(self, value: float) -> float:
        import torch
        import torch.distributed as dist

        tensor = torch.tensor([value])
        dist.all_reduce(tensor)
        return float(tensor)

    def reduce_or_spin(self, spinning_rank: int) -> float:
        while self.env.rank == spinning_rank:
            pass
        return self.all_reduce(1.0)

    def advance(self, count: int, seconds: float) -> int:
        """In parts that are short, and longer than the watchdog's limit together."""
        with span("parts"):
            for _ in range(count):
                time.sleep(seconds)
                advance()
        return count

    def fail_then_reduce(self, failing_rank: int, how: str) -> float:
        """One rank fails while the others wait for it in a collective."""
        if self.env.rank == failing_rank:
            if how == "kill":
                sys.stdout.write("last words\n")
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("the true cause")
        return self.all_reduce(1.0)

    def sleep(self, seconds: float) -> float:
        time.sleep(seconds)
        return seconds

    def chatter(self) -> None:
        print("chatter on stdout")
        os.system("echo chatter of a child")
        logging.getLogger("some.library").warning("library chatter")
        logging.getLogger("verl_like.toy").warning("a warning for the user")

    def touch_shm(self) -> str:
        path = Path("/dev/shm") / f"toy_{self.env.memory_id}_{self.env.rank}"
        path.write_text("x")
        return str(path)

    def leave_shared_memory(self) -> str:
        """As vLLM's message queues do; nobody tracks it, as if the tracker was killed too."""
        memory = SharedMemory(create=True, size=16)
        resource_tracker.unregister(f"/{memory.name}", "shared_memory")
        return memory.name

    def shutdown(self) -> None:
        if "marker" in self.spec:
            Path(self.spec["marker"]).with_suffix(f".{self.env.rank}").write_text("closed")
