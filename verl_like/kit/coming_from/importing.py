"""Settings of another project as overrides of ours, by the table of config/names.py; nothing is lost silently.

Every setting that is read ends in one of four lists: carried, needs nothing, refused (no counterpart, or not built),
unknown.
"""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, get_args

from hydra.core.override_parser.types import Quote, QuotedString
from omegaconf import OmegaConf

from verl_like.config import PPOConfig
from verl_like.config.batch_plan import BatchPlan
from verl_like.config.errors import ConfigError
from verl_like.config.names import Row, plain_names, row_of, table, value_of, written
from verl_like.config.schema import get_value, keys
from verl_like.trainer.compose import compose_tree, compose_with_warnings, followers_of, take_back_stages, to_config
from verl_like.trainer.stages_asked import SIZES, with_follower

OTHERWISE = "otherwise: "  # so begin notes that are about refused values
CARRIED, NOTHING, REFUSED, UNKNOWN = "carried", "needs nothing", "refused", "unknown"


class Outcome(NamedTuple):
    """Fate of one setting. A refused one may carry settings too, which stand in for it."""

    status: str
    settings: Mapping[str, Any] = {}
    note: str = ""


@dataclass(slots=True)
class Item:
    """Setting of the other project.

    assumed: it was left out there, and its default is not ours.
    """

    name: str
    value: Any
    status: str
    settings: dict[str, Any]
    note: str
    assumed: bool = False


@dataclass(slots=True)
class Imported:
    """All settings with what became of them, and ours in the order of the configuration."""

    project: str
    items: list[Item] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)

    def of(self, status: str) -> list[Item]:
        """The items of one list, in their order."""
        return [item for item in self.items if item.status == status]

    def overrides(self) -> list[str]:
        """List the settings as on the command line of train, a preset first."""
        order = {key: place for place, key in enumerate(["preset", *keys()])}
        return [f"{key}={text_of(self.settings[key])}" for key in sorted(self.settings, key=order.__getitem__)]

    def command(self) -> str:
        """A line of a shell."""
        return " \\\n    ".join(["verl-like train", *map(shlex.quote, self.overrides())])

    def check(self) -> None:
        """Raise ConfigError where train would refuse the settings; each problem names what they come from."""
        try:
            trainer = (config := compose_with_warnings(self.overrides())[0]).trainer
            if isinstance(trainer.n_gpus_per_node, int):
                BatchPlan.build(config, trainer.nnodes * trainer.n_gpus_per_node)
        except ConfigError as error:
            raise ConfigError([problem + self._origin(problem) for problem in error.problems]) from error

    def _origin(self, problem: str) -> str:
        """The settings there of whose counterparts a problem speaks."""
        words = {word.strip(".") for word in re.findall(r"[\w.]+", problem)}
        told = [f"{item.name}={text_of(item.value)}" for item in self.items if words & item.settings.keys()]
        return f" (from {self.project}'s {', '.join(told)})" if told else ""

    def yaml(self) -> str:
        """A file for --config-path and --config-name."""
        tree = OmegaConf.create(
            {"defaults": [{"preset": self.settings["preset"]}]} if "preset" in self.settings else {}
        )
        for key in [key for key in keys() if key in self.settings]:
            OmegaConf.update(tree, key, self.settings[key], force_add=True)
        return OmegaConf.to_yaml(tree)


class Foreign:
    """Settings of another project, with the functions that the table's rules name (methods called rule_NAME).

    leaves: dotted name -> value.
    referred: names that other settings took their value from.
    """

    project = ""
    why_off: Mapping[str, str] = {}  # condition of a rule -> why a setting then needs nothing

    def __init__(self, leaves: Mapping[str, Any], referred: frozenset[str] = frozenset()) -> None:
        self.leaves, self.referred = dict(leaves), referred

    def __call__(self, name: str, otherwise: Any = None) -> Any:
        """A setting's value; where it is left out, the other project's default, or `otherwise`."""
        row = self.row_of(name)
        for each in (name, *(row.names if row else ())):  # it may be written under another of its names
            if self.leaves.get(each) is not None:
                return self.leaves[each]
        return otherwise if row is None or row.default is ... or otherwise is not None else row.default

    def is_on(self, name: str) -> bool:
        """Evaluate the condition `if NAME` of a rule."""
        return bool(self(name))

    def group(self) -> dict[str, Any]:
        """Settings that choose a preset; others equal to its values need nothing."""
        return {}

    def row_of(self, name: str) -> Row | None:
        """The line of the table for a setting."""
        return row_of(self.project, name)

    def idle(self, name: str) -> str:
        """Explain why a setting cannot have an effect in the other project either; empty where it can."""
        return ""

    def outcome(self, name: str, value: Any) -> Outcome:
        """Decide a setting's fate, before it is compared with our defaults and the other settings."""
        row = self.row_of(name)
        if value == {} or (row is None and value is None):
            return Outcome(NOTHING, note="nothing is set")
        if row is None:
            return self._unlisted(name)
        if why := self.idle(name):
            return Outcome(NOTHING, note=why)
        if row.kind == "=":
            rests = value in row.values
            note = "what is done anyway" if rests else row.note
            return Outcome(NOTHING if rests or row.values == () else REFUSED, note=note)
        if not row.keys:
            return Outcome(REFUSED, note=row.note)
        ours = row.keys_of(name.split(".")[0])
        for needed in row.conditions:
            if self.is_on(needed.removeprefix("not ")) == needed.startswith("not "):
                return Outcome(NOTHING, note=self.why_off.get(needed, _off(needed)))
        kind, _, rest = row.rule.partition(" ")
        if kind == "fn":
            try:
                found: Outcome | dict[str, Any] = getattr(self, f"rule_{rest}")(name, value, ours)
            except ConfigError:
                raise
            except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
                unread = Outcome(REFUSED, note=f"the value cannot be read: {error}")
                return unread if value is not None else Outcome(NOTHING, note="nothing is set")
            found = Outcome(CARRIED, found) if isinstance(found, dict) else found
            return found._replace(note=found.note or row.note)
        if kind == "under":
            last = name.rpartition(".")[2]
            value = {rest: {last: str(value)}} if rest else {last: value}
        elif kind == "not":
            value = not value
        elif ">" in row.rule:
            values = row.translations()
            new = values.get(written(value))
            if new is None and "*" not in values:
                why = row.note.removeprefix(OTHERWISE) or f"{written(value)} is none of {', '.join(values)}"
                return Outcome(REFUSED, note=why)
            value = value if new is None else value_of(new)
        return Outcome(CARRIED, carry(ours, value), "" if row.note.startswith(OTHERWISE) else row.note)

    def _unlisted(self, name: str) -> Outcome:
        parts = name.split(".")
        if any(".".join(parts[:end]) in self.referred for end in range(1, len(parts) + 1)):
            return Outcome(NOTHING, note="a name of the file's own: its value is taken where ${...} refers to it")
        known = {each: row for row in reversed(table(self.project)) for each in plain_names(row)}
        if not (near := difflib.get_close_matches(parts[-1], known, n=1, cutoff=0.75)):
            return Outcome(UNKNOWN, note="nothing is known of it")
        beside = ".".join([*parts[:-1], near[0]])
        meant = beside if self.row_of(beside) else _whole_name(known[near[0]], near[0])
        return Outcome(UNKNOWN, note=f"did you mean {meant}?")


def _whole_name(row: Row, last: str) -> str:
    """Return the name of the line that ends with `last`; of alternatives in brackets the first."""
    name = next(name for name in row.names if last in name.replace("-", "_"))
    return re.sub(r"\(([^)]*)\)", lambda many: last if last in many[1].split("|") else many[1].split("|")[0], name)


def carry(ours: list[str], value: Any) -> dict[str, Any]:
    """Put the value under each key; KEY=value of the table keeps its own."""
    pairs = (key.partition("=") for key in ours)
    return {key: value_of(fixed) if equals else value for key, equals, fixed in pairs}


def _off(condition: str) -> str:
    return f"{condition[4:]} comes first" if condition.startswith("not ") else f"{condition} is off"


def translate(source: Foreign) -> Imported:
    """Put each setting of the source into its list, and collect the settings of ours that come of them."""
    base, followers = _base(*(f"{key}={value}" for key, value in source.group().items())), _followers()
    done = Imported(source.project)
    by: dict[str, str] = {}
    for name, value, assumed in [*((*leaf, False) for leaf in source.leaves.items()), *_left_out(source)]:
        status, settings, note = source.outcome(name, value)
        own = {
            key: new
            for key, new in settings.items()
            if key == "preset" or ((key in followers or not _same(get_value(base, key), new)) and _allowed(key, new))
        }
        if status == CARRIED and not own:
            row = source.row_of(name)
            status, note = NOTHING, f"our default: {note}" if note and row and note != row.note else "our default"
        clash = next((key for key, new in settings.items() if not _fits(done.settings.get(key, new), new)), None)
        if assumed and (status == NOTHING or clash or any(key in by for key in own)):
            continue
        if clash:
            status, own, note = REFUSED, {}, f"{clash} is {text_of(done.settings[clash])} already, by {by[clash]}"
        for key, new in own.items():
            old = done.settings.get(key)
            done.settings[key] = _joined(old, new) if isinstance(old, dict) and isinstance(new, dict) else new
            by.setdefault(key, name)
        done.items.append(Item(name, value, status, own, note, assumed))
    _take_back_stages(done, by)
    return done


def _take_back_stages(done: Imported, by: Mapping[str, str]) -> None:
    """Leave out pipeline stages that a role cannot have here, and say what is done instead."""
    asked = {key: by[key] for key in done.settings if key.endswith(SIZES)}
    if not any(done.settings[key] > 1 for key in asked):
        return
    asked = with_follower(asked, asked)
    try:
        told = take_back_stages(compose_tree(done.overrides(), [])[0], asked)
    except ConfigError:  # which `check` tells
        return
    for key, why in told.items():
        done.settings[key] = 1
        for item in (item for item in done.items if item.name == asked[key]):
            item.settings.pop(key, None)
            item.note = why.partition(": ")[2]
            item.status = CARRIED if item.settings else NOTHING


@cache
def _base(*groups: str) -> PPOConfig:
    return to_config(compose_tree(groups, [])[0])


@cache
def _followers() -> frozenset[str]:
    """Keys whose default is another key's value: an equal value may be another one once that key is set."""
    return frozenset(key for many in followers_of([]).values() for key in many)


def _left_out(source: Foreign) -> Iterator[tuple[str, Any, bool]]:
    """The defaults of settings that the source does not name, where they are not ours."""
    named = {id(source.row_of(name)) for name in source.leaves}
    for row in table(source.project):
        if row.default is ...:
            continue
        roles = re.fullmatch(r"\(([\w|]+)\)(.*)", row.names[0])
        if roles is None and id(row) not in named:
            yield row.names[0].lstrip("-").replace("-", "_"), row.default, True
        for name in [role + roles[2] for role in roles[1].split("|")] if roles else []:
            if name not in source.leaves:
                yield name, row.default, True


def _joined(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    both = {name: _joined(old[name], new[name]) for name in old.keys() & new.keys() if isinstance(old[name], dict)}
    return {**old, **new, **both}


def _fits(old: Any, new: Any) -> bool:
    """True where two values of a key can stand together: they are equal, or dictionaries that can be joined."""
    if isinstance(old, dict) and isinstance(new, dict):
        return all(_fits(old[name], new[name]) for name in old.keys() & new.keys())
    return old == new


def _same(ours: Any, new: Any) -> bool:
    return ours == new and isinstance(ours, bool) == isinstance(new, bool)


def _allowed(key: str, new: Any) -> bool:
    """True where a value fits our key: null, with which other projects leave a setting out, is not one of every key."""
    return new is not None or type(None) in get_args(keys()[key].type)


def text_of(value: Any) -> str:
    """A value in the grammar of the command line's overrides."""
    if isinstance(value, dict):
        pairs = (
            re.sub(r"([\\()\[\]{}:=, \t])", r"\\\1", str(name)) + ":" + text_of(item) for name, item in value.items()
        )
        return "{" + ",".join(pairs) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(text_of, value)) + "]"
    if not isinstance(value, str):
        return written(value)
    other = value.lower() in ("null", "true", "false", "nan", "inf")
    plain = re.fullmatch(r"[A-Za-z_./][\w./:+@%-]*", value) and not other
    return value if plain else QuotedString(value, Quote.single).with_quotes()


def flat(tree: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted name -> value of every leaf; lists, and dictionaries without keys, are leaves."""
    found: dict[str, Any] = {}
    for name, value in tree.items():
        path = f"{prefix}{name}"
        found |= flat(value, f"{path}.") if isinstance(value, dict) and value else {path: value}
    return found


def write(done: Imported, path: Path, heading: list[str]) -> None:
    """Write a shell script, or for .yaml and .yml a file of the configuration, with the heading as comments.

    Raises ConfigError where the file cannot be written.
    """
    is_yaml = path.suffix in (".yaml", ".yml")
    lines = ([] if is_yaml else ["#!/bin/sh"]) + [f"# {line}".rstrip() for line in heading]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join([*lines, "", done.yaml() if is_yaml else done.command() + ' "$@"\n']))
    except OSError as error:
        raise ConfigError([f"--out {path} cannot be written: {error.strerror}: {error.filename}"]) from error
