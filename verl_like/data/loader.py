"""Batches of prompts: endless for training, once through for validation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from verl_like.batch import Prompts, Rollouts, Scores, pad_rows
from verl_like.data.dataset import Dataset
from verl_like.data.sampler import Sampler


class PromptLoader:
    """Draws `batch_size` prompts at a time, for ever. group_B is the draw's running number, unique within a run.

    drop_last: a batch is all of one epoch, what is left of an epoch is skipped; otherwise every prompt is drawn.
    Batches are read when asked for, never ahead, so that the state always tells exactly what was consumed. Dynamic
    sampling gives prompts that it did not need back: the sampler's state then lists them.
    """

    def __init__(self, dataset: Dataset, sampler: Sampler, batch_size: int, *, drop_last: bool = True) -> None:
        if batch_size > len(dataset):
            raise ValueError(
                f"data.train_batch_size (or data.gen_batch_size)={batch_size} is more than the {len(dataset)} prompts "
                "of data.train_files that are left after data.train_max_samples and data.filter_overlong_prompts"
            )
        self._dataset, self._sampler, self._batch_size = dataset, sampler, batch_size
        self._drop_last = drop_last

    @property
    def steps_per_epoch(self) -> int:
        """Full batches in an epoch; the rest of an epoch is skipped."""
        return len(self._dataset) // self._batch_size

    @property
    def epoch(self) -> int:
        """The epoch that the last batch came from, from 0."""
        return self._sampler.epoch

    def next(self) -> Prompts:
        """The next batch."""
        return self.draw()[0]

    def draw(self) -> tuple[Prompts, list[int]]:
        """The next batch, and where in the data set its prompts are (for `give_back`)."""
        positions, numbers = self._sampler.draw(self._batch_size, drop_last=self._drop_last)
        return collate(self._dataset, positions, numbers), positions

    def give_back(self, unused: Sequence[tuple[int, int]]) -> None:
        """Prompts that were drawn and not used, as (position, group): they come first in the next batch."""
        self._sampler.give_back(unused)

    def feedback(self, rollouts: Rollouts, scores: Scores) -> None:
        """What became of the last batch: for a sampler of the user's that learns from it."""
        self._sampler.feedback(rollouts, scores)

    def state_dict(self) -> dict[str, Any]:
        """The sampler's state: see ResumableSampler."""
        return self._sampler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where the state was saved. ValueError if the data set changed."""
        self._sampler.load_state_dict(state)


def collate(dataset: Dataset, indices: Sequence[int], groups: Sequence[int]) -> Prompts:
    """Prompts at `indices` of the dataset; `groups` become group_B."""
    tokens, rows = zip(*(dataset[index] for index in indices), strict=True)
    return Prompts(
        prompt_ids_BP=pad_rows(tokens, side="left", dtype=torch.int32),
        prompt_length_B=torch.tensor([len(ids) for ids in tokens], dtype=torch.int64),
        group_B=torch.tensor(groups, dtype=torch.int64),
        rows=list(rows),
    )


def iterate_all(
    dataset: Dataset, batch_size: int | None = None, *, shuffle: bool = False, seed: int = 1
) -> Iterator[Prompts]:
    """Every prompt once, the last batch may be short; batch_size None: all in one. group_B is the dataset index."""
    order = np.random.default_rng(seed).permutation(len(dataset)) if shuffle else np.arange(len(dataset))
    size = len(order) if batch_size is None else batch_size
    for start in range(0, len(order), size):
        indices = order[start : start + size].tolist()
        yield collate(dataset, indices, indices)
