"""What has happened to an engine's weights: who compares two counts knows whether there is something to send."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

_LEAST_LR, _LEAST_NORM = 1e-7, 1e-3  # under these a step may be lost to rounding


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightChanges:
    """Since the engine was built. loads: checkpoints read. steps: optimizer steps taken. sure: those of them that must
    have changed some weight."""

    loads: int = 0
    steps: int = 0
    sure: int = 0

    def after_step(self, *, lr: float, grad_norm: float, exact: bool) -> WeightChanges:
        """AdamW moves each weight by about the learning rate, unless its gradient is small beside eps. exact: all
        weights are float32; in others a step may be lost to rounding."""
        sure = exact and lr >= _LEAST_LR and _LEAST_NORM <= grad_norm < math.inf
        return replace(self, steps=self.steps + 1, sure=self.sure + sure)

    def after_load(self) -> WeightChanges:
        """Whatever was sent before, the weights may be any now."""
        return replace(self, loads=self.loads + 1)

    def must_differ(self, earlier: WeightChanges) -> bool:
        """Whether weights cannot be what they were then."""
        return self.loads == earlier.loads and self.sure > earlier.sure
