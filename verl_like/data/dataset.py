"""PromptDataset: rows of one or several data files as (prompt tokens, PromptRow)."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import heapq
import itertools
import logging
import time
from array import array
from bisect import bisect_right
from collections.abc import Collection, Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from verl_like.batch import MediaHandle, PromptRow
from verl_like.config import DataConfig, Truncation
from verl_like.data.chat import Conversation, PromptEncoder, encode_all, truncate
from verl_like.data.media import DEFAULT_MEDIA_KEYS, handles, insert_media, media_columns, refuse_tags
from verl_like.data.prompt_truth import Survey, check_file
from verl_like.data.reading import (
    DataFile,
    Files,
    dictionary_of,
    ground_truth_of,
    prompt_column,
    read_files,
    style_of,
    to_messages,
    tools_of,
)
from verl_like.data.rows import whole_of
from verl_like.data.templates import find_system_prompt, find_template
from verl_like.models.images import MediaError
from verl_like.models.videos import look_through
from verl_like.models.vision import VisionProcessor

logger = logging.getLogger(__name__)

SINGLE_TURN = "single_turn_agent"  # verl's agent_name of rows that are answered at once
_SPLITS = ("train", "val")
_LONGEST = 1000  # rows that `check_rows` tokenises
_FIRST, _DECODING_S = 16, 5.0  # rows whose images it decodes before others, and for how long it goes on


class Dataset(Protocol):
    """Data set as the trainer needs it: PromptDataset, or a user's torch data set in `foreign.ForeignDataset`."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> tuple[list[int], PromptRow]: ...

    def reward_styles(self) -> list[tuple[str, str]]:
        """All different (data_source, reward_model.style), sorted: what must have a grader."""
        ...

    def domains(self) -> list[str]:
        """The data source of each row that is left, in order."""
        ...

    def agents(self) -> list[str]:
        """All different agent_name of the rows, sorted; "" of rows without one."""
        ...

    def identity(self) -> dict[str, Any]:
        """Describe the rows that a saved sampler position refers to. JSON-able."""
        ...

    def num_media(self) -> int:
        """Rows with images or videos."""
        ...

    def check_rows(self) -> None:
        """Raise ValueError for a row that cannot be used, as far as a quick look before processes start finds it."""
        ...


class PromptDataset:
    """Data set of the prompts of `files`, in file order, after data.*_max_samples and data.filter_overlong_prompts.

    dataset[i] -> (token ids, PromptRow). Prompts are tokenised when first asked for and kept; with
    data.filter_overlong_prompts all are tokenised at once. PromptRow.index counts the rows of all files, also those
    that were dropped. A class of your own (data.custom_cls) derives from this one and may override `messages` or `row`.

    files: a path, a list, or a dictionary of named validation sets.
    split: "train" or "val": whose max_samples counts (for each named set), and which key messages name.
    seed: used where data.seed is null.
    tools: schemas that the prompts of rows without any (data.tools_key) offer; of them those that
        extra_info.tool_selection names, where a row has it.
    vision: processor of a model that reads images.
    limit_images: most images of one prompt.
    columns: further ones that a derived class reads, answers for instance.
    """

    always_prompts = True  # each file has the prompt's column

    def __init__(
        self,
        data: DataConfig,
        files: Files,
        tokenizer: Any,
        *,
        split: str,
        seed: int = 1,
        tools: Sequence[dict[str, Any]] = (),
        vision: VisionProcessor | None = None,
        limit_images: int | None = None,
        columns: Collection[str] = (),
    ) -> None:
        if split not in _SPLITS:
            raise ValueError(f"split must be one of {_SPLITS}, not {split!r}")
        self.data, self.split, self.tools = data, split, tools
        self._vision, self._limit_images = vision, limit_images
        self.encoder = make_encoder(data, tokenizer)
        self.system_prompt = whole_of(find_system_prompt(data.system_prompt), "data.system_prompt")
        options: dict[str, Any] = {"more": columns, "prompt": self.always_prompts}
        self.files: list[DataFile] = read_files(files, data, key=f"data.{split}_files", **options)
        self._media_keys = {kind: key for kind, key in (("image", data.image_key), ("video", data.video_key)) if key}
        self._media = [media_columns(file.path, file.rows, self._media_keys) for file in self.files]
        self._ends = list(itertools.accumulate(len(file.rows) for file in self.files))
        self._tokens: dict[int, array[int]] = {}  # by position in the files
        self._placed: dict[int, list[MediaHandle]] = {}  # images of these prompts
        max_samples = data.train_max_samples if split == "train" else data.val_max_samples
        self._seed = seed if data.seed is None else data.seed
        self._kept = self._choose(max_samples, self._seed)
        if data.filter_overlong_prompts:
            self._kept = self._drop_overlong(self._kept)
        if len(self._kept) == 0:
            why = f": all are longer than data.max_prompt_length={data.max_prompt_length} tokens"
            why = why if data.filter_overlong_prompts and self._ends[-1] else ""
            raise ValueError(f"data.{split}_files: no prompt is left of {self._ends[-1]} rows{why}")

    def __len__(self) -> int:
        return len(self._kept)

    def __getitem__(self, index: int) -> tuple[list[int], PromptRow]:
        position = int(self._kept[index])
        row = self.row(position)
        if position not in self._tokens:
            try:
                (ids,) = self.encoder.encode([(row.messages, row.tools)])
            except ValueError as error:
                raise ValueError(f"{self._place(position)}: {error}") from error
            self._keep(position, *self._expanded(ids, row, self._place(position)))
        ids, media = self._tokens[position].tolist(), self._placed.get(position, [])
        how = Truncation.error if media else self.data.truncation  # a cut would leave images without their tokens
        ids = truncate(ids, self.data.max_prompt_length, how, self._place(position))
        return ids, dataclasses.replace(row, begun=self.encoder.begun(row.messages) or "", media=media or row.media)

    def without_media(self, index: int) -> tuple[list[int], PromptRow]:
        """A prompt whose images or videos cannot be used, as its template writes it: for the record."""
        row = self.row(int(self._kept[index]))
        (ids,) = self.encoder.encode([(row.messages, row.tools)])
        return ids[: self.data.max_prompt_length], dataclasses.replace(row, media=[])

    def _keep(self, position: int, ids: list[int], media: list[MediaHandle]) -> None:
        self._tokens[position] = array("i", ids)
        if media:
            self._placed[position] = media

    def _expanded(self, ids: list[int], row: PromptRow, place: str) -> tuple[list[int], list[MediaHandle]]:
        """The prompt's tokens with those of its images, and the images with their places."""
        if self._vision is None:
            return ids, row.media
        num_images = sum(handle.kind == "image" for handle in row.media)
        if self._limit_images is not None and num_images > self._limit_images:
            raise ValueError(
                f"{place} has {num_images} images, more than actor_rollout_ref.rollout.limit_images="
                f"{self._limit_images}: raise it, or leave the row out"
            )
        try:
            return self._vision.expand(ids, row.media, self.data.max_image_megapixels)
        except MediaError:
            raise
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from error

    def row(self, position: int) -> PromptRow:
        """The row at a position of the files, without its tokens."""
        number, offset = self._locate(position)
        file, place = self.files[number], self._place(position)
        row = file.rows.row(offset)
        media = handles(file.path, self._media[number], row, offset)
        messages = self.messages(row, place)
        # A name that was given is meant, and so is any by a model that sees; else <image> without a column is text
        sees = self._vision is not None
        meant = {k: c for k, c in self._media_keys.items() if sees or c != DEFAULT_MEDIA_KEYS[k]}
        refuse_tags(messages, {k: c for k, c in meant.items() if c not in file.rows.columns}, place)
        tags = self._media_keys if media else {k: c for k, c in meant.items() if c in file.rows.columns}
        messages = insert_media(messages, media, tags, place) if tags else messages
        tools = self._tools(row, place)
        return PromptRow(
            index=position,
            data_source=source_of(row, self.data),
            messages=messages,
            ground_truth=ground_truth_of(row, place, self.data.ground_truth_key),
            ability=str(row.get("ability") or ""),
            extra_info=self._extra_info(row, (messages, tools), place),
            style=style_of(row),
            prompt_id=None if self.data.prompt_id_key is None else str(row.get(self.data.prompt_id_key)),
            validation_set=file.name,
            tools=tools,
            agent=str(row.get("agent_name") or ""),
            media=media,
        )

    def _tools(self, row: dict[str, Any], place: str) -> list[dict[str, Any]] | None:
        own = None if self.data.tools_key is None else tools_of(row, self.data.tools_key, place)
        if own is not None or not self.tools or row.get("agent_name") not in (None, "", "tool_agent"):
            return own
        chosen = dictionary_of(row, "extra_info", place).get("tool_selection")
        if chosen is not None and not (isinstance(chosen, list) and all(isinstance(name, str) for name in chosen)):
            raise ValueError(f"{place}: extra_info.tool_selection={chosen!r:.100} must be a list of names of tools")
        if not chosen:
            return list(self.tools)
        known = {tool["function"]["name"]: tool for tool in self.tools}
        return [known[name] for name in chosen if name in known] or None

    def messages(self, row: dict[str, Any], place: str) -> list[dict[str, Any]]:
        """Chat messages of a row, after data.system_prompt. `place` names the row in error messages."""
        messages = to_messages(row.get(prompt_column(self.data)[0]), place)
        if self.system_prompt is None or messages[0]["role"] == "system":
            return messages
        return [{"role": "system", "content": self.system_prompt}, *messages]

    def domains(self) -> list[str]:
        """List the data source of each row that is left, in order."""
        return [self._sources[position] for position in self._kept]

    def agents(self) -> list[str]:
        """List all agent names of the rows, sorted."""
        columns = [f.rows.column("agent_name") for f in self.files if "agent_name" in f.rows.columns]
        return sorted({str(name or "") for column in columns for name in column})

    def extras(self, name: str) -> Iterator[tuple[str, Any]]:
        """Place and extra_info.<name> of each used row, as its file has them."""
        return self._used([file.rows.subcolumn("extra_info", name) for file in self.files])

    def column(self, name: str) -> Iterator[tuple[str, Any]]:
        """Place and value in a column of each used row; None where its file has no such column."""
        every = [file.rows for file in self.files]
        return self._used([rows.column(name) if name in rows.columns else [None] * len(rows) for rows in every])

    def _used(self, cells: Sequence[Sequence[Any]]) -> Iterator[tuple[str, Any]]:
        for position in self._kept.tolist():
            number, offset = self._locate(position)
            yield self._place(position), cells[number][offset]

    def reward_styles(self) -> list[tuple[str, str]]:
        """All different (data_source, reward_model.style) of the files, sorted: what must have a grader."""
        styles = [str(style or "") for file in self.files for style in file.rows.subcolumn("reward_model", "style")]
        return sorted(set(zip(self._sources, styles, strict=True)))

    def without_ground_truth(self) -> Iterator[tuple[DataFile, list[int], int]]:
        """Yield each file, those of its used rows that have no reference answer, and the number of its used rows."""
        for file, end in zip(self.files, self._ends, strict=True):
            rows = self._kept - (end - len(file.rows))
            used = rows[(rows >= 0) & (rows < len(file.rows))]
            missing = np.intersect1d(used, np.array(file.without_ground_truth(self.data.ground_truth_key), dtype=int))
            yield file, missing.tolist(), len(used)

    def identity(self) -> dict[str, Any]:
        """Describe the files' content and the rows kept of it."""
        kept = hashlib.blake2b(np.ascontiguousarray(self._kept).tobytes(), digest_size=16).hexdigest()
        return {"files": [file.identity() for file in self.files], "rows": len(self), "kept": kept}

    def check_rows(self) -> None:
        """Check that prompts say what their rows say (`prompt_truth`), and encode the rows most likely to fail.

        These are the first row, the first whose text has <image> or <video>, and with data.truncation=error those with
        the longest texts (unless a filter has seen all rows).
        """
        lengths, tagged = self._survey()
        chosen = {0, *itertools.islice((i for i, position in enumerate(self._kept) if tagged[position]), 1)}
        if self.data.truncation == "error" and not self.data.filter_overlong_prompts:
            chosen |= set(heapq.nlargest(_LONGEST, range(len(self)), key=lambda i: lengths[self._kept[i]]))
        for index in sorted(chosen):
            self[index]
        self._look_through_media()

    def _survey(self) -> tuple[list[int], list[bool]]:
        """Look through the prompts' texts; by position in the files, their lengths, and whether they name media.

        Raises ValueError for a prompt, of some, that is not what its row says.
        """
        tags = [f"<{kind}>" for kind in self._media_keys]
        lengths, tagged = list[int](), list[bool]()
        for file in self.files:
            survey, first = Survey(self.encoder, own_tools=self.data.tools_key is not None), len(lengths)
            for cell in file.rows.column(prompt_column(self.data)[0]):
                text = str(cell)
                survey.add(len(lengths), cell, text)
                lengths.append(len(text))
                tagged.append(any(tag in text for tag in tags))
            kept = self._kept[(self._kept >= first) & (self._kept < len(lengths))].tolist()
            check_file(str(file.path), survey, kept, self._conversation, seed=self._seed)
        return lengths, tagged

    def _look_through_media(self) -> None:
        """Decode images and videos: of the first rows, then of random others, as many as _DECODING_S are enough for.

        Raises MediaError, which counts them, for those that are damaged behind their headers.
        """
        rows = [int(position) for position in self._kept if self._has_media(int(position))]
        rows[_FIRST:] = np.random.default_rng(0).permutation(rows[_FIRST:]).tolist()
        end, done, damaged = time.monotonic() + _DECODING_S, 0, list[MediaError]()
        for position in rows if self._vision is not None else ():
            done += 1
            try:
                look_through(self.row(position).media, self.data.max_image_megapixels)
            except MediaError as error:
                damaged.append(error)
            if time.monotonic() > end:
                break
        if damaged:
            what = f"{len(damaged)} of the {done} rows of data.{self.split}_files whose images were decoded are damaged"
            raise MediaError(f"{what} ({len(rows)} have some): leave them out. The first: {damaged[0]}")

    def _conversation(self, position: int) -> tuple[Conversation, str]:
        row = self.row(position)
        return (row.messages, row.tools), self._place(position)

    def num_media(self) -> int:
        """Count the rows with images or videos."""
        return sum(self._has_media(int(position)) for position in self._kept)

    def _has_media(self, position: int) -> bool:
        number, offset = self._locate(position)
        return any(columns.counts[offset] for columns in self._media[number])

    @functools.cached_property
    def _sources(self) -> list[str]:
        """The data source of each row of the files."""
        key, default = self.data.reward_fn_key, self.data.default_data_source
        columns = [f.rows.column(key) if key in f.rows.columns else [None] * len(f.rows) for f in self.files]
        return [default if value is None else str(value) for column in columns for value in column]

    def _extra_info(self, row: dict[str, Any], conversation: Conversation, place: str) -> dict[str, Any]:
        """The row's extra_info and what data.return_* and data.prompt_id_key add to it, under verl's names."""
        data, extra = self.data, dict(dictionary_of(row, "extra_info", place))
        if data.return_raw_chat:
            extra["raw_prompt"] = conversation[0]
        if data.return_full_prompt:
            extra["full_prompts"] = self.encoder.render(conversation)
        if data.return_raw_input_ids:
            text = "\n".join(str(message.get("content", "")) for message in conversation[0])
            extra["raw_input_ids"] = self.encoder.encode_text(self.encoder.marked(text))
        if data.prompt_id_key is not None:
            extra |= self._prompt_id(str(row.get(data.prompt_id_key)), place)
        return extra

    def _prompt_id(self, prompt_id: str, place: str) -> dict[str, Any]:
        if self.data.max_prompt_id_length is None:
            return {"prompt_id": prompt_id}
        ids = self.encoder.encode_text(self.encoder.marked(prompt_id))
        if len(ids) > self.data.max_prompt_id_length:
            raise ValueError(
                f"{place}: the prompt id {prompt_id[:80]!r} has {len(ids)} tokens, more than "
                f"data.max_prompt_id_length={self.data.max_prompt_id_length}; raise it"
            )
        return {"prompt_id": prompt_id, "prompt_id_ids": ids}

    def _locate(self, position: int) -> tuple[int, int]:
        """Return the number of the file, and the row in it."""
        number = bisect_right(self._ends, position)
        return number, position - (self._ends[number - 1] if number else 0)

    def _place(self, position: int) -> str:
        number, offset = self._locate(position)
        return f"{self.files[number].path}, row {offset}"

    def _choose(self, max_samples: int, seed: int) -> np.ndarray:
        """All rows, or max_samples of each named set: the first ones, or random ones when data.shuffle is on."""
        sets: dict[str, list[np.ndarray]] = {}
        for file, end in zip(self.files, self._ends, strict=True):
            sets.setdefault(file.name, []).append(np.arange(end - len(file.rows), end))
        return np.concatenate([self._limit(np.concatenate(parts), max_samples, seed) for parts in sets.values()])

    def _limit(self, positions: np.ndarray, max_samples: int, seed: int) -> np.ndarray:
        if max_samples < 0 or max_samples >= len(positions):
            return positions
        if not self.data.shuffle:
            return positions[:max_samples]
        return np.random.default_rng(seed).choice(positions, size=max_samples, replace=False)

    def _drop_overlong(self, positions: np.ndarray) -> np.ndarray:
        rows = [self.row(int(position)) for position in positions]
        conversations: list[Conversation] = [(row.messages, row.tools) for row in rows]
        workers = self.data.filter_overlong_prompts_workers
        try:
            all_ids = encode_all(self.encoder, conversations, num_workers=workers)
        except ValueError:
            for index in range(len(positions)):
                self[index]  # the row that cannot be used is named
            raise
        encoded = [
            self._expanded(ids, row, self._place(int(position)))
            for ids, row, position in zip(all_ids, rows, positions, strict=True)
        ]
        fits = np.array([len(ids) <= self.data.max_prompt_length for ids, _ in encoded], dtype=bool)
        for position, kept, ok in zip(positions, encoded, fits, strict=True):
            if ok:
                self._keep(int(position), *kept)
        logger.info(
            "data.%s_files: %d of %d prompts are longer than data.max_prompt_length=%d tokens and were dropped",
            *(self.split, int((~fits).sum()), len(positions), self.data.max_prompt_length),
        )
        return positions[fits]


def make_encoder(data: DataConfig, tokenizer: Any) -> PromptEncoder:
    """The encoder that data.chat_template and data.apply_chat_template_kwargs ask for."""
    template = "" if data.chat_template == "none" else find_template(data.chat_template)
    kwargs, spelled = data.apply_chat_template_kwargs, data.special_tokens_in_text
    return PromptEncoder(tokenizer, kwargs, template, spelled, continues=data.continue_final_message)


def source_of(row: dict[str, Any], data: DataConfig) -> str:
    """The data source of a row, or data.default_data_source."""
    source = row.get(data.reward_fn_key)
    return data.default_data_source if source is None else str(source)
