"""Service of a tool worker: the tools, and the episodes that have begun there."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import sys
import threading
import traceback
from typing import Any, TextIO

from verl_like.plugins.agents.tools import text
from verl_like.plugins.agents.tools.environments import EnvironmentWorker
from verl_like.plugins.agents.tools.interactions import Interactions
from verl_like.plugins.agents.tools.kinds import Environment, ToolSource
from verl_like.plugins.agents.tools.loading import load_tools
from verl_like.plugins.agents.tools.tool_call import ToolOutcome, ToolRequest, ToolSpec, ToolUnavailable

PRINTED_CHARS = 20_000  # of what tools print, that goes to the trainer's output, for each call
_MESSAGE_CHARS, _TRACEBACK_CHARS = 1000, 2000


class ToolService:
    """The service of tool workers. Making one raises a ToolError that names the key to change.

    It is asynchronous whatever the tools are: then a tool that awaits too long is cancelled, and its worker goes on.
    """

    is_async = True

    def __init__(self, spec: ToolSpec) -> None:
        self._spec = spec
        programs = [ProgramOutput(1), ProgramOutput(2)]
        sys.stdout, sys.stderr = printed = [Limited(each.real(), 1 + i) for i, each in enumerate(programs)]
        self._outputs = [*printed, *programs]
        self._sources = load_tools(spec)
        self._by_name = {schema["function"]["name"]: source for source in self._sources for schema in source.schemas}
        self._begun: dict[str, list[ToolSource]] = {}

    async def call(self, payload: ToolRequest) -> ToolOutcome:
        """The outcome of a request. Only what the pool must know is raised: the memory is used up, time is over."""
        for output in self._outputs:
            output.left = PRINTED_CHARS
        try:
            match payload.action:
                case "describe":
                    return ToolOutcome(text=json.dumps(self._describe()))
                case "begin":
                    return await self._begin(payload)
                case "end":
                    return await self._end(payload)
                case "respond":
                    return await self._respond(payload)
                case _:
                    return await self._call(payload)
        except MemoryError:
            raise
        except ToolUnavailable as error:
            return ToolOutcome(kind="service", message=self._plain(str(error), _MESSAGE_CHARS))
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            return self._failure(payload, error)

    def _describe(self) -> list[Any]:
        """Describe the tools to the trainer.

        A list of five: (schema, whether it has state, whether it is an environment's) of each tool; whether episodes
            have a life beside calls; whether an environment scores them; the names of simulated users; whether an
            environment answers the model's messages.
        """
        tools = [
            (schema, source.stateful, isinstance(source, Environment))
            for source in self._sources
            for schema in source.schemas
        ]
        scored = any(isinstance(source, Environment) and source.gives_reward for source in self._sources)
        answering = self._answering()
        users = [name for source in answering if isinstance(source, Interactions) for name in source.names]
        acts = any(isinstance(source, EnvironmentWorker) for source in answering)
        return [tools, any(source.stateful for source in self._sources), scored or acts, users, acts]

    def _answering(self) -> list[Interactions | EnvironmentWorker]:
        return [source for source in self._sources if isinstance(source, Interactions | EnvironmentWorker)]

    async def _begin(self, request: ToolRequest) -> ToolOutcome:
        wanted = {id(self._by_name[name]) for name in request.names}
        # An environment begins also where a row selects none of its methods: it says what the episode is about.
        used = [s for s in self._sources if s.stateful and (id(s) in wanted or len(s.schemas) != 1)]
        self._begun[request.session] = used  # those that fail to begin are ended as well
        first = [await source.begin(request.session, request.row) for source in used]
        said = "\n".join(outcome.text for outcome in first if outcome.text)
        state = next((outcome.state for outcome in first if outcome.state is not None), None)
        messages = next((outcome.messages for outcome in first if outcome.messages), [])
        return ToolOutcome(text=self._plain(said, None), messages=self._plain_messages(messages), state=state)

    async def _call(self, request: ToolRequest) -> ToolOutcome:
        source = self._by_name[request.name]
        if source.stateful and source not in self._begun.get(request.session, ()):
            raise ValueError("the episode was not begun, or it failed to begin")
        outcome = await source.call(request.session, request.name, request.arguments)
        shown = self._plain(outcome.text, self._spec.max_response_length)
        return dataclasses.replace(outcome, text=shown)

    async def _respond(self, request: ToolRequest) -> ToolOutcome:
        (users,) = self._answering()
        outcome = await users.respond(request.session, request.messages)
        messages = self._plain_messages(outcome.messages)
        return dataclasses.replace(outcome, text=self._plain(outcome.text, None), messages=messages)

    def _plain_messages(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{**each, "content": self._plain(text.to_text(each.get("content", "")), None)} for each in messages]

    async def _end(self, request: ToolRequest) -> ToolOutcome:
        """End the episode at every source, also after one that fails; the first failure is the outcome.

        Its reward is the environment's, or where none gives one, the sum of the tools'.
        """
        rewards: list[float] = []
        scores: list[float] = []
        metrics: dict[str, float | str | None] = {}
        errors: list[BaseException] = []
        session = request.session
        for source in self._begun.pop(session, []):
            label = {"label": request.label} if isinstance(source, EnvironmentWorker) else {}
            try:
                outcome = await source.end(session, **label)
            except MemoryError:
                raise
            except (Exception, SystemExit, KeyboardInterrupt) as error:
                errors.append(error)
                continue
            metrics |= outcome.metrics
            if outcome.reward is not None:
                (scores if isinstance(source, Environment | EnvironmentWorker) else rewards).append(outcome.reward)
        if errors:
            raise errors[0]
        return ToolOutcome(reward=sum(scores or rewards) if scores or rewards else None, metrics=metrics)

    def _failure(self, request: ToolRequest, error: BaseException) -> ToolOutcome:
        what = f"executing tool '{request.name}'" if request.name else f"at the {request.action} of the episode"
        said = self._plain(f"Error {what}: {_told(error)}", self._spec.max_response_length)
        message = self._plain("".join(traceback.format_exception(error))[-_TRACEBACK_CHARS:], None)
        return ToolOutcome(kind="exception", text=said, message=message)

    def _plain(self, said: str, length: int | None) -> str:
        return text.plain_text(said, length, self._spec.truncate_side)


def _told(error: BaseException) -> str:
    try:
        said = str(error)
    except Exception:  # its own __str__ fails
        said = ""
    return said[:_MESSAGE_CHARS] or type(error).__name__


class Limited(io.TextIOBase):
    """A stream that lets so many characters through: a tool that prints without end must not fill the run's log."""

    def __init__(self, stream: TextIO, number: int) -> None:
        self._stream, self._number = stream, number
        self.left = PRINTED_CHARS

    def write(self, text: str, /) -> int:
        if self.left > 0:
            self._stream.write(text[: self.left])
            self.left -= len(text)
            if self.left <= 0:
                self._stream.write("\n... (a tool printed more than this)\n")
        return len(text)

    def flush(self) -> None:
        self._stream.flush()

    def fileno(self) -> int:
        return self._number  # for a program that is given this stream

    def isatty(self) -> bool:
        return False

    def writable(self) -> bool:
        return True


class ProgramOutput:
    """Puts itself in the place of file descriptor `number`, and lets `left` bytes through: the rest is dropped, so that
    a program that writes without end fills no log and waits for nobody."""

    def __init__(self, number: int) -> None:
        self.left = 0
        self._real = os.dup(number)
        reading, writing = os.pipe()
        os.dup2(writing, number)  # inherited by programs, as the one before was
        os.close(writing)
        threading.Thread(target=self._pass_on, args=(reading,), daemon=True).start()

    def real(self) -> TextIO:
        """Open the descriptor's original target, for the tools' own output."""
        return open(self._real, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)

    def _pass_on(self, reading: int) -> None:
        while data := os.read(reading, 1 << 16):
            if self.left > 0:
                os.write(self._real, data[: self.left])
                self.left -= len(data)
