"""The channels between processes, with both ends in threads here: what arrives, and what is said when nothing does."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from verl_like.weight_sync import wired
from verl_like.weight_sync.broadcast import BroadcastReceiver, BroadcastSender
from verl_like.weight_sync.channel import ChannelError, InProcess, Stream, TakesPart, filled, room_for, taken_out
from verl_like.weight_sync.header import Header
from verl_like.weight_sync.ipc import IpcReceiver, IpcSender
from verl_like.weight_sync.wired import WiredReceiver, WiredSender

CPU = torch.device("cpu")
RUN_ID = f"channels{os.getpid()}"
BUCKET = 256
SENT = {
    "a": torch.arange(20.0).reshape(4, 5),
    "b": torch.ones(3, dtype=torch.bfloat16),
    "scalar": torch.tensor(7.0),
    "large": torch.randn(40, 10, generator=torch.Generator().manual_seed(0)),
    "none": torch.zeros(0, 4),
    "view": torch.arange(60.0).reshape(6, 10).T,
    **{f"c{i}": torch.full((9,), float(i)) for i in range(20)},
}
HEADER = Header(
    version=3,
    form="merged",
    dtype=torch.float32,
    shapes={name: tensor.shape for name, tensor in SENT.items()},
    checksums=None,
)
KINDS = ["ipc", "broadcast"]
Make = Callable[..., tuple[WiredSender, list[WiredReceiver]]]


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as made:
        yield made


@pytest.fixture
def make() -> Iterator[Make]:
    """A sender and who has joined it."""
    ends: list[Any] = []

    def made(kind: str, num: int = 1, joined: int | None = None, **settings: Any) -> Any:
        settings = {"bucket_bytes": BUCKET, "device": CPU, "deadline_s": 20.0} | settings
        names = [f"rollout rank {i}" for i in range(num)]
        if kind == "ipc":
            sender: Any = IpcSender(names[0], run_id=RUN_ID, **settings)
        else:
            sender = BroadcastSender("127.0.0.1", names, **settings)
        ends.append(sender)
        receiver: Any = IpcReceiver if kind == "ipc" else BroadcastReceiver
        receivers = [receiver(sender.way, rank, CPU) for rank in range(num if joined is None else joined)]
        ends.extend(receivers)
        return sender, receivers

    yield made
    for end in ends:
        end.close()
    assert not list(Path("/dev/shm").glob(f"*{RUN_ID}*"))


def taken(receiver: WiredReceiver) -> tuple[Header, dict[str, Tensor]]:
    header, stream = receiver.receive()
    return header, dict(stream)


def problem(future: Future[Any]) -> str:
    error = future.exception(30)
    assert isinstance(error, ChannelError), error
    return str(error)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_sent_arrives_twice(kind: str, make: Make, pool: ThreadPoolExecutor) -> None:
    """All tensors are kept: no later bucket may change them."""
    sender, receivers = make(kind, 1 if kind == "ipc" else 2)
    for _ in range(2):
        done = [pool.submit(taken, receiver) for receiver in receivers]
        sender.send(HEADER, iter(SENT.items()))
        for future in done:
            header, got = future.result(30)
            assert header == HEADER
            assert list(got) == list(SENT)
            for name, tensor in SENT.items():
                assert got[name].dtype == tensor.dtype and torch.equal(got[name], tensor), name


@pytest.mark.parametrize("kind", KINDS)
def test_a_sender_that_fails_says_why(kind: str, make: Make, pool: ThreadPoolExecutor) -> None:
    def stream() -> Stream:
        yield from list(SENT.items())[:6]
        raise OSError("shard lost")

    sender, (receiver,) = make(kind)
    done = pool.submit(taken, receiver)
    with pytest.raises(OSError, match="shard lost"):
        sender.send(HEADER, stream())
    assert problem(done) == "trainer rank 0 failed: OSError: shard lost"
    with pytest.raises(ChannelError, match="set it up anew"):
        sender.send(HEADER, iter(SENT.items()))
    sender, (receiver,) = make(kind)
    done = pool.submit(taken, receiver)
    sender.send(HEADER, iter(SENT.items()))
    assert len(done.result(30)[1]) == len(SENT)


@pytest.mark.parametrize("kind", [*KINDS, "inproc"])
def test_a_sender_with_nothing_to_send(kind: str, make: Make) -> None:
    if kind == "inproc":
        sender: Any = InProcess()
        receiver = sender
    else:
        sender, (receiver,) = make(kind)
    sender.fail("no tensor has changed")
    with pytest.raises(ChannelError, match="no tensor has changed"):
        receiver.receive()


@pytest.mark.parametrize("kind", KINDS)
def test_a_truncated_bucket(kind: str, make: Make, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    def truncated(*given: Any, **how: Any) -> Iterator[tuple[list[Any], Tensor]]:
        for entries, data in filled(*given, **how):
            yield entries, data[:-4]

    monkeypatch.setattr(wired, "filled", truncated)
    sender, (receiver,) = make(kind)
    done = pool.submit(taken, receiver)
    with pytest.raises(ChannelError, match=r"rollout rank 0 failed: .* ends before scalar, which ends at 10\d"):
        sender.send(HEADER, iter(SENT.items()))
    assert "rollout rank 0: a bucket of" in problem(done)


@pytest.mark.parametrize("kind", KINDS)
def test_who_never_joined_is_named(kind: str, make: Make, pool: ThreadPoolExecutor) -> None:
    num = 1 if kind == "ipc" else 2
    sender, receivers = make(kind, num, joined=num - 1, deadline_s=0.5)
    done = [pool.submit(taken, receiver) for receiver in receivers]
    with pytest.raises(ChannelError, match=rf"trainer rank 0 waited 0\.\d s for rollout rank {num - 1}, .*not joined"):
        sender.send(HEADER, iter(SENT.items()))
    for future in done:
        assert f"for rollout rank {num - 1}" in problem(future)


@pytest.mark.parametrize("kind", KINDS)
def test_a_sender_that_says_nothing(kind: str, make: Make) -> None:
    _, (receiver,) = make(kind, deadline_s=0.5)
    with pytest.raises(ChannelError, match=r"rollout rank 0 waited 0\.\d s for trainer rank 0: no header had come"):
        receiver.receive()


def test_of_several_receivers_the_one_that_stands_still_is_named(make: Make, pool: ThreadPoolExecutor) -> None:
    sender, receivers = make("broadcast", 3, deadline_s=2.0)

    def stands_still() -> None:
        _, stream = receivers[1].receive()
        for _ in range(5):
            next(stream)
        stop.wait(20)

    stop = threading.Event()
    others = [pool.submit(taken, receivers[0]), pool.submit(taken, receivers[2])]
    still = pool.submit(stands_still)
    began = time.monotonic()
    with pytest.raises(ChannelError, match=r"waited 1\.\d s for rollout rank 1: \d+ of 26 tensors had been taken"):
        sender.send(HEADER, iter(SENT.items()))
    assert time.monotonic() - began < 6
    for future in others:  # they are told
        assert "rollout rank 1" in problem(future)
    stop.set()
    still.result(5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_receiver_that_leaves(kind: str, make: Make, pool: ThreadPoolExecutor) -> None:
    sender, (receiver,) = make(kind)

    def leaves() -> None:
        _, stream = receiver.receive()
        next(stream)
        receiver.close()

    done = pool.submit(leaves)
    with pytest.raises(ChannelError, match=r"rollout rank 0 is gone, trainer rank 0 lost it after 0\.\d s: 0 of 26"):
        sender.send(HEADER, iter(SENT.items()))
    done.result(5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_sender_that_leaves(kind: str, make: Make, pool: ThreadPoolExecutor) -> None:
    sender, (receiver,) = make(kind)

    def stream() -> Stream:
        for name, tensor in SENT.items():
            yield name, tensor
            if name == "c5":
                sender.close()

    done = pool.submit(taken, receiver)
    with pytest.raises(ChannelError):
        sender.send(HEADER, stream())
    assert "trainer rank 0 is gone" in problem(done) or "failed" in problem(done)


def test_ranks_without_receivers_take_part() -> None:
    stream = iter(SENT.items())
    TakesPart().send(HEADER, stream)
    assert not list(stream)


def test_no_room_for_a_bucket(make: Make, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    sender, (receiver,) = make("ipc")
    done = pool.submit(taken, receiver)
    with pytest.raises(OSError, match=r"no room for a bucket .* lower actor_rollout_ref.rollout.update_weights_bucket"):
        sender.send(HEADER, iter(SENT.items()))
    assert "has no room" in problem(done)


def test_a_bucket_is_gone_when_a_larger_one_is_made(
    make: Make, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sender has two at a time; the receiver alone may still see the old one, until it is told of the new one."""
    own, seen = os.posix_fallocate, list[int]()

    def counting(*arguments: Any) -> None:
        maps = Path("/proc/self/maps").read_text().splitlines()
        removed = Counter(line.split(maxsplit=5)[5] for line in maps if RUN_ID in line and "(deleted)" in line)
        seen.append(max(removed.values(), default=0))
        own(*arguments)

    monkeypatch.setattr(os, "posix_fallocate", counting)
    sender, (receiver,) = make("ipc")
    stream = {f"{i}": torch.zeros(60) for i in range(4)} | {"larger": torch.zeros(5000)}
    done = pool.submit(taken, receiver)
    sender.send(replace(HEADER, shapes={name: tensor.shape for name, tensor in stream.items()}), iter(stream.items()))
    assert len(done.result(30)[1]) == len(stream)
    assert seen == [0, 0, 1]  # mappings of one removed file


def test_buckets_are_as_full_as_they_can_be() -> None:
    sizes: list[int] = []

    def memory(size: int) -> Tensor:
        sizes.append(size)
        return torch.zeros(size, dtype=torch.uint8)

    groups = []
    for entries, data in filled(iter(SENT.items()), BUCKET, memory, whole=False):
        groups.append([entry.name for entry in entries])
        assert all(torch.equal(tensor, SENT[name]) for name, tensor in taken_out(entries, data))
    assert groups[:3] == [["a", "b", "scalar"], ["large"], ["none", "view"]]
    assert groups[3:] == [[f"c{i}" for i in range(5 * k, 5 * k + 5)] for k in range(4)]
    assert sizes == [BUCKET, 1600, *[BUCKET] * 5]
    assert room_for([torch.Size([9])] * 5, torch.float32) == 240 <= BUCKET
    (one, _), (own, data), *_ = filled(iter(SENT.items()), BUCKET, memory, whole=True)
    assert (len(one), own[0].name, data.data_ptr()) == (3, "large", SENT["large"].data_ptr())
