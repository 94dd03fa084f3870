"""A pool of reward worker processes that can be killed.

    submit(calls) -> futures          one thread of the pool owns all processes:
        queue  --batches-->  worker   it sends batches of calls, receives one result a call,
        futures <--results-- worker   kills a worker whose current call is over its time limit,
                                      and starts another in its place

A call that hangs, or takes its process down, costs itself only: the calls that were waiting behind it in the same batch
go back to the queue. Workers are fresh interpreters (`python -c`), never forks of this process. They die with it, and
so does what they started (`keeper.py`).
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
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from verl_like.rewards import keeper
from verl_like.rewards.channel import BrokenChannelError, Channel
from verl_like.rewards.reward_call import RewardCall, RewardFunctionError, RewardOutcome, ScorerSpec
from verl_like.rewards.temp_folder import TempFolder, remove_leftovers

logger = logging.getLogger(__name__)

_BOOTSTRAP = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[3]); "
    "from verl_like.rewards.worker import main; main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[4])"
)
_MAX_BATCH = 32  # calls per message: few enough that a slow function still spreads over the workers
_ASYNC_GRACE_S = 2.0  # an async worker times its calls out itself; silent for longer, its event loop is stuck
_MAX_FAILED_STARTS = 3
_MAX_MEMORY_TRIES = 3
_KILL_S = 10.0  # a keeper that is not done by then is killed itself


class _Call:
    """A submitted call and its future.

    alone: sent in a message of its own, to find out which call kills workers. tries: how often it ran out of memory.
    """

    __slots__ = ("alone", "call", "future", "group", "tries")

    def __init__(self, call: RewardCall, group: object) -> None:
        self.call, self.group = call, group  # calls of one group were submitted together
        self.future: Future[RewardOutcome] = Future()
        self.alone = False
        self.tries = 0


class _Worker:
    """One process with its keeper, its channel, and the calls it was sent and has not answered, in order."""

    def __init__(self, spec: ScorerSpec) -> None:
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
        self.pending: dict[int, _Call] = {}
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


class WorkerPool:
    """Runs reward calls in `num_workers` processes, each call within `timeout` seconds.

    `submit` blocks while `max_pending` calls wait for a process, so that a producer cannot run away from the graders.

    Processes start with the object; `start` waits until they have loaded the reward function and raises
    RewardFunctionError if they cannot. `submit` may be called from any thread. `close` kills everything.
    """

    def __init__(
        self, spec: ScorerSpec, *, num_workers: int, max_pending: int = 65536, start_timeout: float = 120.0
    ) -> None:
        self._spec, self._num_workers, self._start_timeout = spec, num_workers, start_timeout
        self._max_pending = max_pending
        self._queue: deque[_Call] = deque()
        self._workers: list[_Worker] = []
        self._lock = threading.Condition()  # guards _queue, _error and _closing; told when the queue gets shorter
        self._error: Exception | None = None
        self._closing = False
        self._failed_starts = 0
        self._next_id = 0
        self._looked = time.monotonic()  # when it was last asked which channels hold something
        self._started: Future[None] = Future()
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._wake_sender.setblocking(False)
        # Workers are started by this thread, which lives as long as the pool: Linux kills a child when the thread that
        # started it ends, not when the process does.
        self._thread = threading.Thread(target=self._run, name="reward-pool", daemon=True)
        self._thread.start()

    def start(self) -> None:
        """Wait until every worker has loaded the reward function."""
        self._started.result()

    def submit(self, calls: Sequence[RewardCall]) -> list[Future[RewardOutcome]]:
        """Queue calls; each future gets a RewardOutcome, also for a call that hangs or crashes."""
        group = object()
        items = [_Call(call, group) for call in calls]
        step = len(items) if self._spec.batch else self._max_pending
        for start in range(0, len(items), max(1, step)):
            self._enqueue(items[start : start + step])
        return [item.future for item in items]

    def _enqueue(self, items: list[_Call]) -> None:
        with self._lock:
            self._lock.wait_for(
                lambda: len(self._queue) < self._max_pending or self._closing or self._error is not None
            )
            if self._closing:
                raise RuntimeError("the reward pool is closed")
            if self._error is not None:
                raise self._error
            self._queue.extend(items)
        self._wake()

    def worker_pids(self) -> list[int]:
        """Process ids of the live workers."""
        return [worker.process.pid for worker in self._workers]

    def close(self) -> None:
        """Kill the workers. Calls still waiting get a RuntimeError. Safe to call twice."""
        with self._lock:
            self._closing = True
            self._lock.notify_all()
        self._wake()
        self._thread.join()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # enough wake-ups are waiting already, or the pool has ended
            self._wake_sender.send(b"x")

    # Everything below runs in the pool's thread.

    def _run(self) -> None:
        reason: Exception = RuntimeError("the reward pool was closed")
        try:
            remove_leftovers()
            self._workers = [_Worker(self._spec) for _ in range(self._num_workers)]
            while not self._closing:
                self._assign()
                self._exchange()
                self._expire()
        except Exception as error:
            reason = error
            if not isinstance(error, RewardFunctionError):
                logger.exception("the reward pool failed")
        finally:
            self._end(reason)

    def _end(self, reason: Exception) -> None:
        with self._lock:
            self._error = reason
            waiting = [*self._queue, *(item for worker in self._workers for item in worker.pending.values())]
            self._queue.clear()
            self._lock.notify_all()
        for worker in self._workers:
            worker.end()  # all at once
        for worker in self._workers:
            worker.kill()
        self._workers = []
        for item in waiting:
            if item.future.set_running_or_notify_cancel():
                item.future.set_exception(reason)
        if not self._started.done():
            self._started.set_exception(reason)
        self._wake_receiver.close()
        self._wake_sender.close()

    def _assign(self) -> None:
        """Give every idle worker its next batch."""
        for worker in list(self._workers):
            room = self._room(worker)
            if room:
                with self._lock:
                    batch = self._take_batch(room, idle=not worker.pending)
                    self._lock.notify_all()
                if batch:
                    self._send(worker, batch)

    def _room(self, worker: _Worker) -> int:
        """How many calls the worker may be sent now."""
        if not worker.ready:
            return 0
        if not worker.is_async:
            return 0 if worker.pending else _MAX_BATCH
        suspects = any(item.alone for item in worker.pending.values())
        return 0 if suspects else self._spec.concurrency - len(worker.pending)

    def _take_batch(self, room: int, *, idle: bool) -> list[_Call]:
        if self._spec.batch:
            group = self._queue[0].group if self._queue else None
            return [self._queue.popleft() for _ in range(sum(item.group is group for item in self._queue))]
        # Batches shrink towards the end of the queue, so that the workers finish together.
        waiting = len(self._queue)
        size = min(room, max(1, waiting // (2 * self._num_workers)))
        batch: list[_Call] = []
        while self._queue and len(batch) < size:
            if self._queue[0].alone and (batch or not idle):
                break  # to an idle worker, and with nothing else
            item = self._queue.popleft()
            batch.append(item)
            if item.alone:
                break
        return batch

    def _send(self, worker: _Worker, batch: list[_Call]) -> None:
        message = []
        for item in batch:
            worker.pending[self._next_id] = item
            message.append((self._next_id, item.call))
            self._next_id += 1
        worker.since = time.monotonic()
        try:
            worker.channel.post(message)
        except OSError:
            # It died before it got these calls, which are not to blame. Those it got earlier (an async worker) may be:
            # `_exchange` reads what it still answered, and replaces it.
            for number, _ in message:
                del worker.pending[number]
            with self._lock:
                self._queue.extendleft(reversed(batch))
        except Exception as error:  # ground truths or extra_info may be anything
            for number, _ in message:
                del worker.pending[number]
            self._refuse(batch, f"ground_truth or extra_info cannot be sent to the reward process: {error!r:.500}")

    def _refuse(self, batch: list[_Call], message: str) -> None:
        """Fail a call that cannot be sent; of several, find out which by sending each alone."""
        if len(batch) == 1 or self._spec.batch:
            for item in batch:
                self._resolve(item, RewardOutcome(kind="exception", message=message))
        else:
            for item in batch:
                item.alone = True
            with self._lock:
                self._queue.extendleft(reversed(batch))
        self._wake()  # the worker is still idle

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
            case ("result", int(number), RewardOutcome() as outcome) if number in worker.pending:
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
                raise RewardFunctionError(text)
            case _:
                raise BrokenChannelError(f"it sent {message!r:.80}")

    def _out_of_memory(self, worker: _Worker, item: _Call, outcome: RewardOutcome) -> None:
        """Replace the worker: its memory may be full of what earlier calls left, and then no call is to blame.

        The call is tried again, unless the process was new, and had nothing else to do; or this was often enough.
        """
        others = list(worker.pending.values())
        worker.pending.clear()
        together = [item, *others] if self._spec.batch else [item]
        item.tries += 1
        if (worker.answered == 0 and (not worker.is_async or not others)) or item.tries >= _MAX_MEMORY_TRIES:
            for each in together:
                self._resolve(each, outcome)
            requeued = [each for each in others if each not in together]
        else:
            item.alone = not self._spec.batch
            requeued = [item, *others]
        with self._lock:
            self._queue.extendleft(reversed(requeued))
        limit = self._spec.memory_limit_mb
        logger.info(
            "a reward worker ran out of memory (custom_reward_function.memory_limit_mb=%s); it is replaced", limit
        )
        self._replace(worker)

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
                    raise RewardFunctionError(
                        f"custom_reward_function.path={self._spec.path}: importing it took more than "
                        f"{self._start_timeout:g} s"
                    )
                message = f"no result within custom_reward_function.timeout={self._spec.timeout:g} s; process killed"
                worker.kill()
                self._blame(worker, "timeout", message, now - worker.since)
                self._replace(worker)

    def _lost(self, worker: _Worker) -> None:
        """The worker's pipe closed: its process ended without being asked to."""
        status = _describe_exit(worker)
        if not worker.ready:
            self._failed_starts += 1
            if self._failed_starts >= _MAX_FAILED_STARTS:
                raise RewardFunctionError(
                    f"custom_reward_function.path={self._spec.path}: {self._failed_starts} reward workers in a row "
                    f"ended before they were ready ({status})"
                )
        self._discard(worker, status)

    def _discard(self, worker: _Worker, what: str) -> None:
        self._blame(worker, "crash", f"the reward worker {what}", time.monotonic() - worker.since)
        self._replace(worker)

    def _blame(self, worker: _Worker, kind: str, message: str, seconds: float) -> None:
        """Fail the call that the lost worker was at; queue the others again."""
        items = list(worker.pending.values())
        worker.pending.clear()
        if self._spec.batch:  # one call for all of them
            for item in items:
                self._resolve(item, RewardOutcome(kind=kind, message=message, seconds=seconds))
            requeued = []
        elif worker.is_async and len(items) > 1:
            for item in items:  # any of them may be the one: try each alone
                item.alone = True
            requeued = items
        else:
            for item in items[:1]:
                self._resolve(item, RewardOutcome(kind=kind, message=message, seconds=seconds))
            requeued = items[1:]
        with self._lock:
            self._queue.extendleft(reversed(requeued))

    def _replace(self, worker: _Worker) -> None:
        worker.kill()
        self._workers.remove(worker)
        self._workers.append(_Worker(self._spec))

    @staticmethod
    def _resolve(item: _Call, outcome: RewardOutcome) -> None:
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
