"""Vocabulary of the training engine (fsdp.py): names of outputs, forms of weights, the objective, changes of weights.

Two counts of changes, compared, tell whether there are new weights to send.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from torch import Tensor

from verl_like.batch import Denominators, Experience, Metric

LOG_PROBS, ENTROPY, SUM_PI_SQUARED, VALUES = "log_probs", "entropy", "sum_pi_squared", "values"
FULL_KL, JSD, CHOSEN = "full_kl", "jsd", "chosen_log_probs"
COMPARISONS = frozenset({FULL_KL, JSD})  # with another model, over the whole vocabulary

WeightForm = Literal["merged", "apart", "adapters"]
"""Forms in which weights leave an engine with LoRA: adapters added into the weights they adapt ("merged"; without LoRA
the only form), base weights and adapters beside each other ("apart"), or adapters alone."""


class LossFn(Protocol):
    """Objective of one micro-batch.

    Called with the wanted outputs as [b, R] tensors with a graph (0 where nothing was computed), the micro-batch
    (on the device) and the denominators of the whole mini-batch over all ranks. Returns the SUM of its loss
    terms, already divided by the denominators, and metrics. Gradients of micro-batches and ranks are added up.
    """

    wants: frozenset[str]

    def __call__(
        self, outputs: dict[str, Tensor], experience: Experience, denominators: Denominators
    ) -> tuple[Tensor, dict[str, Metric]]: ...


_LEAST_LR, _LEAST_NORM = 1e-7, 1e-3  # under these a step may be lost to rounding


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightChanges:
    """Counts of changes to an engine's weights since it was built.

    loads: checkpoints read. steps: optimizer steps taken. sure: those of the steps that must have changed some weight.
    """

    loads: int = 0
    steps: int = 0
    sure: int = 0

    def after_step(self, *, lr: float, grad_norm: float, exact: bool) -> WeightChanges:
        """Count an optimizer step.

        AdamW moves each weight by about the learning rate, unless its gradient is small beside eps. exact: all
        weights are float32; in others a step may be lost to rounding.
        """
        sure = exact and lr >= _LEAST_LR and _LEAST_NORM <= grad_norm < math.inf
        return replace(self, steps=self.steps + 1, sure=self.sure + sure)

    def after_load(self) -> WeightChanges:
        """Count a checkpoint that was read: whatever was sent before, the weights may be any now."""
        return replace(self, loads=self.loads + 1)

    def must_differ(self, earlier: WeightChanges) -> bool:
        """True where the weights cannot be the same as at the `earlier` count."""
        return self.loads == earlier.loads and self.sure > earlier.sure
