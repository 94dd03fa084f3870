"""Meaning of a key of the configuration, and its effect in one configuration: `verl-like explain`."""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

from verl_like.config import PPOConfig
from verl_like.config.errors import ConfigError
from verl_like.config.menus import ESTIMATORS, KL_KINDS, LOSSES, Choice
from verl_like.config.names import VERL, Row, foreign_names_of, table
from verl_like.config.rules import all_rules, idle_lines
from verl_like.config.schema import Key, find_key, get_value, keys, sections, suggest
from verl_like.config.spellings import (
    deprecated,
    no_effect,
    not_yet,
    refusal,
    renamed,
    says_nothing,
    without_effect,
)
from verl_like.kit.docs.readers import readers
from verl_like.observe.redaction import redacted_tree
from verl_like.trainer.compose import compose_tree, followers_of, to_config
from verl_like.trainer.config_files import CONFIG_DIR

Rows = list[tuple[str, str]]
_MENUS: dict[str, Mapping[str, Choice]] = {
    "algorithm.adv_estimator": ESTIMATORS,
    "algorithm.kl_penalty": KL_KINDS,
    "actor_rollout_ref.actor.kl_loss_type": KL_KINDS,
    "actor_rollout_ref.actor.policy_loss.loss_mode": LOSSES,
}


def explain(name: str, overrides: Sequence[str] = (), yaml_files: Sequence[Path] = ()) -> Rows:
    """(what, text) about a key, each key of a section, a preset, an estimator or a loss.

    name: as on a command line: `+`, `~` and `=VALUE` may be there. ConfigError for a name that is none of these.
    """
    if chosen := [*_chosen(name)]:
        return chosen
    name = name.partition("=")[0].lstrip("+~").rstrip(".")
    why = says_nothing(name)
    if why is not None:
        return [(name, f"accepted and left out: {why}")]
    path = renamed(name)
    if path in sections():
        return [(key, _first_sentence(leaf)) for key, leaf in keys().items() if key.startswith(path + ".")]
    key = find_key(path)
    if key is None:
        why = refusal(path)
        values = {value: at for at, menu in _MENUS.items() for value in menu} | dict.fromkeys(_presets(), "preset")
        endings = [path.rpartition(".")[2] for path in keys()]
        near = difflib.get_close_matches(name, [*endings, *values], n=1, cutoff=0.75)
        is_value = bool(near) and near[0] in values and near[0] not in endings
        meant = f"; did you mean {values[near[0]]}={near[0]}?" if is_value else suggest(name)
        missing = f"there is no key {name}{meant}{_similar(name, meant)}"
        raise ConfigError([missing if why is None else f"{name}: {why}"])
    tree, changes, _ = compose_tree(overrides, yaml_files)
    config, is_set = to_config(tree), any(find_key(change.key) == key for change in changes)
    followers = followers_of(changes)
    rows = [("key", key.path if name == path else f"{key.path} ({name} is another spelling)"), ("meaning", key.doc)]
    rows += [("unit", key.unit)] if key.unit else []
    rows += [("type", _type_of(key)), *([("range", key.range)] if key.range else []), ("default", shown(key.default))]
    here = shown(redacted_tree(get_value(config, key.path), key.path))
    rows += [("here", f"{here} ({'set' if is_set else 'not set'})")]
    rows += [(here, choice.cells[0])] if (choice := _MENUS.get(key.path, {}).get(here)) else []
    rows += [("effect here", _effect(key, config, followers))]
    about = [each for each in all_rules() if each.is_about(key.path) and each.says]
    rows += [("no effect if" if each.kind == "idle" else "rule", each.says) for each in about]
    rows += [("follow it", ", ".join(followers[key.path]))] if key.path in followers else []
    rows += [("deprecated", f"use {better[0]}")] if (better := deprecated().get(key.path)) else []
    rows += [("read by", ", ".join(readers()[key.path]) or "nobody")]
    rows += [("other names", "; ".join(names))] if (names := other_names(key.path)) else []
    return [*rows, ("beside it", _siblings(key.path))]


def _chosen(name: str) -> Iterator[tuple[str, str]]:
    """Yield what is known of a preset, or of a value of a menu: behind its key, or alone."""
    key, _, value = name.rpartition("=")
    for preset, file in _presets().items() if (key or value) == "preset" or not key else ():
        if value in (preset, "preset"):
            lines = file.read_text(encoding="utf-8").splitlines()
            told = itertools.takewhile(lambda line: line.startswith("#"), lines)
            yield (
                f"preset={preset}",
                " ".join(line.lstrip("# ") for line in told).replace(f" preset={preset}", ""),
            )
    for path, menu in _MENUS.items():
        if value in menu and renamed(key) in ("", path):
            cells = itertools.zip_longest(("", "source", "when", "watch"), menu[value].cells, fillvalue="")
            yield f"{path}={value}", ". ".join(f"{title}: {cell}".lstrip(": ") for title, cell in cells if cell)


def _presets() -> dict[str, Path]:
    return {file.stem: file for file in sorted((CONFIG_DIR / "preset").glob("*.yaml"))}


def other_names(path: str) -> list[str]:
    """Names of this key in verl (earlier or later) and other projects."""
    renames = (row for row in table(VERL) if row.renames)
    return [spelling for row in renames for spelling in _spellings(row, path)] + foreign_names_of(path)


def _spellings(row: Row, path: str) -> Iterator[str]:
    """The names that a row of verl's table turns into `path`, each proved by the table itself."""
    match = re.fullmatch(re.sub(r"\\\d", "(.*)", row.keys[0].replace(".", r"\.")), path)
    parts = (match.groups("") or [""]) if match else ()
    for text in row.texts():
        for spelling in dict.fromkeys(re.sub(r"\*+", part, text) for part in parts):
            if re.fullmatch(r"[\w.]*\w", spelling) and renamed(spelling) == path:
                yield spelling


def _effect(key: Key, config: PPOConfig, followers: dict[str, list[str]]) -> str:
    reasons = without_effect(frozenset({key.path})) + idle_lines(config, frozenset({key.path}), followers)
    if not reasons:
        return "yes" if readers()[key.path] else "none: nothing reads it"
    return "none: " + "; ".join(reason.partition(": ")[2] for reason in reasons)


def _type_of(key: Key) -> str:
    kind = key.type
    if isinstance(kind, type) and issubclass(kind, Enum):
        lacking = not_yet().get(key.path)
        built = [str(each.value) for each in kind if lacking is None or each.value not in lacking.values]
        rest = f" ({', '.join(map(str, lacking.values))}: not available yet, {lacking.note})" if lacking else ""
        return f"one of {', '.join(built)}{rest}"
    return kind.__name__ if isinstance(kind, type) else str(kind).replace("typing.", "")


def shown(value: Any) -> str:
    """A value as it is written on the command line."""
    if isinstance(value, Enum):
        return str(value.value)
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _first_sentence(key: Key) -> str:
    sentence = re.split(r"(?<!Dr\.)(?<=\.)\s", key.doc, maxsplit=1)[0]
    unused = " (no effect)" if key.path in no_effect() else ""
    return f"{sentence}{unused} Default: {shown(key.default)}"


def _siblings(path: str) -> str:
    section = path.rpartition(".")[0]
    return ", ".join(key.rpartition(".")[2] for key in keys() if key.rpartition(".")[0] == section and key != path)


def _similar(name: str, said: str) -> str:
    """Keys whose last part is like it, or has it as a word, but for those that were said."""
    last = name.rpartition(".")[2]
    found = [key for key in keys() if last in key.rpartition(".")[2].split("_")]
    ends = {key.rpartition(".")[2]: key for key in reversed([*keys()])}  # the first section that has one
    found += [ends[end] for end in difflib.get_close_matches(last, ends, n=3, cutoff=0.75)]
    found = [key for key in dict.fromkeys(found) if key not in re.findall(r"[\w.]*\w", said)]
    return f"{'' if said.endswith('?') else '.'} Similar: {', '.join(found[:8])}" if found else ""
