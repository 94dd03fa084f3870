"""Transfer of the actor's weights to a rollout engine, as the role "weights" of a host.

They stay in the process where it hosts both; otherwise the actor's first rank broadcasts them to the engine's pool.
"""

from __future__ import annotations

from verl_like.cluster.worker_group import RankEnv
from verl_like.engine.train_engine import WeightChanges
from verl_like.parallel.dist import ProcessInfo
from verl_like.weight_sync.broadcast import BroadcastReceiver, BroadcastSender
from verl_like.weight_sync.channel import InProcess, ReceivingEnd, SendingEnd, TakesPart
from verl_like.weight_sync.header import Wanted
from verl_like.weight_sync.receiver import WeightReceiver
from verl_like.weight_sync.source import WeightSource
from verl_like.weight_sync.verdict import Receipt, Sent, SyncReport, verdict
from verl_like.weight_sync.wired import Way
from verl_like.workers.residency import Phase, Residency
from verl_like.workers.roles import ActorRole
from verl_like.workers.rollout import RolloutRole
from verl_like.workers.spec import WorkerSpec


def sync_within(source: WeightSource, receiver: WeightReceiver, version: int) -> SyncReport:
    """Do the driver's part (trainer/weights.py) for one process with both ends, where there is no driver to ask.

    Collective. Raises WeightSyncError on every rank; the engine is unloaded then.
    """
    channel = InProcess()
    sent = source.send(version, receiver.wanted(), channel)
    report = verdict([sent], [receiver.receive(channel)])
    source.arrived()
    return report


class WeightsRole:
    """The ends of the actor's way to rollout engines that are in this process: the actor sends, the engine receives.

    The driver calls `wanted` and `receive` where an engine is, `send` where the actor is; between pools `listen` and
    `join` before. Where both are here the channel is this process itself.
    """

    _source: WeightSource
    _receiver: WeightReceiver

    def __init__(
        self,
        spec: WorkerSpec,
        process: ProcessInfo,
        env: RankEnv,
        residency: Residency,
        *,
        actor: ActorRole | None,
        rollout: RolloutRole | None,
    ) -> None:
        self._spec, self._process, self._address, self._residency = spec, process, env.address, residency
        self._config = spec.config.actor_rollout_ref.rollout
        self._sending: SendingEnd = TakesPart()
        self._receiving: ReceivingEnd | None = None
        sender = "trainer rank {}"
        receiver = f"rollout replica {spec.replica} rank {{}}" if spec.replica else "rollout rank {}"
        if actor is not None and rollout is not None:
            sender = receiver = "rank {}"
            self._sending = self._receiving = InProcess()
            residency.restore = lambda: self._restore(actor.engine.changes)
        if actor is not None:
            prove, dtype = self._config.sync_probe, actor.engine.compute_dtype
            self._source = WeightSource(actor.engine, process, prove=prove, trainer_dtype=dtype, name=sender)
        if rollout is not None:
            self._receiver = WeightReceiver(rollout.engine, self._config, process, name=receiver)

    def listen(self, receivers: list[str]) -> Way | None:
        """Set the channel up, anew; return how these receivers reach it, on the first rank, None on the others."""
        self._sending.close()
        if self._process.rank != 0:
            return None
        self._sending = sender = BroadcastSender(
            self._address,
            receivers,
            bucket_bytes=self._config.update_weights_bucket_megabytes * 2**20,
            device=self._process.device,
            deadline_s=self._spec.config.trainer.rpc_timeout,  # the watchdog looks at each bucket
        )
        return sender.way

    def join(self, way: Way, first: int = 0) -> None:
        """Join the sender's channel. first: the receiver's number there of this group's first rank."""
        self.close()
        self._receiving = BroadcastReceiver(way, first + self._process.rank, self._process.device)

    def wanted(self) -> Wanted:
        """Return what the sender has to know of this rank's engine."""
        return self._receiver.wanted()

    def send(self, version: int, wanted: Wanted) -> Sent:
        """Send the actor's weights as `version` to all that have joined; within a process they leave as they are
        received."""
        return self._source.send(version, wanted, self._sending)

    def receive(self) -> Receipt:
        """Receive the weights that are sent, and prove them."""
        assert self._receiving is not None, "received before the channel was joined"
        receipt = self._receiver.receive(self._receiving)
        if not receipt.problems:
            if self._receiving is self._sending:
                self._source.arrived()
            self._residency.enter(Phase.rollout)
        return receipt

    def unload(self) -> None:
        """Drop the weights, after a verdict against an update that was well received here."""
        self._receiver.unload()

    def _restore(self, changes: WeightChanges) -> None:
        """Sync once more what the engine threw away when it went to sleep. changes: the trainer's count by now."""
        last = self._source.delivered
        assert last is not None, "an engine had weights that nobody synced"
        if last.changes != changes:
            raise RuntimeError(
                f"rollout.sleep_level=2 threw the rollout engine's weights of version {last.version} away, and the "
                "trainer has others by now: sync before anything is generated"
            )
        sync_within(self._source, self._receiver, last.version)

    def close(self) -> None:
        """Leave the channel."""
        self._sending.close()
        if self._receiving is not None:
            self._receiving.close()
            self._receiving = None
