"""The tools that come with the package: by their short names, in a worker; the calculator's arithmetic directly."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from tests.unit.episodes.tools.rows import called, names, row, toolbox, write
from verl_like.plugins.agents.tools.calculator import evaluate
from verl_like.plugins.agents.tools.tool_call import ToolError
from verl_like.plugins.agents.tools.toolbox import Toolbox

pytestmark = [pytest.mark.timeout(120), pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")]

CONFIG = """
    tools:
      - class_name: calculator
      - class_name: code_interpreter
        config: {timeout: 3.0, min_level: limits}
"""


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("2 + 3 * 4 ** 2", 50),
        ("-2^2", -4),
        ("7 // 2 + 7 % 2", 4),
        ("max(1, min(2, 3)) / 4", 0.5),
        ("sqrt(16) + floor(pi)", 7),
        ("6 × 7 ÷ 2", 21),  # noqa: RUF001
        ("round(2.345, 1)", 2.3),
        ("- " * 400 + "1", 1),
    ],
)
def test_arithmetic(expression: str, value: float) -> None:
    assert evaluate(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        "",
        "1 +",
        "9 ** 9 ** 9",
        "(2 ** 9000) * (2 ** 9000)",
        "2 ** 99999999999999999999",
        "__import__('os').system('x')",
        "(1).__class__",
        "pi.real",
        "[i for i in range(3)]",
        "'a' * 9",
        "True + 1",
        "open('x')",
        "lambda: 0",
        "x := 3",
        "(" * 300,
        "1" * 2000,
        "min()",
        "(-8) ** 0.5",
        "sqrt(-1)",
        "1, 2",
        "2j",
        "max(x=1)",
        "1 if 1 else 2",
    ],
)
def test_no_arithmetic(expression: str) -> None:
    with pytest.raises(ValueError):
        evaluate(expression)


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Toolbox]:
    with toolbox(tool_config_path=write(tmp_path_factory.mktemp("shipped"), "tools.yaml", CONFIG)) as made:
        made.begin("a", row()).result(20)
        yield made


def test_the_calculator_tells_the_model_what_is_wrong(box: Toolbox) -> None:
    assert names(box.schemas) == ["calculator", "code_interpreter"]
    assert called(box, "a", "calculator", expression="0.1 + 0.2").text == "0.3"
    wrong = called(box, "a", "calculator", expression="1 / 0")
    assert (wrong.kind, wrong.text, wrong.metrics) == (None, "Error: division by zero", {"errors": 1.0})


def test_code_keeps_its_names_within_an_episode(box: Toolbox) -> None:
    def run(session: str, code: str) -> str:
        return called(box, session, "code_interpreter", code=code).text

    box.begin("b", row()).result(20)
    assert (
        run("a", "import random\nx = [random.random()]\nopen('note', 'w').write('kept')\nprint('hello')") == "hello\n"
    )
    assert run("b", "x").endswith("NameError: name 'x' is not defined\n")
    drawn = run("a", "x[0]")
    x = float(drawn)
    assert 0 < x < 1 and run("a", "x.append(2); x[0]") == drawn
    assert run("a", "print(open('note').read(), len(x))\n1 / 0").splitlines()[0] == "kept 2"
    assert run("a", "x.append(3)\nraise ValueError('after that')").splitlines() == [
        "Traceback (most recent call last):",
        '  File "<call 5>", line 2, in <module>',
        "ValueError: after that",
    ]
    assert run("a", "x.append(4)\nwhile True: pass").startswith("The program was stopped: it took longer than 3 s")
    assert run("a", "def f():\n    return x[1:]\nf()") == "[2, 3]\n"
    assert "SyntaxError" in run("a", "if") and run("a", "import sys; sys.exit(2)") == ""
    assert box.end("a").result(20).kind is None
    box.begin("a", row()).result(20)
    assert run("a", "x").endswith("NameError: name 'x' is not defined\n")


def test_a_wrong_setting_of_the_interpreter_is_an_error_at_the_start(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("wrong")
    path = write(folder, "tools.yaml", "tools: [{class_name: code_interpreter, config: {memory: 3}}]")
    with pytest.raises(ToolError, match="unexpected keyword argument 'memory'"), toolbox(tool_config_path=path):
        pass
    path = write(folder, "tools.yaml", "tools: [{class_name: code_interpreter, config: {memory_limit_mb: 900}}]")
    settings = {"tool_config_path": path, "memory_limit_mb": 800}
    with pytest.raises(ToolError, match="more than the 800 MiB"), toolbox(**settings):
        pass
