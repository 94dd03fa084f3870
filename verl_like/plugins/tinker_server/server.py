"""HTTP of the protocol, under /api/v1: keys, sizes, and errors in its form, {"detail": what is wrong}.

The key is looked at before the body. Statuses that clients repeat for minutes (408, 409, 429, 5xx) are said only where
that is meant.
"""

from __future__ import annotations

import hmac
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from aiohttp import web

from verl_like.plugins.tinker_server import bodies
from verl_like.plugins.tinker_server.bodies import Refused
from verl_like.plugins.tinker_server.service import Service
from verl_like.plugins.tinker_server.wire import PROTOBUF

logger = logging.getLogger(__name__)
EVERYONE = "everyone"  # the tenant where there are no keys
# Flags that are not named are off in any client
_CONFIG = {"parallel_fwdbwd_chunks": True, "sample_join_sampling_session": True}
_BINARY = ("sample", "forward", "forward_backward")  # whose results are protobuf
_RUN, _CHECKPOINT = "training_runs/{model}", "training_runs/{model}/checkpoints/{kind}/{name}"
_ONCE = ("create_session", "join_sampling_session", _CHECKPOINT)  # without a number, but with an idempotency key


@dataclass(frozen=True, slots=True)
class _Call:
    """One request: the service, who asks, and what."""

    service: Service
    tenant: str
    request: web.Request
    body: bytes

    def at(self, name: str) -> str:
        """A part of the path."""
        return self.request.match_info[name]

    def path(self) -> str:
        """Path of the checkpoint that the URL names."""
        return f"tinker://{self.at('model')}/{self.at('kind')}/{self.at('name')}"

    def text(self, name: str) -> str:
        """A text of the body."""
        return bodies.text(self.body, name)

    def page(self) -> tuple[int, int]:
        """Read limit and offset of a list. Raises Refused for what are no numbers."""
        query = self.request.query
        try:
            limit, offset = int(query.get("limit", 100)), int(query.get("offset", 0))
        except ValueError as error:
            raise Refused(f"limit and offset must be whole numbers: {error}") from error
        if not (1 <= limit <= 1000 and 0 <= offset < 2**31):
            raise Refused("limit must be 1 to 1000, offset 0 to 2,147,483,647")
        return limit, offset


def _forward_backward(c: _Call) -> Any:
    if c.request.content_type != PROTOBUF:
        raise Refused(f"forward_backward takes {PROTOBUF}: use tinker 0.38 or a newer one", 415)
    return c.service.submit_pass(c.tenant, c.body)


def _load(c: _Call) -> Any:
    try:
        creates = json.loads(c.body).get("session_id") is not None
    except (ValueError, AttributeError, RecursionError) as error:
        raise Refused(f"the body is no JSON object: {error}", 422) from error
    return c.service.create_by_load(c.tenant, c.body) if creates else c.service.submit(c.tenant, "load", c.body)


async def _retrieve(c: _Call) -> web.Response:
    request = c.text("request_id")
    found = await c.service.retrieve(c.tenant, request)
    if found is None:  # the client asks again at once
        told = {"type": "try_again", "request_id": request, "queue_state": "active"}
        return web.json_response(told, status=408)
    binary = found["status"] == "done" and found["kind"] in _BINARY
    return web.Response(body=found["result"], content_type=PROTOBUF if binary else "application/json")


def _ordered(kind: str) -> tuple[str, str, Callable[[_Call], Any]]:
    return "POST", kind, lambda c: c.service.submit(c.tenant, kind, c.body)


_ROUTES: list[tuple[str, str, Callable[[_Call], Any]]] = [
    ("GET", "get_server_capabilities", lambda c: c.service.capabilities()),
    ("POST", "client/config", lambda c: _CONFIG),
    ("POST", "client/dynamic_config", lambda c: {"sample_cancel_enabled": True}),
    ("POST", "telemetry", lambda c: {"status": "accepted"}),  # and thrown away
    ("POST", "create_session", lambda c: c.service.create_session(c.tenant, c.body)),
    ("POST", "session_heartbeat", lambda c: c.service.heartbeat(c.tenant, c.text("session_id"))),
    ("POST", "sessions/{session}/finish", lambda c: c.service.finish_session(c.tenant, c.at("session"))),
    ("GET", "sessions/{session}", lambda c: c.service.catalogue.session(c.tenant, c.at("session"))),
    ("GET", "sessions", lambda c: c.service.catalogue.sessions(c.tenant, *c.page())),
    ("POST", "create_model", lambda c: c.service.create_model(c.tenant, c.body)),
    ("POST", "load_weights", _load),
    ("POST", "get_info", lambda c: c.service.info(c.tenant, c.text("model_id"))),
    ("POST", "forward_backward", _forward_backward),
    *map(_ordered, ("optim_step", "save_weights", "save_weights_for_sampler")),
    ("POST", "create_sampling_session", lambda c: c.service.create_sampler(c.tenant, c.body)),
    ("POST", "join_sampling_session", lambda c: c.service.join_sampler(c.tenant, c.text("sampling_session_id"))),
    ("GET", "samplers/{sampler}", lambda c: c.service.sampler(c.tenant, c.at("sampler"))),
    ("POST", "asample", lambda c: c.service.submit_sample(c.tenant, c.body)),
    ("POST", "retrieve_future", _retrieve),
    ("POST", "cancel_future", lambda c: c.service.cancel(c.tenant, c.text("request_id"))),
    ("POST", "weights_info", lambda c: c.service.catalogue.weights_info(c.tenant, c.text("tinker_path"))),
    ("GET", "training_runs", lambda c: c.service.catalogue.runs(c.tenant, *c.page())),
    ("GET", _RUN, lambda c: c.service.catalogue.run(c.tenant, c.at("model"))),
    ("GET", f"{_RUN}/checkpoints", lambda c: c.service.catalogue.checkpoints(c.tenant, c.at("model"), *c.page())),
    ("GET", "checkpoints", lambda c: c.service.catalogue.checkpoints(c.tenant, None, *c.page())),
    ("DELETE", _CHECKPOINT, lambda c: c.service.catalogue.delete_checkpoint(c.tenant, c.path())),
    ("PUT", f"{_CHECKPOINT}/ttl", lambda c: c.service.catalogue.set_ttl(c.tenant, c.path(), c.body)),
]


def application(service: Service, keys: Mapping[str, str] | None, max_bytes: int) -> web.Application:
    """Make the application. keys: tenant -> its key; None: everybody is one tenant."""
    app = web.Application(client_max_size=max_bytes, middlewares=[_told])
    app.router.add_get("/api/v1/healthz", _healthy)
    for method, path, function in _ROUTES:
        app.router.add_route(method, f"/api/v1/{path}", _answered(service, function, keys, once=path in _ONCE))
    return app


async def _healthy(request: web.Request) -> web.Response:
    """Answer whoever asks, without a key, so without a look at a body."""
    return web.json_response({"status": "ok"})


def _answered(service: Service, function: Callable[[_Call], Any], keys: Mapping[str, str] | None, once: bool) -> Any:
    """Let known keys in, before a body is read, and write what a function says."""

    async def answer(request: web.Request) -> web.Response:
        tenant = EVERYONE if keys is None else _tenant(request, keys)
        if request.headers.get("Content-Encoding", "identity").lower() != "identity":
            raise Refused("a compressed body: send it as it is", 415)
        call = _Call(service, tenant, request, await request.read())
        if once and (given := request.headers.get("X-Idempotency-Key")):
            found = service.once([tenant, request.method, request.path, given], call.body, partial(function, call))
        else:
            found = function(call)
        if function is _retrieve:
            return await found
        return web.Response(status=204) if found is None else web.json_response(found)

    return answer


def _tenant(request: web.Request, keys: Mapping[str, str]) -> str:
    given = request.headers.get("X-API-Key", "").encode("utf-8", "surrogateescape")
    found = [tenant for tenant, key in keys.items() if hmac.compare_digest(given, key.encode())]  # always all of them
    if not found:
        raise Refused("the API key (header X-API-Key) is none of this server's", 401)
    return found[0]


@web.middleware
async def _told(request: web.Request, handler: Any) -> web.StreamResponse:
    """Tell all that goes wrong as JSON."""
    try:
        return await handler(request)
    except Refused as error:
        text, status = str(error), error.status
    except web.HTTPRequestEntityTooLarge:
        most = request.app._client_max_size // 2**20
        text, status = f"a body has at most {most} MB here (serve.max_request_megabytes)", 413
    except web.HTTPException as error:
        what = {404: "is no part of the protocol that is answered here", 405: "does not take this method"}
        text, status = f"{request.method} {request.path} {what.get(error.status, error.reason)}", error.status
    except ConnectionResetError:
        text, status = "the line broke within the body", 400  # which nobody reads
    except Exception as error:
        logger.exception("%s %s failed", request.method, request.path)
        told = {"detail": f"{type(error).__name__}: {error}", "error": str(error), "category": "server"}
        return web.json_response(told, status=500)
    return web.json_response({"detail": text, "error": text, "category": "user"}, status=status)
