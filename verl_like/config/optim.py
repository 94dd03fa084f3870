"""`*.optim.*`: AdamW and its learning-rate schedule. As in verl the schedule counts training steps: rollout batches,
however many optimizer steps each one makes."""

from dataclasses import dataclass, field

from verl_like.config.base import ConfigNode, above, at_least, between, minus_one_or_positive, require
from verl_like.config.enums import OptimizerName, WarmupStyle


@dataclass(kw_only=True, slots=True)
class OptimConfig(ConfigNode):
    """`actor_rollout_ref.actor.optim.*`, `critic.optim.*`."""

    optimizer: OptimizerName = OptimizerName.adamw
    """adamw; adamw_bf16 (averages in bfloat16) or adamw_8bit (averages in 8 bits), both with stochastic rounding, which
    bfloat16 weights (fsdp_config.model_dtype) get too."""
    lr: float = 1e-6
    """Peak learning rate."""
    lr_warmup_steps: int = -1
    """[training steps] Length of the linear warm-up; negative: lr_warmup_steps_ratio decides."""
    lr_warmup_steps_ratio: float = 0.0
    """[share of all training steps] Length of the warm-up when lr_warmup_steps is negative."""
    total_training_steps: int = -1
    """[training steps] Length of the schedule; -1: the whole run."""
    warmup_style: WarmupStyle = WarmupStyle.constant
    """Schedule after the warm-up: constant or cosine."""
    min_lr_ratio: float | None = 0.0
    """[share of lr] Floor of the cosine schedule; null: 0."""
    num_cycles: float = 0.5
    """[cosine periods] 0.5 goes from lr down to the floor once."""
    weight_decay: float = 0.01
    """AdamW weight decay."""
    l2_coeff: float = 0.0
    """Coupled L2: l2_coeff x weight is added to the gradient before clipping, so that Adam scales it; 0: off."""
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    """AdamW averaging factors of the gradient and its square."""
    eps: float = 1e-8
    """AdamW denominator constant."""

    def check(self) -> None:
        at_least(self, 0, "lr", "weight_decay", "num_cycles", "l2_coeff")
        above(self, 0, "eps")
        at_least(self, -1, "lr_warmup_steps")
        between(self, 0, 1, "lr_warmup_steps_ratio", "min_lr_ratio")
        minus_one_or_positive(self, "total_training_steps")
        legal = len(self.betas) == 2 and all(0 <= beta < 1 for beta in self.betas)
        require(legal, "betas", self.betas, "give two numbers in [0, 1), for instance [0.9,0.999]")
