"""What the trainer finds by a row of text is there."""

from __future__ import annotations

import importlib

import pytest

from verl_like.cli.main import VERBS
from verl_like.config.engines import ENGINES
from verl_like.config.enums import RolloutName
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
    places = [place for place in (kind.code, kind.installed, kind.around_start) if place is not None]
    assert all(callable(load(place, "rollout.name")) for place in places)


def test_engines_that_take_weights_are_those_of_the_key() -> None:
    without = {"recorded", "openai"}  # one reads what was sampled before, the other asks an endpoint
    assert set(ENGINES) == {str(name) for name in RolloutName} - without


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb.name)
def test_every_verb_is_there(verb: object) -> None:
    folder, module, name = (getattr(verb, field) for field in ("folder", "module", "name"))
    found = importlib.import_module(f"{folder}.{module or name.replace('-', '_')}")
    assert callable(found.add_arguments)
