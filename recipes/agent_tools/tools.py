"""The tool: an ordinary function, whose name, arguments and docstring are the schema that a prompt would show."""

from __future__ import annotations

import re

from verl.tools.function_tool import function_tool


@function_tool
def calculator(expression: str) -> str:
    """Multiply two numbers.

    Args:
        expression: for instance 37*58
    """
    match = re.fullmatch(r"(\d+)\*(\d+)", expression)
    if match is None:
        return "?"
    return str(int(match[1]) * int(match[2]))
