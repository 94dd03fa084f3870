"""OpenAI's chat completions and responses, and Anthropic's messages: requests as messages, answers in their form.

Text alone. Sampling parameters other than lengths and stop texts are the run's, whatever a client sends: log-probs are
those of the run's temperature. A field that asks for something else that there is not is refused. What is read here
has the types of schema.py.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from verl_like.plugins.agents.gateway import schema
from verl_like.plugins.agents.gateway.session import Asked, Message, Refused, Reply, function_call

Event = tuple[str | None, dict[str, Any]]  # name of a server-sent event, its data
_STOP = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_ROLES = ("system", "user", "assistant", "tool")
_FORCED = ("required", "function", "any", "tool")  # kinds of tool_choice that demand a call
# Fields that would be another answer, or another conversation, than the one that is given: each must be left out
_NOT_SERVED = (
    *("logprobs", "top_logprobs", "echo", "functions", "function_call", "audio", "logit_bias"),  # chat completions
    *("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"),  # vLLM's and SGLang's
    *("regex", "json_schema", "ebnf", "structural_tag", "use_beam_search", "prompt_logprobs", "chat_template"),
    *("continue_final_message", "allowed_token_ids", "bad_words", "stop_token_ids", "min_tokens", "ignore_eos"),
    *("background", "conversation", "prompt"),  # responses
    *("container", "mcp_servers"),  # messages
)


def _text(content: Any, where: str) -> str:
    """The text of a content: a string, or parts of text."""
    if content is None or isinstance(content, str):
        return content or ""
    parts = []
    for place, part in enumerate(content):
        if part["type"] in ("text", "input_text", "output_text", "refusal"):
            parts.append(part.get("text") or part.get("refusal") or "")
        elif part["type"] not in ("thinking", "redacted_thinking"):
            what = f"a part of type {part['type']!r:.60} is not available: the policy reads text"
            raise Refused(f"{where}[{place}]: {what}", param=f"{where}[{place}]")
    return "".join(parts)


def _options(body: Mapping[str, Any], tools: list[dict[str, Any]], *names: str) -> dict[str, Any]:
    """Read the fields of `Asked` other than the messages. Raises Refused for options that the gateway does not offer.

    names: the fields that may hold the limit of tokens; the first one that the body has is used.
    """
    for name in ("n", "best_of"):
        if body.get(name) not in (None, 1):
            raise Refused(f"{name}={body[name]!r:.60}: one answer a request; ask several times", param=name)
    for name in _NOT_SERVED:
        if body.get(name):
            raise Refused(f"{name} is not available", param=name)
    forms: dict[str, Any] = {name: body.get(name) for name in ("response_format", "output_format")}
    forms |= {f"{name}.format": (body.get(name) or {}).get("format") for name in ("text", "output_config")}
    for where, form in forms.items():
        if form is not None and form["type"] != "text":
            what = "what the policy writes is not constrained: its log-probs would be others"
            raise Refused(f"a response format of type {form['type']!r} is not available: {what}", param=where)
    name = next((name for name in names if body.get(name) is not None), names[0])
    most = body.get(name)
    if most is not None and most < 1:
        raise Refused(f"{name}={most}: must be a whole number of at least 1", param=name)
    field = "stop" if body.get("stop") else "stop_sequences"
    stop = body.get(field) or []
    stop = [stop] if isinstance(stop, str) else stop
    if "" in stop:
        raise Refused(f"{field} must be a text or a list of texts, none of them empty", param=field)
    return {"tools": tools or None, "max_tokens": most, "stop": tuple(stop), **_choice(body, tools)}


def _choice(body: Mapping[str, Any], tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Read `most_calls` and `forced` of `Asked` from the request's tool_choice.

    most_calls: 0 for tool_choice none, 1 where the client wants no parallel calls.
    forced: the tools of which one must be called, where the client demands a call.
    """
    choice = body.get("tool_choice")
    about: Mapping[str, Any] = choice if isinstance(choice, dict) else {"type": choice}
    kind, name = about["type"], about.get("name") or (about.get("function") or {}).get("name")
    if kind not in (None, "none", "auto", *_FORCED):
        raise Refused(f"tool_choice of type {kind!r:.60} is not available", param="tool_choice")
    known = [tool["function"]["name"] for tool in tools]
    forced = tuple(each for each in known if name in (None, each)) if kind in _FORCED else None
    if forced == ():
        raise Refused("tool_choice demands a call of a tool that the request does not have", param="tool_choice")
    one = about.get("disable_parallel_tool_use") or body.get("parallel_tool_calls") is False
    return {"most_calls": 0 if kind == "none" else 1 if one else None, "forced": forced}


def _role(message: Mapping[str, Any], where: str) -> str:
    role = message.get("role") or ""
    role = "system" if role == "developer" else role
    if role not in _ROLES:
        what = f"{where}: a message has the role {role!r:.60}: there are {', '.join(_ROLES)} and developer"
        raise Refused(what, param=f"{where}.role")
    return role


def _function(tool: tuple[str, Mapping[str, Any] | None], where: str) -> dict[str, Any]:
    """A tool as the chat template is shown it. Raises Refused for what is no function with a name."""
    kind, function = tool
    if kind != "function":
        what = f"{where}.type: a tool of type {kind!r:.60} is not available: functions alone"
        raise Refused(what, param=f"{where}.type")
    if not (function or {}).get("name"):
        raise Refused(f"{where} must be a function with a name", param=where)
    return {"type": "function", "function": dict(function or {})}


def _tools(
    body: Mapping[str, Any], function_of: Callable[[Mapping[str, Any]], tuple[str, Any]]
) -> list[dict[str, Any]]:
    tools = enumerate(body.get("tools") or [])
    return [_function(function_of(tool), f"tools[{place}]") for place, tool in tools]


class Chat:
    """POST /v1/chat/completions."""

    fields, ends = schema.CHAT, "data: [DONE]\n\n"

    @staticmethod
    def read(body: Mapping[str, Any]) -> Asked:
        messages = []
        for place, given in enumerate(body["messages"]):
            where = f"messages[{place}]"
            message: Message = {"role": _role(given, where), "content": _text(given.get("content"), f"{where}.content")}
            message |= {name: given[name] for name in ("tool_call_id", "name") if given.get(name)}
            if calls := given.get("tool_calls"):
                message["tool_calls"] = [{"type": "function", **call} for call in calls]
            messages.append(message)
        tools = _tools(body, lambda tool: (tool["type"], tool.get("function")))
        options = _options(body, tools, "max_completion_tokens", "max_tokens")
        wants_usage = bool((body.get("stream_options") or {}).get("include_usage"))
        return Asked(messages=messages, wants_usage=wants_usage, **options)

    @staticmethod
    def write(reply: Reply, model: str, identity: str) -> dict[str, Any]:
        message = {**reply.message, "content": reply.message["content"] or (None if reply.parsed.calls else "")}
        if reply.parsed.reasoning is not None:
            message["reasoning_content"] = reply.parsed.reasoning
        choice = {"index": 0, "message": message, "finish_reason": reply.finish_reason, "logprobs": None}
        head = {"id": f"chatcmpl-{identity}", "object": "chat.completion", "created": int(time.time()), "model": model}
        return {**head, "choices": [choice], "usage": _usage(reply, "prompt_tokens", "completion_tokens")}

    @staticmethod
    def stream(asked: Asked, reply: Reply, model: str, identity: str) -> Iterator[Event]:
        whole = Chat.write(reply, model, identity)
        head = {name: whole[name] for name in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
        message = dict(whole["choices"][0]["message"])
        calls = [{"index": place, **call} for place, call in enumerate(message.pop("tool_calls", []))]
        for delta, reason in ((message | ({"tool_calls": calls} if calls else {}), None), ({}, reply.finish_reason)):
            yield None, {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}
        if asked.wants_usage:  # not unasked: programs take the first choice of whatever comes
            yield None, {**head, "choices": [], "usage": whole["usage"]}


class Messages:
    """POST /v1/messages, Anthropic's."""

    fields, ends = schema.MESSAGES, ""

    @staticmethod
    def read(body: Mapping[str, Any]) -> Asked:
        system = _text(body.get("system"), "system")
        messages: list[Message] = [{"role": "system", "content": system}] if system else []
        for place, given in enumerate(body["messages"]):
            where = f"messages[{place}]"
            messages += _of_blocks(_role(given, where), given["content"], f"{where}.content")
        tools = _tools(body, _anthropics_function)
        return Asked(messages=messages, **_options(body, tools, "max_tokens"))

    @staticmethod
    def write(reply: Reply, model: str, identity: str) -> dict[str, Any]:
        blocks: list[dict[str, Any]] = []
        if reply.message["content"] or not reply.parsed.calls:
            blocks.append({"type": "text", "text": reply.message["content"]})
        for call, parsed in zip(reply.message.get("tool_calls") or [], reply.parsed.calls, strict=True):
            blocks.append({"type": "tool_use", "id": call["id"], "name": parsed.name, "input": parsed.arguments})
        usage = {"input_tokens": len(reply.context_ids), "output_tokens": len(reply.completion.sampled)}
        head = {"id": f"msg_{identity}", "type": "message", "role": "assistant", "model": model, "content": blocks}
        reason = _STOP[reply.finish_reason] if reply.stopped is None else "stop_sequence"
        return {**head, "stop_reason": reason, "stop_sequence": reply.stopped, "usage": usage}

    @staticmethod
    def stream(asked: Asked, reply: Reply, model: str, identity: str) -> Iterator[Event]:
        whole = Messages.write(reply, model, identity)
        begun = {**whole, "content": [], "stop_reason": None, "usage": {**whole["usage"], "output_tokens": 0}}
        yield "message_start", {"type": "message_start", "message": begun}
        for index, block in enumerate(whole["content"]):
            is_text = block["type"] == "text"
            empty = {**block, "text": ""} if is_text else {**block, "input": {}}
            delta = (
                {"type": "text_delta", "text": block["text"]}
                if is_text
                else {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
            )
            for name, rest in (("start", {"content_block": empty}), ("delta", {"delta": delta}), ("stop", {})):
                yield f"content_block_{name}", {"type": f"content_block_{name}", "index": index, **rest}
        ended = {name: whole[name] for name in ("stop_reason", "stop_sequence")}
        yield "message_delta", {"type": "message_delta", "delta": ended, "usage": whole["usage"]}
        yield "message_stop", {"type": "message_stop"}


def _anthropics_function(tool: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    about = {"name": tool["name"], "description": tool.get("description") or ""}
    kind = tool.get("type") or "custom"
    return "function" if kind == "custom" else kind, about | {"parameters": tool.get("input_schema") or {}}


def _of_blocks(role: str, content: Any, where: str) -> list[Message]:
    """Anthropic's message as OpenAI's: calls in the assistant's, results as messages of their own."""
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    calls: list[dict[str, Any]] = []
    results: list[Message] = []
    others = []
    for place, block in enumerate(content):
        at = f"{where}[{place}]"
        if block["type"] == "tool_use":
            name, arguments = _required(block, "name", at), json.dumps(block.get("input") or {})
            calls.append(function_call(_required(block, "id", at), name, arguments))
        elif block["type"] == "tool_result":
            said, answered = _text(block.get("content"), f"{at}.content"), _required(block, "tool_use_id", at)
            results.append({"role": "tool", "tool_call_id": answered, "content": said})
        else:
            others.append(block)
    own: Message = {"role": role, "content": _text(others, where)}
    if calls:
        own["tool_calls"] = calls
    return [*results, own] if others or calls else results


def _required(block: Mapping[str, Any], name: str, where: str) -> str:
    if not block.get(name):
        raise Refused(f"{where}.{name} is missing", param=f"{where}.{name}")
    return block[name]


class Responses:
    """POST /v1/responses. previous_response_id is looked up by the server."""

    fields, ends = schema.RESPONSES, ""

    @staticmethod
    def read(body: Mapping[str, Any], before: list[Message]) -> Asked:
        messages = [] if body.get("instructions") is None else [{"role": "system", "content": body["instructions"]}]
        messages += [each for each in before if not messages or each["role"] != "system"]
        given = body["input"]
        for place, item in enumerate([{"role": "user", "content": given}] if isinstance(given, str) else given):
            kind, where = item.get("type") or "message", f"input[{place}]"
            if kind == "function_call":
                name, arguments = _required(item, "name", where), item.get("arguments") or "{}"
                call = function_call(_required(item, "call_id", where), name, arguments)
                if messages and messages[-1]["role"] == "assistant":  # text and calls are items of one answer
                    messages[-1] = {**messages[-1], "tool_calls": [*messages[-1].get("tool_calls", []), call]}
                else:
                    messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
            elif kind == "function_call_output":
                said, answered = _text(item.get("output"), f"{where}.output"), _required(item, "call_id", where)
                messages.append({"role": "tool", "tool_call_id": answered, "content": said})
            elif kind == "message":
                role = _role(item, where)
                messages.append({"role": role, "content": _text(item.get("content"), f"{where}.content")})
            elif kind != "reasoning":
                raise Refused(f"{where}.type: an item of type {kind!r:.60} is not available", param=f"{where}.type")
        if not messages:
            raise Refused("input is empty", param="input")
        tools = _tools(body, lambda tool: (tool["type"], {name: tool[name] for name in tool if name != "type"}))
        if any("logprobs" in each for each in body.get("include") or []):
            raise Refused("logprobs is not available", param="include")
        return Asked(messages=messages, **_options(body, tools, "max_output_tokens"))

    @staticmethod
    def write(reply: Reply, model: str, identity: str) -> dict[str, Any]:
        output: list[dict[str, Any]] = []
        if reply.message["content"] or not reply.parsed.calls:
            text = {"type": "output_text", "text": reply.message["content"], "annotations": [], "logprobs": []}
            item = {"id": f"msg_{identity}", "type": "message", "role": "assistant", "status": "completed"}
            output.append({**item, "content": [text]})
        for place, call in enumerate(reply.message.get("tool_calls") or []):
            item = {"id": f"fc_{identity}{place}", "type": "function_call", "status": "completed"}
            output.append({**item, "call_id": call["id"], **call["function"]})
        is_cut = reply.finish_reason == "length"
        usage = _usage(reply, "input_tokens", "output_tokens")
        usage |= {"input_tokens_details": {"cached_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 0}}
        return {
            **{"id": f"resp_{identity}", "object": "response", "created_at": int(time.time()), "model": model},
            **{"status": "incomplete" if is_cut else "completed", "output": output, "usage": usage, "error": None},
            **{"incomplete_details": {"reason": "max_output_tokens"} if is_cut else None, "instructions": None},
            **{"parallel_tool_calls": True, "tool_choice": "auto", "tools": [], "metadata": {}},
        }

    @staticmethod
    def stream(asked: Asked, reply: Reply, model: str, identity: str) -> Iterator[Event]:
        whole = Responses.write(reply, model, identity)
        events: list[dict[str, Any]] = [
            {"type": "response.created", "response": {**whole, "status": "in_progress", "output": []}}
        ]
        for index, item in enumerate(whole["output"]):
            place = {"output_index": index}
            empty = {**item, "status": "in_progress"} | ({"content": []} if "content" in item else {"arguments": ""})
            events.append({"type": "response.output_item.added", **place, "item": empty})
            place |= {"item_id": item["id"]}
            for number, part in enumerate(item.get("content", [])):
                at, text = {**place, "content_index": number}, part["text"]
                events.append({"type": "response.content_part.added", **at, "part": {**part, "text": ""}})
                events.append({"type": "response.output_text.delta", **at, "delta": text, "logprobs": []})
                events.append({"type": "response.output_text.done", **at, "text": text, "logprobs": []})
                events.append({"type": "response.content_part.done", **at, "part": part})
            if "arguments" in item:
                said = item["arguments"]
                events.append({"type": "response.function_call_arguments.delta", **place, "delta": said})
                done = {"arguments": said, "name": item["name"]}
                events.append({"type": "response.function_call_arguments.done", **place, **done})
            events.append({"type": "response.output_item.done", "output_index": index, "item": item})
        events.append({"type": f"response.{whole['status']}", "response": whole})
        for number, event in enumerate(events):
            yield event["type"], {**event, "sequence_number": number}


def _usage(reply: Reply, first: str, second: str) -> dict[str, Any]:
    read, written = len(reply.context_ids), len(reply.completion.sampled)
    return {first: read, second: written, "total_tokens": read + written}
