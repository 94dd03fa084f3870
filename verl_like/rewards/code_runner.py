"""What a place to run programs offers the code grader."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from verl_like.rewards.code_cases import AssertTests, CallTest, StdioTest


@dataclass(frozen=True, slots=True)
class TestResult:
    """One test. status: passed, wrong, error (the program ended with one), timeout, output, killed."""

    __test__ = False  # it is no test class

    passed: bool
    status: str
    message: str = ""


class Runner(Protocol):
    """Results come one by one, in order; who stops reading stops the running."""

    def run_stdio(self, code: str, tests: Sequence[StdioTest]) -> Iterator[TestResult]: ...

    def run_calls(self, code: str, tests: Sequence[CallTest]) -> Iterator[TestResult]: ...

    def run_asserts(self, code: str, tests: AssertTests) -> Iterator[TestResult]: ...
