"""The proof by use: trainer and rollout engine must give the same log-probs to the same tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from verl_like.batch import Sequences
from verl_like.config.batch_plan import MicroBatchRule
from verl_like.engine.protocol import LOG_PROBS, TrainEngine
from verl_like.rollout.protocol import RolloutEngine

_ROWS, _PROMPT, _RESPONSE = 4, 4, 60  # 240 compared tokens
_FULL_WEIGHT_NATS = 16.0  # differences at log-probs below minus this count in proportion


@dataclass(frozen=True, slots=True)
class _Limits:
    """Nats. `floor`: no calibration goes below; `ceiling`: the first sync must stay under it."""

    floor: float
    ceiling: float


_EXACT = _Limits(floor=1e-4, ceiling=1e-3)
_HALF = _Limits(floor=2e-2, ceiling=1e-1)


class Probe:
    """Compares log-probs of random tokens after a sync, and remembers how large a difference is normal.

    The gap is the largest absolute difference in float32; where either side computes in a 16-bit format it is the mean
    one, because the largest then says more about one unlikely token than about the weights. Rounding grows with the
    logits, and a trained model gives random tokens log-probs of -50 and less: beyond -16 nats a difference counts in
    proportion (twice the log-prob, half the weight), so that the limit does not have to grow as training sharpens.
    """

    def __init__(self, rollout_dtype: torch.dtype, trainer_dtype: torch.dtype, tolerance: float | None) -> None:
        self._exact = rollout_dtype == trainer_dtype == torch.float32
        self._limits = _EXACT if self._exact else _HALF
        self._fixed = tolerance
        self._calibrated: float | None = None

    @property
    def tolerance(self) -> float:
        """The largest gap that passes now: configured, or the first sync's ceiling, or calibrated by the first sync."""
        if self._fixed is not None:
            return self._fixed
        return self._limits.ceiling if self._calibrated is None else self._calibrated

    def measure(self, engine: TrainEngine, rollout: RolloutEngine, version: int) -> float:
        """The gap in nats; collective. All ranks use the same tokens, others for each version."""
        sequences = probe_sequences(rollout.tokenizer_size, rollout.max_model_len, version)
        length = sequences.response_ids_BR.shape[1]
        rule = MicroBatchRule(max_sequences=_ROWS)
        trained_BR = engine.forward(sequences, want=frozenset({LOG_PROBS}), rule=rule, temperature=1.0)[LOG_PROBS]
        tokens = torch.cat([sequences.prompt_ids_BP, sequences.response_ids_BR], dim=1).tolist()
        scored_BR = torch.tensor([row[-length:] for row in rollout.score(tokens)])
        return self.gap(trained_BR.cpu().float(), scored_BR)

    def gap(self, trained_BR: Tensor, scored_BR: Tensor) -> float:
        """The number that is compared with the tolerance; NaN when either side is not finite."""
        difference_BR = (trained_BR - scored_BR).abs() / (trained_BR.abs() / _FULL_WEIGHT_NATS).clamp(min=1.0)
        return float(difference_BR.max() if self._exact else difference_BR.mean())

    def problem(self, gap: float) -> str | None:
        """What to say if the gap is too large."""
        if gap <= self.tolerance:  # false for NaN
            return None
        kind = "largest" if self._exact else "mean"
        return (
            f"log-probs of the probe differ between trainer and rollout engine: {kind} difference {gap:.3g} nats is "
            f"above {self.tolerance:.3g}. If both are known to be right, raise "
            "actor_rollout_ref.rollout.sync_probe_tolerance"
        )

    def passed(self, gap: float) -> None:
        """The first proved sync sets what later ones are measured against."""
        assert math.isfinite(gap)
        if self._calibrated is None:
            self._calibrated = max(10 * gap, self._limits.floor)


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
