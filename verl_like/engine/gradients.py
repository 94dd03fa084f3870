"""The whole gradient of a mini-batch, for checks: no weight changes. See `verl-like selfcheck`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from verl_like.batch import Denominators, Experience
from verl_like.engine.fsdp import FSDPEngine
from verl_like.engine.microbatch import Objective
from verl_like.engine.rescue import OutOfMemory
from verl_like.engine.train_engine import LossFn
from verl_like.models.heads import HF_PREFIX

if TYPE_CHECKING:
    from verl_like.config.batch_plan import MicroBatchRule


def minibatch_gradients(
    engine: FSDPEngine,
    batch: Experience,
    loss_fn: LossFn,
    denominators: Denominators,
    *,
    rule: MicroBatchRule,
    temperature: float = 1.0,
    without_gradient_B: Tensor | None = None,
) -> dict[str, Tensor]:
    """Compute the float32 gradient by Hugging Face name, before clipping, in host memory on every rank (collective).

    Args:
        engine: the engine whose gradient is taken.
        batch: this rank's rows; may be none.
        loss_fn: objective of a micro-batch.
        denominators: counts over the whole mini-batch and all ranks.
        rule: largest size of a micro-batch.
        temperature: logits are divided by it.
        without_gradient_B: bool; rows known to add nothing to the gradient.

    Raises torch.OutOfMemoryError: the cut is what is checked, so that nothing is repeated with smaller micro-batches.
    """
    engine.onload()
    try:
        engine.accumulate(batch, Objective(loss_fn, denominators, temperature), rule, without_gradient_B)
    except OutOfMemory as error:
        raise torch.OutOfMemoryError(f"out of memory in {error}: take smaller micro-batches") from error
    gradients = engine.sharding.full_gradients()
    found = {name.removeprefix(HF_PREFIX): gradient.cpu().clone() for name, gradient in gradients}
    engine.sharding.drop_gradients()
    return found
