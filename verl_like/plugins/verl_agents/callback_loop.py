"""`rollout.multi_turn.completion_callback` (verl 0.4 and 0.5) as an agent loop.

A callback sees each answer as a chat message, appends to the conversation, and goes on by submitting it. In verl the
conversation is tokenised again at the end, and trained on as that. Here an answer stays the tokens that were sampled:
what the callback appends to it is observation, and where it changes what was said before, another row begins.
"""

from __future__ import annotations

import copy
import importlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from verl_like.episodes.transcript import without_end
from verl_like.plugins.agents.tool_calls.formats import parser_of
from verl_like.plugins.verl_agents.policy import Policy
from verl_like.plugins.verl_agents.tokens import ContinuousTokens
from verl_like.user_code import load_dotted

NAME = "completion_callback"
KEY = f"actor_rollout_ref.rollout.multi_turn.{NAME}"
_IMPLIED = "include_stop_str_in_output"  # tokens are never taken back here


def load_callback(reference: str) -> Any:
    """The class: package.module.Class, or file.py:Class. Raises UserCodeError, which says what is wrong with it."""
    return load_dotted(reference, KEY)


class Message(SimpleNamespace):
    """An answer: role, content, and tool_calls (id, function.name, function.arguments as JSON) where there are such."""

    role: str
    content: str
    tool_calls: list[Any] | None

    def model_dump(self, **options: Any) -> dict[str, Any]:
        """Convert the message to a plain dictionary, without the fields that it does not have."""
        said: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.tool_calls:
            said["tool_calls"] = [
                {"id": call.id, "type": "function", "function": dict(vars(call.function))} for call in self.tool_calls
            ]
        return said


class ChatScheduler:
    """Object through which a callback asks for further answers."""

    def __init__(self, config: Any, tokenizer: Any, tools: Sequence[Any]) -> None:
        self.config, self.tokenizer, self.tools = config, tokenizer, list(tools)
        self.submitted: list[list[dict[str, Any]]] = []

    def submit_chat_completions(
        self, *, messages: list[dict[str, Any]], request_id: str | None = None, info: dict[str, Any] | None = None
    ) -> None:
        """Ask the policy to answer these messages; then the callback is called again."""
        self.submitted.append(messages)


@dataclass(slots=True)
class _Row:
    """Tokens of one context so far. mask: 1 where they were sampled."""

    prompt_ids: list[int]
    ids: list[int]
    mask: list[int]


class CompletionCallbackLoop:
    """An agent loop (see service.py). callback: package.module.Class, or file.py:Class."""

    def __init__(
        self, trainer_config: Any, server_manager: Policy, tokenizer: Any, tools: Any, callback: str, **others: Any
    ) -> None:
        self.config, self.policy = trainer_config.config, server_manager
        self.scheduler = ChatScheduler(self.config, tokenizer, tools.tools)
        self.callback = load_callback(callback)(self.config, self.scheduler)
        self._tokenizer = tokenizer
        self._parser = parser_of(self.config.actor_rollout_ref.rollout.multi_turn.format)
        self._tokens = ContinuousTokens(tokenizer, self.config.data)

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> list[Any]:
        """The episode: AgentLoopOutputs, one for each context."""
        output = importlib.import_module("verl.experimental.agent_loop.agent_loop").AgentLoopOutput
        tools = self.callback.tool_schemas or None
        extra = {name: value for name, value in (self.callback.extra_body or {}).items() if name != _IMPLIED}
        messages = list(row["raw_prompt"])
        rows = [_Row(self._tokens.initial(messages, tools), [], [])]
        info: dict[str, Any] = {"__depth__": 0, "__sampling_params__": dict(sampling_params)}
        while len(rows[-1].ids) < self.config.data.max_response_length:
            now = rows[-1]
            answer = await self.policy.generate(
                NAME, prompt_ids=[*now.prompt_ids, *now.ids], sampling_params={**sampling_params, **extra}
            )
            if not answer.token_ids:
                break  # there is no room left
            now.ids += answer.token_ids
            now.mask += [1] * len(answer.token_ids)
            info["__depth__"] += 1
            before, message = copy.deepcopy(messages), self._message(answer.token_ids)
            reason = "length" if answer.stop_reason == "length" else "tool_calls" if message.tool_calls else "stop"
            choice = SimpleNamespace(index=0, message=message, finish_reason=reason)
            completion = SimpleNamespace(id=f"chatcmpl-{info['__depth__']}", choices=[choice])
            self.scheduler.submitted = []
            await self.callback(messages, completion, info)
            if not self.scheduler.submitted:
                break
            if len(self.scheduler.submitted) > 1:
                raise ValueError("the callback submitted more than one conversation after one answer")
            (messages,) = self.scheduler.submitted
            self._go_on(rows, before, message, messages, tools)
        turns = sum(message["role"] in ("user", "assistant", "tool") for message in messages)
        return [
            output(prompt_ids=row.prompt_ids, response_ids=row.ids, response_mask=row.mask, num_turns=turns)
            for row in rows
            if row.ids
        ]

    def _go_on(
        self,
        rows: list[_Row],
        before: list[dict[str, Any]],
        message: Message,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
    ) -> None:
        """Prepare the context of the next answer.

        The last row goes on where the callback has only added messages; any other change begins a new row.
        """
        now, split = rows[-1], len(before)
        answered = messages[split] if len(messages) > split + 1 else {}
        kept = answered.get("role") == "assistant" and (answered.get("content") or "") == message.content
        if kept and messages[:split] == before:
            given = [*before, answered], messages, [*now.prompt_ids, *now.ids], now.mask, tools
            ids = self._tokens.after_answer(*given)
            now.ids += ids
            now.mask += [0] * len(ids)
        else:
            rows.append(_Row(self._tokens.initial(messages, tools), [], []))

    def _message(self, token_ids: Sequence[int]) -> Message:
        ids = without_end(token_ids, self._tokenizer.end_ids)
        parsed = self._parser.parse(self._tokenizer.decode(ids, skip_special_tokens=False))
        calls = [
            SimpleNamespace(
                id=f"call{place:05d}",
                type="function",
                function=SimpleNamespace(name=c.name, arguments=json.dumps(c.arguments, ensure_ascii=False)),
            )
            for place, c in enumerate(parsed.calls)
        ]
        return Message(role="assistant", content=parsed.content, tool_calls=calls or None)
