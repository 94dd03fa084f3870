"""Names of verl's sft_trainer as keys of ours: names/sft.txt, applied before a configuration is composed.

Names that are ours stay as they are, so a saved configuration can be given back. Standard library only.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from verl_like.config.errors import raise_if_any
from verl_like.config.names import NOTHING, SFT, VERL, rows_of, value_of
from verl_like.config.schema import find_key, sections
from verl_like.config.spellings import Change, renamed

_RESPONSE, _MESSAGES, _FORM = "sft.response_key", "data.messages_key", "data.multiturn.enable"


def spelled(changes: Iterable[Change]) -> tuple[list[Change], list[str]]:
    """Settings of a command line or file for verl's trainer, old or new, under our names; and warnings.

    Raises ConfigError for what verl has there and is not available.
    """
    found, warnings, problems = list[Change](), list[str](), list[str]()
    for change in changes:
        value = _followed(change.value)
        row, match = next(rows_of(SFT, change.key, value), (None, None))
        if row is None or match is None or change.key == _FORM:
            found.append(Change(change.key, value))
        elif row.kind != NOTHING:
            for key in row.keys:
                name, own, fixed = match.expand(key).partition("=")
                name = name if _is_known(name) else change.key  # which is refused as it was written
                found.append(Change(name, value_of(fixed) if own else value))
        elif not row.values:
            warnings.append(f"{change.key} has no effect: {row.note}")
        elif value not in row.values:
            names = ", ".join(str(each) for each in row.values if each is not None)
            problems.append(f"{change.key}={value}: not available; choose one of {names}, or leave it out")
    raise_if_any(problems)
    return _of_one_form(found), warnings


def _is_known(key: str) -> bool:
    return find_key(renamed(key)) is not None or key in sections() or any(rows_of(VERL, key))


def _followed(value: Any) -> Any:
    """A value with the names of the keys that it follows (`${checkpoint.save_contents}`) translated."""
    return re.sub(r"(?<=\$\{)[\w.]+", lambda name: _renamed(name[0]), value) if isinstance(value, str) else value


def _renamed(key: str) -> str:
    row, match = next(rows_of(SFT, key), (None, None))
    return key if row is None or match is None or not row.renames else match.expand(row.keys[0])


def _of_one_form(changes: list[Change]) -> list[Change]:
    """Decide between whole conversations and a prompt with its answer, as data.multiturn.enable, or the keys, say."""
    given = {change.key: change.value for change in changes}
    multiturn = given.get(_FORM)
    changes = [change for change in changes if change.key != _FORM]
    if multiturn:
        changes.append(Change(_RESPONSE, None))
    elif multiturn is False and _RESPONSE not in given:  # verl's columns
        changes = [Change("data.prompt_key", "question"), Change(_RESPONSE, "answer"), *changes]
    response = next((change.value for change in reversed(changes) if change.key == _RESPONSE), None)
    return changes if response is None else [*changes, Change(_MESSAGES, None)]
