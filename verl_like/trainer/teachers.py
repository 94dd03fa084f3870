"""Teachers of a run (distillation): which one a row has, and what they say of the policy's responses."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from transformers import PreTrainedTokenizerBase

from verl_like.batch import Evaluated, PromptRow, Rollouts
from verl_like.config import DistillationConfig
from verl_like.data.dataset import Dataset

_FIELDS = {"data_source": "data_source", "ability": "ability", "agent_name": "agent"}  # teacher_key -> of a row
_SHOWN = 3


class Teacher(Protocol):
    """One teacher: its log-probs of rows, as teacher_log_probs_T and teacher_ids_T."""

    def log_probs(self, rollouts: Rollouts) -> Evaluated: ...


class Teachers:
    """All teachers of a run, in the order of distillation.teachers()."""

    def __init__(self, distillation: DistillationConfig, teachers: Sequence[Teacher]) -> None:
        self._config, self._teachers = distillation, teachers

    def evaluate(self, rollouts: Rollouts) -> Evaluated:
        """Ask each teacher about its rows; where the update itself compares with them, say which one a row has.

        Raises ValueError for a row without a teacher.
        """
        number_B = torch.tensor(teacher_numbers(self._config, rollouts.rows), dtype=torch.int64)
        if self._config.compares:
            return Evaluated(response_length_B=rollouts.response_length_B, teacher_B=number_B)
        parts, order = [], []
        for number, teacher in enumerate(self._teachers):
            rows = (number_B == number).nonzero().flatten()
            if len(rows):
                parts.append(teacher.log_probs(rollouts.select(rows)))
                order.append(rows)
        return Evaluated.concat(parts).select(torch.argsort(torch.cat(order))).replace(teacher_B=number_B)


def teacher_numbers(config: DistillationConfig, rows: Iterable[PromptRow]) -> list[int]:
    """Find each row's teacher by distillation.teacher_key. Raises ValueError for a row that has none."""
    if len(config.teachers()) == 1:
        return [0 for _ in rows]
    name = _FIELDS.get(config.teacher_key)
    values = (row.extra_info.get(config.teacher_key) if name is None else getattr(row, name) for row in rows)
    return _numbers(config, values)


def _numbers(config: DistillationConfig, values: Iterable[object]) -> list[int]:
    known = {teacher.rows: number for number, teacher in enumerate(config.teachers().values())}
    found = [(value, known.get(str(value))) for value in values]
    for value, number in found:
        if number is None:
            raise ValueError(
                f"distillation.teacher_key={config.teacher_key}: no teacher has the rows of {value!r}; there are those "
                f"of {', '.join(known)}: give a teacher this key, or leave the rows out"
            )
    return [number for _, number in found if number is not None]


def check_rows(config: DistillationConfig, dataset: Dataset) -> None:
    """Check that rows have a teacher: all of them by data_source, the first by another key (ValueError)."""
    if len(config.teachers()) > 1 and config.teacher_key == "data_source":
        _numbers(config, dict.fromkeys(dataset.domains()))
    elif config.enabled:
        teacher_numbers(config, [dataset[0][1]])


def check_tokenizer(key: str, path: str, teacher: PreTrainedTokenizerBase, policy: PreTrainedTokenizerBase) -> None:
    """Check that a teacher knows each token of the policy under its id (ValueError, with some that it does not).

    It may know more: their probability is left out.
    """
    known = teacher.get_vocab()
    wrong = {token: number for token, number in policy.get_vocab().items() if known.get(token) != number}
    if wrong:
        shown = ", ".join(
            f"{token!r} is {number} and {known.get(token)}" for token, number in list(wrong.items())[:_SHOWN]
        )
        raise ValueError(
            f"{key}={path}: its tokenizer is not the policy's: {len(wrong)} of {len(policy)} tokens have another id "
            f"or none ({shown}); choose a teacher of the policy's family, whose tokens have the same ids"
        )
