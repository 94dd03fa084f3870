"""Chat messages to prompt tokens: template, truncation, and the parallel measurement of long data sets."""

from __future__ import annotations

import logging
import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from verl_like.config import Truncation
from verl_like.text import whole

logger = logging.getLogger(__name__)

Messages = list[dict[str, Any]]
Conversation = tuple[Messages, list[dict[str, Any]] | None]  # messages, and the tools that they may use
_THINK = "<think>"
_CLOSE = (
    "the last message is an assistant's: change it, or let another answer follow (data.continue_final_message=False)"
)
_CHUNK = 1000  # prompts per task of the worker processes


class PromptEncoder:
    """Messages -> token ids with a chat template. Picklable.

    template: Jinja text that replaces the tokenizer's own, "" for no template at all, None for the tokenizer's own.
    Without a template (base models) a single user message is the prompt itself, with the tokenizer's own special tokens
    (BOS); anything else is an error. continues: data.continue_final_message.
    """

    def __init__(
        self, tokenizer: Any, template_kwargs: Any, template: str | None = None, continues: bool = True
    ) -> None:
        self.tokenizer, self.continues = tokenizer, continues
        self.template_kwargs = dict(template_kwargs) | ({"chat_template": template} if template else {})
        own = tokenizer.chat_template is not None or "chat_template" in self.template_kwargs
        self.has_template = own and template != ""
        self._warned = template == ""  # asked for, so no news

    def encode(self, conversations: Sequence[Conversation]) -> list[list[int]]:
        """Token ids of each conversation, ready for the assistant's answer. Not truncated."""
        texts = [self.render(conversation) for conversation in conversations]
        if not texts:
            return []
        return self.tokenizer(texts, add_special_tokens=not self.has_template)["input_ids"]

    def encode_text(self, text: str) -> list[int]:
        """Token ids of a plain text, without template and special tokens."""
        return self.tokenizer([whole(text)], add_special_tokens=False)["input_ids"][0]

    def render(self, conversation: Conversation) -> str:
        """The prompt as text, up to where the policy goes on: after the generation prompt, or in the last message if it
        is an assistant's. ValueError if the template refuses the messages, or to leave such a message open."""
        messages, tools = conversation
        if not self.has_template:
            return whole(self._plain_prompt(messages))
        extra = ({} if tools is None else {"tools": tools}) | self.template_kwargs
        begun = self.begun(messages)
        if begun is None:
            return self._rendered(messages, add_generation_prompt=True, **extra)
        if begun and not (begun.lstrip().startswith(_THINK) and "</think>" not in begun):
            messages = [*messages[:-1], {**messages[-1], "content": begun}]  # one text: not every template takes parts
            return self._rendered(messages, add_generation_prompt=False, continue_final_message=True, **extra)
        # A thought without its end: templates would put a closed one before it, and some begin one themselves
        head = self._rendered(messages[:-1], add_generation_prompt=True, **extra)
        return (head[: head.rindex(_THINK)] if begun and head.rstrip().endswith(_THINK) else head) + whole(begun)

    def begun(self, messages: Messages) -> str | None:
        """The text of a last message that is the assistant's: the answer with which the policy goes on; "" if it is
        blank. None without one, or with data.continue_final_message=False. ValueError for more than text."""
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
            fix = f"; {_CLOSE}" if "continue_final_message" in options else ""
            raise ValueError(f"the chat template refused the messages {str(messages)[:300]}: {error}{fix}") from error

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


def truncate(ids: list[int], limit: int, how: Truncation, place: str) -> list[int]:
    """At most `limit` tokens. left keeps the end, right the start, middle both ends; error raises ValueError."""
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
    chunks = [list(conversations[i : i + _CHUNK]) for i in range(0, len(conversations), _CHUNK)]
    num_workers = min(num_workers, len(chunks))
    if num_workers <= 1:
        return [ids for chunk in chunks for ids in encoder.encode(chunk)]
    context = multiprocessing.get_context("spawn")  # a fork would copy the locks of running threads
    with ProcessPoolExecutor(num_workers, context, initializer=_set_encoder, initargs=(encoder,)) as pool:
        return [ids for encoded in pool.map(_encode_chunk, chunks) for ids in encoded]


_encoder: PromptEncoder | None = None  # of a worker process


def _set_encoder(encoder: PromptEncoder) -> None:
    global _encoder
    _encoder = encoder


def _encode_chunk(chunk: list[Conversation]) -> list[list[int]]:
    assert _encoder is not None
    return _encoder.encode(chunk)
