"""A batch as a GRPO step trains on it, made up: groups of responses to one prompt, random tokens and advantages."""

from __future__ import annotations

import torch

from verl_like.batch import Experience, pad_rows
from verl_like.bench.shapes import Workload

_FIRST_WORD = 3  # ids below are special tokens


def grouped_rows(workload: Workload, vocab_size: int, *, seed: int) -> Experience:
    """Prompts x responses rows in the order of the trainer: the rows of a group are neighbours and share a prompt."""
    n, generator = workload.responses_per_prompt, torch.Generator().manual_seed(seed)
    lengths = workload.response_lengths(seed)
    responses = [torch.randint(_FIRST_WORD, vocab_size, (k,), generator=generator).tolist() for k in lengths]
    response_ids_BR = pad_rows(responses, side="right", dtype=torch.int32)
    length_B = torch.tensor(lengths)
    mask_BR = torch.arange(response_ids_BR.shape[1])[None, :] < length_B[:, None]
    prompts = torch.tensor(random_prompts(workload, vocab_size, seed=seed), dtype=torch.int32)
    return Experience(
        prompt_ids_BP=prompts.repeat_interleave(n, dim=0),
        prompt_length_B=torch.full((len(lengths),), workload.prompt_length),
        response_ids_BR=response_ids_BR,
        response_length_B=length_B,
        response_mask_BR=mask_BR,
        group_B=torch.arange(workload.num_prompts).repeat_interleave(n),
        advantages_BR=torch.randn(len(lengths), 1, generator=generator).expand_as(mask_BR) * mask_BR,
    )


def random_prompts(workload: Workload, vocab_size: int, *, seed: int) -> list[list[int]]:
    """The prompts alone, each once; another seed gives others."""
    generator, count = torch.Generator().manual_seed(seed), workload.num_prompts
    return torch.randint(_FIRST_WORD, vocab_size, (count, workload.prompt_length), generator=generator).tolist()


def tokens_with_shared_prompts(batch: Experience) -> int:
    """Tokens of the batch if each group's prompt were computed once."""
    length_of = dict(zip(batch.group_B.tolist(), batch.prompt_length_B.tolist(), strict=True))
    return sum(length_of.values()) + int(batch.response_length_B.sum())
