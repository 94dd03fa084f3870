"""HTTP of the protocol, under /api/v1: keys, sizes, and errors in its form, {"detail": what is wrong}.

The key is looked at before the body. Statuses that clients repeat for minutes (408, 409, 429, 5xx) are said only where
that is meant.
"""

from __future__ import annotations

import hmac
import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from aiohttp import web

from verl_like.plugins.tinker_server import bodies, wire
from verl_like.plugins.tinker_server.service import Service
from verl_like.plugins.tinker_server.wire import Refused

log = logging.getLogger(__name__)

EVERYONE = "everyone"  # the tenant where there are no keys
_CONFIG = {
    "pjwt_auth_enabled": False,
    "parallel_fwdbwd_chunks": True,
    "proto_compress_fwdbwd": False,
    "sample_use_retrieve_futures": False,
    "custom_loss_server_side": False,
    "sample_join_sampling_session": True,
}
_DYNAMIC_CONFIG = {"sample_cancel_enabled": True}
_OF_MODELS = ("optim_step", "save_weights", "save_weights_for_sampler")
Answer = dict[str, Any] | web.Response | None
Handler = Callable[[web.Request, str], Awaitable[Answer]]


def application(service: Service, keys: Mapping[str, str] | None, max_bytes: int) -> web.Application:
    """Make the application. keys: tenant -> its key; None: everybody is one tenant."""
    app = web.Application(client_max_size=max_bytes, middlewares=[_guarded(keys)])
    routes = _Routes(service)
    for method, path, handler in routes.table():
        app.router.add_route(method, f"/api/v1/{path}", _answered(handler))
    return app


def _guarded(keys: Mapping[str, str] | None) -> Any:
    """Let known keys in, and tell all that goes wrong as JSON."""

    @web.middleware
    async def guard(request: web.Request, handler: Any) -> web.StreamResponse:
        try:
            request["tenant"] = EVERYONE if keys is None or request.path == "/api/v1/healthz" else _tenant(request, keys)
            if request.headers.get("Content-Encoding", "identity").lower() != "identity":
                raise Refused("a compressed body: send it as it is", 415)
            return await handler(request)
        except Refused as error:
            return _refusal(str(error), error.status)
        except web.HTTPRequestEntityTooLarge:
            most = request.app._client_max_size // 2**20
            return _refusal(f"a body has at most {most} MB here (serve.max_request_megabytes)", 413)
        except web.HTTPException as error:
            what = {404: "is no part of the protocol that is answered here", 405: "does not take this method"}
            return _refusal(f"{request.method} {request.path} {what.get(error.status, error.reason)}", error.status)

    return guard


def _tenant(request: web.Request, keys: Mapping[str, str]) -> str:
    given = request.headers.get("X-API-Key", "").encode()
    found = [tenant for tenant, key in keys.items() if hmac.compare_digest(given, key.encode())]  # always all of them
    if not found:
        raise Refused("the API key (header X-API-Key) is none of this server's", 401)
    return found[0]


def _refusal(text: str, status: int) -> web.Response:
    return web.json_response({"detail": text, "error": text, "category": "user"}, status=status)


def _answered(handler: Handler) -> Any:
    async def answer(request: web.Request) -> web.Response:
        found = await handler(request, request["tenant"])
        if isinstance(found, web.Response):
            return found
        return web.Response(status=204) if found is None else web.json_response(found)

    return answer


class _Routes:
    """Handlers of all routes: each reads a body and calls the service."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def table(self) -> list[tuple[str, str, Handler]]:
        """List (method, path, handler)."""
        service, run, checkpoint = self._service, "training_runs/{model}", "training_runs/{model}/checkpoints/{kind}/{name}"
        return [
            ("GET", "healthz", self._fixed({"status": "ok"})),
            ("GET", "get_server_capabilities", self._fixed(service.capabilities())),
            ("POST", "client/config", self._fixed(_CONFIG)),
            ("POST", "client/dynamic_config", self._fixed(_DYNAMIC_CONFIG)),
            ("POST", "telemetry", self._fixed({"status": "accepted"})),  # and thrown away
            ("POST", "create_session", self._json(bodies.CreateSession, service.create_session)),
            ("POST", "session_heartbeat", self._json(bodies.OfSession, lambda t, b: service.heartbeat(t, b.session_id))),
            ("POST", "sessions/{session}/finish", self._path(service.finish_session, "session")),
            ("GET", "sessions/{session}", self._path(service.session, "session")),
            ("GET", "sessions", self._page(service.sessions)),
            ("POST", "create_model", self._with_body(bodies.CreateModel, service.create_model)),
            ("POST", "load_weights", self._load),
            ("POST", "get_info", self._json(bodies.OfModelAlone, lambda t, b: service.info(t, b.model_id))),
            ("POST", "forward_backward", self._forward_backward),
            *(("POST", kind, self._ordered(kind)) for kind in _OF_MODELS),
            ("POST", "create_sampling_session", self._json(bodies.CreateSampler, service.create_sampler)),
            ("POST", "join_sampling_session", self._json(bodies.OfSampler, lambda t, b: service.join_sampler(t, b.sampling_session_id))),
            ("GET", "samplers/{sampler}", self._path(service.sampler, "sampler")),
            ("POST", "asample", self._sample),
            ("POST", "retrieve_future", self._retrieve),
            ("POST", "cancel_future", self._json(bodies.Retrieve, lambda t, b: service.cancel(t, b.request_id))),
            ("POST", "weights_info", self._json(bodies.OfPath, lambda t, b: service.weights_info(t, b.tinker_path))),
            ("GET", "training_runs", self._page(service.runs)),
            ("GET", run, self._path(service.run, "model")),
            ("GET", f"{run}/checkpoints", self._checkpoints),
            ("GET", "checkpoints", self._checkpoints),
            ("DELETE", checkpoint, self._delete),
            ("PUT", f"{checkpoint}/ttl", self._ttl),
        ]

    def _fixed(self, answer: dict[str, Any]) -> Handler:
        async def handle(request: web.Request, tenant: str) -> Answer:
            await request.read()
            return answer

        return handle

    def _json(self, kind: type[bodies.Body], call: Callable[[str, Any], Answer]) -> Handler:
        async def handle(request: web.Request, tenant: str) -> Answer:
            return call(tenant, bodies.read(kind, await request.read()))

        return handle

    def _with_body(self, kind: type[bodies.Body], call: Callable[[str, Any, bytes], Answer]) -> Handler:
        async def handle(request: web.Request, tenant: str) -> Answer:
            body = await request.read()
            return call(tenant, bodies.read(kind, body), body)

        return handle

    def _ordered(self, kind: str) -> Handler:
        async def handle(request: web.Request, tenant: str) -> Answer:
            return self._service.submit(tenant, kind, await request.read())

        return handle

    def _path(self, call: Callable[[str, str], Answer], name: str) -> Handler:
        async def handle(request: web.Request, tenant: str) -> Answer:
            await request.read()
            return call(tenant, request.match_info[name])

        return handle

    def _page(self, call: Callable[[str, int, int], Answer]) -> Handler:
        async def handle(request: web.Request, tenant: str) -> Answer:
            return call(tenant, *_limits(request))

        return handle

    async def _forward_backward(self, request: web.Request, tenant: str) -> Answer:
        if request.content_type != wire.PROTOBUF:
            raise Refused(f"forward_backward takes {wire.PROTOBUF}: use tinker 0.38 or a newer one", 415)
        return self._service.submit_pass(tenant, await request.read())

    async def _load(self, request: web.Request, tenant: str) -> Answer:
        body = await request.read()
        try:
            creates = json.loads(body).get("session_id") is not None
        except (ValueError, AttributeError) as error:
            raise Refused(f"the body is no JSON object: {error}", 422) from error
        if creates:
            return self._service.create_by_load(tenant, bodies.read(bodies.CreateByLoad, body), body)
        return self._service.submit(tenant, "load", body)

    async def _sample(self, request: web.Request, tenant: str) -> Answer:
        return self._service.submit_sample(tenant, await request.read())

    async def _retrieve(self, request: web.Request, tenant: str) -> Answer:
        asked = bodies.read(bodies.Retrieve, await request.read())
        found = await self._service.retrieve(tenant, asked.request_id)
        if found is None:  # the client asks again at once
            told = {"type": "try_again", "request_id": asked.request_id, "queue_state": "active"}
            return web.json_response(told, status=408)
        binary = found["status"] == "done" and found["kind"] in ("sample", "forward", "forward_backward")
        return web.Response(body=found["result"], content_type=wire.PROTOBUF if binary else "application/json")

    async def _checkpoints(self, request: web.Request, tenant: str) -> Answer:
        return self._service.checkpoints(tenant, request.match_info.get("model"), *_limits(request))

    async def _delete(self, request: web.Request, tenant: str) -> Answer:
        self._service.delete_checkpoint(tenant, _checkpoint_path(request))
        return None

    async def _ttl(self, request: web.Request, tenant: str) -> Answer:
        asked = bodies.read(bodies.Ttl, await request.read())
        self._service.set_ttl(tenant, _checkpoint_path(request), asked.ttl_seconds)
        return None


def _checkpoint_path(request: web.Request) -> str:
    place = request.match_info
    return f"tinker://{place['model']}/{place['kind']}/{place['name']}"


def _limits(request: web.Request) -> tuple[int, int]:
    """Read limit and offset of a list. Raises Refused for what are no numbers."""
    try:
        limit, offset = (int(request.query.get(name, default)) for name, default in (("limit", 100), ("offset", 0)))
    except ValueError as error:
        raise Refused(f"limit and offset must be whole numbers: {error}") from error
    if not (1 <= limit <= 1000 and 0 <= offset):
        raise Refused(f"limit={limit} must be 1 to 1000, offset={offset} at least 0")
    return limit, offset
