"""KL divergence of the policy from the reference: per-token estimators, and the penalty's coefficient in the reward.

Estimators follow John Schulman, "Approximating KL divergence" (2020), with d = log_prob - ref_log_prob of the sampled
token. Chosen by algorithm.kl_penalty (in the reward) and actor.kl_loss_type (in the loss). A name that ends in "+" has
the value of the estimator and the gradient of k2. "full" is no estimator but the divergence itself, which the engine
sums over the vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from verl_like.algorithms.masked import masked_fill_zero
from verl_like.algorithms.registry import Registry
from verl_like.config import KLControlConfig, KLControlType
from verl_like.config.menus import KL_KINDS, KL_MENU
from verl_like.flat_columns import row_sums

FULL_KL_KIND = "full"
EXPONENT_LIMIT = 20.0  # exp(20) = 4.9e8: nothing above it carries information, and nothing overflows
K3_LIMIT = 10.0


def k1(difference: Tensor) -> Tensor:
    """d: unbiased, may be negative."""
    return difference


def absolute(difference: Tensor) -> Tensor:
    """|d|."""
    return difference.abs()


def k2(difference: Tensor) -> Tensor:
    """d^2 / 2: biased value, right gradient when used as a loss."""
    return 0.5 * difference**2


def k3(difference: Tensor) -> Tensor:
    """exp(-d) + d - 1, with d clamped to +-20 and the result to +-10: unbiased, never negative."""
    reverse = (-difference).clamp(-EXPONENT_LIMIT, EXPONENT_LIMIT)
    return (torch.expm1(reverse) - reverse).clamp(-K3_LIMIT, K3_LIMIT)


def straight_through(base: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """The value of `base` with the gradient of k2, which is the gradient of the KL divergence on on-policy data."""

    def estimate(difference: Tensor) -> Tensor:
        slope = k2(difference)
        return base(difference).detach() + (slope - slope.detach())

    return estimate


KL_ESTIMATORS: Registry[Callable[[Tensor], Tensor]] = Registry(
    KL_MENU,
    KL_KINDS,
    arguments=("difference",),
    of_row=lambda row, function: function(KL_ESTIMATORS.lookup(row.name[:-1])) if row.name.endswith("+") else function,
)
register_kl = KL_ESTIMATORS.register


def kl_penalty(log_probs: Tensor, ref_log_probs: Tensor, kind: str) -> Tensor:
    """Per-token KL estimate of the given kind, in nats, the shape of its inputs; differentiable in `log_probs`."""
    return KL_ESTIMATORS.lookup(kind)(log_probs - ref_log_probs)


def mean_sequence_kl(kl_T: Tensor, mask_T: Tensor, length_B: Tensor) -> float:
    """Mean over sequences of the mean KL over their tokens, which the adaptive controller compares with target_kl."""
    counts_B = row_sums(mask_T, length_B).clamp(min=1)
    return (row_sums(masked_fill_zero(kl_T, mask_T), length_B) / counts_B).mean().item() if len(length_B) else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class KLController:
    """Coefficient of the KL penalty in the reward, an immutable value: `update` returns the next one.

    fixed: constant. adaptive: coef *= 1 + clip(kl / target_kl - 1, -0.2, 0.2) * num_sequences / horizon, once a step
    (Ziegler et al. 2019, arXiv 1909.08593, section 2.2).
    """

    config: KLControlConfig
    coef: float

    @classmethod
    def from_config(cls, config: KLControlConfig) -> KLController:
        """The controller before the first step."""
        return cls(config=config, coef=config.kl_coef)

    def update(self, current_kl: float, num_sequences: int) -> KLController:
        """The controller for the next step, after `num_sequences` responses at a mean KL of `current_kl`."""
        if self.config.type is KLControlType.fixed:
            return self
        error = min(max(current_kl / self.config.target_kl - 1, -0.2), 0.2)
        return dataclasses.replace(self, coef=self.coef * (1 + error * num_sequences / self.config.horizon))

    def state_dict(self) -> dict[str, float]:
        """Return the coefficient for the checkpoint."""
        return {"kl_coef": self.coef}

    def load_state_dict(self, state: dict[str, float]) -> KLController:
        """Return the controller that `state` describes.

        A fixed coefficient is the configuration's, so that a user may change it.
        """
        return self if self.config.type is KLControlType.fixed else dataclasses.replace(self, coef=state["kl_coef"])
