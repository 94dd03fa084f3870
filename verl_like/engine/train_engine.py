"""What every training engine offers. One engine holds one model (actor, reference or critic), sharded over the ranks.

All methods are collective: every rank calls them, in the same order. Rows may differ between ranks and may be none.
Letters: B rows of this rank, b rows of a micro-batch, R response, T response tokens, as in verl_like.batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Literal, Protocol

import torch
from torch import Tensor

from verl_like.batch import Denominators, Experience, Metric, Sequences
from verl_like.engine.weight_changes import WeightChanges

if TYPE_CHECKING:
    from verl_like.config.batch_plan import MicroBatchRule

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


class TrainEngine(Protocol):
    """One sharded model: forward passes, optimizer steps, weight export, checkpoints."""

    changes: WeightChanges
    """How often its weights have changed, on this rank as on all."""

    def forward(
        self, batch: Sequences, *, want: frozenset[str], rule: MicroBatchRule, temperature: float = 1.0
    ) -> dict[str, Tensor]:
        """Per-token outputs without gradients, float32 CPU [T]: one for each response token of the rows.

        want: "log_probs", "entropy" and "sum_pi_squared" (sum over the vocabulary of squared probabilities) of a
        policy, under logits / temperature, at response_mask (0 elsewhere);
        "full_kl" (KL to the attached reference over the whole vocabulary) where one is attached;
        "values" of a value model inside response_length: entry t predicts the state BEFORE response token t.
        """
        ...

    def train_minibatch(
        self,
        batch: Experience,
        loss_fn: LossFn,
        denominators: Denominators,
        *,
        rule: MicroBatchRule,
        temperature: float = 1.0,
        without_gradient_B: Tensor | None = None,
    ) -> dict[str, Metric]:
        """One optimizer step over this rank's rows; all ranks step together.

        without_gradient_B (bool): rows known to add nothing to the gradient get a forward pass for the metrics and no
        backward pass; either all ranks pass it or none. Adds "grad_norm" (before clipping), "lr" and "skipped_steps"
        (1 when the gradient norm was not finite and no weight was changed) to the loss's metrics.
        """
        ...

    def advance_schedule(self) -> None:
        """One step of the learning-rate schedule. It counts training steps (one rollout batch each), as verl's does:
        call it once after all mini-batches of a batch."""
        ...

    def base_model(self) -> AbstractContextManager[None]:
        """LoRA: forward passes inside run the base model, without adapters. Else a ValueError."""
        ...

    def export_weights(self, dtype: torch.dtype, form: WeightForm = "merged") -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, full tensor on this rank's device), one at a time, the same order on all ranks.

        Adapters that travel for themselves are named as in peft without its prefix (`<module>.lora_A.weight`,
        `<module>.lora_B.weight`), and B comes multiplied by alpha / rank: the receiver adds B A x and nothing else.
        """
        ...

    def weight_names(self, form: WeightForm = "merged") -> dict[str, torch.Size]:
        """Names and shapes that `export_weights` must yield, computed from the model's config, not from the shards."""
        ...

    def weight_checksums(self, dtype: torch.dtype, form: WeightForm = "merged") -> dict[str, int]:
        """The checksum (parallel/checksum.py) of every tensor that `export_weights` must yield, from the shards
        (collective). RuntimeError where an adapter to be merged is not what its shards hold."""
        ...

    def offload(self, params: bool = True, optimizer: bool = True) -> None:
        """Move shards and optimizer state to host memory."""
        ...

    def onload(self) -> None:
        """Undo `offload`."""
        ...

    def save(self, path: str, *, contents: Sequence[str], background: bool = False) -> list[str]:
        """Write a checkpoint; contents out of "model", "optimizer", "extra" (schedule, RNG), "hf_model".

        Returns the names of weights and optimizer states that hold NaN or infinite numbers on this rank: where any rank
        has one, nothing is written.
        background: the shards of "model" and "optimizer" are copied now and written while training goes on; the
        checkpoint is whole when `saved` says so on every rank.
        """
        ...

    def saved(self, *, wait: bool) -> bool:
        """Whether this rank writes no checkpoint in the background any more; `wait`: until it is so."""
        ...

    def load(self, path: str, *, contents: Sequence[str]) -> None:
        """Read what `save` wrote, also with another number of ranks."""
        ...

    def export_hf(self, path: str) -> None:
        """Write config and safetensors that `from_pretrained` reads."""
        ...
