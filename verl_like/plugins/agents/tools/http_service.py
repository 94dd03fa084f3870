"""A tool that asks an HTTP service: arguments go into the address, the query string and the JSON body; the reply's text
is what the model reads."""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from verl_like.plugins.agents.tools.schema import settings_of
from verl_like.plugins.agents.tools.tool_call import ToolUnavailable

_ARGUMENT = re.compile(r"\{(\w+)\}")
_METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE")
_TRANSIENT = (408, 425, 429)  # and 500 upwards: worth another try
_NOT_THE_MODELS = (401, 403, 407)  # what the run is not allowed to do, whatever the model asks
_MAX_DELAY_S, _BODY_CHARS = 30.0, 500


@dataclass(frozen=True, kw_only=True)
class HttpSettings:
    """Settings of an HTTP tool: the `config` of its entry.

    "{name}" stands for an argument in `url`, `query` and `body`: a text that is nothing else becomes the argument as it
    is (a list, a number).

    query: of the address.
    body: JSON; null: all arguments (nothing with GET and DELETE).
    header_env: header -> environment variable that holds it, for what must stand in no file.
    result: path into a JSON reply, such as result.0; null: the whole reply.
    timeout: [s] of one try.
    retry_delay: [s] before the second try; doubles with each.
    max_response_bytes: most bytes of the reply.
    """

    url: str
    method: str = "POST"
    headers: Mapping[str, str] = field(default_factory=dict)
    header_env: Mapping[str, str] = field(default_factory=dict)
    query: Mapping[str, Any] = field(default_factory=dict)
    body: Any = None
    result: str | None = None
    timeout: float = 10.0
    max_retries: int = 3
    retry_delay: float = 0.5
    max_response_bytes: int = 1 << 20

    def __post_init__(self) -> None:
        if not str(self.url).startswith(("http://", "https://")):
            raise ValueError(f"http: config.url={self.url!r}: must begin with http:// or https://")
        if self.method not in _METHODS:
            raise ValueError(f"http: config.method={self.method!r}: must be one of {', '.join(_METHODS)}")
        if self.timeout <= 0 or self.max_retries < 0 or self.retry_delay < 0 or self.max_response_bytes < 1:
            raise ValueError("http: config.timeout and max_response_bytes must be above 0, the others not below")
        for header, variable in self.header_env.items():
            if not os.environ.get(variable):
                raise ValueError(f"http: config.header_env.{header}={variable}: that variable is not set; export it")


class HttpService:
    """The tool, in verl's form, without state.

    A reply of 2xx is the answer, and so is one of 4xx (the model asked for what is not there). What may pass (no
    connection, too slow, 429, 5xx) is tried again; after the last try, and for 401, 403 and 407, it is unavailable.
    """

    stateful = False

    def __init__(self, config: dict[str, Any], tool_schema: Any = None) -> None:
        if tool_schema is None:
            raise ValueError("http: there is no tool_schema; write one: it is what the model knows of the service")
        self.tool_schema = tool_schema
        self._settings = settings_of(HttpSettings, config, "http")
        parameters = tool_schema.model_dump()["function"].get("parameters") or {}
        known = set(parameters.get("properties") or {})
        used = {name for part in ("url", "query", "body") for name in _arguments_in(getattr(self._settings, part))}
        if unknown := sorted(used - known):
            raise ValueError(f"http: config uses {{{unknown[0]}}}, which tool_schema does not have: {sorted(known)}")
        import httpx  # here: importing it takes a while, and no call is to pay for that

        self._httpx, self._client = httpx, None

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> tuple[str, None, dict]:
        """The reply as text. Metrics: status, tries. ToolUnavailable where no try gave an answer."""
        settings, client, trouble, pause = self._settings, self._ready(), "", 0.0
        for tried in range(settings.max_retries + 1):
            if tried:
                await asyncio.sleep(min(max(pause, settings.retry_delay * 2 ** (tried - 1)), _MAX_DELAY_S))
            try:
                async with asyncio.timeout(settings.timeout):
                    status, data, pause = await self._once(client, parameters)
            except (TimeoutError, self._httpx.TransportError) as error:
                trouble, pause = f"{type(error).__name__} {error}".strip(), 0.0
                continue
            if status in _NOT_THE_MODELS or 300 <= status < 400:
                raise ToolUnavailable(f"{self._where()} answers HTTP {status}: {_shown(data)}")
            if status < 500 and status not in _TRANSIENT:
                return self._told(status, data), None, {"status": status, "tries": tried + 1}
            trouble = f"HTTP {status}: {_shown(data)}"
        raise ToolUnavailable(f"{self._where()} failed {settings.max_retries + 1} times; the last: {trouble}")

    async def _once(self, client: Any, arguments: dict[str, Any]) -> tuple[int, bytes, float]:
        """Status, body, and the pause [s] that the service asks for."""
        settings = self._settings
        body = arguments if settings.body is None else _filled(settings.body, arguments)
        sends = settings.body is not None or settings.method not in ("GET", "DELETE")
        url = _ARGUMENT.sub(lambda found: quote(_text(arguments.get(found[1], "")), safe=""), settings.url)
        secret = {header: os.environ[variable] for header, variable in settings.header_env.items()}
        request = client.build_request(
            settings.method,
            url,
            params=_filled(dict(settings.query), arguments) or None,
            headers={**settings.headers, **secret},
            json=body if sends else None,
        )
        response = await client.send(request, stream=True)
        try:
            data = bytearray()
            async for part in response.aiter_bytes():
                data += part
                if len(data) > settings.max_response_bytes:
                    raise ValueError(f"the reply is longer than {settings.max_response_bytes} bytes")
        finally:
            await response.aclose()
        after = response.headers.get("retry-after", "")
        return response.status_code, bytes(data), float(after) if after.isdigit() else 0.0

    def _told(self, status: int, data: bytes) -> str:
        if status >= 400:
            return f"Error: HTTP {status}: {_shown(data)}"
        said = data.decode("utf-8", "replace")
        if self._settings.result is None:
            return said
        try:
            value = json.loads(said)
            for step in self._settings.result.split("."):
                value = value[int(step)] if isinstance(value, list) else value[step]
        except (ValueError, LookupError, TypeError):  # of another shape: perhaps it says why
            return said
        return _text(value)

    def _where(self) -> str:
        return f"{self._settings.method} {self._settings.url}"  # without arguments, and no header: it goes to logs

    def _ready(self) -> Any:
        """One client for all calls: it keeps connections, and belongs to the event loop of the first call."""
        if self._client is None:
            self._client = self._httpx.AsyncClient(timeout=None)
        return self._client


def _arguments_in(template: Any) -> set[str]:
    if isinstance(template, str):
        return set(_ARGUMENT.findall(template))
    if isinstance(template, Mapping):
        return {name for value in template.values() for name in _arguments_in(value)}
    if isinstance(template, list):
        return {name for value in template for name in _arguments_in(value)}
    return set()


def _filled(template: Any, arguments: Mapping[str, Any]) -> Any:
    """The template with arguments in it; keys whose argument the call left out are left out too."""
    if isinstance(template, str):
        if whole := _ARGUMENT.fullmatch(template):
            return arguments.get(whole[1])
        return _ARGUMENT.sub(lambda found: _text(arguments.get(found[1], "")), template)
    if isinstance(template, Mapping):
        filled = {key: _filled(value, arguments) for key, value in template.items()}
        return {key: value for key, value in filled.items() if value is not None or template[key] is None}
    if isinstance(template, list):
        return [_filled(value, arguments) for value in template]
    return template


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _shown(data: bytes) -> str:
    return data[: 4 * _BODY_CHARS].decode("utf-8", "replace")[:_BODY_CHARS]
