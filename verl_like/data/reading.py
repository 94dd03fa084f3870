"""Data files in verl's row schema, as pyarrow tables with plain Python rows.

A row: data_source (str), prompt (list of {"role", "content"}), ability (str), reward_model ({"style", "ground_truth"}),
extra_info (dict), and images / videos, which this version refuses.
"""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from verl_like.config import DataConfig

logger = logging.getLogger(__name__)

UNKNOWN_SOURCE = "unknown"  # data_source of files that have no such column
_DEFAULT_REWARD_FN_KEY = "data_source"
_DIGEST_BYTES = 1 << 20  # hashed at the head and at the tail of a file (parquet's footer holds the statistics)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFile:
    """One file: its table (needed columns only) and what identifies its content."""

    path: Path
    table: pa.Table
    size: int  # bytes
    digest: str

    def identity(self) -> dict[str, Any]:
        """Equal for equal content, wherever the file lies."""
        return {"name": self.path.name, "bytes": self.size, "rows": self.table.num_rows, "digest": self.digest}


def read_files(files: str | list[str], data: DataConfig, *, key: str) -> list[DataFile]:
    """Read and check all files. `key` is the configuration key they come from, for messages."""
    paths = [files] if isinstance(files, str) else list(files)
    if not paths:
        raise ValueError(f"{key} is empty: name at least one parquet file")
    return [_read_file(path, data, key) for path in paths]


def _read_file(name: str, data: DataConfig, key: str) -> DataFile:
    path = _locate(name, key)
    try:
        columns = pq.read_schema(path).names
    except pa.ArrowInvalid as error:
        raise ValueError(f"{key}: {path} is not a parquet file: {error}") from error
    _check_columns(path, columns, data)
    wanted = {data.prompt_key, data.reward_fn_key, "ability", "reward_model", "extra_info"}
    table = pq.read_table(path, columns=[c for c in columns if c in wanted]).combine_chunks()  # fast access by row
    _refuse_media(path, columns, data)
    return DataFile(path=path, table=table, size=path.stat().st_size, digest=_digest(path))


def _locate(name: str, key: str) -> Path:
    if "://" in name:
        raise ValueError(f"{key}: {name}: remote files are not available yet; copy the file to a local path")
    path = Path(name).expanduser().resolve()
    if path.is_dir():
        raise ValueError(f"{key}: {path} is a folder; name the parquet file in it")
    if not path.is_file():
        raise ValueError(
            f"{key}: there is no file {path}. Write one with `python -m verl_like.data.preprocess.gsm8k --help`, or "
            f"set {key} to your file"
        )
    if path.suffix != ".parquet":
        raise ValueError(f"{key}: {path}: {path.suffix or 'this'} files are not available yet; convert it to parquet")
    return path


def _check_columns(path: Path, columns: list[str], data: DataConfig) -> None:
    present = ", ".join(columns)
    if data.prompt_key not in columns:
        raise ValueError(
            f"{path} has no column {data.prompt_key!r} (it has: {present}). Set data.prompt_key to the column with the "
            "chat messages"
        )
    if data.reward_fn_key not in columns:
        if data.reward_fn_key != _DEFAULT_REWARD_FN_KEY:
            raise ValueError(
                f"{path} has no column {data.reward_fn_key!r} (it has: {present}). Set data.reward_fn_key to the "
                "column that selects the reward function"
            )
        logger.warning(
            "%s has no column %r (it has: %s): every row gets data_source %r, which has no built-in grader. Set "
            "data.reward_fn_key, or score with custom_reward_function.path",
            *(path, data.reward_fn_key, present, UNKNOWN_SOURCE),
        )
    if "reward_model" not in columns:
        logger.warning("%s has no column 'reward_model': the ground_truth of every row is None", path)


def _refuse_media(path: Path, columns: list[str], data: DataConfig) -> None:
    for key, column in (("image_key", data.image_key), ("video_key", data.video_key)):
        if column not in columns:
            continue
        values = pq.read_table(path, columns=[column]).column(0)
        is_list = pa.types.is_list(values.type) or pa.types.is_large_list(values.type)
        filled = pc.greater(pc.list_value_length(values), 0) if is_list else values.is_valid()
        first = pc.index(filled, True).as_py()
        if first >= 0:
            raise ValueError(
                f"{path}, row {first}: column {column!r} (data.{key}) has content. Training on images and videos is "
                "not available yet; remove the column"
            )


def _digest(path: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        digest.update(file.read(_DIGEST_BYTES))
        file.seek(max(file.tell(), path.stat().st_size - _DIGEST_BYTES))
        digest.update(file.read())
    return digest.hexdigest()


def read_row(table: pa.Table, position: int) -> dict[str, Any]:
    """One row as plain Python values."""
    return table.slice(position, 1).to_pylist()[0]


def to_messages(prompt: Any, place: str) -> list[dict[str, Any]]:
    """Chat messages of a prompt column: a list of {"role", "content"}, or a string, which is one user message.

    Keys that parquet fills with null because another row has them are dropped: a chat template may ask for them.
    """
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    if not isinstance(prompt, list) or not prompt or not all(isinstance(message, dict) for message in prompt):
        raise ValueError(
            f"{place}: the prompt must be a list of {{'role', 'content'}} messages or a string, not "
            f"{str(prompt)[:200]!r}"
        )
    messages = [{key: value for key, value in message.items() if value is not None} for message in prompt]
    for message in messages:
        if "role" not in message:
            raise ValueError(f"{place}: a message has no role: {str(message)[:200]}")
    return messages


def style_of(row: dict[str, Any]) -> str:
    """reward_model.style, or an empty string."""
    return str((row.get("reward_model") or {}).get("style") or "")


def reward_styles(table: pa.Table, reward_fn_key: str) -> set[tuple[str, str]]:
    """The different pairs of data source and reward_model.style of a table."""
    if reward_fn_key in table.column_names:
        sources = pc.cast(table.column(reward_fn_key), pa.string())
    else:
        sources = pa.repeat(pa.scalar(UNKNOWN_SOURCE), table.num_rows)
    styles = pa.nulls(table.num_rows, pa.string())
    if "reward_model" in table.column_names:
        kind = table.schema.field("reward_model").type
        if pa.types.is_struct(kind) and kind.get_field_index("style") >= 0:
            styles = pc.cast(pc.struct_field(table.column("reward_model"), "style"), pa.string())
    pairs = pa.table({"source": sources, "style": styles}).group_by(["source", "style"]).aggregate([]).to_pylist()
    return {(str(pair["source"]), pair["style"] or "") for pair in pairs}


def ground_truth_of(row: dict[str, Any], place: str) -> Any:
    """reward_model.ground_truth, or None without that column."""
    reward_model = row.get("reward_model")
    if reward_model is None:
        return None
    if not isinstance(reward_model, dict):
        raise ValueError(
            f"{place}: column 'reward_model' must hold {{'style', 'ground_truth'}}, not {str(reward_model)[:200]!r}"
        )
    return reward_model.get("ground_truth")
