"""The gateway's HTTP: aiohttp in the event loop of the episodes. A session's key is its API key; no other gets in."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import secrets
import socket
from collections.abc import Mapping
from typing import Any

from aiohttp import web

from verl_like.episodes.episode import EpisodeAborted
from verl_like.episodes.gateway.protocols import Chat, Event, Messages, Responses, new_identity
from verl_like.episodes.gateway.session import Asked, Message, Refused, Reply, Session
from verl_like.progress import EPISODE

logger = logging.getLogger(__name__)

MODEL = "policy"
_MOST_BYTES = 64 << 20
_PING_S = 10.0  # something is said on a stream that waits, so that nobody in between takes it for dead


class GatewayServer:
    """Serves the sessions that are open. host: of the listening socket; anything but the loopback address lets other
    machines in, who need a session's key."""

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        self._socket = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        self._socket.setblocking(False)
        name = f"[{host}]" if ":" in host else host
        self.url = f"http://{name}:{self._socket.getsockname()[1]}"  # Anthropic's base URL; OpenAI's has /v1 behind
        self._sessions: dict[str, Session] = {}
        self._said: dict[str, tuple[Session, list[Message]]] = {}  # conversations by response id
        self._loop: asyncio.AbstractEventLoop | None = None

    async def start(self) -> None:
        """Listen in the running event loop. Nothing, where it does already."""
        if self._loop is asyncio.get_running_loop():
            return
        self._loop = asyncio.get_running_loop()
        app = web.Application(client_max_size=_MOST_BYTES, middlewares=[_as_json])
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/v1/responses", self._responses)
        app.router.add_post("/v1/messages", self._messages)
        app.router.add_get("/v1/models", self._models)
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0)
        await runner.setup()
        await web.SockSite(runner, self._socket.dup()).start()

    def open(self, session: Session) -> str:
        """Let it in; the key to it."""
        key = f"sk-{secrets.token_urlsafe(24)}"
        self._sessions[key] = session
        return key

    def end(self, key: str) -> None:
        """The key opens nothing any more."""
        session = self._sessions.pop(key)
        session.close()
        self._said = {name: kept for name, kept in self._said.items() if kept[0] is not session}

    def close(self) -> None:
        """Stop listening. Safe to call twice."""
        self._socket.close()

    async def _models(self, request: web.Request) -> web.StreamResponse:
        if self._session(request) is None:
            return _stranger(request)
        found = {"id": MODEL, "object": "model", "created": 0, "owned_by": "verl_like"}
        return web.json_response({"object": "list", "data": [found]})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._serve(request, Chat, lambda body: Chat.read(body), ends="data: [DONE]\n\n")

    async def _messages(self, request: web.Request) -> web.StreamResponse:
        return await self._serve(request, Messages, lambda body: Messages.read(body))

    async def _responses(self, request: web.Request) -> web.StreamResponse:
        def read(body: Mapping[str, Any]) -> Asked:
            earlier = body.get("previous_response_id")
            if earlier is None:
                return Responses.read(body, [])
            session, before = self._said.get(earlier, (None, []))
            if session is None or session is not self._session(request):
                raise Refused(f"previous_response_id={earlier!r} is none of this episode's")
            return Responses.read(body, before)

        return await self._serve(request, Responses, read)

    def _session(self, request: web.Request) -> Session | None:
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        key = request.headers.get("x-api-key") or (key if scheme.lower() == "bearer" else "")
        return self._sessions.get(key.strip())

    async def _serve(self, request: web.Request, form: Any, read: Any, *, ends: str = "") -> web.StreamResponse:
        session = self._session(request)
        if session is None:
            return _stranger(request)
        EPISODE.set(session.episode)
        try:
            body = json.loads(await request.read())
            if not isinstance(body, dict):
                raise Refused("the body must be a JSON object")
            asked = read(body)
            if request.headers.get("x-stainless-retry-count", "0") != "0":  # the official clients say so
                asked = dataclasses.replace(asked, is_retry=True)
            model, identity = str(body.get("model") or MODEL), new_identity()
            answering = asyncio.ensure_future(session.answer(asked))
            answering.add_done_callback(lambda done: done.cancelled() or done.exception())  # or nobody may ask for it
            try:
                if body.get("stream"):
                    return await self._stream(request, session, asked, answering, (form, model, identity), ends)
                reply = await answering
            finally:  # the connection may have broken
                answering.cancel()
        except (ConnectionError, web.HTTPException):  # nobody reads this; the body is too large
            raise
        except (EpisodeAborted, Exception) as error:
            return _error(request, 400, *_told(error, session))
        written = form.write(reply, model, identity)
        self._remember(session, asked, reply, written["id"])
        return web.json_response(written)

    async def _stream(
        self,
        request: web.Request,
        session: Session,
        asked: Asked,
        answering: asyncio.Future[Reply],
        how: tuple[Any, str, str],
        ends: str,
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        form, model, identity = how
        while not (await asyncio.wait({answering}, timeout=_PING_S))[0]:
            if not response.prepared:
                await response.prepare(request)
            await response.write(b": the policy is at work\n\n")
        try:
            reply = answering.result()
            self._remember(session, asked, reply, form.write(reply, model, identity)["id"])
            said = "".join(map(_line, form.stream(asked, reply, model, identity)))
        except (EpisodeAborted, Exception) as error:
            if not response.prepared:  # what was refused at once is an HTTP error, as long as nothing was said
                raise
            said = _line(("error", {"type": "error", **_error_body(*_told(error, session))}))
        if not response.prepared:
            await response.prepare(request)
        await response.write((said + ends).encode())
        await response.write_eof()
        return response

    def _remember(self, session: Session, asked: Asked, reply: Reply, name: str) -> None:
        if name.startswith("resp_"):
            self._said[name] = session, [*asked.messages, reply.message]


def _line(event: Event) -> str:
    name, data = event
    head = "" if name is None else f"event: {name}\n"
    return f"{head}data: {json.dumps(data)}\n\n"  # in ASCII: some clients cut lines at U+2028 too


def _told(error: BaseException, session: Session) -> tuple[str, str]:
    """What the program reads of an error, and its code."""
    if isinstance(error, Refused):
        return str(error), error.code
    if isinstance(error, EpisodeAborted) or error is session.failure:
        return "the episode is no longer wanted", "session_ended"  # the session ends with its error
    if not isinstance(error, ValueError):  # of JSON, say
        logger.warning("a request could not be read", exc_info=error)
    return str(error) or repr(error), "invalid_request_error"


def _error_body(message: str, code: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": code, "code": code, "param": None}}


def _error(request: web.Request, status: int, message: str, code: str) -> web.Response:
    body = ({"type": "error"} if request.path.startswith("/v1/messages") else {}) | _error_body(message, code)
    # The official clients would ask again after 408, 409, 429 and 5xx.
    return web.json_response(body, status=status, headers={"x-should-retry": "false"})


def _stranger(request: web.Request) -> web.Response:
    what = "the API key is no session's, or its episode has ended"
    return _error(request, 401, what, "authentication_error")


@web.middleware
async def _as_json(request: web.Request, handler: Any) -> web.StreamResponse:
    """What aiohttp itself refuses, in the form of the APIs: another path or method, a body that is too large."""
    try:
        return await handler(request)
    except web.HTTPException as error:
        what = f"a body has at most {_MOST_BYTES} bytes" if error.status == 413 else f"{request.method} {request.path}"
        code = "not_found_error" if error.status in (404, 405) else "invalid_request_error"
        return _error(request, error.status, f"{error.reason}: {what}", code)
