"""The rows of config/menus.txt say what is so: every trait of an estimator is proved against its function.

test_loss_knobs.py and test_objectives.py do that for the losses.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from typing import Any

import pytest
import torch

from verl_like.algorithms.advantages import ADVANTAGES, AdvantageInputs, compute_advantages
from verl_like.algorithms.aggregate import AGGREGATIONS
from verl_like.algorithms.kl import KL_ESTIMATORS
from verl_like.algorithms.policy_losses import POLICY_LOSSES
from verl_like.algorithms.registry import Registry
from verl_like.config import AlgorithmConfig, GiGPOConfig, menus
from verl_like.config.menus import ESTIMATORS, readers
from verl_like.config.schema import keys, sections

REGISTRIES = [
    (ADVANTAGES, menus.ESTIMATORS),
    (POLICY_LOSSES, menus.LOSSES),
    (KL_ESTIMATORS, menus.KL_KINDS),
    (AGGREGATIONS, menus.AGGREGATIONS),
]


@pytest.mark.parametrize(("registry", "rows"), REGISTRIES, ids=lambda each: getattr(each, "config_key", ""))
def test_every_row_has_a_function_and_every_function_a_row(registry: Registry, rows: dict[str, menus.Choice]) -> None:
    assert rows and registry.names() == sorted(name for name, row in rows.items() if row.code)
    for name in registry.names():
        assert callable(getattr(registry.lookup(name), "function", registry.lookup(name)))
    named: dict[str, set[str]] = {}
    for row in rows.values():
        module, _, function = row.code.partition(":")
        named.setdefault(module, set()).add(function)
    signature = {"advantages": ["inputs", "algorithm"], "kl": ["difference"], "aggregate": ["loss_BR", "mask_BR"]}
    for module in named.keys() - {""}:
        found = vars(importlib.import_module(f"verl_like.algorithms.{module}"))
        wanted = signature.get(module, ["batch", "actor"])
        functions = {
            name
            for name, each in found.items()
            if inspect.isfunction(each) and each.__module__.endswith(module)
            if list(inspect.signature(each).parameters)[: len(wanted)] == wanted and not name.startswith("_")
        }
        helpers = {"compute_advantages", "turns_in", "aggregate", "chosen_tokens", "trust_region"}
        assert functions - helpers == named[module] - {"straight_through"}


def test_knobs_are_keys() -> None:
    for menu, section in ((menus.ESTIMATORS, "algorithm"), (menus.LOSSES, "actor_rollout_ref.actor")):
        for knob in readers(menu):
            path = f"{section}.{knob}"
            assert path.removesuffix(".") in (sections() if path.endswith(".") else keys()), path


@pytest.mark.parametrize("row", ["a | m:f | crtic", "a | m:f | selects=m:g", "a"])
def test_a_row_that_cannot_be_read_is_an_error(row: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(menus, "_TEXT", f"\n[Estimator]\n{row}\n")
    with pytest.raises((TypeError, ValueError)):
        menus._menu(menus.Estimator)


# ---- estimators: eight responses of four tokens to two prompts, two turns each


def inputs(*, alone: bool = False, **columns: Any) -> AdvantageInputs:
    """All that an estimator may read. alone: every response answers a prompt of its own."""
    generator = torch.Generator().manual_seed(0)
    shape = (8, 4)
    step_BR = torch.tensor([0, 0, 1, 1]).expand(shape)
    token_rewards_BR = torch.rand(shape, generator=generator)
    given = {
        "token_rewards_BR": token_rewards_BR,
        "response_mask_BR": torch.ones(shape, dtype=torch.bool),
        "group_B": torch.arange(8) if alone else torch.arange(8) % 2,
        "values_BR": torch.rand(shape, generator=generator),
        "old_log_probs_BR": -torch.rand(shape, generator=generator),
        "sum_pi_squared_BR": torch.rand(shape, generator=generator),
        "step_BR": step_BR,
        "anchor_BR": step_BR + torch.arange(8)[:, None] % 2,  # by prompt and turn
        "baseline_B": torch.rand(8, generator=generator),
        "components": {"acc": torch.rand(8, generator=generator).double()},
    }
    return AdvantageInputs(**given | columns)


def advantages(name: str, of: AdvantageInputs, **algorithm: Any) -> torch.Tensor:
    settings = {"gdpo_reward_keys": ["score", "acc"], "gamma": 0.9, "lam": 0.9} | algorithm
    return compute_advantages(of, AlgorithmConfig(adv_estimator=name, **settings)).advantages_T


OTHER = {
    "gamma": 0.5,
    "lam": 0.5,
    "norm_adv_by_std_in_grpo": False,
    "gdpo_reward_keys": ["score"],
    "gdpo_reward_weights": [1.0, 3.0],
    "step_reward_gamma": 0.5,
    "gigpo.": GiGPOConfig(step_weight=3.0),
}


@pytest.mark.parametrize("name", ESTIMATORS)
def test_which_estimator_reads_which_key(name: str) -> None:
    plain = advantages(name, inputs())
    moved = {
        key
        for key in readers(ESTIMATORS)
        if not torch.equal(plain, advantages(name, inputs(), **{key.removesuffix("."): OTHER[key]}))
    }
    assert moved == set(ESTIMATORS[name].reads)


NEEDS = {
    "critic": "values_BR",
    "turns": "step_BR",
    "greedy": "baseline_B",
    "sum_pi_squared": "sum_pi_squared_BR",
}


@pytest.mark.parametrize("trait", NEEDS)
@pytest.mark.parametrize("name", ESTIMATORS)
def test_what_an_estimator_needs(name: str, trait: str) -> None:
    without = inputs(**{NEEDS[trait]: None})
    if getattr(ESTIMATORS[name], trait):
        with pytest.raises(ValueError, match=r"needs"):
            advantages(name, without)
    else:
        assert torch.equal(advantages(name, without), advantages(name, inputs()))


@pytest.mark.parametrize("name", ESTIMATORS)
def test_which_estimators_compare_a_group_and_which_whiten(name: str) -> None:
    """What compares learns nothing from groups of one. Whitened: mean 0 and deviation 1 over all tokens."""
    row, found = ESTIMATORS[name], advantages(name, inputs())
    assert (advantages(name, inputs(alone=True)) == 0).all().item() is row.compares
    white = abs(found.mean().item()) < 1e-5 and abs(found.std().item() - 1) < 1e-3
    assert white is row.whitens


def test_every_trait_of_an_estimator_is_proved_here() -> None:
    proved = {*NEEDS, "compares", "whitens", "knobs", "name", "code", "cells"}
    assert {field.name for field in dataclasses.fields(menus.Estimator)} == proved
