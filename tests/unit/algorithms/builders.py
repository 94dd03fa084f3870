"""Small seeded random batches for the tests of this folder, with tool text in the middle and padding at the end."""

from __future__ import annotations

import torch
from torch import Tensor

from verl_like.batch import Denominators, Evaluated, Experience, PromptRow, RewardFailure, Rollouts, Scores

MAX_RESPONSE_LENGTH = 16


def random_mask(generator: torch.Generator, lengths: list[int], width: int) -> Tensor:
    """Sampled tokens inside the lengths, with some tool text between them (first token always sampled)."""
    inside = torch.arange(width)[None, :] < torch.tensor(lengths)[:, None]
    sampled = torch.rand(len(lengths), width, generator=generator) > 0.25
    sampled[:, 0] = True
    return inside & sampled


def experience(
    seed: int = 0, lengths: tuple[int, ...] = (5, 3, 6, 1, 4, 2), width: int = 8, dtype: torch.dtype = torch.float64
) -> Experience:
    """Rows of the given response lengths; all optional columns present but sample weights; two rows to a group."""
    generator = torch.Generator().manual_seed(seed)
    rows = len(lengths)
    mask = random_mask(generator, list(lengths), width)

    def column(scale: float = 1.0, shift: float = 0.0) -> Tensor:
        return (torch.randn(rows, width, generator=generator, dtype=dtype) * scale + shift) * mask

    return Experience(
        prompt_ids_BP=torch.ones(rows, 3, dtype=torch.int32),
        prompt_length_B=torch.full((rows,), 3),
        response_ids_BR=torch.ones(rows, width, dtype=torch.int32),
        response_length_B=torch.tensor(lengths),
        response_mask_BR=mask,
        group_B=torch.arange(rows) // 2,
        advantages_BR=column(),
        returns_BR=column(),
        old_log_probs_BR=column(0.6, -1.5),
        ref_log_probs_BR=column(0.6, -1.5),
        rollout_log_probs_BR=column(0.6, -1.5),
        values_BR=column(),
        selected_BR=mask & (torch.rand(rows, width, generator=generator) < 0.3),
        score_B=torch.randint(-1, 2, (rows,), generator=generator).float(),
        truncated_B=torch.rand(rows, generator=generator) < 0.3,
        difficulty_B=torch.rand(rows, generator=generator),
    )


def outputs_for(batch: Experience, seed: int = 1, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """What an engine computes for the batch: leaves that gradients can be taken of, 0 outside the mask."""
    generator = torch.Generator().manual_seed(seed)
    mask = batch.response_mask_BR

    def leaf(scale: float, shift: float) -> Tensor:
        return ((torch.randn(mask.shape, generator=generator, dtype=dtype) * scale + shift) * mask).requires_grad_()

    return {"log_probs": leaf(0.6, -1.5), "entropy": leaf(0.2, 1.0), "values": leaf(1.0, 0.0)}


def denominators(batch: Experience) -> Denominators:
    return Denominators(
        num_tokens=int(batch.response_mask_BR.sum()),
        num_sequences=len(batch),
        max_response_length=MAX_RESPONSE_LENGTH,
    )


def rollouts(lengths: tuple[int, ...], groups: list[int], width: int | None = None, prompt_width: int = 3) -> Rollouts:
    """Rollouts whose policy sampled every token."""
    width = width or max(lengths)
    rows = len(lengths)
    mask = torch.arange(width)[None, :] < torch.tensor(lengths)[:, None]
    return Rollouts(
        prompt_ids_BP=torch.ones(rows, prompt_width, dtype=torch.int32),
        prompt_length_B=torch.full((rows,), prompt_width),
        response_ids_BR=torch.ones(rows, width, dtype=torch.int32) * mask,
        response_length_B=torch.tensor(lengths),
        response_mask_BR=mask,
        group_B=torch.tensor(groups),
        rollout_log_probs_BR=torch.full((rows, width), -1.0) * mask,
        weight_version_BR=torch.zeros(rows, width, dtype=torch.int32),
        finish_reasons=["stop"] * rows,
        rows=[PromptRow(index=g, data_source="toy", messages=[]) for g in groups],
    )


def scores(values: list[float], failed: tuple[int, ...] = ()) -> Scores:
    """Scores of valid rows; rows in `failed` hold NaN and a failure record."""
    rows = range(len(values))
    return Scores(
        score_B=torch.tensor([float("nan") if i in failed else values[i] for i in rows]),
        valid_B=torch.tensor([i not in failed for i in rows]),
        extras=[{} for _ in rows],
        failures=[
            RewardFailure(row=i, data_source="toy", kind="exception", message="boom") if i in failed else None
            for i in rows
        ],
    )


def evaluated(batch: Rollouts, *, old: bool = True, ref: bool = False, values: bool = False) -> Evaluated:
    """Constant columns: old log-prob -1, reference -1.5, value 0.25."""
    mask = batch.response_mask_BR

    def constant(value: float) -> Tensor:
        return torch.full(mask.shape, value) * mask

    return Evaluated(
        response_length_B=batch.response_length_B,
        old_log_probs_BR=constant(-1.0) if old else None,
        ref_log_probs_BR=constant(-1.5) if ref else None,
        values_BR=constant(0.25) if values else None,
    )
