"""verl's own tool files, out of its wheels and unedited, with the stand-ins of what else of verl they import."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.episodes.tools.rows import called, row, toolbox, write

pytestmark = [pytest.mark.timeout(180), pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")]

CONFIG = """
    tools:
      - class_name: verl.tools.{file}.{kind}
        config: {{type: native}}
        tool_schema:
          type: function
          function:
            name: submit
            description: Submits an answer.
            parameters:
              type: object
              properties:
                answer:
                  type: string
                  description: The answer
              required: [answer]
"""
FUNCTIONS = """
    from verl.tools.function_tool import function_tool

    @function_tool
    def add(a: int, b: int) -> dict:
        '''Adds.

        Args:
            a: One.
            b: Two.
        '''
        return {"sum": a + b}
"""


@pytest.mark.parametrize("version", ["0.5.0", "0.7.0", "0.7.0 on the base class of 0.9.1", "stand-in"])
def test_the_tool_for_gsm8k(tmp_path: Path, unpack: Callable[..., None], version: str) -> None:
    if version != "stand-in":
        unpack(version.partition(" ")[0], "tools/gsm8k_tool.py")
    if "0.9.1" in version:
        unpack("0.9.1", "tools/base_tool.py", "tools/schemas.py")
    config = write(tmp_path, "tools.yaml", CONFIG.format(file="gsm8k_tool", kind="Gsm8kTool"))
    chosen = row(tools_kwargs={"submit": {"create_kwargs": {"ground_truth": "72"}}}, need_tools_kwargs=True)
    with toolbox(tool_config_path=config) as box:
        box.begin("a", chosen).result(20)
        wrong = called(box, "a", "submit", answer="71")
        assert (wrong.text, wrong.reward) == ("Current parsed answer='71' reward=0.0", -0.05)
        right = called(box, "a", "submit", answer="#### 72")
        assert (right.text, right.reward) == ("Current parsed answer='#### 72' reward=1.0", 0.0)
        end = box.end("a").result(20)
        assert (end.reward, end.metrics) == (1.0, {"tool_reward/submit": 1.0})


@pytest.mark.parametrize("version", ["0.5.0", "0.7.0"])
def test_the_tool_for_geometry(tmp_path: Path, unpack: Callable[..., None], version: str) -> None:
    unpack(version, "tools/geo3k_tool.py")
    config = write(tmp_path, "tools.yaml", CONFIG.format(file="geo3k_tool", kind="Geo3kTool"))
    with toolbox(tool_config_path=config) as box:
        box.begin("a", row(tools_kwargs={"submit": {"create_kwargs": {"ground_truth": "\\frac{1}{2}"}}})).result(20)
        assert called(box, "a", "submit", answer="0.5").text == "Current parsed answer='0.5' reward=1.0"
        assert called(box, "a", "submit", answer="3").reward == -0.05
        assert box.end("a").result(20).reward == 0.0  # of the last answer


def test_the_mcp_search_tool(tmp_path: Path, unpack: Callable[..., None]) -> None:
    pytest.importorskip("mcp")
    unpack("0.7.0", "tools/mcp_search_tool.py")
    source = """
        from mcp.server import MCPServer
        server = MCPServer("web", log_level="ERROR")

        @server.tool()
        def find(query: str) -> str:
            '''Finds.'''
            return str({"query": query, "results": [{"title": "Oslo", "content": "The capital"}]})

        server.run()
    """
    servers = {"web": {"command": sys.executable, "args": [write(tmp_path, "web.py", source)]}}
    path = write(tmp_path, "servers.json", json.dumps({"mcpServers": servers}))
    config = f"""
        tools:
          - class_name: verl.tools.mcp_search_tool.MCPSearchTool
            config: {{type: mcp, rate_limit: 120, timeout: 120}}
            mcp: {{mcp_servers_config_path: {path}, tool_selected_list: [find]}}
    """
    with toolbox(tool_config_path=write(tmp_path, "tools.yaml", config)) as box:
        box.begin("a", row()).result(20)
        found = called(box, "a", "find", query="Oslo")
        assert found.text == '[{"title": "Oslo", "content": "The capital"}]'
        assert found.metrics == {"query_count": 1.0, "total_results": 1.0}


@pytest.mark.slow  # a worker imports transformers
def test_the_decorator_of_verl_and_ours_make_the_same_tool(tmp_path: Path, unpack: Callable[..., None]) -> None:
    functions = write(tmp_path, "functions.py", FUNCTIONS)
    with toolbox(function_tool_path=functions) as box:
        ours = box.schemas
    unpack("0.9.1", "tools/function_tool.py", "tools/schemas.py")
    with toolbox(function_tool_path=functions, timeout=60.0) as box:  # it imports transformers
        assert box.schemas == ours
        assert called(box, "a", "add", a=1, b=2).text == '{"sum": 3}'
