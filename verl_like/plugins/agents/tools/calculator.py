"""A calculator: arithmetic by walking the syntax tree, of which nothing is executed."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable
from typing import Any

from verl_like.plugins.agents.tools.schema import texts_schema

SCHEMA = texts_schema(
    "calculator",
    "Evaluates an arithmetic expression.",
    expression="For example (3 + 4) * 2 ** 5, or sqrt(2) * pi. Operators + - * / // % **.",
)
_MOST_CHARS, _MOST_BITS = 1000, 10_000  # of an expression; of a number in it
_SPELLINGS = str.maketrans({"\u00d7": "*", "\u00b7": "*", "\u00f7": "/", "\u2212": "-"})  # typographic signs
_OPERATORS: dict[type, Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}
_OF_MATH = ("sqrt", "exp", "log", "log2", "log10", "sin", "cos", "tan", "asin", "acos", "atan", "floor", "ceil", "gcd")
_FUNCTIONS: dict[str, Callable[..., Any]] = {"abs": abs, "min": min, "max": max, "round": round}
_FUNCTIONS |= {name: getattr(math, name) for name in _OF_MATH}
_CONSTANTS = {"pi": math.pi, "e": math.e}


def evaluate(expression: str) -> int | float:
    """The value of an expression.

    Raises ValueError for what is none, or too large; ArithmeticError as arithmetic has it.
    """
    if len(expression) > _MOST_CHARS:
        raise ValueError(f"the expression is longer than {_MOST_CHARS} characters")
    try:
        tree = ast.parse(expression.translate(_SPELLINGS).strip().replace("^", "**"), mode="eval")
        return _value(tree.body)
    except (SyntaxError, RecursionError, MemoryError):  # too deeply nested for the parser is a MemoryError
        raise ValueError("this is no arithmetic expression") from None
    except TypeError as error:  # wrong arguments of a function
        raise ValueError(str(error)) from None


def _value(node: ast.expr) -> int | float:
    match node:
        case ast.Constant(value=bool()):
            pass
        case ast.Constant(value=int() | float() as value):
            return _bounded(value)
        case ast.Name(id=name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_value(operand))
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _power(_value(left), _value(right))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _bounded(_OPERATORS[type(op)](_value(left), _value(right)))
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in _FUNCTIONS:
            return _bounded(_FUNCTIONS[name](*[_value(argument) for argument in arguments]))
    raise ValueError(f"not allowed in an expression: {ast.unparse(node)[:100]}")


def _power(base: int | float, exponent: int | float) -> int | float:
    if isinstance(base, int) and isinstance(exponent, int) and base.bit_length() * abs(exponent) > _MOST_BITS:
        raise ValueError("the result is too large")
    result = base**exponent
    if isinstance(result, complex):
        raise ValueError("the result is no real number")
    return _bounded(result)


def _bounded(value: int | float) -> int | float:
    if isinstance(value, int) and value.bit_length() > _MOST_BITS:
        raise ValueError("the result is too large")
    return value


class Calculator:
    """The tool, in verl's form. It has no state; what cannot be computed is told to the model."""

    def __init__(self, config: dict[str, Any], tool_schema: Any = None) -> None:
        self.tool_schema = tool_schema or SCHEMA

    async def create(self, instance_id: str, **kwargs: Any) -> str:
        return instance_id

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> tuple[str, None, dict]:
        """The value as text, floats with 12 digits, or "Error: ..."."""
        try:
            value = evaluate(str(parameters.get("expression", "")))
            return (f"{value:.12g}" if isinstance(value, float) else str(value)), None, {"errors": 0}
        except (ValueError, ArithmeticError) as error:
            return f"Error: {error}", None, {"errors": 1}
