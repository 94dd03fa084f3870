"""The size of the package is a decision: lines of code without blanks, comments and docstrings, and files too small.

Who adds a capability raises a figure here in the same change and says why in its message; who deletes lowers it.
"""

from __future__ import annotations

import ast
import io
import tokenize
from pathlib import Path

from tests.architecture.source import Source, package_sources, parse

MOST_LINES = 54_131  # of code, in the whole package
MOST_SMALL_FILES, SMALL = 98, 60  # files with fewer than SMALL lines of any kind, __init__.py left out
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


def test_the_package_keeps_its_budget_of_lines() -> None:
    count = sum(code_lines(source) for source in package_sources())
    assert count <= MOST_LINES, f"{count:,} lines of code, {MOST_LINES:,} are allowed: delete, or decide"


def test_few_files_are_tiny() -> None:
    tiny = [s.name for s in package_sources() if s.num_lines < SMALL and s.path.name != "__init__.py"]
    assert len(tiny) <= MOST_SMALL_FILES, f"{len(tiny)} files under {SMALL} lines, {MOST_SMALL_FILES} are allowed"


def test_lines_of_code_are_counted_without_prose(tmp_path: Path) -> None:
    prose, code = '"""Two\nlines."""\n\n# why\n', 'x = """a\nstring"""\n'
    text = prose + code + 'def f():\n    """Docs."""\n    return (\n        1\n    )\n'
    (tmp_path / "f.py").write_text(text)
    assert code_lines(parse(tmp_path / "f.py")) == 6  # x: 2, def, return ( 1 ): 3
