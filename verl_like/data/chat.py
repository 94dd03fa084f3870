"""Chat messages to prompt tokens: template, truncation, and the parallel measurement of long data sets."""

from __future__ import annotations

import logging
import multiprocessing
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from typing import Any, TypeVar

from jinja2 import TemplateSyntaxError

from verl_like.config import SpelledTokens, Truncation
from verl_like.models.special_tokens import SpecialTokens
from verl_like.text import whole

logger = logging.getLogger(__name__)

Messages = list[dict[str, Any]]
Conversation = tuple[Messages, list[dict[str, Any]] | None]  # messages, and the tools that they may use
_THINK = "<think>"
_CLOSE = (
    "the last message is an assistant's: change it, or let another answer follow (data.continue_final_message=False)"
)
CHUNK = 1000  # prompts per task of the worker processes
_AHEAD = 4  # tasks of each that wait, so that a large file is not in memory twice
T = TypeVar("T")


class PromptEncoder:
    """Encoder of messages to token ids with a chat template. Picklable.

    Without a template (base models) a single user message is the prompt itself, with the tokenizer's own special tokens
    (BOS); anything else is an error.

    template: Jinja text that replaces the tokenizer's own; "" for no template at all; None for the tokenizer's own.
    spelled: treatment of control tokens that messages or tools spell out.
    continues: data.continue_final_message.
    """

    def __init__(
        self,
        tokenizer: Any,
        template_kwargs: Any,
        template: str | None = None,
        spelled: SpelledTokens = SpelledTokens.text,
        continues: bool = True,
    ) -> None:
        self.tokenizer, self.continues = tokenizer, continues
        self.template_kwargs = dict(template_kwargs) | ({"chat_template": template} if template else {})
        own = tokenizer.chat_template is not None or "chat_template" in self.template_kwargs
        self.has_template = own and template != ""
        self._warned = template == ""  # asked for, so no news
        self.spelled, self.special = spelled, SpecialTokens(tokenizer)
        if self.has_template:
            self.special = SpecialTokens(tokenizer, self._turn_tokens())

    def encode(self, conversations: Sequence[Conversation], *, to_answer: bool = True) -> list[list[int]]:
        """Token ids of each conversation, ready for the assistant's answer, or (to_answer=False) whole. Not truncated.

        ValueError if the template refuses it, or as `marked` does.
        """
        texts = [self.render(self.marked(conversation), to_answer=to_answer) for conversation in conversations]
        if not texts:
            return []
        begin = not self.has_template
        encoded = self.tokenizer([self.special.unmarked(text) for text in texts], add_special_tokens=begin)["input_ids"]
        marked = {number for number, text in enumerate(texts) if self.special.mark in text}
        return [
            self.special.encode(text, add_special_tokens=begin) if number in marked else encoded[number]
            for number, text in enumerate(texts)
        ]

    def encode_text(self, text: str) -> list[int]:
        """Token ids of a text, perhaps with marks, without template and special tokens."""
        if self.special.mark in text:
            return self.special.encode(text)
        return self.tokenizer([whole(text)], add_special_tokens=False)["input_ids"][0]

    def marked(self, value: Any) -> Any:
        """Messages, tools or text of others whose control tokens are to stay text when they are rendered and encoded.

        ValueError for those with any where data.special_tokens_in_text=error.
        """
        if self.spelled == SpelledTokens.keep:
            return value
        marked = self.special.marked(value)
        if self.spelled == SpelledTokens.error and self.special.mark in str(marked):
            names = ", ".join(self.special.spelled(value)) or "in parts"
            raise ValueError(
                f"a text spells special tokens out, {names} (data.special_tokens_in_text=error): leave it out, "
                "or set text (it stays text) or keep (it becomes the token)"
            )
        return marked

    def render(self, conversation: Conversation, *, to_answer: bool = True) -> str:
        """The prompt as text, up to where the policy goes on: after the generation prompt, or in the last message if it
        is an assistant's; to_answer=False: the whole conversation.

        Raises ValueError if the template refuses the messages, or to leave such a message open.
        """
        messages, tools = conversation
        if not self.has_template:
            return whole(self._plain_prompt(messages))
        extra = ({} if tools is None else {"tools": tools}) | self.template_kwargs
        begun = self.begun(messages) if to_answer else None
        if begun is None:
            return self._rendered(messages, add_generation_prompt=to_answer, **extra)
        if begun and not (self.special.unmarked(begun).lstrip().startswith(_THINK) and "</think>" not in begun):
            messages = [*messages[:-1], {**messages[-1], "content": begun}]  # one text: not every template takes parts
            return self._rendered(messages, add_generation_prompt=False, continue_final_message=True, **extra)
        # A thought without its end: templates would put a closed one before it, and some begin one themselves
        head = self._rendered(messages[:-1], add_generation_prompt=True, **extra)
        return (head[: head.rindex(_THINK)] if begun and head.rstrip().endswith(_THINK) else head) + whole(begun)

    def begun(self, messages: Messages) -> str | None:
        """The text of a last message that is the assistant's: the answer with which the policy goes on; "" if it is
        blank. None without one, or with data.continue_final_message=False.

        Raises ValueError for more than text.
        """
        last = messages[-1] if messages and self.continues else {}
        if last.get("role") != "assistant":
            return None
        content = last.get("content") or ""
        parts = content if isinstance(content, list) else [{"text": content}]
        text = "".join(part.get("text") or "" for part in parts)
        thought = last.get("reasoning_content") and not text.strip()
        if last.get("tool_calls") or thought or any("text" not in part for part in parts):
            raise ValueError(f"the policy cannot go on in tool calls, media or a thought alone; {_CLOSE}")
        return text if text.strip() else ""

    def _rendered(self, messages: Messages, **options: Any) -> str:
        try:
            return whole(self.tokenizer.apply_chat_template(messages, tokenize=False, **options))
        except Exception as error:  # templates are programs: they raise what they like
            fix = "choose another data.chat_template, or change the row"
            fix = _CLOSE if "continue_final_message" in options else fix
            shown = str(messages).replace(repr(self.special.mark)[1:-1], "")[:300]
            raise ValueError(f"the chat template refused the messages {shown}: {error}; {fix}") from error

    def _turn_tokens(self) -> set[str]:
        """Added tokens that are not special, but which the template writes around a user's message or a tool's: those
        of DeepSeek's turns, say, or <tool_response>. Thoughts and calls are the model's, and prompts may ask for them.
        """
        known = getattr(self.tokenizer, "added_tokens_decoder", {}).values()
        texts = [token.content for token in known if not token.special and "think" not in token.content]
        added = [text for text in texts if len(text.strip()) > 2 and not text.strip().isalnum()]  # no blanks, no words
        call = {"type": "function", "id": "call00000", "function": {"name": "x", "arguments": {}}}
        messages: Messages = [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
        ]
        messages.append({"role": "tool", "content": "x", "tool_call_id": "call00000", "name": "x"})
        written = []
        for length in range(1, 4) if added else ():
            try:
                text = self._rendered(messages[:length], add_generation_prompt=True, **self.template_kwargs)
            except ValueError:  # it has no such messages
                text = ""
            written.append({token for token in added if token in text})
        return written[0] | (written[2] - written[1]) if added else set()

    def _plain_prompt(self, messages: Messages) -> str:
        if len(messages) != 1 or messages[0]["role"] != "user" or not isinstance(messages[0].get("content"), str):
            roles = [message["role"] for message in messages]
            raise ValueError(
                f"the tokenizer has no chat template, so a prompt must be one user message with text; this one has the "
                f"roles {roles}. Set data.chat_template to a name or file, or data.tokenizer to a folder that has one"
            )
        if not self._warned:
            logger.warning("the tokenizer has no chat template: the text of each user message is the prompt as it is")
            self._warned = True
        return messages[0]["content"]


def check_template(tokenizer: Any, key: str) -> None:
    """Raise ValueError, naming `key`, where the tokenizer's own chat template is no Jinja."""
    try:
        tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False)
    except Exception as error:  # there may be none, or it wants another conversation
        if isinstance(error, TemplateSyntaxError):
            what = f"its chat template is no Jinja: line {error.lineno}: {error.message}"
            raise ValueError(f"{key}: {what}; correct it, or set data.chat_template to another") from error


def truncate(ids: list[int], limit: int, how: Truncation, place: str) -> list[int]:
    """Cut a prompt to `limit` tokens.

    how: left keeps the end, right the start, middle both ends; error raises ValueError, which names `place`.
    """
    if len(ids) <= limit:
        return ids
    if how == Truncation.left:
        return ids[-limit:]
    if how == Truncation.right:
        return ids[:limit]
    if how == Truncation.middle:
        head = limit // 2
        return ids[:head] + ids[len(ids) - (limit - head) :]
    raise ValueError(
        f"{place}: the prompt has {len(ids)} tokens, more than data.max_prompt_length={limit}. Raise it, drop such "
        "prompts with data.filter_overlong_prompts=True, or cut them with data.truncation=left|right|middle"
    )


def encode_all(encoder: PromptEncoder, conversations: Sequence[Conversation], *, num_workers: int) -> list[list[int]]:
    """Encode a whole data set, in order, in this process or in `num_workers` spawned ones."""
    chunks = (conversations[i : i + CHUNK] for i in range(0, len(conversations), CHUNK))
    num_workers = min(num_workers, -(-len(conversations) // CHUNK))
    return [ids for encoded in in_processes(encoder.encode, chunks, num_workers=num_workers) for ids in encoded]


def in_processes(work: Callable[[Any], T], chunks: Iterable[Any], *, num_workers: int) -> Iterator[T]:
    """Do `work` with each chunk, in this process or in `num_workers` spawned ones, a few chunks ahead of what is taken.

    Yields its results, in order. `work` and chunks must be picklable.
    """
    if num_workers <= 1:
        yield from map(work, chunks)
        return
    context = multiprocessing.get_context("spawn")  # a fork would copy the locks of running threads
    with ProcessPoolExecutor(num_workers, context, initializer=_set_work, initargs=(work,)) as pool:
        waiting = deque[Future[T]]()
        for chunk in chunks:
            waiting.append(pool.submit(_do, chunk))
            if len(waiting) > _AHEAD * num_workers:
                yield waiting.popleft().result()
        yield from (each.result() for each in waiting)


_work: Callable[[Any], Any] | None = None  # of a spawned process


def _set_work(work: Callable[[Any], Any]) -> None:
    global _work
    _work = work


def _do(chunk: Any) -> Any:
    assert _work is not None
    return _work(chunk)
