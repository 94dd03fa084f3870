"""The search tool: over real files, in a worker; its index kept in a folder; errors at the start."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from tests.unit.episodes.tools.rows import called, row, toolbox, write
from verl_like.plugins.agents.tools.search import Search, main
from verl_like.plugins.agents.tools.tool_call import ToolError

pytestmark = [pytest.mark.timeout(120), pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")]

DOCUMENTS = [
    {"id": "1", "title": "Oslo", "text": "Oslo is the capital of Norway, at the head of a fjord."},
    {"id": "2", "title": "Bergen", "text": "Bergen is a city in Norway where it rains."},
    {"id": "3", "title": "Paris", "text": "Paris is the capital of France. " + "Long. " * 500},
]
LIST_SCHEMA = """
        tool_schema:
          type: function
          function:
            name: find
            description: Searches.
            parameters:
              type: object
              properties: {query_list: {type: array, items: {type: string}, description: Queries.}}
              required: [query_list]
"""


def corpus(folder: Path) -> str:
    parquet.write_table(pa.Table.from_pylist(DOCUMENTS), folder / "corpus.parquet")
    return str(folder / "corpus.parquet")


def made(**config: object) -> Search:
    return Search(config, None)


async def ask(search: Search, query: object) -> str:
    return (await search.execute("", {"query_list" if isinstance(query, list) else "query": query}))[0]


def test_a_worker_searches_the_corpus(tmp_path: Path) -> None:
    config = f"""
    tools:
      - class_name: search
        config: {{path: {corpus(tmp_path)}, title_column: title, max_chars: 40}}
      - class_name: search
        config: {{path: {corpus(tmp_path)}, top_k: 1, max_chars: 12}}
{LIST_SCHEMA}
    """
    with toolbox(tool_config_path=write(tmp_path, "tools.yaml", config), max_response_length=1000) as box:
        box.begin("a", row()).result(20)
        found = called(box, "a", "search", query="capital norway")
        assert found.text.split("\n\n")[0] == "Doc 1 (Title: Oslo)\nOslo is the capital of Norway, at the he"
        assert found.metrics == {"results": 3.0}
        assert called(box, "a", "search", query="zebra").text == "No document fits."
        assert called(box, "a", "search", query="the of").text == "No document fits."  # stop words alone
        both = called(box, "a", "find", query_list=["rains", "France"])
        assert both.text == "Results for 'rains':\nDoc 1\nBergen is a \n\nResults for 'France':\nDoc 1\nParis is the"
        wrong = called(box, "a", "search", query=7)
        assert (wrong.kind, wrong.text) == ("exception", "Error executing tool 'search': a query must be a text")


def test_an_index_in_a_folder_is_made_once_and_again_for_another_corpus(tmp_path: Path) -> None:
    file = tmp_path / "wiki.jsonl"
    file.write_text("\n".join(json.dumps({"contents": each["text"]}) for each in DOCUMENTS))
    folder = tmp_path / "index"
    main([str(file), "--index_path", str(folder), "--text_column", "contents"])
    (kept,) = folder.glob("index-*")
    before = kept.stat().st_mtime_ns
    settings = {"path": str(file), "text_column": "contents", "index_path": str(folder), "top_k": 1}
    assert asyncio.run(ask(made(**settings), "fjord")).startswith("Doc 1\nOslo is the capital")
    assert [*folder.glob("index-*")] == [kept] and kept.stat().st_mtime_ns == before
    file.write_text(json.dumps({"contents": "A fjord is an inlet."}))
    assert asyncio.run(ask(made(**settings), "fjord")) == "Doc 1\nA fjord is an inlet."
    assert len([*folder.glob("index-*")]) == 2


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"path": "none.parquet"}, "config.path=.*none.parquet: there is no such file"),
        ({"path": []}, "config.path names no file"),
        ({"path": "corpus.csv"}, "must be a .parquet or .jsonl file"),
        ({"text_column": "body"}, "has no column body; it has id, title, text"),
        ({"path": "empty.jsonl"}, "there is no document in it"),
        ({"path": "number.jsonl"}, "row 0 of .*number.jsonl: column 'text' is no text but 7"),
        ({"path": "broken.jsonl"}, "line 1 of .*broken.jsonl is no JSON"),
        ({"path": "signs.jsonl"}, "there is no word in column 'text'"),
        ({"top_k": 0}, "config.top_k=0: must be a number of at least 1"),
        ({"topk": 3}, "unexpected keyword argument 'topk'; it takes path, text_column"),
    ],
)
def test_a_bad_corpus_is_an_error_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: dict, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    texts = {"empty": "", "number": '{"text": 7}', "broken": "{text", "signs": '{"text": "! ?"}'}
    for name, text in texts.items():
        (tmp_path / f"{name}.jsonl").write_text(text)
    with pytest.raises(ValueError, match=said):
        made(**{"path": corpus(tmp_path), **config})


def test_the_error_of_a_worker_names_the_key(tmp_path: Path) -> None:
    path = write(tmp_path, "tools.yaml", "tools: [{class_name: search, config: {path: /none.parquet}}]")
    said = r"tool_config_path=.*tools\[0\].*/none.parquet: there is no such"
    with pytest.raises(ToolError, match=said), toolbox(tool_config_path=path):
        pass
