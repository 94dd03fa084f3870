"""Errors and warnings about configurations, word for word: messages.jsonl has rows of settings and one line they get.

A message that is meant to change is changed there in the same commit, so that the change is read.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from verl_like.config import PPOConfig
from verl_like.config.errors import ConfigError
from verl_like.config.rules import check
from verl_like.config.schema import from_dict, get_value, keys, to_dict

ROWS = [
    json.loads(line) for line in Path(__file__).with_name("messages.jsonl").read_text(encoding="utf-8").splitlines()
]
DEFAULTS = to_dict(PPOConfig())


def messages_of(settings: dict[str, Any]) -> list[str]:
    """All that is said of the defaults with these settings: problems, or else warnings."""
    tree = copy.deepcopy(DEFAULTS)
    for path, value in settings.items():
        *sections, name = path.split(".")
        node = tree
        for section in sections:
            node = node[section]
        node[name] = float(value) if value in ("nan", "inf") else value
    try:
        config = from_dict(tree)
        return check(config, frozenset(key for key in settings if get_value(config, key) != keys()[key].default))
    except ConfigError as error:
        return error.problems


@pytest.mark.parametrize("section", sorted({next(iter(settings)).rpartition(".")[0] for settings, _ in ROWS}))
def test_messages_are_word_for_word_the_same(section: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("verl_like.user_code._registered", {})  # menus without what other tests have registered
    rows = [row for row in ROWS if next(iter(row[0])).rpartition(".")[0] == section]
    changed = [(settings, wanted) for settings, wanted in rows if wanted not in messages_of(settings)]
    assert changed == []
