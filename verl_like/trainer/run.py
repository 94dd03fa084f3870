"""One whole run of a checked configuration: workers, trainer, fit, and an orderly end."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from verl_like.cluster.protocol import WorkerGroup, new_run_id
from verl_like.config import PPOConfig
from verl_like.config.errors import ConfigError
from verl_like.observe.logs import setup_driver_logging
from verl_like.trainer.build import WORKER, build_trainer, input_errors, log_dir, profile_dir, resolve_world
from verl_like.trainer.compose import save_resolved
from verl_like.trainer.nsight import check_nsight, restart_under_nsight, worker_runtime_env
from verl_like.workers.spec import WorkerSpec

logger = logging.getLogger(__name__)


def run(config: PPOConfig) -> None:
    """Build everything, fit, take everything down again."""
    folder = log_dir(config)
    folder.mkdir(parents=True, exist_ok=True)
    setup_driver_logging(folder)
    save_resolved(config, folder / "config.yaml")
    try:
        with input_errors():
            check_nsight(config, resolve_world(config)[0])
        restart_under_nsight(config, profile_dir(config))
        with build_trainer(config, worker_group) as trainer:
            trainer.fit()
    except ConfigError as error:  # what only the files or the number of processes could show to be wrong
        sys.exit(f"error: {error}")


@contextmanager
def worker_group(config: PPOConfig, spec: WorkerSpec, device: str, ranks_per_node: int) -> Iterator[WorkerGroup]:
    """The workers of trainer.launcher, stopped at the end of the context."""
    build = _local_group if str(config.trainer.launcher) == "local" else _ray_group
    with build(config, spec, device, ranks_per_node) as group:
        try:
            yield group
        finally:
            group.shutdown()


@contextmanager
def _local_group(config: PPOConfig, spec: WorkerSpec, device: str, ranks_per_node: int) -> Iterator[WorkerGroup]:
    from verl_like.cluster.local import LocalWorkerGroup

    if config.trainer.nnodes * ranks_per_node != 1:
        raise ValueError(
            f"trainer.launcher=local runs one rank in this process, but trainer.nnodes={config.trainer.nnodes} x "
            f"trainer.n_gpus_per_node={ranks_per_node} asks for more; set both to 1 or trainer.launcher=ray"
        )
    yield LocalWorkerGroup(WORKER, spec, device=device)


@contextmanager
def _ray_group(config: PPOConfig, spec: WorkerSpec, device: str, ranks_per_node: int) -> Iterator[WorkerGroup]:
    from verl_like.cluster.launch import connect
    from verl_like.cluster.ray_group import RayWorkerGroup
    from verl_like.cluster.resources import allocate

    ray_init, settings = config.ray_init, config.trainer
    with connect(
        address=ray_init.address,
        num_cpus=ray_init.num_cpus,
        min_cpus=ranks_per_node + 1,
        temp_dir=ray_init.temp_dir,
        timeline_json_file=ray_init.timeline_json_file,
        run_id=new_run_id(),
        extra={"runtime_env": dict(ray_init.runtime_env)} if ray_init.runtime_env else None,
    ) as session:
        allocation = allocate(
            settings.nnodes,
            ranks_per_node,
            device=device,
            timeout=settings.ray_wait_register_center_timeout,
            may_grow=not session.owned,
        )
        yield RayWorkerGroup(
            WORKER,
            spec,
            allocation=allocation,
            run_id=session.run_id,
            log_dir=log_dir(config) / "workers",
            start_timeout=settings.worker_start_timeout,
            runtime_env=worker_runtime_env(config, profile_dir(config)),
        )
