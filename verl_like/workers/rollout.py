"""Rollout engine of a rank, and the link by which the driver reaches a replica."""

from __future__ import annotations

import os
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch.distributed as dist
from transformers import PretrainedConfig

from verl_like.cluster.environment import LOOPBACK, free_port
from verl_like.cluster.worker_group import RankEnv
from verl_like.config import ModelConfig, RolloutConfig
from verl_like.config.rollout import reads_text
from verl_like.config.trainer import Parity
from verl_like.heartbeat import DRIVER, span
from verl_like.models.loading import load_hf_config
from verl_like.parallel.dist import ProcessInfo, init_distributed
from verl_like.rollout.base import RolloutEngine
from verl_like.rollout.build import build_rollout_engine
from verl_like.rollout.link import LinkServer
from verl_like.rollout.rollout_engine import EngineLostError, RolloutError
from verl_like.user_code import load
from verl_like.workers.remote_engine import RemoteEngine
from verl_like.workers.spec import WorkerSpec

_PROGRESS_S = 2.0


class RolloutRole:
    """Rank of a rollout replica."""

    def __init__(self, spec: WorkerSpec, process: ProcessInfo, env: RankEnv) -> None:
        self._env, self._leads = env, env.rank % spec.plan.tensor_parallel_size == 0
        self._link: LinkServer | None = None
        # A replica of a group of its own may be lost alone: its requests then go on elsewhere, from what was told last.
        self._progress_s = _PROGRESS_S if spec.config.trainer.mode == "separate_async" else None
        self.engine = rollout_engine(spec, process, env.memory_id)

    def open_link(self) -> tuple[tuple[str, int], bytes] | None:
        """Open the link of this replica: address and key for the driver, on its first rank; None on the others."""
        if self._link is not None:
            self._link.close()
        if not self._leads:
            return None
        self._link = LinkServer(self.engine, self._env.address, progress_s=self._progress_s)
        return self._link.address, self._link.authkey

    def serve(self, num_orders: int) -> None:
        """Sample what the driver orders through the links until it says pause. num_orders: see LinkServer.serve."""
        if self._link is not None:
            try:
                self._link.serve(num_orders)
            except RolloutError as error:
                if isinstance(self.engine, RemoteEngine) and self.engine.lost:
                    raise EngineLostError(str(error)) from error
                raise
        else:
            with self.engine.opened(), span("serving", whom=DRIVER):
                pass  # a replica's other ranks pause when its first one does

    def shutdown(self) -> None:
        if self._link is not None:
            self._link.close()
        self.engine.shutdown()


def rollout_engine(spec: WorkerSpec, process: ProcessInfo, run_id: str) -> RolloutEngine:
    """Build the engine of this run, without weights (collective)."""
    policy = spec.config.actor_rollout_ref
    return start_engine(
        policy.rollout,
        policy.model,
        process=process,
        hf_config=load_hf_config(policy.model),
        tokenizer_size=spec.tokenizer_size,
        max_model_len=spec.max_model_len,
        seed=spec.config.trainer.seed + spec.replica,
        run_id=f"{run_id}-{spec.replica}",
        tokenizer=spec.config.data.tokenizer,
        timeout_s=spec.config.trainer.rpc_timeout,
        exact=spec.config.trainer.parity == Parity.exact,
    )


def start_engine(
    rollout: RolloutConfig,
    model: ModelConfig,
    *,
    process: ProcessInfo,
    hf_config: PretrainedConfig,
    run_id: str,
    timeout_s: float = 600.0,
    **more: Any,
) -> RolloutEngine:
    """Start the engine of `build_rollout_engine`, here or in a process beside this one (SGLang, rollout.server).

    Collective. timeout_s: see RemoteEngine.
    """
    kind = rollout.engine
    if not kind.own_process and not rollout.server:
        return build_rollout_engine(rollout, model, process=process, hf_config=hf_config, run_id=run_id, **more)
    tp = rollout.tensor_model_parallel_size
    if process.world_size % tp or int(os.environ["LOCAL_WORLD_SIZE"]) % tp:
        raise ValueError(
            f"rollout.tensor_model_parallel_size={tp} does not divide the {process.world_size} processes of the run, "
            f"or the {os.environ['LOCAL_WORLD_SIZE']} of this machine: replicas of own processes are on one machine"
        )
    around_start: Any = nullcontext
    if kind.installed is not None:
        load(kind.installed, "rollout.name")()
    if kind.around_start is not None:
        around_start = partial(load(kind.around_start, "rollout.name"), process.device, rollout.free_cache_engine)
    return RemoteEngine(
        partial(_build_beside, rollout, model, process, run_id, more),
        arguments=partial(_meeting_place, process.rank, tp),
        reads_text=reads_text(rollout),
        device=process.device,
        run_id=run_id,
        bucket_bytes=rollout.update_weights_bucket_megabytes * 2**20,
        leads=process.rank % tp == 0,
        ranks=tp,
        around_start=around_start,
        timeout_s=timeout_s,
    )


def _meeting_place(rank: int, tp: int) -> tuple[tuple[str, int]]:
    """Choose the address where the processes of this rank's replica meet: that of its first rank.

    Collective where a replica has several ranks.
    """
    chosen = (LOOPBACK, free_port(LOOPBACK))
    if tp == 1:
        return (chosen,)
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, chosen)
    return (everyones[rank - rank % tp],)


def _build_beside(
    rollout: RolloutConfig,
    model: ModelConfig,
    process: ProcessInfo,
    run_id: str,
    more: dict[str, Any],
    address: tuple[str, int],
) -> RolloutEngine:
    """Build the engine in its own process.

    The model's configuration is read again: classes of its own may not travel. SGLang makes the replica's process group
    itself.
    """
    tp, settings = rollout.tensor_model_parallel_size, {"hf_config": load_hf_config(model), "run_id": run_id, **more}
    if rollout.engine.own_process:
        return build_rollout_engine(rollout, model, process=process, address=address, **settings)
    settings["seed"] += process.rank // tp  # of requests without one, which replicas are to draw differently
    alone = init_distributed(process.rank % tp, tp, process.local_rank, tp, *address, process.device.type)
    return build_rollout_engine(rollout, model, process=alone, **settings)
