from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from verl_like.algorithms.advantages import ADVANTAGES, AdvantageInputs, compute_advantages
from verl_like.algorithms.aggregate import AGGREGATIONS
from verl_like.algorithms.kl import KL_ESTIMATORS
from verl_like.algorithms.policy_losses import POLICY_LOSSES
from verl_like.algorithms.registry import Registry
from verl_like.config import AlgorithmConfig, KLControlType
from verl_like.user_code import UserCodeError, import_modules

DOCS = Path(__file__).parents[3] / "docs" / "algorithms.md"


def test_lookup_and_names() -> None:
    menu: Registry[int] = Registry("some.key")
    menu.register("two", "deux")(2)
    menu.register("one")(1)
    assert (menu.lookup("deux"), menu.lookup("one")) == (2, 1)
    assert menu.names() == ["deux", "one", "two"]


VERLS = """
import numpy as np
import torch
from verl.trainer.ppo.core_algos import register_adv_est

@register_adv_est("over_the_mean")
def over_the_mean(token_level_rewards, response_mask, index, config=None, **kwargs):
    assert sorted(kwargs) == [] and config.get("norm_adv_by_std_in_grpo") is False and config.adv_estimator
    scores = token_level_rewards.sum(dim=-1)
    means = {uid: scores[torch.from_numpy(index == uid)].mean() for uid in np.unique(index)}
    scores = scores - torch.stack([means[uid] for uid in index])
    return scores.unsqueeze(-1).expand_as(response_mask), scores.unsqueeze(-1) * response_mask

def of_rewards(token_level_rewards, response_mask):
    return token_level_rewards + 1, token_level_rewards

def by_keyword(*, token_level_rewards, response_mask, **kwargs):
    assert sorted(kwargs) == ["config", "index"]
    return token_level_rewards, token_level_rewards

def wrong(token_level_rewards, response_mask):
    return token_level_rewards[:, 1:], token_level_rewards[:, 1:]

def nothing(token_level_rewards, response_mask):
    pass
"""


def test_estimators_of_verls_form_are_given_its_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By their decorator, which a stand-in has, and by path; against dr_grpo, which is the same."""
    monkeypatch.setattr("sys.path", [*sys.path])
    file = tmp_path / "of_verls.py"
    file.write_text(VERLS)
    import_modules(str(file), "external_lib")
    mask_BR = torch.tensor([[1, 1, 0], [1, 0, 1], [1, 1, 1], [1, 0, 0]], dtype=torch.bool)
    rewards_BR = torch.zeros(4, 3).index_put(
        (torch.arange(4), torch.tensor([1, 2, 2, 0])), torch.tensor([1.0, 0, 3, 2])
    )
    group_B = torch.tensor([4, 4, 9, 9])
    inputs = AdvantageInputs(token_rewards_BR=rewards_BR, response_mask_BR=mask_BR, group_B=group_B)
    section = AlgorithmConfig(adv_estimator="over_the_mean", norm_adv_by_std_in_grpo=False)
    found = compute_advantages(inputs, section)
    expected = compute_advantages(inputs, AlgorithmConfig(adv_estimator="grpo", norm_adv_by_std_in_grpo=False))
    assert torch.equal(found.advantages_T, expected.advantages_T) and torch.equal(found.returns_T, expected.returns_T)
    by_path = compute_advantages(inputs, AlgorithmConfig(adv_estimator=f"{file}:of_rewards"))
    assert torch.equal(by_path.advantages_BR, (rewards_BR + 1) * mask_BR)
    by_keyword = compute_advantages(inputs, AlgorithmConfig(adv_estimator=f"{file}:by_keyword"))
    assert torch.equal(by_keyword.returns_BR, rewards_BR * mask_BR)
    with pytest.raises(ValueError, match=r"nothing' returned \['NoneType'\]: return advantages and"):
        compute_advantages(inputs, AlgorithmConfig(adv_estimator=f"{file}:nothing"))
    with pytest.raises(ValueError, match=r"wrong' returned \[\(4, 2\), \(4, 2\)\]: return advantages and"):
        compute_advantages(inputs, AlgorithmConfig(adv_estimator=f"{file}:wrong"))


def test_losses_of_verls_form_are_refused_before_a_step_calls_them() -> None:
    with pytest.raises(UserCodeError, match="loss_mode=mine takes the arguments that verl gives"):

        @POLICY_LOSSES.register("mine")  # type: ignore[arg-type]
        def loss(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config=None): ...


def test_unknown_name_says_key_names_and_a_guess() -> None:
    with pytest.raises(ValueError, match=r"algorithm.adv_estimator='grop' is not known. Did you mean 'grpo'\?.*gae"):
        ADVANTAGES.lookup("grop")
    with pytest.raises(ValueError, match="'full' is not known"):
        KL_ESTIMATORS.lookup("full")


def test_a_name_is_taken_once() -> None:
    menu: Registry[int] = Registry("some.key")
    menu.register("one")(1)
    with pytest.raises(ValueError, match="registered twice"):
        menu.register("one")(2)
    with pytest.raises(ValueError, match=r"algorithm.adv_estimator: the name 'grpo' is registered twice"):
        ADVANTAGES.register("grpo")(lambda inputs, algorithm: inputs)  # it has a row


MENUS = [ADVANTAGES, POLICY_LOSSES, AGGREGATIONS, KL_ESTIMATORS]


@pytest.mark.parametrize(
    ("menu", "name"), [pytest.param(m, n, id=f"{m.config_key}={n}") for m in MENUS for n in m.names()]
)
def test_every_registered_name_is_documented(menu: Registry, name: str) -> None:
    """A table row or a heading of docs/algorithms.md names it, not just running text."""
    lines = DOCS.read_text().splitlines()
    assert any(line.startswith(("|", "#")) and f"`{name}`" in line for line in lines), f"{name} has no row in {DOCS}"


def test_every_controller_type_is_documented() -> None:
    text = DOCS.read_text()
    assert all(f"`{kind}`" in text for kind in KLControlType)
