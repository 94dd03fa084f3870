"""A listener lets one caller in; others, and those that come too late, are cut and do not wait for ever."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from verl_like.rollout import wire
from verl_like.rollout.wire import Socket, Wire

LIMIT_S = 10.0


def end_of(caller: Wire) -> BaseException | None:
    """The error of the next reading, which is given up after a time; None for a message."""
    caller.limit(LIMIT_S / 5)
    try:
        caller.receive()
    except (EOFError, OSError) as error:
        return error
    return None


def is_cut(error: BaseException | None) -> bool:
    return error is not None and not isinstance(error, TimeoutError | BlockingIOError)


def test_a_caller_whose_handshake_ends_while_the_listener_closes_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller's end of the handshake is through before the listener's."""
    goes_on, own = threading.Event(), Wire.__init__

    def slowly(self: Wire, *given: Any, asks_first: bool) -> None:
        own(self, *given, asks_first=asks_first)
        if asks_first:
            assert goes_on.wait(LIMIT_S)

    monkeypatch.setattr(wire.Wire, "__init__", slowly)
    listener = Socket("127.0.0.1")
    listener.listen()
    caller = Wire.to(listener.address, listener.authkey)
    with ThreadPoolExecutor() as pool:
        accepting = pool.submit(listener.accept, LIMIT_S)
        listener.close()
        with pytest.raises(OSError):
            accepting.result(LIMIT_S)
        goes_on.set()
    assert is_cut(end_of(caller))


def test_a_second_caller_that_knows_the_key_is_cut() -> None:
    listener = Socket("127.0.0.1")
    listener.listen()
    callers = [Wire.to(listener.address, listener.authkey) for _ in range(2)]
    accepted = listener.accept(LIMIT_S)
    accepted.send("in")
    ends = [end_of(caller) for caller in callers]
    assert sorted(end is None for end in ends) == [False, True]
    assert all(end is None or is_cut(end) for end in ends)
