"""Rows that answer the same prompt, packed with that prompt once.

Causal attention makes a prompt's hidden states the same in front of every response, so that computing them once per
group instead of once per row changes nothing but rounding. With n responses of R tokens to a prompt of P, linear layers
see P + nR tokens instead of n(P + R). An episode whose history was rewritten has several rows, each with a prompt of
its own: the group's prompt, and what came after it. Such rows share the group's prompt.

Letters: S rows of the packed input (in packed order), K tokens of all whole sequences one after the other, T packed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from verl_like.batch import Experience, Rollouts, Sequences
from verl_like.flat_columns import bounds
from verl_like.models.token_layout import TokenLayout, layout_of


def shared_prefixes(rows: Sequences) -> tuple[list[int], Tensor]:
    """Find rows that begin alike: a number for each, and the tokens of its prompt that all rows of that number share.

    Numbers are 0, 1, 2 ... by first appearance; the counts are int64 [B].

    Rows with equal prompts, images included, share all of them. Where episodes have several rows, the rows of a group
    share what all their prompts begin with, if that is at least half of the shortest; otherwise those with equal
    prompts do. A row without a response shares with nobody: its last prompt token is never computed.
    """
    lengths, responses = rows.prompt_length_B.tolist(), rows.response_length_B.tolist()
    ids, ends = rows.prompt_ids_T.cpu().int().numpy(), bounds(rows.prompt_length_B)
    prompts = [ids[start:stop] for start, stop in itertools.pairwise(ends)]
    media = [
        [(handle.starts[0], handle.image) for handle in handles if handle.starts[0] < length]
        for handles, length in zip(rows.media or [[]] * len(rows), lengths, strict=True)
    ]  # of prompts: those that tools returned later are the row's own
    keys: list[Hashable] = [
        (prompts[b].tobytes(), tuple(media[b])) if responses[b] else ("row", b) for b in range(len(rows))
    ]
    if isinstance(rows, Rollouts | Experience) and rows.episode_B is not None:
        groups: dict[int, list[int]] = {}
        for b in filter(responses.__getitem__, range(len(rows))):
            groups.setdefault(int(rows.group_B[b]), []).append(b)
        for group, members in groups.items():
            different = {keys[b]: b for b in members}.values()
            common = _common_beginning([prompts[b] for b in different])
            common = int(min(common, _common_images([media[b] for b in different])))
            alike = 2 * common >= min(lengths[b] for b in different)
            for b in members:
                keys[b], lengths[b] = (group, common if alike else keys[b]), common if alike else lengths[b]
    known: dict[Hashable, int] = {}
    return [known.setdefault(key, len(known)) for key in keys], torch.tensor(lengths, dtype=torch.int64)


def _common_beginning(prompts: Sequence[NDArray[np.int32]]) -> int:
    """Count the tokens that all of these prompts begin with."""
    common = prompts[0][: min(map(len, prompts))]
    for prompt in prompts[1:]:
        differs = common != prompt[: len(common)]
        common = common[: differs.argmax()] if differs.any() else common
    return len(common)


def _common_images(media: Sequence[Sequence[tuple[int, Hashable]]]) -> float:
    """Count the tokens up to which these rows have the same images."""
    for images in itertools.zip_longest(*media):
        if len(set(images)) > 1:
            return min(image[0] for image in images if image is not None)
    return math.inf


def first_rows(numbers: Sequence[int]) -> Tensor:
    """Find the first row with the same number, int64 [S]; the row itself where there is none before."""
    first: dict[int, int] = {}
    return torch.tensor([first.setdefault(number, s) for s, number in enumerate(numbers)])


def shared_layout(length_S: Tensor, shared_S: Tensor, first_S: Tensor, start_S: Tensor) -> TokenLayout:
    """Map the tokens of every whole sequence to their places in the packed input.

    Rows that share and have no token of their own must have been left out.

    Args:
        length_S: tokens of each whole sequence.
        shared_S: those at its beginning that rows with the same first_S have in common.
        first_S: the row that holds them.
        start_S: packed position of the row's own first token, which in a row that shares comes after what is shared.
    """
    row_K = torch.arange(len(length_S)).repeat_interleave(length_S)
    slot_S = length_S.cumsum(0) - length_S
    position_K = torch.arange(len(row_K)) - slot_S[row_K]
    shares_S = first_S != torch.arange(len(length_S))
    copied_K = shares_S[row_K] & (position_K < shared_S[row_K])
    own_K = start_S[row_K] + position_K - torch.where(shares_S, shared_S, 0)[row_K]
    gather_K = torch.where(copied_K, start_S[first_S[row_K]] + position_K, own_K)
    own_slots = (~copied_K).nonzero()[:, 0]
    home_T = torch.empty(len(own_slots), dtype=torch.int64)
    home_T[gather_K[own_slots]] = own_slots
    return layout_of(gather_K, home_T)
