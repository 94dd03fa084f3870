"""Loss scaling, without which the small gradients of float16 become 0.

The loss is multiplied by a power of two, and the gradients are divided by it before anything reads them. Where they
overflow the step is left out, on all ranks alike, and the power halved; after 2,000 steps without it is doubled, as
torch.amp.GradScaler does. Source: Micikevicius et al., "Mixed precision training" (arXiv 1710.03740).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from verl_like.batch import Metric

log = logging.getLogger(__name__)

_FIRST, _LARGEST = 16, 24  # exponents of two
_STEPS_TO_DOUBLE = 2000


class LossScale:
    """Of one model. In other precisions than float16 nothing is scaled."""

    def __init__(self, compute_dtype: torch.dtype) -> None:
        self._scales = compute_dtype == torch.float16
        self.exponent, self._good_steps = (_FIRST, 0) if self._scales else (0, 0)

    def of(self, loss: Tensor) -> Tensor:
        """What backward starts from."""
        return loss * 2.0**self.exponent if self._scales else loss

    @property
    def settles(self) -> bool:
        """Whether a gradient that is not finite may be the scale's doing, which smaller ones put right."""
        return self._scales and self.exponent > 0

    @torch.no_grad()
    def undo(self, parameters: Iterable[nn.Parameter]) -> None:
        """Turn the gradients of scaled losses into those of the losses; a power of two loses no bit of float32."""
        for parameter in parameters if self._scales else ():
            if parameter.grad is not None:
                parameter.grad.mul_(2.0**-self.exponent)

    def stepped(self, finite: bool) -> dict[str, Metric]:
        """Learn from an optimizer step, or from one that was left out; the scale that it had, as a metric."""
        if not self._scales:
            return {}
        overflow = float(self.settles and not finite)
        if overflow:
            log.info("float16 gradients overflow, as expected of 2**%d: the step is left out", self.exponent)
        told = {"loss_scale": Metric(value=2.0**self.exponent), "loss_scale_overflows": Metric(value=overflow)}
        self._good_steps = self._good_steps + 1 if finite else 0
        if not finite:
            self.exponent -= 1
        elif self._good_steps == _STEPS_TO_DOUBLE:
            self.exponent, self._good_steps = min(self.exponent + 1, _LARGEST), 0
        return told

    def counters(self) -> dict[str, int]:
        """For a checkpoint."""
        return {"loss_scale_exponent": self.exponent, "loss_scale_steps": self._good_steps} if self._scales else {}

    def restore(self, counters: dict[str, int]) -> None:
        """From a checkpoint, which may have been written in another precision."""
        if self._scales and "loss_scale_exponent" in counters:
            self.exponent, self._good_steps = counters["loss_scale_exponent"], counters["loss_scale_steps"]
