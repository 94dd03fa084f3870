"""Small Rollouts and Scores for the tests of this folder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from verl_like.batch import PromptRow, RewardFailure, Rollouts, Scores, pad_rows


def rollouts(
    responses: Sequence[Sequence[int]],
    *,
    prompts: Sequence[Sequence[int]] | None = None,
    groups: Sequence[int] | None = None,
    sources: Sequence[str] | None = None,
    finish_reasons: Sequence[str] | None = None,
) -> Rollouts:
    size = len(responses)
    prompts = prompts or [[1, 2]] * size
    sources = sources or ["toy"] * size
    response_ids = pad_rows(responses, side="right", dtype=torch.int32)
    length = torch.tensor([len(r) for r in responses])
    return Rollouts(
        prompt_ids_BP=pad_rows(prompts, side="left", dtype=torch.int32),
        prompt_length_B=torch.tensor([len(p) for p in prompts]),
        response_ids_BR=response_ids,
        response_length_B=length,
        response_mask_BR=torch.arange(response_ids.shape[1])[None, :] < length[:, None],
        group_B=torch.tensor(groups if groups is not None else list(range(size))),
        weight_version_BR=torch.zeros_like(response_ids),
        finish_reasons=list(finish_reasons or ["stop"] * size),
        rows=[
            PromptRow(index=i, data_source=source, messages=[], ground_truth=f"truth {i}")
            for i, source in enumerate(sources)
        ],
    )


def scores(values: Sequence[float | None], extras: Sequence[dict[str, Any]] | None = None) -> Scores:
    """None is a reward that failed."""
    return Scores(
        score_B=torch.tensor([float("nan") if v is None else v for v in values]),
        valid_B=torch.tensor([v is not None for v in values]),
        extras=list(extras or [{} for _ in values]),
        failures=[
            RewardFailure(row=i, data_source="toy", kind="timeout", message="over 60 s") if v is None else None
            for i, v in enumerate(values)
        ],
    )
