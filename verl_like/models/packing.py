"""Sequences -> what the model eats, and its per-token answers -> [b, R].

Packed: all rows one after the other in [1, T], positions restart at every row, no padding token anywhere. A row's last
token is left out, because nothing is predicted from it. Rows travel shortest first, so that equal lengths are
neighbours (attention on CPUs then takes them in one call); the answers go back to the order of the batch.
Padded: one row each, right padded. This is the reference path of tests and benchmarks.

Letters: b rows, P prompt, R response, T packed tokens, S segments (= rows), N tokens whose output is wanted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from verl_like.batch import Sequences

if TYPE_CHECKING:
    from verl_like.models.attention_groups import Groups
    from verl_like.parallel.ulysses import SequenceGroup


class Segments:
    """Where the sequences of a packed [1, T] input begin and end."""

    def __init__(self, lengths: list[int], device: torch.device) -> None:
        self.lengths = tuple(lengths)
        self.max_length = max(lengths)
        bounds = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        self.cu_seqlens = bounds.to(device)  # int32 [S + 1]
        self.parallel: SequenceGroup | None = None  # where each rank holds a slice of the tokens
        self.groups: Groups | None = None  # layout for batched attention calls, where one is needed


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInput:
    """Tokens of one micro-batch and where its answers belong."""

    input_ids: Tensor  # int64 [1, T] packed, [b, L] padded
    position_ids: Tensor  # same shape
    attention_mask: Tensor | None  # padded only
    segments: Segments | None  # packed only
    select_N: Tensor  # index into the flattened tokens: hidden states whose output is wanted
    targets_N: Tensor  # the token that follows each of them
    out_N: Tensor  # index into the flattened [b, R]
    out_shape: tuple[int, int]

    def model_kwargs(self) -> dict[str, Any]:
        """Keyword arguments of the Hugging Face backbone."""
        kwargs: dict[str, Any] = {"position_ids": self.position_ids, "attention_mask": self.attention_mask}
        return kwargs if self.segments is None else kwargs | {"segments": self.segments}

    def unpack(self, values_N: Tensor) -> Tensor:
        """Per-token answers [N] -> [b, R], zero elsewhere; differentiable."""
        flat = values_N.new_zeros(self.out_shape[0] * self.out_shape[1])
        return flat.index_copy(0, self.out_N, values_N).view(self.out_shape)


def response_positions(batch: Sequences, *, sampled_only: bool) -> Tensor:
    """[b, R] bool: the tokens an output is wanted for; all of the response, or only what the policy sampled."""
    column = torch.arange(batch.response_ids_BR.shape[1], device=batch.response_ids_BR.device)
    inside = column[None, :] < batch.response_length_B[:, None]
    return inside & batch.response_mask_BR if sampled_only else inside


def pack(batch: Sequences, wanted_BR: Tensor, device: torch.device) -> ModelInput:
    """Concatenate the rows. `wanted_BR` marks the response tokens whose output is wanted."""
    _check_prompts(batch)
    length_B = (batch.num_tokens_B() - 1).clamp(min=1)
    order = torch.sort(length_B, stable=True).indices
    rows, length_S = batch.select(order), length_B[order]
    start_S = length_S.cumsum(0) - length_S
    tokens, position = _real_tokens(rows)
    kept = tokens[position < length_S.repeat_interleave(rows.num_tokens_B())]
    kept_position = torch.arange(len(kept)) - start_S.repeat_interleave(length_S)
    row_N, column_N = wanted_BR[order].nonzero(as_tuple=True)
    select_N = start_S[row_N] + rows.prompt_length_B[row_N] - 1 + column_N
    return ModelInput(
        input_ids=kept[None].to(device),
        position_ids=kept_position[None].to(device),
        attention_mask=None,
        segments=Segments(length_S.tolist(), device),
        select_N=select_N.to(device),
        targets_N=rows.response_ids_BR[row_N, column_N].long().to(device),
        out_N=(order[row_N] * wanted_BR.shape[1] + column_N).to(device),
        out_shape=(wanted_BR.shape[0], wanted_BR.shape[1]),
    )


def pad(batch: Sequences, wanted_BR: Tensor, device: torch.device) -> ModelInput:
    """One row each, right padded with token 0."""
    _check_prompts(batch)
    length_B = batch.num_tokens_B()
    tokens, _ = _real_tokens(batch)
    input_ids = torch.nn.utils.rnn.pad_sequence(tokens.split(length_B.tolist()), batch_first=True)
    width = input_ids.shape[1]
    position_ids = torch.arange(width).expand_as(input_ids)
    row_N, column_N = wanted_BR.nonzero(as_tuple=True)
    return ModelInput(
        input_ids=input_ids.to(device),
        position_ids=position_ids.to(device),
        attention_mask=(position_ids < length_B[:, None]).long().to(device),
        segments=None,
        select_N=(row_N * width + batch.prompt_length_B[row_N] - 1 + column_N).to(device),
        targets_N=batch.response_ids_BR[row_N, column_N].long().to(device),
        out_N=(row_N * wanted_BR.shape[1] + column_N).to(device),
        out_shape=(wanted_BR.shape[0], wanted_BR.shape[1]),
    )


def placeholder(device: torch.device, *, packed: bool) -> ModelInput:
    """A micro-batch of one token, for a rank that has no rows left but must take part in the collectives."""
    zero = torch.zeros(1, 1, dtype=torch.int64, device=device)
    return ModelInput(
        input_ids=zero,
        position_ids=zero,
        attention_mask=None if packed else torch.ones_like(zero),
        segments=Segments([1], device) if packed else None,
        select_N=zero[0],
        targets_N=zero[0],
        out_N=zero[0],
        out_shape=(1, 1),
    )


def take_slice(whole: ModelInput, parallel: SequenceGroup) -> ModelInput:
    """This rank's slice of a packed input, the last one filled up with a segment of padding.

    Targets were taken before, so a token whose successor is in the next slice keeps its own. `segments` and positions
    stay those of the whole.
    """
    assert whole.segments is not None
    total = whole.input_ids.shape[1]
    width = -(-total // parallel.size)
    filling = width * parallel.size - total
    lengths = [*whole.segments.lengths, *([filling] if filling else [])]
    segments = Segments(lengths, whole.input_ids.device)
    segments.parallel = parallel
    first = parallel.rank * width
    mine_N = (whole.select_N >= first) & (whole.select_N < first + width)
    return ModelInput(
        input_ids=torch.nn.functional.pad(whole.input_ids, (0, filling))[:, first : first + width],
        position_ids=torch.nn.functional.pad(whole.position_ids, (0, filling))[:, first : first + width],
        attention_mask=None,
        segments=segments,
        select_N=whole.select_N[mine_N] - first,
        targets_N=whole.targets_N[mine_N],
        out_N=whole.out_N[mine_N],
        out_shape=whole.out_shape,
    )


def _real_tokens(rows: Sequences) -> tuple[Tensor, Tensor]:
    """All tokens without padding, row after row (int64 [total]), and each one's position in its row."""
    width_P, width_R = rows.prompt_ids_BP.shape[1], rows.response_ids_BR.shape[1]
    ids = torch.cat([rows.prompt_ids_BP, rows.response_ids_BR], dim=1).long()
    first_B = width_P - rows.prompt_length_B
    position = torch.arange(width_P + width_R)[None, :] - first_B[:, None]
    real = (position >= 0) & (position < rows.num_tokens_B()[:, None])
    return ids[real], position[real]


def _check_prompts(batch: Sequences) -> None:
    if len(batch) == 0 or int(batch.prompt_length_B.min()) < 1:
        raise ValueError("every sequence needs a prompt token: the first response token is predicted from it")
