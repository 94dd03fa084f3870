"""The key tree, read off the dataclasses: every leaf with its type, default, doc and unit."""

import ast
import difflib
import inspect
import itertools
import math
import os
import re
import textwrap
import threading
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Any, get_args, get_origin

from verl_like.config.base import ConfigNode, Range
from verl_like.config.errors import raise_if_any
from verl_like.config.names import MISSING, SFT, VERL, foreign_hint, table
from verl_like.config.ppo import PPOConfig


@dataclass(frozen=True, slots=True)
class Key:
    """One leaf of the configuration."""

    path: str
    owner: type[ConfigNode]
    name: str
    type: Any
    default: Any
    ranges: tuple[Range, ...]
    unit: str

    @property
    def doc(self) -> str:
        """The meaning. Read from the source file when it is asked for: most commands need no key's text."""
        return field_docs(self.owner).get(self.name, "")

    @property
    def range(self) -> str:
        """The values it may have, in words; empty where its type says all."""
        return "; ".join(each.words for each in self.ranges if each.words)

    @property
    def is_open(self) -> bool:
        """True where the key holds a dictionary of the user's own names."""
        return get_origin(self.type) is dict

    @property
    def may_be_null(self) -> bool:
        """True where null is a value of the key."""
        return self.type is Any or type(None) in get_args(self.type)


@cache
def keys() -> dict[str, Key]:
    """All leaves of PPOConfig by dotted path, in order of definition. Open dictionaries count as one leaf."""
    return {key.path: key for key in _walk(PPOConfig(), "")}


def _walk(node: ConfigNode, prefix: str) -> list[Key]:
    found: list[Key] = []
    for field in fields(node):
        value, path = getattr(node, field.name), prefix + field.name
        if is_dataclass(value):
            found += _walk(value, path + ".")  # pyright: ignore[reportArgumentType]
            continue
        told = field.metadata
        ranges, unit = told.get("ranges", ()), told.get("unit", "")
        found.append(Key(path, type(node), field.name, field.type, value, ranges, unit))
    return found


@cache
def sections() -> frozenset[str]:
    """Dotted paths of everything that is not a leaf, for instance `data` and `critic.optim`."""
    paths = (path.split(".") for path in keys())
    return frozenset(".".join(parts[:end]) for parts in paths for end in range(1, len(parts)))


@cache
def field_docs(kind: type) -> dict[str, str]:
    """The string under each field of a dataclass, inherited ones included."""
    docs: dict[str, str] = {}
    for cls in reversed([c for c in kind.__mro__ if is_dataclass(c)]):
        body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
        statements = body.body if isinstance(body, ast.ClassDef) else []
        for field, text in itertools.pairwise(statements):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and _is_string(text):
                docs[field.target.id] = " ".join(text.value.value.split())  # pyright: ignore
    return docs


def _is_string(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


_OF_SFT = "; %s is a name of verl's sft_trainer: `verl-like sft` has it"


def find_key(path: str) -> Key | None:
    """The leaf that this dotted path sets: itself, or the open dictionary that contains it."""
    table = keys()
    parts = path.split(".")
    for end in range(len(parts), 0, -1):
        key = table.get(".".join(parts[:end]))
        if key is not None and (end == len(parts) or key.is_open):
            return key
    return None


def suggest(path: str, objective: str = "rl") -> str:
    """Suggestion for an unknown key, as text for an error message.

    The nearest known key or name of verl's, or what a name of ROLL's or Colossal-RL's is called here; silence is better
    than a key that has only a word like `enable` in common. objective: that of the run, whose own names count.
    """
    section, _, name = path.rpartition(".")
    spelled = _verl_names(objective in ("sft", "preference"))
    names = (*keys(), *sections(), *spelled) if section else spelled
    misspelt = None if path in names else _misspelt(path, names)
    whole = _ending(path) or _below(section, name) if section else None
    if (own := f"{objective}.{name}") in keys():
        whole = own
    if misspelt is not None and misspelt.endswith(f".{name}"):  # only the section is misspelt
        whole = whole or misspelt
    if section and whole is None and path in _verl_names(True) and path not in spelled:
        return _OF_SFT % path
    foreign = None if whole or misspelt in spelled else _foreign(path.split("."))
    nearest = whole or misspelt or _nearest(section, name)
    if foreign is not None and not ("no counterpart" in foreign and (nearest or "").endswith(f".{path}")):
        return f"; {foreign}"
    if nearest is None and (other := _misspelt(path, _verl_names(True))):
        return _OF_SFT % other
    return f"; did you mean {nearest}?" if nearest else "; docs/configuration.md lists all keys"


@cache
def _verl_names(supervised: bool) -> tuple[str, ...]:
    """Names that verl's main_ppo, or also its sft_trainer, has and ours accept; `model.**` as what is below it here."""
    found: list[str] = []
    for row in (*table(VERL), *(table(SFT) if supervised else ())):
        names = [text.partition("=")[0] for text in row.texts() if row.kind != MISSING]
        found += [name for name in names if "*" not in name]
        for start in (name.removesuffix("**") for name in names if row.keys and name.endswith(".**")):
            below = row.keys[0].partition("\\")[0]
            found += [start + key.removeprefix(below) for key in keys() if key.startswith(below)]
    return tuple(found)


def _foreign(parts: list[str]) -> str | None:
    """The answer to a name of another project; inside our own sections only to a telling one."""
    ours = len(parts) > 1 and parts[0] in sections() and not any(part.endswith("_args") for part in parts)
    hint = foreign_hint(parts[-1])
    return None if ours and ("_" not in parts[-1] or len(parts) > 3 or "no counterpart" in (hint or "")) else hint


def _ending(path: str) -> str | None:
    """The known key whose beginning was left out."""
    return next((key for key in (*keys(), *sections()) if key.endswith("." + path)), None)


def _misspelt(path: str, names: Iterable[str]) -> str | None:
    """The name that is near in each of its parts; of several equal ones the first."""
    parts = path.split(".")
    near = [
        (sum(ratios), key)
        for key in names
        if len(known := key.split(".")) == len(parts) and min(ratios := list(map(_likeness, parts, known))) >= 0.75
    ]
    return max(near, key=lambda each: each[0])[1] if near else None


def _likeness(typed: str, known: str) -> float:
    return difflib.SequenceMatcher(None, typed.lower(), known).ratio()


# Names that say nothing without their section.
_GENERIC = (
    "enable", "kind", "method", "mode", "model", "name", "path", "range", "rule", "seed", "source", "std", "type",
)  # fmt: skip


def _below(section: str, name: str) -> str | None:
    """The key of this name in a subsection."""
    below = [key for key in keys() if key.startswith(f"{section}.") and key.endswith(f".{name}")]
    return below[0] if below and (len(below) == 1 or name not in _GENERIC) else None


def _nearest(section: str, name: str) -> str | None:
    """Tried in order: the beginning was left out, part of a name, a key elsewhere."""
    siblings = {key.rpartition(".")[2]: key for key in (*keys(), *sections()) if key.rpartition(".")[0] == section}
    same_name = [key for key in keys() if key.rpartition(".")[2] == name]
    if not section:
        return _ending(name) or next(iter(difflib.get_close_matches(name, siblings, n=1, cutoff=0.7)), None)
    longer = [key for known, key in siblings.items() if len(name) > 3 and name in known]
    if name in _GENERIC:
        return None
    return longer[0] if longer else same_name[0] if len(same_name) == 1 else None


def get_value(config: PPOConfig, path: str) -> Any:
    """The value at a dotted path, which may go on in an open dictionary."""
    value: Any = config
    for part in path.split("."):
        value = value[part] if isinstance(value, dict) else getattr(value, part)
    return value


def from_dict(tree: dict[str, Any]) -> PPOConfig:
    """Build the dataclasses from plain nested dictionaries; ConfigError lists the faults of all sections at once."""
    problems: list[str] = []
    config = _build(PPOConfig, tree, "", problems)
    raise_if_any(problems or [text for key in keys().values() if (text := _beyond(key, get_value(config, key.path)))])
    return config


NO_HOME = "this machine has no user of that name, whose folder ~NAME means; write the folder itself"
_PLACES = ("dir", "file", "files", "path", "tokenizer")


def without_home(text: str) -> bool:
    """Return True where a path begins with ~ and the name of a user whom this machine does not have."""
    return re.fullmatch(r"~[\w.-]*(/.*)?", text) is not None and os.path.expanduser(text) == text


def of_no_home(key: Key, value: Any) -> str | None:
    """Problem of a path of this key that begins with the home of a user who is not there; None for others."""
    texts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else [value]
    for text in texts if key.name not in ("bad_words", "stop") else ():
        if isinstance(text, str) and ("/" in text or key.name.endswith(_PLACES)) and without_home(text):
            return f"{key.path}={text}: {NO_HOME}"
    return None


# unit -> the largest number that timers and 64-bit counts of bytes can hold; of others a 64-bit integer's
_LARGEST = {"s": threading.TIMEOUT_MAX, "MB": 2**43 - 1, "kB": 2**53 - 1}
_UNBOUNDED = ("clip_cov_lb", "clip_cov_ub", "rollout_is_threshold")  # inf: no bound on that side


def _beyond(key: Key, value: Any) -> str | None:
    """Problem of a number that no computation can use; None for others."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if math.isnan(value) or (math.isinf(value) and key.name not in _UNBOUNDED):
        return f"{key.path}={value}: must be a finite number"
    largest = _LARGEST.get(key.unit, 2**63 - 1 if isinstance(value, int) else math.inf)
    if value > largest:
        return f"{key.path}={value}: must be at most {int(largest)}{f' {key.unit}' if key.unit in _LARGEST else ''}"
    return None


def _build(kind: type[Any], tree: dict[str, Any], prefix: str, problems: list[str]) -> Any:
    arguments: dict[str, Any] = {}
    types = {field.name: field.type for field in fields(kind)}
    for name, value in tree.items():
        if name not in types:
            problems.append(f"unknown key {prefix}{name}{suggest(prefix + name)}")
        elif is_dataclass(types[name]):
            arguments[name] = _build(types[name], value, f"{prefix}{name}.", problems)  # pyright: ignore
        else:
            arguments[name] = value
    try:
        return kind(**arguments)
    except ValueError as error:
        problems.append(f"{prefix}{error}")
        return kind()


def to_dict(config: Any) -> dict[str, Any]:
    """A configuration or section as plain nested dictionaries, enums as their names: for trackers and files."""
    plain = _plain(asdict(config))
    assert isinstance(plain, dict)
    return plain


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value.value) if isinstance(value, Enum) else value
