"""The data set of a split: ours, or a class of the user's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from verl_like.config import DataConfig
from verl_like.config.doctor_paths import Files
from verl_like.data.dataset import Dataset, PromptDataset
from verl_like.data.foreign import build_custom
from verl_like.models.vision import VisionProcessor


def build_dataset(
    data: DataConfig,
    files: Files,
    tokenizer: Any,
    *,
    split: str,
    seed: int = 1,
    tools: Sequence[dict[str, Any]] = (),
    vision: VisionProcessor | None = None,
    limit_images: int | None = None,
) -> Dataset:
    """PromptDataset, or the class of data.custom_cls: see `foreign.build_custom`. The rest: see PromptDataset."""
    if data.custom_cls.path is None:
        options = {"vision": vision, "limit_images": limit_images}
        return PromptDataset(data, files, tokenizer, split=split, seed=seed, tools=tools, **options)
    return build_custom(data, files, tokenizer, split=split, seed=seed, tools=tools)
