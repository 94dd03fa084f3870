"""Runners of the code grader: programs run in the sandbox of this machine, or in a remote one.

Local: a jail serves many responses, for a program dies with its run. Remote: SandboxFusion's API, POST <url> {code,
stdin, language, ...} (bytedance.github.io/SandboxFusion/docs/api/run-code-run-code-post). That sandbox runs one program
at a time, so a function call travels as a program that reads its arguments and prints its result, and assert-style
tests travel behind the code, in one program with it: code that means to cheat can pass these (docs/security.md).

Results come one by one, in order; a caller that stops reading stops the running.
"""

from __future__ import annotations

import atexit
import json
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from verl_like.plugins.code_grading.code_cases import AssertTests, CallTest, StdioTest, same_output, same_value
from verl_like.plugins.code_grading.sandbox import probe, wire
from verl_like.plugins.code_grading.sandbox.client import Jail
from verl_like.plugins.code_grading.sandbox.settings import SandboxSettings
from verl_like.plugins.http_json import Service, TransientError

_RESPONSES_PER_JAIL = 200
_LEVEL_KEY = "reward_model.sandbox.min_level (in a direct call: compute_score's sandbox={'min_level': ...})"
_SHOWN_CHARS = 300
_OVERHEAD_S = 10.0  # of the sandbox, besides compiling and running
_MARK = "__result__:"
_CALL = """
import json as _json, sys as _sys
_names = globals()
_function = _names[{name!r}] if {name!r} in _names else getattr(_names["Solution"](), {name!r})
_value = _function(*_json.loads(_sys.stdin.read()))
print("\\n" + {mark!r} + _json.dumps(_value))
"""


@dataclass(frozen=True, slots=True)
class TestResult:
    """One test. status: passed, wrong, error (the program ended with one), timeout, output, killed."""

    __test__ = False  # it is no test class

    passed: bool
    status: str
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteRunner:
    """Client of one remote sandbox. max_concurrent: requests of this process at a time."""

    url: str
    max_concurrent: int = 64
    memory_limit_mb: int = 1024
    timeout: float = 10.0  # [s] of one run
    max_retries: int = 3
    retry_delay: float = 1.0  # [s] before the first retry; doubles each time
    language: str = "python"

    def run_stdio(self, code: str, tests: Sequence[StdioTest]) -> Iterator[TestResult]:
        for test, reply in zip(tests, self._run_all(code, [test.stdin for test in tests]), strict=True):
            yield _failure(reply) or _compare_output(reply["stdout"], test)

    def run_calls(self, code: str, tests: Sequence[CallTest]) -> Iterator[TestResult]:
        program = code + _CALL.format(name=tests[0].function, mark=_MARK)
        inputs = [json.dumps(test.arguments) for test in tests]
        for test, reply in zip(tests, self._run_all(program, inputs), strict=True):
            yield _failure(reply) or _compare_printed(reply["stdout"], test)

    def run_asserts(self, code: str, tests: AssertTests) -> Iterator[TestResult]:
        end = secrets.token_hex(16)
        check = f"check({tests.entry})\n" if tests.entry else ""
        program = "\n".join([tests.setup, code, tests.tests, check, f"print({end!r})"])
        (reply,) = self._run_all(program, [""])
        result = _failure(reply)
        passed = result is None and reply["stdout"].strip().endswith(end)
        yield result or _judged(passed, "" if passed else "the tests did not end")

    def _run_all(self, code: str, inputs: Sequence[str]) -> Iterator[dict[str, Any]]:
        """Replies in the order of the inputs, several requests at a time; none is begun after the reader stops."""
        with ThreadPoolExecutor(max_workers=min(self.max_concurrent, len(inputs))) as threads:
            try:
                yield from threads.map(lambda stdin: self._run_one(code, stdin), inputs)
            finally:
                threads.shutdown(wait=False, cancel_futures=True)

    def _run_one(self, code: str, stdin: str) -> dict[str, Any]:
        """One run's result, {"status", "stdout", "stderr", "return_code"}."""
        body = {
            "code": code,
            "stdin": stdin,
            "language": self.language,
            "compile_timeout": self.timeout,
            "run_timeout": self.timeout,
            "memory_limit_MB": self.memory_limit_mb,
        }
        service = Service(
            url=self.url,
            timeout=2 * self.timeout + _OVERHEAD_S,
            max_retries=self.max_retries,
            retry_delay=self.retry_delay,
        )
        return service.post(body, _read)


def _read(reply: Any) -> dict[str, Any]:
    """The part of the sandbox's reply that tells how the program ended."""
    if not isinstance(reply, dict) or reply.get("status") not in ("Success", "Failed"):
        text = json.dumps(reply)[:_SHOWN_CHARS]
        raise TransientError(f"the reply is not a result: {text}")
    compiled, run = reply.get("compile_result") or {}, reply.get("run_result") or {}
    ended = run if run else compiled
    if not isinstance(ended, dict) or "status" not in ended:
        raise TransientError(f"the reply has no result: {json.dumps(reply)[:_SHOWN_CHARS]}")
    return {
        "status": str(ended["status"]) if run else f"compile {ended['status']}",
        "stdout": str(ended.get("stdout") or ""),
        "stderr": str(ended.get("stderr") or ""),
        "return_code": ended.get("return_code"),
    }


def _failure(reply: dict[str, Any]) -> TestResult | None:
    """Convert the failure of a remote program to a test result; None when the program ended well."""
    if "TimeLimitExceeded" in reply["status"]:
        return TestResult(False, "timeout")
    if reply["status"] != "Finished" or reply["return_code"] != 0:
        return TestResult(False, "error", f"{reply['status']} {reply['stderr'].strip()[-_SHOWN_CHARS:]}".strip())
    return None


def _compare_printed(stdout: str, test: CallTest) -> TestResult:
    _, found, text = stdout.rpartition(_MARK)
    try:
        value = json.loads(text) if found else None
    except (ValueError, RecursionError):
        return _judged(False, f"got {text[:_SHOWN_CHARS]!r}")
    right = bool(found) and any(same_value(value, accepted) for accepted in test.accepted)
    return _judged(right, f"got {repr(value)[:_SHOWN_CHARS]}")


class LocalRunner:
    """One jail of this process, replaced when it breaks and after _RESPONSES_PER_JAIL responses."""

    _current: LocalRunner | None = None

    def __init__(self, settings: SandboxSettings) -> None:
        self.settings = settings
        self._jail: Jail | None = None
        self._served = 0

    @classmethod
    def of(cls, settings: Mapping[str, Any] | None) -> LocalRunner:
        """Return this process's runner with these settings (SandboxSettings' fields).

        Raises SandboxError if this machine's sandbox is weaker than min_level: found out here, as nobody else may have.
        """
        wanted = SandboxSettings(**(settings or {}))
        if cls._current is None or cls._current.settings != wanted:
            probe.require(wanted, key=_LEVEL_KEY)
            if cls._current is not None:
                cls._current.close()
            cls._current = cls(wanted)
            atexit.register(cls._current.close)
        return cls._current

    def close(self) -> None:
        if self._jail is not None:
            self._jail.close()
            self._jail = None

    def run_stdio(self, code: str, tests: Sequence[StdioTest]) -> Iterator[TestResult]:
        self._begin()
        for test in tests:
            reply = self._ready().run_program(code, test.stdin, timeout=self._left())
            yield _failed(reply) or _compare_output(reply["stdout"], test)

    def run_calls(self, code: str, tests: Sequence[CallTest]) -> Iterator[TestResult]:
        self._begin()
        for test in tests:
            arguments = [wire.encode(argument) for argument in test.arguments]
            reply = self._ready().call(code, test.function, arguments, timeout=self._left())
            yield _failed(reply) or _compare_call(reply["result"], test)

    def run_asserts(self, code: str, tests: AssertTests) -> Iterator[TestResult]:
        self._begin()
        reply = self._ready().test(code, tests.tests, setup=tests.setup, entry=tests.entry, timeout=self._left())
        lines = [json.loads(line) for line in reply["result"].split("\n")[:-1]]  # the last one may be cut
        for line in lines:
            if "error" in line:
                yield TestResult(False, "error", f"{line['error']} {reply['stderr'][-_SHOWN_CHARS:]}".strip())
            elif "passed" in line:
                message = f"{line.get('test', '')} {line.get('message', '')}".strip()
                yield _judged(line["passed"], message)
        if not any("done" in line or "error" in line for line in lines):
            yield _failed(reply) or TestResult(False, "error", reply["stderr"].strip()[-_SHOWN_CHARS:])

    def _begin(self) -> None:
        """Begin a new response, perhaps with a new jail."""
        self._served += 1
        if self._served > _RESPONSES_PER_JAIL:
            self.close()
            self._served = 1
        self._end = time.monotonic() + self.settings.total_timeout

    def _left(self) -> float:
        """Seconds that the response's next run may take."""
        return max(0.01, min(self.settings.timeout, self._end - time.monotonic()))

    def _ready(self) -> Jail:
        if self._jail is None or self._jail.closed:
            self._jail = Jail(self.settings)
        return self._jail


def _compare_call(text: str, test: CallTest) -> TestResult:
    """Compare the value in `text`, which the program wrote itself: anything but a right value is a wrong one."""
    try:
        value = wire.decode(json.loads(text))
        right = any(same_value(value, accepted) for accepted in test.accepted)
        return _judged(right, f"got {repr(value)[:_SHOWN_CHARS]}")
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
        return TestResult(False, "wrong", f"the result is no plain data: {error}"[:_SHOWN_CHARS])


def _failed(reply: dict[str, Any]) -> TestResult | None:
    """Convert the failure of a run in the jail to a test result; None when the run ended well."""
    said = reply["stderr"].strip()[-_SHOWN_CHARS:]
    return None if reply["status"] == "ok" else TestResult(False, reply["status"], said)


def _compare_output(stdout: str, test: StdioTest) -> TestResult:
    return _judged(same_output(stdout, test.expected), f"got {stdout[:_SHOWN_CHARS]!r}")


def _judged(passed: bool, message: str) -> TestResult:
    return TestResult(passed, "passed" if passed else "wrong", message)


Runner = LocalRunner | RemoteRunner
