"""Role of a reward model that writes text: an engine's own HTTP server beside the process, on its devices.

The first rank of every tensor_model_parallel_size neighbours has one. It takes no part in calls between ranks: whoever
grades asks it over HTTP, also while this process samples or trains.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from verl_like.cluster.environment import free_port
from verl_like.cluster.worker_group import RankEnv
from verl_like.heartbeat import span
from verl_like.rollout.servers import server_command, server_environment
from verl_like.services.server import Server
from verl_like.workers.spec import WorkerSpec

_IMPORTED = time.monotonic()  # the group counts since about then, and is not to give up first: it knows no log
ServerPlace = tuple[str, str]  # host:port, and what to call it in messages


class RewardServer:
    """Server of one rank. Raises ServerError, ValueError where it does not start."""

    def __init__(self, spec: WorkerSpec, env: RankEnv) -> None:
        reward = spec.config.reward_model
        rollout, tp = reward.rollout, reward.rollout.tensor_model_parallel_size
        if env.local_world_size % tp:
            raise ValueError(
                f"reward_model.rollout.tensor_model_parallel_size={tp} does not divide the {env.local_world_size} "
                "processes of the reward model's pool on each machine"
            )
        self.place: ServerPlace | None = None
        self._server: Server | None = None
        if env.local_rank % tp:
            return
        port = free_port(env.address)
        network = reward.model
        command = server_command(
            rollout,
            network.path or "",
            host=env.address,
            port=port,
            device=env.device,
            trust_remote_code=network.trust_remote_code,
        )
        address, log = f"{env.address}:{port}", Path(spec.profile_dir).parent / "workers" / f"judge{env.rank}.log"
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        mine = slice(env.local_rank, env.local_rank + tp)
        devices = ",".join((visible.split(",") if visible else [str(i) for i in range(env.local_world_size)])[mine])
        self._server = Server(
            command,
            health=f"http://{address}/health",
            log=log,
            environment=server_environment(env.device, devices if env.device == "cuda" else None),
        )
        self._server.start()
        self.place = address, f"the reward model's server at {address} (process {self._server.pid}, log {log})"
        try:
            limit_s = spec.config.trainer.worker_start_timeout
            timeout_s = max(limit_s / 2, 0.9 * limit_s - (time.monotonic() - _IMPORTED))
            with span("start of the reward model's server", expected_s=timeout_s):
                self._server.wait_ready(timeout_s)
        except BaseException:
            self.shutdown()
            raise

    def where(self) -> ServerPlace | None:
        """Return the place of this rank's server; None for a rank without one."""
        return self.place

    def shutdown(self) -> None:
        if self._server is not None:
            self._server.end()
