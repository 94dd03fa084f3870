"""Rows that answer the same prompt, packed with that prompt once.

Causal attention makes a prompt's hidden states the same in front of every response, so that computing them once per
group instead of once per row changes nothing but rounding. With n responses of R tokens to a prompt of P, linear layers
see P + nR tokens instead of n(P + R).

Letters: S rows of the packed input (in packed order), K tokens of all whole sequences one after the other, T packed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from verl_like.batch import Sequences
from verl_like.models.token_layout import TokenLayout


def prompt_numbers(rows: Sequences) -> list[int]:
    """A number for each row, equal where the prompts are equal token for token: 0, 1, 2 ... by first appearance.

    A row without a response shares with nobody: its last prompt token is never computed.
    """
    known: dict[object, int] = {}
    ids, width = rows.prompt_ids_BP.cpu().int().numpy(), rows.prompt_ids_BP.shape[1]
    lengths, responses = rows.prompt_length_B.tolist(), rows.response_length_B.tolist()
    keys = [ids[b, width - lengths[b] :].tobytes() if responses[b] else ("row", b) for b in range(len(rows))]
    return [known.setdefault(key, len(known)) for key in keys]


def first_rows(numbers: Sequence[int]) -> Tensor:
    """int64 [S]: the first row with the same number; itself where there is none before."""
    first: dict[int, int] = {}
    return torch.tensor([first.setdefault(number, s) for s, number in enumerate(numbers)])


def shared_layout(length_S: Tensor, prompt_S: Tensor, first_S: Tensor, start_S: Tensor) -> TokenLayout:
    """Where the tokens of every whole sequence are found in the packed input.

    length_S: tokens of each whole sequence. prompt_S: of its prompt. first_S: the row that holds its prompt.
    start_S: packed position of the row's own first token, which of a row that shares is a response token.
    Rows that share and have no token of their own must have been left out.
    """
    row_K = torch.arange(len(length_S)).repeat_interleave(length_S)
    slot_S = length_S.cumsum(0) - length_S
    position_K = torch.arange(len(row_K)) - slot_S[row_K]
    shares_S = first_S != torch.arange(len(length_S))
    copied_K = shares_S[row_K] & (position_K < prompt_S[row_K])
    own_K = start_S[row_K] + position_K - torch.where(shares_S, prompt_S, 0)[row_K]
    gather_K = torch.where(copied_K, start_S[first_S[row_K]] + position_K, own_K)
    own_slots = (~copied_K).nonzero()[:, 0]
    home_T = torch.empty(len(own_slots), dtype=torch.int64)
    home_T[gather_K[own_slots]] = own_slots
    copied_C, further = _copies(prompt_S, first_S, start_S, slot_S)
    return TokenLayout(gather_K=gather_K, home_T=home_T, copied_C=copied_C, further=further)


def _copies(
    prompt_S: Tensor, first_S: Tensor, start_S: Tensor, slot_S: Tensor
) -> tuple[Tensor | None, tuple[Tensor, ...]]:
    sharers: dict[int, list[int]] = {}
    for s, first in enumerate(first_S.tolist()):
        if s != first:
            sharers.setdefault(first, []).append(s)
    if not sharers:
        return None, ()
    order = sorted(sharers, key=lambda first: -len(sharers[first]))
    copied = torch.cat([start_S[first] + torch.arange(int(prompt_S[first])) for first in order])
    further = []
    for number in range(len(sharers[order[0]])):
        rows = [sharers[first][number] for first in order if number < len(sharers[first])]
        further.append(torch.cat([slot_S[row] + torch.arange(int(prompt_S[row])) for row in rows]))
    return copied, tuple(further)
