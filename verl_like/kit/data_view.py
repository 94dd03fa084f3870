"""A data file as the trainer reads it: prompts as tokens with the chat template applied, for `verl-like data show`."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from verl_like.config import PPOConfig
from verl_like.config.errors import input_errors
from verl_like.data.dataset import make_encoder
from verl_like.data.foreign import build_dataset
from verl_like.data.prompt_truth import own_text
from verl_like.models.loading import load_hf_config, load_tokenizer
from verl_like.models.location import file_problem
from verl_like.models.vision import processor_of
from verl_like.trainer.facts import with_system_prompt

_NO_LIMIT = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownRow:
    """One row. tokens: (id, text, is special)."""

    index: int
    data_source: str
    ground_truth: Any
    extra_info: dict[str, Any]
    tokens: list[tuple[int, str, bool]]


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """View of a data file.

    lengths: tokens of the prompts of the first `len(lengths)` rows.
    limit: data.max_prompt_length.
    adds: text that the chat template adds of its own accord.
    problem: reason why a run would refuse the file.
    """

    num_rows: int
    sources: list[tuple[str, int]]
    lengths: list[int]
    limit: int
    rows: list[ShownRow]
    has_template: bool
    adds: str
    problem: str


def view(config: PPOConfig, file: str, rows: Sequence[int], measure: int) -> View:
    """Read rows of a file under data.*, the tokenizer and the template of a configuration, nothing cut or dropped.

    Raises ConfigError for a file or rows that cannot be read.

    measure: how many rows are tokenised for the lengths.
    """
    with input_errors():
        policy, limit = config.actor_rollout_ref.model, config.data.max_prompt_length
        data = dataclasses.replace(
            with_system_prompt(config), max_prompt_length=_NO_LIMIT, filter_overlong_prompts=False, train_max_samples=-1
        )
        if problem := file_problem("FILE", file):
            raise ValueError(problem)
        key = "data.tokenizer" if data.tokenizer else "actor_rollout_ref.model.path (--model)"
        tokenizer = load_tokenizer(data.tokenizer or policy.path, policy.trust_remote_code, key)
        if policy.custom_chat_template:
            tokenizer.chat_template = policy.custom_chat_template
        dataset = build_dataset(data, file, tokenizer, split="train")
        if dataset.num_media():
            vision = processor_of(policy, load_hf_config(policy, "actor_rollout_ref.model.path"))
            dataset = build_dataset(data, file, tokenizer, split="train", vision=vision)
        wrong = [row for row in rows if not 0 <= row < len(dataset)]
        if wrong:
            raise ValueError(f"{file} has {len(dataset):,} rows, from 0: there is no row {wrong[0]}")
        encoder = make_encoder(data, tokenizer)
        special = {*tokenizer.all_special_ids, *encoder.special.control}
        shown = []
        for row in rows:
            ids, prompt = dataset[row]
            tokens = [(i, tokenizer.decode([i], skip_special_tokens=False), i in special) for i in ids]
            shown.append(
                ShownRow(
                    index=row,
                    data_source=prompt.data_source,
                    ground_truth=prompt.ground_truth,
                    extra_info=prompt.extra_info,
                    tokens=tokens,
                )
            )
        lengths = [len(dataset[row][0]) for row in range(min(measure, len(dataset)))]
        problem = ""
        try:
            dataset.check_rows()
        except ValueError as error:
            problem = str(error)
    return View(
        num_rows=len(dataset),
        sources=Counter(dataset.domains()).most_common(),
        lengths=lengths,
        limit=limit,
        rows=shown,
        has_template=encoder.has_template,
        adds=own_text(encoder),
        problem=problem,
    )
