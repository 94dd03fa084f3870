"""Names here for settings of ROLL, Colossal-RL, TRL and OpenRLHF: one table for messages, imports and docs.

The rows are in foreign/*.txt, `names | keys | rule | default | note` each; `# ` starts a section of the docs page.

- names: as there, several apart by blanks. ROLL's are paths of its YAML: (a|b) alternatives, * one part or some of its
  letters, ** the rest; of several rows that match, the first counts.
- keys: ours; ACTOR, REF, ROLLOUT and MODEL stand for sections of actor_rollout_ref, @ for those of the role that the
  path starts with. `-`: there is none, the note says why. `=`: nothing is to be set; `= a, b`: at these values, others
  are refused.
  `KEY=value`: that value, whatever it is there.
- rule: how a value is translated: `not`; `a>b, c>d`, others refused unless there is a `*`; `under NAME`, in a
  dictionary; `fn NAME`, a function of trainer/importing_*.py; nothing: as it is. Before it, `if NAME;` or
  `if not NAME;`: where that setting is on, or off.
- default: the value there where it is not ours, so that a file which leaves it out keeps its meaning.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

# Project -> its table. The order is that in which a name is looked up for a hint.
PROJECTS = {"ROLL": "roll", "Colossal-RL": "colossal", "TRL": "trl", "OpenRLHF": "openrlhf"}
_SHORT = {name.upper(): f"actor_rollout_ref.{name}" for name in ("actor", "ref", "rollout", "model")}
_A, _R = _SHORT["ACTOR"], _SHORT["REF"]
# Role of ROLL -> what @ , @fsdp and @model stand for.
ROLES = {
    "actor_train": {"": _A, "fsdp": f"{_A}.fsdp_config", "model": _SHORT["MODEL"]},
    "critic": {"": "critic", "fsdp": "critic.model.fsdp_config", "model": "critic.model"},
    "reference": {"": _R, "fsdp": f"{_R}.fsdp_config", "model": _SHORT["MODEL"]},
}
NOTHING = "="


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignRow:
    """One line of a table."""

    section: str
    names: tuple[str, ...]
    keys: tuple[str, ...]  # empty: refused, or nothing to set
    at_rest: tuple[Any, ...] | None  # with `=`: the values that need nothing; () for all; None for rows without `=`
    conditions: tuple[str, ...]
    rule: str
    default: Any  # ... (Ellipsis): none
    note: str

    def values(self) -> dict[str, str]:
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

    def matches(self, path: str) -> bool:
        """Return True where this line is about the setting at `path` of that project."""
        return any(pattern(name).fullmatch(path) for name in self.names)


@cache
def pattern(name: str, *, whole: bool = True) -> re.Pattern[str]:
    """A name of the table as a regular expression; whole=False: of its first part."""
    name = name if whole else re.match(r"\([^)]*\)|[^.]+", name)[0]  # pyright: ignore[reportOptionalSubscript]
    return re.compile(name.replace(".", r"\.").replace("**", "\0").replace("*", r"[^.]*").replace("\0", ".+"))


@cache
def row_of(project: str, path: str) -> ForeignRow | None:
    """The line of a setting of that project, by its whole name."""
    return next((row for row in table(project) if row.matches(path)), None)


@cache
def table(project: str) -> tuple[ForeignRow, ...]:
    """The rows of a project, in the order of its file."""
    rows, section = [], ""
    for line in (Path(__file__).parent / "foreign" / f"{PROJECTS[project]}.txt").read_text().splitlines():
        if line.startswith("# "):
            section = line[2:]
            continue
        names, keys, *rest = (_expanded(cell.strip()) for cell in re.split(r" \|(?= |$)", line))
        rule, default, note = (*rest, "", "", "")[:3]
        parts = rule.split("; ")
        nothing, values = keys.startswith(NOTHING), keys[1:].strip()
        rows.append(
            ForeignRow(
                section=section,
                names=tuple(names.split()),
                keys=() if nothing or keys == "-" else tuple(keys.split(", ")),
                at_rest=tuple(map(value_of, values.split(", ") if values else ())) if nothing else None,
                conditions=tuple(part[3:] for part in parts if part.startswith("if ")),
                rule="" if parts[-1].startswith("if ") else parts[-1],
                default=value_of(default) if default else ...,
                note=note,
            )
        )
    return tuple(rows)


def _expanded(cell: str) -> str:
    return re.sub(r"\b(ACTOR|REF|ROLLOUT|MODEL)\.", lambda found: f"{_SHORT[found[1]]}.", cell)


def value_of(text: str) -> Any:
    """A value of the table: JSON, or else plain text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def plain_names(row: ForeignRow) -> set[str]:
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
def _by_name(project: str) -> dict[str, list[ForeignRow]]:
    found: dict[str, list[ForeignRow]] = {}
    for row in table(project):
        for name in plain_names(row):
            found.setdefault(name, []).append(row)
    return found


def foreign_hint(name: str) -> str | None:
    """Sentence with our keys for a name of another project; None where no project has that name."""
    flag = name.startswith("-")
    if len(name) == 1:  # a flag without its dash would answer every key that ends so
        return None
    for project in sorted(PROJECTS, key=lambda each: flag and not table(each)[0].names[0].startswith("-")):
        rows = _by_name(project).get(_plain(name), [])
        keys = list(dict.fromkeys(key for row in rows for key in row.all_keys()))
        notes = list(dict.fromkeys(row.note for row in rows if row.note and bool(row.keys) == bool(keys)))
        if keys:
            return f"{project}'s {name} is our {', '.join(keys[:4])}" + (f" ({notes[0]})" if len(notes) == 1 else "")
        if rows:
            return f"{project}'s {name} has no counterpart here: {notes[0] if notes else 'nothing is to be set'}"
    return None


def foreign_names_of(key: str) -> list[str]:
    """Names of a key of ours in other projects: `ROLL's pg_clip`."""
    return [
        f"{project}'s {name}"
        for project in PROJECTS
        for name, rows in _by_name(project).items()
        if any(key in row.all_keys() for row in rows)
    ]
