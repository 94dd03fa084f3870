"""Do prompts say what their rows say? Asked before a run starts, of the first rows of each file and a random sample.

    prompt = the template's own text + every message's text + every tool's name and parameters, and nothing else

A text is there if a stand-in at its end, or else at its start, comes out of the template: so is one that the template
trims or shortens on purpose, which is a warning. What a template leaves out is an error, for it does so without a word.
"""

from __future__ import annotations

import difflib
import functools
import json
import logging
import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from verl_like.config import SpelledTokens
from verl_like.data.chat import Conversation, Messages, PromptEncoder
from verl_like.data.reading import is_empty
from verl_like.data.rows import messages_or_text

logger = logging.getLogger(__name__)

FIRST, SAMPLED = 8, 56  # rows of a file
_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_OTHER_NAMES = {"human": "user", "prompter": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant"}
_COMPARED = re.compile(r"""role["'\]) ]*(?:==|!=|in) *[\[(]?((?: *["']\w+["'],?)+)""")  # in a template's source
_TOOLS = "the tools"
_FIX = "choose another data.chat_template, or change the row"
_Change = Callable[[str, str], str]  # of a text: (what it is, the text)


class Findings(NamedTuple):
    """Findings about a prompt.

    errors: mistakes of the prompt.
    notes: things that its template does on purpose.
    text: the prompt's text.
    """

    errors: list[str]
    notes: list[str]
    text: str


class Survey:
    """Survey of all rows of a file.

    It keeps the first row with each kind of message, the rows in which a user says nothing, and those that spell
    special tokens out.

    own_tools: rows bring tools of their own, which a prompt must show; a model may know those of the run without.
    """

    def __init__(self, encoder: PromptEncoder, *, own_tools: bool) -> None:
        self.encoder, self.own_tools = encoder, own_tools
        self.firsts: dict[Any, int] = {}
        self.blank = set[int]()
        self.spelled: list[int] = []

    def add(self, position: int, cell: Any, text: str) -> None:
        """A cell of the prompt's column; `text`: as Python writes it."""
        cell = messages_or_text(cell) if isinstance(cell, str) else cell
        said = [{"role": "user", "content": cell}] if is_empty(cell) else cell if isinstance(cell, list) else [cell]
        for message in filter(lambda item: isinstance(item, dict), said):
            role, content = message.get("role"), message.get("content")
            self.firsts.setdefault((str(role), type(content)), position)
            if role == "user" and is_empty(list(map(_said, content)) if isinstance(content, list) else content):
                self.blank.add(position)
        if any(token in text for token in self.encoder.special.ids):
            self.spelled.append(position)


def look(encoder: PromptEncoder, conversation: Conversation, *, own_tools: bool = True) -> Findings:
    """Compare a prompt with its messages and tools. Raises ValueError if the template refuses them."""
    messages, tools = conversation
    errors = list(wrong_messages(encoder, messages)) if encoder.has_template else []
    if errors:
        return Findings(errors, [], "")
    notes, text = list[str](), encoder.render(conversation)
    for what, said, is_shown in _shown(encoder, conversation, text):
        whole = said.strip() in text or json.dumps(said.strip(), ensure_ascii=False)[1:-1] in text
        if is_shown and said not in text:
            notes.append(f"the chat template {'trims' if whole else 'rewrites or shortens'} {what}")
        elif not is_shown and said.strip():
            on_purpose = what.startswith(("the name", "what the assistant says"))
            on_purpose |= what == _TOOLS and (whole or not own_tools)
            (notes if on_purpose else errors).append(f"the chat template leaves out {what}, {said[:60]!r}: {_FIX}")
    lists = [each["content"] for each in messages if isinstance(each.get("content"), list) and each["content"]]
    if any(str(content) in text for content in lists):
        errors.append(f"the chat template writes parts of content as a list of Python's, not as text: {_FIX}")
    bare = [
        {**m, "content": list(filter(_is_text, m["content"]))} if m.get("content") in lists else m for m in messages
    ]
    if not errors and bare != messages and encoder.render((bare, tools)) == text:
        errors.append(f"the chat template leaves out parts of content that are no text: {_FIX}")
    return Findings(errors, notes, text)


def own_text(encoder: PromptEncoder) -> str:
    """Return the text that the template adds of its own accord before a conversation without a system message.

    That is Qwen2.5's default system prompt, for instance; "" where only marks and roles are added.
    """
    try:
        head, found, _ = encoder.render(([{"role": "user", "content": "standin"}], None)).partition("standin")
    except ValueError:
        return ""
    for token in sorted(encoder.tokenizer.get_added_vocab() if found and head else (), key=len, reverse=True):
        head = head.replace(token, "\n")
    return " ".join(line.strip() for line in head.split("\n") if re.search(r"\w\W+\w", line))


def check_file(
    path: str, survey: Survey, used: Sequence[int], read: Callable[[int], tuple[Conversation, str]], *, seed: int
) -> None:
    """Check rows of a file, and log once whatever is worth a note.

    Raises ValueError, which names the row, for the first prompt that is not what its row says.

    used: positions of the rows.
    read: function that gives the conversation of a position, and its place for messages.
    """
    encoder, rows = survey.encoder, set(used)
    drawn = np.random.default_rng(seed).permutation(used)[:SAMPLED].tolist()
    spelled = sorted(rows.intersection(survey.spelled))
    chosen = sorted({*used[:FIRST], *drawn, *rows.intersection(survey.firsts.values()), *spelled[:1]})
    notes, texts = dict[str, str](), set[str]()
    for position in chosen:
        conversation, place = read(position)
        try:
            found = look(encoder, conversation, own_tools=survey.own_tools)
            lost = "" if found.errors else _lost(encoder, conversation, found.text)
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from error
        if found.errors:
            raise ValueError(f"{place}: {'; '.join(found.errors)}")
        texts.add(found.text)
        for note in found.notes:
            notes.setdefault(re.sub(r"\d+ ", "", note.partition(", '")[0]), f"{place}: {note}")
        if lost:
            notes.setdefault("lost", f"{place}: the tokenizer has no tokens for {lost[:20]!r}")
    for note in notes.values():
        logger.warning("%s (the first of %d rows looked at that shows this)", note, len(chosen))
    if len(chosen) > 1 and len(texts) == 1:
        what = "%s: all prompts looked at (%d of %d rows) are equal, with %d tokens: is the right column read?"
        logger.warning(what, path, len(chosen), len(used), len(encoder.encode([conversation])[0]))
    if blank := sorted(rows & survey.blank):
        what = "%s: in %d of %d prompts a user says nothing (an empty text, or blanks); first row %s"
        logger.warning(what, path, len(blank), len(used), read(blank[0])[1].rpartition("row ")[2])
    if spelled:
        conversation, place = read(spelled[0])
        become = "become these tokens" if encoder.spelled == SpelledTokens.keep else "stay text"
        what = "%s: %d of %d prompts spell special tokens out, which %s (data.special_tokens_in_text=%s); first %s: %s"
        names = ", ".join(encoder.special.spelled(conversation))
        logger.warning(what, path, len(spelled), len(used), become, encoder.spelled, place, names)


def _lost(encoder: PromptEncoder, conversation: Conversation, text: str) -> str:
    """Collect the characters of a prompt that do not come out of its tokens, in whatever case and form."""
    decoded = encoder.tokenizer.decode(encoder.encode([conversation])[0], skip_special_tokens=False)
    said, shown = (set(unicodedata.normalize("NFKD", each).casefold()) for each in (text, decoded))
    return "".join(sorted(sign for sign in said - shown if sign.isprintable() and not sign.isspace()))


@functools.lru_cache
def _known_roles(template: str) -> tuple[str, ...]:
    return (*_ROLES, *(role for names in _COMPARED.findall(template) for role in re.findall(r"\w+", names)))


def wrong_messages(encoder: PromptEncoder, messages: Messages) -> Iterator[str]:
    """Yield messages that say nothing, and roles that neither the template nor anybody knows."""
    known = _known_roles(str(encoder.template_kwargs.get("chat_template") or encoder.tokenizer.chat_template))
    for number, message in enumerate(messages):
        role, content, name = message["role"], message.get("content"), str(message["role"]).lower()
        if role not in known:
            near = [_OTHER_NAMES[name]] if name in _OTHER_NAMES else difflib.get_close_matches(name, known, 1, 0.4)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(dict.fromkeys(known))}"
            yield f"message {number} has the role {role!r}, which the chat template does not know: {hint}"
        elif content is None and not {"tool_calls", "reasoning_content", "thinking"} & set(message):
            yield f"message {number} ({role}) has no content (null, or no such key): give it a text, or leave it out"
        elif not isinstance(content, str | list | None) and role not in ("tool", "function"):
            yield f"message {number} ({role}): its content must be a text or a list of parts, not {content!r:.80}"
        calls = message.get("tool_calls") or []
        functions = [call.get("function", call) for call in calls if isinstance(call, dict)]
        if len(functions) < len(calls) or not all(isinstance(f, dict) and f.get("name") for f in functions):
            what = "its tool_calls must be a list of functions called, each with its name"
            yield f"message {number} ({role}): {what}, not {calls!r:.80}"


def _shown(encoder: PromptEncoder, conversation: Conversation, text: str) -> Iterator[tuple[str, str, bool]]:
    """Yield each part that a prompt must hold: its name, its text, and whether the prompt shows it."""
    texts, shown = list[tuple[str, str]](), set[int]()

    def rendered(change: Callable[[str, str], str]) -> None:
        texts.clear()

        def marked(what: str, said: str) -> str:
            texts.append((what, said))
            return change(said, f"standin{len(texts) - 1}text")

        try:
            found = encoder.render(_changed(conversation, marked))
        except ValueError:  # it wants what is there: only that can be looked for
            shown.update(number for number, (_, said) in enumerate(texts) if said.strip() in text)
        else:
            shown.update(number for number in range(len(texts)) if f"standin{number}text" in found)

    rendered(lambda said, stand_in: said + stand_in)
    if len(shown) < len(texts):
        rendered(lambda said, stand_in: stand_in + said)
    yield from ((*each, number in shown) for number, each in enumerate(texts))


def _said(part: Any) -> Any:
    return part["text"] if _is_text(part) else part


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and isinstance(part.get("text"), str)


def _changed(conversation: Conversation, change: _Change) -> Conversation:
    """Copy the conversation with every text changed that its prompt must hold."""
    messages = list[dict[str, Any]]()
    for number, message in enumerate(conversation[0]):
        what = f"message {number} ({message['role']})"
        content, calls = message.get("content"), message.get("tool_calls")
        said, message = f"what the assistant says in {what}" if calls else what, dict(message)
        if isinstance(content, str):
            message["content"] = change(said, content)
        elif isinstance(content, list):
            message["content"] = [{**p, "text": change(said, p["text"])} if _is_text(p) else p for p in content]
        elif isinstance(content, dict):  # a tool's
            message["content"] = {k: change(said, v) if isinstance(v, str) else v for k, v in content.items()}
        if calls:
            message["tool_calls"] = [_with_names(call, f"a tool call in {what}", change) for call in calls]
        if isinstance(message.get("name"), str) and message["role"] not in ("tool", "function"):
            message["name"] = change(f"the name of {what}", message["name"])
        messages.append(message)
    tools = conversation[1] and [_with_names(tool, _TOOLS, change) for tool in conversation[1]]
    return messages, tools


def _with_names(tool: dict[str, Any], what: str, change: _Change) -> dict[str, Any]:
    """Copy a tool's schema, or a call of one, with the names of tool and parameters changed."""
    if "function" in tool:
        return {**tool, "function": _with_names(tool["function"], what, change)}
    tool = {**tool, "name": change(what, str(tool.get("name")))}
    if isinstance(tool.get("arguments"), dict):
        tool["arguments"] = {change(what, str(key)): value for key, value in tool["arguments"].items()}
    if properties := (tool.get("parameters") or {}).get("properties"):
        named = {change(what, str(key)): value for key, value in properties.items()}
        tool["parameters"] = {**tool["parameters"], "properties": named}
    return tool
