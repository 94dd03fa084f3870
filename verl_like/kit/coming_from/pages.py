"""The pages docs/coming_from_*.md: other projects' settings and what they are called here, from the tables of messages,
spellings and imports. Written with `make docs`.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from verl_like.config.names import PROJECTS, VERL, Row, table, written


def pages(folder: Path) -> dict[str, str]:
    """File name -> text: that of the page in the folder of the documentation, then the tables."""
    named = {f"coming_from_{name}.md": project for project, name in (*PROJECTS.items(), (VERL, VERL))}
    return {name: (folder / name).read_text().partition("\n## ")[0] + _tables(of) for name, of in named.items()}


def _tables(project: str) -> str:
    lines = list[str]()
    section = ""
    for row in table(project):
        if row.section != section:
            section = row.section
            lines += ["", f"## {section}", "", f"| {project} | here | how |", "|---|---|---|"]
        lines.append(_row(row, row.keys if project == VERL else row.all_keys()))
    return "\n".join(lines) + "\n"


def _row(row: Row, ours: Iterable[str]) -> str:
    here = ", ".join(f"`{key}`" for key in ours) or {"=": "=", "": "the same"}.get(row.kind, "none")
    here += "".join(f"{',' if place else ''} `{written(value)}`" for place, value in enumerate(row.values))
    values = {"not": "the opposite"}.get(row.rule, row.rule if row.rule.startswith("under") else "")
    if ">" in row.rule:
        values = ", ".join(f"{old} → {new}" for old, new in row.translations().items() if old != "*")
    left_out = "" if row.default is ... else f"left out: `{written(row.default)}`"
    conditions = [f"if {each}" for each in row.conditions] + ["kept"] * row.kept
    how = "; ".join(filter(None, (*conditions, values, row.note, left_out)))
    cells = (", ".join(f"`{name}`" for name in row.names), here, how)
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
