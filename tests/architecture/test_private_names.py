"""Tests reach for what is public: lines that read a private name of somebody else are counted, and only become fewer.

A test that cannot do without says so in one function of its file (`def process_of(engine)`), which its tests call.
"""

from __future__ import annotations

import ast
from pathlib import Path

from tests.architecture.source import parse

MOST_LINES = 207  # the aim is 40
TESTS = Path(__file__).resolve().parents[1]
_STANDS_IN = ("twin",)  # for torch's own insides, which it has to name
_OWN = ("self", "cls")
_OTHERS = ("os", "sys")  # os._exit


def private_lines(tree: ast.Module) -> set[int]:
    """Lines with an attribute of another object, or an import, that begins with one underscore."""
    lines = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and _is_private(node.attr):
            owner = node.value.id if isinstance(node.value, ast.Name) else ""
            if owner not in (*_OWN, *_OTHERS):
                lines.add(node.lineno)
        elif isinstance(node, ast.ImportFrom) and any(_is_private(each.name) for each in node.names):
            lines.add(node.lineno)
    return lines


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def files_of_tests() -> list[Path]:
    """Files whose lines count."""
    return [path for path in TESTS.rglob("*.py") if path.parts[len(TESTS.parts)] not in _STANDS_IN]


def test_few_lines_reach_for_private_names() -> None:
    counts = {path: len(private_lines(parse(path).tree)) for path in files_of_tests()}
    most = sorted(counts, key=counts.__getitem__, reverse=True)[:5]
    assert sum(counts.values()) <= MOST_LINES, (
        f"{sum(counts.values())} lines of tests reach for private names, {MOST_LINES} are allowed; most in "
        + ", ".join(f"{path.relative_to(TESTS)} ({counts[path]})" for path in most)
    )


def test_what_counts() -> None:
    text = "from a import _b\nself._c\nx._d.e._f\nos._exit(0)\nx.__dict__\nx.y\nx()._z\n"
    assert private_lines(ast.parse(text)) == {1, 3, 7}
