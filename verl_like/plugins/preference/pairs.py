"""Rows of answers that are compared, and the loss in the workers: numbers that the driver has put on tokens.

A preference loss is a function of the batch's log-probs (or rewards) as a whole: of pairs, of a mean over the batch.
The driver asks for them all, differentiates the loss by each (`losses`), and sends the rows back with these numbers.
Numbers times log-probs then have the gradient of the loss itself, wherever the rows of a pair are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from verl_like.algorithms.objectives import as_metrics
from verl_like.batch import Denominators, Experience, Metric, tokens
from verl_like.config import PPOConfig
from verl_like.config.roles import trains_rewards
from verl_like.plugins.sft.experience import columns_of
from verl_like.plugins.sft.turns import Answer, Row


class Carried:
    """Objective of the workers: the sum over tokens of a number from the driver times the log-prob (or reward)."""

    def __init__(self, config: PPOConfig) -> None:
        self.wants = frozenset({"values" if trains_rewards(config) else "log_probs"})

    def without_gradient(self, experience: Experience) -> None:
        """Say that every row may be learnt from."""

    def __call__(
        self, outputs: dict[str, Tensor], experience: Experience, denominators: Denominators
    ) -> tuple[Tensor, dict[str, Metric]]:
        """Compute the micro-batch's share of the sum; it has the gradient of the loss, not its value."""
        (values_BR,) = (outputs[name] for name in self.wants)
        loss = torch.where(experience.response_mask_BR, experience.advantages_BR * values_BR, 0.0).sum()
        return loss, as_metrics({"carried": loss})


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """Row of the data: a prompt with its answers.

    good: of each answer, whether it is the better one, or good. unrelated: answers of other prompts behind this one,
    by which kto estimates how far the policy is from the reference; they are measured and not trained.
    """

    answers: Sequence[Answer]
    good: Sequence[bool]
    unrelated: Sequence[Answer] = ()
    margin: float = 0.0

    @property
    def all_answers(self) -> list[Answer]:
        return [*self.answers, *self.unrelated]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairs(Experience):
    """Rows of a batch of items. An answer is the rows with its item and slot; I items of S answers.

    response_mask_T has what is measured: the answer, and the prompt too where it is imitated.
    """

    answer_mask_T: Tensor = tokens()  # bool
    item_B: Tensor  # int64: 0 to I - 1, in order
    slot_B: Tensor  # int64: 0 to S - 1
    good_B: Tensor  # bool
    unrelated_B: Tensor  # bool
    reference_B: Tensor  # float64: the reference's log-prob of the answer, on its first row; 0
    margin_B: Tensor  # float64


def pairs_of(
    items: Sequence[Item], numbers: Sequence[int], references_IS: Tensor | None, *, whole: bool, scored: bool
) -> Pairs:
    """Make the rows of a batch.

    Args:
        items: with as many answers each.
        numbers: of each item, unique in the run.
        references_IS: log-probs of each answer by the reference; None: 0.
        whole: measure the prompts of good answers too.
        scored: rows for a reward model: the whole text as the prompt, and one token behind it that stands for its end.
    """
    rows, facts = list[tuple[Row, int]](), list[tuple[float, ...]]()
    for place, item in enumerate(items):
        for slot, answer in enumerate(item.all_answers):
            unrelated = slot >= len(item.answers)
            good = not unrelated and item.good[slot]
            known = 0.0 if references_IS is None else float(references_IS[place, slot])
            for row in answer[-1:] if scored else answer:
                first = 1 if whole and good else int(np.flatnonzero(row.trained[1:])[0]) + 1
                if scored:
                    row, first = Row(ids=np.append(row.ids, 0), trained=np.append(row.trained, True)), len(row.ids)
                rows.append((row, first))
                facts.append((place, slot, good, unrelated, known, item.margin, numbers[place]))
                known = 0.0
    columns = [torch.tensor(column) for column in zip(*facts, strict=True)]
    item_B, slot_B, good_B, unrelated_B, reference_B, margin_B, group_B = columns
    own = columns_of(rows)
    answer_mask_T = own.pop("response_mask_T")
    measured_B = good_B.bool() & whole
    measured_T = answer_mask_T | measured_B.repeat_interleave(own["response_length_B"])
    return Pairs(
        **own,
        response_mask_T=measured_T,
        answer_mask_T=answer_mask_T,
        advantages_T=torch.zeros(len(measured_T)),
        group_B=group_B,
        item_B=item_B,
        slot_B=slot_B,
        good_B=good_B.bool(),
        unrelated_B=unrelated_B.bool(),
        reference_B=reference_B.double(),
        margin_B=margin_B.double(),
    )
