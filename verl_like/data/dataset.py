"""PromptDataset: rows of one or several data files as (prompt tokens, PromptRow)."""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import sys
from array import array
from bisect import bisect_right
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc

from verl_like.batch import PromptRow
from verl_like.config import DataConfig
from verl_like.data.chat import PromptEncoder, encode_all, truncate
from verl_like.data.reading import (
    UNKNOWN_SOURCE,
    DataFile,
    ground_truth_of,
    read_files,
    read_row,
    reward_styles,
    style_of,
    to_messages,
)

logger = logging.getLogger(__name__)

_SPLITS = ("train", "val")


class PromptDataset:
    """The prompts of `files`, in file order, after data.*_max_samples and data.filter_overlong_prompts.

    dataset[i] -> (token ids, PromptRow). Prompts are tokenised when first asked for and kept; with
    data.filter_overlong_prompts all are tokenised at once. PromptRow.index counts the rows of all files, also those
    that were dropped.

    split: "train" or "val": whose max_samples counts, and which key messages name. seed: used where data.seed is null.
    A class of your own (data.custom_cls) derives from this one and may override `messages` or `row`.
    """

    def __init__(self, data: DataConfig, files: str | list[str], tokenizer: Any, *, split: str, seed: int = 1) -> None:
        if split not in _SPLITS:
            raise ValueError(f"split must be one of {_SPLITS}, not {split!r}")
        self.data, self.split = data, split
        self.encoder = PromptEncoder(tokenizer, data.apply_chat_template_kwargs)
        self.files: list[DataFile] = read_files(files, data, key=f"data.{split}_files")
        self._ends = list(accumulate(file.table.num_rows for file in self.files))
        self._tokens: dict[int, array[int]] = {}  # by position in the files
        max_samples = data.train_max_samples if split == "train" else data.val_max_samples
        self._kept = self._choose(max_samples, seed if data.seed is None else data.seed)
        if data.filter_overlong_prompts:
            self._kept = self._drop_overlong(self._kept)
        if len(self._kept) == 0:
            raise ValueError(
                f"data.{split}_files: no prompt is left of {self._num_file_rows()} rows{self._why_empty()}"
            )

    def __len__(self) -> int:
        return len(self._kept)

    def __getitem__(self, index: int) -> tuple[list[int], PromptRow]:
        position = int(self._kept[index])
        row = self.row(position)
        if position not in self._tokens:
            try:
                (ids,) = self.encoder.encode([row.messages])
            except ValueError as error:
                raise ValueError(f"{self._place(position)}: {error}") from error
            self._tokens[position] = array("i", ids)
        ids = self._tokens[position].tolist()
        return truncate(ids, self.data.max_prompt_length, self.data.truncation, self._place(position)), row

    def row(self, position: int) -> PromptRow:
        """The row at a position of the files, without its tokens."""
        file, offset = self._locate(position)
        row, place = read_row(file.table, offset), self._place(position)
        return PromptRow(
            index=position,
            data_source=str(row.get(self.data.reward_fn_key, UNKNOWN_SOURCE)),
            messages=self.messages(row, place),
            ground_truth=ground_truth_of(row, place),
            ability=str(row.get("ability") or ""),
            extra_info=row.get("extra_info") or {},
            style=style_of(row),
        )

    def messages(self, row: dict[str, Any], place: str) -> list[dict[str, Any]]:
        """Chat messages of a row. `place` names the row in error messages."""
        return to_messages(row[self.data.prompt_key], place)

    def data_sources(self) -> list[str]:
        """The data sources of all files, sorted: what needs a grader, and what validation reports by."""
        key = self.data.reward_fn_key
        found: set[str] = set()
        for file in self.files:
            if key in file.table.column_names:
                found |= {str(value) for value in pc.unique(file.table.column(key)).to_pylist()}
            else:
                found.add(UNKNOWN_SOURCE)
        return sorted(found)

    def reward_styles(self) -> list[tuple[str, str]]:
        """All different (data_source, reward_model.style) of the files, sorted: what must have a grader."""
        return sorted({pair for file in self.files for pair in reward_styles(file.table, self.data.reward_fn_key)})

    def identity(self) -> dict[str, Any]:
        """What a saved sampler position refers to: the files' content and the rows kept of it. JSON-able."""
        kept = hashlib.blake2b(np.ascontiguousarray(self._kept).tobytes(), digest_size=16).hexdigest()
        return {"files": [file.identity() for file in self.files], "rows": len(self), "kept": kept}

    def _num_file_rows(self) -> int:
        return self._ends[-1]

    def _locate(self, position: int) -> tuple[DataFile, int]:
        number = bisect_right(self._ends, position)
        start = self._ends[number - 1] if number else 0
        return self.files[number], position - start

    def _place(self, position: int) -> str:
        file, offset = self._locate(position)
        return f"{file.path}, row {offset}"

    def _choose(self, max_samples: int, seed: int) -> np.ndarray:
        """All rows, or max_samples of them: the first ones, or a random choice when data.shuffle is on (as verl)."""
        total = self._num_file_rows()
        if max_samples < 0 or max_samples >= total:
            return np.arange(total)
        if not self.data.shuffle:
            return np.arange(max_samples)
        return np.random.default_rng(seed).choice(total, size=max_samples, replace=False)

    def _drop_overlong(self, positions: np.ndarray) -> np.ndarray:
        conversations = [self.row(int(position)).messages for position in positions]
        workers = self.data.filter_overlong_prompts_workers
        encoded = encode_all(self.encoder, conversations, num_workers=workers)
        fits = np.array([len(ids) <= self.data.max_prompt_length for ids in encoded], dtype=bool)
        self._tokens = {int(p): array("i", ids) for p, ids, ok in zip(positions, encoded, fits, strict=True) if ok}
        logger.info(
            "data.%s_files: %d of %d prompts are longer than data.max_prompt_length=%d tokens and were dropped",
            *(self.split, int((~fits).sum()), len(positions), self.data.max_prompt_length),
        )
        return positions[fits]

    def _why_empty(self) -> str:
        if self.data.filter_overlong_prompts and self._num_file_rows():
            return f": all are longer than data.max_prompt_length={self.data.max_prompt_length} tokens"
        return ""


def build_dataset(
    data: DataConfig, files: str | list[str], tokenizer: Any, *, split: str, seed: int = 1
) -> PromptDataset:
    """PromptDataset, or the class of data.custom_cls, constructed with the same arguments."""
    dataset_class = PromptDataset if data.custom_cls.path is None else _load_custom_class(data)
    return dataset_class(data, files, tokenizer, split=split, seed=seed)


def _load_custom_class(data: DataConfig) -> type[PromptDataset]:
    path, name = Path(str(data.custom_cls.path)).expanduser().resolve(), data.custom_cls.name
    if not path.is_file():
        raise ValueError(f"data.custom_cls.path={data.custom_cls.path}: there is no such file ({path})")
    spec = importlib.util.spec_from_file_location("custom_dataset", path)
    if spec is None or spec.loader is None:
        raise ValueError(f"data.custom_cls.path={path} is not a Python file (.py)")
    if name is None:
        raise ValueError(f"data.custom_cls.name is not set: name the dataset class in {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    custom_class = getattr(module, name, None)
    if not (isinstance(custom_class, type) and issubclass(custom_class, PromptDataset)):
        raise ValueError(
            f"data.custom_cls.name={name}: {path} must define it as a class derived from "
            "verl_like.data.dataset.PromptDataset"
        )
    return custom_class
