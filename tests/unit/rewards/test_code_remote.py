"""The client of the remote sandbox, against a local HTTP server with SandboxFusion's API and planted faults."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tests.unit.rewards.factory import CharTokenizer, make_rollouts
from verl_like.config import CustomRewardFunctionConfig, DataConfig, RewardModelConfig
from verl_like.config.reward_execution import SandboxFusionConfig
from verl_like.plugins.code_grading import code
from verl_like.plugins.http_json import ServiceError
from verl_like.rewards.manager import RewardManager

pytestmark = pytest.mark.timeout(60)
SQUARES = {"inputs": ["1\n", "2\n", "3\n"], "outputs": ["1\n", "4\n", "9\n"]}
RIGHT = "```python\nprint(int(input()) ** 2)\n```"


class FakeSandbox(ThreadingHTTPServer):
    """Runs the programs it is sent (this test's own) and replies as SandboxFusion does; `faults` come first."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.faults: list[Callable[[_Handler], None]] = []
        self.requests: list[dict[str, Any]] = []
        self.times: list[float] = []
        self.running = self.most_running = 0
        self.lock = threading.Lock()
        self.pause = 0.0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/run_code"

    def execute(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            done = subprocess.run(
                [sys.executable, "-c", request["code"]],
                input=request["stdin"],
                capture_output=True,
                text=True,
                timeout=request["run_timeout"],
            )
        except subprocess.TimeoutExpired:
            return {"status": "Failed", "message": "", "run_result": {"status": "TimeLimitExceeded", "stdout": ""}}
        return {
            "status": "Success" if done.returncode == 0 else "Failed",
            "message": "",
            "compile_result": None,
            "run_result": {
                "status": "Finished",
                "return_code": done.returncode,
                "stdout": done.stdout,
                "stderr": done.stderr,
                "execution_time": 0.1,
            },
        }


class _Handler(BaseHTTPRequestHandler):
    server: FakeSandbox

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.requests.append(request)
            self.server.times.append(time.monotonic())
            fault = self.server.faults.pop(0) if self.server.faults else None
            self.server.running += 1
            self.server.most_running = max(self.server.most_running, self.server.running)
        try:
            time.sleep(self.server.pause)
            if fault is not None:
                fault(self)
            else:
                self.reply(json.dumps(self.server.execute(request)))
        finally:
            with self.server.lock:
                self.server.running -= 1

    def reply(self, text: str, status: int = 200) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: Any) -> None: ...


def status(number: int) -> Callable[[_Handler], None]:
    return lambda handler: handler.reply("trouble", number)


def text(content: str) -> Callable[[_Handler], None]:
    return lambda handler: handler.reply(content)


def hang_up(handler: _Handler) -> None:
    handler.connection.close()


@pytest.fixture
def server() -> Iterator[FakeSandbox]:
    made = FakeSandbox()
    threading.Thread(target=made.serve_forever, args=(0.01,), daemon=True).start()
    yield made
    made.shutdown()
    made.server_close()


def settings(server: FakeSandbox, **changes: Any) -> dict[str, Any]:
    return {"url": server.url, "max_concurrent": 1, "timeout": 2.0, "retry_delay": 0.05, **changes}


def grade(server: FakeSandbox, response: str, truth: Any, *, partial_credit: bool = True, **changes: Any) -> Any:
    remote = settings(server, **changes)
    return code.compute_score("codecontests", response, truth, {}, remote=remote, partial_credit=partial_credit)


def test_programs_calls_and_asserts(server: FakeSandbox) -> None:
    assert grade(server, RIGHT, SQUARES)["score"] == 1.0
    some = "```python\nx = int(input())\nprint(x * x if x < 3 else 0)\n```"
    result = grade(server, some, SQUARES)
    assert result["score"] == pytest.approx(2 / 3)
    assert result["first_failure"] == r"test 3: wrong: input '3\n', expected '9\n'; got '0\n'"
    assert grade(server, some, SQUARES, partial_credit=False)["score"] == 0.0
    calls = {"fn_name": "f", "inputs": [[1, 2], [3, 4]], "outputs": [3, 7]}
    assert grade(server, "```python\nprint('noise')\ndef f(a, b): return a + b\n```", calls)["score"] == 1.0
    asserts = ["assert f(1) == 2", "assert f(2) == 3"]
    assert grade(server, "```python\ndef f(x): return x + 1\n```", asserts)["score"] == 1.0
    assert grade(server, "```python\ndef f(x): return 2\n```", asserts)["score"] == 0.0
    assert grade(server, "```python\nimport sys; sys.exit(0)\n```", asserts)["score"] == 0.0
    assert "NameError" in grade(server, "```python\nprint(nothing)\n```", SQUARES)["first_failure"]


def test_what_is_sent(server: FakeSandbox) -> None:
    grade(server, RIGHT, {"inputs": ["1\n"], "outputs": ["1\n"]}, memory_limit_mb=77)
    (request,) = server.requests
    assert request == {
        "code": "print(int(input()) ** 2)",
        "stdin": "1\n",
        "language": "python",
        "compile_timeout": 2.0,
        "run_timeout": 2.0,
        "memory_limit_MB": 77,
    }


def test_a_slow_program_is_wrong(server: FakeSandbox) -> None:
    result = grade(server, "```python\nwhile True: pass\n```", SQUARES, timeout=0.3)
    assert (result["score"], result["first_failure"].split(";")[0].split(": input")[0]) == (0.0, "test 1: timeout")


@pytest.mark.parametrize(
    "fault",
    [
        status(500),
        status(504),
        status(429),
        text("<html>not json"),
        text('{"status": "SandboxError", "message": "full"}'),
        text("[]"),
        text('{"status": "Success"}'),
        hang_up,
    ],
)
def test_transient_trouble_is_tried_again(server: FakeSandbox, fault: Callable[[_Handler], None]) -> None:
    server.faults = [fault, fault]
    assert grade(server, RIGHT, SQUARES)["score"] == 1.0
    assert len(server.requests) == 5


def test_delays_grow_and_end_in_an_error(server: FakeSandbox) -> None:
    server.faults = [status(503)] * 10
    with pytest.raises(ServiceError, match="failed 4 times; the last: HTTP 503"):
        grade(server, RIGHT, {"inputs": ["1\n"], "outputs": ["1\n"]}, max_retries=3)
    gaps = [later - earlier for earlier, later in zip(server.times, server.times[1:], strict=False)]
    assert len(gaps) == 3
    assert gaps[0] >= 0.05 and gaps[1] >= 0.1 and gaps[2] >= 0.2


def test_a_refused_request_is_not_tried_again(server: FakeSandbox) -> None:
    server.faults = [status(422)]
    with pytest.raises(ServiceError, match="HTTP 422: trouble"):
        grade(server, RIGHT, {"inputs": ["1\n"], "outputs": ["1\n"]})
    assert len(server.requests) == 1


def test_no_server_at_all(server: FakeSandbox) -> None:
    server.server_close()
    with pytest.raises(ServiceError, match=r"failed 2 times.*refused"):
        grade(server, RIGHT, SQUARES, max_retries=1)


def test_concurrency_is_used_and_limited(server: FakeSandbox) -> None:
    server.pause = 0.1
    many = {"inputs": [f"{i}\n" for i in range(8)], "outputs": [f"{i * i}\n" for i in range(8)]}
    assert grade(server, RIGHT, many, max_concurrent=3)["score"] == 1.0
    assert server.most_running == 3


def test_through_the_manager_a_broken_sandbox_is_a_typed_failure(server: FakeSandbox) -> None:
    fusion = SandboxFusionConfig(url=server.url, max_concurrent=1, max_retries=0, timeout=2.0)
    config = RewardModelConfig(sandbox_fusion=fusion)
    rollouts = make_rollouts([RIGHT] * 3, data_source="codecontests", ground_truths=[SQUARES] * 3)
    server.faults = [status(500)]
    with RewardManager(CustomRewardFunctionConfig(), config, DataConfig(), CharTokenizer()) as manager:
        manager.check_rows([("codecontests", "")])
        scores = manager.score(rollouts, step=1)
    assert scores.valid_B.tolist() == [False, True, True]
    assert scores.score_B[1:].tolist() == [1.0, 1.0]
    assert scores.failures[0] is not None and "HTTP 500" in scores.failures[0].message
