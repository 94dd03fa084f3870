"""What the trainer finds by a row of text is there."""

from __future__ import annotations

import importlib

import pytest

from verl_like.cli.main import VERBS, Verb
from verl_like.config.engines import ENGINES, OURS
from verl_like.config.rollout import RolloutName
from verl_like.registry import PARTS, part
from verl_like.rewards.graders import GRADERS
from verl_like.user_code import load


@pytest.mark.parametrize(("menu", "name"), [(menu, name) for menu, rows in PARTS.items() for name in rows])
def test_every_part_is_there(menu: str, name: str) -> None:
    assert callable(part(menu, name))


def test_a_part_that_no_row_names_is_none() -> None:
    with pytest.raises(KeyError, match="harp"):
        part("report", "harp")


@pytest.mark.parametrize("name", GRADERS)
def test_every_grader_is_there(name: str) -> None:
    assert callable(importlib.import_module(GRADERS[name].module).compute_score)


@pytest.mark.parametrize("name", ENGINES)
def test_every_engine_is_there(name: str) -> None:
    kind = ENGINES[name]
    places = [kind.code, kind.around_start, kind.server, kind.installed, kind.apart, kind.require_arguments]
    assert all(callable(load(place, "rollout.name")) for place in filter(None, places))


def test_every_value_of_the_key_has_its_row() -> None:
    assert set(ENGINES) == {str(name) for name in RolloutName}
    # one reads old steps, one asks an endpoint, and one stands for another
    assert set(OURS) == set(ENGINES) - {"recorded", "openai", "auto"}


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb.name)
def test_every_verb_is_there(verb: Verb) -> None:
    assert callable(importlib.import_module(verb.module).add_arguments)
