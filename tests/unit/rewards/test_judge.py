"""The judge: what it is asked, how its answer is read, limits, and what happens when the endpoint misbehaves."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tests.unit.rewards.factory import CharTokenizer, make_rollouts
from verl_like.config import CustomRewardFunctionConfig, DataConfig, JudgeConfig, RewardModelConfig
from verl_like.config.reward_execution import SandboxFusionConfig
from verl_like.plugins.reward_models.judge import Judge, RateLimit
from verl_like.rewards.manager import RewardManager
from verl_like.rewards.reward_call import RewardCall

pytestmark = pytest.mark.timeout(60)


class Endpoint(ThreadingHTTPServer):
    """An OpenAI-compatible endpoint whose answers the test gives."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answer: Callable[[str], str] = lambda prompt: "Yes"
        self.faults: list[tuple[int, str]] = []
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.running = self.most_running = 0
        self.pause = 0.0
        self.drip = 0.0  # [s] between the bytes of a reply
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


class _Handler(BaseHTTPRequestHandler):
    server: Endpoint

    def do_POST(self) -> None:
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with server.lock:
            server.bodies.append(body)
            server.headers.append(dict(self.headers))
            fault = server.faults.pop(0) if server.faults else None
            server.running += 1
            server.most_running = max(server.most_running, server.running)
        time.sleep(server.pause)
        answer = server.answer(body["messages"][0]["content"])
        good = {"choices": [{"message": {"content": answer}}], "usage": {"total_tokens": 10}}
        status, text = fault or (200, json.dumps(good))
        if self.path != "/v1/chat/completions":
            status, text = 404, self.path
        with server.lock:
            server.running -= 1
        self.send_response(status)
        self.end_headers()
        for byte in text.encode() if server.drip else ():
            self.wfile.write(bytes([byte]))
            time.sleep(server.drip)
        self.wfile.write(b"" if server.drip else text.encode())

    def log_message(self, format: str, *args: Any) -> None: ...


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    made = Endpoint()
    threading.Thread(target=made.serve_forever, args=(0.01,), daemon=True).start()
    yield made
    made.shutdown()
    made.server_close()


def call(response: str = "4", **fields: Any) -> RewardCall:
    return RewardCall(data_source="x", solution_str=response, ground_truth="4", question="What is 2 + 2?", **fields)


def config(endpoint: Endpoint, **changes: Any) -> JudgeConfig:
    return JudgeConfig(**{"url": endpoint.url, "retry_delay": 0.01, "timeout": 5.0, **changes})


def test_what_is_sent(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "sesame")
    prompt = "Q {question} R {response} A {reference} {other} {question}"
    judge = Judge(config(endpoint, prompt=prompt, model="big", api_key_env="MY_KEY", max_tokens=9, temperature=0.5))
    judge.submit([call("{reference}")])[0].result(10)
    assert endpoint.bodies == [
        {
            "model": "big",
            "messages": [
                {
                    "role": "user",
                    "content": "Q What is 2 + 2? R {reference} A 4 {other} What is 2 + 2?",
                }  # filled in once
            ],
            "max_tokens": 9,
            "temperature": 0.5,
        }
    ]
    assert endpoint.headers[0]["Authorization"] == "Bearer sesame"
    judge.close()


def test_a_missing_key_is_told_at_the_start(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_KEY", raising=False)
    with pytest.raises(ValueError, match="api_key_env=NO_KEY: there is no such environment variable"):
        Judge(config(endpoint, api_key_env="NO_KEY"))


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        ("Yes", 1.0),
        ("The answer is wrong. No", 0.0),
        ("No wait, it is right: YES.", 1.0),
        ("Score: 7", 0.7),
        ("score: 3 ... Score: 8.5", 0.85),
        ("Yes. Score: 2", 0.2),
        ("Score: 1.2.3", None),
        ("I cannot say", None),
        ("nothing known", None),
        ("", None),
    ],
)
def test_reading_the_score(endpoint: Endpoint, answer: str, score: float | None) -> None:
    judge = Judge(config(endpoint))
    assert judge.read_score(answer) == (None if score is None else pytest.approx(score))
    judge.close()


def test_own_pattern(endpoint: Endpoint) -> None:
    judge = Judge(config(endpoint, score_pattern=r"\[\[(\d+)\]\]", score_scale=5))
    assert judge.read_score("so [[4]]") == 0.8
    judge.close()
    with pytest.raises(ValueError, match="exactly one group"):
        JudgeConfig(score_pattern="score")
    with pytest.raises(ValueError, match="no regular expression"):
        JudgeConfig(score_pattern="(")


def test_trouble_is_typed_and_tried_again(endpoint: Endpoint) -> None:
    judge = Judge(config(endpoint, max_retries=2, max_concurrent=1))
    endpoint.faults = [(500, ""), (429, ""), (200, "garbage")]
    first, second = (future.result(10) for future in judge.submit([call(), call()]))
    assert (first.kind, first.score) == ("service", None)  # three tries, all in vain
    assert "failed 3 times" in first.message
    assert (second.kind, second.score) == (None, 1.0)
    endpoint.faults = [(401, "who are you")]
    refused = judge.submit([call()])[0].result(10)
    assert refused.kind == "service" and "HTTP 401: who are you" in refused.message
    endpoint.faults = [(200, '{"choices": []}')] * 3
    assert "no chat completion" in judge.submit([call()])[0].result(10).message
    endpoint.answer = lambda prompt: "hm"
    assert judge.submit([call()])[0].result(10).kind == "bad_value"
    judge.close()


def test_a_judge_that_does_not_answer(endpoint: Endpoint) -> None:
    endpoint.pause = 1.0
    judge = Judge(config(endpoint, timeout=0.2, max_retries=1))
    outcome = judge.submit([call()])[0].result(10)
    assert outcome.kind == "service" and "timed out" in outcome.message
    judge.close()


def test_a_reply_that_drips_in_is_given_up(endpoint: Endpoint) -> None:
    endpoint.drip = 0.05  # always faster than the time limit of a single read
    judge = Judge(config(endpoint, timeout=0.3, max_retries=0))
    outcome = judge.submit([call()])[0].result(10)
    assert outcome.kind == "service" and "in the middle of the reply" in outcome.message
    judge.close()


def test_concurrency(endpoint: Endpoint) -> None:
    endpoint.pause = 0.1
    judge = Judge(config(endpoint, max_concurrent=3))
    assert {future.result(10).score for future in judge.submit([call()] * 9)} == {1.0}
    assert endpoint.most_running == 3
    judge.close()


class Clock:
    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.time += seconds


class TestRateLimit:
    def times(self, limit: float | None, units: list[float]) -> list[float]:
        clock = Clock()
        rate = RateLimit(limit, now=clock.now, sleep=clock.sleep)
        starts = []
        for amount in units:
            rate.take(amount)
            starts.append(clock.time)
            clock.time += 1.0  # a request takes a second
        return starts

    def test_no_more_than_the_limit_in_any_minute(self) -> None:
        starts = self.times(3, [1] * 10)
        assert starts == [0, 1, 2, 60, 61, 62, 120, 121, 122, 180]

    def test_units_differ(self) -> None:
        assert self.times(100, [60, 40, 50, 10]) == [0, 1, 60, 61]

    def test_what_is_larger_than_the_limit_goes_alone(self) -> None:
        assert self.times(100, [500, 1, 500]) == [0, 60, 120]

    def test_no_limit(self) -> None:
        assert self.times(None, [1e9] * 3) == [0, 1, 2]

    def test_what_was_really_used_counts(self) -> None:
        clock = Clock()
        rate = RateLimit(100, now=clock.now, sleep=clock.sleep)
        entry = rate.take(90)
        assert entry is not None
        entry[1] = 20
        rate.take(80)
        assert clock.time == 0.0


def test_requests_per_minute_reach_the_judge(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    judge = Judge(config(endpoint, max_rpm=2, max_tpm=10**6))
    clock = Clock()
    monkeypatch.setattr(judge._requests, "_now", clock.now)
    monkeypatch.setattr(judge._requests, "_sleep", clock.sleep)
    for future in judge.submit([call()] * 5):
        future.result(10)
    assert clock.time == 120.0
    judge.close()


def test_further_tries_count_as_requests(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    endpoint.faults = [(429, "")] * 4
    judge = Judge(config(endpoint, max_rpm=2, max_retries=4))
    clock = Clock()
    monkeypatch.setattr(judge._requests, "_now", clock.now)
    monkeypatch.setattr(judge._requests, "_sleep", clock.sleep)
    assert judge.submit([call()])[0].result(10).score == 1.0
    assert len(endpoint.bodies) == 5 and clock.time == 120.0
    judge.close()


def test_closing_does_not_wait_for_the_next_minute(endpoint: Endpoint) -> None:
    judge = Judge(config(endpoint, max_rpm=1, max_concurrent=3))
    futures = judge.submit([call()] * 3)
    started = time.monotonic()
    while not any(future.done() for future in futures):
        time.sleep(0.01)
    judge.close()
    ends = ["cancelled" if future.cancelled() else future.result(10).kind for future in futures]
    assert ends.count(None) == 1 and set(ends) <= {None, "service", "cancelled"}
    assert len(endpoint.bodies) == 1 and time.monotonic() - started < 10


def test_an_address_without_a_scheme_is_refused() -> None:
    with pytest.raises(ValueError, match=r"url='localhost:8000/v1': write it with http:// or https://"):
        JudgeConfig(url="localhost:8000/v1")
    with pytest.raises(ValueError, match=r"url='sandbox/run': write it with http://"):
        SandboxFusionConfig(url="sandbox/run")


def test_through_the_manager_alone_and_as_a_part(endpoint: Endpoint) -> None:
    endpoint.answer = lambda prompt: "Score: 5" if "graded:\n5" in prompt else "No"
    custom, data = CustomRewardFunctionConfig(), DataConfig()
    rollouts = make_rollouts(["5", "6"])
    with RewardManager(custom, RewardModelConfig(judge=config(endpoint)), data, CharTokenizer()) as manager:
        manager.check_rows([("anything", "")])
        scores = manager.score(rollouts, step=1)
        assert scores.score_B.tolist() == [0.5, 0.0]
        assert scores.extras[0]["judge"] == "Score: 5"
    weights = {"*": {"arithmetic": 1.0, "judge": 0.5}}
    both = RewardModelConfig(judge=config(endpoint), weights=weights)
    with RewardManager(custom, both, data, CharTokenizer()) as manager:
        assert manager.score(rollouts, step=1).score_B.tolist() == [1.25, 0.0]
