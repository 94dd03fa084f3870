"""Code: the share of tests that the program in the response passes, run in the sandbox or in a remote one.

The program is the last fenced block of the response. It never shares a process with what judges it: outputs and results
come back as plain data and are compared here; assert-style tests run in a process of their own (docs/security.md).
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from verl_like.plugins.code_grading import code_cases
from verl_like.plugins.code_grading.code_cases import AssertTests, CallTest, StdioTest, Suite
from verl_like.plugins.code_grading.code_runner import LocalRunner, RemoteRunner, Runner, TestResult

_FENCE = re.compile(r"```[ \t]*([\w+#.-]*)[^\n]*\n(.*?)(?:```|\Z)", re.DOTALL)
_PYTHON = ("python", "python3", "py", "")
_PRED_CHARS = 4000
_SHOWN_CHARS = 200


def extract_code(solution_str: str, language: str = "python") -> str | None:
    """The last fenced block in `language` (or in none); a block that was never closed counts. None: no such block."""
    wanted = _PYTHON if language == "python" else (language, "")
    found = [text for tag, text in _FENCE.findall(solution_str) if tag.lower() in wanted]
    return found[-1].strip("\n") if found else None


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    *,
    partial_credit: bool = True,
    max_tests: int | None = None,
    language: str = "python",
    bare_code: bool = False,
    sandbox: Mapping[str, Any] | None = None,
    remote: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Grade a program: the share of passed tests (`partial_credit`), or 1 if all pass and else 0.

    A test that runs out of time fails the ones after it, unrun. Raises ValueError for tests it cannot read,
    SandboxError
    or ServiceError when the machinery fails: that is a failed reward, never a score of 0.

    ground_truth: see `code_cases`.
    max_tests: run only the first that many.
    bare_code: a response without a fenced block is a program as a whole.
    sandbox, remote: settings of the runner, filled in from reward_model.sandbox and reward_model.sandbox_fusion.
    """
    suite = code_cases.parse(ground_truth)
    if max_tests is not None and not isinstance(suite, AssertTests):
        suite = suite[:max_tests]
    code = extract_code(solution_str, language)
    if code is None:
        code = solution_str if bare_code and solution_str.strip() else None
    if code is None:
        return _verdict(_Tally(total=_count(suite), first_failure="no fenced code block"), "", partial_credit)
    if isinstance(suite, AssertTests) and suite.prompt and f"def {suite.entry}" not in code:
        code = suite.prompt + code  # HumanEval: a block that only continues the prompt
    runner: Runner = RemoteRunner(**remote, language=language) if remote else LocalRunner.of(sandbox)
    return _verdict(_run(runner, code, suite, partial_credit), code, partial_credit)


@dataclass(slots=True)
class _Tally:
    """Count of the tests run so far, and the first failure."""

    total: int
    passed: int = 0
    first_failure: str = ""
    seconds: float = 0.0

    def add(self, number: int, result: TestResult, shown: str) -> None:
        self.passed += result.passed
        if not result.passed and not self.first_failure:
            self.first_failure = f"test {number}: {result.status}: {shown}{result.message}"


def _run(runner: Runner, code: str, suite: Suite, partial_credit: bool) -> _Tally:
    tally = _Tally(total=_count(suite))
    started = time.monotonic()
    for number, (result, shown) in enumerate(_results(runner, code, suite), start=1):
        tally.add(number, result, shown)
        if isinstance(suite, AssertTests):
            tally.total = max(tally.total, number)  # a loop may check more often than it is written
        if result.status == "timeout" or (not result.passed and not partial_credit):
            break
    tally.seconds = time.monotonic() - started
    return tally


def _results(runner: Runner, code: str, suite: Suite) -> Iterator[tuple[TestResult, str]]:
    """Results in test order, with what to show of a failed one."""
    if isinstance(suite, AssertTests):
        yield from ((result, "") for result in runner.run_asserts(code, suite))
    elif isinstance(suite[0], StdioTest):
        tests = [test for test in suite if isinstance(test, StdioTest)]
        for test, result in zip(tests, runner.run_stdio(code, tests), strict=False):
            yield result, f"input {_short(test.stdin)}, expected {_short(test.expected)}; "
    else:
        calls = [test for test in suite if isinstance(test, CallTest)]
        for call, result in zip(calls, runner.run_calls(code, calls), strict=False):
            yield result, f"{call.function}{_short(tuple(call.arguments))}, expected {_short(call.accepted[0])}; "


def _count(suite: Suite) -> int:
    """Tests of a suite; of assert statements one, until they have been run."""
    return 1 if isinstance(suite, AssertTests) else len(suite)


def _verdict(tally: _Tally, code: str, partial_credit: bool) -> dict[str, Any]:
    right = tally.passed == tally.total
    return {
        "score": tally.passed / tally.total if partial_credit else float(right),
        "acc": float(right),
        "pred": code[:_PRED_CHARS],
        "tests_passed": tally.passed,
        "tests_total": tally.total,
        "first_failure": tally.first_failure,
        "run_seconds": tally.seconds,
    }


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + "..."
