"""Names and values of other programs, verl's old and newer ones included, as tables of one form: names/*.txt.

A row is `names | keys | rule | default | note`; `# ` starts a section of the docs page. Of several rows that speak of a
setting the first counts; of verl's rows without keys, about values, all do.

- names: as there, several apart by blanks: (a|b) alternatives, * one part or some of its letters, ** the rest.
  `NAME=value` speaks of that value alone, a row of verl's with `-` of all below its names too.
- keys: ours; ACTOR, REF, ROLLOUT, MODEL and CORRECTION stand for sections, @ for those of the role that ROLL's path
  starts with, \\1 for what the first bracket or star of the name stands for. `KEY=value`: that value, whatever it is
  there. Nothing: the name is ours, the rule is about its values.
  `-`: there is none; the note says why, or what it is. `- a, b`: a key of ours that cannot have these values yet (`*`:
  any), the note says what to do. `=`: nothing is to be set; `= a, b`: at these values, others are refused.
- rule: how a value is translated: `not`; `a>b, c>d`, others refused unless there is a `*`; `under NAME`, in a
  dictionary; `fn NAME`, a function of spellings.py or kit/coming_from/*.py; nothing: as it is. Before it, `if NAME;` or
  `if not NAME;`: where that setting (of verl's: in that section) is on, or off. `kept`: the name is a key of ours too
  and may be set: without effect (`=`), except for these values (`= a, b`), or instead of a better one.
  `instead`: the note tells what is done in place of what is asked, a size: a whole number above 0.
- default: the value there where it is not ours, so that a file which leaves it out keeps its meaning.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

# Project -> its table. The order is that in which a name is looked up for a hint.
PROJECTS = {"ROLL": "roll", "Colossal-RL": "colossal", "TRL": "trl", "OpenRLHF": "openrlhf"}
VERL, SFT = "verl", "sft"  # of its main_ppo, and of its sft_trainer
_SHORT = {name.upper(): f"actor_rollout_ref.{name}" for name in ("actor", "ref", "rollout", "model")}
_SHORT["CORRECTION"] = "algorithm.rollout_correction"
_A, _R = _SHORT["ACTOR"], _SHORT["REF"]
# Role of ROLL -> what @ , @fsdp and @model stand for.
ROLES = {
    "actor_train": {"": _A, "fsdp": f"{_A}.fsdp_config", "model": _SHORT["MODEL"]},
    "critic": {"": "critic", "fsdp": "critic.model.fsdp_config", "model": "critic.model"},
    "reference": {"": _R, "fsdp": f"{_R}.fsdp_config", "model": _SHORT["MODEL"]},
}
NOTHING, MISSING = "=", "-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of a table."""

    section: str
    names: tuple[str, ...]
    keys: tuple[str, ...]
    kind: str  # NOTHING, MISSING, or empty: it has keys, or translates values
    values: tuple[Any, ...]  # behind NOTHING or MISSING; (): all
    conditions: tuple[str, ...]
    kept: bool
    instead: bool
    rule: str
    default: Any  # ... (Ellipsis): none
    note: str

    @property
    def renames(self) -> bool:
        """True where another name of a key is all that it tells."""
        return bool(self.keys) and not (self.kept or self.rule or "=" in self.keys[0])

    def translations(self) -> dict[str, str]:
        """Translations of a rule with >: value there -> value here, both as text of the table."""
        pairs = (pair.split(">", 1) for pair in re.split(r", (?![^\[]*\])", self.rule))
        return {pair[0]: pair[-1] for pair in pairs}

    def keys_of(self, role: str) -> list[str]:
        """Our keys where the path starts with this role of ROLL."""
        return [re.sub(r"@(\w*)", lambda at: ROLES.get(role, ROLES["actor_train"])[at[1]], key) for key in self.keys]

    def all_keys(self) -> list[str]:
        """Our keys for each role that the names allow."""
        roles = [role for role in ROLES if any(pattern(name, whole=False).match(role) for name in self.names)]
        keys = (key.partition("=")[0] for role in roles or ["actor_train"] for key in self.keys_of(role))
        return list(dict.fromkeys(keys))

    def texts(self) -> list[str]:
        """All names, with each of their alternatives; stars stay."""
        return [text for name in self.names for text in alternatives(name)]


@cache
def pattern(name: str, *, whole: bool = True, below: bool = False) -> re.Pattern[str]:
    """A name of the table as a regular expression; whole=False: of its first part; below: and of all below it."""
    name = name if whole else re.match(r"\([^)]*\)|[^.]+", name)[0]  # pyright: ignore[reportOptionalSubscript]
    text = name.replace(".", r"\.").replace("**", "\0").replace("*", r"([^.]*)").replace("\0", "(.+)")
    return re.compile(rf"(?:{text})(?:\.(?P<below>.*))?" if below else text)


def alternatives(name: str) -> Iterator[str]:
    """All texts of a name with brackets such as (a|b)."""
    if (bracket := re.search(r"\(([^()]*)\)", name)) is None:
        yield name
        return
    for choice in bracket[1].split("|"):
        yield from alternatives(name[: bracket.start()] + choice + name[bracket.end() :])


def rows_of(project: str, path: str, value: Any = ...) -> Iterator[tuple[Row, re.Match[str]]]:
    """The lines about a setting, by its whole name, in their order; a line for one value only where it has that."""
    whole = f"{path}={written(value)}"
    for part, name, row in _names(project):
        text = whole if "=" in name else path
        if part in text:
            below = project == VERL and row.kind == MISSING and not row.values
            if match := pattern(name, below=below).fullmatch(text):
                yield row, match


@cache
def row_of(project: str, path: str) -> Row | None:
    """The line of a setting of that project, by its whole name."""
    return next((row for row, _ in rows_of(project, path)), None)


@cache
def _names(project: str) -> list[tuple[str, str, Row]]:
    """(longest text that all its settings contain, name, row): most rows are passed over without their expression."""
    found = []
    for row in table(project):
        for name in row.names:
            fixed = name
            while "(" in fixed:
                fixed = re.sub(r"\([^()]*\)", "*", fixed)
            found.append((max(fixed.split("*"), key=len), name, row))
    return found


@cache
def table(project: str) -> tuple[Row, ...]:
    """The rows of a project, in the order of its file."""
    rows, section = [], ""
    text = (Path(__file__).with_suffix("") / f"{PROJECTS.get(project, project)}.txt").read_text(encoding="utf-8")
    for line in text.splitlines():
        if line.startswith("# "):
            section = line[2:]
            continue
        names, keys, *rest = (_expanded(cell.strip()) for cell in re.split(r" \|(?= |$)", line))
        rule, default, note = (*rest, "", "", "")[:3]
        parts = rule.split("; ")
        kind = keys[0] if keys[:1] in (NOTHING, MISSING) and keys else ""
        values = keys[1:].strip() if kind else ""
        rows.append(
            Row(
                section=section,
                names=tuple(names.split()),
                keys=() if kind or not keys else tuple(keys.split(", ")),
                kind=kind,
                values=tuple(map(value_of, values.split(", ") if values else ())),
                conditions=tuple(part[3:] for part in parts if part.startswith("if ")),
                kept="kept" in parts,
                instead="instead" in parts,
                rule="" if parts[-1] in ("kept", "instead") or parts[-1].startswith("if ") else parts[-1],
                default=value_of(default) if default else ...,
                note=note,
            )
        )
    return tuple(rows)


def _expanded(cell: str) -> str:
    return re.sub(rf"\b({'|'.join(_SHORT)})\.", lambda found: f"{_SHORT[found[1]]}.", cell)


def value_of(text: str) -> Any:
    """A value of the table: JSON, or else plain text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def written(value: Any) -> str:
    """A value as the tables write it."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def plain_names(row: Row) -> set[str]:
    """The last parts of a row's names, as one would type them alone."""
    found: set[str] = set()
    for name in row.names:
        name = re.sub(r"\.\*\*?$", "", name).rpartition("]")[2]
        last = re.split(r"\.(?![^(]*\))", name)[-1] if not name.startswith("-") else name
        found |= {_plain(part) for part in last.strip("()").split("|") if "*" not in part}
    return found


def _plain(name: str) -> str:
    return name.lstrip("-").replace("-", "_")


@cache
def _by_name(project: str) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in table(project):
        for name in sorted(plain_names(row)):
            found.setdefault(name, []).append(row)
    return found


def foreign_hint(name: str) -> str | None:
    """Sentence with our keys for a name of other projects; None where no project has that name.

    Projects that answer alike share their answer; those with a counterpart come alone.
    """
    flag = name.startswith("-")
    if len(name) == 1:  # a flag without its dash would answer every key that ends so
        return None
    found: dict[str, list[str]] = {}
    missing: dict[str, list[str]] = {}
    for project in sorted(PROJECTS, key=lambda each: flag and not table(each)[0].names[0].startswith("-")):
        rows = _by_name(project).get(_plain(name), [])
        keys = list(dict.fromkeys(key for row in rows for key in row.all_keys()))
        notes = list(dict.fromkeys(row.note for row in rows if row.note and bool(row.keys) == bool(keys)))
        if keys:
            note = f" ({notes[0]})" if len(notes) == 1 else ""
            found.setdefault(f"is our {', '.join(keys[:4])}{note}", []).append(f"{project}'s")
        elif rows:
            text = f"has no counterpart here: {notes[0] if notes else 'nothing is to be set'}"
            missing.setdefault(text, []).append(f"{project}'s")
    return "; ".join(f"{' and '.join(whose)} {name} {text}" for text, whose in (found or missing).items()) or None


def foreign_names_of(key: str) -> list[str]:
    """Names of a key of ours in other projects: `ROLL's pg_clip`."""
    return [
        f"{project}'s {name}"
        for project in PROJECTS
        for name, rows in _by_name(project).items()
        if any(key in row.all_keys() for row in rows)
    ]
