"""Pairs from runs of reinforcement learning: the best and the worst answer of each recorded group."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from verl_like.batch import Episodes, PromptRow, Rollouts, Scores
from verl_like.config.data import DataConfig
from verl_like.config.preference import PreferenceConfig
from verl_like.config.sft import SFTConfig
from verl_like.plugins.preference.dataset import Items
from verl_like.plugins.preference.pairs import Item
from verl_like.plugins.sft.turns import Answer, Row, fitted
from verl_like.trainer.recording import read_step, recorded_steps, step_file

logger = logging.getLogger(__name__)

_KEY = "preference.rollouts"


class RolloutPairs(Items):
    """Data set of the pairs of preference.rollouts, in the tokens that were sampled."""

    def __init__(self, preference: PreferenceConfig, sft: SFTConfig, data: DataConfig, tokenizer: Any) -> None:
        self.preference, self.sft, self.where = preference, sft, _KEY
        self._items, self._rows, num_groups = list[Item](), list[PromptRow](), 0
        for folder in preference.rollouts:
            for file, rollouts, scores in _recorded(Path(folder).expanduser()):
                _check_tokenizer(file, rollouts, tokenizer)
                for name, best, worst in _groups(rollouts, scores):
                    num_groups += 1
                    gap = 0.0 if best is None or worst is None else best[0] - worst[0]
                    if best is None or worst is None or gap <= preference.min_gap:
                        continue
                    try:
                        answers = [self._answer(rollouts, rows, data) for _, rows in (best, worst)]
                    except ValueError as error:
                        raise ValueError(f"{_KEY}: {file}, group {name}: {error}") from error
                    row = rollouts.rows[best[1][0]]
                    self._items.append(Item(answers=answers, good=(True, False)))
                    self._rows.append(row)
        logger.info("%s: %d pairs of %d groups", _KEY, len(self._items), num_groups)
        if not self._items:
            raise ValueError(
                f"{_KEY}={preference.rollouts}: no group of {num_groups} has answers whose scores differ by more than "
                f"preference.min_gap={preference.min_gap}"
            )

    def _answer(self, rollouts: Rollouts, rows: Sequence[int], data: DataConfig) -> Answer:
        found = list[Row]()
        for one in (rollouts.select([row]) for row in rows):
            trained = torch.cat([torch.zeros(len(one.prompt_ids_T), dtype=torch.bool), one.response_mask_T])
            ids = torch.cat([one.prompt_ids_T, one.response_ids_T]).int().numpy()
            row = Row(ids=ids, trained=trained.numpy(), media=() if one.media is None else tuple(one.media[0]))
            found.append(fitted(row, self.sft.max_length, data.truncation))
        if kept := [row for row in found if row.trained[1:].any()]:
            return kept
        raise ValueError(f"sft.max_length={self.sft.max_length} leaves nothing of an answer: raise it")

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> tuple[list[int], PromptRow]:
        """Tokens of the better answer's last row, and the row that was answered."""
        return self._items[index].answers[0][-1].ids.tolist(), self._rows[index]

    def own(self, index: int) -> Item:
        return self._items[index]

    def answers(self, index: int) -> Sequence[Answer]:
        """Answers of a pair, the better one first."""
        return self._items[index].answers

    def name_of(self, index: int) -> str:
        """Name of the data source of the row that was answered."""
        return self._rows[index].data_source

    def identity(self) -> dict[str, Any]:
        """Describe the pairs, for checkpoints."""
        return {"pairs": len(self), "names": [row.data_source for row in self._rows[:1]]}

    def num_media(self) -> int:
        """Count the pairs with images or videos."""
        return sum(bool(row.media) for row in self._rows)


def _recorded(folder: Path) -> Iterator[tuple[Path, Rollouts, Scores]]:
    """Yield the recorded steps of a run's folder, or of its folder `recorded`. Raises ValueError without any."""
    inside = folder / "recorded"
    place = inside if inside.is_dir() else folder
    steps = recorded_steps(place)
    if not steps:
        raise ValueError(f"{_KEY}: {folder} has no recorded steps: trainer.record_freq=1 writes each step of a run")
    for file in (step_file(place, step) for step in steps):
        found = read_step(file)
        yield file, found.stage("rollouts", Rollouts), found.stage("scores", Scores)


Scored = tuple[float, list[int]]  # of an answer: its score, and its rows


def _groups(rollouts: Rollouts, scores: Scores) -> Iterator[tuple[int, Scored | None, Scored | None]]:
    """Yield each group's number, and its answers with the highest and the lowest score; None without valid ones."""
    episodes = [rows.tolist() for rows in Episodes.of(rollouts).rows()]
    valid_B = scores.valid_B if scores.trained_B is None else scores.valid_B & scores.trained_B
    valid_B = valid_B & scores.score_B.isfinite()
    by_group = sorted(episodes, key=lambda rows: int(rollouts.group_B[rows[0]]))
    for group, members in itertools.groupby(by_group, key=lambda rows: int(rollouts.group_B[rows[0]])):
        scored = [(float(scores.score_B[rows[0]]), rows) for rows in members if bool(valid_B[rows].all())]
        order = sorted(scored, key=lambda each: each[0])
        yield group, order[-1] if order else None, order[0] if order else None


def _check_tokenizer(file: Path, rollouts: Rollouts, tokenizer: Any) -> None:
    """Raise ValueError where the recorded prompts are no tokens of this run's model."""
    content = rollouts.rows[0].messages[-1].get("content")
    ids = rollouts.prompt_lists()[0]
    known = max(ids, default=0) < len(tokenizer)
    text = tokenizer.decode(ids) if known else ""
    if not known or (isinstance(content, str) and "".join(content.split()) not in "".join(text.split())):
        raise ValueError(
            f"{_KEY}: {file} holds tokens of another tokenizer (its first prompt reads {text[:80]!r} here): train the "
            "model that sampled it, or one of its family"
        )
