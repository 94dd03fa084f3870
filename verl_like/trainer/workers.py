"""Worker processes of a run: one group for each pool, in this process or on Ray, started as often as it takes."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Self, TypeVar

from verl_like.cluster.worker_group import WorkerGroup, new_run_id
from verl_like.config import PPOConfig
from verl_like.config.batch_plan import BatchPlan
from verl_like.config.errors import ConfigError
from verl_like.config.pools import MAIN_POOL, Pool
from verl_like.config.roles import ROLLOUT
from verl_like.trainer.folders import log_dir, profile_dir
from verl_like.trainer.nsight import worker_runtime_env
from verl_like.trainer.replica_group import Fleet, Replica
from verl_like.trainer.start_messages import start_phase
from verl_like.workers.spec import WorkerSpec

if TYPE_CHECKING:
    from verl_like.cluster.launch import RaySession
    from verl_like.cluster.ray_group import RayWorkerGroup
    from verl_like.cluster.watchdog import Watchdog

logger = logging.getLogger(__name__)

WORKER = "verl_like.workers.host:RoleHost"
Groups = Mapping[str, WorkerGroup]  # by the pool's name
Workers = Callable[[WorkerSpec, str], AbstractContextManager[Groups]]  # of a spec and a device
Group = TypeVar("Group", bound=WorkerGroup)
_ROOM_S = 10.0  # how long the driver waits for devices of a replica in place of a lost one


class Pools:
    """Worker groups by pool, for calls to the processes as such, whatever roles they host."""

    def __init__(self, groups: Mapping[str, WorkerGroup], plan: BatchPlan, timeout_s: float) -> None:
        """Take the worker groups, by the pool's name as in the plan."""
        self.groups, self._plan, self._timeout_s = groups, plan, timeout_s
        self.reachable: Callable[[], AbstractContextManager[None]] = nullcontext  # inside, every process can be called

    def of(self, role: str) -> WorkerGroup:
        """Return the processes that host a role."""
        return self.groups[self._plan.pool_of(role).name]

    def ask(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of every process; return the answers of all pools."""
        with self.reachable():
            pending = [group.call_all(method, *arguments) for group in self.groups.values()]
            return [answer for each in pending for answer in each.wait(timeout=self._timeout_s)]

    @contextmanager
    def profiled(self, step: int) -> Iterator[None]:
        """Record everything that the workers do inside; each chosen rank writes its trace at the end."""
        self.ask("start_profile", step)
        yield
        self.ask("stop_profile")


class Launcher:
    """Launcher of the workers of trainer.launcher: `with launcher(spec, device) as groups`.

    A Ray session is opened with the first start and kept for later ones, unless its daemons have died; the launcher
    itself is a context manager that ends it.
    """

    def __init__(self, config: PPOConfig, run_id: str | None = None) -> None:
        self._config, self.run_id = config, run_id or new_run_id()
        self._session: RaySession | None = None

    @contextmanager
    def __call__(self, spec: WorkerSpec, device: str) -> Iterator[Groups]:
        """Start the groups; they stop at the end of the context."""
        start = self._local if str(self._config.trainer.launcher) == "local" else self._on_ray
        with ExitStack() as stack:
            yield start(spec, device, stack)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        session, self._session = self._session, None
        if session is not None:
            session.disconnect()

    def _local(self, spec: WorkerSpec, device: str, stack: ExitStack) -> Groups:
        from verl_like.cluster.local import LocalWorkerGroup

        (pool,) = spec.plan.pools
        if pool.world_size != 1:
            raise ValueError(
                f"trainer.launcher=local runs one rank in this process, but {pool.size_text} asks for more; set both "
                "to 1 or trainer.launcher=ray"
            )
        group = LocalWorkerGroup(WORKER, spec, device=device, run_id=self.run_id)
        return {pool.name: _stopped_with(stack, group)}

    def _on_ray(self, spec: WorkerSpec, device: str, stack: ExitStack) -> Groups:
        from verl_like.cluster.watchdog import Watchdog

        session = self._connected(spec.plan.pools)
        watchdog = Watchdog(self._config.trainer.stall_timeout, session.run_id)
        groups: dict[str, RayWorkerGroup | Fleet] = {}
        for pool in spec.plan.pools:
            if self._config.trainer.mode == "separate_async" and pool.roles == (ROLLOUT,):
                groups[pool.name] = self._fleet(pool, session, spec, device, stack, watchdog)
            else:
                patience = self._config.trainer.ray_wait_register_center_timeout
                groups[pool.name] = self._on_pool(pool, session, spec, device, stack, watchdog, patience)
        for group in groups.values():  # they build their roles at the same time
            group.wait_started()
        return groups

    def _fleet(
        self, pool: Pool, session: RaySession, spec: WorkerSpec, device: str, stack: ExitStack, watchdog: Watchdog
    ) -> Fleet:
        """Start a group for each replica of a pool that only samples."""
        size = spec.plan.tensor_parallel_size
        if pool.ranks_per_node % size:
            raise ConfigError(
                [
                    f"actor_rollout_ref.rollout.tensor_model_parallel_size={size} with {pool.keys[1]}="
                    f"{pool.ranks_per_node}: with trainer.mode=separate_async a replica is on one machine; let the "
                    "first divide the second"
                ]
            )
        one, count = dataclasses.replace(pool, nnodes=1, ranks_per_node=size), pool.world_size // size

        def start(number: int) -> Replica:
            own, patience = ExitStack(), self._config.trainer.ray_wait_register_center_timeout
            try:
                numbered = dataclasses.replace(spec, replica=number)
                in_place_of_another = min(_ROOM_S, patience) if number >= count else patience
                group = self._on_pool(one, session, numbered, device, own, watchdog, in_place_of_another, spare=True)
            except BaseException:
                own.close()
                raise
            return Replica(number, group, own.close)

        return _stopped_with(stack, Fleet(start, count, watchdog.look_when_due))

    def _connected(self, pools: tuple[Pool, ...]) -> RaySession:
        from verl_like.cluster.launch import connect

        ray_init = self._config.ray_init
        if self._session is not None and self._session.lost:
            logger.warning("a daemon of Ray on this machine has died: another Ray is started")
            self.__exit__()
        if self._session is None:
            with start_phase("Ray"):
                self._session = connect(
                    address=ray_init.address,
                    num_cpus=ray_init.num_cpus,
                    min_cpus=1 + sum(pool.ranks_per_node for pool in pools),
                    temp_dir=ray_init.temp_dir,
                    timeline_json_file=ray_init.timeline_json_file,
                    run_id=self.run_id,
                    extra={"runtime_env": dict(ray_init.runtime_env)} if ray_init.runtime_env else None,
                )
        return self._session

    def _on_pool(
        self,
        pool: Pool,
        session: RaySession,
        spec: WorkerSpec,
        device: str,
        stack: ExitStack,
        watchdog: Watchdog,
        patience_s: float,
        spare: bool = False,
    ) -> RayWorkerGroup:
        from verl_like.cluster.ray_group import RayWorkerGroup
        from verl_like.cluster.resources import allocate

        config = self._config
        allocation = allocate(
            pool.nnodes,
            pool.ranks_per_node,
            device=device,
            timeout=patience_s,
            may_grow=not session.owned,
            keys=pool.keys,
        )
        stack.callback(allocation.release)
        name = "worker" if pool.name == MAIN_POOL else pool.name
        group = RayWorkerGroup(
            WORKER,
            dataclasses.replace(spec, pool=pool.name),
            allocation=allocation,
            run_id=session.run_id,
            log_dir=log_dir(config) / "workers",
            start_timeout=config.trainer.worker_start_timeout,
            runtime_env=worker_runtime_env(config, profile_dir(config)),
            name=f"{name}{spec.replica}" if spec.replica else name,
            wait=False,
            watchdog=watchdog,
            spare=spare,
        )
        return _stopped_with(stack, group)


def _stopped_with(stack: ExitStack, group: Group) -> Group:
    stack.callback(group.shutdown)
    return group
