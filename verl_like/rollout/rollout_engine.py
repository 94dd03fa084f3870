"""What every rollout engine offers: tokens in, tokens out, one future per request.

An engine starts `unloaded` (weight_version is None) and refuses to generate until `load_weights` succeeded. It is
owned by one worker process. Ranks of one tensor-parallel replica are given the same requests; the completions of the
replica's first rank count.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

FinishReason = Literal["stop", "length", "abort"]


class RolloutError(RuntimeError):
    """The engine cannot serve: it has no weights, is shut down, or its step loop died."""


class WeightLoadError(RuntimeError):
    """A weight stream did not arrive whole. The engine is unloaded until a full stream succeeds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are drawn. `do_sample` False or `temperature` 0 takes the most likely token.

    Logits are changed in this order: bad words and, before `min_tokens`, the tokens that stop are ruled out; penalties;
    temperature; min-p; top-k; top-p. Greedy choice is affected by the first two alone. Meanings are vLLM's.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1  # -1: off
    min_p: float = 0.0  # share of the most likely token's probability below which a token is dropped
    repetition_penalty: float = 1.0  # of tokens of prompt and response: divides positive logits, multiplies negative
    presence_penalty: float = 0.0  # taken off the logit of each token of the response
    frequency_penalty: float = 0.0  # the same, times its number of occurrences
    bad_words: tuple[tuple[int, ...], ...] = ()  # token sequences that are never completed
    max_tokens: int
    min_tokens: int = 0  # nothing but max_tokens ends a shorter response
    stop_token_ids: tuple[int, ...] = ()  # the one that stops is part of the response
    stop: tuple[str, ...] = ()  # texts that end a response; tokens are kept up to the one that completes it
    do_sample: bool = True

    @property
    def greedy(self) -> bool:
        return not self.do_sample or self.temperature == 0

    @property
    def shapes_logits(self) -> bool:
        """Whether logits are changed before the temperature."""
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        return bool(self.bad_words) or self.min_tokens > 0 or penalties != (1, 0, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One response to be sampled. With a seed the tokens do not depend on what else is in the batch."""

    request_id: str
    prompt_ids: list[int]
    sampling: SamplingParams
    seed: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What was sampled. `log_probs` (natural log) are those of the distribution that was sampled from."""

    request_id: str
    token_ids: list[int]
    log_probs: list[float]
    finish_reason: FinishReason
    weight_version: int


class RolloutEngine(Protocol):
    """Generates with the weights last loaded. Methods other than `submit` wait until they are done."""

    dtype: torch.dtype
    """Dtype of the weights: streams are cast to it."""
    tokenizer_size: int
    """Ids from here on have probability 0."""
    max_model_len: int
    """Most tokens of a prompt with its response."""
    keeps_adapters: bool
    """LoRA adapters come apart from the base weights (model.lora.merge=False)."""

    @property
    def weight_version(self) -> int | None:
        """Version given to the last successful `load_weights`; None: unloaded."""
        ...

    def submit(self, request: GenerationRequest) -> Future[Completion]:
        """Queue one request. Raises RolloutError when unloaded; later failures are set on the future."""
        ...

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """Completions in the order of the requests."""
        ...

    def stream(self, requests: Sequence[GenerationRequest]) -> Iterator[list[Completion]]:
        """Completions as they end, those that end close together in one list; read it to its end."""
        ...

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-prob of tokens 1.. given what is before them, temperature 1, over the tokenizer's ids alone."""
        ...

    @property
    def holds_weights(self) -> bool:
        """Whether the last whole `load_weights` is still there, so that a partial one can build on it."""
        ...

    def load_weights(self, stream: Iterable[tuple[str, Tensor]], version: int, *, partial: bool = False) -> None:
        """Replace all weights; collective over a tensor-parallel replica.

        An engine that keeps LoRA adapters gets them in the same stream. partial: the stream holds the adapters alone;
        the base weights stay. Raises RuntimeError when there are none.
        Any failure, of the stream included, leaves the engine unloaded. Raises WeightLoadError, or the stream's error.
        """
        ...

    def weight_checksums(self, shapes: Mapping[str, torch.Size]) -> list[tuple[str, int]]:
        """(Hugging Face name, checksum) of the tensors that `shapes` names, as the engine holds them: once for every
        place where one is held; collective over a tensor-parallel replica. What the engine cannot tell is left out."""
        ...

    def cached_tokens(self) -> int:
        """How many tokens of one long prompt, always the same, the engine took from its cache instead of computing
        them: 0 right after a load, or the cache was not emptied. Leaves the prompt in the cache."""
        ...

    def unload(self) -> None:
        """Refuse to generate until the next successful whole `load_weights`."""
        ...

    def sleep(self) -> None:
        """Give cache memory (and weights, where they are refilled anyway) back to the trainer."""
        ...

    def wake(self) -> None:
        """Undo `sleep`."""
        ...

    def abort_all(self) -> None:
        """Finish all pending requests now, with reason "abort" and the tokens sampled so far (vllm: with none)."""
        ...

    def shutdown(self) -> None:
        """Stop threads, free memory and shared memory names; call before the process group is destroyed."""
        ...
