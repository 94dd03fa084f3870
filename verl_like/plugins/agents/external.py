"""Answers of a model behind an OpenAI-compatible endpoint, to be graded: texts, whose tokens nobody here knows."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from transformers import PreTrainedTokenizerBase

from verl_like.batch import Prompt
from verl_like.config.endpoint import EndpointConfig
from verl_like.episodes.episode import Ask, Episode, EpisodeFailure, Turn
from verl_like.plugins.http_json import ServiceError, answer_of, chat_service
from verl_like.rollout.client import Occupancy
from verl_like.rollout.rollout_engine import GenerationRequest, RolloutError, Sampled, SamplingParams, request_seed
from verl_like.text import whole

logger = logging.getLogger(__name__)

_NO_USE_AGAIN = (401, 403, 404)  # a wrong key, model or address: so it will be for every prompt


class ExternalChat:
    """Sends a row's messages; the endpoint has its own chat template. Answers are tokenised here so that lengths can be
    counted: graders read them back.

    seed: each request has its own, of (seed, prompt, sample); None: none is sent.
    """

    def __init__(self, endpoint: EndpointConfig, tokenizer: PreTrainedTokenizerBase, seed: int | None) -> None:
        """Read the API key. Raises ValueError if its environment variable is named but not set."""
        self._model, self._tokenizer, self._seed = endpoint.model, tokenizer, seed
        self._service = chat_service(endpoint, "actor_rollout_ref.rollout.openai")
        self._threads = ThreadPoolExecutor(endpoint.max_concurrent, thread_name_prefix="endpoint")
        self._told = False

    async def run(self, prompt: Prompt, sample: int, ask: Ask) -> Episode:
        """Answer the prompt with one request to the endpoint.

        Raises ServiceError where further prompts would fail too (a wrong key, an unknown model); any other failure
        loses this episode alone.
        """
        if prompt.row.media:
            raise ServiceError("rollout.name=openai sends text alone, but rows have images")
        body = {"model": self._model, "messages": prompt.row.messages, **_fields(ask.sampling)}
        if prompt.row.begun:  # names of vLLM and SGLang; an endpoint that cannot go on with an answer refuses them
            body |= {"continue_final_message": True, "add_generation_prompt": False}
        if self._seed is not None:
            body["seed"] = request_seed(self._seed, "openai", prompt.group, sample) % 2**31
        try:
            posted = self._threads.submit(self._service.post, body, answer_of)
            text, reason, _ = await asyncio.wrap_future(posted)
        except ServiceError as error:
            if error.status in _NO_USE_AGAIN:
                raise
            return Episode.lost(prompt, EpisodeFailure(kind="endpoint", message=str(error)))
        token_ids = self._tokenizer.encode(whole(text), add_special_tokens=False)
        if not self._told and self._tokenizer.decode(token_ids, skip_special_tokens=True) != text:
            self._told = True
            logger.warning("the tokenizer here cannot write an answer exactly: graders read %r", text[:200])
        sampled = Sampled.of(token_ids, [0.0] * len(token_ids), 0)
        ended = "length" if reason == "length" else "stop"
        return Episode(turns=(Turn(observation_ids=prompt.ids, sampled=sampled, finish_reason=ended),))

    def close(self) -> None:
        """Drop what has not been sent."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def _fields(sampling: SamplingParams) -> dict[str, Any]:
    """Convert sampling parameters to OpenAI's names.

    Those that are off are not sent, since top_k, min_p, repetition_penalty and min_tokens are vLLM's and SGLang's
    alone.
    """
    plain = SamplingParams(max_tokens=1)
    names = ["presence_penalty", "frequency_penalty", "repetition_penalty", "min_tokens"]
    names += [] if sampling.greedy else ["top_p", "top_k", "min_p"]
    fields: dict[str, Any] = {n: getattr(sampling, n) for n in names if getattr(sampling, n) != getattr(plain, n)}
    fields |= {"stop": list(sampling.stop)} if sampling.stop else {}
    return {"max_tokens": sampling.max_tokens, "temperature": 0 if sampling.greedy else sampling.temperature, **fields}


class NoEngine:
    """The client of episodes that need none: a clock."""

    def submit(self, request: GenerationRequest) -> Any:
        """Raise RolloutError: no engine of this run samples tokens."""
        raise RolloutError(f"request {request.request_id}: rollout.name=openai samples no tokens")

    def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """Do nothing: no request is ever in flight."""

    def snapshot(self) -> dict[str, Sampled]:
        """Return no partial responses: none is in flight."""
        return {}

    def serving_s(self) -> float:
        """Return the monotonic clock, as an engine that never pauses would."""
        return time.monotonic()

    def occupancy(self) -> Occupancy:
        """Report no replicas and no requests."""
        return Occupancy(replicas=0, held=0, idle=0, pending=0)

    def close(self) -> None:
        """Do nothing: there is no engine to shut down."""
