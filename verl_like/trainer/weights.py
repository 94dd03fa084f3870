"""Driver's side of the weight sync: it knows which weights the rollout engines have, and brings them the actor's."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from verl_like.cluster.worker_group import WorkerGroup
from verl_like.config.roles import ROLLOUT
from verl_like.trainer.replica_group import Fleet, Replica, ReplicaLost
from verl_like.weight_sync.header import Wanted
from verl_like.weight_sync.verdict import SyncReport, WeightSyncError, verdict

_PARTING_S = 60.0


class Weights:
    """Record of the weights that the rollout engines hold. Whoever changes the actor says so by `changed`."""

    def __init__(
        self, actor: WorkerGroup, rollout: WorkerGroup, *, timeout_s: float, nobody_samples: bool = False
    ) -> None:
        """Take the pools of the two, one and the same in the hybrid engine.

        nobody_samples: there is no engine (rollout.name=recorded).
        """
        self._nobody_samples = nobody_samples
        self._actor, self._rollout, self._timeout_s = actor, rollout, timeout_s
        self._connected_to: list[Replica] | None = None  # the members of a fleet that the channel leads to
        self.reachable: Callable[[], AbstractContextManager[None]] = nullcontext  # inside, the engines are paused
        self.version: int | None = None  # what the engines hold; None: not what the actor holds

    def changed(self) -> None:
        """Note that the actor's weights have changed."""
        self.version = None

    def sync(self, version: int) -> SyncReport | None:
        """Fill the rollout engines with the trained weights, proved; what the slowest ranks report. None if they have
        them.

        Raises WeightSyncError, or WorkerError where a rank has failed: the engines refuse to sample.
        """
        if self.version == version or self._nobody_samples:
            return None
        with self.reachable():
            report = self._transfer_to_all(version)
        self.version = version
        return report

    def _transfer_to_all(self, version: int) -> SyncReport:
        """Transfer until all engines that are there have the weights; each lost meanwhile costs another transfer."""
        while True:
            lost = self._num_lost
            try:
                return self._transfer(version)
            except ReplicaLost:
                continue
            except WeightSyncError:
                if self._num_lost == lost:
                    raise

    @property
    def _num_lost(self) -> int:
        return self._rollout.num_lost if isinstance(self._rollout, Fleet) else 0

    def _transfer(self, version: int) -> SyncReport:
        """Have one side send and the other receive, at once where they are two pools; here their reports meet."""
        within = self._actor is self._rollout
        wanted = Wanted.of_all(self._rollout.call_all("weights.wanted").wait(timeout=self._timeout_s))
        members = self._rollout.replicas.copy() if isinstance(self._rollout, Fleet) else []
        connected, self._connected_to = self._connected_to, None  # a transfer that breaks off closes its channel
        if not within and connected != members:
            self._connect()
        sending = self._actor.call_all("weights.send", version, wanted)
        if within:  # a rank that fails alone must not go on, into the receivers' collectives
            sending.wait(timeout=self._timeout_s)
        receiving = self._rollout.call_all("weights.receive")
        sent = sending.wait(timeout=self._timeout_s)
        broken = any(report.problems for report in sent)  # then nothing more comes to those who receive
        receipts = receiving.wait(timeout=min(_PARTING_S, self._timeout_s) if broken else self._timeout_s)
        try:
            report = verdict(sent, receipts)
        except WeightSyncError:
            self._rollout.call_all("weights.unload").wait(timeout=self._timeout_s)
            raise
        self._connected_to = members
        return report

    def _connect(self) -> None:
        groups = [replica.group for replica in self._rollout.replicas] if isinstance(self._rollout, Fleet) else []
        groups = groups or [self._rollout]
        sizes = [group.world_size for group in groups]
        # As the watchdog has them
        names = [f"{getattr(g, 'name', ROLLOUT)} rank {r}" for g in groups for r in range(g.world_size)]
        way = self._actor.call_all("weights.listen", names).wait(timeout=self._timeout_s)[0]
        firsts = [sum(sizes[:place]) for place, size in enumerate(sizes) for _ in range(size)]
        self._rollout.call("weights.join", [(way, first) for first in firsts]).wait(timeout=self._timeout_s)
