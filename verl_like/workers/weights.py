"""How the actor's weights leave a process and reach a rollout engine: here, where one process hosts both."""

from __future__ import annotations

from verl_like.parallel.dist import ProcessInfo
from verl_like.weight_sync.sync import SyncReport, WeightSync
from verl_like.workers.actor import ActorRole
from verl_like.workers.residency import Phase, Residency
from verl_like.workers.rollout import RolloutRole
from verl_like.workers.spec import WorkerSpec


class WeightsInProcess:
    """One rank's sync of the actor with the rollout engine beside it."""

    def __init__(
        self, spec: WorkerSpec, process: ProcessInfo, actor: ActorRole, rollout: RolloutRole, residency: Residency
    ) -> None:
        self._actor, self._residency = actor, residency
        self.channel = WeightSync(
            actor.engine,
            rollout.engine,
            spec.config.actor_rollout_ref.rollout,
            process,
            trainer_dtype=actor.engine.compute_dtype,
        )

    def sync(self, version: int) -> SyncReport:
        """Bring the rollout engine to `version` of the trained weights, and prove it."""
        # The engine's weights wake first, its cache when they are loaded.
        report = self.channel.sync(version, optimizer_moved=self._actor.moved)
        self._actor.moved = False
        self._residency.enter(Phase.rollout)
        return report
