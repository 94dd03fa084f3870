"""The conversations of `verl-like check-template`, and a model that writes what the template would have it write."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from verl_like.data.chat import Messages, PromptEncoder

Message = dict[str, Any]
Tools = list[dict[str, Any]]
TOOLS: Tools = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Look up the {what} of a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "description": "The city"}},
                "required": ["city"],
            },
        },
    }
    for name, what in (("get_weather", "weather"), ("get_time", "local time"))
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Conversation to check.

    steps: each answer of the model, and the messages that it is shown then.
    cut_off: answers are cut off before their end.
    """

    name: str
    steps: list[tuple[Message, list[Message]]]
    tools: bool = False
    system: bool = False
    cut_off: bool = False


def cases(*, json_arguments: bool = False) -> list[Case]:
    """List conversations with every kind of turn, from the plainest on.

    json_arguments: tool calls have their arguments as JSON text, as OpenAI has them, instead of objects.
    """
    user, bye = ({"role": "user", "content": text} for text in ("And what about tomorrow?", "Thank you, that is all."))
    weather, time = result(0, "get_weather", '{"sky": "clear", "degrees": 21}'), result(1, "get_time", "12:30")
    plain, thinking = answer("It is sunny."), answer("It is sunny.", thought="The report says so.")
    call = answer("", calls=["get_weather"], json_arguments=json_arguments)
    both = answer("", calls=["get_weather", "get_time"], json_arguments=json_arguments)
    thoughtful = {**call, "reasoning_content": "I should look it up."}
    return [
        Case(name="plain turns", steps=[(plain, [user]), (answer("Rain."), [bye])]),
        Case(name="system prompt", steps=[(plain, [user]), (answer("Rain."), [bye])], system=True),
        Case(name="empty answer", steps=[(answer(""), [user])]),
        Case(name="white space around the answer", steps=[(answer("  It is sunny.\n\n"), [user])]),
        Case(name="answer cut off", steps=[(plain, [user]), (plain, [bye])], cut_off=True),
        Case(name="thinking, then the user", steps=[(thinking, [user]), (thinking, [bye])]),
        Case(name="one tool call", steps=[(call, [weather])], tools=True),
        Case(name="tool calls one after another", steps=[(call, [weather]), (call, [weather])], tools=True),
        Case(name="parallel tool calls", steps=[(both, [weather, time])], tools=True),
        Case(name="the user after a tool", steps=[(call, [weather]), (plain, [user])], tools=True),
        Case(name="user message right after a result", steps=[(call, [weather, user])], tools=True),
        Case(name="thinking before a tool call", steps=[(thoughtful, [weather])], tools=True),
        Case(name="thinking, tool, the user", steps=[(thoughtful, [weather]), (thinking, [user])], tools=True),
    ]


def answer(content: str, *, thought: str = "", calls: Sequence[str] = (), json_arguments: bool = False) -> Message:
    """An assistant's message; `calls` are names of tools, each asked about Paris."""
    message: Message = {"role": "assistant", "content": content}
    if thought:
        message["reasoning_content"] = thought
    if calls:
        arguments = json.dumps({"city": "Paris"}) if json_arguments else {"city": "Paris"}
        message["tool_calls"] = [
            # Nine letters and digits: what Mistral's templates want of an id
            {"type": "function", "id": f"call{number:05d}", "function": {"name": name, "arguments": arguments}}
            for number, name in enumerate(calls)
        ]
    return message


def result(number: int, name: str, content: str) -> Message:
    """Write a tool's answer to the call of this number."""
    return {"role": "tool", "name": name, "tool_call_id": f"call{number:05d}", "content": content}


def as_written(
    encoder: PromptEncoder, messages: Messages, message: Message, tools: Tools | None, *, spaces: bool = False
) -> list[int]:
    """The tokens that a model writes which learned this template: what it renders, up to the end of the turn.

    spaces: with the white space around the content that the message has, and the template may have trimmed.

    By hand where the template refuses or leaves out tool calls: in the form that most models have in common. Raises
    ValueError for a template that refuses plain answers.
    """
    sent = encoder.render((messages, tools))
    closing = _closed(encoder, [*messages, answer("stand-in")], tools).rpartition("stand-in")[2]
    end = _leading_special(encoder, closing)
    try:
        text = _closed(encoder, [*messages, message], tools)
        bare = {key: value for key, value in message.items() if key != "tool_calls"}
        shown = bare == message or text != _closed(encoder, [*messages, bare], tools)
    except ValueError:
        text, shown = "", False
    began = sent[: sent.rfind("<think>")] if _thinks(sent) else sent
    if shown and text.startswith(sent):
        text = text[len(sent) :]
    elif shown and text.startswith(began):  # the template renders no thought where its own generation prompt began one
        body = text[len(began) :].rpartition("</think>")[2].lstrip("\n")
        text = f"{message.get('reasoning_content', '')}\n</think>\n\n{body}"
    else:
        text = _by_hand(sent, message) + closing
    text = text.removesuffix(closing) + end if text.endswith(closing) else text.rstrip("\n")
    if spaces and message["content"] not in text:
        text = text.replace(message["content"].strip(), message["content"])
    return encoder.encode_text(text)


def _thinks(sent: str) -> bool:
    """True where the generation prompt began a thought."""
    return sent.rfind("<think>") > sent.rfind("</think>")


def _by_hand(sent: str, message: Message) -> str:
    thought = message.get("reasoning_content", "")
    opening = "" if _thinks(sent) else "<think>\n"
    calls = (json.dumps(call["function"]) for call in message.get("tool_calls", []))
    text = message["content"] + "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)
    return f"{opening}{thought}\n</think>\n\n{text}" if thought or _thinks(sent) else text


def _closed(encoder: PromptEncoder, messages: Messages, tools: Tools | None) -> str:
    """The rendering without a generation prompt. Raises ValueError if the template refuses the messages."""
    extra = {} if tools is None else {"tools": tools}
    try:
        return encoder.tokenizer.apply_chat_template(
            messages, add_generation_prompt=False, tokenize=False, **extra, **encoder.template_kwargs
        )
    except Exception as error:  # templates are programs: they raise what they like
        raise ValueError(f"the chat template refused an answer: {error}") from error


def _leading_special(encoder: PromptEncoder, text: str) -> str:
    """The special tokens that a text begins with, as text."""
    special, rest = _special_tokens(encoder.tokenizer), text
    while found := max((token for token in special if rest.startswith(token)), key=len, default=""):
        rest = rest.removeprefix(found)
    return text[: len(text) - len(rest)]


@lru_cache(maxsize=4)
def _special_tokens(tokenizer: Any) -> tuple[str, ...]:
    return tuple(token.content for token in tokenizer.added_tokens_decoder.values() if token.special)
