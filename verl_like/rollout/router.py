"""Router of requests to many replicas, which makes them one client: which request goes where, and when.

A request waits in a queue, by (priority, arrival), until a replica has a free place. Requests of one session or group
go to the replica that has their beginning in its cache; others to the one with the least to do, in tokens: prompt +
what is sampled + what is expected to come (the mean length of ended responses of the same source).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from heapq import heapify, heappop, heappush
from operator import attrgetter

from verl_like import live_metrics
from verl_like.rollout.client import Events, Link, Occupancy
from verl_like.rollout.rollout_engine import Completion, GenerationRequest, ResumeError, RolloutError, Sampled

_MAX_HOMES = 100_000  # sessions remembered; the longest unused is forgotten


@dataclass(slots=True, eq=False)
class _Entry:
    """Request in flight. `replica`: the one it runs on, or waits for."""

    request: GenerationRequest  # as its replica gets it, with the tokens to resume from
    place: tuple[int, int]  # (priority, arrival)
    came_with: Sampled  # the tokens to resume from at first
    so_far: Sampled  # the last that is known of its tokens
    future: Future[Completion] = field(default_factory=Future)
    replica: _Replica | None = None
    tokens: int = 0  # its part of the replica's load
    aborted: bool = False
    ended: bool = False

    def abort(self) -> Completion:
        return Completion(request_id=self.request.request_id, sampled=self.so_far, finish_reason="abort")


_Queue = list[tuple[tuple[int, int], _Entry]]  # a heap
_Result = tuple[_Entry, "Completion | Exception"]


@dataclass(slots=True, eq=False)
class _Replica:
    link: Link
    number: int  # in the order in which they came
    running: dict[str, _Entry] = field(default_factory=dict)
    queue: _Queue = field(default_factory=list)  # what must run here
    load: int = 0  # tokens
    alive: bool = True
    held: bool = False
    listed: int | None = None  # its load in the router's heap of loads: not above the real one


class Router:
    """RolloutClient over the replicas that `links` lead to.

    Args:
        links: one for each replica.
        max_running_requests: most requests of one replica (None: any number); the rest is queued here, where it can
            still go anywhere.
        requeue: requests under way on a replica that dies go on elsewhere, from the last tokens seen (by `snapshot`, or
            in the link's own reports), or begin anew where the engine raises ResumeError for them; otherwise they fail
            with RolloutError, which names the replica.
        session_of: names a request's session, or group, whose requests share their beginnings; None: it is alone.
        source_of: names what responses of similar length have in common; None: nothing, and max_tokens are expected.
        deterministic: a request's replica, and the order of requests submitted while held, follow from the list of
            requests alone. A round is what is submitted between two calls of `hold`; load is what the round has brought
            so far, whatever has ended meanwhile, expected lengths are those known as it began, and sessions choose
            their replica anew.
    """

    def __init__(
        self,
        links: Iterable[Link],
        *,
        max_running_requests: int | None,
        requeue: bool = False,
        deterministic: bool = False,
        session_of: Callable[[GenerationRequest], str | None] = lambda request: request.session,
        source_of: Callable[[GenerationRequest], str | None] = lambda request: "",
    ) -> None:
        if max_running_requests is not None and max_running_requests < 1:
            raise ValueError(f"max_running_requests={max_running_requests} must be at least 1")
        self._capacity = math.inf if max_running_requests is None else max_running_requests
        self._requeue, self._deterministic = requeue, deterministic
        self._session_of, self._source_of = session_of, source_of
        self._lock = threading.RLock()  # guards everything below; futures are resolved outside
        self._replicas: list[_Replica] = []
        self._entries: dict[str, _Entry] = {}
        self._num_running = 0  # of them
        self._queue: _Queue = []  # what may run anywhere
        self._loads: list[tuple[int, int, _Replica]] = []  # a heap: (listed load, number, replica)
        self._homes: OrderedDict[str, _Replica] = OrderedDict()
        self._lengths: dict[str | None, tuple[int, int]] = {}  # source -> tokens, responses
        self._known = {} if deterministic else self._lengths  # what routing may look at
        self._arrivals = itertools.count()
        self._closed = False
        self._num_alive = 0
        self._held = False  # also those that will be attached
        self._all_held = True
        self._served_s, self._serving_since = 0.0, math.nan  # before, and as of when (nan: not now)
        for link in links:
            self.attach(link)
        live_metrics.show(self)

    def attach(self, link: Link) -> None:
        """Add a replica, which serves as of now (or as of `release`)."""
        with self._lock:
            replica = _Replica(link, number=len(self._replicas), held=self._held)
            self._replicas.append(replica)
            self._list(replica)
            self._num_alive += 1
            self._all_held = self._all_held and self._held
            self._count_serving()
            link.start(partial(self._on_events, replica))
            self._admit()

    def submit(self, request: GenerationRequest) -> Future[Completion]:
        """Queue one request; see RolloutClient."""
        with self._lock:
            if self._closed:
                raise RolloutError("the router is closed")
            if not self._num_alive:
                raise RolloutError(f"no replica is left: {[replica.link.name for replica in self._replicas]} died")
            if request.request_id in self._entries:
                raise ValueError(f"request id {request.request_id!r} is already in use")
            entry = _Entry(request, (request.priority, next(self._arrivals)), request.resume, request.resume)
            entry.future.set_running_or_notify_cancel()  # `abort` ends a request: cancelling would hide its tokens
            nobody_waits = len(self._entries) == self._num_running
            self._entries[request.request_id] = entry
            if not (nobody_waits and not self._deterministic and self._begin(entry)):
                self._enqueue(entry)
                self._admit()
        return entry.future

    def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """End requests; see RolloutClient."""
        with self._lock:
            ids = list(self._entries) if request_ids is None else dict.fromkeys(request_ids)
            entries = [self._entries[i] for i in ids if i in self._entries]
            running: dict[_Replica, list[str]] = {}
            ended: list[_Result] = []
            for entry in entries:
                name, replica = entry.request.request_id, entry.replica
                if replica is not None and name in replica.running:
                    entry.aborted = True
                    running.setdefault(replica, []).append(name)
                else:
                    ended.append((entry, entry.abort()))
                    self._end(entry)
            for replica, names in running.items():
                replica.link.send((), names)
        _resolve(ended)

    def snapshot(self) -> dict[str, Sampled]:
        """Tokens sampled so far; see RolloutClient. A request goes on from them when its replica dies."""
        with self._lock:
            asked = [(replica, dict(replica.running)) for replica in self._replicas if replica.running]
        found = [(replica, running, replica.link.snapshot()) for replica, running in asked]
        with self._lock:
            for replica, running, progress in found:
                same = {i: s for i, s in progress.items() if i in running and replica.running.get(i) is running[i]}
                self._saw(replica, same)
            return {name: entry.so_far for name, entry in self._entries.items()}

    def serving_s(self) -> float:
        """Seconds during which at least one replica was not held; see RolloutClient."""
        with self._lock:
            return self._served_s + (0.0 if math.isnan(self._serving_since) else time.monotonic() - self._serving_since)

    def occupancy(self) -> Occupancy:
        """Count what the replicas are doing; see RolloutClient."""
        with self._lock:
            alive = [replica for replica in self._replicas if replica.alive]
            held = sum(replica.held for replica in alive)
            idle = sum(not replica.held and not replica.running for replica in alive)
            return Occupancy(len(alive), held, idle, len(self._entries))

    def gauges(self) -> dict[str, float]:
        """Live metrics (see Gauges). requests: in flight; requests_running: those of them that are on a replica."""
        with self._lock:
            now, lost, running = self.occupancy(), len(self._replicas) - self._num_alive, self._num_running
        replicas = {"": now.replicas, "_held": now.held, "_idle": now.idle, "_lost": lost}
        found = {f"router/replicas{name}": float(value) for name, value in replicas.items()}
        return found | {"router/requests": float(now.pending), "router/requests_running": float(running)}

    def hold(self, name: str | None = None) -> None:
        """Send this replica no further requests until `release`: call it before a pause.

        None: all, which begins a round.
        """
        self._set_held(name, True)

    def release(self, name: str | None = None) -> None:
        """Send requests again, first those queued meanwhile: call it when the replica is open."""
        self._set_held(name, False)

    def close(self) -> None:
        """Close the router; see RolloutClient. Replicas are told to end their requests, and otherwise left alone."""
        live_metrics.hide(self)
        with self._lock:
            self._closed = True
            failed = self._fail_all("the router was closed")
            replicas, self._replicas = self._replicas, []
            for replica in replicas:
                if replica.alive and replica.running:
                    replica.link.send((), list(replica.running))
        _resolve(failed)
        for replica in replicas:
            replica.link.close()

    # The rest runs with the lock held, but for _on_events, which takes it.

    def _on_events(self, replica: _Replica, events: Events) -> None:
        results: list[_Result] = []
        with self._lock:
            if not replica.alive or self._closed:
                return
            for completion in events.completions:
                if (entry := replica.running.get(completion.request_id)) is not None:
                    results.append((entry, completion))
                    self._learn(entry, completion)
                    self._end(entry)
            for name, error in events.refusals:
                if (entry := replica.running.get(name)) is not None:
                    moved = isinstance(error, ResumeError) and len(entry.request.resume) > len(entry.came_with)
                    if moved and not entry.aborted:
                        self._begin_anew(entry)
                    else:
                        results.append((entry, entry.abort() if moved else error))
                        self._end(entry)
            self._saw(replica, events.progress)
            if events.death is not None:
                results += self._lose(replica, events.death)
            self._admit()
        _resolve(results)

    def _begin(self, entry: _Entry) -> bool:
        """Begin one request that nobody waits before; False where it has to wait.

        Does the work of `_enqueue` and `_admit` without a look at all replicas.
        """
        replica = self._home(entry)
        if replica is None:
            replica = self._lightest()
            if replica is not None:
                self._settle(entry, replica)
        if replica is None or not self._has_place(replica):
            return False
        self._assign(entry, replica)
        self._run(entry, replica)
        replica.link.send([entry.request], ())
        return True

    def _lightest(self) -> _Replica | None:
        """Find the replica with the least load of those that have a place; of equals the first."""
        full = []
        found = None
        while self._loads and found is None:
            listed, number, replica = heappop(self._loads)
            if listed != replica.listed or not replica.alive:
                continue  # it stands elsewhere with a smaller load
            if replica.load != listed:
                replica.listed = replica.load
                heappush(self._loads, (replica.load, number, replica))
                continue
            full.append((listed, number, replica))
            if self._has_place(replica):
                found = replica
        for each in full:
            heappush(self._loads, each)
        return found

    def _list(self, replica: _Replica) -> None:
        """List the replica again: its load may be less than is listed."""
        if replica.listed is None or replica.load < replica.listed:
            replica.listed = replica.load
            heappush(self._loads, (replica.load, replica.number, replica))
        if len(self._loads) > 4 * len(self._replicas) + 64:  # most are void
            self._loads = [(r.load, r.number, r) for r in self._replicas if r.alive]
            heapify(self._loads)
            for _, _, each in self._loads:
                each.listed = each.load

    def _enqueue(self, entry: _Entry) -> None:
        home = self._home(entry)
        if home is None and self._deterministic:
            alive = (replica for replica in self._replicas if replica.alive)
            home = self._settle(entry, min(alive, key=attrgetter("load")))  # of equals the first
        if home is None:
            heappush(self._queue, (entry.place, entry))
        else:
            self._assign(entry, home)
            heappush(home.queue, (entry.place, entry))

    def _admit(self) -> None:
        """Give free places to the requests that wait, in their order.

        One pass over the replicas, then a heap of the first of each queue and one of loads, in which a load that has
        grown meanwhile stands again, and the old one is void.
        """
        if self._all_held or len(self._entries) == self._num_running:
            return
        free = {replica: i for i, replica in enumerate(self._replicas) if self._has_place(replica)}
        firsts: list[tuple[tuple[int, int], _Replica | None]] = []
        for owner in (None, *free):
            _push_first(firsts, self._queue if owner is None else owner.queue, owner)
        if not firsts:
            return
        loads = [(replica.load, i, replica) for replica, i in free.items()]
        heapify(loads)
        orders: dict[_Replica, list[GenerationRequest]] = {}
        while firsts and free:
            owner = heappop(firsts)[1]
            if owner is not None and owner not in free:
                continue  # it has no place any more
            queue = self._queue if owner is None else owner.queue
            entry = heappop(queue)[1]
            _push_first(firsts, queue, owner)
            replica = entry.replica
            if replica is None:
                replica = self._home(entry)  # its session may have got one while it waited
                if replica is None:
                    while loads[0][2] not in free or loads[0][0] != loads[0][2].load:
                        heappop(loads)
                    replica = self._settle(entry, loads[0][2])
                self._assign(entry, replica)
                if replica not in free:
                    heappush(replica.queue, (entry.place, entry))
                    continue
                heappush(loads, (replica.load, free[replica], replica))
            self._run(entry, replica)
            orders.setdefault(replica, []).append(entry.request)
            if not self._has_place(replica):
                del free[replica]
        for replica, requests in orders.items():
            replica.link.send(requests, ())

    def _count_serving(self) -> None:
        """Update the serving clock; call it where replicas may have begun or ended to serve."""
        since, now = self._serving_since, time.monotonic()
        if self._all_held and not math.isnan(since):
            self._served_s, self._serving_since = self._served_s + now - since, math.nan
        elif not self._all_held and math.isnan(since):
            self._serving_since = now

    def _has_place(self, replica: _Replica) -> bool:
        return replica.alive and not replica.held and len(replica.running) < self._capacity

    def _home(self, entry: _Entry) -> _Replica | None:
        session = self._session_of(entry.request)
        home = None if session is None else self._homes.get(session)
        if home is None or not home.alive:
            return None
        self._homes.move_to_end(session)  # type: ignore[arg-type]
        return home

    def _settle(self, entry: _Entry, replica: _Replica) -> _Replica:
        """Make the replica the home of the request's session from now on."""
        session = self._session_of(entry.request)
        if session is not None:
            self._homes[session] = replica
            if len(self._homes) > _MAX_HOMES:
                self._homes.popitem(last=False)
        return replica

    def _assign(self, entry: _Entry, replica: _Replica) -> None:
        entry.replica, entry.tokens = replica, self._expected_tokens(entry)
        replica.load += entry.tokens

    def _run(self, entry: _Entry, replica: _Replica) -> None:
        replica.running[entry.request.request_id] = entry
        self._num_running += 1

    def _unassign(self, entry: _Entry) -> None:
        if entry.replica is not None:
            if entry.replica.running.pop(entry.request.request_id, None) is not None:
                self._num_running -= 1
            if not self._deterministic:
                entry.replica.load -= entry.tokens
                self._list(entry.replica)
        entry.replica = None

    def _expected_tokens(self, entry: _Entry) -> int:
        limit = entry.request.sampling.max_tokens
        tokens, responses = self._known.get(self._source_of(entry.request), (limit, 1))
        return len(entry.request.prompt_ids) + max(len(entry.so_far), min(limit, tokens // responses))

    def _learn(self, entry: _Entry, completion: Completion) -> None:
        source = self._source_of(entry.request)
        if completion.finish_reason != "abort" and source is not None:
            tokens, responses = self._lengths.get(source, (0, 0))
            self._lengths[source] = (tokens + len(completion.sampled), responses + 1)

    def _saw(self, replica: _Replica, progress: Mapping[str, Sampled]) -> None:
        for name, sampled in progress.items():
            entry = replica.running.get(name)
            if entry is not None and len(sampled) > len(entry.so_far):
                entry.so_far = sampled
                if not self._deterministic:
                    replica.load -= entry.tokens
                    self._assign(entry, replica)
                    self._list(replica)

    def _end(self, entry: _Entry) -> None:
        entry.ended = True
        self._unassign(entry)
        del self._entries[entry.request.request_id]

    def _lose(self, replica: _Replica, why: str) -> list[_Result]:
        """Handle a replica's death: requests that wait for it go elsewhere, those under way there too, or fail."""
        replica.alive = False
        self._num_alive -= 1
        running, waiting = list(replica.running.values()), [entry for _, entry in replica.queue if not entry.ended]
        replica.queue = []
        if not self._num_alive:
            return self._fail_all(f"{replica.link.name} died, and no other is left: {why}")
        results: list[_Result] = []
        for entry in running:
            name = entry.request.request_id
            if entry.aborted or not self._requeue:
                error = RolloutError(f"{replica.link.name} died with request {name} under way: {why}")
                results.append((entry, entry.abort() if entry.aborted else error))
                self._end(entry)
            else:
                entry.request = dataclasses.replace(entry.request, resume=entry.so_far)
                waiting.append(entry)
        for entry in sorted(waiting, key=lambda entry: entry.place):
            self._unassign(entry)
            self._enqueue(entry)
        return results

    def _begin_anew(self, entry: _Entry) -> None:
        """Begin a request again from the tokens it came with: the engine cannot go on from those of another engine."""
        entry.so_far = entry.came_with
        entry.request = dataclasses.replace(entry.request, resume=entry.came_with)
        self._unassign(entry)
        self._enqueue(entry)

    def _fail_all(self, why: str) -> list[_Result]:
        entries, self._entries, self._num_running = list(self._entries.values()), {}, 0
        for entry in entries:
            entry.ended = True
        return [(entry, entry.abort() if entry.aborted else RolloutError(why)) for entry in entries]

    def _set_held(self, name: str | None, held: bool) -> None:
        with self._lock:
            chosen = [r for r in self._replicas if name in (None, r.link.name)]
            if name is not None and not chosen:
                raise ValueError(f"no replica {name!r}: there are {[r.link.name for r in self._replicas]}")
            for replica in chosen:
                replica.held = held
            self._all_held = all(replica.held for replica in self._replicas)
            self._count_serving()
            if name is None:
                self._held = held
                if held and self._deterministic:
                    self._known = dict(self._lengths)
                    self._homes.clear()
                    for replica in self._replicas:
                        replica.load = 0
            self._admit()


def _push_first(firsts: list[tuple[tuple[int, int], _Replica | None]], queue: _Queue, owner: _Replica | None) -> None:
    """Push the next request of a queue; those that were aborted while they waited are dropped."""
    while queue and queue[0][1].ended:
        heappop(queue)
    if queue:
        heappush(firsts, (queue[0][0], owner))


def _resolve(results: Iterable[_Result]) -> None:
    for entry, result in results:
        if isinstance(result, Exception):
            entry.future.set_exception(result)
        else:
            entry.future.set_result(result)
