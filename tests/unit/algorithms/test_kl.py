from __future__ import annotations

import math

import pytest
import torch

from verl_like.algorithms.kl import KL_ESTIMATORS, KLController, kl_penalty, mean_sequence_kl
from verl_like.config import KLControlConfig
from verl_like.config.menus import KL_KINDS

D = 0.5  # log_prob - ref_log_prob


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("kl", "k1"), -D),
        (("abs",), D),
        (("mse", "k2"), 0.5 * D * D),
        (("low_var_kl", "k3"), math.exp(D) - D - 1),
    ],
)
def test_hand_values(names: tuple[str, ...], expected: float) -> None:
    log_probs, reference = torch.tensor([-2.5], dtype=torch.float64), torch.tensor([-2.0], dtype=torch.float64)
    for name in names:
        assert kl_penalty(log_probs, reference, name).item() == pytest.approx(expected)


def test_config_names_are_served() -> None:
    for kind, row in KL_KINDS.items():
        if row.code:
            assert kl_penalty(torch.zeros(2), torch.zeros(2), kind).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("name", [name for name in KL_ESTIMATORS.names() if not name.endswith("+")])
def test_gradients(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    log_probs = torch.randn(3, 4, generator=generator, dtype=torch.float64).requires_grad_()
    reference = torch.randn(3, 4, generator=generator, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: kl_penalty(x, reference, name), (log_probs,))


PLUS = [name for name in KL_ESTIMATORS.names() if name.endswith("+")]


def test_every_estimator_has_a_straight_through_form() -> None:
    assert {name.removesuffix("+") for name in PLUS} == set(KL_ESTIMATORS.names()) - set(PLUS)
    assert set(KL_ESTIMATORS.names()) == set(KL_KINDS) - {"full"}


@pytest.mark.parametrize("name", PLUS)
def test_plus_has_the_value_of_the_base_and_the_gradient_of_k2(name: str) -> None:
    log_probs = torch.tensor([-2.5, -1.0, 30.0, -1e3], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-2.0, -1.0, 0.0, 0.0], dtype=torch.float64)
    value = kl_penalty(log_probs, reference, name)
    assert torch.equal(value, kl_penalty(log_probs, reference, name.removesuffix("+")))
    (gradient,) = torch.autograd.grad(value.sum(), log_probs)
    assert gradient.tolist() == [-0.5, 0.0, 30.0, -1e3]  # d, whatever the base


@pytest.mark.parametrize("difference", [-1e4, -100.0, 100.0, 1e4])
def test_k3_is_bounded(difference: float) -> None:
    log_probs = torch.tensor([difference], requires_grad=True)
    value = kl_penalty(log_probs, torch.zeros(1), "k3")
    value.sum().backward()
    assert value.item() == 10.0 and log_probs.grad is not None and log_probs.grad.isfinite().all()


def test_k1_and_k3_are_unbiased_on_a_small_vocabulary() -> None:
    policy, reference = torch.tensor([0.5, 0.3, 0.2]).double(), torch.tensor([0.3, 0.3, 0.4]).double()
    exact = (policy * (policy / reference).log()).sum()
    for name in ("k1", "k3"):
        expectation = (policy * kl_penalty(policy.log(), reference.log(), name)).sum()
        assert expectation.item() == pytest.approx(exact.item())
    assert (kl_penalty(policy.log(), reference.log(), "k3") >= 0).all()


def test_mean_sequence_kl_weighs_sequences_equally() -> None:
    kl, mask = torch.tensor([1.0, 3.0, 99.0, 4.0]), torch.tensor([True, True, False, True])
    assert mean_sequence_kl(kl, mask, torch.tensor([3, 1])) == 3.0
    assert mean_sequence_kl(kl[:0], mask[:0], torch.zeros(0, dtype=torch.int64)) == 0.0


def adaptive(**options: float) -> KLController:
    config = KLControlConfig(type="adaptive", kl_coef=0.2, target_kl=2.0, horizon=1000)  # type: ignore[arg-type]
    for name, value in options.items():
        setattr(config, name, value)
    return KLController.from_config(config)


def test_fixed_controller_does_not_move() -> None:
    controller = KLController.from_config(KLControlConfig(kl_coef=0.05))
    assert controller.update(100.0, 512).coef == 0.05


@pytest.mark.parametrize(
    ("kl", "factor"),
    [(2.0, 1.0), (2.2, 1 + 0.1 * 0.1), (50.0, 1 + 0.2 * 0.1), (1.9, 1 - 0.05 * 0.1), (0.0, 1 - 0.2 * 0.1)],
)
def test_adaptive_controller(kl: float, factor: float) -> None:
    assert adaptive().update(kl, 100).coef == pytest.approx(0.2 * factor)


def test_update_returns_a_new_value() -> None:
    controller = adaptive()
    moved = controller.update(50.0, 100)
    assert controller.coef == 0.2 and moved.coef > 0.2


def test_state_survives_a_checkpoint() -> None:
    moved = adaptive().update(50.0, 100).update(40.0, 100)
    restored = adaptive().load_state_dict(moved.state_dict())
    assert restored.coef == moved.coef
    assert restored.update(1.0, 100).coef == moved.update(1.0, 100).coef


def test_a_fixed_coefficient_comes_from_the_configuration_after_a_resume() -> None:
    controller = KLController.from_config(KLControlConfig(kl_coef=0.05))
    assert controller.load_state_dict({"kl_coef": 0.7}).coef == 0.05
