"""Messages between the trainer and a tool worker. Standard library only."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any, ClassVar

from verl_like.services.service import Outcome, OwnSpec, ServiceError

_SAID = {
    "timeout": "it took too long",
    "crash": "its process failed",
    "memory": "it ran out of memory",
    "exception": "it failed",
    "service": "its service does not answer",
}
LOST = ("timeout", "crash", "memory", "service")  # no fault of the model's: the call has no answer


class ToolError(ServiceError):
    """The tools cannot be used at all: missing file or class, failing import, no schema, two tools of one name."""


class ToolUnavailable(Exception):
    """Error that a tool raises when a service or a database it needs does not answer, whatever the model asks.

    The call is lost, with kind "service"; any other exception of a tool is shown to the model.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolOutcome(Outcome):
    """Result of a tool call.

    kind: None for a good call; besides the kinds of `Outcome`, "unknown_tool", "bad_arguments" or "service"
        (ToolUnavailable).
    text: the answer that the model reads, also where the call failed; `message` is for people, and may tell more.
    media: images and videos of the answer, as `kinds.media_of` gives them.
    state: `state_id` of the environment after the call, if it tells one.
    done: a simulated user or an environment has ended the conversation.
    truncated: a limit of steps has cut it off.
    messages: the answer as messages instead of text; when an episode begins, the whole prompt.
    anew: `messages` are the whole context of the next turn.
    """

    text: str = ""
    media: list[tuple[str, Any]] = field(default_factory=list)
    messages: list[dict[str, Any]] = field(default_factory=list)
    anew: bool = False
    state: int | None = None
    done: bool = False
    truncated: bool = False
    reward: float | None = None  # of a call: this step's; at the end: the episode's. None where nobody gave one
    metrics: dict[str, float | str | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.kind in _SAID and not self.text:  # an outcome that the pool made
            object.__setattr__(self, "text", f"Error executing tool: {_SAID[self.kind]}")


def state_id(description: str) -> int:
    """A number for a state, 0 to 2^63 - 1: equal for equal descriptions, in every process."""
    digest = hashlib.blake2b(description.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


KEYS = "actor_rollout_ref.rollout.multi_turn."
ROW_KEY = "environment"  # in extra_info: what a row plays


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolSpec(OwnSpec):
    """Tools that a worker loads, from any of the five sources, at least one.

    concurrency: calls that one worker handles at a time. More than 1 is for tools that wait for a network: a tool that
        computes or blocks holds up the others, and one that hangs takes their episodes with it.
    """

    factory: str = "verl_like.plugins.agents.tools.service:ToolService"
    concurrency: int = 1
    noun: str = "tool"
    section: str = f"{KEYS}tool_"  # tool_timeout, tool_memory_limit_mb

    tool_config_path: str | None = None  # YAML file that lists classes (verl's form)
    function_tool_path: str | None = None  # Python file with @function_tool functions
    environment_path: str | None = None  # a class whose methods are tools, or that answers: file.py:Name, pkg://m:Name
    environments: tuple[tuple[str, str], ...] = ()  # kinds that rows play, and their configuration as JSON
    worker_cls: str | None = None  # an EnvironmentWorker of the user's
    interaction_config_path: str | None = None  # YAML file that lists simulated users (verl's form)
    max_response_length: int | None = None  # characters of a tool's text; None: a mebibyte
    truncate_side: str = "middle"  # which part of a longer one is cut: left, middle, right

    outcome: ClassVar[type[Outcome]] = ToolOutcome
    error: ClassVar[type[ServiceError]] = ToolError
    payload_name: ClassVar[str] = "the row, or a tool's arguments,"

    @property
    def source(self) -> str:
        """The keys that name tools, for messages."""
        names = ("tool_config_path", "function_tool_path", "environment_path", "interaction_config_path")
        keys = [f"{KEYS}{n}={getattr(self, n)}" for n in names if getattr(self, n) is not None]
        return ", ".join([*keys, *(f"env.custom: {kind}" for kind, _ in self.environments)])


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolRequest:
    """One message to a worker. action: "describe", "begin", "call", "respond" (a simulated user's) or "end"."""

    action: str
    session: str = ""
    name: str = ""  # of the tool to call
    names: tuple[str, ...] = ()  # of the tools that the episode may call
    arguments: dict[str, Any] = field(default_factory=dict)
    row: dict[str, Any] = field(default_factory=dict)  # see `toolbox.fields_of`
    messages: list[dict[str, Any]] = field(default_factory=list)  # of the conversation, for a simulated user
    label: str = ""  # of an end: what the episode's picture is called
