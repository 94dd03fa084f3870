"""`*.optim.*`: AdamW and its learning-rate schedule. As in verl the schedule counts training steps: rollout batches,
however many optimizer steps each one makes."""

from dataclasses import dataclass
from enum import StrEnum

from verl_like.config.base import ConfigNode, above, at_least, between, key, minus_one_or_positive, such_that


class OptimizerName(StrEnum):
    """AdamW with float32 states (in the precision of the weights), bfloat16 states, or 8-bit states; Muon."""

    adamw = "adamw"
    adamw_bf16 = "adamw_bf16"
    adamw_8bit = "adamw_8bit"
    muon = "muon"


class WarmupStyle(StrEnum):
    """Learning-rate schedule after the linear warm-up."""

    constant = "constant"
    cosine = "cosine"


@dataclass(kw_only=True, slots=True)
class OptimConfig(ConfigNode):
    """`actor_rollout_ref.actor.optim.*`, `critic.optim.*`."""

    optimizer: OptimizerName = OptimizerName.adamw
    """adamw; adamw_bf16 (averages in bfloat16) or adamw_8bit (averages in 8 bits), both with stochastic rounding, which
    bfloat16 weights (fsdp_config.model_dtype) get too; muon (matrices of layers, AdamW for the rest, one lr)."""
    lr: float = key(1e-6, at_least(0))
    """Peak learning rate."""
    lr_warmup_steps: int = key(-1, at_least(-1), unit="training steps")
    """Length of the linear warm-up; negative: lr_warmup_steps_ratio decides."""
    lr_warmup_steps_ratio: float = key(
        0.0, between(0, 1), unit="share of all training steps", idle="lr_warmup_steps is 0 or more"
    )
    """Length of the warm-up when lr_warmup_steps is negative."""
    total_training_steps: int = key(-1, minus_one_or_positive(), unit="training steps")
    """Length of the schedule; -1: the whole run."""
    warmup_style: WarmupStyle = WarmupStyle.constant
    """Schedule after the warm-up: constant or cosine."""
    min_lr_ratio: float | None = key(0.0, between(0, 1), unit="share of lr", idle="warmup_style is constant")
    """Floor of the cosine schedule; null: 0."""
    num_cycles: float = key(0.5, at_least(0), unit="cosine periods", idle="warmup_style is constant")
    """0.5 goes from lr down to the floor once."""
    weight_decay: float = key(0.01, at_least(0))
    """AdamW weight decay."""
    l2_coeff: float = key(0.0, at_least(0))
    """Coupled L2: l2_coeff x weight is added to the gradient before clipping, so that Adam scales it; 0: off."""
    betas: list[float] = key(
        [0.9, 0.999],
        such_that(
            lambda betas: len(betas) == 2 and all(0 <= beta < 1 for beta in betas),
            "give two numbers in [0, 1), for instance [0.9,0.999]",
            "two numbers in [0, 1)",
        ),
    )
    """AdamW averaging factors of the gradient and its square."""
    eps: float = key(1e-8, above(0))
    """AdamW denominator constant."""
    muon_momentum: float = key(0.95, between(0, 1), idle="optimizer is not muon")
    """Muon's averaging factor of the gradient, with Nesterov's look ahead."""
