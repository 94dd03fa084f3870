"""Types of the tool calls in a response, into which every syntax is read.

A parser never raises on what a model wrote. A call that was begun and cannot be read is listed with what is wrong about
it, beside the calls of the same response that can be.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

NUM_HEAD_CHARACTERS = 80


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """One call: arguments by name, of JSON's types (in XML all are text: the tool's schema knows more)."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parsed:
    """Response taken apart.

    content: the text outside of calls and thinking, as written.
    malformed: one message for each call that was begun and cannot be read: what is wrong, and the head of its text.
    reasoning: the thinking; None where there is none.
    """

    content: str
    calls: tuple[ToolCall, ...] = ()
    malformed: tuple[str, ...] = ()
    reasoning: str | None = None


class ToolCallParser(Protocol):
    """Reads the calls of one syntax. It has no state: one object serves all episodes."""

    def parse(self, text: str) -> Parsed:
        """Takes a response apart, in time linear in its length; never raises.

        text: the decoded response with its special tokens, without the end-of-turn token that ended it. Where the
        prompt ends in an open `<think>`, that tag goes before the text.
        """
        ...


class Malformed(Exception):
    """Reason why a call cannot be read, and the position behind it where that is known; never leaves this package."""

    def __init__(self, why: str, place: int = 0) -> None:
        super().__init__(why)
        self.place = place


@dataclass(slots=True)
class Reading:
    """A `Parsed` in the making."""

    content: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    malformed: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)

    def refuse(self, why: Malformed | str, text: str, start: int) -> None:
        """Lists the call that begins at this place as malformed."""
        head = text[start : start + NUM_HEAD_CHARACTERS]
        self.malformed.append(f"{why}: {head!r}")

    def done(self) -> Parsed:
        return Parsed(
            content="".join(self.content),
            calls=tuple(self.calls),
            malformed=tuple(self.malformed),
            reasoning="\n".join(self.reasoning) if self.reasoning else None,
        )
