"""Do prompts say what their rows say? Asked before a run starts, of the first rows of each file and a random sample.

    prompt = the template's own text + every message's text + every tool's name and parameters, and nothing else

A text is there if a stand-in at its end (or else its beginning) comes out of the template: so is one that the template
trims or shortens on purpose, which is a warning. What a template leaves out is an error, for it does so without a word.
"""

from __future__ import annotations

import difflib
import json
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from verl_like.config import SpelledTokens
from verl_like.data.chat import Conversation, Messages, PromptEncoder
from verl_like.data.rows import messages_or_text

logger = logging.getLogger(__name__)

FIRST, SAMPLED = 8, 56  # rows of a file
_STAND_IN = "standin{0}text"
_COMPARED = re.compile(r"""role["'\]) ]*(?:==|!=|in) *[\[(]?((?: *["']\w+["'],?)+)""")  # in a template's source
_LEAVES_OUT, _OTHER = "the chat template leaves out", "choose another data.chat_template"
_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_OTHER_NAMES = {"human": "user", "prompter": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant"}


@dataclass(slots=True)
class Findings:
    """What is wrong with one prompt, and what its template does on purpose."""

    errors: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    text: str = ""


@dataclass(slots=True)
class Survey:
    """What is known of all rows of a file: the first with each kind of message, those that spell special tokens out."""

    encoder: PromptEncoder
    firsts: dict[Any, int] = field(default_factory=dict)
    spelled: list[int] = field(default_factory=list)

    def add(self, position: int, cell: Any, text: str) -> None:
        """A cell of the prompt's column; `text`: as Python writes it."""
        cell = messages_or_text(cell) if isinstance(cell, str) else cell
        for message in cell if isinstance(cell, list) else [cell]:
            if isinstance(message, dict):
                content = message.get("content")
                kind = str(message.get("role")), type(content), content is None and bool(message.get("tool_calls"))
                self.firsts.setdefault(kind, position)
        if any(token in text for token in self.encoder.special.ids):
            self.spelled.append(position)


def look(encoder: PromptEncoder, conversation: Conversation) -> Findings:
    """Compare a prompt with its messages and tools. ValueError if the template refuses them."""
    messages, tools = conversation
    found = Findings()
    if encoder.has_template:
        found.errors += _forms(messages, _known_roles(encoder))
    if not found.errors:
        found.text = encoder.render(conversation)
        _look_for_texts(encoder, conversation, found)
        _look_for_calls(messages, found)
        if tools:
            _look_for_tools(encoder, conversation, found)
    return found


def own_text(encoder: PromptEncoder) -> str:
    """What the template says of its own accord before a conversation without a system message, Qwen2.5's default system
    prompt for instance; "" for marks and roles alone."""
    if not encoder.has_template:
        return ""
    try:
        head, _, _ = encoder.render(([{"role": "user", "content": _STAND_IN}], None)).partition(_STAND_IN)
    except ValueError:
        return ""
    for token in sorted((str(t.content) for t in encoder.tokenizer.added_tokens_decoder.values()), key=len)[::-1]:
        head = head.replace(token, "\n")
    lines = (line.strip() for line in head.split("\n"))
    return " ".join(line for line in lines if re.search(r"\w\W+\w", line))


def check_file(
    path: str,
    survey: Survey,
    positions: Sequence[int],
    read: Callable[[int], tuple[Conversation, str]],
    *,
    seed: int,
) -> None:
    """Look at rows of a file. ValueError, with the row, for the first prompt that is not what its row says; what else
    there is to say is logged once.

    positions: of the rows that are used. read: (conversation, its place for messages) of a position.
    """
    if not len(positions):
        return
    used, encoder = set(map(int, positions)), survey.encoder
    drawn = np.random.default_rng(seed).choice(positions, size=min(SAMPLED, len(positions)), replace=False)
    chosen = sorted({*map(int, positions[:FIRST]), *map(int, drawn), *(p for p in survey.firsts.values() if p in used)})
    notes, texts = dict[str, list[str]](), list[str]()
    for position in chosen:
        conversation, place = read(position)
        try:
            found = look(encoder, conversation)
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from error
        if found.errors:
            raise ValueError(f"{place}: {'; '.join(found.errors)}")
        texts.append(found.text)
        for note in found.notes:
            notes.setdefault(note, []).append(place)
    for note, places in notes.items():
        logger.warning("%s: %s (%d of %d rows looked at)", places[0], note, len(places), len(chosen))
    if len(texts) > 1 and len(set(texts)) == 1:
        (ids,) = encoder.encode([conversation])
        what = "%s: all prompts looked at (%d of %d rows) are equal, with %d tokens: is the right column read?"
        logger.warning(what, path, len(chosen), len(used), len(ids))
    if spelled := [position for position in survey.spelled if position in used]:
        conversation, place = read(spelled[0])
        encoder.marked(conversation)  # an error where one is asked for
        become = "become these tokens" if encoder.spelled == SpelledTokens.keep else "stay text"
        names = ", ".join(dict.fromkeys(encoder.special.spelled(conversation)))
        what = "%s: %d of %d prompts spell special tokens out, which %s (data.special_tokens_in_text=%s); first %s: %s"
        logger.warning(what, path, len(spelled), len(used), become, encoder.spelled, place, names)


def _known_roles(encoder: PromptEncoder) -> list[str]:
    """The usual roles, and those that the template names."""
    source = str(encoder.template_kwargs.get("chat_template") or encoder.tokenizer.chat_template)
    return [*_ROLES, *(role for names in _COMPARED.findall(source) for role in re.findall(r"\w+", names))]


def _forms(messages: Messages, known: Sequence[str]) -> Iterator[str]:
    """What is wrong with messages whatever the template."""
    for number, message in enumerate(messages):
        role, content = message["role"], message.get("content")
        what = f"message {number} ({role})"
        if role not in known:
            name = str(role).lower()
            near = [_OTHER_NAMES[name]] if name in _OTHER_NAMES else difflib.get_close_matches(name, known, 1, 0.4)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(dict.fromkeys(known))}"
            yield f"message {number} has the role {role!r}, which the chat template does not know: {hint}"
        elif content is None:
            if role != "assistant" or not {"tool_calls", "reasoning_content", "thinking"} & set(message):
                yield f"{what} has no content (null, or no such key): give it a text, or leave the message out"
        elif not isinstance(content, str | list) and role not in ("tool", "function"):
            yield f"{what} must have a text or a list of parts as its content, not {content!r:.80}"


def _look_for_texts(encoder: PromptEncoder, conversation: Conversation, found: Findings) -> None:
    messages, tools = conversation
    texts = [(n, text) for n, message in enumerate(messages) for text in _texts(message)]
    shown = _shown(encoder, messages, tools, lambda text, name: text + name)
    if shown is not None and not all(shown):
        begun = _shown(encoder, messages, tools, lambda text, name: name + text) or shown
        shown = [one or other for one, other in zip(shown, begun, strict=True)]
    for place, (number, text) in enumerate(texts):
        message = messages[number]
        what, said = f"message {number} ({message['role']})", text.strip()
        whole = any(each in found.text for each in (said, json.dumps(said, ensure_ascii=False)[1:-1]))
        is_there = whole if shown is None else shown[place]
        if not said or (is_there and text in found.text):
            continue
        if is_there:
            how = "leaves out white space around" if whole else "rewrites or shortens"
            found.notes.append(f"the chat template {how} texts of the role {message['role']}")
        elif message["role"] == "assistant" and message.get("tool_calls"):
            found.notes.append(f"{_LEAVES_OUT} the text of answers that call tools")
        else:
            found.errors.append(f"{_LEAVES_OUT} {what}, {said[:60]!r}: {_OTHER}, or change the row")
    for number, message in enumerate(messages):
        content, what = message.get("content"), f"message {number} ({message['role']})"
        others = [part for part in content if not _is_text(part)] if isinstance(content, list) else []
        if isinstance(content, list) and content and str(content) in found.text:
            found.errors.append(f"the chat template writes {what} as a list of Python's, not as text: make it one text")
        elif others and encoder.render((_without_parts(messages), tools)) == found.text:
            found.errors.append(f"{_LEAVES_OUT} a part of {what}, {str(others[0])[:60]}: take it out, or {_OTHER}")
        if message["role"] != "tool" and str(message.get("name") or "") not in found.text:
            found.notes.append(f"{_LEAVES_OUT} names of messages")


def _shown(
    encoder: PromptEncoder, messages: Messages, tools: Any, join: Callable[[str, str], str]
) -> list[bool] | None:
    """For each text, whether its stand-in is in the prompt; None where the template refuses the stand-ins."""
    names = list[str]()

    def joined(text: str) -> str:
        names.append(_STAND_IN.format(len(names)))
        return join(text, names[-1])

    marked = [_with_texts(message, joined) for message in messages]
    try:
        text = encoder.render((marked, tools))
    except ValueError:
        return None
    return [name in text for name in names]


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and isinstance(part.get("text"), str)


def _texts(message: dict[str, Any]) -> list[str]:
    """The text of a message, or those of its parts."""
    content = message.get("content")
    if isinstance(content, list):
        return [part["text"] for part in content if _is_text(part)]
    return [content] if isinstance(content, str) else []


def _with_texts(message: dict[str, Any], change: Callable[[str], str]) -> dict[str, Any]:
    content = message.get("content")
    if isinstance(content, list):
        parts = [{**part, "text": change(part["text"])} if _is_text(part) else part for part in content]
        return {**message, "content": parts}
    return {**message, "content": change(content)} if isinstance(content, str) else message


def _without_parts(messages: Messages) -> Messages:
    """The messages without parts that are no text."""
    lists = [isinstance(message.get("content"), list) for message in messages]
    return [
        {**message, "content": list(filter(_is_text, message["content"]))} if is_list else message
        for message, is_list in zip(messages, lists, strict=True)
    ]


def _look_for_calls(messages: Messages, found: Findings) -> None:
    for number, message in enumerate(messages):
        for call in message.get("tool_calls") or []:
            function = call.get("function", call)
            arguments = function.get("arguments")
            names = [function.get("name"), *(arguments if isinstance(arguments, dict) else ())]
            if missing := [name for name in names if str(name) not in found.text]:
                found.errors.append(f"{_LEAVES_OUT} {missing[0]!r} of a tool call in message {number}: {_OTHER}")


def _look_for_tools(encoder: PromptEncoder, conversation: Conversation, found: Findings) -> None:
    messages, tools = conversation
    try:
        without = encoder.render((messages, None))
    except ValueError:  # they are needed, so they are seen
        without = ""
    for tool in tools or []:
        function = tool.get("function", tool)
        properties = (function.get("parameters") or {}).get("properties") or {}
        names = [str(function.get("name")), *map(str, properties)]
        missing = [name for name in names if found.text.count(name) <= without.count(name)]
        if found.text == without and all(name in found.text for name in names):
            found.notes.append(f"{_LEAVES_OUT} tools, which the messages describe themselves")
        elif missing:
            found.errors.append(f"{_LEAVES_OUT} {missing[0]!r} of the tool {names[0]!r}: {_OTHER}, or offer no tools")
