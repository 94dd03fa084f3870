"""verl 0.9's "continuous token" helpers of AgentLoopBase: prompts, and what stands between two answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from verl_like.config import SpelledTokens
from verl_like.data.chat import PromptEncoder
from verl_like.episodes.transcript import Transcript


@dataclass(frozen=True)
class Merged:
    """The tokens so far."""

    token_ids: list[int]


class ContinuousTokens:
    """The chat template's tokens for messages, without tokenising again what the model wrote."""

    def __init__(self, tokenizer: Any, data: Any) -> None:
        """Take the tokenizer and `data.*` of the run."""
        kwargs = dict(data.get("apply_chat_template_kwargs") or {})
        spelled = SpelledTokens(data.get("special_tokens_in_text", "text"))
        self._encoder = PromptEncoder(
            tokenizer, kwargs, spelled=spelled, continues=data.get("continue_final_message", True)
        )

    def initial(self, messages: Sequence[dict[str, Any]], tools: list[dict[str, Any]] | None) -> list[int]:
        """A conversation that the model is to answer."""
        (ids,) = self._encoder.encode([(list(messages), tools or None)])
        return list(ids)

    def after_answer(
        self,
        before: Sequence[dict[str, Any]],
        after: Sequence[dict[str, Any]],
        token_ids: Sequence[int],
        mask: Sequence[int],
        tools: list[dict[str, Any]] | None,
    ) -> list[int]:
        """The tokens of the messages that `after` has beyond `before`, which ends with the assistant's answer: the last
        of `token_ids`, where the mask is 1.

        Raises ValueError where the chat template has no place for them.
        """
        split = max((place + 1 for place, bit in enumerate(mask) if not bit), default=0) + len(token_ids) - len(mask)
        *history, answer = before
        transcript = Transcript(self._encoder, token_ids[:split], history, tools or None, follow_template=False)
        transcript.wrote(list(token_ids[split:]), answer)
        return transcript.observe(list(after[len(before) :])).ids
