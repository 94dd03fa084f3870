"""The teaching loop learns, and its two formulas give the numbers that a pencil gives."""

from __future__ import annotations

import copy
import importlib
import math
import statistics
from types import ModuleType

import pytest
import torch


@pytest.fixture(scope="module")
def recipe() -> ModuleType:
    return importlib.import_module("recipes.minimal_grpo")


def test_the_reward_rises(recipe: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # on a shared machine more threads are slower for a model this small
    try:
        rewards = recipe.train(recipe.parse_args(["--steps", "40", "--seed", "1"]))
    finally:
        torch.set_num_threads(threads)
    first, last = rewards[:10], rewards[-10:]
    gain = statistics.fmean(last) - statistics.fmean(first)
    error = math.sqrt((statistics.variance(first) + statistics.variance(last)) / 10)
    # Trends inside a window only widen the error, so the test is on the safe side.
    assert gain > 0.1 and gain > 4 * error, f"gain {gain:.3f}, standard error {error:.3f}, rewards {rewards}"
    printed = [line for line in capsys.readouterr().out.splitlines() if "greedy accuracy" in line]
    before, after = (float(line.split()[-1]) for line in printed)
    assert after > before + 0.05


def test_rewards_without_information_teach_nothing(recipe: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: if every answer gets the same reward, the policy must stay where it is."""
    monkeypatch.setattr(recipe, "reward", lambda question, answer: 1.0)
    torch.manual_seed(0)
    model = recipe.make_model()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    args = recipe.parse_args(["--n", "4", "--kl-coef", "0"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.0)
    rollouts = recipe.rollout(model, ["1234>", "4321>"], n=4)
    metrics = recipe.update(model, copy.deepcopy(model), optimizer, rollouts, args)
    assert metrics["grad_norm"] == 0.0
    for old, new in zip(before, model.parameters(), strict=True):
        assert torch.equal(old, new)


def test_group_advantages_by_hand(recipe: ModuleType) -> None:
    advantages = recipe.group_advantages(torch.tensor([1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0]), 4)
    # mean 1/4, standard deviation with n - 1: sqrt((9/16 + 3/16) / 3) = 1/2
    expected = torch.tensor([1.5, -0.5, -0.5, -0.5, 0.0, 0.0, 0.0, 0.0])
    torch.testing.assert_close(advantages, expected, atol=1e-5, rtol=0)


def test_policy_loss_by_hand(recipe: ModuleType) -> None:
    ratio = torch.tensor([[1.5, 1.0], [0.5, 9.0]])  # the last token is padding
    log_probs = ratio.log().requires_grad_()
    zeros, mask = torch.zeros(2, 2), torch.tensor([[1.0, 1.0], [1.0, 0.0]])
    loss, metrics = recipe.policy_loss(log_probs, zeros, zeros, torch.tensor([1.0, -1.0]), mask, 0.2, 0.5)
    k3 = [1 / r - 1 + math.log(r) for r in (1.5, 1.0, 0.5)]
    # A = 1: min(1.5, 1.2) = 1.2 (clipped) and 1; A = -1: min(-0.5, -0.8) = -0.8 (clipped)
    assert loss.item() == pytest.approx((-1.2 - 1.0 + 0.8 + 0.5 * sum(k3)) / 3, rel=1e-5)
    assert metrics["clipfrac"] == pytest.approx(2 / 3)
    assert metrics["kl"] == pytest.approx(sum(k3) / 3, rel=1e-5)
    loss.backward()
    assert log_probs.grad is not None and log_probs.grad[1, 1] == 0
    # A clipped token keeps the gradient of its KL term alone: d k3 / d log pi = 1 - pi_ref / pi.
    assert log_probs.grad[0, 0].item() == pytest.approx(0.5 * (1 - 1 / 1.5) / 3, rel=1e-5)


def test_recorded_log_probs_equal_those_of_a_second_pass(recipe: ModuleType) -> None:
    """What sampling records is the policy that the update differentiates: the first ratio is 1."""
    torch.manual_seed(0)
    model = recipe.make_model()
    rollouts = recipe.rollout(model, ["5310>", "9999>"], n=3)
    again = recipe.token_log_probs(model, rollouts.prompt_BP, rollouts.response_BR)
    torch.testing.assert_close(again * rollouts.mask_BR, rollouts.log_probs_BR * rollouts.mask_BR, atol=1e-5, rtol=0)


def test_reward_is_all_or_nothing(recipe: ModuleType) -> None:
    cases = {"0134.": 1.0, "0134": 0.0, "0143.": 0.0, "0134.4": 0.0, "": 0.0}
    assert {answer: recipe.reward("3104>", answer) for answer in cases} == cases
