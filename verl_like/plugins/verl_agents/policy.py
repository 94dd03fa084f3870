"""The policy as an agent loop sees it: verl's server_manager. What it is asked waits here until the trainer answers."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from verl_like.plugins.verl_agents.messages import Answered, Asked

_NUMBERS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
_COUNTS = ("max_tokens", "min_tokens")
_OTHER_NAMES = {"max_new_tokens": "max_tokens"}
# Values that ask for what is done anyway
_HARMLESS = {"n": (1,), "logprobs": (True, False, 0, 1), "ignore_eos": (False,), "detokenize": (True, False)}


class TokenOutput(list[int]):
    """Result of `generate`: verl 0.5's list of ids, and later versions' object with `token_ids`, in one."""

    def __init__(
        self,
        token_ids: Sequence[int] = (),
        log_probs: Sequence[float] | None = None,
        routed_experts: Any = None,
        stop_reason: str | None = None,
        num_preempted: int | None = None,
        extra_fields: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(token_ids)
        self.token_ids = list(token_ids)
        self.log_probs = None if log_probs is None else list(log_probs)
        self.routed_experts, self.stop_reason, self.num_preempted = routed_experts, stop_reason, num_preempted
        self.extra_fields = dict(extra_fields or {})


class Policy:
    """Policy of one episode, as verl's server_manager.

    asked: requests that the trainer has not been told yet.
    news: set with each request.
    """

    def __init__(self) -> None:
        self.asked: list[Asked] = []
        self.news = asyncio.Event()
        self._waiting: dict[int, asyncio.Future[TokenOutput]] = {}
        self._number = 0

    @property
    def is_busy(self) -> bool:
        """True while a request has no answer yet."""
        return bool(self._waiting)

    async def generate(
        self, request_id: Any = None, *, prompt_ids: Sequence[int], sampling_params: Mapping[str, Any], **others: Any
    ) -> TokenOutput:
        """The policy's continuation.

        Raises ValueError for what cannot be asked: images, unknown sampling parameters.
        """
        for name in ("image_data", "video_data", "audio_data"):
            if others.get(name):
                raise ValueError(f"generate({name}=...): agent loops are text only here")
        context_ids = np.asarray(prompt_ids, dtype=np.int32)
        if context_ids.ndim != 1 or not len(context_ids):
            raise ValueError(
                f"generate(prompt_ids=...) needs a list of token ids with at least one, not {prompt_ids!r:.80}"
            )
        asked = Asked(number=self._number, context_ids=context_ids, sampling=sampling_of(sampling_params))
        self._number += 1
        self._waiting[asked.number] = asyncio.get_running_loop().create_future()
        self.asked.append(asked)
        self.news.set()
        try:
            return await self._waiting[asked.number]
        finally:
            self._waiting.pop(asked.number, None)

    def answer(self, answer: Answered) -> None:
        """Wake up whoever asked, if it still waits."""
        future = self._waiting.pop(answer.number, None)
        if future is not None and not future.done():
            ids, log_probs = answer.token_ids.tolist(), answer.log_probs.tolist()
            reason = "completed" if answer.finish_reason == "stop" else answer.finish_reason
            future.set_result(TokenOutput(ids, log_probs, stop_reason=reason))


def sampling_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """Sampling parameters of a loop by the names of SamplingParams.

    Raises ValueError, which names what there is none for.
    """
    fields: dict[str, Any] = {}
    for name, value in given.items():
        name = _OTHER_NAMES.get(name, name)
        if value is None or value in _HARMLESS.get(name, ()):
            continue
        if name in _NUMBERS or name in _COUNTS:
            if isinstance(value, bool) or not isinstance(value, int | float | np.number):
                raise ValueError(f"sampling_params[{name!r}]={value!r:.80} must be a number")
            fields[name] = int(value) if name in (*_COUNTS, "top_k") else float(value)
        elif name == "stop":
            fields[name] = (value,) if isinstance(value, str) else tuple(map(str, value))
        elif name == "stop_token_ids":
            fields[name] = tuple(map(int, value))
        else:
            known = ", ".join([*_NUMBERS, *_COUNTS, "stop", "stop_token_ids"])
            raise ValueError(f"sampling_params[{name!r}]={value!r:.80} is not supported here; there are: {known}")
    if fields.get("max_tokens", 1) < 1:
        raise ValueError(f"sampling_params['max_tokens']={fields['max_tokens']} must be at least 1")
    return fields
