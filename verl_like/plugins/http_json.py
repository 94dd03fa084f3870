"""JSON over HTTP with further tries, growing pauses and typed errors. Standard library only."""

from __future__ import annotations

import http.client
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from verl_like.config.endpoint import EndpointConfig
from verl_like.services.server import DIRECT

_REPLY_BYTES = 64 * 1024**2
_TRANSIENT_STATUS = (408, 425, 429)  # and 500 upwards
_BODY_CHARS = 500
_CHUNK_BYTES = 65536

Result = TypeVar("Result")


class ServiceError(RuntimeError):
    """Error of a service that did not do what it was asked for, also after trying again.

    status: HTTP's, of a refusal.
    """

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class TransientError(Exception):
    """Error that is worth another try. `read` of `post` may raise it for a reply that is no result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """Address to post to, with time-out and retries."""

    url: str
    timeout: float  # [s] of one request, up to the last byte of its reply
    max_retries: int = 3
    retry_delay: float = 1.0  # [s] before the first further try; doubles each time
    headers: Mapping[str, str] = field(default_factory=dict)
    is_ours: bool = False  # a server of the run: no proxy leads there

    def post(
        self, body: Any, read: Callable[[Any], Result], *, before_each: Callable[[], None] = lambda: None
    ) -> Result:
        """Post `body` and return `read` of the reply. Raises ServiceError.

        before_each: called in front of every try (rate limits).
        """
        trouble = ""
        for attempt in range(self.max_retries + 1):
            if attempt:
                time.sleep(self.retry_delay * 2 ** (attempt - 1))
            before_each()
            try:
                return read(self._once(body))
            except TransientError as error:
                trouble = str(error)
        raise ServiceError(f"{self.url} failed {self.max_retries + 1} times; the last: {trouble}")

    def _once(self, body: Any) -> Any:
        headers = {"Content-Type": "application/json", **self.headers}
        deadline = time.monotonic() + self.timeout
        request = urllib.request.Request(self.url, data=json.dumps(body).encode(), headers=headers)
        try:
            with (DIRECT.open if self.is_ours else urllib.request.urlopen)(request, timeout=self.timeout) as response:
                return json.loads(_read_all(response, deadline))
        except urllib.error.HTTPError as error:
            if error.code in _TRANSIENT_STATUS or error.code >= 500:
                raise TransientError(f"HTTP {error.code}") from error
            text = self._without_keys(error.read(_BODY_CHARS).decode("utf-8", "replace"))
            raise ServiceError(f"{self.url} refuses the request: HTTP {error.code}: {text}", error.code) from error
        except (OSError, http.client.HTTPException, ValueError) as error:  # no connection, too slow, no JSON
            raise TransientError(f"{type(error).__name__}: {error}") from error

    def _without_keys(self, text: str) -> str:
        """Mask the API key where a server repeats the headers."""
        for value in self.headers.values():
            text = text.replace(value.removeprefix("Bearer "), "***")
        return text


def chat_service(endpoint: EndpointConfig, section: str) -> Service:
    """The chat completions of an OpenAI-compatible endpoint. section: its keys.

    Raises ValueError if the API key's environment variable is named but not set.
    """
    headers: dict[str, str] = {}
    if endpoint.api_key_env is not None:
        key = os.environ.get(endpoint.api_key_env)
        if not key:
            raise ValueError(f"{section}.api_key_env={endpoint.api_key_env}: there is no such environment variable")
        headers["Authorization"] = f"Bearer {key}"
    return Service(
        url=f"{(endpoint.url or '').rstrip('/')}/chat/completions",
        timeout=endpoint.timeout,
        max_retries=endpoint.max_retries,
        retry_delay=endpoint.retry_delay,
        headers=headers,
    )


def answer_of(reply: Any) -> tuple[str, str, int | None]:
    """Text and finish reason of a chat completion, and the tokens of prompt and answer.

    Raises TransientError for any other reply.
    """
    try:
        choice = reply["choices"][0]
        text, reason = choice["message"]["content"], choice.get("finish_reason")
        used = (reply.get("usage") or {}).get("total_tokens")
    except (LookupError, TypeError, AttributeError) as error:
        raise TransientError(f"the reply is no chat completion: {str(reply)[:_BODY_CHARS]}") from error
    return text if isinstance(text, str) else "", str(reason), used if isinstance(used, int) else None


def _read_all(response: http.client.HTTPResponse, deadline: float) -> bytes:
    """The body, however slowly it drips. TimeoutError after `deadline` (monotonic), ValueError if it is too long."""
    data = bytearray()
    while part := response.read1(_CHUNK_BYTES):
        data += part
        if len(data) > _REPLY_BYTES:
            raise ValueError(f"a reply of more than {_REPLY_BYTES} bytes")
        if time.monotonic() > deadline:
            raise TimeoutError("timed out in the middle of the reply")
    return bytes(data)
