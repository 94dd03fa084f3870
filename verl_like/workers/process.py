"""How a worker process joins the others of its pool."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from verl_like.cluster.worker_group import RankEnv
from verl_like.parallel.dist import ProcessInfo, init_distributed, shutdown_distributed
from verl_like.user_code import EXTERNAL_MODULES, import_modules
from verl_like.workers.spec import WorkerSpec


@contextmanager
def joined(spec: WorkerSpec, env: RankEnv) -> Iterator[ProcessInfo]:
    """The process group of the pool, for the constructor of a worker: it is left again when that fails. The user's own
    modules are imported in it.

    In the driver's own process (trainer.launcher=local) another group may follow.
    """
    process = init_distributed(
        rank=env.rank,
        world_size=env.world_size,
        local_rank=env.local_rank,
        local_world_size=env.local_world_size,
        master_address=env.master_address,
        master_port=env.master_port,
        device=env.device,
        timeout_s=spec.config.trainer.rpc_timeout,
        deterministic_seed=spec.config.trainer.seed if spec.config.trainer.full_determinism else None,
    )
    try:
        import_modules(spec.external_modules, EXTERNAL_MODULES)
        import_modules(spec.config.actor_rollout_ref.model.external_lib, "actor_rollout_ref.model.external_lib")
        yield process
    except BaseException:
        shutdown_distributed()
        raise
