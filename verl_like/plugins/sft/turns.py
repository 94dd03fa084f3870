"""Tokens of a conversation that are trained: what the assistant wrote, as the chat template itself shows it.

A template only renders whole conversations. The tokens of an assistant's turn are found as text:

    rendering that asks for the turn + the answer, with its end of turn = beginning of the rendering with the turn

so they are what a policy samples in that place, and nothing that the template writes by itself is trained. Where a
later rendering shows a turn otherwise (thoughts that are dropped from history), the turn is trained in a row of its
own, which ends with it: no row holds what the policy would not be shown. So is a turn that the template does not end
with a special token: the tokenizer's end of the sequence stands there, which is what a policy ends its answer with.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np

from verl_like.batch import MediaHandle
from verl_like.data.chat import Conversation, Messages, PromptEncoder
from verl_like.data.prompt_truth import wrong_messages
from verl_like.episodes.transcript import forms, with_stopped_clock
from verl_like.models.vision import VisionProcessor

Tools = list[dict[str, Any]] | None
T = TypeVar("T")
_STAND_IN = "standinforanswer"  # nothing that a template would trim, escape or take for markup


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Tokens of one sequence, and which of them are trained."""

    ids: np.ndarray  # int32
    trained: np.ndarray  # bool
    media: tuple[MediaHandle, ...] = ()  # images and videos in `ids`, placed there

    def cut(self, part: slice) -> Row:
        """Keep a part of the tokens."""
        return replace(self, ids=self.ids[part], trained=self.trained[part])


Answer = Sequence[Row]  # one row, or more where a template shows its turns otherwise later


class Task(NamedTuple):
    """A conversation to encode.

    turns: positions of the assistant's messages that are trained. options: of the template.
    """

    messages: Messages
    tools: Tools
    turns: Collection[int]
    options: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Turn:
    """An assistant's turn as text: the rendering that asks for it, and the answer with the token that ends it."""

    asked: str
    answer: str
    ended: bool

    @property
    def text(self) -> str:
        return self.asked + self.answer


def attempt(work: Callable[[Any], T], given: Any) -> T | str:
    """Do a piece of work. Returns the text of its ValueError where it has one."""
    try:
        return work(given)
    except ValueError as error:
        return str(error)


def encoded(encoder: PromptEncoder, rows: Iterable[list[Task] | str]) -> list[list[Answer] | str]:
    """Encode the answers of each row of the data; what is wrong with a row is passed on."""

    def answers(tasks: list[Task]) -> list[Answer]:
        return [_encoded(encoder, task) for task in tasks]

    return [tasks if isinstance(tasks, str) else attempt(answers, tasks) for tasks in rows]


def _encoded(encoder: PromptEncoder, task: Task) -> Answer:
    """Rows of one answer, none where nothing of it is trained."""
    if encoder.has_template and (wrong := list(wrong_messages(encoder, task.messages))):
        raise ValueError("; ".join(wrong))
    own = copy.copy(encoder)
    own.template_kwargs = encoder.template_kwargs | task.options
    return rows_of(own, task.messages, task.tools, task.turns) if task.turns else []


def as_rendered(encoder: PromptEncoder, task: Task) -> Conversation:
    """Return a conversation in the form that the template takes; without a template, its prompt."""
    if not encoder.has_template:
        return task.messages[:-1], None
    return _turns(with_stopped_clock(encoder), task.messages, task.tools, task.turns)[0], task.tools


def rows_of(encoder: PromptEncoder, messages: Messages, tools: Tools, turns: Collection[int]) -> list[Row]:
    """Make the fewest rows in which each of these turns stands as it was asked for.

    Args:
        encoder: it must not go on in an assistant's message (`continues=False`).
        messages: the conversation.
        tools: their schemas.
        turns: positions of the assistant's messages that are trained, at least one.

    Raises ValueError where the template refuses the messages, or a turn cannot be told from what is around it.
    """
    if not encoder.has_template:
        return [_without_template(encoder, messages)]
    encoder = with_stopped_clock(encoder)
    found = _turns(encoder, encoder.marked(messages), encoder.marked(tools), turns)[1]
    rows, left = list[Row](), sorted(found)
    while left:
        last = found[left[-1]]
        inside = [turn for turn in left[:-1] if found[turn].ended and last.asked.startswith(found[turn].text)]
        parts = [*(found[turn] for turn in inside), last]
        spans = [(len(part.asked), len(part.text)) for part in parts]
        rows.append(_tokens(encoder, last.text, spans, [] if last.ended else _end(encoder)))
        left = [turn for turn in left[:-1] if turn not in inside]
    return rows[::-1]


def _turns(
    encoder: PromptEncoder, messages: Messages, tools: Tools, turns: Collection[int]
) -> tuple[Messages, dict[int, _Turn]]:
    """Find the turns, and the messages as the template takes them.

    Their calls are objects, or else JSON; content that is null is "", or else None.
    """
    shapes = [forms({"content": "", **message}) for message in messages]
    most, refused = max(map(len, shapes)), list[ValueError]()
    for number in range(most):
        given = [each[number * len(each) // most] for each in shapes]
        try:
            return given, {turn: _turn(encoder, given, tools, turn) for turn in turns}
        except ValueError as error:
            refused.append(error)
    raise refused[0]


def _turn(encoder: PromptEncoder, messages: Messages, tools: Tools, turn: int) -> _Turn:
    """Find a turn as it is rendered where it is the last."""
    before, message = messages[:turn], messages[turn]
    if not before:
        raise ValueError("message 0 is the assistant's, and nothing asks for it: put one before it")
    asked, shown = encoder.render((before, tools)), encoder.render(([*before, message], tools), to_answer=False)
    if message.get("tool_calls"):
        silent = {name: value for name, value in message.items() if name != "tool_calls"}
        if shown == attempt(partial(encoder.render, to_answer=False), ([*before, silent], tools)):
            raise ValueError(
                f"the chat template leaves the tool calls of message {turn} out; choose another, or change it"
            )
    stand_in = {"role": "assistant", "content": _STAND_IN}
    closing = encoder.render(([*before, stand_in], tools), to_answer=False).rpartition(_STAND_IN)[2]
    opened = asked.rfind("<think>")
    if shown.startswith(asked):
        answer = shown[len(asked) :]
    elif opened > asked.rfind("</think>") and shown.startswith(asked[:opened]):
        # The request begins a thought that the rendering shows otherwise, or not at all
        content = shown[opened:].rpartition("</think>")[2].lstrip("\n")
        answer = f"{_thought(message)}\n</think>\n\n{content}"
    else:
        raise ValueError(
            f"the chat template does not show the assistant's message {turn} behind the request for it, so what of it "
            "is the answer is not known; choose another data.chat_template"
        )
    if closing and answer.endswith(closing):
        answer = answer.removesuffix(closing) + _leading(encoder, closing)
    specials = tuple(encoder.special.ids)
    answer = answer.rstrip() if answer.rstrip().endswith(specials) else answer  # nobody samples what is behind the end
    if not answer:
        raise ValueError(f"the chat template shows nothing of the assistant's message {turn}; choose another")
    return _Turn(asked=asked, answer=answer, ended=answer.endswith(specials))


def _thought(message: dict[str, Any]) -> str:
    """Return the thought of a message, wherever it has it."""
    content = message.get("content")
    own, end, _ = content.partition("</think>") if isinstance(content, str) else ("", "", "")
    return message.get("reasoning_content") or (own.replace("<think>", "").strip() if end else "")


def _leading(encoder: PromptEncoder, text: str) -> str:
    """Return the special tokens that a text begins with."""
    rest = text
    while found := max((token for token in encoder.special.ids if rest.startswith(token)), key=len, default=""):
        rest = rest.removeprefix(found)
    return text.removesuffix(rest) if rest else text


def _end(encoder: PromptEncoder) -> list[int]:
    """Return the token with which a policy ends an answer that the template does not end."""
    return [] if encoder.tokenizer.eos_token_id is None else [encoder.tokenizer.eos_token_id]


def _tokens(encoder: PromptEncoder, text: str, spans: list[tuple[int, int]], end: list[int]) -> Row:
    """Encode a rendering up to its last trained turn, and `end` behind it.

    A policy answers prompts that were encoded alone: where the whole text has a token across a bound, its parts are.
    """
    bounds = [bound for span in spans for bound in span]
    whole = encoder.encode_text(text[: bounds[-1]])
    heads = [encoder.encode_text(text[:bound]) for bound in bounds[:-1]]
    if all(whole[: len(head)] == head for head in heads):
        lengths = [*map(len, heads), len(whole)]
        parts = [whole[start:end] for start, end in zip([0, *lengths], lengths, strict=False)]
    else:
        parts = [encoder.encode_text(text[start:end]) for start, end in zip([0, *bounds], bounds, strict=False)]
    return _joined([*parts[:-1], [*parts[-1], *end]])


def _joined(parts: Sequence[Sequence[int]], media: Sequence[MediaHandle] = ()) -> Row:
    """Join parts of a row, of which every second one is trained."""
    trained = np.repeat(np.arange(len(parts)) % 2 == 1, [len(part) for part in parts])
    return Row(ids=np.concatenate([np.array(part, np.int32) for part in parts]), trained=trained, media=tuple(media))


def placed(row: Row, media: Sequence[MediaHandle], vision: VisionProcessor, max_megapixels: float) -> Row:
    """Expand the placeholders of a row's prompts to the tokens of its images, which come in the order of the template.

    Raises ValueError where an answer holds one, MediaError for an image that cannot be used.
    """
    waiting = {kind: [handle for handle in media if handle.kind == kind] for kind in ("image", "video")}
    parts, found, bounds = list[list[int]](), list[MediaHandle](), np.flatnonzero(np.diff(row.trained)) + 1
    for number, ids in enumerate(np.split(row.ids, bounds)):
        kinds = vision.placeholders(ids.tolist())
        if number % 2 and kinds:
            raise ValueError("an assistant's message holds an image: answers are text")
        own = [waiting[kind].pop(0) for kind in kinds if waiting[kind]]
        part, there = vision.expand(ids.tolist(), own, max_megapixels)
        length = sum(map(len, parts))
        found += [replace(each, starts=tuple(length + start for start in each.starts)) for each in there]
        parts.append(part)
    return _joined(parts, found)


def _without_template(encoder: PromptEncoder, messages: Messages) -> Row:
    """Tokens of a text and what follows it, with the end of the sequence, for a base model."""
    *asked, last = messages
    if last["role"] != "assistant" or not isinstance(last.get("content"), str):
        raise ValueError("the tokenizer has no chat template, so a row must be a prompt and one answer that is text")
    prompt, answer = encoder.encode([(asked, None)])[0], encoder.encode_text(encoder.marked(last["content"]))
    return _joined([prompt, [*answer, *_end(encoder)]])


def fitted(row: Row, longest: int, how: str) -> Row:
    """Cut a row to `longest` tokens: left keeps its end, right its start; error raises ValueError."""
    if len(row.ids) <= longest:
        return row
    if how not in ("left", "right") or row.media:
        raise ValueError(
            f"the row has {len(row.ids)} tokens, more than sft.max_length={longest}. Raise it, drop such rows "
            "with data.filter_overlong_prompts=True, or cut them with data.truncation=left|right (not where they have "
            "images)"
        )
    return row.cut(slice(-longest, None) if how == "left" else slice(longest))
