"""The HTTP tool, against a real server on loopback."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.unit.episodes.tools.rows import called, row, toolbox, write
from tests.unit.episodes.tools.services import http_service
from verl_like.plugins.agents.tools.http_service import HttpService
from verl_like.plugins.agents.tools.tool_call import ToolUnavailable

pytestmark = [pytest.mark.timeout(120), pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")]


class Schema:
    """As a worker gives it to the tool: the arguments by name."""

    def __init__(self, *names: str) -> None:
        properties = {name: {"type": "string"} for name in names}
        self._function = {"name": "ask", "description": "Asks.", "parameters": {"properties": properties}}

    def model_dump(self, **_: Any) -> dict[str, Any]:
        return {"type": "function", "function": self._function}


def ask(config: dict[str, Any], **arguments: Any) -> tuple[str, dict[str, Any]]:
    async def once() -> Any:
        return await HttpService(config, Schema("q", "n", "list")).execute("", arguments)

    text, _, metrics = asyncio.run(once())
    return text, metrics


def test_the_retrieval_service_of_search_r1_in_a_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RETRIEVAL_TOKEN", "secret")
    reply = {"result": [[{"document": {"contents": "Oslo"}, "score": 1.5}]]}
    with http_service((200, reply)) as (url, asked):
        config = f"""
            tools:
              - class_name: http
                config:
                  url: {url}/retrieve
                  body: {{queries: "{{query_list}}", topk: 3, return_scores: true}}
                  header_env: {{Authorization: RETRIEVAL_TOKEN}}
                  result: result
                tool_schema:
                  type: function
                  function:
                    name: search
                    description: Searches.
                    parameters:
                      type: object
                      properties: {{query_list: {{type: array, items: {{type: string}}, description: Queries.}}}}
                      required: [query_list]
        """
        with toolbox(tool_config_path=write(tmp_path, "tools.yaml", config)) as box:
            box.begin("a", row()).result(20)
            found = called(box, "a", "search", query_list=["capital of Norway"])
    assert found.text == '[[{"document": {"contents": "Oslo"}, "score": 1.5}]]'
    assert found.metrics == {"status": 200.0, "tries": 1.0}
    assert asked[0]["body"] == {"queries": ["capital of Norway"], "topk": 3, "return_scores": True}
    assert asked[0]["headers"]["Authorization"] == "secret"


def test_arguments_go_into_address_query_and_body() -> None:
    with http_service((200, {"a": ["x", {"b": 1}]})) as (url, asked):
        get = {"url": url + "/{q}/x", "method": "GET", "query": {"n": "{n}", "fixed": "1"}, "result": "a.1"}
        assert ask(get, q="a/b c", n=3)[0] == '{"b": 1}'
        assert (asked[0]["path"], asked[0]["body"]) == ("/a%2Fb%20c/x?n=3&fixed=1", None)
        ask({**get, "result": "no.such"}, q="x")
        assert asked[1]["path"] == "/x/x?fixed=1"  # an optional argument that the call left out
        assert ask({"url": url, "result": "no.such"}, q="x", list=[1])[0] == '{"a": ["x", {"b": 1}]}'
        assert asked[2]["body"] == {"q": "x", "list": [1]}  # without a template: all arguments
        ask(
            {"url": url, "body": {"text": "say {q}!", "deep": [{"l": "{list}"}], "n": "{n}", "none": None}},
            q="é",
            list=[1],
        )
        assert asked[3]["body"] == {"text": "say é!", "deep": [{"l": [1]}], "none": None}


@pytest.mark.parametrize("trouble", [(429, "later"), (503, "down"), (200, "drop"), (200, "slow")])
def test_what_may_pass_is_tried_again(trouble: tuple[int, str]) -> None:
    with http_service(trouble, (200, "good")) as (url, asked):
        limit = 0.8 if trouble[1] == "slow" else 10.0
        said, metrics = ask({"url": url, "retry_delay": 0.01, "timeout": limit})
    assert said == "good" and metrics["tries"] == len(asked) >= 2


def test_the_model_reads_what_it_got_wrong() -> None:
    with http_service((404, "no such city")) as (url, asked):
        assert ask({"url": url}, q="x") == ("Error: HTTP 404: no such city", {"status": 404, "tries": 1})
    with http_service((200, "x" * 2000)) as (url, asked), pytest.raises(ValueError, match="longer than 1000 bytes"):
        ask({"url": url, "max_response_bytes": 1000})
    assert len(asked) == 1


@pytest.mark.parametrize(
    ("answer", "tries", "said"),
    [
        ((500, "broken"), 3, "failed 3 times; the last: HTTP 500: broken"),
        ((200, "drop"), 3, "failed 3 times; the last: RemoteProtocolError"),
        ((403, "who are you"), 1, "answers HTTP 403: who are you"),
        ((302, "elsewhere"), 1, "answers HTTP 302"),
    ],
)
def test_a_service_that_does_not_answer_is_unavailable(
    answer: tuple[int, str], tries: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKEN", "hidden")
    config = {"max_retries": 2, "retry_delay": 0.01, "header_env": {"X-Key": "TOKEN"}}
    with http_service(answer) as (url, asked), pytest.raises(ToolUnavailable, match=said) as error:
        ask({"url": url + "/{q}", **config}, q="asked")
    assert len(asked) == tries
    assert "hidden" not in str(error.value) and "asked" not in str(error.value)


def test_nobody_listens() -> None:
    with http_service((200, "")) as (url, _):
        pass
    with pytest.raises(ToolUnavailable, match="failed 2 times; the last: ConnectError"):
        ask({"url": url, "max_retries": 1, "retry_delay": 0.01})


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"url": "localhost:80"}, "config.url='localhost:80': must begin with http://"),
        ({"method": "LOAD"}, "config.method='LOAD': must be one of GET, POST"),
        (
            {"body": {"q": "{question}"}},
            r"config uses \{question\}, which tool_schema does not have: \['list', 'n', 'q'\]",
        ),
        ({"header_env": {"X": "NOT_SET_HERE"}}, "header_env.X=NOT_SET_HERE: that variable is not set"),
        ({"retries": 3}, "unexpected keyword argument 'retries'; it takes url, method"),
        ({"timeout": 0}, "config.timeout and max_response_bytes must be above 0"),
    ],
)
def test_bad_settings_are_errors_at_the_start(config: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        HttpService({"url": "http://127.0.0.1", **config}, Schema("q", "n", "list"))
    with pytest.raises(ValueError, match="there is no tool_schema"):
        HttpService({"url": "http://127.0.0.1"}, None)
