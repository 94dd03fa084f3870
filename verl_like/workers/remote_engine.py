"""Rollout engine in a process of its own, on the device of the process that starts it.

    this process                                        the engine's process
    RemoteEngine.submit, abort, score, ...      ─────>  main thread: one message after the other
    answers  <── reader thread <──────────────────────  answers, and completions as they end
    futures  <── thread of their callbacks <──┘
    weights  ── weight_sync/ipc.py: two buckets ─────>  the engine's loader

What is said here is done there, in that order. The process ends with its pipe, so it never outlives this one. When it
is lost, what is pending fails and the engine holds no weights; the next whole load starts another process.
"""

from __future__ import annotations

import itertools
import logging
import os
import pickle
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NoAnswer
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from verl_like.cluster.lifecycle import die_with_parent
from verl_like.heartbeat import DRIVER, span
from verl_like.parallel.dist import all_reduce_max
from verl_like.rollout.base import RolloutEngine
from verl_like.rollout.rollout_engine import (
    Completion,
    EngineLostError,
    GenerationRequest,
    HeldWeights,
    RolloutError,
    Sampled,
    WeightLoadError,
)
from verl_like.rollout.wire_errors import heard, told
from verl_like.weight_sync.channel import ChannelError
from verl_like.weight_sync.header import Header
from verl_like.weight_sync.ipc import IpcReceiver, IpcSender
from verl_like.weight_sync.wired import Way

logger = logging.getLogger(__name__)

_TIMEOUT_S = 600.0
_STOP_S = 30.0
_START = -1  # the number of the first answer, which nobody asked for
_FACTS = ("dtype", "tokenizer_size", "vocab_size", "max_model_len", "keeps_adapters", "sees")
_FIRST_BYTES = 2**24  # of a bucket, before it is known how much comes


class RemoteEngine(RolloutEngine):
    """RolloutEngine whose work is done by another one, in a process that this object starts, watches and ends.

    Callbacks of the futures may submit, abort and look, but not open, pause or shut down.

    Args:
        build: makes the engine, there; it is pickled.
        arguments: makes the arguments of `build`, here, at every start.
        reads_text: that engine was given a tokenizer.
        device: where the weights are when they come, and the engine.
        run_id: see IpcSender.
        bucket_bytes: see IpcSender.
        leads: it is its replica's first rank.
        ranks: number of ranks of a replica, which start and load together.
        around_start: context in which a process must be started.
        timeout_s: seconds that a call, a load or the start may take, and that the engine may be silent while requests
            are pending; then EngineLostError, and the process is ended.
    """

    def __init__(
        self,
        build: Callable[..., RolloutEngine],
        *,
        arguments: Callable[[], tuple[Any, ...]] = tuple,
        reads_text: bool = False,
        device: torch.device | None = None,
        run_id: str = "",
        bucket_bytes: int = 2**29,
        leads: bool = True,
        ranks: int = 1,
        around_start: Callable[[], AbstractContextManager[object]] = nullcontext,
        timeout_s: float = _TIMEOUT_S,
    ) -> None:
        self._build, self._arguments, self._around_start = build, arguments, around_start
        self._device, self._run_id, self._bucket_bytes = device or torch.device("cpu"), run_id, bucket_bytes
        self._leads, self._ranks, self._timeout_s = leads, ranks, timeout_s
        self._shapes = {"not known yet": torch.Size([_FIRST_BYTES])}
        self._open = False
        self.num_restarts = 0
        """Processes that were started after the first one."""
        self._there = self._started()
        facts = dict(zip(_FACTS, self._there.facts, strict=True))
        super().__init__(**facts, seed=0, reads_text=reads_text)

    @property
    def lost(self) -> str:
        """Reason for which the engine's process is of no use any more; "" while it is."""
        return self._there.error

    @property
    def held(self) -> HeldWeights | None:
        """Weights of the engine; see RolloutEngine. None also where the process is lost."""
        return None if self.lost else super().held

    def effective(self) -> Mapping[str, object]:
        return self._there.call("effective")

    def open(self) -> None:
        self._require_weights()
        self._there.call("open")
        self._open = True

    def pause(self) -> None:
        if not self.lost:  # what is lost does not run
            self._there.call("pause", limited=self._leads)  # other ranks wait for their first one, as long as it serves
        self._open = False

    @property
    def paused(self) -> bool:
        return not self._open

    def abort(self, request_ids: Sequence[str] | None = None) -> None:
        self._there.send(("abort", request_ids))

    def snapshot(self) -> dict[str, Sampled]:
        return self._there.call("snapshot")

    def load_weights(
        self, stream: Iterable[tuple[str, Tensor]], version: int, *, partial: bool = False, mark: str = ""
    ) -> None:
        """Replace all weights; see RolloutEngine. A lost process is started anew, on all ranks of its replica."""
        self._require_base(partial)
        super().unload()  # the other engine does so itself, if it takes the weights at all
        lost = bool(self.lost)
        if all_reduce_max(int(lost)) if self._ranks > 1 else lost:
            logger.warning("the rollout engine's process is started anew: %s", self.lost or "its replica lost one")
            self._there.end()
            self._there, self.num_restarts = self._started(), self.num_restarts + 1
        self._transfer(stream, version, partial)
        self._in_memory, self._unloaded = HeldWeights(version=version, mark=mark), False

    def _transfer(self, stream: Iterable[tuple[str, Tensor]], version: int, partial: bool) -> None:
        sender = IpcSender(
            "the rollout engine",
            run_id=self._run_id,
            bucket_bytes=self._bucket_bytes,
            device=self._device,
            name="its trainer",
            deadline_s=self._timeout_s,
        )
        shapes: dict[str, torch.Size] = {}

        def noted() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in stream:
                shapes[name] = tensor.shape
                yield name, tensor
                del tensor

        answer = self._there.ask("load", sender.way, self._device, version, partial)
        try:
            sender.send(
                Header(version=version, form="merged", dtype=self.dtype, shapes=self._shapes, checksums=None), noted()
            )
        except ChannelError as error:
            self._there.result(answer, "load_weights")  # the engine's own account of it
            raise WeightLoadError(str(error)) from error
        except BaseException:
            answer.exception(self._timeout_s)  # it is this one's echo
            raise
        finally:
            sender.close()
        self._there.result(answer, "load_weights")
        self._shapes = shapes or self._shapes

    def weight_checksums(self, shapes: Mapping[str, torch.Size]) -> list[tuple[str, int]]:
        return self._there.call("weight_checksums", dict(shapes))

    def weight_sketches(self, shapes: Mapping[str, torch.Size]) -> list[tuple[str, Tensor]]:
        return self._there.call("weight_sketches", dict(shapes))

    def unload(self) -> None:
        super().unload()
        self._call_living("unload")

    def sleep(self, discard: bool = False) -> None:
        super().sleep(discard)
        self._call_living("sleep", discard)

    def wake(self) -> None:
        self._call_living("wake")

    def shutdown(self) -> None:
        super().unload()
        self._there.end()

    def _started(self) -> _Process:
        with self._around_start():
            return _Process(partial(self._build, *self._arguments()), self._timeout_s)

    def _call_living(self, method: str, *arguments: Any) -> None:
        if not self.lost:
            self._there.call(method, *arguments)

    def _require_weights(self, *, or_away: bool = False) -> None:
        if self.lost:
            raise EngineLostError(self.lost)
        super()._require_weights(or_away=or_away)

    def _queue(self, request: GenerationRequest) -> Future[Completion]:
        if not self._leads:
            raise RolloutError(f"request {request.request_id}: only the first rank of a replica is given requests")
        return self._there.submit(request)

    def _exclusive(self) -> AbstractContextManager[None]:
        return nullcontext()  # the engine itself sees to it

    def _score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        return self._there.call("score", [list(sequence) for sequence in sequences])

    def _cached_tokens(self) -> int:
        return self._there.call("cached_tokens")


class _Process:
    """Process of the engine, from one start to its end, and the questions it was asked.

    error: why it is of no use any more.
    """

    def __init__(self, build: Callable[[], RolloutEngine], timeout_s: float) -> None:
        context = get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, build), name="rollout-engine", daemon=True)
        self._process.start()
        theirs.close()
        self._timeout_s = timeout_s
        self._sending = threading.Lock()
        self._asking_its_end = threading.Lock()
        self._changed = threading.Lock()  # guards everything below
        self._numbers = itertools.count()
        self._answers: dict[int, Future[Any]] = {}
        self._asked_inside: set[int] = set()  # by callbacks, which the resolver waits for
        self._pending: dict[str, Future[Completion]] = {}
        self._why = self.error = ""
        started = self._answers[_START] = Future[Any]()
        self._known: SimpleQueue[tuple[Future[Any], Any] | None] = SimpleQueue()
        # Callbacks are not the reader's: one that asks for something, or sends much, would wait for the reader itself.
        self._resolver = threading.Thread(target=self._resolve, name="rollout-futures", daemon=True)
        self._resolver.start()
        self._reader = threading.Thread(target=self._read, name="rollout-replies", daemon=True)
        self._reader.start()
        self.facts: list[Any] = self.result(started, "start")

    def call(self, method: str, *arguments: Any, limited: bool = True) -> Any:
        """Call the engine's method, and return its result or raise its error.

        Raises RolloutError where the engine is silent for the time limit.
        """
        return self.result(self.ask("call", method, arguments), method, limited=limited)

    def ask(self, kind: str, *arguments: Any) -> Future[Any]:
        answer: Future[Any] = Future()
        with self._changed:
            number = next(self._numbers)
            self._answers[number] = answer
            if threading.current_thread() is self._resolver:
                self._asked_inside.add(number)
        self.send((kind, number, *arguments))
        return answer

    def result(self, answer: Future[Any], method: str, *, limited: bool = True) -> Any:
        try:
            with span(f"engine's {method}", whom="" if limited else DRIVER, expected_s=self._timeout_s):
                return answer.result(self._timeout_s if limited else None)
        except NoAnswer:
            self._give_up(f"did not answer {method}() within {self._timeout_s:g} s")
            raise EngineLostError(self._why) from None

    def submit(self, request: GenerationRequest) -> Future[Completion]:
        future: Future[Completion] = Future()
        future.set_running_or_notify_cancel()
        with self._changed:
            if request.request_id in self._pending:
                raise ValueError(f"request id {request.request_id!r} is already in use")
            self._pending[request.request_id] = future
        try:
            self.send(("submit", request))
        except BaseException:
            with self._changed:
                self._pending.pop(request.request_id, None)
            raise
        return future

    def send(self, message: tuple[Any, ...]) -> None:
        with self._sending:
            if self.error:
                raise EngineLostError(self.error)
            try:
                self._pipe.send_bytes(pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL))
            except OSError as error:
                raise EngineLostError(f"the engine's process is gone: {error}") from error

    def end(self) -> None:
        with suppress(RolloutError):  # it has ended already, or cannot
            self.send(("stop",))
            self._exit_code(_STOP_S)
        self._process.kill()
        self._exit_code()
        self._reader.join(_STOP_S)
        self._resolver.join(_STOP_S)
        self._pipe.close()

    def _exit_code(self, timeout_s: float | None = None) -> int | None:
        with self._asking_its_end:  # multiprocessing tells it once: a second thread that asks meanwhile learns another
            self._process.join(timeout_s)
            return self._process.exitcode

    def _read(self) -> None:
        try:
            while True:
                while not self._pipe.poll(self._timeout_s):
                    self._ask_for_a_sign()
                kind, key, value = pickle.loads(self._pipe.recv_bytes())
                if kind not in ("answer", "completion"):
                    value = heard(value)
                if kind == "request error" and type(value) is RolloutError:  # its steps have ended: see LocalLink
                    self.error = self.error or str(value)
                with self._changed:
                    waiting: dict[Any, Future[Any]] = self._answers if kind.startswith("answer") else self._pending
                    future = waiting.pop(key)
                    inside = waiting is self._answers and key in self._asked_inside
                    self._asked_inside -= {key}
                if inside:
                    _set(future, value)
                else:  # an answer comes when everything that ended before it is known
                    self._known.put((future, value))
        except (EOFError, OSError):
            code = self._exit_code(_STOP_S)
            self._fail(self._why or f"the engine's process has ended (exit code {code})")
        except Exception as error:
            self._process.kill()
            self._fail(f"what the engine's process said cannot be read: {error!r}")

    def _ask_for_a_sign(self) -> None:
        """Ask a silent engine for a sign of life, after the time limit: it may be busy with long responses, or
        stuck.
        """
        with self._changed:
            stuck, working = bool(self._answers), bool(self._pending)
        if stuck and working:
            self._give_up(f"has said nothing for {2 * self._timeout_s:g} s, with requests pending")
        elif working:
            with suppress(RolloutError):
                self.ask("call", "snapshot", ())

    def _give_up(self, why: str) -> None:
        self._why = self._why or f"the engine's process {why}"
        self._process.kill()

    def _resolve(self) -> None:
        while (known := self._known.get()) is not None:
            _set(*known)

    def _fail(self, text: str) -> None:
        with self._changed:
            self.error = self.error or text
            answers, pending = list(self._answers.values()), list(self._pending.values())
            self._answers, self._pending = {}, {}
        for future in answers:
            future.set_exception(EngineLostError(text))
        for future in pending:
            self._known.put((future, EngineLostError(text)))
        self._known.put(None)


def _set(future: Future[Any], value: Any) -> None:
    if isinstance(value, Exception):
        future.set_exception(value)
    else:
        future.set_result(value)


def serve(pipe: Connection, build: Callable[[], RolloutEngine]) -> None:
    """Run the engine's process: build it, do what is asked, end with the pipe, or with the process that started it."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the trainer's business
    sending = threading.Lock()

    def send(kind: str, key: int | str, value: Any) -> None:
        with sending:
            pipe.send_bytes(pickle.dumps((kind, key, value), protocol=pickle.HIGHEST_PROTOCOL))

    def answer(number: int, work: Callable[[], Any]) -> None:
        try:
            value = work()
        except Exception as error:
            send("answer error", number, told(error))
        else:
            send("answer", number, value)

    def submit(request: GenerationRequest) -> None:
        def ended(future: Future[Completion]) -> None:
            error = future.exception()
            if error is None:
                send("completion", request.request_id, future.result())
            else:
                send("request error", request.request_id, told(error))

        try:
            engine.submit(request).add_done_callback(ended)
        except Exception as error:
            send("request error", request.request_id, told(error))

    try:
        engine = build()
    except Exception as error:
        logger.exception("the rollout engine did not start")
        send("answer error", _START, told(error))
        return
    send("answer", _START, [getattr(engine, fact) for fact in _FACTS])
    try:
        while True:
            match pickle.loads(pipe.recv_bytes()):
                case ("submit", request):
                    submit(request)
                case ("abort", request_ids):
                    engine.abort(request_ids)
                case ("call", number, method, arguments):
                    answer(number, partial(getattr(engine, method), *arguments))
                case ("load", number, way, device, version, adapters_alone):
                    answer(number, partial(_load, engine, way, device, version, adapters_alone))
                case ("stop",):
                    break
        engine.shutdown()
    except (EOFError, OSError):  # the other process is gone, with all that waited for an answer
        os._exit(1)


def _load(engine: RolloutEngine, way: Way, device: torch.device, version: int, adapters_alone: bool) -> None:
    receiver = IpcReceiver(way, 0, device)
    try:
        _, stream = receiver.receive()
        engine.load_weights(stream, version, partial=adapters_alone)
    except Exception as error:
        receiver.fail(str(error))
        raise
    finally:
        receiver.close()
