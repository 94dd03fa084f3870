"""verl.workers.rollout.chat_scheduler (verl 0.4 and 0.5): what completion callbacks inherit from."""

from __future__ import annotations

import asyncio
import json
from abc import ABC, abstractmethod
from typing import Any

from verl_like.plugins.verl_agents.callback_loop import ChatScheduler

ChatCompletionScheduler = ChatScheduler


class CompletionCallback(ABC):
    """Called after each answer; goes on by `scheduler.submit_chat_completions`. tools: name -> BaseTool."""

    def __init__(self, config: Any, scheduler: ChatScheduler) -> None:
        self.config, self.scheduler = config, scheduler
        self.max_assistant_turns = config.actor_rollout_ref.rollout.multi_turn.max_assistant_turns
        self.tools = {tool.name: tool for tool in scheduler.tools}
        self.tokenizer = scheduler.tokenizer
        self._tool_schemas = [
            tool.tool_schema.model_dump(exclude_unset=True, exclude_none=True) for tool in scheduler.tools
        ]

    @property
    def tool_schemas(self) -> list[dict[str, Any]]:
        """Schemas of the tools, as the chat template shows them."""
        return self._tool_schemas

    @property
    def extra_body(self) -> dict[str, Any] | None:
        """Sampling parameters beside the run's."""
        return None

    @abstractmethod
    async def __call__(self, messages: list[dict[str, Any]], completions: Any, info: dict[str, Any]) -> None:
        """Handle an answer of the policy.

        messages: the conversation so far, without the answer.
        completions: the answer, in the form of OpenAI's chat interface.
        """

    def postprocess(self, batch: Any, batch_conversations: list[list[dict[str, Any]]], n: int) -> Any:
        """Raise NotImplementedError: the tokens that were sampled are trained on, not the conversation's text."""
        raise NotImplementedError


class ToolCompletionCallback(CompletionCallback):
    """Calls the tools that the model asks for, and goes on until it asks for none."""

    async def __call__(self, messages: list[dict[str, Any]], completions: Any, info: dict[str, Any]) -> None:
        choice = completions.choices[0]
        messages.append({"content": "", **choice.message.model_dump(exclude_unset=True, exclude_none=True)})
        turns = sum(message["role"] == "assistant" for message in messages)
        if choice.finish_reason != "tool_calls" or (self.max_assistant_turns and turns >= self.max_assistant_turns):
            return
        messages.extend(await asyncio.gather(*map(self._call_tool, choice.message.tool_calls)))
        self.scheduler.submit_chat_completions(messages=messages, request_id=completions.id, info=info)

    async def _call_tool(self, tool_call: Any) -> dict[str, Any]:
        tool = self.tools[tool_call.function.name]
        created = await tool.create()
        instance_id = created[0] if isinstance(created, tuple) else created
        try:
            response, *_ = await tool.execute(instance_id, json.loads(tool_call.function.arguments))
        finally:
            await tool.release(instance_id)
        content = response if isinstance(response, str) else response.text or ""
        return {"role": "tool", "content": content, "tool_call_id": tool_call.id}
