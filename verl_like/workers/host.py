"""Host of one worker process: it holds the roles of its pool, and runs a method when the driver calls `role.method`.

The process joins the others of its pool first (`joined`). Every call is SPMD: all ranks of the pool get it, each with
its own rows. Here, once for all roles, a call is recorded by the profiler and finds in device memory what it needs.

Profiles are of chosen training steps, one rank at a time: torch traces, or the window that Nsight Systems records. A
torch trace is a gzipped Chrome trace, `<folder>/step_<n>/rank<r>[_<role>_<method>].json.gz`: open it at ui.perfetto.dev
or in chrome://tracing. With `discrete` a role gets a trace for each of its calls, else one trace covers the whole step.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from verl_like.batch import Metric
from verl_like.cluster.worker_group import RankEnv
from verl_like.config import ProfilerConfig
from verl_like.config.distillation import is_teacher
from verl_like.config.roles import ACTOR, CRITIC, REF, REWARD, ROLLOUT
from verl_like.config.trainer import ProfileTool
from verl_like.engine.fsdp import FSDPEngine
from verl_like.observe.memory import PhaseMemory, allocated_bytes
from verl_like.parallel.device_peak import DevicePeak, device_peak
from verl_like.parallel.dist import ProcessInfo, init_distributed, shutdown_distributed
from verl_like.registry import part
from verl_like.user_code import EXTERNAL_MODULES, import_modules
from verl_like.workers.residency import Phase, Residency
from verl_like.workers.roles import ActorRole, CriticRole, ReferenceRole, TeacherRole, reward_worker_class
from verl_like.workers.rollout import RolloutRole
from verl_like.workers.spec import WorkerSpec
from verl_like.workers.weights import WeightsRole

logger = logging.getLogger(__name__)


class WorkerProfiler:
    """Recorder of the steps that the driver asks for, on the ranks that each role's profiler section names.

    roles: the name of each role that is hosted, and its section. Only one recording runs at a time; calls outside a
    profiled step cost nothing.
    """

    def __init__(
        self, roles: Mapping[str, ProfilerConfig], *, rank: int, device: torch.device, folder: Path, tool: ProfileTool
    ) -> None:
        self.rank, self.device, self.folder, self.tool = rank, device, folder, tool
        chosen = {role: section for role, section in roles.items() if is_chosen(section, rank)}
        self._discrete = frozenset(role for role, section in chosen.items() if section.discrete)
        self._whole_steps = any(not section.discrete for section in chosen.values())
        self._step: int | None = None
        self._recording: profile | None = None

    def start(self, step: int) -> None:
        """Begin to record a step."""
        self._step = step
        if self._whole_steps:
            self._begin()

    def stop(self) -> None:
        """End the step and write its trace."""
        if self._whole_steps:
            self._end(f"rank{self.rank}")
        self._step = None

    @contextmanager
    def phase(self, role: str, name: str) -> Iterator[None]:
        """Record one call of a role.

        It gets a trace of its own where the role is discrete, a named range in the step's trace else.
        """
        if self._step is None:
            yield
        elif role in self._discrete and not self._whole_steps:
            self._begin()
            try:
                yield
            finally:
                self._end(f"rank{self.rank}_{role}_{name}")
        else:
            with record_function(f"verl_like::{role}.{name}"):
                yield

    def _begin(self) -> None:
        if self.tool == ProfileTool.nsys:
            torch.cuda.profiler.start()
            return
        activities = [ProfilerActivity.CPU]
        if self.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        recording = profile(activities=activities)
        recording.start()
        self._recording = recording

    def _end(self, name: str) -> None:
        if self.tool == ProfileTool.nsys:
            torch.cuda.profiler.stop()
            return
        assert self._recording is not None and self._step is not None
        self._recording.stop()
        path = self.folder / f"step_{self._step}" / f"{name}.json.gz"
        path.parent.mkdir(parents=True, exist_ok=True)
        self._recording.export_chrome_trace(str(path))
        self._recording = None
        logger.info("profile of step %d: %s", self._step, path)


def is_chosen(section: ProfilerConfig, rank: int) -> bool:
    """True for all ranks (all_ranks), those listed, or rank 0 by default; false where the role is switched off."""
    return section.enable and (section.all_ranks or rank in (section.ranks if section.ranks is not None else (0,)))


@contextmanager
def joined(spec: WorkerSpec, env: RankEnv) -> Iterator[ProcessInfo]:
    """Join the process group of the pool, for the constructor of a worker; leave it again when that fails.

    The user's own modules are imported in it. In the driver's own process (trainer.launcher=local) another group may
    follow.
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


WEIGHTS = "weights"
_PHASES = {ROLLOUT: Phase.rollout}  # of the methods of a role; of all others: train
_MEASURED = {  # calls whose memory is told, under the names of the step's clock
    (ROLLOUT, "serve"): "gen",
    (WEIGHTS, "send"): "update_weights",
    (WEIGHTS, "receive"): "update_weights",
    (ACTOR, "log_probs"): "old_log_prob",
    (ACTOR, "update"): "update_actor",
    (REF, "log_probs"): "ref",
    (CRITIC, "values"): "values",
    (CRITIC, "update"): "update_critic",
}
# Methods that touch no device memory
_ANY_PHASE = frozenset({"saved", "where", "open_link", "listen", "join", "wanted", "unload"})


class RoleHost:
    """Roles of one rank of a pool."""

    def __init__(self, spec: WorkerSpec, env: RankEnv) -> None:
        self.spec, self.roles = spec, dict[str, Any]()
        self._seconds = {"imports": (time.time() - env.asked_at, time.process_time())}
        with joined(spec, env) as self.process:
            self.profiler = build_profiler(spec, self.process)
            self.memory, self._asleep = PhaseMemory(self.process.device), 0
            self._build(spec, env)
        engines = [getattr(role, "engine", None) for name, role in self.roles.items() if name != ROLLOUT]
        self._models = [engine for engine in engines if isinstance(engine, FSDPEngine)]
        rollout = self.roles.get(ROLLOUT)
        discard = spec.config.actor_rollout_ref.rollout.sleep_level == 2
        self.residency = Residency(self._models, None if rollout is None else rollout.engine, discard=discard)
        actor = self.roles.get(ACTOR)
        if actor is not None or rollout is not None:
            self.roles[WEIGHTS] = WeightsRole(spec, self.process, env, self.residency, actor=actor, rollout=rollout)

    def _build(self, spec: WorkerSpec, env: RankEnv) -> None:
        """Build the roles, the rollout engine last: at its start gpu_memory_utilization of the device must be free."""
        plans, distillation = spec.plan.roles, spec.config.distillation
        teachers = [name for name, each in distillation.teachers().items() if each.local]
        makers = {
            CRITIC: lambda: CriticRole(spec, self.process),
            REWARD: lambda: (
                reward_worker_class(spec.config.reward_model)(spec, self.process)
                if REWARD in plans
                else part("reward_model", "server")(spec, env)
            ),
            ACTOR: lambda: ActorRole(spec, self.process),
            REF: lambda: ReferenceRole(spec, self.process, self.roles.get(ACTOR)),
            **{name: partial(TeacherRole, spec, self.process, name) for name in teachers},
            ROLLOUT: lambda: RolloutRole(spec, self.process, env),
        }
        rollout = spec.config.actor_rollout_ref.rollout
        for name, make in makers.items():
            if name in spec.roles and (name != ROLLOUT or rollout.engine.code is not None):
                began, cpu = time.perf_counter(), time.process_time()
                before = allocated_bytes(self.process.device)
                self.roles[name] = make()
                if name == ROLLOUT and rollout.free_cache_engine and rollout.engine.counted_asleep:
                    self._asleep = allocated_bytes(self.process.device) - before
                self._seconds[name] = time.perf_counter() - began, time.process_time() - cpu
        if distillation.compares and ACTOR in self.roles:  # a rule sees to it that teachers share its pool
            self.roles[ACTOR].engine.attach_reference(*(self.roles[name].engine for name in teachers))

    def run(self, role: str, method: str, *arguments: Any) -> Any:
        """Call a role's method in its phase. Raises RuntimeError for a role that is not here."""
        if role not in self.roles:
            hosted = ", ".join(self.roles)
            raise RuntimeError(f"{role}.{method}() was called in the pool {self.spec.pool}, which hosts {hosted}")
        with self.profiler.phase(role, method):
            if method not in _ANY_PHASE:
                self.residency.enter(_PHASES.get(role, Phase.train))
            phase = "teacher" if is_teacher(role) else _MEASURED.get((role, method))
            if phase is None:
                return getattr(self.roles[role], method)(*arguments)
            with self.memory.phase(
                phase, without=self._asleep if role in (ACTOR, CRITIC, REF) or phase == "teacher" else 0
            ):
                answer = getattr(self.roles[role], method)(*arguments)
        return self._with_peaks(answer) if method == "update" else answer

    def _with_peaks(self, steps: list[dict[str, Metric]]) -> list[dict[str, Metric]]:
        """Add the memory peaks of all phases since the last update to the metrics of the last step."""
        peaks = {name: Metric(value=value, reduction="max") for name, value in self.memory.take().items()}
        rollout = self.roles.get(ROLLOUT)
        if rollout is not None and rollout.engine.num_rescues:
            peaks["perf/out_of_memory_gen"] = Metric(value=float(rollout.engine.num_rescues), reduction="max")
        return [*steps[:-1], steps[-1] | peaks] if steps else []

    def start_seconds(self) -> dict[str, tuple[float, float]]:
        """Seconds, and CPU seconds, from the process's start to here, and for building each role of this rank."""
        return self._seconds

    def differences(self) -> list[str]:
        """List the settings that are otherwise in what this rank built than the configuration asks."""
        return part("readback", "differences")(self.spec, self.process, self.roles)

    def device_peak(self) -> DevicePeak:
        """Peak of this rank's device, in the precision of its actor, or of what else it computes."""
        dtype = torch.float32
        if self._models:
            dtype = (self.roles[ACTOR].engine if ACTOR in self.roles else self._models[0]).compute_dtype
        elif ROLLOUT in self.roles:
            dtype = self.roles[ROLLOUT].engine.dtype
        return device_peak(self.process.device, dtype)

    def start_profile(self, step: int) -> None:
        self.profiler.start(step)

    def stop_profile(self) -> None:
        self.profiler.stop()

    def shutdown(self) -> None:
        """Stop the rollout engine before the process group: vLLM's exit handler still talks to its peers."""
        try:
            for name, end in ((WEIGHTS, "close"), (ROLLOUT, "shutdown"), (REWARD, "shutdown")):
                if hasattr(self.roles.get(name), end):
                    getattr(self.roles[name], end)()
        finally:
            shutdown_distributed()


def build_profiler(spec: WorkerSpec, process: ProcessInfo) -> WorkerProfiler:
    """Build the recorder of this rank, with the section of each role that it hosts.

    The actor's section covers generation and weight sync.
    """
    plans = spec.plan.roles
    models = {name: ACTOR if name == ROLLOUT else name for name in spec.roles}
    sections = {name: plans[model].config.profiler for name, model in models.items() if model in plans}
    if ACTOR in sections or ROLLOUT in sections:
        sections[WEIGHTS] = plans[ACTOR].config.profiler
    return WorkerProfiler(
        sections,
        rank=process.rank,
        device=process.device,
        folder=Path(spec.profile_dir) / (f"{spec.pool}{spec.replica or ''}" if len(spec.plan.pools) > 1 else ""),
        tool=spec.config.trainer.profile_tool,
    )
