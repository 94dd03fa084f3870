"""Batches of prompts: endless for training, once through for validation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from verl_like.batch import Prompt, Rollouts, Scores
from verl_like.data.dataset import Dataset, PromptDataset
from verl_like.data.sampler import Sampler
from verl_like.models.images import MediaError


class PromptLoader:
    """Draws `batch_size` prompts at a time, for ever, each with the draw's running number.

    drop_last: a batch is all of one epoch, what is left of an epoch is skipped; otherwise every prompt is drawn.
    Prompts are read when asked for, never ahead, so that the state always tells exactly what was consumed. Those that
    were drawn and not needed are given back: the sampler's state then lists them.
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

    @property
    def draws(self) -> int:
        """Prompts drawn since the run began: the number of the next one that was never drawn before."""
        return self._sampler.draws

    @property
    def learns(self) -> bool:
        """True where the order of the draws depends on the results of earlier rows."""
        return self._sampler.learns

    @property
    def num_waiting(self) -> int:
        """Prompts that were given back and not drawn again."""
        return len(self._sampler.returned)

    def draw(self, count: int | None = None) -> list[Prompt]:
        """The next `count` prompts, by default a batch."""
        return read_prompts(self._dataset, *self.places(count))

    def places(self, count: int | None = None) -> tuple[list[int], list[int]]:
        """Positions in the data set and numbers of the next `count` prompts, by default a batch, which are not read."""
        return self._sampler.draw(count or self._batch_size, drop_last=self._drop_last)

    def give_back(self, unused: Sequence[Prompt]) -> None:
        """Prompts that were drawn and not used: they come first in the next batch, in this order."""
        self._sampler.give_back([(prompt.position, prompt.group) for prompt in unused])

    def feedback(self, rollouts: Rollouts, scores: Scores) -> None:
        """Pass the results of the last batch to a sampler that learns from them."""
        self._sampler.feedback(rollouts, scores)

    def judged(self, prompt: Prompt, scores: Scores) -> None:
        """Pass the scores of one prompt's responses to a sampler that learns from them."""
        self._sampler.judged(prompt, scores)

    def metrics(self) -> dict[str, float]:
        """Return what a sampler has to tell since the last call."""
        return self._sampler.metrics()

    def state_dict(self) -> dict[str, Any]:
        """The sampler's state: see ResumableSampler."""
        return self._sampler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state. Raises ValueError if the data set changed."""
        self._sampler.load_state_dict(state)


def read_prompts(dataset: Dataset, positions: Sequence[int], groups: Sequence[int]) -> list[Prompt]:
    """The prompts at these positions of the data set, with these numbers. Images that cannot be used are the failure of
    their row alone."""
    prompts = []
    for position, group in zip(positions, groups, strict=True):
        problem = ""
        try:
            ids, row = dataset[position]
        except MediaError as error:
            assert isinstance(dataset, PromptDataset)
            ids, row = dataset.without_media(position)
            problem = str(error)
        prompts.append(Prompt(ids=list(ids), row=row, group=group, position=position, problem=problem))
    return prompts


def iterate_all(
    dataset: Dataset, batch_size: int | None = None, *, shuffle: bool = False, seed: int = 1
) -> Iterator[list[Prompt]]:
    """Yield batches with each prompt once; the last one may be short. A group's number is its position.

    batch_size: prompts of a batch; None: all in one.
    """
    order = np.random.default_rng(seed).permutation(len(dataset)) if shuffle else np.arange(len(dataset))
    size = len(order) if batch_size is None else batch_size
    for start in range(0, len(order), size):
        positions = order[start : start + size].tolist()
        yield read_prompts(dataset, positions, positions)
