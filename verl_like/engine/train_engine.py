"""Words of the training engine (fsdp.py): names of its outputs, forms of its weights, what an objective is."""

from __future__ import annotations

from typing import Literal, Protocol

from torch import Tensor

from verl_like.batch import Denominators, Experience, Metric

LOG_PROBS, ENTROPY, SUM_PI_SQUARED, VALUES = "log_probs", "entropy", "sum_pi_squared", "values"
FULL_KL = "full_kl"

WeightForm = Literal["merged", "apart", "adapters"]
"""How weights leave an engine with LoRA: adapters added into the weights they adapt ("merged"; without LoRA the only
form), base weights and adapters beside each other ("apart"), or adapters alone."""


class LossFn(Protocol):
    """The objective of one micro-batch.

    Called with the wanted outputs as [b, R] tensors with a graph (0 where nothing was computed), the micro-batch
    (on the device) and the denominators of the whole mini-batch over all ranks. Returns the SUM of its loss
    terms, already divided by the denominators, and metrics. Gradients of micro-batches and ranks are added up.
    """

    wants: frozenset[str]

    def __call__(
        self, outputs: dict[str, Tensor], experience: Experience, denominators: Denominators
    ) -> tuple[Tensor, dict[str, Metric]]: ...
