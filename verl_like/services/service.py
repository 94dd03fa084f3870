"""Services that the workers of a pool run, their limits, and the outcomes of calls. Standard library only.

ServiceSpec(factory="tools.py:Calculator", arguments={"digits": 3}, timeout=5.0)     in the trainer
service = Calculator(digits=3), once; then service.call(payload) for every call      in each worker
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from verl_like.user_code import load, own_lines

_TRACEBACK_LINES = 4


class ServiceError(ValueError):
    """The service cannot be used at all: missing file or name, failing import, a factory that raises."""


class Service(Protocol):
    """Object that a factory makes in a worker process; it lives as long as the process."""

    is_async: bool  # many calls at a time, in one event loop

    def call(self, payload: Any) -> Any:
        """The result of one call, or an awaitable of it: what can be pickled, or an Outcome of the service's own.

        Of a spec with `batch`: the results of a list of calls, in order. What it raises is the failure of the call.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Result of one call.

    kind: None for a good call; otherwise "exception", "memory", "timeout", "crash", or one of the service's own.
    message: description of the failure.
    """

    kind: str | None = None
    message: str = ""
    seconds: float = 0.0  # time inside the service


@dataclass(frozen=True, slots=True, kw_only=True)
class Result(Outcome):
    """The outcome of a service that returns values."""

    value: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceSpec:
    """Service that a worker loads, and its limits.

    It travels by pickle; the factory it names is imported in the worker alone. `noun` and `section` are for messages:
    "the {noun} worker ...", "no result within {section}timeout=...".
    """

    factory: str  # file.py:name or pkg://module:name
    arguments: dict[str, Any] = field(default_factory=dict)  # of the factory
    batch: bool = False  # the calls that were submitted together are one call of the service
    concurrency: int = 64  # calls that an asynchronous service handles at a time in one worker
    timeout: float = 60.0  # seconds per call
    memory_limit_mb: int | None = None  # address space of a worker
    noun: str = "service"
    section: str = ""  # of the configuration, with its last dot

    outcome: ClassVar[type[Outcome]] = Result
    error: ClassVar[type[ServiceError]] = ServiceError
    payload_name: ClassVar[str] = "the payload"

    @property
    def source(self) -> str:
        """Name the thing that is loaded, for messages: key=value."""
        return f"{self.section}factory={self.factory}"

    def make(self) -> Service:
        """Load the service; only a worker does. Raises a ValueError that names the key to change."""
        factory = load(self.factory, f"{self.section}factory")
        try:
            return factory(**self.arguments)
        except Exception as error:
            tail = own_lines(error, limit=-_TRACEBACK_LINES)
            raise ServiceError(f"{self.source}, called with {self.arguments!r:.200}, failed:\n{tail}") from error


class OwnSpec(ServiceSpec):
    """Base of the package's own specs: the factory takes the spec, and its errors name the key to change."""

    __slots__ = ()

    def make(self) -> Service:
        return load(self.factory, "factory")(self)
