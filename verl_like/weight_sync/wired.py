"""A channel between processes: words on a wire to each receiver (rollout/wire.py), bytes as ipc.py or broadcast.py do.

    sender                                       receiver
    header  ─────────────────────────────────>   what will come
    bucket: names, shapes, places  ──────────>   and its bytes
    ...     <──────────────── taken: so many     two buckets are on their way at most
    end, or failed: why  ────────────────────>   and the same back, from a receiver that cannot go on

Nothing is waited for longer than until the deadline of the transfer; then it ends with who waited for whom.
"""

from __future__ import annotations

import logging
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from verl_like.heartbeat import span
from verl_like.rollout.wire import Socket, Wire
from verl_like.weight_sync.channel import DEADLINE_S, ChannelError, Stream, filled, room_for, taken_out
from verl_like.weight_sync.header import Header

logger = logging.getLogger(__name__)

_GRACE_S = 1.0  # at most, for what a peer has said already when another one failed, and for telling the others
_NUM_SLOTS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """Addresses by which the receivers reach a sender and join its channel. Picklable.

    Args:
        sender: its name, for messages.
        receivers: their names, for messages.
        wires: address and key of each receiver's.
        store: the meeting place of the process group of a broadcast.
    """

    sender: str
    receivers: tuple[str, ...]
    wires: tuple[tuple[tuple[str, int], bytes], ...]
    deadline_s: float
    store: tuple[str, int] | None = None


class Deadline:
    """Deadline of one transfer. A sender's is somewhat earlier, so that receivers hear its account before their own."""

    def __init__(self, seconds: float, *, of_sender: bool = False) -> None:
        self._began = time.monotonic()
        self.grace = min(_GRACE_S, seconds / 8)
        self._seconds = seconds - 2 * self.grace * of_sender

    @property
    def waited(self) -> float:
        """Seconds since the transfer began."""
        return time.monotonic() - self._began

    @property
    def left(self) -> float:
        """Seconds that remain; 0 when it has passed."""
        return max(0.0, self._seconds - self.waited)


class Peer:
    """The other end of a wire."""

    def __init__(self, wire: Wire, name: str, own_name: str) -> None:
        self.name = name
        self.num_buckets = self.num_tensors = 0  # it has taken, of this transfer
        self._wire, self._own_name = wire, own_name

    def say(self, deadline: Deadline, state: str, *message: Any) -> None:
        """Raises ChannelError when it is gone or does not listen."""
        try:
            self._wire.limit(deadline.left)
            self._wire.send(message)
        except (OSError, EOFError) as error:
            raise self.lost(error, deadline, state) from error

    def hear(self, deadline: Deadline, state: str) -> tuple[Any, ...]:
        """Receive the peer's next message.

        Raises ChannelError when it is gone, says nothing, or says that it has failed.
        """
        try:
            self._wire.limit(deadline.left)
            with span("weights", whom=self.name):
                message = self._wire.receive()
        except (OSError, EOFError) as error:
            raise self.lost(error, deadline, state) from error
        if message[0] == "failed":
            raise ChannelError(f"{self.name} failed: {message[1]}")
        return message

    def lost(self, error: BaseException, deadline: Deadline, state: str) -> ChannelError:
        """Error of a wait that has come to nothing."""
        if isinstance(error, BlockingIOError):
            return ChannelError(f"{self._own_name} waited {deadline.waited:.1f} s for {self.name}: {state}")
        return ChannelError(f"{self.name} is gone, {self._own_name} lost it after {deadline.waited:.1f} s: {state}")

    def close(self) -> None:
        self._wire.close()


class WiredSender:
    """Sender of one channel, which listens for its receivers: `way` is what they need to join.

    A subclass has `_give` and, where a tensor larger than a bucket can go as it is, `_whole`.

    Args:
        host: this machine's address, as receivers reach it.
        receivers: their names, in the order of their ranks.
        bucket_bytes: of rollout.update_weights_bucket_megabytes.
        name: of this process.
        deadline_s: of one transfer.
    """

    _whole = False

    def __init__(
        self,
        host: str,
        receivers: list[str],
        *,
        bucket_bytes: int,
        device: torch.device,
        name: str = "trainer rank 0",
        deadline_s: float = DEADLINE_S,
    ) -> None:
        self._host, self._name, self._device = host, name, device
        self._bucket_bytes, self._deadline_s = bucket_bytes, deadline_s
        self._sockets = [Socket(host) for _ in receivers]
        for socket in self._sockets:
            socket.listen()
        self._names, self._peers = receivers, list[Peer]()
        self._closed = False
        self._total = self._num_buckets = 0
        self._slots: list[Tensor | None] = [None] * _NUM_SLOTS
        self.way = Way(
            sender=name,
            receivers=tuple(receivers),
            wires=tuple((socket.address, socket.authkey) for socket in self._sockets),
            deadline_s=deadline_s,
            store=self._meeting_place(),
        )

    def send(self, header: Header, stream: Stream) -> None:
        """Send one update; returns when all receivers have taken it.

        Raises ChannelError, or what the stream raises; receivers are told, and the channel is closed.
        """
        deadline = Deadline(self._deadline_s, of_sender=True)
        self._total, self._num_buckets = len(header.shapes), 0
        try:
            self._connect(deadline)
            self._tell(deadline, "header", header)
            self._prepare(deadline)
            self._send_buckets(header, stream, deadline)
        except ChannelError as error:
            self._give_up(str(error))
            raise
        except Exception as error:
            self._give_up(f"{type(error).__name__}: {error}")
            raise
        finally:
            self._slots = [None] * _NUM_SLOTS
            self._release()

    def fail(self, reason: str) -> None:
        """Tell the receivers why no update comes, and close the channel."""
        with suppress(ChannelError):  # who is not there needs no reason
            self._connect(Deadline(self._deadline_s))
        self._give_up(reason)

    def close(self) -> None:
        """Close the channel for good, with its sockets and wires."""
        self._closed = True
        for end in [*self._sockets, *self._peers]:
            end.close()

    def _connect(self, deadline: Deadline) -> None:
        if self._closed:
            raise ChannelError(f"{self._name}: the channel is closed, since a transfer broke off: set it up anew")
        while len(self._peers) < len(self._names):
            name = self._names[len(self._peers)]
            try:
                wire = self._sockets[len(self._peers)].accept(max(deadline.left, 1e-3))
            except OSError as error:
                raise ChannelError(
                    f"{self._name} waited {deadline.waited:.1f} s for {name}, which has not joined the channel"
                ) from error
            self._peers.append(Peer(wire, name, self._name))
        for peer in self._peers:
            peer.num_buckets = peer.num_tensors = 0

    def _send_buckets(self, header: Header, stream: Stream, deadline: Deadline) -> None:
        room = min(self._bucket_bytes, room_for(header.shapes.values(), header.dtype))

        def memory(size: int) -> Tensor:
            self._await_taken(self._num_buckets + 1 - _NUM_SLOTS, deadline)
            place = self._num_buckets % _NUM_SLOTS
            slot = self._slots[place]
            if slot is None or slot.numel() < size:
                self._slots[place] = slot = None  # let go of the old one first
                self._slots[place] = slot = self._memory(place, size)
            return slot

        for entries, data in filled(stream, room, memory, whole=self._whole):
            self._num_buckets += 1
            self._tell(deadline, "bucket", entries, data.numel(), self._place())
            self._give(data, deadline)
            del data
        self._tell(deadline, "end")
        self._await_taken(self._num_buckets, deadline)

    def _await_taken(self, num_buckets: int, deadline: Deadline) -> None:
        """Until every receiver has taken so many buckets of this transfer."""
        for peer in self._peers:
            while peer.num_buckets < num_buckets:
                _, peer.num_buckets, peer.num_tensors = peer.hear(deadline, self._state(peer))

    def _tell(self, deadline: Deadline, *message: Any) -> None:
        for peer in self._peers:
            peer.say(deadline, self._state(peer), *message)

    def _state(self, peer: Peer) -> str:
        return f"{peer.num_tensors} of {self._total} tensors had been taken"

    def _undelivered(self, error: BaseException, deadline: Deadline) -> ChannelError:
        """Error of the last bucket, whose bytes did not go out: it names a receiver that has not taken them."""
        found = []
        for peer in self._peers:
            grace = Deadline(deadline.grace)
            try:
                while peer.num_buckets < self._num_buckets:
                    _, peer.num_buckets, peer.num_tensors = peer.hear(grace, self._state(peer))
            except ChannelError as lost:
                waited = isinstance(lost.__cause__, BlockingIOError)
                found.append(peer.lost(BlockingIOError(), deadline, self._state(peer)) if waited else lost)
        return found[0] if found else ChannelError(f"{self._name} could not send to {self._names}: {error}")

    def _give_up(self, reason: str) -> None:
        for peer in self._peers:
            with suppress(ChannelError):  # it is gone, or is the one who does not listen
                peer.say(Deadline(_GRACE_S / 8), "", "failed", reason)
        self.close()

    def _meeting_place(self) -> tuple[str, int] | None:
        """Meeting place of a process group of both sides; None for a channel that has none."""
        return None

    def _prepare(self, deadline: Deadline) -> None:
        """Before the first bucket of a transfer."""

    def _memory(self, place: int, size: int) -> Tensor:
        """Memory of `size` bytes for every second bucket."""
        return torch.empty(size, dtype=torch.uint8, device=self._device)

    def _place(self) -> Any:
        """Place of the last bucket, which is written now, as the receivers must know it."""

    def _give(self, data: Tensor, deadline: Deadline) -> None:
        """Send the bytes of a bucket that was told of, where telling does not do."""

    def _release(self) -> None:
        """After a transfer."""


class WiredReceiver:
    """Receiver of one channel, which it joins. A subclass has `_get`. rank: this receiver's place in the way."""

    def __init__(self, way: Way, rank: int, device: torch.device) -> None:
        self._way, self._rank, self._device = way, rank, device
        self._name = way.receivers[rank]
        try:
            wire = Wire.to(*way.wires[rank])
        except (OSError, EOFError) as error:
            raise ChannelError(f"{self._name} cannot reach {way.sender} at {way.wires[rank][0]}: {error}") from error
        self._peer = Peer(wire, way.sender, self._name)

    def receive(self) -> tuple[Header, Stream]:
        """Wait for the next update; read the stream to its end.

        Raises ChannelError, as the stream does; the channel is closed then.
        """
        deadline = Deadline(self._way.deadline_s)
        try:
            _, header = self._peer.hear(deadline, "no header had come")
            self._prepare(deadline)
        except Exception as error:
            raise self._failed(error) from error
        return header, self._stream(header, deadline)

    def fail(self, reason: str) -> None:
        """Tell the sender why the stream is not read, and close the channel."""
        self._failed(ChannelError(reason))

    def close(self) -> None:
        """Close the wire to the sender."""
        self._peer.close()

    def _stream(self, header: Header, deadline: Deadline) -> Stream:
        num_buckets = num_tensors = 0
        try:
            while True:
                state = f"{num_tensors} of {len(header.shapes)} tensors had come"
                match self._peer.hear(deadline, state):
                    case ("end",):
                        return
                    case ("bucket", entries, size, place):
                        try:
                            data = self._get(size, place, deadline)
                        except (RuntimeError, OSError) as error:
                            raise self._undelivered(error, deadline, state) from error
                        for name, tensor in taken_out(entries, data):
                            yield name, self._own(tensor)
                            del tensor
                        del data
                        self._taken()
                        num_buckets, num_tensors = num_buckets + 1, num_tensors + len(entries)
                        self._peer.say(deadline, state, "taken", num_buckets, num_tensors)
        except Exception as error:  # not GeneratorExit: whoever closes the stream says why itself
            raise self._failed(error) from error
        finally:
            self._release()

    def _failed(self, error: Exception) -> ChannelError:
        """Tell the sender, and leave."""
        known = error if isinstance(error, ChannelError) else ChannelError(f"{self._name}: {error}")
        with suppress(ChannelError):
            self._peer.say(Deadline(_GRACE_S), "", "failed", str(known))
        self.close()
        return known

    def _undelivered(self, error: Exception, deadline: Deadline, state: str) -> ChannelError:
        """Error of a bucket whose bytes did not come: the sender's own account, if it gives one."""
        try:
            self._peer.hear(Deadline(_GRACE_S), state)
        except ChannelError as lost:
            if not isinstance(lost.__cause__, BlockingIOError):
                return lost
        if not deadline.left:
            return self._peer.lost(BlockingIOError(), deadline, state)
        return ChannelError(f"{self._name} did not get the bytes of a bucket from {self._peer.name} ({error}): {state}")

    def _prepare(self, deadline: Deadline) -> None:
        """After the header."""

    def _get(self, size: int, place: Any, deadline: Deadline) -> Tensor:
        """The bytes of a bucket."""
        raise NotImplementedError

    def _own(self, tensor: Tensor) -> Tensor:
        """A tensor that stays as it is when the next buckets come."""
        return tensor

    def _taken(self) -> None:
        """Before the sender is told that a bucket may be used again."""

    def _release(self) -> None:
        """After a transfer."""
