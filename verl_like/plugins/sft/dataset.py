"""Data of a supervised run: rows of files as conversations with their answers, and batches of them."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from verl_like.batch import Experience, PromptRow
from verl_like.config import DataConfig
from verl_like.config.paths import Files
from verl_like.config.sft import SFTConfig
from verl_like.data.chat import Messages, PromptEncoder
from verl_like.data.dataset import PromptDataset
from verl_like.data.loader import PromptLoader
from verl_like.data.reading import to_messages, tools_of
from verl_like.models.vision import VisionProcessor
from verl_like.plugins.sft.experience import experience_of
from verl_like.plugins.sft.turns import Row, fitted, placed, rows_of

_TOOLS = "tools"  # verl's column of tool schemas, which files may have
_KEPT = 2048  # conversations whose tokens (and images) stay in memory: those of a batch are asked for more than once
_QUICK_LOOK = 1000  # rows with the longest texts that are encoded before processes start


class SFTDataset(PromptDataset):
    """Data set of conversations that hold the answers; `rows` gives what is trained of one.

    Arguments: see PromptDataset; sft: section sft. A class of your own (data.custom_cls) may override `messages`.
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
    ) -> None:
        self.sft, self._rows = sft, dict[int, list[Row]]()
        named = (sft.response_key, sft.mask_key, sft.enable_thinking_key, _TOOLS)
        columns = {name for name in named if name is not None}
        super().__init__(data, files, tokenizer, split=split, seed=seed, vision=vision, columns=columns)
        self.encoder.continues = False
        for file, name in itertools.product(self.files, (sft.response_key, sft.mask_key)):
            if name is not None and name not in file.rows.columns:
                key, there = "response_key" if name == sft.response_key else "mask_key", ", ".join(file.rows.columns)
                raise ValueError(f"sft.{key}={name}: {file.path} has no such column (it has: {there})")

    def messages(self, row: dict[str, Any], place: str) -> Messages:
        """Messages of a row, the answer with them, after data.system_prompt."""
        if self.sft.response_key is None:
            return super().messages(row, place)
        prompt = _inside(row, self.data.prompt_key, self.sft.prompt_dict_keys, "sft.prompt_dict_keys", place)
        answer = _inside(row, self.sft.response_key, self.sft.response_dict_keys, "sft.response_dict_keys", place)
        messages = super().messages({self.data.prompt_key: prompt}, place)
        return [*messages, *([{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer)]

    def __getitem__(self, index: int) -> tuple[list[int], PromptRow]:
        """Tokens of the last row of a conversation, and the conversation."""
        rows = self.rows(index)
        return rows[-1].ids.tolist() if rows else [], self.row(int(self._kept[index]))

    def rows(self, index: int) -> list[Row]:
        """Rows of a conversation, cut to sft.max_length. Raises ValueError, which names its place in the files."""
        position = int(self._kept[index])
        if position not in self._rows:
            place, row = self._place(position), self.row(position)
            cells = self._cells(position)
            try:
                turns = trained_turns(row.messages, cells.get(self.sft.mask_key or ""))
                messages = [{k: v for k, v in message.items() if k != "train"} for message in row.messages]
                encoder = self._thinking(cells.get(self.sft.enable_thinking_key))
                found = rows_of(encoder, messages, row.tools, turns) if turns else []
                if self._vision is not None and row.media:
                    found = [placed(each, row.media, self._vision, self.data.max_image_megapixels) for each in found]
            except ValueError as error:
                raise ValueError(f"{place}: {error}") from error
            self._rows[position] = [fitted(each, self.sft.max_length, self.data.truncation, place) for each in found]
            if len(self._rows) > _KEPT:
                del self._rows[next(iter(self._rows))]
        return self._rows[position]

    def batches(self, size: int | None) -> Iterator[tuple[Experience, list[str]]]:
        """Yield all rows, each batch with the names of the validation sets or data sources of its rows.

        size: conversations of a batch; None: all at once.
        """
        for start in range(0, len(self), size or len(self)):
            numbers = range(start, min(len(self), start + (size or len(self))))
            batch = experience_of([self.rows(number) for number in numbers], list(numbers))
            if len(batch):
                rows = {number: self.row(int(self._kept[number])) for number in numbers}
                yield batch, [rows[n].validation_set or rows[n].data_source for n in batch.group_B.tolist()]

    def _tools(self, row: dict[str, Any], place: str) -> list[dict[str, Any]] | None:
        if self.data.tools_key is None and row.get(_TOOLS) is not None:
            return tools_of(row, _TOOLS, place)
        return super()._tools(row, place)

    def _cells(self, position: int) -> dict[str, Any]:
        number, offset = self._locate(position)
        return self.files[number].rows.row(offset)

    def _thinking(self, value: Any) -> PromptEncoder:
        """Return the encoder with the template's enable_thinking of one row."""
        if value is None:
            return self.encoder
        encoder = copy.copy(self.encoder)
        encoder.template_kwargs = encoder.template_kwargs | {"enable_thinking": bool(value)}
        return encoder

    def check_rows(self) -> None:
        """Encode the rows most likely to fail: the first, and those with the longest texts."""
        column = self.data.messages_key or self.sft.response_key or self.data.prompt_key
        texts = [len(str(cell)) for file in self.files for cell in file.rows.column(column)]
        longest = sorted(range(len(self)), key=lambda index: -texts[int(self._kept[index])])[:_QUICK_LOOK]
        if not any(row.trained[1:].any() for index in {0, *longest} for row in self.rows(index)):
            raise ValueError(
                f"data.{self.split}_files: no token of the rows is trained: there is no assistant's message in "
                f"{column}, or sft.mask_key, `train: false` or sft.max_length={self.sft.max_length} leave none"
            )
        self._look_through_media()


def trained_turns(messages: Messages, mask: Any) -> list[int]:
    """List the positions of the assistant's messages that are trained.

    mask: one truth value for each message, from the row; None: those of `train` in the messages, or else all.
    Raises ValueError for a mask of another length, or one that asks for a message of somebody else.
    """
    own = [number for number, message in enumerate(messages) if message.get("role") == "assistant"]
    if mask is None:
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
    return value if isinstance(value, str) else to_messages(value, place)


class Batches:
    """Source of training batches, with its place in the data for checkpoints."""

    def __init__(self, loader: PromptLoader, dataset: SFTDataset) -> None:
        self.loader, self.dataset = loader, dataset

    def next_batch(self) -> Experience:
        """Draw the next data.train_batch_size conversations."""
        drawn = self.loader.draw()
        return experience_of(
            [self.dataset.rows(prompt.position) for prompt in drawn], [prompt.group for prompt in drawn]
        )

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
