"""A replica with fake time behind a LinkServer, in this process or in one of its own, for test_links.py."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

from tests.worlds.processes import forks
from verl_like.kit.bench.fake_time import FakeTimeEngine, FakeTimeRollout
from verl_like.rollout.link import LinkServer
from verl_like.rollout.rollout_engine import GenerationRequest

MAX_MODEL_LEN = 10**8


class StrangeError(ValueError):
    """As of a library that the driver does not have."""


class PickyEngine(FakeTimeEngine):
    """Refuses a request for 777 tokens, with an error of its own kind."""

    def __init__(self) -> None:
        super().__init__(length_of=lambda request: 10**9, max_model_len=MAX_MODEL_LEN)

    def add(self, request: GenerationRequest) -> None:
        if request.sampling.max_tokens == 777:
            raise StrangeError("777 is unlucky")
        super().add(request)


class Replica:
    """The server's side. Calls come from the test, by name in another process."""

    def __init__(self) -> None:
        self.rollout = FakeTimeRollout(PickyEngine())
        self.server = LinkServer(self.rollout, "127.0.0.1")

    def way(self) -> tuple[tuple[str, int], bytes]:
        return self.server.address, self.server.authkey

    def serve(self, num_orders: int) -> None:
        self.server.serve(num_orders)

    def break_step(self) -> None:
        self.rollout.fake.failure = KeyError("broken step")

    def unload(self) -> None:
        self.rollout.unload()

    def facts(self) -> tuple[bool, int, int]:
        """Whether it is paused, steps made, requests under way."""
        return self.rollout.paused, self.rollout.fake.num_steps, len(self.rollout._loop._futures)

    def shutdown(self) -> None:
        self.server.close()
        self.rollout.shutdown()


class Here:
    """Its calls run in threads of this process."""

    def __init__(self) -> None:
        self.replica = Replica()
        self._threads = ThreadPoolExecutor(4)

    def call(self, method: str, *arguments: Any) -> Future[Any]:
        return self._threads.submit(getattr(self.replica, method), *arguments)

    def close(self) -> None:
        self.replica.shutdown()
        self._threads.shutdown()


class Elsewhere:
    """The same in another process, behind a pipe: not the link's."""

    def __init__(self) -> None:
        self._pipe, theirs = forks().Pipe()
        self.process = forks().Process(target=_work, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()
        self._calls: list[Future[Any]] = []
        self._reader = ThreadPoolExecutor(1)
        self._reader.submit(self._read)

    def call(self, method: str, *arguments: Any) -> Future[Any]:
        self._calls.append(Future())
        self._pipe.send((len(self._calls) - 1, method, arguments))
        return self._calls[-1]

    def close(self) -> None:
        """Make room for the next test's replica."""
        if self.process.is_alive():
            self.call("shutdown").result(60)

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self._reader.shutdown()

    def _read(self) -> None:
        try:
            while True:
                number, value, error = self._pipe.recv()
                if error is None:
                    self._calls[number].set_result(value)
                else:
                    self._calls[number].set_exception(error)
        except (EOFError, OSError):
            pass


def _work(pipe: Connection) -> None:
    replicas: list[Replica] = []
    threads = ThreadPoolExecutor(4)

    def run(number: int, method: str, arguments: tuple[Any, ...]) -> None:
        try:
            if method == "begin":
                answer = number, replicas.append(Replica()), None
            else:
                answer = number, getattr(replicas[-1], method)(*arguments), None
        except Exception as error:
            answer = number, None, error
        pipe.send(answer)

    while True:
        threads.submit(run, *pipe.recv())
