"""OpenAI's chat completions and responses, and Anthropic's messages: requests as messages, answers in their form.

Text alone. Sampling parameters other than lengths and stop texts are the run's, whatever a client sends: log-probs are
those of the run's temperature. So is whether a tool is called: a choice that would force a call is taken for auto. A
field that asks for something else that there is not is refused.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

from verl_like.episodes.gateway.session import Asked, Message, Refused, Reply

Event = tuple[str | None, dict[str, Any]]  # name of a server-sent event, its data
_STOP = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_ROLES = ("system", "user", "assistant", "tool")
# Fields that would be another answer, or another conversation, than the one that is given: each must be left out
_NOT_SERVED = (
    *("logprobs", "top_logprobs", "echo", "functions", "function_call", "audio"),  # chat completions
    *("background", "conversation", "prompt"),  # responses
    *("container", "mcp_servers"),  # messages
)


def _text(content: Any, where: str) -> str:
    """The text of a content: a string, or parts of text."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise Refused(f"{where}: content must be text or a list of parts, not {type(content).__name__}")
    parts = []
    for part in _objects(content, f"{where}: content"):
        kind = part.get("type")
        if kind in ("text", "input_text", "output_text", "refusal"):
            parts.append(str(part.get("text") or part.get("refusal") or ""))
        elif kind not in ("thinking", "redacted_thinking"):
            raise Refused(f"{where}: a part of type {kind!r} is not available: the policy reads text")
    return "".join(parts)


def _objects(value: Any, where: str) -> list[Mapping[str, Any]]:
    """A list of objects, empty for none."""
    if not isinstance(value or [], list) or not all(isinstance(each, Mapping) for each in value or []):
        raise Refused(f"{where} must be a list of objects: {value!r:.100}")
    return value or []


def _options(body: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """Of `Asked`: max_tokens, stop, most_calls. Refused for what is none, and for what there is not."""
    if body.get("n") not in (None, 1):
        raise Refused(f"n={body['n']}: one answer a request; ask several times")
    for name in _NOT_SERVED:
        if body.get(name):
            raise Refused(f"{name} is not available")
    forms = (body.get("response_format"), (body.get("text") or {}).get("format"), body.get("output_format"))
    for form in (*forms, (body.get("output_config") or {}).get("format")):
        if form is not None and form.get("type") != "text":
            what = "what the policy writes is not constrained: its log-probs would be others"
            raise Refused(f"a response format of type {form.get('type')!r} is not available: {what}")
    name = next((name for name in names if body.get(name) is not None), names[0])
    most = body.get(name)
    if most is not None and (type(most) is not int or most < 1):
        raise Refused(f"{name}={most!r}: must be a whole number of at least 1")
    stop = body.get("stop") or body.get("stop_sequences") or []
    stop = [stop] if isinstance(stop, str) else stop
    if not isinstance(stop, list) or not all(isinstance(each, str) and each for each in stop):
        raise Refused(f"stop={stop!r:.100}: must be a text or a list of texts")
    return {"max_tokens": most, "stop": tuple(stop), "most_calls": _most_calls(body)}


def _most_calls(body: Mapping[str, Any]) -> int | None:
    """How many calls of an answer the client wants to see: 0 by tool_choice none, 1 without parallel ones."""
    choice = body.get("tool_choice")
    kind = choice.get("type") if isinstance(choice, Mapping) else choice
    if kind == "none":
        return 0
    one = isinstance(choice, Mapping) and choice.get("disable_parallel_tool_use")
    return 1 if one or body.get("parallel_tool_calls") is False else None


def _role(message: Mapping[str, Any]) -> str:
    role = "system" if message.get("role") == "developer" else message.get("role")
    if role not in _ROLES:
        raise Refused(f"a message has the role {role!r}: there are {', '.join(_ROLES)} and developer")
    return role


def _function(kind: Any, function: Any) -> dict[str, Any]:
    """A tool as the chat template is shown it. Refused for what is no function with a name."""
    if kind != "function":
        raise Refused(f"a tool of type {kind!r} is not available: functions alone")
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise Refused(f"a tool must be a function with a name: {function!r:.100}")
    return {"type": "function", "function": dict(function)}


class Chat:
    """POST /v1/chat/completions."""

    @staticmethod
    def read(body: Mapping[str, Any]) -> Asked:
        messages = []
        for given in _objects(body.get("messages"), "messages"):
            role = _role(given)
            message: Message = {"role": role, "content": _text(given.get("content"), f"the {role}'s message")}
            message |= {name: given[name] for name in ("tool_call_id", "name") if given.get(name)}
            if calls := _objects(given.get("tool_calls"), "tool_calls"):
                message["tool_calls"] = [_function("function", call.get("function")) | dict(call) for call in calls]
            messages.append(message)
        tools = [_function(tool.get("type"), tool.get("function")) for tool in _objects(body.get("tools"), "tools")]
        options = _options(body, "max_completion_tokens", "max_tokens")
        wants_usage = bool((body.get("stream_options") or {}).get("include_usage"))
        return Asked(messages=messages, tools=tools or None, wants_usage=wants_usage, **options)

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

    @staticmethod
    def read(body: Mapping[str, Any]) -> Asked:
        system = _text(body.get("system"), "system")
        messages: list[Message] = [{"role": "system", "content": system}] if system else []
        for given in _objects(body.get("messages"), "messages"):
            messages += _of_blocks(_role(given), given.get("content"))
        tools = []
        for tool in _objects(body.get("tools"), "tools"):
            about = {"name": tool.get("name"), "description": tool.get("description", "")}
            kind = "function" if tool.get("type") in (None, "custom") else tool["type"]
            tools.append(_function(kind, about | {"parameters": tool.get("input_schema") or {}}))
        return Asked(messages=messages, tools=tools or None, **_options(body, "max_tokens"))

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


def _of_blocks(role: str, content: Any) -> list[Message]:
    """Anthropic's message as OpenAI's: calls in the assistant's, results as messages of their own."""
    if not isinstance(content, list):
        return [{"role": role, "content": _text(content, f"the {role}'s message")}]
    content = _objects(content, f"the {role}'s message: content")
    calls = [
        {
            "id": block.get("id"),
            "type": "function",
            "function": {"name": block.get("name"), "arguments": json.dumps(block.get("input") or {})},
        }
        for block in content
        if block.get("type") == "tool_use"
    ]
    results = [
        {
            "role": "tool",
            "tool_call_id": block.get("tool_use_id"),
            "content": _text(block.get("content"), "a tool's result"),
        }
        for block in content
        if block.get("type") == "tool_result"
    ]
    others = [block for block in content if block.get("type") not in ("tool_use", "tool_result")]
    said: list[Message] = [{"role": role, "content": _text(others, f"the {role}'s message")}]
    if calls:
        said[0]["tool_calls"] = calls
    return [*results, *(said if others or calls else [])]


class Responses:
    """POST /v1/responses. previous_response_id is looked up by the server."""

    @staticmethod
    def read(body: Mapping[str, Any], before: list[Message]) -> Asked:
        messages = [] if body.get("instructions") is None else [{"role": "system", "content": body["instructions"]}]
        messages += [each for each in before if not messages or each["role"] != "system"]
        given = body.get("input")
        for item in [{"role": "user", "content": given}] if isinstance(given, str) else _objects(given, "input"):
            kind = item.get("type", "message")
            if kind == "function_call":
                function = {"name": item.get("name"), "arguments": item.get("arguments") or "{}"}
                call = {"id": item.get("call_id"), "type": "function", "function": function}
                if messages and messages[-1]["role"] == "assistant":  # text and calls are items of one answer
                    messages[-1] = {**messages[-1], "tool_calls": [*messages[-1].get("tool_calls", []), call]}
                else:
                    messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
            elif kind == "function_call_output":
                output = item.get("output")
                said = output if isinstance(output, str) else _text(output, "function_call_output")
                messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": said})
            elif kind == "message":
                role = _role(item)
                messages.append({"role": role, "content": _text(item.get("content"), f"the {role}'s message")})
            elif kind != "reasoning":
                raise Refused(f"an input item of type {kind!r} is not available")
        tools = []
        for tool in _objects(body.get("tools"), "tools"):
            tools.append(_function(tool.get("type"), {name: tool[name] for name in tool if name != "type"}))
        if any("logprobs" in str(each) for each in body.get("include") or []):
            raise Refused("logprobs is not available")
        return Asked(messages=messages, tools=tools or None, **_options(body, "max_output_tokens"))

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


def new_identity() -> str:
    """Of an answer."""
    return uuid.uuid4().hex
