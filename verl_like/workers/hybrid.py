"""One worker process of a resource pool: it hosts every role that shares the pool's devices.

The driver calls these methods by name on all ranks at once (`WorkerGroup.call`); each is SPMD.
"""

from __future__ import annotations

from pathlib import Path

from verl_like.batch import Denominators, Evaluated, Experience, Metric, Sequences
from verl_like.cluster.worker_group import RankEnv
from verl_like.parallel.device_peak import DevicePeak, device_peak
from verl_like.parallel.dist import ProcessInfo, shutdown_distributed
from verl_like.weight_sync.sync import SyncReport
from verl_like.workers.critic import CriticWorker
from verl_like.workers.policy import PolicyWorker
from verl_like.workers.process import joined
from verl_like.workers.profiling import WorkerProfiler
from verl_like.workers.reward import build_reward_worker
from verl_like.workers.spec import WorkerSpec


class HybridWorker:
    """Actor, reference, rollout and critic of one rank."""

    def __init__(self, spec: WorkerSpec, env: RankEnv) -> None:
        self.env = env
        with joined(spec, env) as self.process:
            self.profiler = build_profiler(spec, self.process)
            # The rollout engine comes last: at its start gpu_memory_utilization of the device must be free.
            self.critic = CriticWorker(spec, self.process) if spec.plan.needs_critic else None
            scores = spec.plan.needs_reward_model and not spec.config.reward_model.enable_resource_pool
            self.reward = build_reward_worker(spec, self.process) if scores else None
            self.policy = PolicyWorker(spec, self.process, env.run_id)

    def sync_weights(self, version: int) -> SyncReport | None:
        with self.profiler.phase("actor", "sync_weights"):
            return self.policy.sync_weights(version)

    def start_seconds(self) -> dict[str, float]:
        """How long each part of this rank took to build."""
        return self.policy.start_seconds

    def device_peak(self) -> DevicePeak:
        """What this rank's device can do at most, in the actor's compute precision."""
        return device_peak(self.process.device, self.policy.compute_dtype())

    def open_link(self) -> tuple[tuple[str, int], bytes] | None:
        return self.policy.open_link(self.env)

    def serve(self, num_orders: int) -> None:
        with self.profiler.phase("actor", "generate"):
            self.policy.serve(num_orders)

    def old_log_probs(self, batch: Sequences) -> Evaluated:
        with self.profiler.phase("actor", "old_log_probs"):
            return self.policy.old_log_probs(batch)

    def ref_log_probs(self, batch: Sequences) -> Evaluated:
        with self.profiler.phase("ref", "ref_log_probs"):
            return self.policy.ref_log_probs(batch)

    def values(self, batch: Sequences) -> Evaluated:
        with self.profiler.phase("critic", "values"):
            return self._critic().values(batch)

    def reward_scores(self, batch: Sequences) -> Evaluated:
        if self.reward is None:
            raise RuntimeError("reward_scores was called, but this worker hosts no reward model")
        with self.profiler.phase("reward", "reward_scores"):
            self.policy.enter_train()
            return self.reward.scores(batch)

    def update_actor(self, minibatches: list[tuple[Experience, Denominators]]) -> list[dict[str, Metric]]:
        with self.profiler.phase("actor", "update_actor"):
            return self.policy.update_actor(minibatches)

    def update_critic(self, minibatches: list[tuple[Experience, Denominators]]) -> list[dict[str, Metric]]:
        with self.profiler.phase("critic", "update_critic"):
            return self._critic().update(minibatches)

    def start_profile(self, step: int) -> None:
        self.profiler.start(step)

    def stop_profile(self) -> None:
        self.profiler.stop()

    def save_actor(self, path: str) -> list[str]:
        return self.policy.save(path)

    def saved_all(self, wait: bool) -> bool:
        """Whether no role of this rank writes a checkpoint in the background; `wait`: until it is so."""
        actor = self.policy.saved(wait)
        return (self.critic is None or self.critic.saved(wait)) and actor

    def load_actor(self, path: str) -> None:
        self.policy.load(path)

    def save_critic(self, path: str) -> list[str]:
        return self._critic().save(path)

    def load_critic(self, path: str) -> None:
        self._critic().load(path)

    def shutdown(self) -> None:
        """Stop the rollout engine before the process group: vLLM's exit handler still talks to its peers."""
        try:
            self.policy.shutdown()
        finally:
            shutdown_distributed()

    def _critic(self) -> CriticWorker:
        """The critic, with the rollout engine asleep: every call of it is one of the train phase."""
        if self.critic is None:
            raise RuntimeError("a critic method was called, but this run's plan has no critic")
        self.policy.enter_train()
        return self.critic


def build_profiler(spec: WorkerSpec, process: ProcessInfo) -> WorkerProfiler:
    """The recorder of this rank, with the section of each role that this run has."""
    config, plan = spec.config, spec.plan
    roles = {"actor": config.actor_rollout_ref.actor.profiler}
    if plan.needs_reference:
        roles["ref"] = config.actor_rollout_ref.ref.profiler
    if plan.needs_critic:
        roles["critic"] = config.critic.profiler
    if plan.needs_reward_model and not config.reward_model.enable_resource_pool:
        roles["reward"] = config.reward_model.profiler
    return WorkerProfiler(
        roles,
        rank=process.rank,
        device=process.device,
        folder=Path(spec.profile_dir),
        tool=config.trainer.profile_tool,
    )
