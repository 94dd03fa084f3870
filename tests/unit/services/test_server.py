"""A server of the run: it starts, it is looked after, and nothing of it is left."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from verl_like.cluster.environment import free_port
from verl_like.services.server import Server, ServerError, answers

SERVER = """
import http.server, subprocess, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print("helper", helper.pid, flush=True)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    port = free_port("127.0.0.1")
    url = f"http://127.0.0.1:{port}/health"
    made = Server([sys.executable, "-c", SERVER, str(port)], health=url, log=tmp_path / "log", environment={})
    made.start()
    yield made
    made.end()


def helper_of(server: Server) -> int:
    return int(server.log.read_text().split("helper ")[1].split()[0])


def gone(pid: int) -> bool:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.02)
    return False


def test_it_serves_and_leaves_nothing_behind(server: Server) -> None:
    server.wait_ready(30)
    assert server.ended() == ""
    helper = helper_of(server)
    server.end()
    assert gone(helper) and gone(server.pid) and server.ended()
    server.end()


def test_what_it_started_ends_with_it(server: Server) -> None:
    """The program is killed from outside; its helper is in a session of its own."""
    server.wait_ready(30)
    (child,) = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
    os.kill(int(child), signal.SIGKILL)
    assert gone(helper_of(server)) and gone(int(child))
    server._process.wait(10)  # pyright: ignore[reportOptionalMemberAccess]
    assert server.ended() == "has ended (exit code -9)"


def test_nothing_is_left_where_its_keeper_was_killed(server: Server) -> None:
    server.wait_ready(30)
    os.kill(server.pid, signal.SIGKILL)
    (folder,) = [server._temporary.path]  # pyright: ignore[reportOptionalMemberAccess]
    server.end()
    assert not answers(server._health, 5) and not Path(folder).exists()


def test_no_proxy_is_asked_for_a_server_of_ours(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    server.wait_ready(30)


def test_who_speaks_no_http_is_no_server() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def speak() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.sendall(b"hello\n")

        threading.Thread(target=speak, daemon=True).start()
        assert not answers(f"http://127.0.0.1:{listening.getsockname()[1]}/health", 5)


def test_a_server_that_does_not_start_shows_its_last_words(tmp_path: Path) -> None:
    code = "print('no such model'); raise SystemExit(3)"
    made = Server(
        [sys.executable, "-c", code], health="http://127.0.0.1:1/health", log=tmp_path / "log", environment={}
    )
    made.start()
    with pytest.raises(ServerError, match=r"has ended \(exit code 3\); the end of .*log:\nno such model"):
        made.wait_ready(30)
    silent = Server(
        [sys.executable, "-c", "import time; time.sleep(600)"],
        health="http://127.0.0.1:1/health",
        log=tmp_path / "silent",
        environment={},
    )
    silent.start()
    with pytest.raises(ServerError, match=r"does not serve after 0.5 s"):
        silent.wait_ready(0.5)
    assert gone(silent.pid)


def test_it_ends_with_its_parent(tmp_path: Path) -> None:
    """Also where that one is killed without a word."""
    port = free_port("127.0.0.1")
    parent = f"""
import sys, time
from pathlib import Path
from verl_like.services.server import Server
server = Server([sys.executable, "-c", {SERVER!r}, "{port}"], health="http://127.0.0.1:{port}/health",
                log=Path({str(tmp_path / "log")!r}), environment={{}})
server.start(); server.wait_ready(30); print(server.pid, flush=True); time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        assert answers(f"http://127.0.0.1:{port}/health", 5)
        process.kill()
    assert gone(pid) and not answers(f"http://127.0.0.1:{port}/health", 5)
