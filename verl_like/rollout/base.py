"""Base of every rollout engine: tokens in, tokens out, one future per request.

An engine starts `unloaded` (weight_version is None) and refuses to generate until `load_weights` succeeded. It is
owned by one worker process. It starts paused, and samples while it is open: between `open` and `pause` requests come,
end and are aborted at any time, and a pause leaves those that run where they are. Of a tensor-parallel replica the
first rank alone is given requests; `open`, `pause` and all that needs a paused engine are called on all of its ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from queue import SimpleQueue
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from verl_like.config.rollout import reads_text
from verl_like.models.vision import VisionProcessor, processor_of
from verl_like.rollout.rollout_engine import (
    Completion,
    GenerationRequest,
    HeldWeights,
    Sampled,
    UnloadedError,
    request_seed,
)
from verl_like.rollout.sampling import require_tokens_left
from verl_like.rollout.step_loop import Phase, StepLoop, submit_each

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from verl_like.config import ModelConfig, RolloutConfig
    from verl_like.parallel.dist import ProcessInfo


import random

import numpy as np


@contextmanager
def preserve_rng() -> Iterator[None]:
    """Save the states of all global generators (Python's, numpy's, torch's on every device) and put them back."""
    python, arrays, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(arrays)
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state_all(cuda)


SLEEPERS = ("weights", "kv_cache")  # what an engine can put to sleep, in the order it must come back for a weight load
STREAM_INTERVAL_S = 0.02  # responses that end this close together leave in one message: at most 50 messages a second


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """Arguments from which build.build_rollout_engine builds an engine.

    process: of the trainer's rank that the engine belongs to.
    tokenizer: folder or name of a tokenizer, for rollout.stop.
    run_id: names shared memory.
    address: host and port where the ranks of a replica in processes of its own meet.
    exact: its sums have the trainer's order (trainer.parity).
    """

    rollout: RolloutConfig
    model: ModelConfig
    process: ProcessInfo
    hf_config: PretrainedConfig
    dtype: torch.dtype
    tokenizer_size: int
    max_model_len: int
    seed: int
    tokenizer: str
    run_id: str
    address: tuple[str, int] | None = None
    exact: bool = False

    def facts(self) -> dict[str, Any]:
        """Arguments of RolloutEngine's constructor."""
        return {
            "dtype": self.dtype,
            "tokenizer_size": self.tokenizer_size,
            "vocab_size": self.hf_config.get_text_config().vocab_size,
            "max_model_len": self.max_model_len,
            "reads_text": reads_text(self.rollout),
            "vision": processor_of(self.model, self.hf_config),
        }


class RolloutEngine:
    """Engine that generates with the weights last loaded. `submit` and `abort` return at once, the others when done.

    A backend adds `_load`, `_score` and how requests reach it: `_queue`, `_exclusive`, `open`, `pause`, `abort`,
    `snapshot`, `paused` (SteppedRolloutEngine has them for engines that are stepped).

    dtype: precision of the weights; streams are cast to it.
    tokenizer_size: ids from here on have probability 0.
    max_model_len: most tokens of a prompt with its response.
    keeps_adapters: LoRA adapters come apart from the base weights (model.lora.merge=False).
    sees: requests may bring images and videos.
    """

    num_rescues = 0
    """Number of times that memory ran out while sampling, and fewer sequences at once went on."""

    def __init__(
        self,
        *,
        dtype: torch.dtype,
        tokenizer_size: int,
        vocab_size: int,
        max_model_len: int,
        seed: int,
        keeps_adapters: bool = False,
        reads_text: bool = False,
        vision: VisionProcessor | None = None,
        sees: bool = False,
    ) -> None:
        self.dtype = dtype
        self.tokenizer_size = tokenizer_size
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.keeps_adapters = keeps_adapters
        self._reads_text = reads_text  # it has a tokenizer
        self._vision, self.sees = vision, sees or vision is not None
        self._seed, self._unseeded = seed, itertools.count()
        self._in_memory: HeldWeights | None = None  # stays when they are unloaded: what runs ends with them
        self._unloaded, self._away = True, False  # away: thrown away by `sleep`, and to come again
        self._asleep: set[str] = set()  # of SLEEPERS

    @property
    def held(self) -> HeldWeights | None:
        """Weights of the last successful `load_weights`; None: unloaded."""
        return None if self._unloaded else self._in_memory

    @property
    def weight_version(self) -> int | None:
        """Version of the `held` weights; None: unloaded."""
        return None if self.held is None else self.held.version

    @property
    def _sampling_version(self) -> int:
        """Version of the weights for tokens that are sampled now."""
        assert self._in_memory is not None, "sampling without weights"
        return self._in_memory.version

    def effective(self) -> Mapping[str, object]:
        """Values of rollout.* that the built engine has, by name, as far as it tells them."""
        return {}

    def submit(self, request: GenerationRequest) -> Future[Completion]:
        """Queue one request, on a replica's first rank; it is sampled while the engine is open.

        Raises RolloutError when unloaded, ValueError for a request that does not fit; later failures are set on the
        future (ResumeError: it would be taken without `resume`).
        """
        self._require_weights(or_away=True)
        self._check(request)
        return self._queue(request)

    def submit_all(self, requests: Sequence[GenerationRequest]) -> list[Future[Completion]]:
        """Queue many requests at once. An error that `submit` would raise is set on the request's future.

        An engine in this process takes all of them up with the same step, so that the batch does not depend on time.
        """
        return submit_each(self.submit, requests)

    def _check(self, request: GenerationRequest) -> None:
        what, sampling = f"request {request.request_id}", request.sampling
        room = self.max_model_len - len(request.prompt_ids)
        if not request.prompt_ids:
            raise ValueError(f"{what} has no prompt: at least one token is needed to sample from")
        if sampling.max_tokens > room:
            raise ValueError(
                f"{what}: prompt of {len(request.prompt_ids)} tokens + max_tokens={sampling.max_tokens} does not fit "
                f"rollout.max_model_len={self.max_model_len}"
            )
        if request.num_left < 1:
            raise ValueError(
                f"{what}: {len(request.resume)} tokens to resume from leave nothing to sample of max_tokens="
                f"{sampling.max_tokens}"
            )
        if sampling.min_tokens > sampling.max_tokens:
            raise ValueError(f"{what}: min_tokens={sampling.min_tokens} is more than max_tokens={sampling.max_tokens}")
        self._check_ids(what, request.prompt_ids)
        self._check_ids(f"{what}, resume", request.resume.token_ids.tolist())
        for word in sampling.bad_words:
            self._check_ids(f"{what}, bad_words", word)
        require_tokens_left(sampling, self.tokenizer_size, f"{what}: ")
        if not all(sampling.bad_words) or not all(sampling.stop) or min(sampling.stop_token_ids, default=0) < 0:
            raise ValueError(
                f"{what}: bad_words={list(sampling.bad_words)}, stop={list(sampling.stop)} and stop_token_ids="
                f"{list(sampling.stop_token_ids)} must not be empty texts or negative ids"
            )
        if request.media and not self.sees:
            raise ValueError(f"{what} has images, but the model of this engine reads text only")
        if self._vision is not None:
            self._vision.check_places(what, request.prompt_ids, request.media)
        if sampling.stop and not self._reads_text:
            raise ValueError(
                f"{what}: stop={list(sampling.stop)} needs the tokenizer, which the engine loads when rollout.stop is "
                "set"
            )

    def _check_ids(self, what: str, token_ids: Sequence[int]) -> None:
        """Check that the model knows every id: one that it lacks would end the step, and with it the engine."""
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < self.vocab_size:
            raise ValueError(
                f"{what}: token ids from {min(token_ids)} to {max(token_ids)}, where the model has 0 to "
                f"{self.vocab_size - 1}"
            )

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """Sample completions, in the order of the requests.

        Opens a paused engine meanwhile; collective, see `stream`.
        """
        done = {c.request_id: c for completions in self.stream(requests) for c in completions}
        return [done[request.request_id] for request in requests]

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Open the engine inside, and pause it again at the end if it was paused.

        Collective, as `open` and `pause` are.

        Requests without a seed draw from the engine's own random numbers, not from the caller's.
        """
        was_paused = self.paused
        self.open()
        try:
            yield
        finally:
            if was_paused:
                self.pause()

    def stream(self, requests: Sequence[GenerationRequest]) -> Iterator[list[Completion]]:
        """Yield completions as they end, those that end close together in one list; read it to its end.

        Opens a paused engine meanwhile; collective over a replica, whose other ranks give no requests, and get nothing.
        """
        self._require_weights()
        ended: SimpleQueue[Future[Completion]] = SimpleQueue()
        missing = len(requests)
        for future in self.submit_all(requests):  # before it opens: the first step then has all of them
            future.add_done_callback(ended.put)
        with self.opened():
            try:
                while missing:
                    futures = _gather(ended, missing)
                    missing -= len(futures)
                    yield [future.result() for future in futures]
            finally:
                if missing:  # one failed, or the caller has left: nobody would read the others
                    self.abort([request.request_id for request in requests])

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Compute the log-prob of tokens 1.. given those before them, temperature 1, over the tokenizer's ids alone."""
        self._require_weights()
        too_long = [len(s) for s in sequences if not 2 <= len(s) < self.max_model_len]
        if too_long:
            raise ValueError(f"sequences to score need 2 to {self.max_model_len - 1} tokens, but have {too_long}")
        for sequence in sequences:
            self._check_ids("a sequence to score", sequence)
        with preserve_rng(), self._exclusive():
            return self._score(sequences)

    def load_weights(
        self, stream: Iterable[tuple[str, Tensor]], version: int, *, partial: bool = False, mark: str = ""
    ) -> None:
        """Replace all weights; collective over a tensor-parallel replica.

        Needs a paused engine, or one without requests.

        Requests under way keep their tokens, and what was computed for them with old weights is computed again. Any
        failure, of the stream included, leaves the engine unloaded.

        Args:
            stream: (Hugging Face name, tensor); for an engine that keeps LoRA adapters, these too.
            version: version of the weights, see HeldWeights.
            partial: the stream holds the adapters alone; the base weights stay.
            mark: mark of the weights, see HeldWeights.

        Raises RuntimeError for a partial stream without base weights, WeightLoadError, or the stream's error.
        """
        self._require_base(partial)
        with preserve_rng(), self._exclusive():
            self.unload()
            self._in_memory = None
            self._load(_no_grad(stream), partial=partial)
            self._in_memory = HeldWeights(version=version, mark=mark)
            self._weights_changed()
            self._unloaded = False

    def weight_checksums(self, shapes: Mapping[str, torch.Size]) -> list[tuple[str, int]]:
        """Compute (Hugging Face name, checksum) of the tensors that `shapes` names, as the engine holds them.

        A tensor comes once for every place where it is held; those that the engine cannot tell are left out. Collective
        over a tensor-parallel replica.
        """
        raise NotImplementedError

    def weight_sketches(self, shapes: Mapping[str, torch.Size]) -> list[tuple[str, Tensor]]:
        """Compute (Hugging Face name, sketch [rows, K] of the matrix) of quantised weights (parallel/checksum.py).

        The weights are taken as the engine computes with them; the list is empty where it quantises none. Collective
        over a tensor-parallel replica.
        """
        return []

    def _require_base(self, partial: bool) -> None:
        if partial and self.held is None:
            raise RuntimeError("adapters came without base weights: a full weight sync must succeed first")

    def cached_tokens(self) -> int:
        """Count the tokens of one long prompt, always the same, that come from the engine's cache.

        0 right after a load: otherwise the cache was not emptied. Leaves the prompt in the cache. Always 0 for an
        engine that keeps nothing between requests.
        """
        self._require_weights()
        with preserve_rng(), self._exclusive():
            return self._cached_tokens()

    def unload(self) -> None:
        """Refuse to generate until the next successful whole `load_weights`."""
        self._unloaded, self._away = True, False

    def sleep(self, discard: bool = False) -> None:
        """Give the memory of cache and weights back to the trainer.

        discard: weights are not kept elsewhere either, so that the engine is unloaded; requests may be submitted all
        the same, and wait until it has weights and is open.
        """
        if discard:
            self._away, self._unloaded = self._away or not self._unloaded, True

    def wake(self) -> None:
        """Undo `sleep`."""
        if self._asleep:
            with self._exclusive():
                self._wake(*SLEEPERS)

    def _wake(self, *tags: str) -> None:
        """Bring back those of `tags` that are asleep; after a load that broke off only the cache is."""
        sleeping = [tag for tag in tags if tag in self._asleep]
        if sleeping:
            self._resume(sleeping)
            self._asleep -= set(sleeping)

    def _resume(self, tags: list[str]) -> None:
        """Bring these of SLEEPERS back to the device; for engines that put them to sleep."""
        raise NotImplementedError

    def shutdown(self) -> None:
        """Stop threads, free memory and shared memory names; call before the process group is destroyed."""
        raise NotImplementedError

    def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """End these requests (None: all) before the next step: futures get the tokens so far, with reason "abort".

        Requests that have ended are left alone; in a paused engine, those under way end as it opens or pauses again.
        """
        raise NotImplementedError

    def snapshot(self) -> dict[str, Sampled]:
        """Tokens sampled so far of every pending request, by id; on a replica's first rank."""
        raise NotImplementedError

    def open(self) -> None:
        """Sample from now on; collective over a tensor-parallel replica. Raises RolloutError when unloaded."""
        raise NotImplementedError

    def pause(self) -> None:
        """Stop sampling; return when no step runs or begins, on all ranks of the replica between the same two steps.

        Collective. Requests stay as they are, and those submitted meanwhile wait.
        """
        raise NotImplementedError

    @property
    def paused(self) -> bool:
        raise NotImplementedError

    def _queue(self, request: GenerationRequest) -> Future[Completion]:
        raise NotImplementedError

    def _exclusive(self) -> AbstractContextManager[None]:
        raise NotImplementedError

    def _seed_of(self, request: GenerationRequest) -> int:
        """Seed of a request; without one, a hash of this engine's seed and of how many had none before."""
        return request_seed(self._seed, 1, next(self._unseeded), 0) if request.seed is None else request.seed

    def _require_weights(self, *, or_away: bool = False) -> None:
        if self._unloaded and not (or_away and self._away):
            raise UnloadedError("the rollout engine holds no weights: a full weight sync must succeed first")

    def _load(self, stream: Iterator[tuple[str, Tensor]], *, partial: bool) -> None:
        raise NotImplementedError

    def _weights_changed(self) -> None:
        """Forget what was computed with other weights for requests under way; called after each load."""
        raise NotImplementedError

    def _score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        raise NotImplementedError

    def _cached_tokens(self) -> int:
        """Return 0: no cache is kept between requests, unless a backend says so."""
        return 0


class SteppedRolloutEngine(RolloutEngine):
    """Engine that is driven step by step (step_loop.py): a backend adds the methods for the loop, and sets `_loop`."""

    _loop: StepLoop

    def open(self) -> None:
        self._require_weights()
        self.wake()
        self._loop.open()

    def pause(self) -> None:
        self._loop.pause()

    @property
    def paused(self) -> bool:
        return self._loop.phase is Phase.PAUSED

    def submit_all(self, requests: Sequence[GenerationRequest]) -> list[Future[Completion]]:
        with self._loop.between_orders():
            return super().submit_all(requests)

    def abort(self, request_ids: Sequence[str] | None = None) -> None:
        self._loop.abort(request_ids)

    def snapshot(self) -> dict[str, Sampled]:
        return self._loop.snapshot()

    def shutdown(self) -> None:
        self.unload()
        self._loop.close()

    def _queue(self, request: GenerationRequest) -> Future[Completion]:
        return self._loop.submit(request)

    def _exclusive(self) -> AbstractContextManager[None]:
        return self._loop.exclusive()


def _gather(ended: SimpleQueue[Future[Completion]], most: int) -> list[Future[Completion]]:
    """Wait for the next future to end, and take along those that end within STREAM_INTERVAL_S of it."""
    futures = [ended.get()]
    deadline = monotonic() + STREAM_INTERVAL_S
    while len(futures) < most and (not ended.empty() or monotonic() < deadline):
        if ended.empty():
            sleep(STREAM_INTERVAL_S / 10)
        else:
            futures.append(ended.get())
    return futures


def _no_grad(stream: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Run the stream's own code (all-gathers of the trainer) outside the engine's inference mode."""
    items = iter(stream)
    while True:
        with torch.inference_mode(False), torch.no_grad():
            item = next(items, None)
        if item is None:
            return
        yield item
        del item  # before the next is gathered
