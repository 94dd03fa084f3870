"""One whole run of a checked configuration: workers, trainer, fit, and an orderly end."""

from __future__ import annotations

import dataclasses
import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from verl_like.checkpoint.lock import held
from verl_like.cluster.worker_group import WorkerGroup, new_run_id
from verl_like.config import PPOConfig
from verl_like.config.errors import ConfigError, RunStopped
from verl_like.config.placement import Pool
from verl_like.config.trainer import MAIN_POOL
from verl_like.observe.environment import write_environment
from verl_like.observe.logs import setup_driver_logging
from verl_like.observe.run_folder import CONFIG
from verl_like.trainer.build import (
    WORKER,
    Groups,
    build_trainer,
    check_output_folders,
    input_errors,
    log_dir,
    profile_dir,
    resolve_world,
)
from verl_like.trainer.compose import save_resolved
from verl_like.trainer.free_folder import with_free_folder
from verl_like.trainer.nsight import check_nsight, restart_under_nsight, worker_runtime_env
from verl_like.trainer.own_code import check_given, with_reward
from verl_like.trainer.ppo import PPOTrainer
from verl_like.trainer.told import closing_text, start_phase
from verl_like.workers.spec import WorkerSpec

logger = logging.getLogger(__name__)
Stopped = TypeVar("Stopped", bound=WorkerGroup)


def run(config: PPOConfig) -> None:
    """The run of a command line: what is wrong with its inputs, or stops it, ends the program with its message."""
    try:
        fit(config, restart=restart_under_nsight)
    except (ConfigError, RunStopped) as error:  # what only files, processes or training itself could show to be wrong
        logger.debug("the run ends", exc_info=True)
        sys.exit(f"error: {error}")


def fit(config: PPOConfig, **own: Any) -> Path:
    """`opened` and the trainer's `fit`; the folder of the run's files."""
    began = time.perf_counter()
    with opened(config, **own) as trainer:
        trainer.fit()
    config, folder = trainer.config, log_dir(trainer.config)
    if not config.trainer.val_only:
        steps = {"step": trainer.state.step, "total_steps": trainer.total_steps}
        logger.info("%s", closing_text(config, folder, **steps, seconds=time.perf_counter() - began))
    return folder


@contextmanager
def opened(
    config: PPOConfig,
    reward: Callable[..., Any] | None = None,
    kind: type[PPOTrainer] | None = None,
    restart: Callable[[PPOConfig, Path], None] = lambda config, folder: None,
) -> Iterator[PPOTrainer]:
    """Everything built, and taken down again at the end; trainer.default_local_dir is this run's alone meanwhile.

    reward, kind: objects in place of custom_reward_function.path and trainer.trainer_class. restart: may replace this
    process. ConfigError, RunStopped: what is wrong, for people.
    """
    run_id = new_run_id()
    with input_errors():
        check_given(config, reward, kind)
        check_output_folders(config, make=False)
    if Path(config.trainer.default_local_dir).expanduser().is_dir():
        with held(config.trainer.default_local_dir, run_id):  # a live run is refused, not avoided
            config = with_free_folder(config)
    with input_errors():
        check_output_folders(config)
    folder = log_dir(config)
    with input_errors():
        device, _ = resolve_world(config)
        check_nsight(config, device)
    restart(config, profile_dir(config))
    with ExitStack() as stack:
        lock = stack.enter_context(held(config.trainer.default_local_dir, run_id))
        setup_driver_logging(folder)  # not before: the log of a run that is going on is not this one's to write
        logger.info("this run's files go to %s", folder)
        if kind is not None:
            logger.info("the trainer is %s.%s, as given", kind.__module__, kind.__qualname__)
        if reward is not None:
            with input_errors():
                config = with_reward(config, reward, folder)
        groups = partial(worker_groups, run_id=run_id)
        trainer = stack.enter_context(build_trainer(config, groups, lock.confirm, kind))
        trainer.on_start = partial(_describe, config, folder, device=device, processes=trainer.plan.world_size)
        yield trainer


def _describe(config: PPOConfig, folder: Path, *, device: str, processes: int) -> None:
    """config.yaml and environment.json: not before all that can be refused was looked at, as a start that failed
    describes no run, and not in place of a training run's where this one only validates."""
    if not (config.trainer.val_only and (folder / CONFIG).exists()):
        save_resolved(config, folder / CONFIG)
    write_environment(folder, device=device, processes=processes)


@contextmanager
def worker_groups(config: PPOConfig, spec: WorkerSpec, device: str, run_id: str | None = None) -> Iterator[Groups]:
    """The workers of trainer.launcher by pool, stopped at the end of the context; run_id: None makes one up."""
    start = _local_groups if str(config.trainer.launcher) == "local" else _ray_groups
    with start(config, spec, device, run_id or new_run_id()) as groups:
        yield groups


@contextmanager
def _local_groups(config: PPOConfig, spec: WorkerSpec, device: str, run_id: str) -> Iterator[Groups]:
    from verl_like.cluster.local import LocalWorkerGroup

    (pool,) = spec.plan.pools
    if pool.world_size != 1:
        raise ValueError(
            f"trainer.launcher=local runs one rank in this process, but {pool.size_text} asks for more; set both to 1 "
            "or trainer.launcher=ray"
        )
    with _stopped_after(LocalWorkerGroup(WORKER, spec, device=device, run_id=run_id)) as group:
        yield {pool.name: group}


@contextmanager
def _ray_groups(config: PPOConfig, spec: WorkerSpec, device: str, run_id: str) -> Iterator[Groups]:
    from verl_like.cluster.launch import connect
    from verl_like.cluster.ray_group import RayWorkerGroup
    from verl_like.cluster.resources import allocate

    ray_init, settings, pools = config.ray_init, config.trainer, spec.plan.pools
    with start_phase("Ray"):
        connected = connect(
            address=ray_init.address,
            num_cpus=ray_init.num_cpus,
            min_cpus=1 + sum(pool.ranks_per_node for pool in pools),
            temp_dir=ray_init.temp_dir,
            timeline_json_file=ray_init.timeline_json_file,
            run_id=run_id,
            extra={"runtime_env": dict(ray_init.runtime_env)} if ray_init.runtime_env else None,
        )
    with connected as session:

        def start(pool: Pool) -> RayWorkerGroup:
            allocation = allocate(
                pool.nnodes,
                pool.ranks_per_node,
                device=device,
                timeout=settings.ray_wait_register_center_timeout,
                may_grow=not session.owned,
            )
            return RayWorkerGroup(
                WORKER,
                dataclasses.replace(spec, pool=pool.name),
                allocation=allocation,
                run_id=session.run_id,
                log_dir=log_dir(config) / "workers",
                start_timeout=settings.worker_start_timeout,
                runtime_env=worker_runtime_env(config, profile_dir(config)),
                name="worker" if pool.name == MAIN_POOL else pool.name,
                wait=False,
            )

        with ExitStack() as stack:
            groups = {pool.name: stack.enter_context(_stopped_after(start(pool))) for pool in pools}
            for group in groups.values():  # they build their roles at the same time
                group.wait_started()
            yield groups


@contextmanager
def _stopped_after(group: Stopped) -> Iterator[Stopped]:
    try:
        yield group
    finally:
        group.shutdown()
