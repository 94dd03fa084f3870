"""A pool of worker processes that can be killed.

    submit(calls) -> futures          one thread of the pool owns all processes:
        queue  --batches-->  worker   it sends batches of calls, receives one result a call,
        futures <--results-- worker   kills a worker whose current call is over its time limit,
                                      and starts another in its place

A call that hangs, or takes its process down, costs itself only: the calls that were waiting behind it in the same batch
go back to the queue. Workers are fresh interpreters (`python -c`), never forks of this process. They die with it, and
so does what they started (`keeper.py`).

A call may belong to a session: the calls of one go to one worker, one after the other, because what they need is in its
memory. When the worker is replaced, its sessions are lost, and their calls fail.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Hashable, Sequence
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

from verl_like import live_metrics
from verl_like.services import keeper
from verl_like.services.channel import BrokenChannelError, Channel
from verl_like.services.service import Outcome, ServiceError, ServiceSpec
from verl_like.services.temp_folder import TempFolder, remove_leftovers
from verl_like.services.waiting import Call, Place, Waiting

logger = logging.getLogger(__name__)
Payload = TypeVar("Payload")
Answer = TypeVar("Answer", bound=Outcome)

_BOOTSTRAP = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[3]); "
    "from verl_like.services.worker import main; main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[4])"
)
_MAX_BATCH = 32  # calls per message: few enough that a slow function still spreads over the workers
_ASYNC_GRACE_S = 2.0  # an async worker times its calls out itself; silent for longer, its event loop is stuck
_MAX_FAILED_STARTS = 3
_MAX_MEMORY_TRIES = 3
_KILL_S = 10.0  # a keeper that is not done by then is killed itself


class _Worker:
    """One process with its keeper, its channel, and the calls it was sent and has not answered, in order."""

    def __init__(self, spec: ServiceSpec) -> None:
        ours, theirs = socket.socketpair()
        self._temporary = TempFolder()  # a killed process cannot tidy up itself
        with theirs:
            arguments = [str(theirs.fileno()), str(os.getpid()), json.dumps(sys.path), self._temporary.path]
            self.process = subprocess.Popen(
                [sys.executable, "-c", _BOOTSTRAP, *arguments],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C does not reach it, and its own children can be killed with it
                env={"OMP_NUM_THREADS": "1", **os.environ, "TMPDIR": self._temporary.path},
            )
        self.channel = Channel(ours)
        with contextlib.suppress(OSError):  # it died at once: its closed channel will tell
            self.channel.post(spec)
        self.ready = False
        self.is_async = False
        self.pending: dict[int, Call] = {}
        self.place = Place()
        self.answered = 0
        self.since = time.monotonic()  # when the process started, was sent calls, or answered last

    def end(self) -> None:
        """Tell the keeper to kill the process and all that it started; `kill` waits for that."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(keeper.END)

    def kill(self) -> None:
        """Kill the process and all that it started. Safe to call twice."""
        if self.channel.closed:
            return
        self.channel.close()
        self.end()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_KILL_S)
        with contextlib.suppress(ProcessLookupError):  # what a keeper that was itself killed has left
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._temporary.remove()


class WorkerPool(Generic[Payload, Answer]):
    """Runs calls of a service in `num_workers` processes, each call within the spec's `timeout` seconds.

    `submit` blocks while `max_pending` calls wait for a process, so that a producer cannot run away from the workers.

    Processes start with the object; `start` waits until they have made the service and raises the spec's `error` (a
    ServiceError) if they cannot. `submit` may be called from any thread. `close` kills everything.
    """

    def __init__(
        self, spec: ServiceSpec, *, num_workers: int, max_pending: int = 65536, start_timeout: float = 120.0
    ) -> None:
        self._spec, self._num_workers, self._start_timeout = spec, num_workers, start_timeout
        self._max_pending = max_pending
        self._waiting = Waiting(max_pending)
        self._workers: list[_Worker] = []
        self._closing = False
        self._failed_starts = self._num_replaced = 0
        self._next_id = 0
        self._looked = time.monotonic()  # when it was last asked which channels hold something
        self._started: Future[None] = Future()
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._wake_sender.setblocking(False)
        # Workers are started by this thread, which lives as long as the pool: Linux kills a child when the thread that
        # started it ends, not when the process does.
        self._thread = threading.Thread(target=self._run, name=f"{spec.noun}-pool", daemon=True)
        self._thread.start()
        live_metrics.show(self)

    def start(self) -> None:
        """Wait until every worker has made the service."""
        self._started.result()

    def submit(self, calls: Sequence[Payload], *, session: Hashable | None = None) -> list[Future[Answer]]:
        """Queue calls; each future gets an outcome, also for a call that hangs or crashes.

        Raises ValueError for a session of a spec with `batch`.

        session: all calls with this key go to one worker, one after the other. When that is replaced, they fail with
            kind "crash", and so do later ones until `end_session`.
        """
        if session is not None and self._spec.batch:
            raise ValueError("calls of a session are answered one by one: a service with batch=True has no sessions")
        group = object()
        items = [Call(call, group) for call in calls]
        step = len(items) if self._spec.batch else self._max_pending
        for start in range(0, len(items), max(1, step)):
            part = items[start : start + step]
            if lost := self._waiting.put(part, session):
                for item in part:
                    self._resolve(item, self._spec.outcome(kind="crash", message=lost))
            self._wake()
        return [item.future for item in items]

    def end_session(self, session: Hashable) -> None:
        """Forget a session: what was submitted still runs, a later call with this key begins another one.

        The worker is not told: where it keeps something of the session, let a last call remove that.
        """
        self._waiting.end_session(session)

    def worker_pids(self) -> list[int]:
        """Process ids of the live workers."""
        return [worker.process.pid for worker in self._workers]

    def gauges(self) -> dict[str, float]:
        """Report the numbers of workers, of replaced workers, and of calls that run and wait, by metric name."""
        workers, name = list(self._workers), f"pool/{self._spec.noun}"
        running = sum(len(worker.pending) for worker in workers)
        found = {f"{name}/workers": len(workers), f"{name}/workers_replaced": self._num_replaced}
        found |= {f"{name}/calls_running": running, f"{name}/calls_waiting": self._waiting.num_calls}
        return {name: float(value) for name, value in found.items()}

    def close(self) -> None:
        """Kill the workers. Calls still waiting get a RuntimeError. Safe to call twice."""
        self._closing = True
        live_metrics.hide(self)
        self._waiting.refuse(RuntimeError(f"the {self._spec.noun} pool is closed"))
        self._wake()
        self._thread.join()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # enough wake-ups are waiting already, or the pool has ended
            self._wake_sender.send(b"x")

    # Everything below runs in the pool's thread.

    def _run(self) -> None:
        reason: Exception = RuntimeError(f"the {self._spec.noun} pool was closed")
        try:
            remove_leftovers()
            self._workers = [_Worker(self._spec) for _ in range(self._num_workers)]
            while not self._closing:
                self._assign()
                self._exchange()
                self._expire()
        except Exception as error:
            reason = error
            if not isinstance(error, ServiceError):
                logger.exception("the %s pool failed", self._spec.noun)
        finally:
            self._end(reason)

    def _end(self, reason: Exception) -> None:
        self._waiting.refuse(reason, unless_refused=True)
        at_work = [item for worker in self._workers for item in worker.pending.values()]
        left = self._waiting.drain(at_work, [worker.place for worker in self._workers])
        for worker in self._workers:
            worker.end()  # all at once
        for worker in self._workers:
            worker.kill()
        self._workers = []
        for item in left:
            if item.future.set_running_or_notify_cancel():
                item.future.set_exception(reason)
        if not self._started.done():
            self._started.set_exception(reason)
        self._wake_receiver.close()
        self._wake_sender.close()

    def _assign(self) -> None:
        """Give workers calls, those with the fewest sessions first, until there are none, or no worker has room."""
        workers = self._workers
        while workers:  # an async one that took something may have room for more
            workers = sorted(workers, key=lambda worker: len(worker.place.sessions))
            workers = [worker for worker in workers if self._send_next(worker)]

    def _send_next(self, worker: _Worker) -> bool:
        room = self._room(worker)
        if not room:
            return False
        batch = self._waiting.take(
            worker.place, room, idle=not worker.pending, together=self._spec.batch, share=2 * self._num_workers
        )
        return bool(batch) and self._send(worker, batch)

    def _room(self, worker: _Worker) -> int:
        """Count the calls that may be sent to the worker now."""
        if not worker.ready or worker.process.poll() is not None:  # its channel will tell that it died
            return 0
        if not worker.is_async:
            return 0 if worker.pending else _MAX_BATCH
        suspects = any(item.alone for item in worker.pending.values())
        return 0 if suspects else self._spec.concurrency - len(worker.pending)

    def _send(self, worker: _Worker, batch: list[Call]) -> bool:
        message = []
        for item in batch:
            worker.pending[self._next_id] = item
            message.append((self._next_id, item.payload))
            self._next_id += 1
        worker.since = time.monotonic()
        try:
            worker.channel.post(message)
        except OSError:
            # It died before it got these calls, which are not to blame. Those it got earlier (an async worker) may be:
            # `_exchange` reads what it still answered, and replaces it.
            for number, _ in message:
                del worker.pending[number]
            self._waiting.put_back(batch)
            return False
        except Exception as error:  # payloads may hold anything
            for number, _ in message:
                del worker.pending[number]
            what = f"{self._spec.payload_name} cannot be sent to the {self._spec.noun} process"
            self._refuse(batch, f"{what}: {error!r:.500}")
            return True
        self._waiting.sent(batch[0], worker.place)  # a call of a session is alone
        return True

    def _refuse(self, batch: list[Call], message: str) -> None:
        """Fail a call that cannot be sent; of several, find out which by sending each alone."""
        if len(batch) == 1 or self._spec.batch:
            for item in batch:
                self._resolve(item, self._spec.outcome(kind="exception", message=message))
        else:
            for item in batch:
                item.alone = True
            self._waiting.put_back(batch)

    def _exchange(self) -> None:
        """Wait until something happens; read what the workers wrote, and write what they have room for."""
        poll = select.poll()
        poll.register(self._wake_receiver, select.POLLIN)
        for worker in self._workers:
            poll.register(worker.channel, select.POLLIN | (select.POLLOUT if worker.channel.unsent else 0))
        patience = self._patience()
        ready = dict(poll.poll(None if patience is None else 1000 * patience + 1))
        self._looked = time.monotonic()
        if self._wake_receiver.fileno() in ready:
            self._wake_receiver.recv(4096)
        for worker in [w for w in self._workers if w.channel.fileno() in ready]:
            try:
                for message in worker.channel.arrived():
                    self._handle(worker, message)
                    if worker.channel.closed:  # it was replaced
                        break
                else:
                    worker.channel.flush()
            except BrokenChannelError as error:
                self._discard(worker, f"did not keep to its channel to the trainer, and was killed: {error}")
            except (EOFError, OSError):
                self._lost(worker)

    def _handle(self, worker: _Worker, message: Any) -> None:
        match message:
            case ("result", int(number), Outcome() as outcome) if self._is_expected(worker, number, outcome):
                worker.since = time.monotonic()
                item = worker.pending.pop(number)
                if outcome.kind == "memory":
                    self._out_of_memory(worker, item, outcome)
                else:
                    worker.answered += 1
                    self._resolve(item, outcome)
            case ("ready", bool(is_async)):
                worker.since = time.monotonic()
                worker.ready, worker.is_async = True, is_async
                self._failed_starts = 0
                if not self._started.done() and all(w.ready for w in self._workers):
                    self._started.set_result(None)
            case ("load_error", str(text)):
                raise self._spec.error(text)
            case _:
                raise BrokenChannelError(f"it sent {message!r:.80}")

    def _is_expected(self, worker: _Worker, number: int, outcome: Outcome) -> bool:
        return number in worker.pending and isinstance(outcome, self._spec.outcome)

    def _out_of_memory(self, worker: _Worker, item: Call, outcome: Outcome) -> None:
        """Replace the worker: its memory may be full of what earlier calls left, and then no call is to blame.

        The call is tried again, unless the process was new, and had nothing else to do; or this was often enough; or
        it belongs to a session, which ends with the process.
        """
        hopeless = worker.answered == 0 and (not worker.is_async or not worker.pending)
        others = self._take_back(worker)
        together = [item, *others] if self._spec.batch else [item]
        item.tries += 1
        if hopeless or item.tries >= _MAX_MEMORY_TRIES or item.session is not None:
            for each in together:
                self._resolve(each, outcome)
            again = [each for each in others if each not in together]
        else:
            item.alone = not self._spec.batch
            again = [item, *others]
        self._waiting.put_back(again)
        what = f"ran out of memory ({self._spec.section}memory_limit_mb={self._spec.memory_limit_mb})"
        logger.info("a %s worker %s; it is replaced", self._spec.noun, what)
        self._replace(worker, what)

    def _patience(self) -> float | None:
        """Seconds until the next time limit runs out, or None if nothing is running."""
        limits = [worker.since + self._limit(worker) for worker in self._workers if worker.pending or not worker.ready]
        return max(0.0, min(limits) - time.monotonic()) if limits else None

    def _limit(self, worker: _Worker) -> float:
        if not worker.ready:
            return self._start_timeout
        return self._spec.timeout + (_ASYNC_GRACE_S if worker.is_async else 0.0)

    def _expire(self) -> None:
        """Replace workers that were over their limit when they were last listened to: since then this thread may have
        waited for the end of another one, and their answers for this thread."""
        now = self._looked
        for worker in list(self._workers):
            if (worker.pending or not worker.ready) and now >= worker.since + self._limit(worker):
                if not worker.ready:
                    raise self._spec.error(
                        f"{self._spec.source}: importing it took more than {self._start_timeout:g} s"
                    )
                what = f"no result within {self._spec.section}timeout={self._spec.timeout:g} s"
                worker.kill()
                self._blame(worker, "timeout", f"{what}; process killed", now - worker.since)
                self._replace(worker, f"gave {what}")

    def _lost(self, worker: _Worker) -> None:
        """Handle a worker whose pipe closed: its process ended without being asked to."""
        status = _describe_exit(worker)
        if not worker.ready:
            self._failed_starts += 1
            if self._failed_starts >= _MAX_FAILED_STARTS:
                raise self._spec.error(
                    f"{self._spec.source}: {self._failed_starts} {self._spec.noun} workers in a row ended before they "
                    f"were ready ({status})"
                )
        self._discard(worker, status)

    def _discard(self, worker: _Worker, what: str) -> None:
        self._blame(worker, "crash", f"the {self._spec.noun} worker {what}", time.monotonic() - worker.since)
        self._replace(worker, what)

    def _blame(self, worker: _Worker, kind: str, message: str, seconds: float) -> None:
        """Fail the call that the lost worker was at; queue the others again."""
        if worker.is_async and len(worker.pending) > 1 and not self._spec.batch:
            again = self._take_back(worker)
            for item in again:  # any of them may be the one: try each alone
                item.alone = True
        else:
            items = list(worker.pending.values())
            worker.pending.clear()
            guilty = len(items) if self._spec.batch else 1  # one call for all of them
            for item in items[:guilty]:
                note = "" if item.session is None else f"; {item.session} is lost"
                self._resolve(item, self._spec.outcome(kind=kind, message=message + note, seconds=seconds))
            again = items[guilty:]
        self._waiting.put_back(again)

    @staticmethod
    def _take_back(worker: _Worker) -> list[Call]:
        """Take the calls back that may be sent to another worker; calls of sessions stay with the worker."""
        taken = [item for item in worker.pending.values() if item.session is None]
        worker.pending = {number: item for number, item in worker.pending.items() if item.session is not None}
        return taken

    def _replace(self, worker: _Worker, why: str) -> None:
        worker.kill()
        self._num_replaced += 1
        self._workers.remove(worker)
        self._workers.append(_Worker(self._spec))
        behind = self._waiting.lose(worker.place, f"the {self._spec.noun} worker that had it {why}")
        for item in [*worker.pending.values(), *behind]:
            assert item.session is not None
            self._resolve(item, self._spec.outcome(kind="crash", message=item.session.lost))

    def _resolve(self, item: Call, outcome: Outcome) -> None:
        self._waiting.done(item)
        if item.future.set_running_or_notify_cancel():
            item.future.set_result(outcome)


def _describe_exit(worker: _Worker) -> str:
    try:
        status = worker.process.wait(timeout=1.0)  # the pipe may close a moment before the process is gone
    except subprocess.TimeoutExpired:
        return "closed its pipe"
    if status < 0:
        return f"was killed by signal {-status} ({signal.strsignal(-status)})"
    return f"exited with status {status}"
