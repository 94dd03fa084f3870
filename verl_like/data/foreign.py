"""Classes of the user's: a data set (data.custom_cls), derived from PromptDataset or any torch data set of verl rows.

verl's own data sets are built as cls(data_files=, tokenizer=, processor=, config=) and give one dictionary a row. Of it
we use: raw_prompt_ids, or input_ids with attention_mask, or raw_prompt (chat messages), or the column data.prompt_key;
data_source, reward_model, ability, extra_info, index.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from typing import Any

from verl_like.batch import PromptRow
from verl_like.config import DataConfig
from verl_like.config.paths import Files, named_files
from verl_like.data.chat import truncate
from verl_like.data.dataset import Dataset, PromptDataset, make_encoder, source_of
from verl_like.data.reading import dictionary_of, ground_truth_of, prompt_column, read_files, style_of, to_messages
from verl_like.data.rows import whole_of
from verl_like.data.storage import localize
from verl_like.models.vision import VisionProcessor
from verl_like.user_code import check_call, load_class

logger = logging.getLogger(__name__)
_KEYS = {"path_key": "data.custom_cls.path", "name_key": "data.custom_cls.name"}


def build_custom(
    data: DataConfig, files: Files, tokenizer: Any, *, split: str, seed: int, tools: Sequence[dict[str, Any]] = ()
) -> Dataset:
    """The class of data.custom_cls, constructed as PromptDataset is, or as verl does and wrapped."""
    cls = load_class(str(data.custom_cls.path), data.custom_cls.name, **_KEYS)
    if issubclass(cls, PromptDataset):
        keywords: dict[str, Any] = {"split": split, "seed": seed, **data.custom_cls.kwargs}
        keywords |= {"tools": tools} if tools else {}
        check_call(cls, f"data.custom_cls={cls.__name__}", "data", "files", "tokenizer", keywords=keywords)
        return cls(data, files, tokenizer, **keywords)
    if tools:
        raise ValueError(
            f"data.custom_cls.name={cls.__name__} with rollout.multi_turn.enable=True: only a class derived from "
            "verl_like.data.dataset.PromptDataset can show the tools in its prompts"
        )
    missing = [name for name in ("__len__", "__getitem__") if not hasattr(cls, name)]
    if missing:
        raise ValueError(
            f"data.custom_cls: {data.custom_cls.path} must define {cls.__name__} as a class derived from "
            f"verl_like.data.dataset.PromptDataset, or as a torch data set; it has no {', '.join(missing)}"
        )
    return ForeignDataset(cls, data, files, tokenizer, split=split)


def build_dataset(
    data: DataConfig,
    files: Files,
    tokenizer: Any,
    *,
    split: str,
    seed: int = 1,
    tools: Sequence[dict[str, Any]] = (),
    vision: VisionProcessor | None = None,
    limit_images: int | None = None,
) -> Dataset:
    """The data set of a split: PromptDataset, whose arguments these are, or the class of data.custom_cls."""
    if data.custom_cls.path is None:
        options = {"vision": vision, "limit_images": limit_images}
        return PromptDataset(data, files, tokenizer, split=split, seed=seed, tools=tools, **options)
    return build_custom(data, files, tokenizer, split=split, seed=seed, tools=tools)


def check_files(data: DataConfig, files: Files, split: str) -> None:
    """Check what of a data set needs no tokenizer: its files, or its class. Raises ValueError."""
    if data.custom_cls.path is None:
        read_files(files, data, key=f"data.{split}_files")
    else:
        load_class(data.custom_cls.path, data.custom_cls.name, **_KEYS)


class AttributeDict(dict[str, Any]):
    """A dictionary whose items are attributes too: what verl's data sets take for their OmegaConf configuration."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError as error:
            raise AttributeError(name) from error


def as_attributes(node: Any) -> Any:
    """Configuration dataclasses as AttributeDicts, all the way down."""
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        return AttributeDict({f.name: as_attributes(getattr(node, f.name)) for f in dataclasses.fields(node)})
    if isinstance(node, dict):
        return AttributeDict({key: as_attributes(value) for key, value in node.items()})
    return str(node) if isinstance(node, str) else node


def section_of(data: DataConfig) -> AttributeDict:
    """Make the `data.*` that classes of the user's get: keys of data.extra stand beside ours."""
    return AttributeDict(as_attributes(data.extra) | as_attributes(data))


class ForeignDataset:
    """A torch data set of verl's row dictionaries, seen as (prompt tokens, PromptRow)."""

    def __init__(self, cls: type, data: DataConfig, files: Files, tokenizer: Any, *, split: str) -> None:
        self.data, self.split = data, split
        self.encoder = make_encoder(data, tokenizer)
        options = {"cache_dir": data.cache_dir, "use_shm": data.use_shm, "key": f"data.{split}_files"}
        self.paths = [localize(path, **options) for _, path in named_files(files)]
        arguments = {
            "data_files": [str(path) for path in self.paths],
            "tokenizer": tokenizer,
            "processor": None,
            "config": section_of(data),
            **data.custom_cls.kwargs,
        }
        check_call(cls, f"data.custom_cls={cls.__name__}", keywords=arguments)
        self.rows = cls(**arguments)
        if len(self.rows) == 0:
            raise ValueError(f"data.custom_cls.name={cls.__name__}: the data set of data.{split}_files has no rows")
        self._styles: list[tuple[str, str]] | None = None
        self._agents: set[str] = set()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[list[int], PromptRow]:
        row, place = self.rows[index], f"{type(self.rows).__name__} of data.{self.split}_files, row {index}"
        if not isinstance(row, dict):
            raise ValueError(f"{place} must be a dictionary in verl's schema, not {type(row).__name__}")
        row = whole_of({key: plain(value) for key, value in row.items()}, place)
        messages = self._messages(row, place)
        ids = self._tokens(row, messages, place)
        ids = truncate(ids, self.data.max_prompt_length, self.data.truncation, place)
        return ids, PromptRow(
            index=int(row["index"]) if isinstance(row.get("index"), int) else index,
            data_source=source_of(row, self.data),
            messages=messages,
            ground_truth=ground_truth_of(row, place, self.data.ground_truth_key),
            ability=str(row.get("ability") or ""),
            extra_info=dictionary_of(row, "extra_info", place),
            style=style_of(row),
            agent=str(row.get("agent_name") or ""),
        )

    def reward_styles(self) -> list[tuple[str, str]]:
        """List all different (data_source, reward_model.style), sorted."""
        return sorted(set(self._all_styles()))

    def domains(self) -> list[str]:
        """List the data source of each row, in order."""
        return [source for source, _ in self._all_styles()]

    def agents(self) -> list[str]:
        """List all agent names of the rows, sorted."""
        self._all_styles()
        return sorted(self._agents)

    def _all_styles(self) -> list[tuple[str, str]]:
        """List (data source, style) of each row: from verl's `dataframe` if there is one, else by reading all rows."""
        if self._styles is None:
            frame = getattr(self.rows, "dataframe", None)
            rows = self.rows if frame is None or len(frame) != len(self) else frame
            records = [rows[index] for index in range(len(self))]
            self._styles = [(source_of(record, self.data), style_of(record)) for record in records]
            self._agents = {str(record.get("agent_name") or "") for record in records}
        return self._styles

    def identity(self) -> dict[str, Any]:
        """Describe the class, its size and the names and sizes of its files."""
        files = [{"name": path.name, "bytes": path.stat().st_size} for path in self.paths if path.is_file()]
        return {"class": type(self.rows).__name__, "rows": len(self), "foreign_files": files}

    def check_rows(self) -> None:
        """Check the first row; the others are the class's own business."""
        self[0]

    def num_media(self) -> int:
        """Return 1 if the first row has media, else 0: verl's data sets put pixels into multi_modal_data."""
        return int("multi_modal_data" in self.rows[0])

    def _messages(self, row: dict[str, Any], place: str) -> list[dict[str, Any]]:
        for name in ("raw_prompt", prompt_column(self.data)[0]):
            if row.get(name) is not None:
                return to_messages(row[name], place)
        return []

    def _tokens(self, row: dict[str, Any], messages: list[dict[str, Any]], place: str) -> list[int]:
        if row.get("raw_prompt_ids") is not None:
            return [int(i) for i in row["raw_prompt_ids"]]
        if row.get("input_ids") is not None:
            ids = [int(i) for i in row["input_ids"]]
            mask = row.get("attention_mask")
            return ids if mask is None else [i for i, real in zip(ids, mask, strict=True) if real]
        if messages:
            return self.encoder.encode([(messages, None)])[0]
        raise ValueError(
            f"{place} has no prompt: it needs raw_prompt_ids, input_ids, raw_prompt or "
            f"{prompt_column(self.data)[0]!r} (it has: {', '.join(row)})"
        )


def plain(value: Any) -> Any:
    """Tensors and arrays as lists, everything else as it is."""
    return value.tolist() if hasattr(value, "tolist") else value
