"""Rows of one local data file as plain Python dictionaries, whatever the format.

parquet and arrow stay tables and give single rows; json lines are checked once and kept as text, so that a file takes
about its own size in memory; json and csv are read whole. A row's columns may differ from the next row's in json.
"""

from __future__ import annotations

import ast
import contextlib
import csv
import gzip
import io
import json
import logging
import re
import sys
import zlib
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from verl_like.text import whole

logger = logging.getLogger(__name__)

_BOM = b"\xef\xbb\xbf"
_HALF = re.compile(rb"\\u[dD][89a-fA-F]|\xed[\xa0-\xbf]")  # of a surrogate pair, perhaps beside its other half
_TOLD = "%s held half of a surrogate pair, as a cut emoji leaves it: it became U+FFFD"
_told: set[str] = set()  # files of which it was said row by row
_MESSAGES = re.compile(r"""\s*(\[\s*)?\{\s*["']""")
# Columns whose cells are JSON in a csv file. A prompt is JSON only if it is a list of messages.
_JSON_CELLS = ("reward_model", "extra_info", "test_cases", "tools", "images", "videos")


class TableRows:
    """Rows of a pyarrow table, which may hold some of the file's `columns` only (all names, in order of appearance)."""

    def __init__(self, table: pa.Table, columns: list[str]) -> None:
        self.columns = columns
        table.validate(full=True)  # ArrowInvalid for text that is no UTF-8, which else is found row by row
        try:
            self.table = table.combine_chunks()  # faster access by row
        except pa.ArrowInvalid:  # a text column of more than 2 GiB stays in pieces
            self.table = table

    def __len__(self) -> int:
        return self.table.num_rows

    def row(self, position: int) -> dict[str, Any]:
        """One row. A column that a row of a json file does not have is missing, in a table it is None; a key of a
        dictionary that it does not have is missing in both."""
        row = self.table.slice(position, 1)
        return {name: _written(column)[0] for name, column in zip(row.column_names, row.columns, strict=True)}

    def column(self, name: str) -> list[Any]:
        """One column of all rows, None where a row has none."""
        return _written(self.table.column(name))

    def subcolumn(self, name: str, field: str) -> list[Any]:
        """One field of a column of dictionaries, None where a row has none."""
        if name not in self.table.column_names:
            return [None] * len(self)
        column = self.table.column(name)
        if not pa.types.is_struct(column.type) or column.type.get_field_index(field) < 0:
            return [None] * len(self)
        return _written(pc.struct_field(column, field))

    def counts(self, name: str) -> list[int]:
        """Items in each cell of a column of lists; 1 for a cell that is no list, 0 for an empty one, or empty text."""
        column = self.table.column(name)
        if hasattr(column.type, "value_type") and pa.types.is_nested(column.type):  # any of Arrow's lists
            return pc.fill_null(pc.list_value_length(column), 0).to_pylist()
        filled = column.is_valid()
        if str(column.type).removeprefix("large_") in ("string", "binary"):
            filled = pc.fill_null(pc.not_equal(pc.binary_length(column), 0), False)
        return pc.cast(filled, pa.int64()).to_pylist()


def _written(column: pa.ChunkedArray) -> list[Any]:
    """The values of a column as their writer had them, who need not have used Arrow's types."""
    return [_plain(value, column.type) for value in column.to_pylist()]


def _plain(value: Any, kind: pa.DataType) -> Any:
    """A struct without its nulls: Arrow unites the keys of all rows, and fills in what a row did not have. A null in a
    list or a map was written, and stays."""
    if value is None or not pa.types.is_nested(kind) or pa.types.is_union(kind):
        return value
    if pa.types.is_struct(kind):
        return {f.name: _plain(value[f.name], f.type) for f in kind if value[f.name] is not None}
    if pa.types.is_map(kind):
        return {key: _plain(item, kind.item_type) for key, item in value}
    return [_plain(item, kind.value_type) for item in value] if pa.types.is_nested(kind.value_type) else value


class RecordRows:
    """Rows of a json or csv file: dictionaries, or the text of one JSON object each. Methods: see TableRows."""

    def __init__(self, records: Sequence[dict[str, Any] | bytes], columns: list[str]) -> None:
        self._records, self.columns = records, columns

    def __len__(self) -> int:
        return len(self._records)

    def row(self, position: int) -> dict[str, Any]:
        record = self._records[position]
        return json.loads(record) if isinstance(record, bytes) else dict(record)

    def column(self, name: str) -> list[Any]:
        return [self.row(i).get(name) for i in range(len(self))]

    def subcolumn(self, name: str, field: str) -> list[Any]:
        values = self.column(name)
        return [value.get(field) if isinstance(value, dict) else None for value in values]

    def counts(self, name: str) -> list[int]:
        values = self.column(name)
        return [len(v) if isinstance(v, list) else int(v not in (None, "")) for v in values]


AnyRows = TableRows | RecordRows


def read_rows(path: Path, wanted: Collection[str] | None = None) -> AnyRows:
    """All rows of a local file; the format follows from its name.

    Raises ValueError, which says what is wrong with it, and where.

    wanted: columns that are needed; a table leaves out the others (images, say) where the format allows it.
    """
    reader = READERS.get(file_format(path))
    if reader is None:
        raise ValueError(f"{path}: {path.suffix or 'a file without ending'} is no known format; choose from {known()}")
    return reader(path, wanted)


def file_format(path: Path) -> str:
    """The ending that decides, without a trailing .gz."""
    return Path(path.name.removesuffix(".gz")).suffix.lower()


def known() -> str:
    """The endings that can be read, for messages."""
    return ", ".join([*READERS, ".json.gz", ".jsonl.gz", ".csv.gz"])


def _once(columns: list[str], path: Path) -> list[str]:
    if twice := [name for name in columns if columns.count(name) > 1]:
        raise ValueError(f"{path} has the column {twice[0]!r} more than once: rename or drop one")
    return columns


def _chosen(columns: list[str], wanted: Collection[str] | None) -> list[str]:
    return columns if wanted is None else [name for name in columns if name in wanted]


def _read_parquet(path: Path, wanted: Collection[str] | None) -> TableRows:
    try:
        with pq.ParquetFile(path) as file:  # pq.read_table would import pandas, half a second for nothing
            columns = _once(file.schema_arrow.names, path)
            return TableRows(file.read(columns=_chosen(columns, wanted)), columns)
    except (pa.ArrowInvalid, OSError) as error:
        raise ValueError(f"{path} is not a parquet file: {error}") from error


def _read_arrow(path: Path, wanted: Collection[str] | None) -> TableRows:
    """Arrow's file format, or its stream format (what the datasets library writes), mapped into memory."""
    source = pa.memory_map(str(path))
    for opener in (pa.ipc.open_file, pa.ipc.open_stream):
        try:
            source.seek(0)
            table = opener(source).read_all()
            columns = _once(table.column_names, path)
            return TableRows(table.select(_chosen(columns, wanted)), columns)
        except (pa.ArrowInvalid, OSError) as error:
            problem = error
    raise ValueError(f"{path} is not an arrow file: {problem}")


def _read_text(path: Path) -> bytes:
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path} is not a gzip file: {error}") from error
    return content.removeprefix(_BOM)


def _read_jsonl(path: Path, wanted: Collection[str] | None) -> RecordRows:
    return _json_lines(path, _read_text(path))


def _json_lines(path: Path, content: bytes) -> RecordRows:
    records: list[bytes] = []
    columns: dict[str, None] = {}
    for number, line in enumerate(content.split(b"\n"), start=1):
        if not line.strip():
            continue
        record = _parse(line, f"{path}, line {number}")
        columns |= dict.fromkeys(record)
        records.append(line)
    return _whole_rows(path, records, columns)


def _whole_rows(path: Path, records: list[Any], columns: Iterable[str]) -> RecordRows:
    """The rows with U+FFFD for each half of a surrogate pair; a warning counts those that held one."""
    mended = []
    for number, record in enumerate(records):
        if isinstance(record, bytes) and not _HALF.search(record):
            continue
        row = json.loads(record) if isinstance(record, bytes) else record
        if (clean := whole(row)) != row:
            records[number] = json.dumps(clean).encode()
            mended.append(number)
    if mended:
        logger.warning(_TOLD, f"{path}: {len(mended)} row(s), the first of them row {mended[0]},")
    return RecordRows(records, [whole(name) for name in columns])


def whole_of(value: Any, place: str) -> Any:
    """Replace halves of surrogate pairs by `whole`, with a warning once a file.

    JSON in a cell, or the value of a user's class, may hold them too.
    """
    clean, file = whole(value), place.rpartition(", row ")[0] or place
    if clean != value and file not in _told:
        _told.add(file)
        logger.warning(_TOLD, f"{place} (perhaps others too)")
    return clean


def _parse(line: bytes, place: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{place} is not JSON: {error}. It begins {line[:80]!r}") from error
    if not isinstance(record, dict):
        raise ValueError(f"{place} must be a JSON object, not {line[:80]!r}")
    return record


def _read_json(path: Path, wanted: Collection[str] | None) -> RecordRows:
    """A list of objects, {"data": such a list}, or (a common misnomer) one object a line."""
    content = _read_text(path)
    try:
        records = json.loads(content) if content.strip() else []
    except json.JSONDecodeError as error:
        if error.msg == "Extra data" and content.lstrip().startswith(b"{"):
            return _json_lines(path, content)
        raise ValueError(f"{path}, line {error.lineno} is not JSON: {error}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not UTF-8 text with JSON: {error}") from error
    if isinstance(records, dict) and isinstance(records.get("data"), list):
        records = records["data"]
    if isinstance(records, dict):
        records = [records]
    if not isinstance(records, list):
        raise ValueError(f"{path} must hold a list of objects, not {str(records)[:80]!r}")
    columns: dict[str, None] = {}
    for number, record in enumerate(records):
        if not isinstance(record, dict):
            raise ValueError(f"{path}, row {number} must be a JSON object, not {str(record)[:80]!r}")
        columns |= dict.fromkeys(record)
    return _whole_rows(path, records, columns)


def _read_csv(path: Path, wanted: Collection[str] | None) -> RecordRows:
    """Cells are text; those of reward_model, extra_info and the like are JSON. The first line names the columns."""
    delimiter = "\t" if file_format(path) == ".tsv" else ","
    csv.field_size_limit(sys.maxsize)  # the default of 128 KiB is less than one program with its tests
    try:
        text = io.StringIO(_read_text(path).decode("utf-8"), newline="")
        reader = csv.reader(text, delimiter=delimiter, strict=True)
        columns = _once(next(reader, []), path)
        records = [_csv_record(columns, cells, f"{path}, line {reader.line_num}") for cells in reader if cells]
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}") from error
    except csv.Error as error:
        raise ValueError(f"{path} is not a csv file: {error}") from error
    return _whole_rows(path, records, columns)


def _csv_record(columns: list[str], cells: list[str], place: str) -> dict[str, Any]:
    if len(cells) != len(columns):
        raise ValueError(f"{place} has {len(cells)} cells, but the header names {len(columns)}: {', '.join(columns)}")
    return {name: _csv_cell(name, cell, place) for name, cell in zip(columns, cells, strict=True)}


def _csv_cell(name: str, cell: str, place: str) -> Any:
    if name in _JSON_CELLS:
        if not cell.strip():
            return None
        try:
            return json.loads(cell)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{place}, column {name!r} must hold JSON: {error}. It begins {cell[:80]!r}") from error
    return messages_or_text(cell)


def messages_or_text(cell: str) -> Any:
    """The chat messages, or the one, whose JSON (or Python's) text this is, as tables without lists hold them; other
    text as it is."""
    if not _MESSAGES.match(cell):
        return cell
    for read in (json.loads, ast.literal_eval):
        with contextlib.suppress(ValueError, SyntaxError, RecursionError, MemoryError):
            value = read(cell.strip())
            messages = value if isinstance(value, list) else [value]
            keys = [item.keys() if isinstance(item, dict) else set() for item in messages]
            named = any("role" in each or {"from", "value"} <= each for each in keys)  # ShareGPT's: refused later
            return value if named and (messages is value or "content" in value) else cell
    return cell


READERS: dict[str, Callable[[Path, Collection[str] | None], AnyRows]] = {
    ".parquet": _read_parquet,
    ".json": _read_json,
    ".jsonl": _read_jsonl,
    ".ndjson": _read_jsonl,
    ".csv": _read_csv,
    ".tsv": _read_csv,
    ".arrow": _read_arrow,
    ".feather": _read_arrow,
    ".ipc": _read_arrow,
}
