"""The gateway's HTTP: aiohttp in a thread of its own. A session's key is its API key; no other gets in.

Whoever listens here takes anything from anybody without harm to the run: the key comes before the body, bodies are
bounded before they are parsed (schema.py) and never unpacked, connections are few and have time limits, and the
driver's event loop sees nothing but the tokens that are to be sampled.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import resource
import secrets
import socket
import threading
import uuid
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from verl_like.episodes.episode import EpisodeAborted
from verl_like.heartbeat import EPISODE
from verl_like.plugins.agents.gateway import schema
from verl_like.plugins.agents.gateway.protocols import Chat, Event, Messages, Responses
from verl_like.plugins.agents.gateway.session import Asked, Message, Refused, Reply, Session, apart

logger = logging.getLogger(__name__)
_http_logger = logging.getLogger(f"{__name__}.http")
_http_logger.addFilter(lambda record: not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError)))

MODEL = "policy"
Form = type[Chat] | type[Messages] | type[Responses]
FORMS: dict[str, Form] = {"/v1/chat/completions": Chat, "/v1/messages": Messages, "/v1/responses": Responses}
_PING_S = 10.0  # something is said on a stream that waits, so that nobody in between takes it for dead
_HEADERS_S = 10.0  # for the first request of a connection
_IDLE_S = 75.0  # between two: longer than clients keep a connection that they do not use
_BODY_S = 20.0  # to send one, and to read what is answered
_LINGER_S = 2.0  # what is still sent after a refusal is read for so long, so that the refusal is seen
_MOST_CONNECTIONS = 4096
_READ_BYTES = 1 << 14  # at a time: the parser keeps the interpreter's lock, for milliseconds if these are tiny chunks
_SMALL_BYTES = 1 << 16
_MOST_SAID = 500  # characters of a reason
_NO_RETRY = {"x-should-retry": "false"}  # the official clients would ask again after 408, 409, 429 and 5xx


class _Connection(web.RequestHandler):
    """HTTP handler that answers even malformed HTTP with JSON, in the form of the API that was meant if known."""

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        super().handle_error(request, status, exc, message)
        what = f"no request that can be read: {(message or 'Bad Request').splitlines()[0]}"
        status, body = _told(request, Refused(what, status=status), None)
        response = web.json_response(body, status=status, headers=_NO_RETRY)
        response.force_close()
        return response


class _Front(web.Server):
    """Low-level server that limits the connections, and how long one may stay without a request."""

    def __init__(self, handler: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]) -> None:
        super().__init__(
            handler,
            handler_cancellation=True,
            access_log=None,
            logger=_http_logger,  # no traceback for what a stranger's headers have
            auto_decompress=False,
            keepalive_timeout=_IDLE_S,
            lingering_time=_LINGER_S,
        )
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._most = _MOST_CONNECTIONS if files < 0 else min(_MOST_CONNECTIONS, files // 2)
        self._silent: dict[Any, asyncio.TimerHandle] = {}  # connections without a request, longest so first

    def __call__(self) -> web.RequestHandler:
        return _Connection(self, loop=self._loop, **self._kwargs)

    def connection_made(self, handler: Any, transport: asyncio.Transport) -> None:
        super().connection_made(handler, transport)
        transport.max_size = _READ_BYTES  # type: ignore[attr-defined]
        self.rests(handler, _HEADERS_S)
        if len(self._connections) > self._most:  # who waits for an answer stays
            oldest = next(iter(self._silent))
            self.spoke(oldest)
            self._connections[oldest].abort()

    def connection_lost(self, handler: Any, exc: BaseException | None = None) -> None:
        self.spoke(handler)
        super().connection_lost(handler, exc)

    def spoke(self, handler: Any) -> None:
        """Stop the timer of a connection that has sent complete headers."""
        if (timer := self._silent.pop(handler, None)) is not None:
            timer.cancel()

    def rests(self, handler: Any, seconds: float = _IDLE_S) -> None:
        """Give a connection without a request `seconds` to send one, then drop it."""
        transport = self._connections.get(handler)
        if transport is not None and not transport.is_closing():
            self._silent[handler] = asyncio.get_running_loop().call_later(seconds, transport.abort)


class GatewayServer:
    """HTTP server of the open sessions.

    host: address to listen on; any but the loopback address lets other machines in, who need a session's key.
    """

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        self._socket = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        self._socket.setblocking(False)
        name = f"[{host}]" if ":" in host else host
        self.url = f"http://{name}:{self._socket.getsockname()[1]}"  # Anthropic's base URL; OpenAI's has /v1 behind
        self._sessions: dict[str, Session] = {}
        self._said: dict[str, tuple[Session, list[Message]]] = {}  # conversations by response id
        self._thread: threading.Thread | None = None
        self._loop = asyncio.SelectorEventLoop()  # whatever loop others have set as the usual one

    async def start(self) -> None:
        """Start to listen, unless the server does already."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._loop.run_forever, name="gateway", daemon=True)
            self._thread.start()
            await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._listen(), self._loop))

    async def _listen(self) -> None:
        self._front = _Front(self._handle)
        self._runner = web.ServerRunner(self._front, shutdown_timeout=1.0)
        await self._runner.setup()
        await web.SockSite(self._runner, self._socket).start()

    def open(self, session: Session) -> str:
        """Let a session in, and return its key."""
        key = f"sk-{secrets.token_urlsafe(24)}"
        self._sessions[key] = session
        return key

    def end(self, key: str) -> None:
        """Refuse the key from now on."""
        session = self._sessions.pop(key)
        session.close()
        for name, (owner, _) in list(self._said.items()):
            if owner is session:
                self._said.pop(name, None)

    def close(self) -> None:
        """Stop listening. Safe to call twice."""
        if self._thread is not None:
            asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._thread = None
        self._socket.close()
        self._loop.close()

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer a request; every refusal is in the form of its API."""
        self._front.spoke(request.protocol)
        session = None
        try:
            session = self._session(request)
            EPISODE.set(session.episode)
            return await self._routed(request, session)
        except ConnectionError:  # nobody reads an answer
            raise
        except (EpisodeAborted, Exception) as error:
            status, body = _told(request, error, session)
            response = web.json_response(body, status=status, headers=_NO_RETRY)
            if status in (401, 408, 413):
                response.force_close()
        finally:
            self._front.rests(request.protocol)
        await _in_time(request, response)
        return response

    def _session(self, request: web.BaseRequest) -> Session:
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        key = request.headers.get("x-api-key") or (key if scheme.lower() == "bearer" else "")
        session = self._sessions.get(key.strip())
        if session is None:
            raise Refused("the API key is no session's, or its episode has ended", "authentication_error", status=401)
        return session

    async def _routed(self, request: web.BaseRequest, session: Session) -> web.StreamResponse:
        method, path = request.method, request.path
        if (method, path) == ("GET", "/v1/models"):
            found = {"id": MODEL, "object": "model", "created": 0, "owned_by": "verl_like"}
            return web.json_response({"object": "list", "data": [found]})
        if method == "POST" and path in FORMS:
            return await self._serve(request, session, FORMS[path])
        if path in FORMS or path == "/v1/models":
            raise Refused(f"Method Not Allowed: {method} {path}", "not_found_error", status=405)
        raise Refused(f"Not Found: {method} {path}", "not_found_error", status=404)

    async def _serve(self, request: web.BaseRequest, session: Session, form: Form) -> web.StreamResponse:
        body, asked = await self._read(request, session, form)
        if request.headers.get("x-stainless-retry-count", "0") != "0":  # the official clients say so
            asked = dataclasses.replace(asked, is_retry=True)
        model, identity = body.get("model") or MODEL, uuid.uuid4().hex
        answering = asyncio.ensure_future(session.answer(asked))
        answering.add_done_callback(lambda done: done.cancelled() or done.exception())  # or nobody may ask for it
        try:
            if body.get("stream"):
                return await self._stream(request, session, asked, answering, (form, model, identity))
            reply = await answering
        finally:  # the connection may have broken
            answering.cancel()
        written = form.write(reply, model, identity)
        self._remember(session, asked, reply, written["id"])
        return web.json_response(written)

    async def _read(self, request: web.BaseRequest, session: Session, form: Form) -> tuple[dict[str, Any], Asked]:
        """Read the body and what it asks for. Large bodies of a session wait for each other."""
        if request.headers.get("Content-Encoding", "identity").lower() != "identity":
            raise Refused("Unsupported Media Type: a compressed body; send it as it is", status=415)
        most, length = 2 * session.rules.most_chars, request.content_length
        if expected := request.headers.get("Expect"):
            if expected.lower() != "100-continue":
                raise Refused(f"Expectation Failed: Expect: {expected:.60}", status=417)
            if (length or 0) <= most:
                await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
                request.writer.output_size = 0  # of the answer, which is yet to come
        data = bytearray()
        async with AsyncExitStack() as stack:
            if length is None or length > _SMALL_BYTES:
                await stack.enter_async_context(session.large)
            if length is None or length <= most:
                try:
                    async with asyncio.timeout(_BODY_S):
                        async for part in request.content.iter_any():
                            data += part
                            if len(data) > most:
                                break
                except TimeoutError as error:
                    what = f"Request Timeout: the body was not whole after {_BODY_S:g} s"
                    raise Refused(what, status=408) from error
                except web.RequestPayloadError as error:
                    raise Refused("the body is not what its headers say") from error
            if max(length or 0, len(data)) > most:
                what = f"a body has at most {most} bytes here, far more than the maximum context length"
                raise Refused(f"Request Entity Too Large: {what}", "request_too_large", status=413)
            body = await apart(len(data), schema.read, data, form.fields)
        if form is Chat or form is Messages:
            return body, form.read(body)
        name = body.get("previous_response_id")
        owner, before = (session, []) if name is None else self._said.get(name, (None, []))
        if owner is not session:
            what = f"previous_response_id={name!r} is none of this episode's"
            raise Refused(what, param="previous_response_id")
        return body, Responses.read(body, before)

    async def _stream(
        self,
        request: web.BaseRequest,
        session: Session,
        asked: Asked,
        answering: asyncio.Future[Reply],
        how: tuple[Form, str, str],
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        form, model, identity = how
        while not (await asyncio.wait({answering}, timeout=_PING_S))[0]:
            await _in_time(request, response, ": the policy is at work\n\n")
        try:
            reply = answering.result()
            self._remember(session, asked, reply, form.write(reply, model, identity)["id"])
            said = "".join(map(_line, form.stream(asked, reply, model, identity)))
        except (EpisodeAborted, Exception) as error:
            if not response.prepared:  # what was refused at once is an HTTP error, as long as nothing was said
                raise
            said = _line(("error", {"type": "error", **_told(request, error, session)[1]}))
        await _in_time(request, response, said + form.ends)
        return response

    def _remember(self, session: Session, asked: Asked, reply: Reply, name: str) -> None:
        if name.startswith("resp_"):
            self._said[name] = session, [*asked.messages, reply.message]


async def _in_time(request: web.BaseRequest, response: web.StreamResponse, part: str | None = None) -> None:
    """Write a part of a stream, or what is left of a response.

    Raises ConnectionError for a client that does not read.
    """
    try:
        async with asyncio.timeout(_BODY_S):
            await response.prepare(request)
            await (response.write_eof() if part is None else response.write(part.encode()))  # type: ignore[attr-defined]
    except TimeoutError as error:
        assert request.transport is not None
        request.transport.abort()
        raise ConnectionResetError("the client reads nothing") from error


def _line(event: Event) -> str:
    name, data = event
    head = "" if name is None else f"event: {name}\n"
    return f"{head}data: {json.dumps(data)}\n\n"  # in ASCII: some clients cut lines at U+2028 too


def _told(request: web.BaseRequest, error: BaseException, session: Session | None) -> tuple[int, dict[str, Any]]:
    """Convert an error to the HTTP status and the JSON body that the program reads, in the form of its API."""
    if isinstance(error, Refused):
        refused = error
    elif isinstance(error, EpisodeAborted) or (session is not None and error is session.failure):
        refused = Refused("the episode is no longer wanted", "session_ended")  # the session ends with its error
    else:
        logger.error("a request to the gateway failed", exc_info=error)
        said = "the gateway itself failed; the trainer's log says how"
        refused = Refused(said, "api_error", status=500)
    message, code = str(refused)[:_MOST_SAID], refused.code
    if request.path.startswith("/v1/messages"):
        return refused.status, {"type": "error", "error": {"type": code, "message": message}}
    return refused.status, {"error": {"message": message, "type": code, "code": code, "param": refused.param}}
