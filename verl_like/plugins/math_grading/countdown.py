"""Countdown and game of 24: an equation that uses each given number once and evaluates to the target.

Scores follow TinyZero (github.com/Jiayi-Pan/TinyZero): 1 for a right equation, `format_score` for any equation inside
<answer> tags, 0 without one. The equation is evaluated exactly, on fractions, by a walk over its syntax tree: nothing
of it is ever executed.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from fractions import Fraction
from numbers import Real
from typing import Any

from verl_like.plugins.math_grading.think_answer import extract_answer
from verl_like.plugins.math_grading.truth import dictionary_with

MAX_EQUATION_CHARS = 200  # bounds the depth of the syntax tree too
_OPERATORS: dict[type, Callable[[Fraction, Fraction], Fraction]]
_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
_OPERATOR_SIGNS = str.maketrans({"\u00d7": "*", "\u00f7": "/", "\u2212": "-"})  # times, divided by, minus


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    *,
    format_score: float = 0.1,
    score: float = 1.0,
) -> dict[str, Any]:
    """Score an equation. `acc` is 1 or 0.

    ground_truth: {"target": int, "numbers": [int, ...]}, also as JSON text; raises ValueError for anything else.
    """
    truth = dictionary_with(ground_truth, "target", "numbers")
    if not all(isinstance(number, Real) for number in (*truth["numbers"], truth["target"])):
        raise ValueError(f"countdown: target and numbers of ground_truth must be numbers, not {ground_truth!r:.200}")
    equation = extract_answer(solution_str)
    if equation is None:
        return {"score": 0.0, "acc": 0.0, "pred": ""}
    right = is_solution(equation, truth["numbers"], truth["target"])
    return {"score": score if right else format_score, "acc": float(right), "pred": equation[:MAX_EQUATION_CHARS]}


def is_solution(equation: str, numbers: list[int], target: int) -> bool:
    """Check that the equation uses each number exactly once and gives the target; a trailing `= target` is allowed."""
    left, *right = equation.translate(_OPERATOR_SIGNS).split("=")
    if len(equation) > MAX_EQUATION_CHARS or len(right) > 1:
        return False
    if right and right[0].strip() != str(target):
        return False
    try:
        value, used = _evaluate(ast.parse(left.strip(), mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return False
    return value == target and sorted(used) == sorted(numbers)


def _evaluate(node: ast.expr) -> tuple[Fraction, list[int]]:
    """Value of the expression and the numbers in it. Raises ValueError for anything but + - * / and whole numbers."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return Fraction(node.value), [node.value]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        value, used = _evaluate(node.operand)
        return (-value if isinstance(node.op, ast.USub) else value), used
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        left, left_used = _evaluate(node.left)
        right, right_used = _evaluate(node.right)
        return _OPERATORS[type(node.op)](left, right), left_used + right_used
    raise ValueError(f"not arithmetic: {type(node).__name__}")
