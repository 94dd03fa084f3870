"""Runs programs in a remote sandbox with SandboxFusion's API: POST <url> {code, stdin, language, ...}.

API: bytedance.github.io/SandboxFusion/docs/api/run-code-run-code-post. The sandbox runs one program at a time, so a
function call travels as a program that reads its arguments and prints its result, and assert-style tests travel behind
the code, in one program with it: code that means to cheat can pass these (docs/security.md).
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from verl_like.rewards.code_cases import AssertTests, CallTest, StdioTest, same_output, same_value
from verl_like.rewards.code_runner import TestResult
from verl_like.rewards.http_json import Service, TransientError

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

    @classmethod
    def of(cls, settings: Mapping[str, Any], language: str) -> RemoteRunner:
        return cls(**settings, language=language)

    def run_stdio(self, code: str, tests: Sequence[StdioTest]) -> Iterator[TestResult]:
        for test, reply in zip(tests, self._run_all(code, [test.stdin for test in tests]), strict=True):
            result = _failure(reply)
            if result is None:
                right = same_output(reply["stdout"], test.expected)
                result = TestResult(right, "passed" if right else "wrong", f"got {reply['stdout'][:_SHOWN_CHARS]!r}")
            yield result

    def run_calls(self, code: str, tests: Sequence[CallTest]) -> Iterator[TestResult]:
        program = code + _CALL.format(name=tests[0].function, mark=_MARK)
        inputs = [json.dumps(test.arguments) for test in tests]
        for test, reply in zip(tests, self._run_all(program, inputs), strict=True):
            yield _failure(reply) or _compare_call(reply["stdout"], test)

    def run_asserts(self, code: str, tests: AssertTests) -> Iterator[TestResult]:
        end = secrets.token_hex(16)
        check = f"check({tests.entry})\n" if tests.entry else ""
        program = "\n".join([tests.setup, code, tests.tests, check, f"print({end!r})"])
        (reply,) = self._run_all(program, [""])
        result = _failure(reply)
        passed = result is None and reply["stdout"].strip().endswith(end)
        yield result or TestResult(passed, "passed" if passed else "wrong", "" if passed else "the tests did not end")

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
    """Why the program itself failed, or None when it ended well."""
    if "TimeLimitExceeded" in reply["status"]:
        return TestResult(False, "timeout")
    if reply["status"] != "Finished" or reply["return_code"] != 0:
        return TestResult(False, "error", f"{reply['status']} {reply['stderr'].strip()[-_SHOWN_CHARS:]}".strip())
    return None


def _compare_call(stdout: str, test: CallTest) -> TestResult:
    _, found, text = stdout.rpartition(_MARK)
    try:
        value = json.loads(text) if found else None
    except (ValueError, RecursionError):
        return TestResult(False, "wrong", f"got {text[:_SHOWN_CHARS]!r}")
    right = bool(found) and any(same_value(value, accepted) for accepted in test.accepted)
    return TestResult(right, "passed" if right else "wrong", f"got {repr(value)[:_SHOWN_CHARS]}")
