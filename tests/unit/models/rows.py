"""Rows written out as (prompt, response), for tests of what packs them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from verl_like.batch import Sequences, pad_rows


def sequences(rows: Sequence[tuple[list[int], list[int]]]) -> Sequences:
    """The rows; the policy sampled all of their responses."""
    prompts, responses = ([row[i] for row in rows] for i in (0, 1))
    length_B = torch.tensor([len(response) for response in responses])
    return Sequences(
        prompt_ids_BP=pad_rows(prompts, side="left", dtype=torch.int32),
        prompt_length_B=torch.tensor([len(prompt) for prompt in prompts]),
        response_ids_BR=pad_rows(responses, side="right", dtype=torch.int32),
        response_length_B=length_B,
        response_mask_BR=torch.arange(int(length_B.max()))[None] < length_B[:, None],
    )
