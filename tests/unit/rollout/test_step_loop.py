"""The step loop with an engine made of counters: no model."""

from __future__ import annotations

import queue
import threading
from concurrent.futures import Future

import pytest
import torch

from verl_like.rollout.rollout_engine import Completion, GenerationRequest, RolloutError, SamplingParams
from verl_like.rollout.step_loop import StepLoop


def _request(name: str, tokens: int = 3) -> GenerationRequest:
    return GenerationRequest(request_id=name, prompt_ids=[1], sampling=SamplingParams(max_tokens=tokens))


class CountingEngine:
    """Every request takes max_tokens steps; request "bad" is refused, request "bomb" breaks the step."""

    def __init__(self) -> None:
        self.left: dict[str, int] = {}
        self.added: list[str] = []
        self.gate = threading.Event()
        self.gate.set()

    def add(self, request: GenerationRequest) -> None:
        if request.request_id == "bad":
            raise ValueError("bad request")
        self.added.append(request.request_id)
        self.left[request.request_id] = request.sampling.max_tokens

    def step(self) -> list[Completion]:
        self.gate.wait(10)
        if "bomb" in self.left:
            raise KeyError("broken step")
        self.left = {name: n - 1 for name, n in self.left.items()}
        return self._pop([name for name, n in self.left.items() if n <= 0], "length")

    def has_unfinished(self) -> bool:
        return bool(self.left)

    def abort(self) -> list[Completion]:
        return self._pop(list(self.left), "abort")

    def _pop(self, names: list[str], reason: str) -> list[Completion]:
        for name in names:
            del self.left[name]
        return [
            Completion(request_id=n, token_ids=[], log_probs=[], finish_reason=reason, weight_version=0)  # type: ignore[arg-type]
            for n in names
        ]


class Wire:
    """A Lockstep whose broadcast is a queue inside this process."""

    def __init__(self, channel: queue.Queue, is_leader: bool) -> None:
        self._channel = channel
        self.is_leader = is_leader

    def agree(self, announcement: tuple[list[str], bool] | None) -> tuple[list[str], bool]:
        if self.is_leader:
            self._channel.put(announcement)
            assert announcement is not None
            return announcement
        return self._channel.get(timeout=10)


def _loop(engine: CountingEngine, lockstep: Wire | None = None, timeout: float = 10.0) -> StepLoop:
    return StepLoop(engine, device=torch.device("cpu"), lockstep=lockstep, follow_timeout_s=timeout)  # type: ignore[arg-type]


def test_futures_resolve_as_each_ends() -> None:
    loop = _loop(CountingEngine())
    long, short = loop.submit(_request("long", 500)), loop.submit(_request("short", 1))
    assert short.result(10).request_id == "short"
    assert long.result(10).finish_reason == "length"
    loop.close()


def test_a_broken_step_reaches_every_pending_future_and_later_callers() -> None:
    engine = CountingEngine()
    engine.gate.clear()
    loop = _loop(engine)
    futures = [loop.submit(_request(name)) for name in ("a", "bomb", "b")]
    engine.gate.set()
    for future in futures:
        with pytest.raises(RolloutError, match="broken step") as caught:
            future.result(10)
        assert isinstance(caught.value.__cause__, KeyError)
    with pytest.raises(RolloutError, match="has stopped"):
        loop.submit(_request("c"))
    loop.close()


def test_a_refused_request_fails_alone() -> None:
    loop = _loop(CountingEngine())
    good, bad = loop.submit(_request("good")), loop.submit(_request("bad"))
    with pytest.raises(ValueError, match="bad request"):
        bad.result(10)
    assert good.result(10).finish_reason == "length"
    loop.close()


def test_exclusive_needs_an_idle_engine() -> None:
    engine = CountingEngine()
    loop = _loop(engine)
    pending = loop.submit(_request("a", 10_000_000))
    engine.gate.clear()
    engine.gate.set()
    with pytest.raises(RolloutError, match="1 requests are still"), loop.exclusive():
        pass
    loop.abort_all()
    assert pending.result(10).finish_reason == "abort"
    with loop.exclusive():
        pass
    loop.close()


def test_duplicate_ids_are_refused_and_close_fails_what_is_pending() -> None:
    engine = CountingEngine()
    engine.gate.clear()
    loop = _loop(engine)
    pending = loop.submit(_request("a", 10_000_000))
    with pytest.raises(ValueError, match="already in use"):
        loop.submit(_request("a"))
    engine.gate.set()
    loop.close()
    with pytest.raises(RolloutError, match="shut down"):
        pending.result(10)


def test_ranks_add_the_same_requests_at_the_same_steps_whatever_the_order_of_arrival() -> None:
    channel: queue.Queue = queue.Queue()
    engines = CountingEngine(), CountingEngine()
    leader, follower = _loop(engines[0], Wire(channel, True)), _loop(engines[1], Wire(channel, False))
    names = [f"r{i}" for i in range(30)]
    futures: list[Future[Completion]] = [follower.submit(_request(n, 1 + len(n))) for n in names[::-1]]
    futures += [leader.submit(_request(n, 1 + len(n))) for n in names]
    for future in futures:
        assert future.result(10).finish_reason == "length"
    assert engines[0].added == engines[1].added == names
    leader.close(), follower.close()


def test_a_follower_that_is_never_given_a_request_says_so() -> None:
    channel: queue.Queue = queue.Queue()
    leader, follower = (
        _loop(CountingEngine(), Wire(channel, True)),
        _loop(CountingEngine(), Wire(channel, False), timeout=0.2),
    )
    leader.submit(_request("only-leader"))
    with pytest.raises(RolloutError, match="was not given requests"):
        follower.submit(_request("only-follower")).result(10)
    leader.close(), follower.close()


def test_steps_run_on_the_stream_of_the_thread_that_made_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CUDA stream is chosen thread by thread; on different ones, steps and loading weights would not be ordered."""
    chosen: list[tuple[str, object]] = []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {threading.current_thread().name}")
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(
        torch.cuda, "set_stream", lambda stream: chosen.append((threading.current_thread().name, stream))
    )
    loop = StepLoop(CountingEngine(), device=torch.device("cuda", 0), follow_timeout_s=1.0)
    assert loop.submit(_request("a")).result(10).finish_reason == "length"
    loop.close()
    assert chosen == [("rollout-steps", f"stream of {threading.current_thread().name}")]
