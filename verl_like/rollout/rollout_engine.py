"""Requests, completions and errors of a rollout engine (the engine: base.py)."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from verl_like.batch import MediaHandle
from verl_like.models.routes import continued

FinishReason = Literal["stop", "length", "abort"]
FIRST_TOP_K = 16  # of a hot first token, where the others have no top_k: without one it would be any token at all


class RolloutError(RuntimeError):
    """Error of an engine that cannot serve: it has no weights, is shut down, or its step loop died."""


class UnloadedError(RolloutError):
    """Error of an engine that holds no weights: it serves again after the next weight sync."""


class EngineLostError(RolloutError):
    """Error of an engine whose own process died, hangs or cannot go on: the next whole weight sync starts another."""


class ResumeError(ValueError):
    """Error of an engine that cannot go on with this response: it must be sampled anew, without `resume`."""


class WeightLoadError(RuntimeError):
    """Error of a weight stream that did not arrive whole. The engine is unloaded until a full stream succeeds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Parameters that draw the tokens of one request. `do_sample` False or `temperature` 0 takes the most likely token.

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
        """True where logits are changed before the temperature."""
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        return bool(self.bad_words) or self.min_tokens > 0 or penalties != (1, 0, 0)

    @property
    def of_hot_token(self) -> SamplingParams | None:
        """Parameters of the first token, where `first_temperature` draws it in another way (FIRE); None elsewhere."""
        if self.first_temperature is None or self.greedy:
            return None
        top_k = self.top_k if self.top_k > 0 else FIRST_TOP_K
        return dataclasses.replace(self, temperature=self.first_temperature, top_k=top_k, first_temperature=None)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sampled:
    """Tokens of one response, with log-probs and weight versions: three arrays [T], int32, float32, int32.

    A log-prob (natural log) is that of the distribution the token was drawn from, a version that of the weights that
    drew it. routes: the experts of the tokens of prompt and response, from the first on and as far as they are known
    (never of the last one, from which nothing was drawn), [tokens, layers, k]; None where the engine records none.
    """

    token_ids: NDArray[np.int32]
    log_probs: NDArray[np.float32]
    weight_versions: NDArray[np.int32]
    routes: NDArray[Any] | None = None

    def __post_init__(self) -> None:
        lengths = {len(self.token_ids), len(self.log_probs), len(self.weight_versions)}
        if len(lengths) > 1:
            raise ValueError(f"tokens, log-probs and versions of a response differ in number: {sorted(lengths)}")

    @classmethod
    def of(cls, token_ids: Sequence[int], log_probs: Sequence[float], weight_versions: Sequence[int] | int) -> Sampled:
        """Convert Python's numbers; one version may stand for all tokens."""
        versions = [weight_versions] * len(token_ids) if isinstance(weight_versions, int) else weight_versions
        return cls(
            token_ids=np.asarray(token_ids, dtype=np.int32),
            log_probs=np.asarray(log_probs, dtype=np.float32),
            weight_versions=np.asarray(versions, dtype=np.int32),
        )

    def __len__(self) -> int:
        return len(self.token_ids)

    def __add__(self, other: Sampled) -> Sampled:
        """Concatenate these tokens and the others."""
        return Sampled(
            token_ids=np.concatenate([self.token_ids, other.token_ids]),
            log_probs=np.concatenate([self.log_probs, other.log_probs]),
            weight_versions=np.concatenate([self.weight_versions, other.weight_versions]),
            routes=continued(self.routes, other.routes),
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Partial(Sampled):
    """The tokens of one response so far. finish: why it has ended; None while it goes on."""

    finish: FinishReason | None = None

    @classmethod
    def from_sampled(cls, sampled: Sampled, finish: FinishReason | None = None) -> Partial:
        """These tokens, without a copy."""
        arrays = {name: getattr(sampled, name) for name in ("token_ids", "log_probs", "weight_versions", "routes")}
        return cls(**arrays, finish=finish)


NOTHING = Sampled.of([], [], [])


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """Request for one response. With a seed its tokens do not depend on the other requests of the batch.

    resume: tokens sampled of this response before (it was aborted, or its engine lost). The completion begins with
    them, and the limits of `sampling` count them.
    drafts: earlier responses to the same prompt, which this one may repeat in parts (rollout.speculative); they change
    how soon tokens are known, never which they are.
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
    drafts: Sequence[NDArray[np.int32]] = ()

    @property
    def hot_start(self) -> SamplingParams | None:
        """Parameters of the next token if it is a hot first one: of the episode's first turn, not of a later one."""
        return None if self.turn or len(self.resume) else self.sampling.of_hot_token

    @property
    def num_left(self) -> int:
        """Tokens that may still be sampled."""
        return self.sampling.max_tokens - len(self.resume)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Completion:
    """Tokens sampled for one request: all of them, or, with the reason "abort", those until then.

    cached_tokens: tokens of prompt and `resume` that the engine took from its cache.
    drafted, kept: tokens that were guessed ahead, and those of them that were drawn.
    """

    request_id: str
    sampled: Sampled
    finish_reason: FinishReason
    cached_tokens: int = 0
    drafted: int = 0
    kept: int = 0

    @property
    def token_ids(self) -> list[int]:
        """Tokens as Python's numbers."""
        return self.sampled.token_ids.tolist()

    @property
    def log_probs(self) -> list[float]:
        """Log-probs as Python's numbers."""
        return self.sampled.log_probs.tolist()


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldWeights:
    """Record of the weights that an engine has in memory: everything said about them elsewhere follows from it.

    version: the trainer's, as it came with them.
    mark: name that their sender gave them (weight_sync/header.py): engines with the same mark hold the same weights.
    "":
        the sender gave none.
    """

    version: int
    mark: str = ""


def request_seed(seed: int, *draw: int | str) -> int:
    """Seed of one response, 0 <= seed < 2**62: the same in every process, after a resume and in every batch.

    draw: names the response, for instance ("train", number of the prompt's draw, sample, turn).
    """
    digest = hashlib.blake2b("/".join(map(str, (seed, *draw))).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 2
