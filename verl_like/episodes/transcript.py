"""A conversation beside its tokens: how an episode of several turns is sent on without re-tokenising what was sampled.

    transcript = Transcript(encoder, prompt.ids, messages, tools, follow_template=False)
    completion = await ask(transcript.context_ids)
    transcript.wrote(completion.sampled.token_ids.tolist(), {"role": "assistant", "content": ...})
    seen = transcript.observe([{"role": "tool", "content": "42"}])   # the next turn's observation_ids and new_row

A chat template only renders whole conversations. What follows an answer is found as text:

    rendering of the whole = what was sent before + what was sampled + delta                  (the proof)

and the delta alone is tokenised. Messages bear marks where they spell special tokens out (`PromptEncoder.marked`),
what was sampled does not. Where the template rewrites what came before (drops thinking, trims, writes a tool
call its own way), no delta exists; then `follow_template` decides between a new row and the model's own history.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from verl_like.batch import MediaHandle
from verl_like.data.chat import Messages, PromptEncoder

_STAND_IN = "standinforcontent"  # nothing that a template would trim, escape or take for markup
_LONG = 24  # characters of a text that no template has of itself


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """Tokens between two answers: `observation_ids` and `new_row` of the next Turn.

    reason: of a new row, what the template renders otherwise than it was sent or written. media: the images in `ids`,
    placed in the row.
    """

    ids: list[int]
    media: Sequence[MediaHandle] = ()
    new_row: bool = False
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    """An answer as it was sampled.

    endings: the text of the last special token, of the last two, ...; none if it was cut off.
    """

    message: dict[str, Any]
    text: str
    endings: tuple[str, ...]
    last_id: int | None


Expand = Callable[[list[int], Sequence[MediaHandle]], tuple[list[int], list[MediaHandle]]]
_Way = Callable[[Messages, _Answer, Messages], tuple[Messages, str] | None]


class Transcript:
    """A conversation as messages and, at its side, the exact tokens that the model was sent and wrote.

    prompt_ids: the tokens of `messages`, perhaps truncated (a new row never is). follow_template: True begins a new row
    where the template rewrites history; False keeps history as it was written, always in one row (verl's default,
    use_inference_chat_template=False). context_ids: what the engine is sent for the next turn. begun: what it ends with
    of the next answer, where the last message is an assistant's. messages: so far, as they were given. media: the
    images in context_ids, placed there. expand: makes of the tokens of a text with a placeholder for each image those
    that the model sees. Raises ValueError for messages that the template refuses.
    """

    def __init__(
        self,
        encoder: PromptEncoder,
        prompt_ids: Sequence[int],
        messages: Sequence[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        *,
        follow_template: bool,
        media: Sequence[MediaHandle] = (),
        expand: Expand | None = None,
    ) -> None:
        self.context_ids = list(prompt_ids)
        self.media, self._expand = list(media), expand
        self.messages = list(messages)
        self._encoder = with_stopped_clock(encoder)
        self._tools = encoder.marked(tools)
        self._follow = follow_template
        self._marked: Messages = [encoder.marked(message) for message in messages]  # of self.messages
        self._history = [forms(message)[0] for message in self._marked]  # the messages as the template is given them
        self._text = self._render(self._history)  # of this row: sent, sampled, sent, ...
        self._begun = self._take_begun()
        self._proved = True  # whether the template renders _history as _text
        self._ends: set[str] = set()  # what the template ends turns with, as far as it was sampled
        self._answer: _Answer | None = None
        self._refusals: list[str] = []

    @property
    def begun(self) -> str:
        """The text of a last message in which the policy goes on, as it was sent."""
        return self._encoder.special.unmarked(self._begun)

    def _take_begun(self) -> str:
        """Take out of the history a last message in which the policy goes on, and return its text with marks.

        The message comes back as a part of the answer.
        """
        if (begun := self._encoder.begun(self._history)) is None:
            return ""
        self._history = self._history[:-1]
        return begun if self._text.endswith(begun) else begun.rstrip()

    def wrote(self, token_ids: Sequence[int], message: dict[str, Any], *, whole: bool = False) -> None:
        """Take in an answer: sampled tokens, with the end of turn if there is one, and the message parsed from them.

        whole: the message holds what was begun of it; otherwise that is put before it.

        Raises ValueError for another role than assistant, and for a second answer to the same context.
        """
        if message.get("role") != "assistant":
            raise ValueError(f"what the policy wrote has the role assistant, not {message.get('role')!r}")
        if self._answer is not None:
            raise ValueError("two answers in a row: observe() must come between them")
        if self.begun and not whole:
            message = {**message, "content": self.begun + (message.get("content") or "")}
        endings = tuple(self._endings(token_ids))
        last_id = token_ids[-1] if endings else None
        self._answer = _Answer(message=message, text=self._decode(token_ids), endings=endings, last_id=last_id)
        self.context_ids = [*self.context_ids, *token_ids]
        self.messages = [*self.messages[: len(self._history)], message]
        # Written anew (a new row), special tokens that were sampled are tokens again, those that were spelled out text
        special = self._encoder.special
        num_sampled = sum(number in special.control for number in token_ids)
        is_spelled = len(special.spelled(self._answer.text)) > num_sampled or self._begun != self.begun
        self._marked = [*self._marked[: len(self._history)], special.marked(message) if is_spelled else message]

    def observe(self, messages: Sequence[dict[str, Any]], media: Sequence[MediaHandle] = ()) -> Observation:
        """Tool or user messages after an answer, with their images; context_ids then ends in a generation prompt.

        Raises ValueError if the template refuses them or leaves one out; nothing has changed then.
        """
        if (answer := self._answer) is None or not messages:
            raise ValueError("observe() needs an answer before it and at least one message")
        marked = [self._encoder.marked(message) for message in messages]
        observed = [forms(message)[0] for message in marked]
        self._refusals = []
        said, reason, new_row = self._text + answer.text, "", False
        # A template may refuse, turns later, a tool call that was given as text: then the parsed messages are tried.
        histories = [self._history, [forms(message)[0] for message in self._marked[:-1]]]
        found = self._first(self._exact, histories, answer, observed) if self._proved else None
        if found is None and self._follow:
            found = self._rewritten(answer, observed)
            unmarked = self._encoder.special.unmarked
            said, new_row, reason = "", True, difference(unmarked(said), unmarked(found[1]))
        elif found is None:
            found = self._first(self._kept, histories, answer, observed)
            if found is None:
                raise self._refused(observed)
            self._proved = False
        history, delta = found
        ids = self._encoder.encode_text(delta) if new_row else self._encode(delta, answer)
        earlier, before = ([], self.media) if new_row else (self.context_ids, [])
        placed: list[MediaHandle] = []
        if media or before:
            assert self._expand is not None
            ids, placed = self._expand(ids, [*before, *media])
            placed = [replace(h, starts=tuple(len(earlier) + start for start in h.starts)) for h in placed]
        self.context_ids = [*earlier, *ids]
        self.media = placed if new_row else [*self.media, *placed]
        self.messages.extend(messages)
        self._marked += marked
        self._history, self._text, self._answer = history, said + delta, None
        self._begun = self._take_begun()
        return Observation(ids=list(ids), media=placed, new_row=new_row, reason=reason)

    def _first(
        self, way: _Way, histories: Sequence[Messages], answer: _Answer, observed: Messages
    ) -> tuple[Messages, str] | None:
        for number, history in enumerate(histories):
            if history not in histories[:number] and (found := way(history, answer, observed)) is not None:
                return found
        return None

    def _exact(self, history: Messages, answer: _Answer, observed: Messages) -> tuple[Messages, str] | None:
        """The messages so far and the delta, if the template renders some form of the answer as it was written."""
        said = self._text + answer.text
        for form in [*self._verbatim(answer), *forms(answer.message)]:
            whole = self._attempt([*history, form], observed)
            if whole is None or not whole.startswith(said):
                continue
            if self._holds_no_answer(whole[len(said) :], history, answer, observed):
                return [*history, form, *observed], whole[len(said) :]
        return None

    def _holds_no_answer(self, delta: str, history: Messages, answer: _Answer, observed: Messages) -> bool:
        """Return True where the delta holds nothing of the answer.

        A template may complete what was cut off, a tool call for instance.
        """
        if answer.endings and answer.endings[0] in self._ends:
            return True
        proved = any(delta == way(history, answer, observed) for way in (self._after_stand_in, self._after_ending))
        self._ends |= set(answer.endings[:1]) if proved else set()
        return proved

    def _rewritten(self, answer: _Answer, observed: Messages) -> tuple[Messages, str]:
        """The messages so far and the whole context, as the template renders it now."""
        choices = [forms(message) for message in self._marked]
        for number in range(max(map(len, choices))):
            given = [choice[min(number, len(choice) - 1)] for choice in choices]
            whole = self._attempt(given, observed)
            if whole is not None and self._calls_are_shown([*given, *observed], whole):
                return [*given, *observed], whole
        for form in self._verbatim(answer):
            if (whole := self._attempt([*self._history, form], observed)) is not None:
                return [*self._history, form, *observed], whole
        raise self._refused(observed)

    def _kept(self, history: Messages, answer: _Answer, observed: Messages) -> tuple[Messages, str] | None:
        """The messages so far and what follows this answer, from renderings in which something else may differ."""
        ways = [self._after_stand_in, self._after_ending]
        if answer.message.get("tool_calls"):  # a stand-in has no calls, and some templates need them to place a result
            ways.reverse()
        delta = next((delta for way in ways if (delta := way(history, answer, observed)) is not None), None)
        for form in [*self._verbatim(answer), *forms(answer.message)]:
            if delta is not None and self._attempt([*history, form], observed) is not None:
                return [*history, form, *observed], delta
        return None

    def _after_stand_in(self, history: Messages, answer: _Answer, observed: Messages) -> str | None:
        """Return what follows a plain answer, less the end of turn that the policy sampled itself.

        None where the template refuses it.
        """
        whole = self._attempt([*history, {"role": "assistant", "content": _STAND_IN}], observed)
        if whole is None or _STAND_IN not in whole:
            return None
        tail = whole.rpartition(_STAND_IN)[2]
        return tail.removeprefix(next((end for end in reversed(answer.endings) if tail.startswith(end)), ""))

    def _after_ending(self, history: Messages, answer: _Answer, observed: Messages) -> str | None:
        """Return what follows the sampled end of turn in the rendering of the parsed message; None if it is missing."""
        marked = {**observed[0], "content": _STAND_IN}
        for form in forms(answer.message) if answer.endings else ():
            earlier = [*history, form]
            whole, head = self._attempt(earlier, observed), self._attempt(earlier, [marked, *observed[1:]])
            if whole is None or head is None:
                continue
            start = first_difference(whole, self._render(history))  # where the answer begins
            place = whole.rfind(answer.endings[0], start, head.find(_STAND_IN, start))
            if place >= 0:
                return whole[place + len(answer.endings[0]) :]
        return None

    def _verbatim(self, answer: _Answer) -> Iterator[dict[str, Any]]:
        """The answer's text as content, so that nothing in it is serialised anew. A thought that the generation prompt
        began belongs to it for some templates."""
        opened = self._text[self._text.rfind("<think>") :] if "<think>" in self._text else ""
        for end in answer.endings or ("",):
            spoken = self._begun + answer.text.removesuffix(end)
            yield {"role": "assistant", "content": spoken}
            if opened:
                yield {"role": "assistant", "content": opened + spoken}

    def _attempt(self, earlier: Messages, observed: Messages) -> str | None:
        """The whole as text. None, with a note, where the template refuses it or leaves out an observation."""
        try:
            whole = self._render([*earlier, *observed])
            if self._shows(observed, whole) or self._follows(observed, earlier):
                return whole
            self._refusals.append("it leaves out a message without a word")
        except ValueError as error:
            if earlier[-1].get("content", "") is not None:  # what it says of None is no news to the user
                self._refusals.append(str(error.__cause__ or error))
        return None

    def _shows(self, observed: Messages, whole: str) -> bool:
        """Return True where each observation is plainly there: long enough, and more often than before."""
        assert self._answer is not None
        texts = [text.strip() for message in observed if isinstance(text := message.get("content"), str)]
        said = (self._text, self._answer.text)
        return len(texts) == len(observed) and all(
            len(text) >= _LONG and whole.count(text) > sum(part.count(text) for part in said) for text in texts
        )

    def _follows(self, observed: Messages, earlier: Messages) -> bool:
        """Return True where the rendering changes with each observation.

        Templates without tool messages often skip them.
        """
        marked = [{**m, "content": m["content"] + _STAND_IN} for m in observed if isinstance(m.get("content"), str)]
        return len(marked) < len(observed) or self._render([*earlier, *marked]).count(_STAND_IN) >= len(marked)

    def _calls_are_shown(self, history: Messages, whole: str) -> bool:
        """Return True where the rendering depends on the tool calls, or there are none.

        Templates leave out what they do not know.
        """
        without = without_calls(history)
        try:
            return without == history or self._render(without) != whole
        except ValueError:  # they are needed, so they are seen
            return True

    def _refused(self, observed: Messages) -> ValueError:
        roles = " and ".join(dict.fromkeys(str(message.get("role")) for message in observed))
        why = "; ".join(dict.fromkeys(self._refusals))
        return ValueError(f"the chat template takes no message of the role {roles} after this answer: {why}")

    def _render(self, history: Messages) -> str:
        return self._encoder.render((history, self._tools))

    def _encode(self, delta: str, answer: _Answer) -> list[int]:
        """Behind the sampled end of turn, if there is one: some of these tokens swallow the white space after them."""
        behind = self._encoder.encode_text((answer.endings or ("",))[0] + delta)
        return behind[1:] if behind and behind[0] == answer.last_id else self._encoder.encode_text(delta)

    def _decode(self, token_ids: Sequence[int]) -> str:
        """Behind the token before them: some tokenizers drop a space at the start of what they decode."""
        before, both = (self._text_of([*self.context_ids[-1:], *ids]) for ids in ([], token_ids))
        return both[len(before) :] if both.startswith(before) else self._text_of(token_ids)

    def _endings(self, token_ids: Sequence[int]) -> Iterator[str]:
        for count in range(1, min(3, len(token_ids)) + 1):
            ending = list(token_ids[-count:])
            if self._text_of(ending[:1]) == "" or self._text_of(ending[:1], skip_special_tokens=True):
                return
            yield self._text_of(ending)

    def _text_of(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        decode = self._encoder.tokenizer.decode
        return decode(list(token_ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)


def without_end(token_ids: Sequence[int], end_ids: Collection[int]) -> list[int]:
    """Return the sampled tokens, less those at the end that end a turn."""
    length = next((n for n in range(len(token_ids), 0, -1) if token_ids[n - 1] not in end_ids), 0)
    return list(token_ids[:length])


_SHOWN = 40  # characters of each side of a difference
_TAG = 24  # characters of a tag at most

Message = dict[str, Any]


def forms(message: Message) -> list[Message]:
    """The message with its calls' arguments as objects, which most templates expect and servers give them, then as
    JSON, as OpenAI has them; without content, with "" and then None. Itself if it has no calls."""
    if not message.get("tool_calls"):
        return [message]
    contents = [message["content"]] if message.get("content") else ["", None]
    calls = [[_with_arguments(call, to) for call in message["tool_calls"]] for to in (_as_object, _as_json)]
    return [{**message, "content": content, "tool_calls": given} for given in calls for content in contents]


def without_calls(messages: list[Message]) -> list[Message]:
    """Return the messages without their tool calls."""
    return [{key: value for key, value in message.items() if key != "tool_calls"} for message in messages]


def with_stopped_clock(encoder: PromptEncoder) -> PromptEncoder:
    """Return the encoder with one time for the whole conversation: a date that changes would rewrite history."""
    template = encoder.template_kwargs.get("chat_template") or encoder.tokenizer.chat_template
    if not encoder.has_template or "strftime_now" not in str(template):
        return encoder
    clock = {"strftime_now": datetime.now().strftime}
    stopped = copy.copy(encoder)
    stopped.template_kwargs = {**clock, **encoder.template_kwargs}
    return stopped


def first_difference(one: str, other: str) -> int:
    """Place where two texts begin to differ; the length of the shorter one if the other begins with it."""
    places = (place for place, (left, right) in enumerate(zip(one, other, strict=False)) if left != right)
    return next(places, min(len(one), len(other)))


def difference(said: str, whole: str) -> str:
    """Both texts where they begin to differ, with the start of the tag that they are in."""
    place = first_difference(said, whole)
    tag = said.rfind("<", max(0, place - _TAG), place)
    place = tag if tag >= 0 and ">" not in said[tag:place] else place
    return f"{said[place : place + _SHOWN]!r} became {whole[place : place + _SHOWN]!r}"


def _with_arguments(call: Message, convert: Callable[[Any], Any]) -> Message:
    if "function" in call:
        return {**call, "function": _with_arguments(call["function"], convert)}
    return {**call, "arguments": convert(call.get("arguments"))}


def _as_object(arguments: Any) -> Any:
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):  # what the model wrote need not be JSON
        return arguments


def _as_json(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
