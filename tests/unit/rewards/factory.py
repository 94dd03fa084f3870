"""Rollouts with given response texts, and a tokenizer of one token per character."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from verl_like.batch import PromptRow, Rollouts, pad_rows
from verl_like.config import CustomRewardFunctionConfig, DataConfig, RewardModelConfig
from verl_like.rewards.manager import RewardManager

SPECIAL_ID = 1  # an end token: skipped when decoding


class CharTokenizer:
    """Character c has the id ord(c)."""

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        return "".join(chr(i) if i != SPECIAL_ID else "" if skip_special_tokens else "</s>" for i in ids)


def make_rollouts(
    texts: list[str],
    *,
    data_source: str | list[str] = "arithmetic",
    ground_truths: list[Any] | None = None,
    style: str = "rule",
) -> Rollouts:
    sources = [data_source] * len(texts) if isinstance(data_source, str) else data_source
    truths = ground_truths if ground_truths is not None else ["5"] * len(texts)
    ids = [[*map(ord, text), SPECIAL_ID] for text in texts]
    response_ids_BR = pad_rows(ids, side="right", dtype=torch.int32)
    count = len(texts)
    return Rollouts(
        prompt_ids_BP=torch.full((count, 1), 65, dtype=torch.int32),
        prompt_length_B=torch.ones(count, dtype=torch.int64),
        response_ids_BR=response_ids_BR,
        response_length_B=torch.tensor([len(row) for row in ids]),
        response_mask_BR=pad_rows([[1] * len(row) for row in ids], side="right", dtype=torch.bool),
        group_B=torch.arange(count),
        weight_version_BR=torch.zeros_like(response_ids_BR),
        finish_reasons=["stop"] * count,
        rows=[
            PromptRow(
                index=i,
                data_source=source,
                messages=[],
                ground_truth=truth,
                extra_info={"index": i, "split": "train"},
                style=style,
            )
            for i, (source, truth) in enumerate(zip(sources, truths, strict=True))
        ],
    )


def make_manager(path: Path | None = None, max_failure_fraction: float = 1.0, **custom: Any) -> RewardManager:
    config = CustomRewardFunctionConfig(path=None if path is None else str(path), **custom)
    reward_model = RewardModelConfig(max_failure_fraction=max_failure_fraction)
    return RewardManager(config, reward_model, DataConfig(), CharTokenizer())
