"""How the actor's weights leave a process and reach a rollout engine: in it, where one process hosts both, or to a pool
of the engine's own, by a broadcast from the actor's first rank."""

from __future__ import annotations

from verl_like.cluster.worker_group import RankEnv
from verl_like.parallel.dist import ProcessInfo
from verl_like.weight_sync.broadcast import BroadcastReceiver, BroadcastSender
from verl_like.weight_sync.channel import DEADLINE_S, InProcess, SendingEnd, TakesPart
from verl_like.weight_sync.header import Wanted
from verl_like.weight_sync.receiver import WeightReceiver
from verl_like.weight_sync.source import WeightSource
from verl_like.weight_sync.verdict import Receipt, Sent, SyncReport, WeightSyncError, verdict
from verl_like.weight_sync.wired import Way
from verl_like.workers.actor import ActorRole
from verl_like.workers.residency import Phase, Residency
from verl_like.workers.rollout import RolloutRole
from verl_like.workers.spec import WorkerSpec


class Weights:
    """One rank's end, or both. actor, rollout: None where the process does not host them."""

    def __init__(
        self,
        spec: WorkerSpec,
        process: ProcessInfo,
        env: RankEnv,
        actor: ActorRole | None,
        rollout: RolloutRole | None,
        residency: Residency,
    ) -> None:
        config = spec.config.actor_rollout_ref.rollout
        self._process, self._env, self._residency = process, env, residency
        self._bucket_bytes = config.update_weights_bucket_megabytes * 2**20
        self._deadline_s = min(DEADLINE_S, spec.config.trainer.rpc_timeout)
        apart = actor is None or rollout is None
        names = {"name": "trainer rank {}" if apart else "rank {}"}, {"name": "rollout rank {}" if apart else "rank {}"}
        self._source = self._receiver = None
        if actor is not None:
            dtype = actor.engine.compute_dtype
            self._source = WeightSource(actor.engine, process, prove=config.sync_probe, trainer_dtype=dtype, **names[0])
        if rollout is not None:
            self._receiver = WeightReceiver(rollout.engine, config, process, **names[1])
        self._sending: SendingEnd | None = None
        self._receiving: BroadcastReceiver | None = None

    def sync(self, version: int) -> SyncReport:
        """Both ends: bring the rollout engine to `version` of the trained weights, and prove it. WeightSyncError: it is
        unloaded."""
        assert self._source is not None and self._receiver is not None
        channel = InProcess()
        try:
            sent = self._source.send(version, self._receiver.wanted(), channel)
            report = verdict([sent], [self._receiver.receive(channel)])
        except WeightSyncError:
            self._receiver.unload()
            raise
        self._residency.enter(Phase.rollout)
        return report

    def listen(self, num_receivers: int) -> Way | None:
        """The sender's end, anew: how receivers reach it, on the first rank; None on the others."""
        if self._sending is not None:
            self._sending.close()
        self._sending = TakesPart()
        if self._process.rank != 0:
            return None
        sender = BroadcastSender(
            self._env.address,
            [f"rollout rank {rank}" for rank in range(num_receivers)],
            bucket_bytes=self._bucket_bytes,
            device=self._process.device,
            deadline_s=self._deadline_s,
        )
        self._sending = sender
        return sender.way

    def join(self, way: Way) -> None:
        """A receiver's end, anew."""
        if self._receiving is not None:
            self._receiving.close()
        self._receiving = BroadcastReceiver(way, self._process.rank, self._process.device)

    def wanted(self) -> Wanted:
        """What the sender has to know of this rank's engine."""
        assert self._receiver is not None
        return self._receiver.wanted()

    def send(self, version: int, wanted: Wanted) -> Sent:
        """Send the actor's weights as `version` to all that have joined."""
        assert self._source is not None and self._sending is not None
        return self._source.send(version, wanted, self._sending)

    def receive(self) -> Receipt:
        """Take what is sent, and prove it."""
        assert self._receiver is not None and self._receiving is not None
        receipt = self._receiver.receive(self._receiving)
        self._residency.enter(Phase.rollout)
        return receipt

    def unload(self) -> None:
        """After a verdict against an update that was well received here."""
        assert self._receiver is not None
        self._receiver.unload()

    def close(self) -> None:
        for end in (self._sending, self._receiving):
            if end is not None:
                end.close()
