"""The calls that wait for a worker: one queue for all of them, and behind it the calls of sessions.

    session "a":  call 1 (with a worker)   2, 3 wait in the session
    session "b":  call 1 (in the queue)    2 waits in the session: any worker may take the first
    later calls:  to the place of the worker that took the first, one at a time

A worker without a call takes the oldest of what it may take.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any


class Call:
    """Submitted payload and its future.

    alone: send it in a message of its own, to find out which call kills workers.
    tries: number of times it ran out of memory.
    """

    __slots__ = ("alone", "future", "group", "order", "payload", "session", "tries")

    def __init__(self, payload: Any, group: object) -> None:
        self.payload, self.group = payload, group  # calls of one group were submitted together
        self.future: Future[Any] = Future()
        self.session: Session | None = None
        self.order = 0  # smaller: submitted earlier
        self.alone = False
        self.tries = 0


class Session:
    """Calls that need what earlier ones left in the memory of a worker."""

    __slots__ = ("active", "ended", "key", "lost", "place", "waiting")

    def __init__(self, key: Hashable) -> None:
        self.key = key
        self.place: Place | None = None  # of the worker that has its state
        self.active = False  # one call is queued, or with the worker; the others wait here
        self.waiting: deque[Call] = deque()
        self.ended = False
        self.lost = ""  # why, once it is

    def __repr__(self) -> str:
        return f"session {self.key!r:.100}"


class Place:
    """One worker's sessions, and their calls that it may be sent."""

    __slots__ = ("calls", "sessions")

    def __init__(self) -> None:
        self.calls: deque[Call] = deque()
        self.sessions: set[Session] = set()


class Waiting:
    """All calls that no worker has, of which there are at most about `most`. Safe to use from any thread."""

    def __init__(self, most: int) -> None:
        self._most, self.num_calls = most, 0
        self._queue: deque[Call] = deque()
        self._sessions: dict[Hashable, Session] = {}
        self._orders = itertools.count()
        self._refusal: Exception | None = None
        self._lock = threading.Condition()  # told when there is room again, or no more calls are taken

    def put(self, calls: Sequence[Call], key: Hashable | None) -> str:
        """Queue calls as soon as there is room; raises what `refuse` was told. Returns "", or why their session is
        lost, and then queues nothing."""
        with self._lock:
            self._lock.wait_for(lambda: self.num_calls < self._most or self._refusal is not None)
            if self._refusal is not None:
                raise self._refusal
            session = None if key is None else self._sessions.setdefault(key, Session(key))
            for call in calls:
                call.session, call.order = session, next(self._orders)
            if session is not None and session.lost:
                return session.lost
            self.num_calls += len(calls)
            if session is None:
                self._queue.extend(calls)
            else:
                session.waiting.extend(calls)
                self._advance(session)
            return ""

    def put_back(self, calls: Sequence[Call]) -> None:
        """Queue calls again, before all others."""
        with self._lock:
            self.num_calls += len(calls)
            for call in reversed(calls):
                self._line(call.session).appendleft(call)

    def take(self, place: Place, room: int, *, idle: bool, together: bool, share: int) -> list[Call]:
        """Remove and return the calls that the worker of `place` is to be sent. A call of a session comes alone.

        room: most calls.
        idle: the worker has nothing to do.
        together: take all calls of a group.
        share: number of parts of the queue of which the worker gets one.
        """
        with self._lock:
            own = place.calls and (not self._queue or place.calls[0].order < self._queue[0].order)
            if own:
                calls = [place.calls.popleft()]
            elif together:
                group = self._queue[0].group if self._queue else None
                calls = [self._queue.popleft() for _ in range(sum(call.group is group for call in self._queue))]
            else:
                # Batches shrink towards the end of the queue, so that the workers finish together.
                calls = self._head(min(room, max(1, len(self._queue) // share)), idle=idle)
            self.num_calls -= len(calls)
            if calls:
                self._lock.notify_all()
            return calls

    def _head(self, size: int, *, idle: bool) -> list[Call]:
        calls: list[Call] = []
        while self._queue and len(calls) < size:
            call = self._queue[0]
            if (call.alone and not idle) or (calls and (call.alone or call.session is not None)):
                break  # to an idle worker, and with nothing else
            calls.append(self._queue.popleft())
            if call.alone or call.session is not None:
                break
        return calls

    def sent(self, call: Call, place: Place) -> None:
        """Note that the worker of `place` has the call, and with it the call's session from now on."""
        with self._lock:
            if call.session is not None:
                call.session.place = place
                place.sessions.add(call.session)

    def done(self, call: Call) -> None:
        """Note that the call has its outcome: the next one of its session may go."""
        with self._lock:
            if call.session is not None:
                call.session.active = False
                self._advance(call.session)

    def end_session(self, key: Hashable) -> None:
        """Forget a session: its last calls still run, a later one with this key begins another."""
        with self._lock:
            session = self._sessions.pop(key, None)
            if session is not None:
                session.ended = True
                self._advance(session)

    def lose(self, place: Place, why: str) -> list[Call]:
        """Mark the sessions of `place`, whose worker is gone, as lost; remove and return their calls."""
        with self._lock:
            calls = [*place.calls, *(call for session in place.sessions for call in session.waiting)]
            place.calls.clear()
            for session in place.sessions:
                session.waiting.clear()
                session.lost = f"{session} is lost: {why}"
            self.num_calls -= len(calls)
            self._lock.notify_all()
            return calls

    def refuse(self, error: Exception, *, unless_refused: bool = False) -> None:
        """Take no more calls: `put` raises `error` from now on, also where it waits."""
        with self._lock:
            if self._refusal is None or not unless_refused:
                self._refusal = error
            self._lock.notify_all()

    def drain(self, at_work: Iterable[Call], places: Iterable[Place]) -> list[Call]:
        """Collect all calls that have no outcome yet, those at work among them."""
        with self._lock:
            calls = [*self._queue, *at_work, *(call for place in places for call in place.calls)]
            sessions = {call.session for call in calls if call.session is not None}
            return calls + [call for session in sessions for call in session.waiting]

    def _line(self, session: Session | None) -> deque[Call]:
        return self._queue if session is None or session.place is None else session.place.calls

    def _advance(self, session: Session) -> None:
        if not session.active and session.waiting:
            session.active = True
            self._line(session).append(session.waiting.popleft())
        elif session.ended and not session.active and session.place is not None:
            session.place.sessions.discard(session)
