"""One episode behind the gateway: conversations come in as messages and are sent on as tokens, those that were sampled.

    request's messages = [history that an answer of ours ends] + [new ones]     -> that answer's tokens + what is new
                       = anything else (a first call, another agent, a summary) -> the chat template's tokens

Completions form trees: one that goes on from another's answer is its child. A row is a chain of them; a second child
begins a row of its own, whose beginning is context. So every token that was sampled is trained on once.
"""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from verl_like.data.chat import PromptEncoder
from verl_like.episodes.episode import Ask, Turn
from verl_like.episodes.transcript import Transcript, without_end
from verl_like.heartbeat import EPISODE
from verl_like.plugins.agents.tool_calls.call import Parsed, ToolCallParser
from verl_like.rollout.rollout_engine import NOTHING, Completion, SamplingParams

Message = dict[str, Any]
_THINK = "<think>"
_SMALL_CHARS = 1 << 16  # that are read, rendered and tokenised in some milliseconds
_SPARE_CHARS, _TOKEN_CHARS = 1 << 19, 32  # of a context that is full; no text has as many in a token, on average
_DENSE_CHARS, _PIECE_CHARS = 8, 1 << 17  # in a token, on average: of more the tokens are counted first, in pieces
_FORCED_TRIES = 4
_HEAVY = ThreadPoolExecutor(1, "gateway-heavy")  # one at a time: each may take a hundred megabytes
T = TypeVar("T")


class Refused(Exception):
    """Error of a request for something that is not available; the program reads its text.

    code: name of the error in the APIs.
    param: the field.
    status: HTTP's.
    """

    def __init__(
        self, message: str, code: str = "invalid_request_error", param: str | None = None, status: int = 400
    ) -> None:
        super().__init__(message)
        self.code, self.param, self.status = code, param, status


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A request, whatever its protocol.

    most_calls: tool calls that the answer may show; None: all.
    forced: names of the tools, one of which the answer must call; None: no call is demanded.
    wants_usage: the client wants the token counts at the end of a stream.
    is_retry: the client says that it has sent this request before.
    """

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    most_calls: int | None = None
    forced: tuple[str, ...] | None = None
    wants_usage: bool = False
    is_retry: bool = False

    @property
    def num_chars(self) -> int:
        """Count the characters of all texts that the chat template is given."""
        calls = [message["tool_calls"] for message in self.messages if message.get("tool_calls")]
        others = json.dumps([self.tools, calls]) if self.tools or calls else ""
        return sum(len(message["content"]) for message in self.messages) + len(others)


@dataclass(slots=True, eq=False)
class Reply:
    """Answer of the engine to one request.

    message: the answer in the form of OpenAI's chat interface.
    stopped: the stop text of the request that ended the answer; `message` does not contain it.
    """

    context_ids: list[int]
    completion: Completion
    message: Message
    parsed: Parsed
    number: int
    stopped: str | None = None
    parent: Reply | None = None
    transcript: Transcript | None = None
    ended_s: float = 0.0

    @property
    def finish_reason(self) -> str:
        """Reason of the answer's end: stop, length or tool_calls."""
        if self.completion.finish_reason == "length":
            return "length"
        return "tool_calls" if self.message.get("tool_calls") else "stop"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """Settings that all sessions of a run share.

    response: most tokens of an answer.
    total: most tokens of a request with its answer.
    requests: most requests of an episode; None: any number.
    forced_as_auto: serve a request that demands a tool call as if it demanded none.
    """

    encoder: PromptEncoder
    parser: ToolCallParser
    end_ids: frozenset[int]
    response: int
    total: int
    requests: int | None = None
    forced_as_auto: bool = False

    @property
    def most_chars(self) -> int:
        """Bound on the characters of one request. Its JSON may have twice as many bytes."""
        return _SPARE_CHARS + _TOKEN_CHARS * self.total


async def apart(size: int, work: Callable[..., T], *arguments: Any) -> T:
    """Run work(*arguments), in a thread where the input's `size` is large; it must not touch what others change."""
    if size <= _SMALL_CHARS:
        return work(*arguments)
    return await asyncio.get_running_loop().run_in_executor(_HEAVY, work, *arguments)


class Session:
    """The conversations of one episode. `answer` runs in the gateway's event loop and asks the policy in the loop in
    which the session was made; `close` and `turns` may be called from any thread."""

    def __init__(self, rules: Rules, ask: Ask) -> None:
        self.rules, self._ask, self._loop = rules, ask, asyncio.get_running_loop()
        self.episode = EPISODE.get()  # whose it is, for logs
        self.replies: list[Reply] = []
        self.counts: Counter[str] = Counter()
        self.large = asyncio.Semaphore(2)  # bodies that are being read: a slow client keeps no other session waiting
        self.waiting = 0  # requests that have no answer yet
        self.closed = False
        self.failure: BaseException | None = None  # of the engine: no fault of the program's
        self.touched_s = time.monotonic()  # when the policy last was asked or answered
        self._full: set[int | None] = set()  # answers, by number, after which nothing was left; None: first requests
        self._by_history: dict[str, Reply] = {}  # of a conversation that ends with an answer of ours
        self._open: dict[str, tuple[asyncio.Task[Reply], list[bool]]] = {}  # of a request: who still listens
        self._tasks: set[asyncio.Task[Reply]] = set()  # unfinished; of equal requests only the last is in _open
        self._number = self._refused = 0  # requests so far, and those of them that the policy was not asked

    async def answer(self, asked: Asked) -> Reply:
        """The policy's answer. A retry, and a request that comes again after its connection broke, joins the first
        one's.

        Raises Refused, which says what cannot be asked.
        """
        size = asked.num_chars
        if size > self.rules.most_chars:
            what = f"the messages have {size} characters, far more than the maximum context length"
            raise Refused(f"{what} of {self.rules.total} tokens", "context_length_exceeded", "messages")
        histories = await apart(size, _digests, asked.messages, asked.tools)
        if self.closed:
            raise Refused("the episode has ended", "session_ended")
        key = f"{histories[-1:]} {asked.max_tokens} {asked.stop}"
        known = self._open.get(key)
        if known is not None and (asked.is_retry or not any(known[1])):
            task, listening = known
            self.counts["joined_requests"] += 1
        else:
            if self.rules.requests is not None and self._number - self._refused >= self.rules.requests:
                self.counts["out_of_turns"] = 1
                raise Refused(f"the episode has had its {self.rules.requests} requests", "too_many_requests")
            number, self._number = self._number, self._number + 1  # at once: parallel requests count too
            task, listening = asyncio.ensure_future(self._sampled(asked, size, histories, number)), []
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            task.add_done_callback(lambda done: self._forget(key, done))
            self._open[key] = task, listening
            if self.closed:  # meanwhile
                task.cancel()
        place = len(listening)
        listening.append(True)
        try:
            reply = await asyncio.shield(task)
        except asyncio.CancelledError:  # the connection broke: what is sampled is kept for the next try
            listening[place] = False
            if task.cancelled():
                raise Refused("the episode has ended", "session_ended") from None
            raise
        return reply

    def close(self) -> None:
        """Close the session: requests in flight are cancelled, and no further one is served."""
        self.closed = True
        for task in list(self._tasks):
            task.get_loop().call_soon_threadsafe(task.cancel)

    def turns(self) -> list[Turn]:
        """Collect all turns that were sampled, row by row; the row that ended last comes last."""
        children: dict[int, list[Reply]] = {}
        for reply in self.replies:
            children.setdefault(-1 if reply.parent is None else reply.parent.number, []).append(reply)
        heads = [reply for siblings in children.values() for reply in siblings[1:]] + children.get(-1, [])[:1]
        rows = []
        for head in heads:
            row = [head]
            while row[-1].number in children:
                row.append(children[row[-1].number][0])
            rows.append(row)
        rows.sort(key=lambda row: row[-1].ended_s)
        self.counts["new_rows"] = max(0, len(rows) - 1)
        self.counts["calls"] = sum(len(reply.parsed.calls) for reply in self.replies)
        return [_turn(reply, place, number) for number, row in enumerate(rows) for place, reply in enumerate(row)]

    def _forget(self, key: str, done: asyncio.Task[Reply]) -> None:
        """Forget a failed answer: its error may have no listener left, and keeps the whole request in memory."""
        if not done.cancelled() and done.exception() is not None and self._open.get(key, (None,))[0] is done:
            del self._open[key]

    async def _sampled(self, asked: Asked, size: int, histories: Sequence[str], number: int) -> Reply:
        try:
            transcript, parent = await apart(size, self._conversation, asked, size, histories)
        except Refused:
            self._refused += 1
            raise
        context_ids = transcript.context_ids
        room = min(self.rules.response, self.rules.total - len(context_ids))
        if room < 1:  # no sign of life: a program may ask for this again and again
            before = None if parent is None else parent.number
            if before in self._full:
                what = f"nothing is left of the maximum context length of {self.rules.total} tokens"
                raise Refused(f"{what}: the messages have {len(context_ids)}", "context_length_exceeded")
            self._full.add(before)
            self.counts["out_of_tokens"] += 1
            completion = Completion(request_id="", sampled=NOTHING, finish_reason="length")
            return self._keep(asked, transcript, parent, completion, number)
        self.waiting += 1
        self.touched_s = time.monotonic()
        try:
            sampling = self._ask.sampling
            if asked.stop:
                sampling = dataclasses.replace(sampling, stop=tuple(dict.fromkeys([*sampling.stop, *asked.stop])))
            most = min(room, asked.max_tokens or room)
            completion = await self._sample(list(context_ids), sampling, most)
            if asked.forced is not None and not self.rules.forced_as_auto:
                completion = await self._until_called(asked, context_ids, completion, sampling, most)
            return self._keep(asked, transcript, parent, completion, number)
        finally:
            self.waiting -= 1
            self.touched_s = time.monotonic()

    async def _until_called(
        self, asked: Asked, context_ids: list[int], completion: Completion, sampling: SamplingParams, most: int
    ) -> Completion:
        """Sample until a completion calls what the request demands; all others are dropped.

        The policy is not constrained: tokens under a mask would have other log-probs than the trainer's.
        """
        for number in range(_FORCED_TRIES):
            ids = completion.sampled.token_ids.tolist()
            if any(call.name in (asked.forced or ()) for call in self._parsed(asked, context_ids, ids)[0].calls):
                return completion
            self.counts["uncalled_answers"] += 1
            if number + 1 < _FORCED_TRIES:
                completion = await self._sample(list(context_ids), sampling, most)
        what = (
            f"tool_choice demands a call, and the policy wrote none in {_FORCED_TRIES} answers; ask with auto, or set "
        )
        what += "actor_rollout_ref.rollout.gateway.forced_tool_choice=auto, which takes any such demand for it"
        raise Refused(what, param="tool_choice")

    async def _sample(self, context_ids: list[int], sampling: SamplingParams, most: int) -> Completion:
        async def ask() -> Completion:
            return await self._ask(context_ids, sampling, max_tokens=most)

        try:
            if self._loop is asyncio.get_running_loop():
                return await ask()
            return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(ask(), self._loop))
        except ValueError as error:
            raise Refused(str(error)) from error
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self.failure = error
            raise

    def _conversation(self, asked: Asked, size: int, histories: Sequence[str]) -> tuple[Transcript, Reply | None]:
        """The tokens of a request's messages, and the answer that they go on from. histories: the messages' digests."""
        rules = self.rules
        if not asked.messages:
            raise Refused("messages is empty", param="messages")
        try:
            if size > max(_SPARE_CHARS, _DENSE_CHARS * rules.total):
                self._require_room(asked)
            for length in range(len(asked.messages) - 1, 0, -1):
                if asked.messages[length - 1]["role"] != "assistant":
                    continue
                known = self._by_history.get(histories[length - 1])
                if known is not None and known.transcript is not None:
                    transcript = _forked(known.transcript)
                    transcript.observe(asked.messages[length:])
                    return transcript, known
            (ids,) = rules.encoder.encode([(asked.messages, asked.tools)])
            return Transcript(rules.encoder, ids, asked.messages, asked.tools, follow_template=False), None
        except ValueError as error:
            raise Refused(str(error)) from error

    def _require_room(self, asked: Asked) -> None:
        """Raise Refused for a text far too long, before the tokens of all of it are in memory."""
        total, count = self.rules.total, 0
        text = self.rules.encoder.render((asked.messages, asked.tools))
        for start in range(0, len(text), _PIECE_CHARS):
            count += len(self.rules.encoder.encode_text(text[start : start + _PIECE_CHARS]))
            if count > 1.1 * total:  # cuts may add some
                what = f"the messages have more than {count} tokens, the maximum context length is {total}"
                raise Refused(what, "context_length_exceeded", "messages")

    def _keep(
        self, asked: Asked, transcript: Transcript, parent: Reply | None, completion: Completion, number: int
    ) -> Reply:
        context_ids, ids = list(transcript.context_ids), completion.sampled.token_ids.tolist()
        parsed, stopped = self._parsed(asked, context_ids, ids)
        message: Message = {"role": "assistant", "content": parsed.content}
        if parsed.calls:
            message["tool_calls"] = [
                function_call(f"call{number:03d}{place:02d}", call.name, json.dumps(call.arguments, ensure_ascii=False))
                for place, call in enumerate(parsed.calls)
            ]
        reply = Reply(context_ids, completion, message, parsed, number, stopped, parent, ended_s=time.monotonic())
        if ids:
            transcript.wrote(ids, message)
            reply.transcript = transcript
            self.replies.append(reply)
            before = asked.messages[:-1] if asked.messages[-1]["role"] == "assistant" else asked.messages
            for history in ([*asked.messages, message], [*before, transcript.messages[-1]]):  # apart, or put together
                self._by_history[_digests(history, asked.tools)[-1]] = reply
        return reply

    def _parsed(self, asked: Asked, context_ids: Sequence[int], ids: list[int]) -> tuple[Parsed, str | None]:
        """Return the answer as its client is shown it, and the text of the request's that stopped it."""
        tokenizer = self.rules.encoder.tokenizer
        text = tokenizer.decode(without_end(ids, self.rules.end_ids), skip_special_tokens=False)
        stops = [(text.find(stop), stop) for stop in asked.stop if stop in text]
        text = text[: min(stops)[0]] if stops else text
        before = tokenizer.decode(context_ids[-8:], skip_special_tokens=False)
        parsed = self.rules.parser.parse((_THINK if before.rstrip().endswith(_THINK) else "") + text)
        most = asked.most_calls if asked.tools else 0
        if most == 0 or not parsed.calls:  # no calls for its client: what looks like some is text
            is_markup = bool(parsed.calls or parsed.malformed)
            content = text.rpartition("</think>")[2] if is_markup else parsed.content
            parsed = Parsed(content=content, reasoning=parsed.reasoning)
        elif most is not None:
            parsed = dataclasses.replace(parsed, calls=parsed.calls[:most])
        return parsed, min(stops)[1] if stops else None


def function_call(identity: str, name: str, arguments: str) -> dict[str, Any]:
    """A call as a message of the chat interface has it."""
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}}


def _turn(reply: Reply, place: int, number: int) -> Turn:
    if place == 0:
        return Turn.of(reply.context_ids, reply.completion, new_row=number > 0)
    assert reply.parent is not None
    before = len(reply.parent.context_ids) + len(reply.parent.completion.sampled)
    return Turn.of(reply.context_ids[before:], reply.completion)


def _forked(transcript: Transcript) -> Transcript:
    """Copy a transcript, so that the copy can go on from here in another way."""
    other = copy.copy(transcript)
    other.messages = list(transcript.messages)
    other._history, other._ends = list(transcript._history), set(transcript._ends)
    other._marked = list(transcript._marked)
    return other


def _digests(messages: Sequence[Message], tools: Any) -> list[str]:
    """Hash every beginning of the conversation: the first message, the first two, and so on.

    Digests are equal for conversations that mean the same, however a client writes them down again.
    """
    hashed = hashlib.blake2b(json.dumps(tools, sort_keys=True).encode(), digest_size=16)
    found = []
    for message in messages:
        hashed.update(json.dumps(_plain(message), sort_keys=True).encode() + b"\n")
        found.append(hashed.hexdigest())
    return found


def _plain(message: Message) -> list[Any]:
    calls = [_plain_call(call.get("function", call)) for call in message.get("tool_calls") or []]
    return [message["role"], (message.get("content") or "").strip(), calls, message.get("tool_call_id")]


def _plain_call(call: dict[str, Any]) -> list[Any]:
    arguments = call.get("arguments")
    try:
        return [call.get("name"), json.loads(arguments) if isinstance(arguments, str) else arguments]
    except (ValueError, RecursionError):
        return [call.get("name"), arguments]
