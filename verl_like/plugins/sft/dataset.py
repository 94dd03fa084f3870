"""Data of a supervised run: rows of files as conversations with their answers, and batches of them."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from verl_like.batch import Experience, PromptRow
from verl_like.config import DataConfig
from verl_like.config.paths import Files
from verl_like.config.sft import SFTConfig
from verl_like.data.chat import CHUNK, Conversation, Messages, in_processes
from verl_like.data.dataset import PromptDataset
from verl_like.data.loader import PromptLoader
from verl_like.data.reading import to_messages, tools_of
from verl_like.models.vision import VisionProcessor
from verl_like.plugins.sft.experience import experience_of
from verl_like.plugins.sft.row_report import RowReport
from verl_like.plugins.sft.turns import Answer, Row, Task, Tools, as_rendered, attempt, encoded, fitted, placed

logger = logging.getLogger(__name__)

_TOOLS = "tools"  # verl's column of tool schemas, which files may have
_PARTS = {"history", "input", "system"}  # columns that public data sets have beside a prompt
_MANY = 20_000  # rows whose encoding is announced: about a millisecond each
_KEPT = 2**25  # tokens of conversations that stay in memory, with 64 for what each row needs: about 200 MB
_IMAGES = 2**14  # that the images of one stand for


class SFTDataset(PromptDataset):
    """Data set of conversations that hold the answers; `rows` gives what is trained of one.

    Arguments: see PromptDataset; sft: section sft; more: further columns, of a derived class. A class of your own
    (data.custom_cls) may override `messages`.
    """

    def __init__(
        self,
        data: DataConfig,
        files: Files,
        tokenizer: Any,
        *,
        split: str,
        sft: SFTConfig,
        seed: int = 1,
        vision: VisionProcessor | None = None,
        more: Collection[str] = (),
    ) -> None:
        self.sft, self._answers, self._size = sft, dict[int, list[Answer]](), 0
        named = (sft.response_key, sft.mask_key, sft.enable_thinking_key, _TOOLS)
        columns = {*more, *(name for name in named if name is not None)}
        super().__init__(data, files, tokenizer, split=split, seed=seed, vision=vision, columns=columns)
        self.encoder.continues = False
        for file, key in itertools.product(self.files, ("response_key", "mask_key")):
            if (name := getattr(sft, key)) is not None and name not in file.rows.columns:
                there = ", ".join(file.rows.columns)
                raise ValueError(f"sft.{key}={name}: {file.path} has no such column (it has: {there})")
        name, there = sft.enable_thinking_key, sorted({each for file in self.files for each in file.rows.columns})
        if unread := sorted({*there} & _PARTS - columns - {data.prompt_key, data.messages_key}):
            told = "data.%s_files: the columns %s are not read: put what they say into the prompt, if it belongs there"
            logger.warning(told, split, ", ".join(unread))
        if split == "train" and self.files and name not in ("", SFTConfig().enable_thinking_key, *there):
            raise ValueError(
                f"sft.enable_thinking_key={name}: no file has such a column (they have: {', '.join(there)})"
            )

    def messages(self, row: dict[str, Any], place: str) -> Messages:
        """Messages of a row, the answer with them, after data.system_prompt."""
        if self.sft.response_key is None:
            return super().messages(row, place)
        prompt = _inside(row, self.data.prompt_key, self.sft.prompt_dict_keys, "sft.prompt_dict_keys", place)
        answer = _inside(row, self.sft.response_key, self.sft.response_dict_keys, "sft.response_dict_keys", place)
        messages = super().messages({self.data.prompt_key: prompt}, place)
        return [*messages, *([{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer)]

    def __getitem__(self, index: int) -> tuple[list[int], PromptRow]:
        """Tokens of the last row of the first answer, and the row of the data."""
        answer = self.answers(index)[0]
        return answer[-1].ids.tolist() if answer else [], self.row(int(self._kept[index]))

    def answers(self, index: int) -> list[Answer]:
        """Rows of a conversation, cut to sft.max_length, by answer: here there is one.

        Raises ValueError, which names its place in the files.
        """
        position = int(self._kept[index])
        if position not in self._answers:
            found = encoded(self.encoder, [attempt(self._tasks, position)])[0]
            try:
                self._remember(position, self._cut(self._whole(position, found)))
            except ValueError as error:
                place = self._place(position)
                raise ValueError(f"{place}: {str(error).removeprefix(f'{place}: ')}") from error
        return self._answers[position]

    def rows(self, index: int) -> list[Row]:
        """Rows of all answers; see `answers`."""
        return [row for answer in self.answers(index) for row in answer]

    def batch(self, indices: Sequence[int], numbers: Sequence[int]) -> Experience:
        """Make a batch of conversations, with a number for each that is unique in the run."""
        return experience_of([self.rows(index) for index in indices], numbers)

    def _tasks(self, position: int) -> list[Task]:
        """Read what is to be encoded of a row for each answer, and what of it is trained (ValueError)."""
        row, cells = self.row(position), self._cells(position)
        mask = cells.get(self.sft.mask_key or "")
        if self.sft.mask_key is not None and mask is None:
            raise ValueError(f"sft.mask_key={self.sft.mask_key}: the row has no mask")
        return [self._as_task(row.messages, row.tools, trained_turns(row.messages, mask), cells)]

    def _as_task(self, messages: Messages, tools: Tools, turns: list[int], cells: dict[str, Any]) -> Task:
        """Make a task of a conversation, with the template's variables of its row."""
        name = self.sft.enable_thinking_key
        if (thinks := cells.get(name)) not in (None, 0, 1):
            raise ValueError(f"sft.enable_thinking_key={name}: {thinks!r} must be true or false")
        messages = [{k: v for k, v in message.items() if k != "train"} for message in messages]
        return Task(messages, tools, turns, {} if thinks is None else {"enable_thinking": bool(thinks)})

    def _whole(self, position: int, found: list[Answer] | str) -> list[Answer]:
        """Answers before they are cut, with their images. Raises ValueError where they could not be encoded."""
        if isinstance(found, str):
            raise ValueError(found)
        if self._vision is None or not self._has_media(position):
            return found
        media = self.row(position).media
        size = self.data.max_image_megapixels
        return [[placed(row, media, self._vision, size) for row in answer] for answer in found]

    def _cut(self, answers: list[Answer]) -> list[Answer]:
        """Cut answers to sft.max_length; data.truncation=error raises ValueError for a longer one."""
        longest, how = self.sft.max_length, self.data.truncation
        return [[fitted(row, longest, how) for row in answer] for answer in answers]

    def _remember(self, position: int, answers: list[Answer]) -> None:
        """Keep answers for the next time they are asked for, instead of the oldest; the newest always."""
        self._size += _size(answers) - _size(self._answers.pop(position, []))
        self._answers[position] = answers
        while self._size > _KEPT and len(self._answers) > 1:
            self._size -= _size(self._answers.pop(next(iter(self._answers))))

    def name_of(self, index: int) -> str:
        """Name of the validation set of a row, or its data source."""
        row = self.row(int(self._kept[index]))
        return row.validation_set or row.data_source

    def _tools(self, row: dict[str, Any], place: str) -> list[dict[str, Any]] | None:
        if self.data.tools_key is None and row.get(_TOOLS) is not None:
            return tools_of(row, _TOOLS, place)
        return super()._tools(row, place)

    def _cells(self, position: int) -> dict[str, Any]:
        number, offset = self._locate(position)
        return self.files[number].rows.row(offset)

    def _conversation(self, position: int) -> tuple[Conversation, str]:
        return as_rendered(self.encoder, self._tasks(position)[0]), self._place(position)

    def _drop_overlong(self, positions: np.ndarray) -> np.ndarray:
        return positions  # `check_rows` does, by sft.max_length

    def check_rows(self) -> None:
        """Encode every row, and leave out those of which nothing is trained, which is told with their number.

        Linear in the text, in data.filter_overlong_prompts_workers processes. With data.filter_overlong_prompts rows
        longer than sft.max_length are left out too.

        Raises ValueError, which counts them and names some of each kind, for rows that cannot be used, and where none
        is left.
        """
        key, kept = f"data.{self.split}_files", list[bool]()
        report = RowReport(key, len(self), self.sft.max_length, self.data, [*self.encoder.special.ids.values()])
        for position, found in self._all_rows():
            place = self._place(position)
            try:
                answers = report.kept(place, self._whole(position, found), self._cut)
                kept.append(answers is not None)
                if answers is not None:
                    self._remember(position, answers)
            except ValueError as error:
                report.refuse(place, error)
                kept.append(False)
        report.tell()
        self._kept = self._kept[np.array(kept)]
        self._survey()
        self._look_through_media()

    def _all_rows(self) -> Iterator[tuple[int, Any]]:
        """Yield each position with its rows before they are cut, or with what is wrong."""
        positions, workers = self._kept.tolist(), self.data.filter_overlong_prompts_workers
        if len(positions) > _MANY:
            what = "data.%s_files: all %d rows are encoded first (data.filter_overlong_prompts_workers=%d)"
            logger.info(what, self.split, len(positions), workers)
        chunks = [positions[i : i + CHUNK] for i in range(0, len(positions), CHUNK)]
        tasks = ([attempt(self._tasks, position) for position in chunk] for chunk in chunks)
        done = in_processes(partial(encoded, self.encoder), tasks, num_workers=min(workers, len(chunks)))
        for chunk, found in zip(chunks, done, strict=True):
            yield from zip(chunk, found, strict=True)


def _size(answers: Sequence[Answer]) -> int:
    """Room in `_KEPT` that answers take."""
    return sum(len(row.ids) + 64 + _IMAGES * bool(row.media) for answer in answers for row in answer)


def batches_of(dataset: Any, size: int | None) -> Iterator[tuple[Any, dict[int, str]]]:
    """Yield all rows of a data set in batches of `size` (None: one), with their `name_of` by number."""
    for start in range(0, len(dataset), size or len(dataset)):
        numbers = range(start, min(len(dataset), start + (size or len(dataset))))
        yield dataset.batch(numbers, numbers), {number: dataset.name_of(number) for number in numbers}


def trained_turns(messages: Messages, mask: Any) -> list[int]:
    """List the positions of the assistant's messages that are trained.

    mask: one truth value for each message, from the row; None: those of `train` in the messages, or else all.
    Raises ValueError for a mask of another length, or one that asks for a message of somebody else.
    """
    own = [number for number, message in enumerate(messages) if message.get("role") == "assistant"]
    if mask is None:
        if odd := [message["train"] for message in messages if message.get("train", True) not in (0, 1)]:
            raise ValueError(f"a message has train={odd[0]!r}: it must be true or false")
        return [number for number in own if messages[number].get("train", True)]
    flags = mask if isinstance(mask, list) else [mask]
    if len(flags) != len(messages) or not all(flag in (0, 1) for flag in flags):
        raise ValueError(f"the mask {str(flags)[:100]} must have one of 0 and 1 for each of {len(messages)} messages")
    chosen = [number for number, flag in enumerate(flags) if flag]
    if not set(chosen) <= set(own):
        raise ValueError(f"the mask asks for the messages {chosen}, but the assistant's are {own}")
    return chosen


def _inside(row: Mapping[str, Any], column: str, names: Sequence[str] | None, key: str, place: str) -> Any:
    """Follow names into a cell that holds dictionaries. Raises ValueError where one is not there."""
    value = row.get(column)
    for name in names or ():
        if not isinstance(value, Mapping) or name not in value:
            raise ValueError(f"{place}: {key}={list(names or ())}: {column} has no {name!r}, but {str(value)[:100]}")
        value = value[name]
    if value is None:
        raise ValueError(f"{place}: the column {column} is empty")
    if not isinstance(value, str | list | dict):
        raise ValueError(f"{place}: the column {column} must hold a text or chat messages, not {value!r:.100}")
    return value if isinstance(value, str) else to_messages(value, place)


class Batches:
    """Source of training batches, with its place in the data for checkpoints.

    dataset: `SFTDataset`, or another whose `batch` makes a batch of rows by number.
    """

    def __init__(self, loader: PromptLoader, dataset: Any) -> None:
        self.loader, self.dataset = loader, dataset

    def next_batch(self) -> Experience:
        """Draw the next data.train_batch_size conversations."""
        return self.dataset.batch(*self.loader.places())

    def trained(self) -> None:
        """Do nothing: all that is drawn is trained in the same step."""

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's place."""
        return self.loader.state_dict()

    def load_state_dict(self, state: dict[str, Any], folder: Path) -> None:
        """Go on with the very next row. Raises ValueError where the data are others."""
        self.loader.load_state_dict(state)

    def save_under_way(self, folder: Path) -> None:
        """Do nothing: nothing is under way between steps."""
