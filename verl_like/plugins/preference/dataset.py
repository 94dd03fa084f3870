"""Pairs of answers, and answers that are good or not, from files. The columns are those that TRL's formats have."""

from __future__ import annotations

import hashlib
import itertools
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor

from verl_like.batch import usable_number
from verl_like.config import DataConfig
from verl_like.config.paths import Files
from verl_like.config.preference import PreferenceConfig
from verl_like.config.sft import SFTConfig
from verl_like.data.chat import Messages
from verl_like.data.reading import to_messages
from verl_like.data.rows import messages_or_text
from verl_like.plugins.preference.losses import imitation
from verl_like.plugins.preference.pairs import Item, Pairs, pairs_of
from verl_like.plugins.sft.dataset import SFTDataset, trained_turns
from verl_like.plugins.sft.turns import Answer, Row, Task

logger = logging.getLogger(__name__)

_MARGIN = "margin"  # TRL's column


class Items:
    """Base of data sets of items by number: their batches, and the look through all of them before a start.

    references_IS: log-probs of all answers by the reference, once they are known; None: 0.
    digest: of the tokens of all answers, once `check_rows` has seen them.
    """

    preference: PreferenceConfig
    sft: SFTConfig
    where: str  # key of the rows, for messages
    references_IS: Tensor | None = None
    digest: str = ""

    def __len__(self) -> int:
        raise NotImplementedError

    def own(self, index: int) -> Item:
        """Return an item without answers to other prompts. Raises ValueError, which names its place."""
        raise NotImplementedError

    def item(self, index: int) -> Item:
        """Return an item with all its answers."""
        item = self.own(index)
        return replace(item, unrelated=self._unrelated(index, item)) if self.preference.loss == "kto" else item

    def _unrelated(self, index: int, item: Item) -> list[Answer]:
        """Put the answers of the row before, whose prompt is another, behind this item's prompt."""
        prompt = _prompt(item.answers[0])
        for back in range(1, len(self)):
            other = self.own((index - back) % len(self))
            if not np.array_equal(prompt, _prompt(other.answers[0])):
                break
        else:
            raise ValueError(f"{self.where}: preference.loss=kto needs answers to two prompts at least")
        own = item.answers[0][0]
        return [[_moved(own, prompt, answer[-1]).cut(slice(self.sft.max_length))] for answer in other.answers]

    def batch(self, indices: Sequence[int], numbers: Sequence[int]) -> Pairs:
        """Make a batch of items, with a number for each that is unique in the run."""
        known, config = self.references_IS, self.preference
        items, known_IS = [self.item(index) for index in indices], None if known is None else known[list(indices)]
        return pairs_of(items, numbers, known_IS, whole=imitation(config)[1], scored=config.loss == "reward")

    def check_rows(self) -> None:
        """Encode every item. Raises ValueError for the first that cannot be used; tells how many teach nothing."""
        found, same, kinds = hashlib.blake2b(digest_size=16), 0, set[bool]()
        for index in range(len(self)):
            item = self.item(index)
            kinds.update(item.good)
            texts = [[row.ids.tobytes() + row.trained.tobytes() for row in answer] for answer in item.all_answers]
            same += len(item.answers) == 2 and texts[0] == texts[1]
            for text in itertools.chain.from_iterable(texts):
                found.update(len(text).to_bytes(8, "little") + text)
        self.digest = found.hexdigest()
        if len(kinds) == 1:
            kind = "good" if kinds.pop() else "bad"
            logger.warning(
                "%s: all %d answers are %s, so nothing tells what makes them so", self.where, len(self), kind
            )
        if same == len(self) and not imitation(self.preference)[0]:
            raise ValueError(
                f"{self.where}: all {same} pairs have two equal answers: are the right columns read, and is "
                f"sft.max_length={self.sft.max_length} long enough for data.truncation?"
            )
        if same:
            logger.warning(
                "%s: %d of %d pairs have two equal answers, which teach nothing", self.where, same, len(self)
            )


class PreferenceDataset(Items, SFTDataset):
    """Data set of the items of files; see SFTDataset. preference: section preference.

    A class of your own (data.custom_cls) may override `messages`, the prompt, and `said`, an answer.
    """

    always_prompts = False

    def __init__(
        self,
        data: DataConfig,
        files: Files,
        tokenizer: Any,
        *,
        split: str,
        sft: SFTConfig,
        preference: PreferenceConfig,
        **options: Any,
    ) -> None:
        self.preference, self.where = preference, f"data.{split}_files"
        self._margin = preference.margin_key or (_MARGIN if preference.loss == "reward" else None)
        forms = {False: (preference.chosen_key, preference.rejected_key)}
        if preference.loss == "kto":
            forms[True] = (preference.completion_key, preference.label_key)
        columns = {*itertools.chain.from_iterable(forms.values()), *([self._margin] if self._margin else [])}
        data, sft = replace(data, messages_key=None), replace(sft, response_key=None, mask_key=None)
        super().__init__(data, files, tokenizer, split=split, sft=sft, more=columns, **options)
        for file in self.files:
            has = f"{file.path} (it has {', '.join(file.rows.columns)})"
            found = [form for form, needed in forms.items() if set(needed) <= set(file.rows.columns)]
            if not found:
                keys = " nor ".join(" and ".join(map(repr, needed)) for needed in forms.values())
                raise ValueError(
                    f"{self.where}: there are no columns {keys} in {has}. preference.chosen_key and "
                    "preference.rejected_key name them; preference.loss=kto also takes preference.completion_key with "
                    "preference.label_key"
                )
            if preference.margin_key is not None and preference.margin_key not in file.rows.columns:
                raise ValueError(f"preference.margin_key={preference.margin_key}: there is no such column in {has}")
            if file is self.files[0]:
                self._labelled = found[0]
            elif found[0] != self._labelled:
                raise ValueError(f"{self.where}: some files hold pairs, others labels: name one kind")

    def __len__(self) -> int:
        return len(self._kept)

    def check_rows(self) -> None:
        """Encode every row; see SFTDataset.check_rows. Rows of which an answer cannot be had are refused."""
        SFTDataset.check_rows(self)
        Items.check_rows(self)

    def _survey(self) -> tuple[list[int], list[bool]]:
        prompts = all(self.data.prompt_key in file.rows.columns for file in self.files)
        return SFTDataset._survey(self) if prompts else ([], [])

    def messages(self, row: dict[str, Any], place: str) -> Messages:
        """Messages of a row's prompt, after data.system_prompt."""
        prompt = row.get(self.data.prompt_key)
        return super().messages({self.data.prompt_key: self._common(row, place) if prompt is None else prompt}, place)

    def said(self, row: dict[str, Any], key: str, place: str) -> Messages:
        """Messages of the answer in a column."""
        cell = _opened(row.get(key))
        if row.get(self.data.prompt_key) is None and cell:
            cell = cell[len(self._common(row, place)) :]
        if not cell:
            raise ValueError(f"the column {key} holds no answer")
        return [{"role": "assistant", "content": cell}] if isinstance(cell, str) else to_messages(cell, place)

    def _common(self, row: dict[str, Any], place: str) -> Messages | str:
        """Find the prompt that both answers of a row without one begin with."""
        keys, column = (self.preference.chosen_key, self.preference.rejected_key), self.data.prompt_key
        one, other = (_opened(row.get(key)) for key in keys)
        if self._labelled or type(one) is not type(other) or not isinstance(one, str | list):
            has = ", ".join(name for name, cell in row.items() if cell is not None)
            raise ValueError(
                f"there is no prompt in the column {column}: name it by data.prompt_key (the row has {has})"
            )
        if isinstance(one, str) and self.encoder.has_template:
            raise ValueError(
                f"{keys[0]} and {keys[1]} are texts, and their prompt is not in a column {column}: name it by "
                "data.prompt_key, or train the texts as they stand, with data.chat_template=none"
            )
        length = sum(1 for _ in itertools.takewhile(lambda two: two[0] == two[1], zip(one, other, strict=False)))
        if one[length - 1 : length] == " ":
            length -= 1  # a space belongs to the word behind it
        if not length or length == min(len(one), len(other)):
            raise ValueError(f"{keys[0]} and {keys[1]} must begin alike, with the prompt, and end otherwise")
        return one[:length]

    def own(self, index: int) -> Item:
        cells = self._cells(int(self._kept[index]))
        good = (bool(cells.get(self.preference.label_key)),) if self._labelled else (True, False)
        return Item(answers=self.answers(index), good=good, margin=float(cells.get(self._margin or "") or 0))

    def _tasks(self, position: int) -> list[Task]:
        """Read what is to be encoded of a row: each answer, behind the prompt (ValueError)."""
        place, row, cells, tasks = self._place(position), self.row(position), self._cells(position), list[Task]()
        margin, config = cells.get(self._margin or ""), self.preference
        if margin is not None and (isinstance(margin, bool) or usable_number(margin) is None):
            raise ValueError(f"{self._margin}={margin!r:.80} must be a number (preference.margin_key)")
        if self._labelled and cells.get(config.label_key) not in (0, 1):
            raise ValueError(f"{config.label_key}={cells.get(config.label_key)!r:.80} must be true or false")
        for key in (config.completion_key,) if self._labelled else (config.chosen_key, config.rejected_key):
            messages = [*row.messages, *self._behind(row.messages, self.said(cells, key, place), key)]
            turns = [turn for turn in trained_turns(messages, None) if turn >= len(row.messages)]
            if not turns:
                raise ValueError(f"{key}: the answer holds no assistant's message to train")
            tasks.append(self._as_task(messages, row.tools, turns, cells))
        return tasks

    def _behind(self, prompt: Messages, said: Messages, key: str) -> Messages:
        """Leave out the prompt where a conversation of the column repeats it. Raises ValueError for another one."""
        own = [message for message in prompt if message["role"] != "system"]
        for start in (prompt, own):
            if start and said[: len(start)] == start:
                return said[len(start) :]
        if prompt[-1]["role"] == "user" and said[0]["role"] in ("system", "user"):
            left_out = "leave the column out (data.prompt_key=none): what both begin with is then the prompt"
            or_else = "" if self._labelled else f", or {left_out}"
            raise ValueError(
                f"{key} begins with a message of the {said[0]['role']}, and not with the prompt in the column "
                f"{self.data.prompt_key}: give the answer alone{or_else}"
            )
        return said

    def _cut(self, answers: list[Answer]) -> list[Answer]:
        found: list[Answer] = [[row for row in answer if row.trained[1:].any()] for answer in super()._cut(answers)]
        if all(found):
            return found
        raise ValueError(f"data.truncation at sft.max_length={self.sft.max_length} leaves nothing of an answer")


def _opened(cell: Any) -> Any:
    """Read messages that are written as JSON."""
    return messages_or_text(cell) if isinstance(cell, str) else cell


def _prompt(answer: Answer) -> np.ndarray:
    """Tokens in front of an answer's first one."""
    return answer[0].ids[: _first(answer[0])]


def _first(row: Row) -> int:
    return int(np.flatnonzero(row.trained[1:])[0]) + 1


def _moved(own: Row, prompt: np.ndarray, row: Row) -> Row:
    """Put another row's answer behind a prompt, which is the beginning of `own`."""
    start = _first(row)
    trained = np.concatenate([np.zeros(len(prompt), bool), row.trained[start:]])
    return replace(own, ids=np.concatenate([prompt, row.ids[start:]]), trained=trained)
