"""verl.experimental.dataset.sampler: what curricula inherit from (data.sampler)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sized
from typing import Any

from torch.utils.data import Sampler


class AbstractSampler(Sampler[int]):
    """A sampler of positions that is given the data set and `data.*`."""

    @abstractmethod
    def __init__(self, data_source: Sized, data_config: Any) -> None: ...


class AbstractCurriculumSampler(AbstractSampler):
    """One that learns."""

    @abstractmethod
    def update(self, batch: Any) -> None:
        """Learn from a step's batch."""
