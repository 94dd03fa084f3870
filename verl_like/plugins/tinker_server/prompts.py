"""Sampling requests as the engine takes them: checked against what the server is for."""

from __future__ import annotations

import base64
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from verl_like.config.serve import ServeConfig
from verl_like.plugins.tinker_server import bodies
from verl_like.plugins.tinker_server.bodies import Refused
from verl_like.plugins.tinker_server.engine import Prompt
from verl_like.plugins.tinker_server.images import Picture, Reader
from verl_like.rollout.rollout_engine import SamplingParams, request_seed


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of what the server is for.

    model: the base's name to clients. tokenizer: folder of its tokenizer, where the name does not say it. eos_ids end a
    response.
    """

    model: str
    arch: str
    tokenizer: str | None
    vocabulary: int
    longest: int  # tokens of prompt and response
    eos_ids: tuple[int, ...]
    seed: int
    serve: ServeConfig
    shared: Mapping[str, int]  # tokens of a pass that requests share, by their kind; none: they share nothing
    reader: Reader

    @property
    def numbers(self) -> int:
        """Numbers of a column that a pass may have; a dense column of the largest body has fewer."""
        return self.serve.max_request_megabytes * 2**17


def prompt_of(asked: bodies.Sample, sampler: str, limits: Limits) -> Prompt:
    """Check and translate a request. What is random follows from numbers that are the same in every run."""
    params = asked.sampling_params
    if asked.record_stability_info:
        raise Refused("record_stability_info=True is not available (loss stable_reinforce); leave it out")
    found, media = limits.reader.content(map(_part, itertools.count(), asked.prompt.chunks), "prompt")
    ids = found.tolist()
    room = limits.longest - len(ids)
    if not ids or room < 1:
        raise Refused(f"prompt has {len(ids)} tokens, where 1 to {limits.longest - 1} fit the model")
    if not 0 <= min(ids) <= max(ids) < limits.vocabulary:
        most = limits.vocabulary - 1
        raise Refused(f"prompt has ids from {min(ids)} to {max(ids)}, where the tokenizer has 0 to {most}")
    last, targets = asked.prompt_logprobs_last_n, None
    if last is not None and not (asked.prompt_logprobs and last < len(ids)):
        raise Refused(f"prompt_logprobs_last_n={last} needs prompt_logprobs, and a prompt of more tokens")
    if asked.target_prompt_logprobs is not None:
        targets = _targets(asked.target_prompt_logprobs, len(ids), limits.vocabulary)
    stop = [params.stop] if isinstance(params.stop, str) else params.stop
    words = tuple(each for each in stop or () if isinstance(each, str))
    if "" in words or len(words) > 64 or max(map(len, words), default=0) > 1000:
        raise Refused("sampling_params.stop has an empty text, over 64 of them, or one of over 1,000 characters")
    if 0 < params.temperature < 1e-4:
        raise Refused(f"sampling_params.temperature={params.temperature}: set it to 0, or to 1e-4 or more")
    ends = () if stop == [] else (*limits.eos_ids, *(each for each in stop or () if isinstance(each, int)))
    if ends and not 0 <= min(ends) <= max(ends) < limits.vocabulary:
        raise Refused(f"sampling_params.stop={params.stop} has ids that the tokenizer lacks")
    drawn = ("sample", sampler.partition(":")[2], asked.seq_id or 0)  # without the session, which has a name at random
    shape: dict[str, Any] = {"temperature": params.temperature, "top_p": params.top_p, "top_k": params.top_k or -1}
    most = min(params.max_tokens or room, room)
    return Prompt(
        ids=ids,
        media=media,
        sampling=SamplingParams(max_tokens=most, stop=words, stop_token_ids=ends, **shape),
        seed=request_seed(limits.seed, *(drawn if params.seed is None else ("given", params.seed))),
        num_samples=asked.num_samples,
        scored=bool(asked.prompt_logprobs),
        last=last,
        topk=asked.topk_prompt_logprobs,
        topk_sampled=asked.topk_sample_logprobs,
        targets=targets,
    )


def _part(number: int, chunk: bodies.Chunk) -> NDArray[np.int32] | Picture:
    place = f"prompt.chunks[{number}]"
    try:
        if chunk.type == "encoded_text":
            return np.asarray(chunk.tokens, np.int32)
        if chunk.type == "image":
            return Picture(data=base64.b64decode(chunk.data, validate=True), expected=chunk.expected_tokens)
    except (ValueError, OverflowError) as error:
        raise Refused(f"{place}: {error}") from error
    raise Refused(f"{place}.type={chunk.type!r} is not available: send text, or the bytes of an image")


def _targets(asked: bodies.Targets, length: int, vocabulary: int) -> NDArray[np.int64]:
    """Read ids to be scored, [length - 1, K], dense or as CSR; -1: nothing. Raises Refused."""
    rows, place = length - 1, "target_prompt_logprobs"
    if len(asked.shape) != 2 or asked.shape[0] != rows or not 1 <= asked.shape[1] <= 128 or not rows:
        raise Refused(f"{place} has shape {asked.shape}, not [{rows}, K] with K from 1 to 128")
    if asked.sparse_crow_indices is not None:
        raise Refused(f"{place} in sparse form is not available yet: send it dense")
    try:
        ids = np.asarray(asked.data, np.int64).reshape(asked.shape)
    except (ValueError, OverflowError) as error:
        raise Refused(f"{place}: {error}") from error
    if (ids.ravel() != np.asarray(asked.data)).any():
        raise Refused(f"{place} has numbers that are no ids")
    if ids.min() < -1 or ids.max() >= vocabulary:
        raise Refused(f"{place} has ids from {ids.min()} to {ids.max()}: -1, or 0 to {vocabulary - 1}")
    return ids
