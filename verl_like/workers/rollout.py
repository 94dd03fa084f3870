"""The rollout engine of a rank, and the link by which the driver reaches a replica."""

from __future__ import annotations

from verl_like.cluster.worker_group import RankEnv
from verl_like.models.loading import load_hf_config
from verl_like.parallel.dist import ProcessInfo
from verl_like.progress import DRIVER, span
from verl_like.rollout.build import build_rollout_engine
from verl_like.rollout.link_server import LinkServer
from verl_like.rollout.rollout_engine import RolloutEngine
from verl_like.workers.spec import WorkerSpec


class RolloutRole:
    """One rank's part of a replica."""

    def __init__(self, spec: WorkerSpec, process: ProcessInfo, env: RankEnv) -> None:
        self._env, self._leads = env, env.rank % spec.plan.tensor_parallel_size == 0
        self._link: LinkServer | None = None
        self.engine = rollout_engine(spec, process, env.run_id)

    def open_link(self) -> tuple[tuple[str, int], bytes] | None:
        """Address and key under which the driver reaches this replica, on its first rank; None on the others."""
        if self._link is not None:
            self._link.close()
        if not self._leads:
            return None
        self._link = LinkServer(self.engine, self._env.address)
        return self._link.address, self._link.authkey

    def serve(self, num_orders: int) -> None:
        """Sample what the driver orders through the links until it says pause. num_orders: see LinkServer.serve."""
        if self._link is not None:
            self._link.serve(num_orders)
        else:
            with self.engine.opened(), span("serving", whom=DRIVER):
                pass  # a replica's other ranks pause when its first one does

    def shutdown(self) -> None:
        if self._link is not None:
            self._link.close()
        self.engine.shutdown()


def rollout_engine(spec: WorkerSpec, process: ProcessInfo, run_id: str) -> RolloutEngine:
    """The engine of this run, without weights (collective)."""
    policy = spec.config.actor_rollout_ref
    return build_rollout_engine(
        policy.rollout,
        policy.model,
        process=process,
        hf_config=load_hf_config(policy.model),
        tokenizer_size=spec.tokenizer_size,
        max_model_len=spec.max_model_len,
        seed=spec.config.trainer.seed,
        run_id=run_id,
        tokenizer=spec.config.data.tokenizer,
    )
