"""The proof by use: trainer and rollout engine must give the same log-probs to the same tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from verl_like.batch import Sequences
from verl_like.config.batch_plan import MicroBatchRule
from verl_like.engine.train_engine import LOG_PROBS
from verl_like.rollout.base import RolloutEngine

if TYPE_CHECKING:
    from verl_like.engine.fsdp import FSDPEngine

_ROWS, _PROMPT, _RESPONSE = 4, 4, 60  # 240 compared tokens
_LARGEST_TO_MEAN = 100.0  # in float32 one token may differ this much more than the mean is allowed to


@dataclass(frozen=True, slots=True)
class _Limits:
    """Nats. `floor`: no calibration goes below; `ceiling`: the first sync must stay under it, and no calibration goes
    above."""

    floor: float
    ceiling: float


_EXACT = _Limits(floor=1e-4, ceiling=1e-3)
_HALF = _Limits(floor=2e-2, ceiling=1e-1)


@dataclass(frozen=True, slots=True)
class Gap:
    """Absolute log-prob differences over the probe's tokens, nats. NaN when either side is not finite."""

    mean: float
    largest: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeText:
    """Tokens, rows of one length, and the trainer's log-probs of the last R of each row."""

    tokens: list[list[int]]
    log_probs_BR: Tensor


class Probe:
    """Compares log-probs of random tokens after a sync, and remembers how large a mean difference is normal.

    The mean is what is limited and calibrated. The largest difference is one unlikely token in a context no model was
    trained on: after some training float32 rounding alone makes it 5e-5 or more, while the mean stays below 5e-6. So it
    only has to stay within a hundred times the limit, which a fault in a few rows of one tensor does not. With a 16-bit
    format on either side, or an engine that quantises, it says nothing and is not limited.
    """

    def __init__(
        self,
        rollout_dtype: torch.dtype,
        trainer_dtype: torch.dtype,
        tolerance: float | None,
        *,
        quantised: bool = False,
    ) -> None:
        self._exact = rollout_dtype == trainer_dtype == torch.float32 and not quantised
        self._limits = _EXACT if self._exact else _HALF
        self._fixed = tolerance
        self._calibrated: float | None = None

    @property
    def tolerance(self) -> float:
        """The largest mean that passes now: configured, the first sync's ceiling, or calibrated by the first."""
        if self._fixed is not None:
            return self._fixed
        return self._limits.ceiling if self._calibrated is None else self._calibrated

    def measure(self, rollout: RolloutEngine, text: ProbeText) -> Gap:
        """Compare the engine's log-probs of the tokens with the trainer's; collective over a replica."""
        length = text.log_probs_BR.shape[1]
        return gap_between(text.log_probs_BR, torch.tensor([row[-length:] for row in rollout.score(text.tokens)]))

    def problem(self, gap: Gap) -> str | None:
        """Problem to report where the gap is too large; None where it is not."""
        limit = self.tolerance * _LARGEST_TO_MEAN if self._exact else math.inf
        if gap.mean <= self.tolerance and gap.largest <= limit:  # false for NaN
            return None
        return (
            f"log-probs of the probe differ between trainer and rollout engine: by {gap.mean:.3g} nats on average "
            f"(limit {self.tolerance:.3g}), {gap.largest:.3g} at most (limit {limit:.3g}). If both are known to be "
            "right, raise actor_rollout_ref.rollout.sync_probe_tolerance"
        )

    def passed(self, gap: Gap) -> None:
        """The first proved sync sets what later ones are measured against."""
        assert math.isfinite(gap.mean)
        if self._calibrated is None:
            self._calibrated = min(max(10 * gap.mean, self._limits.floor), self._limits.ceiling)


def trained_text(engine: FSDPEngine, tokenizer_size: int, max_model_len: int, version: int) -> ProbeText:
    """The trainer's side of the probe (collective): the same tokens on all ranks, others for each version."""
    sequences = probe_sequences(tokenizer_size, max_model_len, version)
    rule = MicroBatchRule(max_sequences=_ROWS)
    log_probs_T = engine.forward(sequences, want=frozenset({LOG_PROBS}), rule=rule, temperature=1.0)[LOG_PROBS]
    tokens = torch.cat([sequences.prompt_ids_BP, sequences.response_ids_BR], dim=1).tolist()
    return ProbeText(tokens=tokens, log_probs_BR=log_probs_T.view(_ROWS, int(sequences.response_length_B[0])))


def gap_between(trained_BR: Tensor, scored_BR: Tensor) -> Gap:
    """Differences of two [B, R] tables of log-probs."""
    difference_BR = (trained_BR - scored_BR).abs()
    return Gap(mean=float(difference_BR.mean()), largest=float(difference_BR.max()))


def probe_sequences(tokenizer_size: int, max_model_len: int, version: int) -> Sequences:
    """Random tokens, the same on every rank. One position of max_model_len is left for the engine's own token."""
    response = min(_RESPONSE, max_model_len - _PROMPT - 1)
    generator = torch.Generator().manual_seed(version)
    ids = torch.randint(tokenizer_size, (_ROWS, _PROMPT + response), generator=generator, dtype=torch.int32)
    return Sequences(
        prompt_ids_BP=ids[:, :_PROMPT],
        prompt_length_B=torch.full((_ROWS,), _PROMPT),
        response_ids_BR=ids[:, _PROMPT:],
        response_length_B=torch.full((_ROWS,), response),
        response_mask_BR=torch.ones(_ROWS, response, dtype=torch.bool),
    )
