"""The size of the package is a decision: lines of code without blanks, comments and docstrings, and files too small.

Who adds a capability raises a figure here in the same change and says why in its message; who deletes lowers it.
"""

from __future__ import annotations

import ast
import io
import tokenize
from pathlib import Path

import pytest

from tests.architecture.source import Source, package_sources, parse

MOST_LINES = {"core": 36_565, "plugins": 16_807, "kit": 12_019}  # of code, by ring
# with fewer than SMALL lines of any kind, __init__.py left out
MOST_SMALL_FILES = {"core": 31, "plugins": 41, "kit": 16}
SMALL = 60
_PROSE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def code_lines(source: Source) -> int:
    """Lines that hold code."""
    prose: set[int] = set()
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and (
            ast.get_docstring(node, clean=False) is not None
        ):
            prose |= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source.path.read_text(encoding="utf-8")).readline):
        if token.type not in _PROSE:
            lines |= set(range(token.start[0], token.end[0] + 1))
    return len(lines - prose)


def ring_of(source: Source) -> str:
    """core, plugins or kit."""
    first = source.package.partition(".")[0]
    return first if first in MOST_LINES else "core"


@pytest.mark.parametrize("ring", MOST_LINES)
def test_a_ring_keeps_its_budget_of_lines(ring: str) -> None:
    count = sum(code_lines(source) for source in package_sources() if ring_of(source) == ring)
    assert count <= MOST_LINES[ring], (
        f"{ring}: {count:,} lines of code, {MOST_LINES[ring]:,} are allowed: delete, or decide"
    )


@pytest.mark.parametrize("ring", MOST_SMALL_FILES)
def test_few_files_are_tiny(ring: str) -> None:
    own = [s for s in package_sources() if ring_of(s) == ring and s.path.name != "__init__.py"]
    tiny = [s.name for s in own if s.num_lines < SMALL]
    assert len(tiny) <= MOST_SMALL_FILES[ring], f"{ring}: {len(tiny)} files under {SMALL} lines: {', '.join(tiny)}"


def test_lines_of_code_are_counted_without_prose(tmp_path: Path) -> None:
    prose, code = '"""Two\nlines."""\n\n# why\n', 'x = """a\nstring"""\n'
    text = prose + code + 'def f():\n    """Docs."""\n    return (\n        1\n    )\n'
    (tmp_path / "f.py").write_text(text)
    assert code_lines(parse(tmp_path / "f.py")) == 6  # x: 2, def, return ( 1 ): 3
