"""Servers of one test on loopback: HTTP with answers in a list, and MCP."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MCP_SERVER = """
    import os, subprocess, sys, time
    from mcp.server import MCPServer

    server = MCPServer("numbers", log_level="CRITICAL")

    @server.tool()
    def add(a: int, b: int) -> int:
        '''Adds two numbers.'''
        return a + b

    @server.tool()
    def pid() -> int:
        '''The server's process.'''
        return os.getpid()

    @server.tool()
    def act(what: str) -> str:
        '''Acts.'''
        match what:
            case "die": os._exit(3)
            case "hang": time.sleep(1000)
            case "raise": raise ValueError("no")
            case "shout": sys.stderr.write("z" * 10_000_000)
            case "long": return "x" * 3_000_000
        return "done"

    if sys.argv[1:] == ["http"]:
        server.run("streamable-http", port=int(os.environ["PORT"]))
    elif sys.argv[1:] == ["broken"]:
        sys.exit("cannot open the data base")
    else:
        server.run()
"""


@contextmanager
def http_service(*answers: tuple[int, Any], repeat_last: bool = True) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Its address, and what it was asked. answers: (status, body) one after the other; "drop" closes the connection,
    "slow" takes two seconds."""
    asked: list[dict[str, Any]] = []
    left = list(answers)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def reply(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length)) if length else None
            asked.append({"path": self.path, "method": self.command, "body": body, "headers": dict(self.headers)})
            status, said = left[0] if len(left) == 1 and repeat_last else left.pop(0)
            if said == "drop":
                self.close_connection = True
                return
            if said == "slow":
                time.sleep(2)
            data = said.encode() if isinstance(said, str) else json.dumps(said).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = reply

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        server.server_close()
