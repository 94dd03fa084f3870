"""Every legal combination of policy loss, aggregation, KL term, options and correction, enumerated from the registries.

Nothing is picked by hand: a name that is registered is in. `legal` asks the doctor.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from verl_like.algorithms.aggregate import AGGREGATIONS
from verl_like.algorithms.kl import KL_ESTIMATORS
from verl_like.algorithms.objectives import PolicyObjective
from verl_like.algorithms.policy_losses import POLICY_LOSSES
from verl_like.config import (
    ActorConfig,
    PolicyLossConfig,
    PPOConfig,
    RolloutCorrectionConfig,
    SampleWeightConfig,
    ToprConfig,
)
from verl_like.config.actor import RatioLevel, RewardSource
from verl_like.config.correction import IS_LEVELS, LOSS_TYPES, RS_OPTIONS
from verl_like.config.rules import impossible

# Wide windows and shares, so that few tokens suffice for every branch to be taken.
_SELECTION = {"clip_cov_lb": 0.0, "clip_cov_ub": 9.0, "clip_cov_ratio": 0.3, "kl_cov_ratio": 0.3}
_TOPR = tuple(
    ToprConfig(ratio_level=level, reward_source=source, negative_weight=0.7)
    for level, source in itertools.product(RatioLevel, RewardSource)
)
OPTIONS: dict[str, dict[str, Any]] = {
    "entropy": {"entropy_coeff": 0.1},
    "imitation": {"sft_loss_coef": 0.2},
    "rl_coef": {"rl_loss_coef": 0.7},
    "skip": {"ratio_skip_threshold": 1.2},
    "weights": {"sample_weight": SampleWeightConfig(difficulty=True, length=True)},
    "truncated": {"mask_truncated": True},
    "no_dual_clip": {"clip_ratio_c": None},
}


_BOUNDS = {"k1": "0.4_2.5", "k2": "0.5", "k3": "0.5", "diff": "-0.2_0.2"}


@dataclass(frozen=True)
class KLTerm:
    """A KL term in the loss: its kind (None: no term), and whether the ratio multiplies it."""

    kind: str | None
    unbiased: bool = False


LOSSES: tuple[tuple[str, ToprConfig], ...] = tuple(
    (name, topr) for name in POLICY_LOSSES.names() for topr in (_TOPR if name == "topr" else _TOPR[:1])
)
KL_TERMS = (
    KLTerm(None),
    *(KLTerm(kind, unbiased) for kind in KL_ESTIMATORS.names() for unbiased in (False, True)),
)
SUBSETS: tuple[tuple[str, ...], ...] = tuple(
    names for size in range(len(OPTIONS) + 1) for names in itertools.combinations(OPTIONS, size)
)
# None, each alone, all pairs, all but one, and all.
PAIRS = tuple(names for names in SUBSETS if len(names) <= 2 or len(names) >= len(OPTIONS) - 1)


def actor_of(loss: tuple[str, ToprConfig], mode: str, kl: KLTerm, options: tuple[str, ...]) -> ActorConfig:
    """The configuration of one combination."""
    keys: dict[str, Any] = {"loss_agg_mode": mode, "clip_ratio_high": 0.28, "loss_scale_factor": 5.0}
    if kl.kind is not None:
        keys |= {"use_kl_loss": True, "kl_loss_coef": 0.3, "use_unbiased_kl": kl.unbiased}
        keys["kl_loss_type"] = kl.kind
    for name in options:
        keys |= OPTIONS[name]
    return ActorConfig(policy_loss=PolicyLossConfig(loss_mode=loss[0], topr=loss[1], **_SELECTION), **keys)


# Weights and rejections that the engine computes for its micro-batch: every level, every rejection, both bypass losses.
CORRECTIONS = (
    RolloutCorrectionConfig(),
    *(RolloutCorrectionConfig(rollout_is=level) for level in IS_LEVELS),
    *(
        RolloutCorrectionConfig(
            rollout_rs=option,
            rollout_rs_threshold=_BOUNDS[option.rpartition("_")[2]],
            rollout_is=IS_LEVELS[i % len(IS_LEVELS)],
        )
        for i, option in enumerate(RS_OPTIONS)
    ),
    *(RolloutCorrectionConfig(bypass_mode=True, loss_type=kind, rollout_is="token") for kind in LOSS_TYPES),
)


@dataclass(frozen=True)
class Combination:
    """What one run might be configured to minimise."""

    actor: ActorConfig
    correction: RolloutCorrectionConfig

    def objective(self) -> PolicyObjective:
        return PolicyObjective(self.actor, self.correction, two_policies=self.correction.bypass_mode)


_AROUND = PPOConfig()  # of which `legal` changes the actor alone


def legal(actor: ActorConfig) -> bool:
    """Whether the doctor lets it pass."""
    _AROUND.actor_rollout_ref = dataclasses.replace(_AROUND.actor_rollout_ref, actor=actor)
    return not impossible(_AROUND, "losses")


def terms_of(loss: tuple[str, ToprConfig], *, whole: bool) -> list[tuple[str, KLTerm]]:
    """Legal (aggregation, KL term). Not whole: each aggregation and each term, in other pairs for other losses."""
    modes, number = AGGREGATIONS.names(), LOSSES.index(loss)
    terms = [
        (mode, kl)
        for (i, mode), (j, kl) in itertools.product(enumerate(modes), enumerate(KL_TERMS))
        if whole or (i + j + number) % len(modes) == 0
    ]
    return [term for term in terms if legal(actor_of(loss, *term, ()))]


def covering(loss: tuple[str, ToprConfig], *, whole: bool) -> Iterator[Combination]:
    """The terms of a loss, subsets of options (whole: all, else pairs), all corrections, each at least once."""
    terms, subsets = terms_of(loss, whole=whole), SUBSETS if whole else PAIRS
    for i in range(max(len(terms), len(subsets), len(CORRECTIONS))):
        actor = actor_of(loss, *terms[i % len(terms)], subsets[i % len(subsets)])
        yield Combination(actor, CORRECTIONS[i % len(CORRECTIONS)])
