"""An engine in a process of its own, behind a pipe.

    this process                                        the engine's process
    RemoteEngine.submit, abort, load_weights, ... ───>  main thread: one message after the other
    answers  <── reader thread <──────────────────────  answers, and completions as they end
    futures  <── thread of their callbacks <──┘

What is said here is done there, in that order. The process ends with its pipe, so it never outlives this one.
"""

from __future__ import annotations

import itertools
import os
import pickle
import signal
import threading
from collections import deque
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

from verl_like.rollout.base import EngineBase
from verl_like.rollout.rollout_engine import (
    Completion,
    GenerationRequest,
    HeldWeights,
    RolloutEngine,
    RolloutError,
    Sampled,
    WeightLoadError,
)
from verl_like.rollout.travel import heard, told

_TIMEOUT_S = 600.0
_STOP_S = 30.0
_START = -1  # the number of the first answer, which nobody asked for
_FACTS = ("dtype", "tokenizer_size", "max_model_len", "keeps_adapters")


class RemoteEngine(EngineBase):
    """A RolloutEngine whose work is done by another one, in a process that this object starts and ends.

    build: makes the engine, there; it is pickled. reads_text: whether that engine was given a tokenizer. timeout_s: how
    long a call, or the start, may take; then RolloutError, and the process is ended. Not for tensor-parallel replicas.
    Callbacks of the futures may submit, abort and look, but not open, pause or shut down.
    """

    def __init__(
        self, build: Callable[[], RolloutEngine], *, reads_text: bool = False, timeout_s: float = _TIMEOUT_S
    ) -> None:
        context = get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, build), name="rollout-engine", daemon=True)
        self._process.start()
        theirs.close()
        self._timeout_s = timeout_s
        self._sending = threading.Lock()
        self._changed = threading.Lock()  # guards everything below
        self._numbers = itertools.count()
        self._answers: dict[int, Future[Any]] = {}
        self._asked_inside: set[int] = set()  # by callbacks, which the resolver waits for
        self._pending: dict[str, Future[Completion]] = {}
        self._open, self._error = False, ""
        started = self._answers[_START] = Future[Any]()
        self._known: SimpleQueue[tuple[Future[Any], Any] | None] = SimpleQueue()
        # Callbacks are not the reader's: one that asks for something, or sends much, would wait for the reader itself.
        self._resolver = threading.Thread(target=self._resolve, name="rollout-futures", daemon=True)
        self._resolver.start()
        self._reader = threading.Thread(target=self._read, name="rollout-replies", daemon=True)
        self._reader.start()
        facts = dict(zip(_FACTS, self._result(started, "start"), strict=True))
        super().__init__(**facts, seed=0, reads_text=reads_text)

    def open(self) -> None:
        self._require_weights()
        self._call("open")
        self._open = True

    def pause(self) -> None:
        self._call("pause")
        self._open = False

    @property
    def paused(self) -> bool:
        return not self._open

    def abort(self, request_ids: Sequence[str] | None = None) -> None:
        self._send(("abort", request_ids))

    def snapshot(self) -> dict[str, Sampled]:
        return self._call("snapshot")

    def load_weights(
        self, stream: Iterable[tuple[str, Tensor]], version: int, *, partial: bool = False, mark: str = ""
    ) -> None:
        """See RolloutEngine. Tensors are copied through the pipe, one at a time."""
        self._require_base(partial)
        super().unload()  # the other engine does so itself, if it takes the weights at all
        answer = self._ask("load", version, partial)
        try:
            for name, tensor in stream:
                self._send(("tensor", name, tensor.detach().to(device="cpu")))
        except BaseException:
            self._send(("broken",))
            answer.exception(self._timeout_s)  # the engine's own account of it, which is this one's echo
            raise
        self._send(("end",))
        self._result(answer, "load_weights")
        self._in_memory, self._unloaded = HeldWeights(version=version, mark=mark), False

    def weight_checksums(self, shapes: Mapping[str, torch.Size]) -> list[tuple[str, int]]:
        return self._call("weight_checksums", dict(shapes))

    def unload(self) -> None:
        super().unload()
        self._call("unload")

    def sleep(self) -> None:
        self._call("sleep")

    def wake(self) -> None:
        self._call("wake")

    def shutdown(self) -> None:
        super().unload()
        with suppress(RolloutError):  # it has ended already
            self._send(("stop",))
        self._process.join(_STOP_S)
        self._process.kill()
        self._process.join()
        self._reader.join(_STOP_S)
        self._resolver.join(_STOP_S)
        self._pipe.close()

    def _queue(self, request: GenerationRequest) -> Future[Completion]:
        future: Future[Completion] = Future()
        future.set_running_or_notify_cancel()
        with self._changed:
            if request.request_id in self._pending:
                raise ValueError(f"request id {request.request_id!r} is already in use")
            self._pending[request.request_id] = future
        try:
            self._send(("submit", request))
        except BaseException:
            with self._changed:
                self._pending.pop(request.request_id, None)
            raise
        return future

    def _exclusive(self) -> AbstractContextManager[None]:
        return nullcontext()  # the engine itself sees to it

    def _score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        return self._call("score", [list(sequence) for sequence in sequences])

    def _cached_tokens(self) -> int:
        return self._call("cached_tokens")

    def _call(self, method: str, *arguments: Any) -> Any:
        return self._result(self._ask("call", method, arguments), method)

    def _ask(self, kind: str, *arguments: Any) -> Future[Any]:
        answer: Future[Any] = Future()
        with self._changed:
            number = next(self._numbers)
            self._answers[number] = answer
            if threading.current_thread() is self._resolver:
                self._asked_inside.add(number)
        self._send((kind, number, *arguments))
        return answer

    def _result(self, answer: Future[Any], method: str) -> Any:
        try:
            return answer.result(self._timeout_s)
        except NoAnswer:
            self._process.kill()
            raise RolloutError(f"the engine's process did not answer {method}() within {self._timeout_s:g} s") from None

    def _send(self, message: tuple[Any, ...]) -> None:
        with self._sending:
            if self._error:
                raise RolloutError(self._error)
            try:
                self._pipe.send_bytes(pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL))
            except OSError as error:
                raise RolloutError(f"the engine's process is gone: {error}") from error

    def _read(self) -> None:
        try:
            while True:
                kind, key, value = pickle.loads(self._pipe.recv_bytes())
                if kind not in ("answer", "completion"):
                    value = heard(value)
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
            self._process.join(_STOP_S)
            self._fail(f"the engine's process has ended (exit code {self._process.exitcode})")
        except Exception as error:
            self._process.kill()
            self._fail(f"what the engine's process said cannot be read: {error!r}")

    def _resolve(self) -> None:
        while (known := self._known.get()) is not None:
            _set(*known)

    def _fail(self, text: str) -> None:
        with self._changed:
            self._error = text
            answers, pending = list(self._answers.values()), list(self._pending.values())
            self._answers, self._pending = {}, {}
        for future in answers:
            future.set_exception(RolloutError(text))
        for future in pending:
            self._known.put((future, RolloutError(text)))
        self._known.put(None)


def _set(future: Future[Any], value: Any) -> None:
    if isinstance(value, Exception):
        future.set_exception(value)
    else:
        future.set_result(value)


def serve(pipe: Connection, build: Callable[[], RolloutEngine]) -> None:
    """The engine's process: build it, do what is asked, end with the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the trainer's business
    sending = threading.Lock()
    later: deque[tuple[Any, ...]] = deque()  # what was said in the midst of a stream of weights

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
        send("answer error", _START, told(error))
        return
    send("answer", _START, [getattr(engine, fact) for fact in _FACTS])
    try:
        while True:
            match later.popleft() if later else pickle.loads(pipe.recv_bytes()):
                case ("submit", request):
                    submit(request)
                case ("abort", request_ids):
                    engine.abort(request_ids)
                case ("call", number, method, arguments):
                    answer(number, partial(getattr(engine, method), *arguments))
                case ("load", number, version, adapters_alone):
                    answer(number, partial(_load, pipe, later, engine, version, adapters_alone))
                case ("stop",):
                    break
        engine.shutdown()
    except (EOFError, OSError):  # the other process is gone, with all that waited for an answer
        os._exit(1)


def _load(
    pipe: Connection, later: deque[tuple[Any, ...]], engine: RolloutEngine, version: int, adapters_alone: bool
) -> None:
    """Read a stream to its end, also where the engine has refused it in the middle. What other threads say between its
    tensors is done after it."""
    messages = _of_stream(pipe, later)
    ended = False

    def stream() -> Iterator[tuple[str, Tensor]]:
        nonlocal ended
        for message in messages:
            if message[0] == "tensor":
                yield message[1], message[2]
                continue
            ended = True
            if message[0] == "broken":
                raise WeightLoadError("the stream of weights broke off")
            return

    try:
        engine.load_weights(stream(), version, partial=adapters_alone)
    finally:
        while not ended and next(messages)[0] == "tensor":
            pass


def _of_stream(pipe: Connection, later: deque[tuple[Any, ...]]) -> Iterator[tuple[Any, ...]]:
    while True:
        message = pickle.loads(pipe.recv_bytes())
        if message[0] in ("tensor", "broken", "end"):
            yield message
        else:
            later.append(message)
