"""Runs programs in the sandbox of this machine. A jail serves many responses: a program dies with its run."""

from __future__ import annotations

import atexit
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from verl_like.rewards.code_cases import AssertTests, CallTest, StdioTest, same_output, same_value
from verl_like.rewards.code_runner import TestResult
from verl_like.rewards.sandbox import probe, wire
from verl_like.rewards.sandbox.client import Jail
from verl_like.rewards.sandbox.settings import SandboxSettings

_RESPONSES_PER_JAIL = 200
_LEVEL_KEY = "reward_model.sandbox.min_level (in a direct call: compute_score's sandbox={'min_level': ...})"
_SHOWN_CHARS = 300


class LocalRunner:
    """One jail of this process, replaced when it breaks and after _RESPONSES_PER_JAIL responses."""

    _current: LocalRunner | None = None

    def __init__(self, settings: SandboxSettings) -> None:
        self.settings = settings
        self._jail: Jail | None = None
        self._served = 0

    @classmethod
    def of(cls, settings: Mapping[str, Any] | None) -> LocalRunner:
        """This process's runner with these settings (SandboxSettings' fields).

        SandboxError if this machine's sandbox is weaker than min_level: found out here, as nobody else may have.
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
        budget = self._begin()
        for test in tests:
            reply = self._ready().run_program(code, test.stdin, timeout=budget.left())
            if reply["status"] != "ok":
                yield _failed(reply)
            elif same_output(reply["stdout"], test.expected):
                yield TestResult(True, "passed")
            else:
                yield TestResult(False, "wrong", f"got {reply['stdout'][:_SHOWN_CHARS]!r}")

    def run_calls(self, code: str, tests: Sequence[CallTest]) -> Iterator[TestResult]:
        budget = self._begin()
        for test in tests:
            arguments = [wire.encode(argument) for argument in test.arguments]
            reply = self._ready().call(code, test.function, arguments, timeout=budget.left())
            if reply["status"] != "ok":
                yield _failed(reply)
                continue
            yield _compare_call(reply["result"], test)

    def run_asserts(self, code: str, tests: AssertTests) -> Iterator[TestResult]:
        budget = self._begin()
        reply = self._ready().test(code, tests.tests, setup=tests.setup, entry=tests.entry, timeout=budget.left())
        lines = [json.loads(line) for line in reply["result"].split("\n")[:-1]]  # the last one may be cut
        for line in lines:
            if "error" in line:
                yield TestResult(False, "error", f"{line['error']} {reply['stderr'][-_SHOWN_CHARS:]}".strip())
            elif "passed" in line:
                message = f"{line.get('test', '')} {line.get('message', '')}".strip()
                yield TestResult(line["passed"], "passed" if line["passed"] else "wrong", message)
        if not any("done" in line or "error" in line for line in lines):
            yield _failed(reply | {"status": "error" if reply["status"] == "ok" else reply["status"]})

    def _begin(self) -> _Budget:
        """A new response: perhaps a new jail."""
        self._served += 1
        if self._served > _RESPONSES_PER_JAIL:
            self.close()
            self._served = 1
        return _Budget(self.settings)

    def _ready(self) -> Jail:
        if self._jail is None or self._jail.closed:
            self._jail = Jail(self.settings)
        return self._jail


class _Budget:
    """Seconds that a response's next run may take."""

    def __init__(self, settings: SandboxSettings) -> None:
        self._settings = settings
        self._end = time.monotonic() + settings.total_timeout

    def left(self) -> float:
        return max(0.01, min(self._settings.timeout, self._end - time.monotonic()))


def _compare_call(text: str, test: CallTest) -> TestResult:
    """The program wrote `text` itself: it may be anything, and anything but a right value is a wrong one."""
    try:
        value = wire.decode(json.loads(text))
        right = any(same_value(value, accepted) for accepted in test.accepted)
        return TestResult(right, "passed" if right else "wrong", f"got {repr(value)[:_SHOWN_CHARS]}")
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
        return TestResult(False, "wrong", f"the result is no plain data: {error}"[:_SHOWN_CHARS])


def _failed(reply: dict[str, Any]) -> TestResult:
    return TestResult(False, reply["status"], reply["stderr"].strip()[-_SHOWN_CHARS:])
