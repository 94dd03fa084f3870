"""Prompts to generation requests, and completions back to rollouts. Pure."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence

import torch

from verl_like.batch import Prompts, Rollouts, pad_rows
from verl_like.rollout.rollout_engine import Completion, GenerationRequest, SamplingParams


def request_seed(seed: int, step: int, group: int, sample: int) -> int:
    """Seed of one response, 0 <= seed < 2**62: the same in every process, after a resume and in every batch."""
    digest = hashlib.blake2b(f"{seed}/{step}/{group}/{sample}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 2


def build_requests(
    prompts: Prompts,
    n: int,
    sampling: SamplingParams,
    *,
    seed: int,
    step: int,
    seed_per_request: bool = True,
    max_tokens: Sequence[int] | None = None,
) -> list[GenerationRequest]:
    """n requests per prompt: all of prompt 0, then all of prompt 1, ... (B = prompts x n).

    max_tokens: a limit of its own for each of the B requests, in place of the sampling's.
    """
    groups = prompts.group_B.tolist()
    limits = [sampling.max_tokens] * (len(groups) * n) if max_tokens is None else list(max_tokens)
    if len(limits) != len(groups) * n:
        raise ValueError(f"{len(limits)} limits (max_tokens) for {len(groups)} prompts x n={n}")
    return [
        GenerationRequest(
            request_id=f"{step}-{group}-{sample}",
            prompt_ids=prompt_ids,
            sampling=dataclasses.replace(sampling, max_tokens=limits[row * n + sample]),
            seed=request_seed(seed, step, group, sample) if seed_per_request else None,
            session=f"{step}-{group}",
        )
        for row, (group, prompt_ids) in enumerate(zip(groups, prompts.token_lists(), strict=True))
        for sample in range(n)
    ]


def assemble_rollouts(prompts: Prompts, n: int, completions: Sequence[Completion]) -> Rollouts:
    """Completions of `build_requests` (same order) as one batch of prompts x n rows; the policy sampled all tokens."""
    if len(completions) != len(prompts) * n:
        raise ValueError(f"{len(completions)} completions do not answer {len(prompts)} prompts x n={n}")
    repeated = prompts.select([i for i in range(len(prompts)) for _ in range(n)])
    sampled = [c.sampled for c in completions]
    lengths = [len(each) for each in sampled]
    response_length_B = torch.tensor(lengths, dtype=torch.int64)
    response_ids_BR = pad_rows((torch.from_numpy(each.token_ids) for each in sampled), side="right", dtype=torch.int32)
    return Rollouts(
        prompt_ids_BP=repeated.prompt_ids_BP,
        prompt_length_B=repeated.prompt_length_B,
        response_ids_BR=response_ids_BR,
        response_length_B=response_length_B,
        response_mask_BR=torch.arange(response_ids_BR.shape[1])[None, :] < response_length_B[:, None],
        group_B=repeated.group_B,
        rollout_log_probs_BR=pad_rows(
            (torch.from_numpy(each.log_probs) for each in sampled), side="right", dtype=torch.float32
        ),
        weight_version_BR=pad_rows(
            (torch.from_numpy(each.weight_versions) for each in sampled), side="right", dtype=torch.int32
        ),
        finish_reasons=[c.finish_reason for c in completions],
        rows=repeated.rows,
    )
