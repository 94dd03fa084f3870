"""Data files in verl's row schema (or ROLL's, or Colossal-RL's) and the fields of their rows.

A row: data_source (str), prompt (list of {"role", "content"}) or messages, ability (str), reward_model ({"style",
"ground_truth"}) or a column of its own with the reference answer, extra_info (dict), images, videos, tools.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import logging
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_like.config import DataConfig
from verl_like.config.paths import Files, named_files
from verl_like.data.rows import AnyRows, known, messages_or_text, read_rows, whole_of
from verl_like.data.storage import localize
from verl_like.models.location import file_problem

logger = logging.getLogger(__name__)

_DEFAULT_REWARD_FN_KEY = "data_source"
_DEFAULT_DATA_SOURCE = DataConfig().default_data_source
_DIGEST_BYTES = 1 << 20  # hashed at the head and at the tail of a file (parquet's footer holds the statistics)
# Where a reference answer is looked for when data.ground_truth_key is null: verl, Colossal-RL (two), ROLL.
_GROUND_TRUTH_COLUMNS = ("reward_model", "gt_answer", "test_cases", "ground_truth")


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFile:
    """One file: its rows and what identifies its content."""

    path: Path
    rows: AnyRows
    size: int  # bytes
    digest: str
    name: str = ""  # of the validation set it belongs to (data.val_files as a dictionary)

    def without_ground_truth(self, key: str | None) -> list[int]:
        """Rows without a reference answer (null, not a number, an empty text or list, no such column) in
        data.ground_truth_key, or in all columns that are looked for."""
        missing = range(len(self.rows))
        for name in (key,) if key else _GROUND_TRUTH_COLUMNS:
            if name in self.rows.columns:
                of_model = name == "reward_model"
                values = self.rows.subcolumn(name, "ground_truth") if of_model else self.rows.column(name)
                missing = [row for row in missing if is_empty(values[row])]
        return list(missing)

    def identity(self) -> dict[str, Any]:
        """Describe the content: equal for equal content, wherever the file lies."""
        return {"name": self.path.name, "bytes": self.size, "rows": len(self.rows), "digest": self.digest}


def read_files(
    files: Files, data: DataConfig, *, key: str, more: Collection[str] = (), prompt: bool = True
) -> list[DataFile]:
    """Read and check all files.

    Args:
        files: named or not.
        data: which columns are meant.
        key: the configuration key they come from, for messages.
        more: further columns, of rows that hold their answers; a reference answer is not missed then.
        prompt: every file must have the prompt's column.
    """
    named = named_files(files)
    if not named:
        raise ValueError(f"{key} is empty: name at least one file ({known()})")
    return [_read_file(path, name, data, key, more, prompt) for name, path in named]


def _read_file(location: str, name: str, data: DataConfig, key: str, more: Collection[str], prompt: bool) -> DataFile:
    if problem := file_problem(key, location):
        raise ValueError(problem)
    path = localize(location, cache_dir=data.cache_dir, use_shm=data.use_shm, key=key)
    try:
        rows = read_rows(path, {*_wanted(data), *more})
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from error
    if len(rows) == 0:
        raise ValueError(f"{key}: {path} is empty: it has no rows")
    _check_columns(path, rows.columns, data, answered=bool(more), prompt=prompt)
    return DataFile(path=path, rows=rows, size=path.stat().st_size, digest=_digest(path), name=name)


def _wanted(data: DataConfig) -> set[str]:
    named = (data.ground_truth_key, data.prompt_id_key, data.tools_key, data.reward_fn_key, prompt_column(data)[0])
    always = {"ability", "agent_name", "extra_info", *_GROUND_TRUTH_COLUMNS}
    return always | {name for name in named if name is not None}


# Columns of a prompt and its answer in public data sets
_PAIRS = (("prompt", "completion"), ("prompt", "response"), ("instruction", "output"), ("question", "answer"))


def prompt_column(data: DataConfig) -> tuple[str, str]:
    """Return the prompt's column and the key that names it: data.messages_key where set, else data.prompt_key."""
    if data.messages_key is not None:
        return data.messages_key, "data.messages_key"
    return data.prompt_key, "data.prompt_key"


def _check_columns(path: Path, columns: list[str], data: DataConfig, *, answered: bool, prompt: bool) -> None:
    column, key = prompt_column(data)
    if prompt and column not in columns:
        hint = " or data.messages_key=messages" if "messages" in columns and key == "data.prompt_key" else ""
        if answered and (pair := next((pair for pair in _PAIRS if {*pair} <= {*columns}), None)):
            hint = f"; for a prompt and its answer: data.prompt_key={pair[0]} data.response_key={pair[1]}"
        raise ValueError(
            f"{_missing(path, column, columns)}. Set {key} to the column with the prompt (text or chat messages){hint}"
        )
    for name, setting in (
        (data.ground_truth_key, "ground_truth_key"),
        (data.prompt_id_key, "prompt_id_key"),
        (data.tools_key, "tools_key"),
    ):
        if name is not None and name not in columns:
            raise ValueError(f"{_missing(path, name, columns)}. Set data.{setting} to a column of the file, or to null")
    if data.reward_fn_key not in columns:
        _no_data_source(path, columns, data)
    if not answered and data.ground_truth_key is None and not set(_GROUND_TRUTH_COLUMNS) & set(columns):
        logger.warning(
            "%s has no column 'reward_model': the ground_truth of every row is None. Set data.ground_truth_key to the "
            "column with the reference answers, if there is one (it has: %s)",
            *(path, ", ".join(columns)),
        )


def _no_data_source(path: Path, columns: list[str], data: DataConfig) -> None:
    if data.reward_fn_key != _DEFAULT_REWARD_FN_KEY:
        raise ValueError(
            f"{_missing(path, data.reward_fn_key, columns)}. Set data.reward_fn_key to the column that selects the "
            "reward function"
        )
    if data.default_data_source != _DEFAULT_DATA_SOURCE:  # asked for
        return
    logger.warning(
        "%s has no column %r (it has: %s): every row gets data_source %r. Set data.reward_fn_key, or "
        "data.default_data_source to the name of a grader, or score with custom_reward_function.path",
        *(path, data.reward_fn_key, ", ".join(columns), data.default_data_source),
    )


def _missing(path: Path, column: str, columns: Iterable[str]) -> str:
    names = list(columns)
    near = difflib.get_close_matches(column, names, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"{path} has no column {column!r} (it has: {', '.join(names)}){hint}"


def _digest(path: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        digest.update(file.read(_DIGEST_BYTES))
        file.seek(max(file.tell(), path.stat().st_size - _DIGEST_BYTES))
        digest.update(file.read())
    return digest.hexdigest()


def to_messages(prompt: Any, place: str) -> list[dict[str, Any]]:
    """Chat messages of a prompt column: a list of {"role", "content"} or its JSON text, one such message (Colossal-RL),
    or another string, which is one user message.

    Keys that a table fills with null because another row has them are dropped: a chat template may ask for them.
    """
    prompt = whole_of(messages_or_text(prompt) if isinstance(prompt, str) else prompt, place)
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    if isinstance(prompt, dict):
        prompt = [prompt]
    if not isinstance(prompt, list) or not prompt or not all(isinstance(message, dict) for message in prompt):
        raise ValueError(
            f"{place}: the prompt must be a list of {{'role', 'content'}} messages or a string, not "
            f"{str(prompt)[:200]!r}"
        )
    messages = [{key: value for key, value in message.items() if value is not None} for message in prompt]
    for message in messages:
        if "role" not in message:
            converters = "verl_like.kit.datasets.tool_calls and full_hh_rlhf do so"
            hint = f" (ShareGPT's keys: name them role and content; {converters})" if "from" in message else ""
            raise ValueError(f"{place}: a message has no role: {str(message)[:200]}{hint}")
    return messages


def style_of(row: dict[str, Any]) -> str:
    """Return the row's reward_model.style, or an empty string."""
    reward_model = row.get("reward_model")
    return str(reward_model.get("style") or "") if isinstance(reward_model, dict) else ""


def ground_truth_of(row: dict[str, Any], place: str, column: str | None = None) -> Any:
    """The reference answer: the column asked for, or reward_model.ground_truth, or the first other column that holds
    one (gt_answer, test_cases, ground_truth); None without any."""
    if column is not None and column != "reward_model":
        return row.get(column)
    reward_model = {} if row.get("reward_model") is None else row["reward_model"]
    if not isinstance(reward_model, dict):
        raise ValueError(
            f"{place}: column 'reward_model' must hold {{'style', 'ground_truth'}}, not {str(reward_model)[:200]!r}"
        )
    found = [reward_model.get("ground_truth"), *(row.get(name) for name in _GROUND_TRUTH_COLUMNS[1:])]
    return next((value for value in found if not is_empty(value)), found[0])


def is_empty(value: Any) -> bool:
    """True for None, NaN, text of blanks and characters without width, and containers of nothing else."""
    if isinstance(value, str):
        return not any(sign.isprintable() and not sign.isspace() for sign in value)
    if isinstance(value, dict | list):
        return all(map(is_empty, value.values() if isinstance(value, dict) else value))
    return value is None or (isinstance(value, float) and value != value)


def dictionary_of(row: dict[str, Any], column: str, place: str) -> dict[str, Any]:
    """A column that holds a dictionary or nothing."""
    value = row.get(column)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ValueError(f"{place}: column {column!r} must hold a dictionary, not {str(value)[:200]!r}")
    return value


def _is_schema(function: Any) -> bool:
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        return False
    parameters = function.get("parameters") or {}
    return isinstance(parameters, dict) and isinstance(parameters.get("properties") or {}, dict)


def tools_of(row: dict[str, Any], column: str, place: str) -> list[dict[str, Any]] | None:
    """Tool schemas: a list, or JSON text of one (schemas differ from row to row, which a table's column cannot)."""
    value = row.get(column)
    try:
        value = json.loads(value) if isinstance(value, str) and value.strip() else value or None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{place}: column {column!r} is text but no JSON: {error}") from error
    if value is not None and not (isinstance(value, list) and all(isinstance(tool, dict) for tool in value)):
        raise ValueError(f"{place}: column {column!r} must hold a list of tool schemas, not {str(value)[:200]!r}")
    if odd := [tool for tool in value or () if not _is_schema(tool.get("function", tool))]:
        raise ValueError(
            f"{place}: a tool in {column!r} needs a name, and parameters that are objects: {odd[0]!s:.200}"
        )
    return whole_of(value, place)
