"""Types of the policy losses, and the registry of the menu."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor

from verl_like.algorithms.registry import Registry
from verl_like.config import ActorConfig
from verl_like.config.menus import DEFAULT_AGGREGATION, LOSSES, Loss


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyBatch:
    """Tensors of one micro-batch as losses see them. Only `log_probs_BR` has a graph."""

    log_probs_BR: Tensor  # of the policy being trained
    old_log_probs_BR: Tensor  # of the policy the ratio is taken against
    advantages_BR: Tensor
    mask_BR: Tensor  # bool: tokens the policy sampled
    selected_BR: Tensor | None = None  # bool: tokens that the driver chose over the mini-batch (clip_cov, kl_cov)
    score_B: Tensor | None = None  # as graded (topr with reward_source=score)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLoss:
    """A loss per token, and what to report: the mean over the mini-batch's tokens of each metric."""

    loss_BR: Tensor
    metrics_BR: dict[str, Tensor]


PolicyLossFunction = Callable[[PolicyBatch, ActorConfig], TokenLoss]


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLoss:
    """Entry of the menu: a loss function and how it is used, see `config.menus.Loss`.

    aggregation: the one that the loss prescribes; None leaves it to the user.
    default_aggregation: the one that holds where the user's key is null.
    """

    function: PolicyLossFunction
    aggregation: str | None = None
    default_aggregation: str = DEFAULT_AGGREGATION
    pulls_without_advantage: bool = False
    one_weight_per_row: bool = False


def _own_loss(found: Any) -> PolicyLoss:
    """Make an entry of users' own code. Of a plain function nothing is known, so that everything is computed for it."""
    return found if isinstance(found, PolicyLoss) else PolicyLoss(function=found, pulls_without_advantage=True)


def _built_in(row: Loss, function: PolicyLossFunction) -> PolicyLoss:
    return PolicyLoss(function=function, **{each.name: getattr(row, each.name) for each in fields(PolicyLoss)[1:]})


POLICY_LOSSES: Registry[PolicyLoss] = Registry(
    "actor_rollout_ref.actor.policy_loss.loss_mode",
    LOSSES,
    arguments=("batch", "actor"),
    of_row=_built_in,
    entry_of=_own_loss,
)


def register_policy_loss(name: str, **options: Any) -> Callable[[PolicyLossFunction], PolicyLossFunction]:
    """Decorator: put a loss on the menu. options: PolicyLoss's other fields."""

    def add(function: PolicyLossFunction) -> PolicyLossFunction:
        POLICY_LOSSES.register(name)(PolicyLoss(function=function, **options))
        return function

    return add
