"""Responses that people read: one jsonl file per step, and a few rows of a validation for the trackers.

A record has verl's fields (input, output, gts, score, step, and each further value of the reward function) plus
data_source, finish_reason and, for a row whose reward could not be computed, failure. Its score then is null.
"""

from __future__ import annotations

import json
import math
import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from verl_like.batch import Rollouts, Scores

Sample = dict[str, Any]

_SAMPLE_SEED = 42  # the same prompts are shown at every validation


class Decoder(Protocol):
    """The part of a Hugging Face tokenizer that turning ids into text needs."""

    def decode(self, token_ids: Any, *, skip_special_tokens: bool = False) -> Any: ...


def make_samples(rollouts: Rollouts, scores: Scores, tokenizer: Decoder, step: int) -> list[Sample]:
    """One record per row, in row order, special tokens left out of the texts."""
    prompt_width = rollouts.prompt_ids_BP.shape[1]
    samples: list[Sample] = []
    for i, row in enumerate(rollouts.rows):
        prompt_ids = rollouts.prompt_ids_BP[i, prompt_width - int(rollouts.prompt_length_B[i]) :].tolist()
        response_ids = rollouts.response_ids_BR[i, : int(rollouts.response_length_B[i])].tolist()
        failure = scores.failures[i]
        sample = {
            "input": tokenizer.decode(prompt_ids, skip_special_tokens=True),
            "output": tokenizer.decode(response_ids, skip_special_tokens=True),
            "gts": row.ground_truth,
            "score": float(scores.score_B[i]),
            "step": step,
            "data_source": row.data_source,
            "finish_reason": rollouts.finish_reasons[i],
        }
        if row.validation_set:
            sample["validation_set"] = row.validation_set
        if row.prompt_id is not None:
            sample["prompt_id"] = row.prompt_id
        if failure is not None:
            sample["failure"] = f"{failure.kind}: {failure.message}"
        # The reward function's own values never hide a field of the record.
        samples.append({**scores.extras[i], **sample})
    return samples


def dump_samples(folder: str | os.PathLike[str], step: int, samples: Sequence[Sample]) -> Path:
    """Write `<folder>/<step>.jsonl`, replacing what a run before a resume left there. Returns the path.

    The file appears at once: a reader never sees half of it.
    """
    path = Path(folder).expanduser() / f"{step}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".tmp{os.getpid()}")
    with temporary.open("w", encoding="utf-8") as file:
        for sample in samples:
            file.write(to_json(sample) + "\n")
    temporary.replace(path)
    return path


def pick_samples(samples: Sequence[Sample], count: int) -> list[Sample]:
    """`trainer.log_val_generations` rows for the trackers: a fixed random choice, sorted by prompt."""
    ordered = sorted(samples, key=lambda sample: str(sample["input"]))
    chosen = random.Random(_SAMPLE_SEED).sample(range(len(ordered)), min(count, len(ordered)))
    return [ordered[i] for i in sorted(chosen)]


def to_json(value: Any) -> str:
    """One line of strict JSON: NaN and infinities become null, tensors and arrays lists, anything else its text."""
    return json.dumps(_plain(value), ensure_ascii=False, allow_nan=False)


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set):
        return [_plain(item) for item in value]
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    return str(value)
