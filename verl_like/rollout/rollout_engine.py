"""What every rollout engine offers: tokens in, tokens out, one future per request.

An engine starts `unloaded` (weight_version is None) and refuses to generate until `load_weights` succeeded. It is
owned by one worker process. It starts paused, and samples while it is open: between `open` and `pause` requests come,
end and are aborted at any time, and a pause leaves those that run where they are. Of a tensor-parallel replica the
first rank alone is given requests; `open`, `pause` and all that needs a paused engine are called on all of its ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from verl_like.batch import MediaHandle

FinishReason = Literal["stop", "length", "abort"]
FIRST_TOP_K = 16  # of a hot first token, where the others have no top_k: without one it would be any token at all


class RolloutError(RuntimeError):
    """The engine cannot serve: it has no weights, is shut down, or its step loop died."""


class UnloadedError(RolloutError):
    """The engine holds no weights: it serves again after the next weight sync."""


class EngineLostError(RolloutError):
    """The engine's own process has died, hangs or cannot go on: the next whole weight sync starts another."""


class ResumeError(ValueError):
    """The engine cannot go on with this response: it must be sampled anew, without `resume`."""


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
    first_temperature: float | None = (
        None  # of the first token alone, which is then one of the top_k (else 16) likeliest
    )

    @property
    def greedy(self) -> bool:
        return not self.do_sample or self.temperature == 0

    @property
    def shapes_logits(self) -> bool:
        """Whether logits are changed before the temperature."""
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        return bool(self.bad_words) or self.min_tokens > 0 or penalties != (1, 0, 0)

    @property
    def of_hot_token(self) -> SamplingParams | None:
        """How the first token of a response is drawn, where `first_temperature` makes it another way (FIRE)."""
        if self.first_temperature is None or self.greedy:
            return None
        top_k = self.top_k if self.top_k > 0 else FIRST_TOP_K
        return dataclasses.replace(self, temperature=self.first_temperature, top_k=top_k, first_temperature=None)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sampled:
    """Tokens of one response, each with the log-prob (natural log) of the distribution it was drawn from and the
    version of the weights that drew it: three arrays [T], int32, float32, int32."""

    token_ids: NDArray[np.int32]
    log_probs: NDArray[np.float32]
    weight_versions: NDArray[np.int32]

    def __post_init__(self) -> None:
        lengths = {len(self.token_ids), len(self.log_probs), len(self.weight_versions)}
        if len(lengths) > 1:
            raise ValueError(f"tokens, log-probs and versions of a response differ in number: {sorted(lengths)}")

    @classmethod
    def of(cls, token_ids: Sequence[int], log_probs: Sequence[float], weight_versions: Sequence[int] | int) -> Sampled:
        """From Python's numbers; one version may stand for all tokens."""
        versions = [weight_versions] * len(token_ids) if isinstance(weight_versions, int) else weight_versions
        return cls(
            token_ids=np.asarray(token_ids, dtype=np.int32),
            log_probs=np.asarray(log_probs, dtype=np.float32),
            weight_versions=np.asarray(versions, dtype=np.int32),
        )

    def __len__(self) -> int:
        return len(self.token_ids)

    def __add__(self, other: Sampled) -> Sampled:
        """These tokens, then the others."""
        return Sampled(
            token_ids=np.concatenate([self.token_ids, other.token_ids]),
            log_probs=np.concatenate([self.log_probs, other.log_probs]),
            weight_versions=np.concatenate([self.weight_versions, other.weight_versions]),
        )


NOTHING = Sampled.of([], [], [])


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One response to be sampled. With a seed the tokens do not depend on what else is in the batch.

    resume: what was sampled of this response before (it was aborted, or its engine lost). The completion begins with
    it, and `sampling`'s limits count it.
    """

    request_id: str
    prompt_ids: list[int]
    sampling: SamplingParams
    seed: int | None = None
    session: str | None = None  # requests of one session share their beginnings: the same engine should serve them
    turn: int = 0  # of the session
    priority: int = 0  # what has less is taken up earlier; of equals, what came earlier
    media: Sequence[MediaHandle] = ()  # images of the prompt, placed in it
    resume: Sampled = NOTHING

    @property
    def hot_start(self) -> SamplingParams | None:
        """How the next token is drawn if it is a hot first one: of the episode's first turn, not of a later one."""
        return None if self.turn or len(self.resume) else self.sampling.of_hot_token

    @property
    def num_left(self) -> int:
        """Tokens that may still be sampled."""
        return self.sampling.max_tokens - len(self.resume)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Completion:
    """What was sampled of one request: all of it, or, with the reason "abort", what there was until then.

    cached_tokens: of prompt and `resume`, how many the engine took from its cache.
    """

    request_id: str
    sampled: Sampled
    finish_reason: FinishReason
    cached_tokens: int = 0

    @property
    def token_ids(self) -> list[int]:
        """The tokens as Python's numbers."""
        return self.sampled.token_ids.tolist()

    @property
    def log_probs(self) -> list[float]:
        """The log-probs as Python's numbers."""
        return self.sampled.log_probs.tolist()


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldWeights:
    """Which weights an engine has in memory: whatever else is said about them follows from this record.

    version: the trainer's, as it came with them. mark: what their sender calls them (weight_sync/header.py): engines
    with the same mark hold the same weights. "": whoever loaded them gave none.
    """

    version: int
    mark: str = ""


class RolloutEngine(Protocol):
    """Generates with the weights last loaded. `submit` and `abort` return at once, the others when they are done."""

    dtype: torch.dtype
    """Dtype of the weights: streams are cast to it."""
    tokenizer_size: int
    """Ids from here on have probability 0."""
    max_model_len: int
    """Most tokens of a prompt with its response."""
    keeps_adapters: bool
    """LoRA adapters come apart from the base weights (model.lora.merge=False)."""
    sees: bool
    """Requests may bring images and videos."""
    num_rescues: int
    """How often memory ran out while it sampled, and fewer sequences at once went on."""

    @property
    def held(self) -> HeldWeights | None:
        """The weights of the last successful `load_weights`; None: unloaded."""
        ...

    @property
    def weight_version(self) -> int | None:
        """The version of `held`."""
        ...

    def submit(self, request: GenerationRequest) -> Future[Completion]:
        """Queue one request, on a replica's first rank; it is sampled while the engine is open.

        Raises RolloutError when unloaded, ValueError for a request that does not fit; later failures are set on the
        future (ResumeError: it would be taken without `resume`).
        """
        ...

    def submit_all(self, requests: Sequence[GenerationRequest]) -> list[Future[Completion]]:
        """Queue many at once: an engine in this process takes all of them up with the same step, so that what runs
        together does not depend on time. What `submit` would raise is set on the request's future."""
        ...

    def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """End these requests (None: all) before the next step: their futures get what was sampled, with reason "abort".
        Those that ended already are left alone; of a paused engine, those that run end as it opens or pauses again."""
        ...

    def snapshot(self) -> dict[str, Sampled]:
        """What is sampled so far of every pending request, by id; on a replica's first rank."""
        ...

    def open(self) -> None:
        """Sample from now on; collective over a tensor-parallel replica. Raises RolloutError when unloaded."""
        ...

    def pause(self) -> None:
        """Return when no step runs or begins, on all ranks of the replica between the same two; collective. Requests
        stay as they are, and those submitted meanwhile wait."""
        ...

    def opened(self) -> AbstractContextManager[None]:
        """Open inside, and paused again at the end if it was paused; requests without a seed draw from the engine's own
        random numbers, not from the caller's. Collective, as `open` and `pause` are."""
        ...

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """Completions in the order of the requests. Opens a paused engine meanwhile; collective, see `stream`."""
        ...

    def stream(self, requests: Sequence[GenerationRequest]) -> Iterator[list[Completion]]:
        """Completions as they end, those that end close together in one list; read it to its end.

        Opens a paused engine meanwhile; collective over a replica, whose other ranks give no requests, and get nothing.
        """
        ...

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-prob of tokens 1.. given what is before them, temperature 1, over the tokenizer's ids alone."""
        ...

    def load_weights(
        self, stream: Iterable[tuple[str, Tensor]], version: int, *, partial: bool = False, mark: str = ""
    ) -> None:
        """Replace all weights; collective over a tensor-parallel replica. Needs a paused engine, or one without
        requests: those that run keep their tokens, and what was computed for them with old weights is computed again.

        An engine that keeps LoRA adapters gets them in the same stream. partial: the stream holds the adapters alone;
        the base weights stay. Raises RuntimeError when there are none. version and mark: see HeldWeights.
        Any failure, of the stream included, leaves the engine unloaded. Raises WeightLoadError, or the stream's error.
        """
        ...

    def weight_checksums(self, shapes: Mapping[str, torch.Size]) -> list[tuple[str, int]]:
        """(Hugging Face name, checksum) of the tensors that `shapes` names, as the engine holds them: once for every
        place where one is held; collective over a tensor-parallel replica. What the engine cannot tell is left out."""
        ...

    def weight_sketches(self, shapes: Mapping[str, torch.Size]) -> list[tuple[str, Tensor]]:
        """(Hugging Face name, sketch [rows, K] of the whole matrix) of what the engine has quantised, as it computes
        with it (parallel/sketch.py); collective over a tensor-parallel replica. None where it quantises nothing."""
        ...

    def cached_tokens(self) -> int:
        """How many tokens of one long prompt, always the same, the engine took from its cache instead of computing
        them: 0 right after a load, or the cache was not emptied. Leaves the prompt in the cache. Always 0 of an engine
        that keeps nothing between requests."""
        ...

    def unload(self) -> None:
        """Refuse to generate until the next successful whole `load_weights`."""
        ...

    def sleep(self, discard: bool = False) -> None:
        """Give the memory of cache and weights back to the trainer. discard: weights are not kept elsewhere either, so
        that the engine is unloaded; requests may be submitted all the same, and wait until it has weights and is open.
        """
        ...

    def wake(self) -> None:
        """Undo `sleep`."""
        ...

    def shutdown(self) -> None:
        """Stop threads, free memory and shared memory names; call before the process group is destroyed."""
        ...
