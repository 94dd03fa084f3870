"""Search in a corpus of the run's own: BM25 over parquet or JSON-lines files (library bm25s), without a service.

The index is made when a worker starts: in its memory, or once for all workers and runs in a folder (`index_path`), from
which it is mapped, so that workers share the memory. A corpus whose index takes longer than a worker may take to start
is indexed before: `python -m verl_like.plugins.agents.tools.search PATH --index_path FOLDER [--text_column ...]`.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_like.plugins.agents.tools.schema import settings_of, texts_schema
from verl_like.user_code import resolve_path

SCHEMA = texts_schema(
    "search",
    "Searches a collection of documents and returns the passages that fit best.",
    query="Words to search for.",
)
_MOST_QUERIES = 20  # of one call


@dataclass(frozen=True, kw_only=True)
class SearchSettings:
    """Settings of the search tool: the `config` of its entry.

    path: files, .parquet or .jsonl.
    text_column, title_column: columns of the files.
    top_k: documents of a result.
    max_chars: characters of each document.
    index_path: folder that keeps the index; null: the index is in the memory of each worker.
    """

    path: str | Sequence[str]
    text_column: str = "text"
    title_column: str | None = None
    top_k: int = 3
    max_chars: int = 1000
    index_path: str | None = None

    def __post_init__(self) -> None:
        for name in ("top_k", "max_chars"):
            if not isinstance(value := getattr(self, name), int) or value < 1:
                raise ValueError(f"search: config.{name}={value!r}: must be a number of at least 1")

    def files(self) -> list[Path]:
        """List the files. Raises ValueError for one that is not there, or of another form."""
        paths = [self.path] if isinstance(self.path, str) else list(self.path)
        found = [Path(resolve_path(str(path), "search: config.path")) for path in paths]
        for file in found:
            if file.suffix not in (".parquet", ".jsonl"):
                raise ValueError(f"search: config.path={file}: must be a .parquet or .jsonl file")
            if not file.is_file():
                raise ValueError(f"search: config.path={file}: there is no such file")
        if not found:
            raise ValueError("search: config.path names no file")
        return found


class Search:
    """The tool, in verl's form, without state. A schema of yours may ask for `query`, or for a list `query_list`."""

    stateful = False

    def __init__(self, config: dict[str, Any], tool_schema: Any = None) -> None:
        self.tool_schema = tool_schema or SCHEMA
        self._settings = settings_of(SearchSettings, config, "search")
        self._bm25, self._documents = _open(self._settings)

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> tuple[str, None, dict]:
        """The documents that fit best, of each query. Metrics: results."""
        given = parameters.get("query_list", parameters.get("query"))
        queries = [query for query in (given if isinstance(given, list) else [given]) if isinstance(query, str)]
        if not queries or (isinstance(given, list) and len(queries) < len(given)):
            raise ValueError("a query must be a text")
        if len(queries) > _MOST_QUERIES:
            raise ValueError(f"at most {_MOST_QUERIES} queries at once")
        found = [self._best(query) for query in queries]
        parts = [self._told(best) for best in found]
        if len(queries) > 1:
            parts = [f"Results for {query!r}:\n{part}" for query, part in zip(queries, parts, strict=True)]
        return "\n\n".join(parts), None, {"results": sum(map(len, found))}

    def _best(self, query: str) -> list[dict[str, str]]:
        (words,) = _words([query], as_text=True)
        known = self._bm25.get_tokens_ids(words)
        if not known:
            return []
        count = min(self._settings.top_k, len(self._documents))
        places, scores = self._bm25.retrieve([words], k=count, show_progress=False)
        return [self._documents[int(i)] for i, score in zip(places[0], scores[0], strict=True) if score > 0]

    def _told(self, documents: Sequence[dict[str, str]]) -> str:
        shown = [
            f"Doc {place}{' (Title: ' + document['title'] + ')' if document['title'] else ''}\n"
            f"{document['text'][: self._settings.max_chars]}"
            for place, document in enumerate(documents, start=1)
        ]
        return "\n\n".join(shown) or "No document fits."


def _open(settings: SearchSettings) -> tuple[Any, Sequence[dict[str, str]]]:
    """The index, and its documents."""
    files = settings.files()
    if settings.index_path is None:
        return _build(settings, files)
    import bm25s

    folder = Path(settings.index_path)
    folder.mkdir(parents=True, exist_ok=True)
    kept = folder / f"index-{_fingerprint(settings, files, bm25s.__version__)}"
    with _locked(folder / "lock"):  # one worker makes it, the others wait
        if not kept.is_dir():
            made = folder / f"{kept.name}.part"
            shutil.rmtree(made, ignore_errors=True)  # of one that was killed
            bm25, documents = _build(settings, files)
            bm25.save(made, corpus=documents, show_progress=False)
            made.rename(kept)
    bm25 = bm25s.BM25.load(kept, load_corpus=True, mmap=True, show_progress=False)
    documents: Any = bm25.corpus
    bm25.corpus = None  # `retrieve` is to give places
    return bm25, documents


def _fingerprint(settings: SearchSettings, files: Sequence[Path], version: str) -> str:
    """Hash what the index depends on: columns, library version, and the files' names, sizes and times (not content)."""
    stats = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    parts = [stats, settings.text_column, settings.title_column, version]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _build(settings: SearchSettings, files: Sequence[Path]) -> tuple[Any, list[dict[str, str]]]:
    import bm25s

    documents = [document for file in files for document in _documents(settings, file)]
    if not documents:
        raise ValueError(f"search: config.path={settings.path}: there is no document in it")
    bm25 = bm25s.BM25()
    words = _words([f"{document['title']}\n{document['text']}" for document in documents])
    if not words.vocab:
        raise ValueError(f"search: config.path={settings.path}: there is no word in column {settings.text_column!r}")
    bm25.index(words, show_progress=False)
    return bm25, documents


def _words(texts: Sequence[str], *, as_text: bool = False) -> Any:
    import bm25s

    return bm25s.tokenize(list(texts), stopwords="en", return_ids=not as_text, show_progress=False)


def _documents(settings: SearchSettings, file: Path) -> Iterator[dict[str, str]]:
    """Yield {"title", "text"} of each row.

    Raises ValueError, which names file and row, for a missing column or a cell that is no text.
    """
    columns = [settings.text_column, *([settings.title_column] if settings.title_column else [])]
    for place, row in enumerate((_parquet_rows if file.suffix == ".parquet" else _json_rows)(file, columns)):
        for column in columns:
            if not isinstance(row.get(column), str):
                what = f"row {place} of {file}: column {column!r} is no text but {row.get(column)!r:.100}"
                raise ValueError(f"search: {what}; it has {', '.join(row)} (config.text_column, title_column)")
        yield {"title": row[settings.title_column] if settings.title_column else "", "text": row[columns[0]]}


def _parquet_rows(file: Path, columns: list[str]) -> Iterator[dict[str, Any]]:
    from pyarrow import parquet

    table = parquet.ParquetFile(file)
    if missing := [column for column in columns if column not in table.schema_arrow.names]:
        has = ", ".join(table.schema_arrow.names)
        raise ValueError(f"search: {file} has no column {', '.join(missing)}; it has {has} (config.text_column)")
    for batch in table.iter_batches(columns=columns):
        yield from batch.to_pylist()


def _json_rows(file: Path, columns: list[str]) -> Iterator[dict[str, Any]]:
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ValueError(f"search: line {number} of {file} is no JSON: {error}") from error
            if not isinstance(row, dict):
                raise ValueError(f"search: line {number} of {file} is no JSON object")
            yield row


def main(arguments: Sequence[str] | None = None) -> None:
    """Make the index of a corpus before a run."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("path", nargs="+")
    parser.add_argument("--index_path", required=True)
    parser.add_argument("--text_column", default="text")
    parser.add_argument("--title_column")
    chosen = vars(parser.parse_args(arguments))
    chosen["path"] = [os.path.abspath(path) for path in chosen["path"]]
    _, documents = _open(SearchSettings(**chosen))
    sys.stdout.write(f"{len(documents)} documents are indexed in {chosen['index_path']}\n")


if __name__ == "__main__":
    main()
