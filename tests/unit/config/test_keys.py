"""A key's declaration holds its range and unit: what is out of range is refused with key, value and fix."""

import math
import re
from dataclasses import dataclass
from enum import StrEnum

import pytest
from omegaconf import OmegaConf

from verl_like.config import ActorConfig, PPOConfig
from verl_like.config.base import (
    ConfigNode,
    above,
    at_least,
    between,
    key,
    minus_one_or_positive,
    on_menu,
    one_of,
    reference,
    subset_of,
    such_that,
)
from verl_like.config.rule import declared
from verl_like.config.schema import keys, sections
from verl_like.user_code import note_registered


class Colour(StrEnum):
    """Names for a key."""

    red = "red"


@dataclass(kw_only=True, slots=True)
class Section(ConfigNode):
    """A section with a key for each kind of declaration."""

    share: float | None = key(None, between(0, 1), unit="share")
    names: list[str] = key(["a"], subset_of("a", "b"))
    colour: Colour = Colour.red
    size: int = key(1, at_least(1))


@pytest.mark.parametrize(
    ("range_", "value", "message"),
    [
        (at_least(1), 0, "k=0: must be at least 1"),
        (at_least(0), math.inf, "k=inf: must be a finite number, at least 0"),
        (above(0), 0.0, "k=0.0: must be above 0"),
        (above(0), math.nan, "k=nan: must be a finite number, above 0"),
        (between(0, 1), 1.5, "k=1.5: must lie between 0 and 1"),
        (minus_one_or_positive(), 0, "k=0: must be -1 (off) or at least 1"),
        (one_of("left", "right"), "lefd", "k='lefd': Did you mean 'left'? choose one of left, right"),
        (one_of("left", "right"), None, "k=None: choose one of left, right"),
        (on_menu("m", "left"), "up", "k='up': choose one of left, or name code of your own: "),
        (reference(), "up", "k='up': name a class of your own: "),
        (subset_of("a", "b"), ["c", "a"], "k=['c', 'a']: unknown ['c']; choose from a, b"),
        (subset_of("a", "b"), {"c": 1}, "k={'c': 1}: unknown ['c']; choose from a, b"),
        (such_that(bool, "name one"), "", "k='': name one"),
    ],
)
def test_a_range_names_key_value_and_fix(range_, value, message):
    with pytest.raises(ValueError) as error:
        range_.check("k", value)
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    ("range_", "value"),
    [(at_least(1), 1), (above(0), 1e-9), (between(0, 1), 1), (minus_one_or_positive(), -1), (one_of("left"), "left"),
     (on_menu("m", "left"), "a.py:f"), (reference(), "pkg://m:f"), (subset_of("a"), []), (such_that(len, ""), "x")],
)  # fmt: skip
def test_a_value_in_range_passes(range_, value):
    range_.check("k", value)


def test_a_name_registered_by_imported_code_is_on_the_menu():
    menu = on_menu("a menu of this test", "left")
    with pytest.raises(ValueError):
        menu.check("k", "mine")
    note_registered("a menu of this test", "mine")
    menu.check("k", "mine")


def test_null_is_in_range_where_the_type_has_it():
    assert Section(share=None).share is None
    with pytest.raises(ValueError, match="share=2: must lie between 0 and 1"):
        Section(share=2)


def test_the_first_key_in_order_of_declaration_is_named():
    with pytest.raises(ValueError, match="names="):
        Section(names=["c"], colour="blue", size=0)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="colour='blue': choose one of red"):
        Section(colour="blue", size=0)  # pyright: ignore[reportArgumentType]


def test_defaults_are_not_shared():
    Section().names.append("b")
    assert Section().names == ["a"]


def test_omegaconf_builds_the_section():
    tree = OmegaConf.structured(Section)
    assert OmegaConf.to_container(tree) == {"share": None, "names": ["a"], "colour": Colour.red, "size": 1}


def test_the_schema_reads_unit_and_range_from_the_declaration():
    probability = keys()["actor_rollout_ref.rollout.top_p"]
    assert (probability.unit, probability.range) == ("probability", "above 0; 0 to 1")
    assert keys()["data.max_prompt_length"].unit == "tokens"


def test_every_default_is_in_range():
    for path, leaf in keys().items():
        for each in leaf.ranges if leaf.default is not None else ():
            each.check(path, leaf.default)


def test_what_a_declaration_says_of_idleness_names_real_keys():
    rows = list(declared())
    assert len(rows) > 50
    for row in rows:
        deciding = row.says.partition(" is ")[0]
        assert deciding in keys(), row
        (covered,) = row.keys
        assert covered in keys() or covered.rstrip(".") in sections(), row
        list(row.findings(PPOConfig()))


def test_a_condition_names_the_key_beside_it_in_each_section_that_shares_the_declaration():
    why = {row.keys: row.says for row in declared()}
    assert why[("critic.optim.num_cycles",)] == "critic.optim.warmup_style is constant"
    assert why[("ray_init.",)] == "trainer.launcher is local"


@pytest.mark.parametrize(("key", "value"), [("grad_clip", None), ("ppo_mini_batch_size", "abc"), ("clip_ratio", [])])
def test_a_value_whose_type_cannot_be_in_range_is_told_as_one_out_of_range(key: str, value: object):
    with pytest.raises(ValueError, match=rf"^{key}={re.escape(repr(value))}: must be "):
        ActorConfig(**{key: value})  # pyright: ignore[reportArgumentType]
