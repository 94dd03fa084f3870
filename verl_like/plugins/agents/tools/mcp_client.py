"""One MCP server, as a tool worker uses it: started or connected to, asked for its tools, called, started again.

The SDK's connections belong to the task that opened them, in one event loop. So a server has a thread with a loop of
its own, and in it a task that holds the connection until it is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from verl_like.plugins.agents.tools import die_with_parent
from verl_like.plugins.agents.tools.tool_call import ToolUnavailable

_LEASHED = str(Path(die_with_parent.__file__).resolve())
_CLOSED = -32000  # the SDK's code for a connection that has ended
_MAX_STARTS = 3  # without a good call between them
_SAID_BYTES = 2000


@dataclass(frozen=True, kw_only=True)
class McpServerSettings:
    """Settings of one server: a command, which runs as a child of the worker, or an address (streamable HTTP).

    timeout: [s] of a call.
    start_timeout: [s] until the server has told its tools.
    rate_limit: calls a second of one worker.
    header_env: header -> environment variable that holds it.
    """

    name: str
    command: str | None = None
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str | None = None
    url: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    header_env: Mapping[str, str] = field(default_factory=dict)
    timeout: float = 30.0
    start_timeout: float = 60.0
    rate_limit: float | None = None

    def __post_init__(self) -> None:
        if (self.command is None) == (self.url is None):
            raise ValueError(f"MCP server {self.name!r}: give a command or a url, and not both")
        if min(self.timeout, self.start_timeout) <= 0 or (self.rate_limit is not None and self.rate_limit <= 0):
            raise ValueError(f"MCP server {self.name!r}: timeout, start_timeout and rate_limit must be above 0")
        for header, variable in self.header_env.items():
            if not os.environ.get(variable):
                raise ValueError(f"MCP server {self.name!r}: header_env.{header}={variable}: that variable is not set")


class McpServer:
    """A server and the connection to it. Making one raises a ValueError where it cannot be reached.

    A server that dies or gives no answer in time costs its call (ToolUnavailable), and is started anew for the next
    one; after three starts in a row that led to no answer it stays away.
    """

    def __init__(self, settings: McpServerSettings) -> None:
        try:
            import mcp  # noqa: F401
        except ImportError as error:
            raise ValueError("MCP servers need the package mcp: pip install 'verl_like[mcp]'") from error
        self.settings = settings
        self._loop = asyncio.new_event_loop()
        self._session: Any = None
        self._holder: asyncio.Task[None] | None = None
        self._starting: asyncio.Task[Any] | None = None
        self._num_starts, self._next_call = 0, 0.0
        threading.Thread(target=self._loop.run_forever, name=f"mcp-{settings.name}", daemon=True).start()
        try:
            self.tools: list[Any] = asyncio.run_coroutine_threadsafe(self._list(), self._loop).result()
        except ToolUnavailable as error:
            raise ValueError(str(error)) from error
        self._num_starts = 0

    async def call(self, name: str, arguments: dict[str, Any]) -> Any:
        """The SDK's CallToolResult. Raises MCPError for what the server refuses, ToolUnavailable where it is lost."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._call(name, arguments), self._loop))

    # Everything below runs in the server's loop.

    async def _list(self) -> list[Any]:
        from mcp.types import PaginatedRequestParams

        session, cursor = await self._connected(), None
        tools: list[Any] = []
        while True:
            asked = session.list_tools(params=PaginatedRequestParams(cursor=cursor) if cursor else None)
            page = await self._answer(asked, self.settings.start_timeout)
            tools += page.tools
            if (cursor := page.next_cursor) is None:
                return tools

    async def _call(self, name: str, arguments: dict[str, Any]) -> Any:
        if self.settings.rate_limit is not None:
            now = time.monotonic()
            self._next_call = max(now, self._next_call) + 1 / self.settings.rate_limit
            await asyncio.sleep(self._next_call - 1 / self.settings.rate_limit - now)
        session = await self._connected()
        holder = self._holder
        try:
            result = await self._answer(session.call_tool(name, arguments), self.settings.timeout)
        except asyncio.CancelledError:  # the worker's own limit is over: what the server is at, nobody knows
            self._drop(holder)
            raise
        self._num_starts = 0
        return result

    async def _answer(self, request: Any, timeout: float) -> Any:
        """Await the server's answer. Where none comes, drop the connection and raise ToolUnavailable."""
        from mcp import MCPError

        holder, asked = self._holder, asyncio.ensure_future(request)
        assert holder is not None
        try:
            await asyncio.wait({asked, holder}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            if asked.done():
                try:
                    return asked.result()
                except MCPError as error:
                    if error.code != _CLOSED:
                        raise
                    why = f"its connection has ended ({error})"
            else:
                why = "its connection has ended" if holder.done() else f"no answer within {timeout:g} s"
            self._drop(holder)
            raise ToolUnavailable(f"MCP server {self.settings.name!r}: {why}")
        finally:
            asked.cancel()

    async def _connected(self) -> Any:
        """The session, of a server that is started if there is none. A start outlives the call that asked for it: one
        that takes longer than a call may is there for the next."""
        if self._session is not None and self._holder is not None and not self._holder.done():
            return self._session
        if self._starting is None or self._starting.done():
            self._starting = asyncio.ensure_future(self._start())
            self._starting.add_done_callback(lambda task: task.cancelled() or task.exception())  # told to who waits
        return await asyncio.shield(self._starting)

    async def _start(self) -> Any:
        if self._num_starts >= _MAX_STARTS:
            raise ToolUnavailable(f"MCP server {self.settings.name!r} was started {_MAX_STARTS} times in vain")
        self._num_starts += 1
        ready: asyncio.Future[Any] = self._loop.create_future()
        said = _LastWords()  # its stderr, for the case that it fails
        self._holder = holder = asyncio.ensure_future(self._hold(ready, said))
        holder.add_done_callback(lambda task: task.cancelled() or task.exception())  # it is told below, or by calls
        limit = self.settings.start_timeout
        await asyncio.wait({ready, holder}, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
        if ready.done():
            self._session = ready.result()
            return self._session
        why = f"no connection within start_timeout={limit:g} s"
        if holder.done():
            why = "; ".join(_leaves(holder.exception())) if not holder.cancelled() else "it was given up"
        self._drop(holder)
        where = self.settings.url or " ".join([self.settings.command or "", *self.settings.args])
        raise ToolUnavailable(f"MCP server {self.settings.name!r} ({where}): {why}\n{said.text()}".strip())

    def _drop(self, holder: asyncio.Task[None] | None) -> None:
        """Give this connection up: a process is ended in the background, by force if need be."""
        if holder is self._holder:
            self._session = None
        if holder is not None:
            holder.cancel()

    async def _hold(self, ready: asyncio.Future[Any], said: _LastWords) -> None:
        """Keep the connection open until this task is cancelled, or the transport gives up."""
        from mcp import ClientSession

        async with self._transport(said) as (read, write), ClientSession(read, write) as session:
            await session.initialize()
            ready.set_result(session)
            await asyncio.Event().wait()

    @contextlib.asynccontextmanager
    async def _transport(self, said: _LastWords) -> AsyncIterator[tuple[Any, Any]]:
        settings = self.settings
        if settings.url is not None:
            import httpx2
            from mcp.client.streamable_http import streamable_http_client

            secret = {header: os.environ[variable] for header, variable in settings.header_env.items()}
            limit = httpx2.Timeout(max(settings.timeout, settings.start_timeout))
            async with (
                httpx2.AsyncClient(headers={**settings.headers, **secret}, timeout=limit) as client,
                streamable_http_client(settings.url, http_client=client) as streams,
            ):
                yield streams
        else:
            from mcp import StdioServerParameters
            from mcp.client.stdio import stdio_client

            folder = {name: os.environ[name] for name in ("TMPDIR",) if name in os.environ}  # deleted with the worker
            parameters = StdioServerParameters(  # the SDK gives it a session of its own: a killed worker would leave it
                command=sys.executable,
                args=["-I", _LEASHED, str(os.getpid()), settings.command or "", *settings.args],
                env={**folder, **settings.env},
                cwd=settings.cwd,
            )
            with said.stream() as stream:
                async with stdio_client(parameters, errlog=stream) as streams:
                    yield streams


class _LastWords:
    """The end of what a server prints to its stderr, however much that is."""

    def __init__(self) -> None:
        self._data = b""

    @contextlib.contextmanager
    def stream(self) -> Iterator[TextIO]:
        """Open a stream for the server to write to."""
        reading, writing = os.pipe()
        threading.Thread(target=self._read, args=(reading,), daemon=True).start()
        with os.fdopen(writing, "w") as stream:
            yield stream

    def _read(self, descriptor: int) -> None:
        with os.fdopen(descriptor, "rb", buffering=0) as stream:
            while data := stream.read(65536):
                self._data = (self._data + data)[-_SAID_BYTES:]

    def text(self) -> str:
        return self._data.decode("utf-8", "replace").strip()


def _leaves(error: BaseException | None) -> list[str]:
    """List the errors inside the exception groups that the SDK's tasks wrap them in."""
    if isinstance(error, BaseExceptionGroup):
        return [text for each in error.exceptions for text in _leaves(each)]
    return [] if error is None else [f"{type(error).__name__}: {error}"]
