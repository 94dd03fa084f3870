"""Small parquet files and a tokenizer of one token per character."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from verl_like.kit.datasets.schema import make_row

SHARED_DATA = Path(__file__).resolve().parents[4] / "shared" / "data"
TEMPLATE_MARK = "|"


class CharTokenizer:
    """Character c has the id ord(c). With a template, prompts read `role:content|...assistant:`; BOS (2) without."""

    def __init__(self, template: bool = True) -> None:
        self.chat_template = "by hand" if template else None

    def apply_chat_template(self, messages: list[dict[str, Any]], **kwargs: Any) -> str:
        assert kwargs.pop("add_generation_prompt") is True and kwargs.pop("tokenize") is False
        mark = kwargs.pop("mark", TEMPLATE_MARK)
        if kwargs:
            raise TypeError(f"unknown variables {kwargs}")
        return "".join(f"{m['role']}:{m['content']}{mark}" for m in messages) + "assistant:"

    def __call__(self, texts: list[str], add_special_tokens: bool) -> dict[str, list[list[int]]]:
        return {"input_ids": [[2] * add_special_tokens + [ord(c) for c in text] for text in texts]}

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return "".join(map(chr, ids))


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> str:
    pq.write_table(pa.Table.from_pylist(rows), path)
    return str(path)


def write_prompts(path: Path, prompts: list[str], *, data_source: str = "arithmetic") -> str:
    """A file with one user message per row; the ground truth is the row's number."""
    return write_parquet(
        path,
        [
            make_row(
                data_source=data_source, prompt=prompt, ground_truth=str(i), ability="math", split="train", index=i
            )
            for i, prompt in enumerate(prompts)
        ],
    )


def text_of(ids: list[int]) -> str:
    return "".join(map(chr, ids))
