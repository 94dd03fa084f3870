"""Tests of programs in the forms that datasets have, and the comparison of outputs.

    {"inputs": [...], "outputs": [...], "fn_name": "f"}     PRIME, APPS, TACO, CodeContests (no fn_name: stdin/stdout)
    [{"input": ..., "output": ...}, ...]                    LiveCodeBench, codeforces; "metadata": {"func_name": "f"}
    {"test": "def check(candidate): ...", "entry_point": "f", "prompt": "..."}    HumanEval
    {"test_list": ["assert f(1) == 2", ...], "test_setup_code": "..."}            MBPP; a list of asserts; "assert_case"

Each of them may come as a JSON text, and may be wrapped in {"input_output": ...} or {"test_cases": ...}.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from typing import Any

from verl_like.text import whole

_WRAPPERS = ("input_output", "test_cases", "tests", "unit_tests")
_WORD = re.compile(r"[^ \t\r]+")  # of a line
_RELATIVE, _ABSOLUTE = 1e-6, 1e-9  # tolerance of floating-point answers


@dataclass(frozen=True, slots=True)
class StdioTest:
    """A whole program reads `stdin`; its standard output must be `expected`."""

    stdin: str
    expected: str


@dataclass(frozen=True, slots=True)
class CallTest:
    """Test in which `function(*arguments)` must give one of the `accepted` values."""

    function: str
    arguments: list[Any]
    accepted: list[Any]


@dataclass(frozen=True, slots=True)
class AssertTests:
    """Assert statements about the functions of the code; `entry` is what a `check(candidate)` is given."""

    setup: str
    tests: str
    entry: str
    prompt: str = ""  # what comes before a completion that does not repeat it


Suite = list[StdioTest] | list[CallTest] | AssertTests


def parse(ground_truth: Any) -> Suite:
    """The tests of a row. Raises ValueError for a form that is not known, or no test at all."""
    value = _unwrap(ground_truth)
    suite: Suite | None = None
    if isinstance(value, dict):
        suite = _from_dict(value)
    elif isinstance(value, list) and all(isinstance(item, str) for item in value):
        suite = AssertTests(setup="", tests="\n".join(value), entry="") if value else None
    elif isinstance(value, list):
        suite = _from_cases(value)
    if not suite:
        raise ValueError(
            f"no tests found in ground_truth {str(ground_truth)[:200]!r}; see docs/rewards.md for its forms"
        )
    return suite


def _unwrap(value: Any) -> Any:
    for _ in range(3):
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except ValueError as error:
                raise ValueError(f"ground_truth is text but no JSON ({error}): {value[:200]!r}") from None
        for key in _WRAPPERS:
            if isinstance(value, dict) and value.get(key):
                value = value[key]
                break
    return value


def _from_dict(value: dict[str, Any]) -> Suite | None:
    if "test" in value:
        prompt = value.get("prompt", "")
        return AssertTests(setup=prompt, tests=value["test"], entry=value.get("entry_point", ""), prompt=prompt)
    for key in ("test_list", "assert_case"):
        if value.get(key):
            setup = value.get("test_setup_code") or "\n".join(value.get("test_imports", []))
            return AssertTests(setup=setup, tests="\n".join(value[key]), entry="")
    inputs, outputs = value.get("inputs"), value.get("outputs")
    if inputs is None or outputs is None:
        return None
    if len(inputs) != len(outputs):
        raise ValueError(f"ground_truth has {len(inputs)} inputs, but {len(outputs)} outputs")
    name = value.get("fn_name")
    if name:
        return [CallTest(name, _arguments(i), _accepted(o)) for i, o in zip(inputs, outputs, strict=True)]
    return [StdioTest(_text(i), _text(o)) for i, o in zip(inputs, outputs, strict=True)]


def _from_cases(cases: list[Any]) -> Suite | None:
    if not all(isinstance(case, dict) and "input" in case and "output" in case for case in cases):
        return None
    names = [(case.get("metadata") or {}).get("func_name") or case.get("fn_name") for case in cases]
    if names and names[0]:
        return [
            CallTest(name, _arguments(case["input"]), _accepted(case["output"]))
            for name, case in zip(names, cases, strict=True)
        ]
    return [StdioTest(_text(case["input"]), _text(case["output"])) for case in cases]


def _text(value: Any) -> str:
    """Convert a text, or the lines or the number that some datasets give in place of one, to text.

    Halves of surrogate pairs are replaced: no pipe brings any.
    """
    return whole("\n".join(map(str, value)) if isinstance(value, list) else str(value))


def _arguments(value: Any) -> list[Any]:
    """A list of arguments, or a text with one JSON value a line."""
    if isinstance(value, str):
        return [json.loads(line) for line in value.split("\n") if line.strip()]
    return list(value) if isinstance(value, list | tuple) else [value]


def _accepted(value: Any) -> list[Any]:
    """The value itself; what is wrapped in a list of one is accepted bare too (PRIME's and APPS's convention)."""
    if isinstance(value, str):
        try:
            parsed = json.loads(value)
        except ValueError:
            return [value]
        return [value, parsed]
    return [value, value[0]] if isinstance(value, list) and len(value) == 1 else [value]


def same_output(got: str, expected: str) -> bool:
    """Compare two outputs word by word and line by line.

    Empty lines are left out; numbers with a fraction may differ by 1e-6 (relative).
    """
    if got == expected:
        return True
    got_lines, expected_lines = _lines(got), _lines(expected)
    return len(got_lines) == len(expected_lines) and all(map(_same_line, got_lines, expected_lines))


def _lines(text: str) -> list[list[str]]:
    """The words of each line. As for the checkers of contests only ASCII's blanks part them: U+2028, U+0085 and their
    like, at which str.splitlines and str.split cut too, are text."""
    return [words for line in text.split("\n") if (words := _WORD.findall(line))]


def _same_line(got: list[str], expected: list[str]) -> bool:
    return len(got) == len(expected) and all(map(_same_token, got, expected))


def _same_token(got: str, expected: str) -> bool:
    if got == expected:
        return True
    if not any(c in expected for c in ".eE") or not got.isascii() or "_" in got:  # float takes more than programs print
        return False
    try:
        number = float(expected)  # infinite beyond what it holds: then only the same text is equal
        return math.isfinite(number) and math.isclose(float(got), number, rel_tol=_RELATIVE, abs_tol=_ABSOLUTE)
    except ValueError:
        return False


def same_value(got: Any, expected: Any) -> bool:
    """Equality of plain data: tuples count as lists, dictionary keys by their text, floats by 1e-6 (relative)."""
    if isinstance(got, bool) or isinstance(expected, bool):
        return got is expected
    if isinstance(got, list | tuple) and isinstance(expected, list | tuple):
        return len(got) == len(expected) and all(map(same_value, got, expected))
    if isinstance(got, dict) and isinstance(expected, dict):
        mine = {str(key): value for key, value in got.items()}
        theirs = {str(key): value for key, value in expected.items()}
        return mine.keys() == theirs.keys() and all(same_value(mine[key], theirs[key]) for key in mine)
    if isinstance(got, int | float) and isinstance(expected, int | float):
        if got != expected and (isinstance(got, float) or isinstance(expected, float)):
            try:
                return math.isclose(got, expected, rel_tol=_RELATIVE, abs_tol=_ABSOLUTE)
            except OverflowError:  # a whole number that is no float: another one, and no fault of the grader
                return False
        return got == expected
    return type(got) is type(expected) and got == expected
