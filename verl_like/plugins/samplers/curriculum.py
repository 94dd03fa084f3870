"""A sampler of the user's (data.sampler): any torch sampler over dataset positions, as verl takes them.

It is built as cls(data_source=, data_config=), or cls(data_source=) if it takes no more, and iterated epoch by epoch.
If it has an `update(batch)`, that is called after each step with the step's scores (a curriculum).
"""

from __future__ import annotations

import itertools
import logging
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl_like.batch import Rollouts, Scores
from verl_like.config import DataConfig
from verl_like.data.dataset import Dataset, PromptDataset
from verl_like.data.foreign import ForeignDataset, section_of
from verl_like.data.sampler import Sampler, check_identity
from verl_like.user_code import SAMPLER_KEYS, accepted, check_call, load_class

logger = logging.getLogger(__name__)
_SHIM = str(Path(__file__).parent / "verl_shim")


@dataclass(frozen=True, slots=True)
class ScoredBatch:
    """Argument of `update`: the fields of verl's DataProto that curricula read. One row per response.

    batch: token_level_scores [B, R] (the score on the last token; rows whose reward failed hold NaN), responses [B, R]
        and response_mask [B, R].
    non_tensor_batch: index, uid (the prompt's group), data_source, reward_model, extra_info and each further value of
        the reward function, [B] each.
    """

    batch: dict[str, Tensor]
    non_tensor_batch: dict[str, np.ndarray]

    def __len__(self) -> int:
        return len(self.non_tensor_batch["index"])


def scored_batch(rollouts: Rollouts, scores: Scores) -> ScoredBatch:
    """One step's responses and scores in that form."""
    responses = rollouts.response_ids_BR
    token_scores = torch.zeros(responses.shape)
    last = (rollouts.response_length_B - 1).clamp(min=0)
    token_scores[torch.arange(len(rollouts)), last] = scores.score_B
    rows = rollouts.rows
    columns: dict[str, list[Any]] = {
        "index": [row.index for row in rows],
        "uid": rollouts.group_B.tolist(),
        "data_source": [row.data_source for row in rows],
        "reward_model": [{"style": row.style, "ground_truth": row.ground_truth} for row in rows],
        "extra_info": [row.extra_info for row in rows],
    }
    for name in sorted({name for extra in scores.extras for name in extra} - set(columns)):
        columns[name] = [extra.get(name) for extra in scores.extras]
    return ScoredBatch(
        batch={"token_level_scores": token_scores, "responses": responses, "response_mask": rollouts.response_mask_BR},
        non_tensor_batch={name: _objects(values) for name, values in columns.items()},
    )


def _objects(values: list[Any]) -> np.ndarray:
    array = np.empty(len(values), dtype=object)
    for place, value in enumerate(values):  # not all at once: lists of one length would become a second axis
        array[place] = value
    return array


class RowView:
    """A PromptDataset as verl's samplers know data sets: position -> row dictionary."""

    def __init__(self, dataset: PromptDataset) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = self._dataset[index][1]
        return {
            "data_source": row.data_source,
            "prompt": row.messages,
            "ability": row.ability,
            "reward_model": {"style": row.style, "ground_truth": row.ground_truth},
            "extra_info": row.extra_info,
            "index": row.index,
        }


class CustomSampler(Sampler):
    """Draws from a torch sampler. Same methods as ResumableSampler.

    A sampler with state_dict and load_state_dict is resumed by them; any other is built anew and drawn from until it
    is where the checkpoint was, which repeats what it did unless it learned from `update` on the way.
    """

    def __init__(self, data: DataConfig, dataset: Dataset) -> None:
        super().__init__()
        cls = sampler_class(data)
        view = dataset.rows if isinstance(dataset, ForeignDataset) else RowView(dataset)  # pyright: ignore
        self._sampler = _construct(cls, view, section_of(data), data.sampler.kwargs)
        self._num_rows, self._identity = len(dataset), dataset.identity()
        self._resumes = hasattr(self._sampler, "state_dict") and hasattr(self._sampler, "load_state_dict")
        self._update = getattr(self._sampler, "update", None)
        if self._update is not None and not self._resumes:
            logger.warning(
                "data.sampler: %s has update() but no state_dict() and load_state_dict(): a resumed run draws as if it "
                "had learned nothing",
                cls.__name__,
            )
        self.epoch, self.position = 0, 0
        self._iterator: Iterator[Any] | None = None

    def _fresh(self, count: int, *, drop_last: bool) -> list[int]:
        rows = self._take(count)
        if len(rows) < count:
            kept = [] if drop_last else rows
            self._begin_epoch()
            rows = kept + self._take(count - len(kept))
        if len(rows) < count:
            raise ValueError(f"data.sampler gives {len(rows)} rows in an epoch, fewer than the batch of {count}")
        return rows

    @property
    def learns(self) -> bool:
        return self._update is not None

    def feedback(self, rollouts: Rollouts, scores: Scores) -> None:
        """Tell a curriculum what became of the rows."""
        if self._update is not None:
            self._update(batch=scored_batch(rollouts, scores))

    def _begin_epoch(self) -> None:
        self.epoch, self.position, self._iterator = self.epoch + 1, 0, None

    def _take(self, count: int) -> list[int]:
        if self._iterator is None:
            if hasattr(self._sampler, "set_epoch"):
                self._sampler.set_epoch(self.epoch)
            self._iterator = iter(self._sampler)
        rows = [int(row) for row in itertools.islice(self._iterator, count)]
        self.position += len(rows)
        wrong = [row for row in rows if not 0 <= row < self._num_rows]
        if wrong:
            raise ValueError(f"data.sampler gave the position {wrong[0]}, but the data set has {self._num_rows} rows")
        return rows

    def state_dict(self) -> dict[str, Any]:
        """Plain values, and whatever the sampler's own state_dict gives."""
        own = self._sampler.state_dict() if self._resumes else None
        place = {"epoch": self.epoch, "position": self.position}
        return {**place, **self._drawn_state(), "sampler": own, "identity": self._identity}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state. Raises ValueError if the data set is another one."""
        check_identity(state["identity"], self._identity)
        if self._resumes and state["sampler"] is not None:
            self._sampler.load_state_dict(state["sampler"])
            self.epoch, self.position = state["epoch"], state["position"]
        else:
            while self.epoch < state["epoch"]:
                while self._take(1):
                    pass
                self._begin_epoch()
            self._take(state["position"])
        self._load_drawn(state)


def sampler_class(data: DataConfig) -> type:
    """Load the user's class. What verl's own files import has stand-ins; an installed verl comes first."""
    if _SHIM not in sys.path:
        sys.path.append(_SHIM)
    return load_class(str(data.sampler.class_path), data.sampler.class_name, **SAMPLER_KEYS)


def _construct(cls: type, data_source: Any, data_config: Any, kwargs: dict[str, Any]) -> Any:
    """An object of the class: with data_config, unless it takes data_source alone, as torch's own samplers do."""
    arguments = {"data_source": data_source, **accepted(cls, {"data_config": data_config}), **kwargs}
    check_call(cls, f"data.sampler={cls.__name__}", keywords=arguments)
    sampler = cls(**arguments)
    if not hasattr(sampler, "__iter__"):
        raise ValueError(f"data.sampler={cls.__name__} has no __iter__: it must give dataset positions, as torch's do")
    return sampler
