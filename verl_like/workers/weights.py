"""Transfer of the actor's weights to a rollout engine, as the role "weights" of a host.

They stay in the process where it hosts both; otherwise the actor's first rank broadcasts them to the engine's pool.
"""

from __future__ import annotations

from verl_like.cluster.worker_group import RankEnv
from verl_like.engine.train_engine import WeightChanges
from verl_like.parallel.dist import ProcessInfo
from verl_like.weight_sync.broadcast import BroadcastReceiver, BroadcastSender
from verl_like.weight_sync.channel import SendingEnd, TakesPart
from verl_like.weight_sync.header import Wanted
from verl_like.weight_sync.receiver import WeightReceiver
from verl_like.weight_sync.source import WeightSource
from verl_like.weight_sync.sync import SyncReport, WeightSync
from verl_like.weight_sync.verdict import Receipt, Sent
from verl_like.weight_sync.wired import Way
from verl_like.workers.residency import Phase, Residency
from verl_like.workers.roles import ActorRole
from verl_like.workers.rollout import RolloutRole
from verl_like.workers.spec import WorkerSpec


class WeightsWithin:
    """Transfer in a process with the actor and the rollout engine."""

    def __init__(
        self, spec: WorkerSpec, process: ProcessInfo, actor: ActorRole, rollout: RolloutRole, residency: Residency
    ) -> None:
        config, dtype = spec.config.actor_rollout_ref.rollout, actor.engine.compute_dtype
        self._sync = WeightSync(actor.engine, rollout.engine, config, process, trainer_dtype=dtype)
        self._actor, self._residency = actor.engine, residency
        self._synced: tuple[int, WeightChanges] | None = None  # version, the trainer's count of its updates
        residency.restore = self._restore

    def sync(self, version: int) -> SyncReport:
        """Bring the rollout engine to `version` of the trained weights, and prove it."""
        report = self._sync.sync(version)
        self._synced = version, self._actor.changes
        self._residency.enter(Phase.rollout)
        return report

    def _restore(self) -> None:
        assert self._synced is not None, "an engine had weights that nobody synced"
        version, changes = self._synced
        if changes != self._actor.changes:
            raise RuntimeError(
                f"rollout.sleep_level=2 threw the rollout engine's weights of version {version} away, and the trainer "
                "has others by now: sync before anything is generated"
            )
        self._sync.sync(version)

    def close(self) -> None:
        """Do nothing: there is nothing to free."""


class WeightsSender:
    """Sender in a process with the actor, whose rollout engines are in another pool."""

    def __init__(self, spec: WorkerSpec, process: ProcessInfo, env: RankEnv, actor: ActorRole) -> None:
        config, dtype = spec.config.actor_rollout_ref.rollout, actor.engine.compute_dtype
        self._source = WeightSource(actor.engine, process, prove=config.sync_probe, trainer_dtype=dtype)
        self._process, self._address = process, env.address
        self._bucket_bytes = config.update_weights_bucket_megabytes * 2**20
        self._deadline_s = spec.config.trainer.rpc_timeout  # the watchdog looks at each bucket
        self._channel: SendingEnd = TakesPart()

    def listen(self, receivers: list[str]) -> Way | None:
        """Set the channel up, anew; return how these receivers reach it, on the first rank, None on the others."""
        self._channel.close()
        if self._process.rank != 0:
            return None
        sender = BroadcastSender(
            self._address,
            receivers,
            bucket_bytes=self._bucket_bytes,
            device=self._process.device,
            deadline_s=self._deadline_s,
        )
        self._channel = sender
        return sender.way

    def send(self, version: int, wanted: Wanted) -> Sent:
        """Send the actor's weights as `version` to all that have joined."""
        return self._source.send(version, wanted, self._channel)

    def close(self) -> None:
        self._channel.close()


class WeightsReceiver:
    """Receiver in a process with a rollout engine, whose actor is in another pool."""

    def __init__(self, spec: WorkerSpec, process: ProcessInfo, rollout: RolloutRole, residency: Residency) -> None:
        name = f"rollout replica {spec.replica} rank {{}}" if spec.replica else "rollout rank {}"
        self._receiver = WeightReceiver(rollout.engine, spec.config.actor_rollout_ref.rollout, process, name=name)
        self._process, self._residency = process, residency
        self._channel: BroadcastReceiver | None = None

    def join(self, way: Way, first: int = 0) -> None:
        """Join the sender's channel. first: the receiver's number there of this group's first rank."""
        self.close()
        self._channel = BroadcastReceiver(way, first + self._process.rank, self._process.device)

    def wanted(self) -> Wanted:
        """Return what the sender has to know of this rank's engine."""
        return self._receiver.wanted()

    def receive(self) -> Receipt:
        """Receive the weights that are sent, and prove them."""
        assert self._channel is not None, "received before the channel was joined"
        receipt = self._receiver.receive(self._channel)
        self._residency.enter(Phase.rollout)
        return receipt

    def unload(self) -> None:
        """Drop the weights, after a verdict against an update that was well received here."""
        self._receiver.unload()

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None
