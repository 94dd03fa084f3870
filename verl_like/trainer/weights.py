"""The driver's side of the weight sync: whether the rollout engines have the actor's weights, and how they get them."""

from __future__ import annotations

from verl_like.cluster.worker_group import WorkerGroup
from verl_like.weight_sync.header import Wanted
from verl_like.weight_sync.verdict import SyncReport, WeightSyncError, verdict


class Weights:
    """Which weights the rollout engines hold. Whoever changes the actor says so by `changed`."""

    def __init__(
        self, actor: WorkerGroup, rollout: WorkerGroup, *, timeout_s: float, nobody_samples: bool = False
    ) -> None:
        """actor, rollout: the pools of the two; one and the same in the hybrid engine. nobody_samples: there is no
        engine (rollout.name=recorded)."""
        self._nobody_samples = nobody_samples
        self._actor, self._rollout, self._timeout_s = actor, rollout, timeout_s
        self._connected = False
        self.version: int | None = None  # what the engines hold; None: not what the actor holds

    def changed(self) -> None:
        """The actor is another one now."""
        self.version = None

    def sync(self, version: int) -> SyncReport | None:
        """Fill the rollout engines with the trained weights, proved; the slowest rank's report. None if they have them.

        Raises WeightSyncError, or WorkerError where a rank has failed: the engines refuse to sample.
        """
        if self.version == version or self._nobody_samples:
            return None
        report = self._within_processes(version) if self._actor is self._rollout else self._between_pools(version)
        self.version = version
        return report

    def _within_processes(self, version: int) -> SyncReport:
        reports = self._actor.call_all("weights.sync", version).wait(timeout=self._timeout_s)
        return max(reports, key=lambda report: report.seconds)

    def _between_pools(self, version: int) -> SyncReport:
        """Both pools work at once: one sends, the other receives; here their reports meet."""
        wanted = Wanted.of_all(self._rollout.call_all("weights.wanted").wait(timeout=self._timeout_s))
        if not self._connected:
            self._connect()
        self._connected = False  # a transfer that breaks off closes its channel
        sending = self._actor.call_all("weights.send", version, wanted)
        receiving = self._rollout.call_all("weights.receive")
        sent, receipts = (pending.wait(timeout=self._timeout_s) for pending in (sending, receiving))
        try:
            report = verdict(sent, receipts)
        except WeightSyncError:
            self._rollout.call_all("weights.unload").wait(timeout=self._timeout_s)
            raise
        self._connected = True
        return report

    def _connect(self) -> None:
        ways = self._actor.call_all("weights.listen", self._rollout.world_size).wait(timeout=self._timeout_s)
        self._rollout.call_all("weights.join", ways[0]).wait(timeout=self._timeout_s)
        self._connected = True
