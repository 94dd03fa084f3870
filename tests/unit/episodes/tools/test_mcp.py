"""MCP servers: real ones, over stdio and over HTTP on loopback, in workers."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.unit.episodes.tools.rows import called, names, row, toolbox, write
from tests.unit.episodes.tools.services import MCP_SERVER
from tests.unit.rewards.test_manager import gone
from verl_like.plugins.agents.tools.mcp_client import McpServer, McpServerSettings
from verl_like.plugins.agents.tools.mcp_tools import McpTools
from verl_like.plugins.agents.tools.tool_call import ToolUnavailable

pytest.importorskip("mcp")
pytestmark = [pytest.mark.timeout(180), pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")]


def server(folder: Path) -> str:
    return write(folder, "server.py", MCP_SERVER)


def test_a_stdio_server_lives_and_dies_with_its_worker(tmp_path: Path) -> None:
    config = f"""
        tools:
          - class_name: mcp
            config: {{command: {sys.executable}, args: [{server(tmp_path)}], tools: [add, act, pid], timeout: 6}}
    """
    with toolbox(tool_config_path=write(tmp_path, "tools.yaml", config), max_response_length=50) as box:
        assert names(box.schemas) == ["add", "pid", "act"]
        assert box.schemas[0]["function"]["description"] == "Adds two numbers."
        assert box.schemas[0]["function"]["parameters"]["required"] == ["a", "b"]
        box.begin("a", row()).result(20)
        assert called(box, "a", "add", a=2, b=3).text == "5"
        refused = called(box, "a", "add", a="x", b=3)
        assert refused.kind == "exception" and "Error executing tool add" in refused.text
        assert called(box, "a", "act", what="raise").kind == "exception"
        assert called(box, "a", "act", what="shout").text == "done"
        assert called(box, "a", "act", what="long").text == "x" * 25 + "...(truncated)..." + "x" * 25
        (worker,), first = box.worker_pids(), int(called(box, "a", "pid").text)

        dead = called(box, "a", "act", what="die")
        assert (dead.kind, dead.text) == ("service", "Error executing tool: its service does not answer")
        assert dead.message == "MCP server 'mcp': its connection has ended (Connection closed)"
        second = int(called(box, "a", "pid").text)
        assert second != first and gone(first)
        slow = called(box, "a", "act", what="hang")
        assert (slow.kind, slow.message) == ("service", "MCP server 'mcp': no answer within 6 s")
        third = int(called(box, "a", "pid").text)
        assert third != second and gone(second)
        assert box.worker_pids() == [worker]

        os.kill(worker, signal.SIGKILL)  # the keeper, and with it the worker
        assert gone(third)
        assert called(box, "b", "add", a=1, b=1).text == "2"
        last = int(called(box, "b", "pid").text)
        box.call("b", "act", {"what": "hang"})  # it reads no end of its input
    assert gone(last)


def test_verls_form_over_http_and_a_class_that_reads_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([sys.executable, server(tmp_path), "http"], env={**os.environ, "PORT": str(port)})
    try:
        servers = {"numbers": {"url": f"http://127.0.0.1:{port}/mcp", "auth_token": "t"}}
        (tmp_path / "servers.json").write_text(json.dumps({"mcpServers": servers}))
        reader = """
            from verl.tools.mcp_base_tool import MCPBaseTool

            class Shown(MCPBaseTool):
                def _parse_tool_result(self, content):
                    return f"<{content[0].text}>", {"parts": len(content), "queries": ["x"]}
        """
        write(tmp_path, "reader_of_test_mcp.py", reader)
        monkeypatch.syspath_prepend(str(tmp_path))
        config = f"""
            tools:
              - class_name: reader_of_test_mcp.Shown
                config: {{type: mcp, rate_limit: 100, timeout: 20}}
                mcp: {{mcp_servers_config_path: {tmp_path}/servers.json, tool_selected_list: [add]}}
        """
        _wait_for(port)
        with toolbox(tool_config_path=write(tmp_path, "tools.yaml", config)) as box:
            assert names(box.schemas) == ["add"]
            box.begin("a", row()).result(20)
            good = called(box, "a", "add", a=2, b=3)
            assert (good.text, good.metrics) == ("<5>", {"parts": 1.0})
            process.kill()
            process.wait()
            assert called(box, "a", "add", a=2, b=3).kind == "service"
    finally:
        process.kill()
        process.wait()


def _wait_for(port: int) -> None:
    for _ in range(600):
        with socket.socket() as tried:
            if tried.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    raise AssertionError("the MCP server did not start")


def test_a_server_that_cannot_be_started_is_an_error_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"MCP server 'mcp' \(.* broken\): .*\ncannot open the data base"):
        McpTools({"class_name": "mcp", "config": {"command": sys.executable, "args": [server(tmp_path), "broken"]}})
    with pytest.raises(ValueError, match=r"(?s)'mcp' .*/no/such/program.*No such file or directory"):
        McpTools({"class_name": "mcp", "config": {"command": "/no/such/program"}})
    with pytest.raises(ValueError, match="ConnectError"):
        McpTools({"class_name": "mcp", "config": {"url": "http://127.0.0.1:9/mcp"}})


def test_starts_in_vain_are_bounded(tmp_path: Path) -> None:
    path = tmp_path / "once.py"
    path.write_text(Path(server(tmp_path)).read_text())
    settings = McpServerSettings(name="n", command=sys.executable, args=(str(path),), start_timeout=30.0)
    made = McpServer(settings)
    path.write_text("import sys; sys.exit(4)")

    async def calls() -> list[str]:
        said = []
        for _ in range(6):
            with pytest.raises(ToolUnavailable) as error:
                await made.call("act", {"what": "die"})
            said.append(str(error.value).splitlines()[0])
        return said

    said = asyncio.run(calls())
    assert "its connection has ended" in said[0] and all("MCPError" in each for each in said[1:4])
    assert said[4:] == ["MCP server 'n' was started 3 times in vain"] * 2


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({}, "give a command or a url"),
        ({"command": "x", "url": "http://y"}, "and not both"),
        ({"command": "x", "arg": 1}, "arg: this key is not known; a server has command, args"),
        ({"command": "x", "timeout": 0}, "must be above 0"),
        ({"url": "http://x", "header_env": {"A": "NOT_SET_HERE"}}, "header_env.A=NOT_SET_HERE: that variable is not"),
        ({"url": "http://x", "transport": "sse"}, "transport='sse' is not supported; use stdio or streamable-http"),
        ({"mcp_servers_config_path": "empty.json"}, 'the file must hold {"mcpServers"'),
        ({"mcp_servers_config_path": "empty.json", "url": "http://x"}, 'the file must hold {"mcpServers"'),
    ],
)
def test_bad_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: dict, said: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.json").write_text("{}")
    with pytest.raises(ValueError, match=said):
        McpTools({"class_name": "mcp", "config": config})
