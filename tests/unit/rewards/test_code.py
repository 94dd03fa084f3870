"""The code grader: forms of tests, comparison of outputs, scores, real data, and programs that try to cheat."""

from __future__ import annotations

import gzip
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tests.unit.rewards.factory import make_manager, make_rollouts
from verl_like.config import CustomRewardFunctionConfig, DataConfig, RewardModelConfig
from verl_like.config.reward_execution import SandboxConfig
from verl_like.plugins.code_grading import code, code_cases
from verl_like.plugins.code_grading.code_cases import AssertTests, CallTest, StdioTest, same_output, same_value
from verl_like.plugins.code_grading.code_runner import LocalRunner
from verl_like.plugins.code_grading.sandbox import probe
from verl_like.plugins.code_grading.sandbox.settings import SandboxError
from verl_like.rewards.manager import RewardManager

SHARED = Path(os.environ.get("VERL_LIKE_SHARED_DATA", "../shared/data"))
SANDBOX = {"min_level": "limits", "timeout": 2.0, "total_timeout": 6.0}
pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module", autouse=True)
def jail() -> Iterator[None]:
    yield
    LocalRunner.of(SANDBOX).close()


def fenced(text: str, tag: str = "python") -> str:
    return f"Here it is:\n```{tag}\n{text}\n```\nDone."


def grade(text: str, truth: Any, **options: Any) -> dict[str, Any]:
    return code.compute_score("codecontests", fenced(text), truth, {}, sandbox=SANDBOX, **options)


class TestExtraction:
    @pytest.mark.parametrize(
        ("response", "expected"),
        [
            ("```python\na\n```", "a"),
            ("```py\na\n```\ntext\n```python\nb\n```", "b"),
            ("```\na\n```", "a"),
            ("```python\na\n```\n```bash\nls\n```", "a"),
            ("```python title=x\na\n  b\n```", "a\n  b"),
            ("```python\nnever closed", "never closed"),
            ("```Python3\na\n```", "a"),
            ("no code", None),
            ("```cpp\nint main\n```", None),
        ],
    )
    def test_last_python_block(self, response: str, expected: str | None) -> None:
        assert code.extract_code(response) == expected

    def test_other_languages(self) -> None:
        assert code.extract_code("```cpp\nx\n```\n```python\ny\n```", "cpp") == "x"


class TestForms:
    STDIO: ClassVar = [StdioTest("1\n", "2\n")]

    @pytest.mark.parametrize(
        "truth",
        [
            {"inputs": ["1\n"], "outputs": ["2\n"]},
            '{"inputs": ["1\\n"], "outputs": ["2\\n"]}',
            {"input_output": '{"inputs": ["1\\n"], "outputs": ["2\\n"]}'},
            {"test_cases": {"inputs": ["1\n"], "outputs": ["2\n"]}},
            [{"input": "1\n", "output": "2\n", "testtype": "stdin"}],
            {"inputs": ["1\n"], "outputs": ["2\n"], "fn_name": None},
        ],
    )
    def test_stdio(self, truth: Any) -> None:
        assert code_cases.parse(truth) == self.STDIO

    def test_lines_are_joined(self) -> None:
        assert code_cases.parse({"inputs": [["1", "2"]], "outputs": [["3"]]}) == [StdioTest("1\n2", "3")]

    def test_calls(self) -> None:
        assert code_cases.parse({"fn_name": "f", "inputs": [[1, [2]]], "outputs": [[3]]}) == [
            CallTest("f", [1, [2]], [[3], 3])
        ]
        live = [{"input": '[1, 2]\n"x"', "output": "true", "testtype": "functional", "metadata": {"func_name": "g"}}]
        assert code_cases.parse(live) == [CallTest("g", [[1, 2], "x"], ["true", True])]

    def test_asserts(self) -> None:
        assert code_cases.parse(["assert f(1) == 2"]) == AssertTests("", "assert f(1) == 2", "")
        mbpp = {"test_list": ["assert f(1) == 2", "assert f(2) == 3"], "test_setup_code": "import math"}
        assert code_cases.parse(mbpp) == AssertTests("import math", "assert f(1) == 2\nassert f(2) == 3", "")

    @pytest.mark.parametrize("truth", [{}, [], "", "no json", {"inputs": [1]}, {"inputs": [], "outputs": []}, 5, None])
    def test_what_holds_no_tests_is_an_error_not_a_score(self, truth: Any) -> None:
        with pytest.raises(ValueError, match="ground_truth"):
            code_cases.parse(truth)

    def test_unequal_numbers_are_told(self) -> None:
        with pytest.raises(ValueError, match="2 inputs, but 1 outputs"):
            code_cases.parse({"inputs": ["1", "2"], "outputs": ["1"]})


class TestComparison:
    @pytest.mark.parametrize(
        ("got", "expected"),
        [
            ("1 2 3 \n", "1 2 3"),
            ("a\n\nb\n", "a\nb"),
            ("0.3333333", "0.33333334"),
            ("1e3", "1000.0"),
            ("x 1.0", "x 1.0000"),
        ],
    )
    def test_same_output(self, got: str, expected: str) -> None:
        assert same_output(got, expected)

    @pytest.mark.parametrize(
        ("got", "expected"),
        [
            ("1 2", "1 2 3"),
            ("12", "1 2"),
            ("1", "1.1"),
            ("1.0", "1"),
            ("YES", "Yes"),
            ("", "0"),
            ("nan", "1.0"),
            ("a b", "b a"),
        ],
    )
    def test_other_output(self, got: str, expected: str) -> None:
        assert not same_output(got, expected)

    @pytest.mark.parametrize("mark", list("\u2028\u2029\x85\x0b\x0c\x1c\x1d\x1e\x1f\xa0\u3000"))
    def test_only_line_feeds_end_lines_and_only_blanks_part_words(self, mark: str) -> None:
        """Where str.splitlines, str.split and str.strip cut too."""
        assert same_output(f"a{mark}b\r\n", f"a{mark}b") and same_output(f"{mark}\n", f"{mark}  \n\n")
        for got in ("a\nb", "a b", "ab", f"a{mark} b", f"a{mark}b{mark}", f"{mark}\na{mark}b"):
            assert not same_output(got, f"a{mark}b"), got
            assert not same_output(f"a{mark}b", got), got
        arguments = json.dumps(f"a{mark}b", ensure_ascii=False) + "\r\n\n2"
        assert code_cases.parse({"fn_name": "f", "inputs": [arguments], "outputs": ["1"]}) == [
            CallTest("f", [f"a{mark}b", 2], ["1", 1])
        ]

    @pytest.mark.parametrize(
        ("got", "right"), [("1.50", True), ("1.500000001", True), ("1_0.5", False), ("\uff11.\uff15", False)]
    )
    def test_numbers_are_what_programs_print(self, got: str, right: bool) -> None:
        assert same_output(got, "10.5" if "_" in got else "1.5") == right
        assert same_output("1e400", "1e400") and not same_output("inf", "1e400") and not same_output("2e400", "1e400")

    def test_values(self) -> None:
        assert same_value((1, [2.0000001]), [1, (2.0,)])
        assert same_value({1: "a"}, {"1": "a"})
        assert not same_value(10**400, 0.5) and not same_value([0.5], [10**400])  # wrong, and no failure of the grader
        assert same_value(math.inf, math.inf) and not same_value(math.nan, 0.5)
        assert not same_value(True, 1)
        assert not same_value([1, 2], [2, 1])
        assert not same_value("1", 1)
        assert not same_value(float("nan"), 1.0)
        assert not same_value(None, [])


class TestScores:
    TRUTH: ClassVar = {"inputs": ["1\n", "2\n", "3\n", "4\n"], "outputs": ["1\n", "4\n", "9\n", "16\n"]}

    def test_share_of_passed_tests_or_all_or_nothing(self) -> None:
        half = "x = int(input())\nprint(x * x if x < 3 else 0)"
        result = grade(half, self.TRUTH)
        assert (result["score"], result["acc"], result["tests_passed"], result["tests_total"]) == (0.5, 0.0, 2, 4)
        assert result["pred"] == half
        assert result["first_failure"] == r"test 3: wrong: input '3\n', expected '9\n'; got '0\n'"
        assert grade(half, self.TRUTH, partial_credit=False)["score"] == 0.0
        full = grade("print(int(input()) ** 2)", self.TRUTH, partial_credit=False)
        assert (full["score"], full["acc"], full["first_failure"]) == (1.0, 1.0, "")

    def test_only_the_first_tests(self) -> None:
        assert grade("x = int(input())\nprint(x * x if x < 3 else 0)", self.TRUTH, max_tests=2)["score"] == 1.0

    def test_no_code_is_a_wrong_answer(self) -> None:
        result = code.compute_score("codecontests", "I do not know", self.TRUTH, {}, sandbox=SANDBOX)
        assert (result["score"], result["tests_total"], result["first_failure"]) == (0.0, 4, "no fenced code block")
        bare = code.compute_score("x", "print(int(input())**2)", self.TRUTH, {}, sandbox=SANDBOX, bare_code=True)
        assert bare["score"] == 1.0

    def test_a_slow_program_is_wrong_and_costs_its_time_limit_once(self) -> None:
        result = grade("x = int(input())\nwhile x > 1: pass\nprint(1)", self.TRUTH)
        assert result["score"] == 0.25
        assert result["first_failure"].startswith("test 2: timeout")
        assert result["run_seconds"] < 2 * SANDBOX["timeout"] + 1

    def test_errors_say_what_and_where(self) -> None:
        result = grade("print(undefined)", self.TRUTH)
        assert result["score"] == 0.0
        assert "test 1: error" in result["first_failure"] and "NameError" in result["first_failure"]
        assert "SyntaxError" in grade("def f(:", self.TRUTH)["first_failure"]

    def test_function_calls(self) -> None:
        truth = {"fn_name": "twice", "inputs": [[[1, 2]], [[]]], "outputs": [[[2, 4]], [[]]]}
        assert grade("def twice(x): return [2 * i for i in x]", truth)["score"] == 1.0
        assert grade("class Solution:\n    def twice(self, x): return tuple(2 * i for i in x)", truth)["score"] == 1.0
        wrong = grade("def twice(x): return x", truth)
        assert wrong["score"] == 0.5
        assert wrong["first_failure"].startswith("test 1: wrong: twice([1, 2],), expected [[2, 4]]; got [1, 2]")
        assert "no function 'twice'" in grade("def other(x): return x", truth)["first_failure"]

    @pytest.mark.parametrize(
        "text",
        [
            "class Yes:\n    def __eq__(self, other): return True\ndef f(x): return Yes()",
            "class Yes(int):\n    def __eq__(self, other): return True\ndef f(x): return Yes(5)",
            "import sys\ndef f(x): sys.exit(0)",
            "import os\nos.write(3, b'4')\nos._exit(1)",
            "import os\nos.write(3, b'[' * 100000)\nos._exit(0)",
            "import os\nos.write(3, b'{\"i\": \"' + b'9' * 100000 + b'\"}')\nos._exit(0)",
            "import os\nos.write(3, b'{\"d\": [[[1], 2]]}')\nos._exit(0)",
            "import os\nos.write(3, b'{\"h\": 3}')\nos._exit(0)",
            "def f(x): return lambda: 4",
        ],
    )
    def test_what_is_no_right_value_is_wrong(self, text: str) -> None:
        result = grade(text, {"fn_name": "f", "inputs": [[2]], "outputs": [4]})
        assert result["score"] == 0.0, result

    def test_humaneval_with_and_without_the_prompt(self) -> None:
        truth = {
            "prompt": "def helper(x): return x + 1\n\ndef f(x):\n    '''Square.'''\n",
            "test": "def check(candidate):\n    assert candidate(helper(1)) == 4\n    assert candidate(3) == 9\n",
            "entry_point": "f",
        }
        assert grade("    return x * x", truth)["score"] == 1.0
        assert grade("def f(x):\n    return x * x", truth)["score"] == 1.0
        wrong = grade("def f(x):\n    return 4", truth)
        assert (wrong["score"], wrong["tests_total"]) == (0.5, 2)
        assert "candidate(3) == 9" in wrong["first_failure"]
        assert grade("def g(x): pass\nimport sys; sys.exit(0)", truth)["score"] == 0.0
        assert grade("def f(x):\n    while True: pass", truth)["first_failure"].startswith("test 1: timeout")

    def test_mbpp(self) -> None:
        truth = {"test_list": ["assert add(1, 2) == 3", "assert add(0, 0) == 0", "assert add(1, 1) == 2"]}
        assert grade("def add(a, b): return a + b", truth)["score"] == 1.0
        assert grade("def add(a, b): return 3", truth)["score"] == pytest.approx(1 / 3)
        assert grade("x = 1", truth)["score"] == 0.0


class TestMemory:
    """One group: a program that prints the answer under a wrong name, the right one, and thieves after each."""

    STDIO_THIEF = """
import sys
frame = sys._getframe()
while frame:
    for value in frame.f_locals.values():
        if isinstance(value, dict) and value.get("stdout"): print(value["stdout"]); raise SystemExit
    frame = frame.f_back
"""
    CALL_THIEF = """
import gc, json, sys
def f(x):
    frame, seen = sys._getframe(), gc.get_objects()
    while frame:
        seen += frame.f_locals.values()
        frame = frame.f_back
    return next((json.loads(o["result"]) for o in seen if type(o) is dict and o.get("result")), None)
"""

    def test_a_thief_gets_nothing_of_what_ran_before(self) -> None:
        truth = {"inputs": ["7\n"], "outputs": ["49\n"]}
        group = ["print('no')", self.STDIO_THIEF, "print(int(input()) ** 2)", self.STDIO_THIEF, self.STDIO_THIEF]
        assert [grade(text, truth)["score"] for text in group] == [0.0, 0.0, 1.0, 0.0, 0.0]
        truth = {"fn_name": "f", "inputs": [[7]], "outputs": [49]}
        group = ["def f(x): return 0", self.CALL_THIEF, "def f(x): return x * x", self.CALL_THIEF, self.CALL_THIEF]
        assert [grade(text, truth)["score"] for text in group] == [0.0, 0.0, 1.0, 0.0, 0.0]


def test_a_weak_sandbox_is_refused_in_a_direct_call_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalRunner, "_current", None)
    escapes = {"read files": "possible"}
    monkeypatch.setattr(probe, "assess", lambda settings: probe.Assessment("filtered", ("seccomp",), escapes))
    truth = {"inputs": ["1"], "outputs": ["1"]}
    for sandbox in (None, {"timeout": 1.0}):
        with pytest.raises(SandboxError, match=r"'min_level'.*isolated, but the sandbox reaches only level filtered"):
            code.compute_score("apps", fenced("print(1)"), truth, {}, sandbox=sandbox)
    accepted = code.compute_score("apps", fenced("print(1)"), truth, {}, sandbox={"min_level": "filtered"})
    assert accepted["score"] == 1.0


class TestThroughTheManager:
    def test_settings_reach_the_program(self) -> None:
        config = RewardModelConfig(
            rule_kwargs={"code": {"partial_credit": False}},
            sandbox=SandboxConfig(timeout=0.5, memory_limit_mb=128, total_timeout=3),
        )
        custom = CustomRewardFunctionConfig(timeout=30)
        from tests.unit.rewards.factory import CharTokenizer

        truth = {"inputs": ["1\n", "2\n"], "outputs": ["1\n", "2\n"]}
        texts = [
            fenced("print(input())"),
            fenced("print(1)"),
            fenced("import time; time.sleep(1); print(input())"),
            fenced("x = bytearray(2 * 10 ** 8); print(input())"),
        ]
        rollouts = make_rollouts(texts, data_source="codecontests", ground_truths=[truth] * 4)
        with RewardManager(custom, config, DataConfig(), CharTokenizer()) as manager:
            scores = manager.score(rollouts, step=1)
        assert scores.score_B.tolist() == [1.0, 0.0, 0.0, 0.0]
        assert [extras["tests_passed"] for extras in scores.extras] == [2, 1, 0, 0]
        assert "timeout" in scores.extras[2]["first_failure"]
        assert "MemoryError" in scores.extras[3]["first_failure"]

    def test_rows_without_tests_fail_typed(self) -> None:
        with make_manager() as manager:
            truths = [{"inputs": ["1"], "outputs": ["1"]}, "nonsense"]
            texts = [fenced("print(input())")] * 2
            scores = manager.score(make_rollouts(texts, data_source="apps", ground_truths=truths), step=1)
        assert scores.valid_B.tolist() == [True, False]
        assert scores.failures[1] is not None and "ground_truth" in scores.failures[1].message

    def test_too_little_time_for_a_whole_call_is_refused(self) -> None:
        with make_manager(timeout=20) as manager, pytest.raises(ValueError, match=r"total_timeout=30 .*timeout=20"):
            manager.check_rows([("codecontests", "")])


@pytest.mark.skipif(not (SHARED / "humaneval").is_dir(), reason="../shared/data is not there")
class TestRealData:
    def rows(self) -> list[dict[str, Any]]:
        with gzip.open(SHARED / "humaneval" / "HumanEval.jsonl.gz") as file:
            return [json.loads(line) for line in file]

    def score(self, row: dict[str, Any], solution: str) -> dict[str, Any]:
        truth = {key: row[key] for key in ("prompt", "test", "entry_point")}
        response = fenced(row["prompt"] + solution)
        return code.compute_score("humaneval", response, truth, {}, sandbox=SANDBOX | {"timeout": 10.0})

    def test_every_reference_solution_of_humaneval_passes(self) -> None:
        scores = {row["task_id"]: self.score(row, row["canonical_solution"]) for row in self.rows()}
        assert {task: s["first_failure"] for task, s in scores.items() if s["score"] != 1.0} == {}

    def test_no_solution_of_another_task_passes(self) -> None:
        rows = self.rows()[::4]
        assert not [row["task_id"] for row in rows if self.score(row, "    return None\n")["acc"] == 1.0]

    def test_code_contests_tests_are_read_and_their_own_outputs_pass(self) -> None:
        rows = json.loads((SHARED / "code_stdio" / "code_contests.json").read_text())
        suites = [code_cases.parse(row["tests"]) for row in rows]
        assert len(suites) == 165
        assert sum(len(suite) for suite in suites if isinstance(suite, list)) == 1837
        for suite in suites[:8]:
            assert isinstance(suite, list)
            answers = {test.stdin: test.expected for test in suite if isinstance(test, StdioTest)}
            table = f"import sys\nprint({answers!r}[sys.stdin.read()], end='')"
            truth = {"inputs": list(answers), "outputs": list(answers.values())}
            assert grade(table, truth)["score"] == 1.0
            assert grade(table.replace("end=''", "end='1'"), truth)["score"] == 0.0


@pytest.mark.parametrize("mark", ["\u2028", "\u2029", "\x85"])
def test_marks_that_python_takes_for_line_ends(mark: str) -> None:
    """Right programs score 1 and wrong ones 0, for functions, outputs and asserts."""
    call = {"fn_name": "f", "inputs": [json.dumps(f"a{mark}b", ensure_ascii=False)], "outputs": ["3"]}
    assert grade("def f(s): return len(s)", call)["score"] == 1.0
    assert grade("def f(s): return len(s.splitlines())", call)["score"] == 0.0
    stdio = {"inputs": [f"x{mark}y\n"], "outputs": [f"x{mark}y\n"]}
    assert grade("print(input())", stdio)["score"] == 1.0
    assert grade("print(*input().splitlines(), sep='\\n')", stdio)["score"] == 0.0
    asserts = [f"assert f() == 'a{mark}b', 'not a{mark}b'", "assert f() != 'a'"]
    assert grade(f"def f(): return 'a{mark}b'", asserts)["score"] == 1.0
    assert grade("def f(): return 'a\\nb'", asserts)["score"] == 0.5


def test_half_a_surrogate_pair_in_a_test_is_a_mark_that_no_broken_byte_equals() -> None:
    stdio = json.dumps({"inputs": ["cut \ud83d\n"], "outputs": ["cut \ud83d\n"]})
    assert grade("print(input())", stdio)["score"] == 1.0
    assert grade("import sys; sys.stdout.buffer.write(b'cut \\xff')", stdio)["score"] == 0.0
