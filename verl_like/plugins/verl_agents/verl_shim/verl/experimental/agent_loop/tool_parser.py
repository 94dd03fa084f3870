"""verl.experimental.agent_loop.tool_parser, by the package's own parsers."""

from __future__ import annotations

import asyncio
import json
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

from pydantic import BaseModel

from verl_like.episodes.transcript import without_end
from verl_like.plugins.agents.tool_calls.formats import parser_of


class FunctionCall(BaseModel):
    """A call: the arguments are JSON as text."""

    arguments: str
    name: str
    tool_call_id: str | None = None


class ToolParser(ABC):
    """Finds calls in what the model wrote."""

    _registry: ClassVar[dict[str, type[ToolParser]]] = {}

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    @property
    def stop_token_ids(self) -> list[int]:
        """Tokens that must end a turn beside the model's own."""
        return []

    @abstractmethod
    async def extract_tool_calls(self, responses_ids: list[int], tools: Any = None) -> tuple[str, list[FunctionCall]]:
        """The text without calls, and the calls."""

    @classmethod
    def get_tool_parser(cls, name: str, tokenizer: Any) -> ToolParser:
        """A parser that was registered, or the package's own of this format. Raises ValueError for an unknown name."""
        return cls._registry[name](tokenizer) if name in cls._registry else _OwnParser(tokenizer, name)

    @classmethod
    def register(cls, name: str) -> Callable[[type[ToolParser]], type[ToolParser]]:
        def note(subclass: type[ToolParser]) -> type[ToolParser]:
            cls._registry[name] = subclass
            return subclass

        return note


class _OwnParser(ToolParser):
    def __init__(self, tokenizer: Any, name: str) -> None:
        super().__init__(tokenizer)
        self._parser = parser_of(name)

    async def extract_tool_calls(self, responses_ids: list[int], tools: Any = None) -> tuple[str, list[FunctionCall]]:
        ids = without_end(responses_ids, getattr(self.tokenizer, "end_ids", (self.tokenizer.eos_token_id,)))
        text = await asyncio.get_running_loop().run_in_executor(None, self.tokenizer.decode, ids)
        parsed = self._parser.parse(text)
        if not parsed.calls:
            return text, []
        calls = [FunctionCall(name=c.name, arguments=json.dumps(c.arguments, ensure_ascii=False)) for c in parsed.calls]
        return parsed.content or "", calls
