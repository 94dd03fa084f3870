"""The order in which prompts are drawn: shuffled by seed and epoch, endless, exactly resumable."""

from __future__ import annotations

import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np

from verl_like.batch import Prompt, Rollouts, Scores

logger = logging.getLogger(__name__)


class Sampler(ABC):
    """Source of rows for the loader: ResumableSampler, or one of plugins/samplers.

    The base numbers the rows, and keeps those that were given back.
    """

    epoch: int
    learns = False  # whether `feedback` or `judged` changes the order of what comes

    def __init__(self) -> None:
        self.draws = 0  # rows drawn since the run began: the next row's running number
        self.returned: list[tuple[int, int]] = []  # (row, running number) given back, drawn before anything else

    def draw(self, count: int, *, drop_last: bool = True) -> tuple[list[int], list[int]]:
        """The next `count` dataset positions and their running numbers.

        Rows that were given back come first, under their old numbers. When fewer than needed are left of an epoch,
        those are skipped (drop_last, as in verl: the rows are then all of one epoch), or the next epoch gives the rest.
        """
        again, self.returned = self.returned[:count], self.returned[count:]
        rows = self._fresh(count - len(again), drop_last=drop_last)
        numbers = list(range(self.draws, self.draws + len(rows)))
        self.draws += len(rows)
        return [row for row, _ in again] + rows, [number for _, number in again] + numbers

    def give_back(self, unused: Sequence[tuple[int, int]]) -> None:
        """Rows that were drawn and not used, as (row, running number): they come again in the order of these."""
        self.returned = sorted([*self.returned, *unused], key=lambda pair: pair[1])

    def feedback(self, rollouts: Rollouts, scores: Scores) -> None:  # noqa: B027 (a choice, not a duty)
        """Learn from the results of a step's rows; does nothing for a fixed order."""

    def judged(self, prompt: Prompt, scores: Scores) -> None:  # noqa: B027 (likewise)
        """Learn from the responses to one prompt, also where its group is of no use to a step. scores: one each."""

    def metrics(self) -> dict[str, float]:
        """Return what there is to tell since the last call."""
        return {}

    @abstractmethod
    def _fresh(self, count: int, *, drop_last: bool) -> list[int]:
        """The next rows of the order."""

    def _drawn_state(self) -> dict[str, Any]:
        return {"draws": self.draws, "returned": [list(pair) for pair in self.returned]}

    def _load_drawn(self, state: dict[str, Any]) -> None:
        self.draws = state["draws"]
        self.returned = [(row, number) for row, number in state["returned"]]

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Plain values. `load_state_dict` in a new process continues with the very next row."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state. Raises ValueError if the data set is another one."""


class ResumableSampler(Sampler):
    """Draws dataset positions epoch after epoch. The order of an epoch is a function of (seed, epoch) alone.

    identity: `PromptDataset.identity()`; a saved state is only loaded for the data set that it was saved with.
    """

    def __init__(self, num_rows: int, *, shuffle: bool, seed: int, identity: dict[str, Any] | None = None) -> None:
        super().__init__()
        if num_rows < 1:
            raise ValueError(f"a sampler needs at least one row, not {num_rows}")
        self._num_rows, self._shuffle, self._seed = num_rows, shuffle, seed
        self._identity = identity if identity is not None else {"rows": num_rows}
        self.epoch = 0
        self.position = 0  # rows of this epoch that were drawn
        self._order = self._epoch_order()

    def draw(self, count: int, *, drop_last: bool = True) -> tuple[list[int], list[int]]:
        """Draw `count` rows. Raises ValueError if the data set has fewer, or count is not positive."""
        if not 0 < count <= self._num_rows:
            raise ValueError(f"cannot draw {count} rows at a time from a data set of {self._num_rows}")
        return super().draw(count, drop_last=drop_last)

    def _fresh(self, count: int, *, drop_last: bool) -> list[int]:
        rows = [] if drop_last else self._take(min(count, self._num_rows - self.position))
        if self.position + count - len(rows) > self._num_rows:
            self.epoch, self.position = self.epoch + 1, 0
            self._order = self._epoch_order()
        return rows + self._take(count - len(rows))

    def _take(self, count: int) -> list[int]:
        """The next `count` rows of this epoch."""
        rows = self._order[self.position : self.position + count].tolist()
        self.position += count
        return rows

    def state_dict(self) -> dict[str, Any]:
        """Plain values. `load_state_dict` in a new process continues with the very next row."""
        return {
            "epoch": self.epoch,
            "position": self.position,
            **self._drawn_state(),
            "seed": self._seed,
            "shuffle": self._shuffle,
            "identity": self._identity,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state. Raises ValueError if the data set is another one."""
        check_identity(state["identity"], self._identity)
        if "position" not in state:
            raise ValueError(
                "the checkpoint was written with data.domain_weights, so the run cannot continue without them; give "
                "them again, or start afresh with trainer.resume_mode=disable"
            )
        if (state["seed"], state["shuffle"]) != (self._seed, self._shuffle):
            logger.warning(
                "the checkpoint's order of prompts is kept: data.seed=%s, data.shuffle=%s (configured now: %s, %s)",
                *(state["seed"], state["shuffle"], self._seed, self._shuffle),
            )
        self._seed, self._shuffle = state["seed"], state["shuffle"]
        self.epoch, self.position = state["epoch"], state["position"]
        self._load_drawn(state)
        self._order = self._epoch_order()

    def _epoch_order(self) -> np.ndarray:
        if not self._shuffle:
            return np.arange(self._num_rows)
        return np.random.default_rng([self._seed, self.epoch]).permutation(self._num_rows)


def check_identity(saved: dict[str, Any], now: dict[str, Any]) -> None:
    """Raise ValueError, with both descriptions, unless the data set is the one that a checkpoint was written with."""
    if json.dumps(saved, sort_keys=True) != json.dumps(now, sort_keys=True):
        raise ValueError(
            "the training data changed since the checkpoint was written, so the run cannot continue where it "
            f"stopped. Then: {_describe(saved)}. Now: {_describe(now)}. Restore data.train_files, "
            "data.train_max_samples and the overlong filter, or start afresh with trainer.resume_mode=disable"
        )


def _describe(identity: dict[str, Any]) -> str:
    files = [
        f"{f['name']} ({f['rows']} rows, {f['bytes']} bytes, {f['digest'][:8]})" for f in identity.get("files", [])
    ]
    return f"{identity.get('rows')} prompts of {', '.join(files) or 'an unnamed data set'}"
