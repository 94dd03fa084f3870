"""The driver's side of the weight sync: whether the rollout engines have the actor's weights, and how they get them."""

from __future__ import annotations

from verl_like.cluster.worker_group import WorkerGroup
from verl_like.weight_sync.sync import SyncReport


class Weights:
    """Which weights the rollout engines hold. Whoever changes the actor says so by `changed`."""

    def __init__(self, actor: WorkerGroup, rollout: WorkerGroup, *, timeout_s: float) -> None:
        """actor, rollout: the pools of the two; one and the same in the hybrid engine."""
        self._actor, self._rollout, self._timeout_s = actor, rollout, timeout_s
        self.version: int | None = None  # what the engines hold; None: not what the actor holds

    def changed(self) -> None:
        """The actor is another one now."""
        self.version = None

    def sync(self, version: int) -> SyncReport | None:
        """Fill the rollout engines with the trained weights, proved; the slowest rank's report. None if they have them.

        Raises WorkerError: a proof failed, or a rank.
        """
        if self.version == version:
            return None
        reports = self._actor.call_all("weights.sync", version).wait(timeout=self._timeout_s)
        self.version = version
        return max(reports, key=lambda report: report.seconds)
