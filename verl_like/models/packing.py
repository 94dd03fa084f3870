"""Packing of sequences into a model's input, and of its per-token answers back to [T].

Packed: all rows one after the other in [1, T], positions restart at every row, no padding token anywhere. A row's last
token is left out, because nothing is predicted from it. Rows travel shortest first, so that equal lengths are
neighbours (attention on CPUs then takes them in one call); the answers go back to the order of the batch. Rows can
share what they begin with (prefix_tree.py): then the shortest of them holds it, and the others hold what comes after.
Padded: one row each, right padded. This is the reference path of tests and benchmarks.

Letters: b rows, P prompt, R response, T packed tokens, S segments (= rows), N tokens whose output is wanted.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from verl_like.batch import MediaHandle, Sequences
from verl_like.flat_columns import on_rows, take_rows
from verl_like.models.prefix_tree import beginnings, branches, path_layout, paths
from verl_like.models.routes import unknown
from verl_like.models.token_layout import Groups, TokenLayout
from verl_like.parallel.context import ContextRanks, SeenKeys, chunk_places

if TYPE_CHECKING:
    from verl_like.models.vision import VisionInput, VisionProcessor
    from verl_like.parallel.ulysses import SequenceRanks


class Segments:
    """Bounds of the sequences of a packed [1, T] input.

    lengths: tokens of each sequence, which are the keys that its last token sees.
    own_lengths: its tokens in the packed input, the last of the sequence; fewer where it shares its beginning.
    layout: finds the tokens of the whole sequences in the packed input. None: they are the packed input.
    holders: the sequence that holds the token before the own ones of each; its own number where it shares none.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        device: torch.device,
        *,
        own_lengths: Sequence[int] | None = None,
        layout: TokenLayout | None = None,
        holders: Sequence[int] | None = None,
    ) -> None:
        self.lengths, self.own_lengths = tuple(lengths), tuple(own_lengths or lengths)
        self.max_length, self.max_own_length = max(self.lengths), max(self.own_lengths)
        self.layout = layout
        self.holders = tuple(holders or range(len(self.lengths)))
        self.cu_seqlens = _bounds(self.lengths)  # int32 [S + 1]
        self.cu_own = self.cu_seqlens if layout is None else _bounds(self.own_lengths)
        self.heads: SequenceRanks | None = None  # that share tokens, and exchange heads for them around attention
        self.seen: SeenKeys | None = None  # where other ranks hold tokens that these see
        self.groups: tuple[Groups, Groups] | None = None  # of queries and keys, for batched attention calls
        self.kept: dict[tuple[Any, ...], Any] = {}  # what state_layers.py made of them
        self.move_(device)

    def move_(self, device: torch.device) -> None:
        """Move the bounds, and what finds tokens, to a device; the host does not wait for it."""
        shared = self.cu_own is self.cu_seqlens
        self.cu_seqlens = self.cu_seqlens.to(device, non_blocking=True)
        self.cu_own = self.cu_seqlens if shared else self.cu_own.to(device, non_blocking=True)
        self.layout = None if self.layout is None else self.layout.to(device)
        self.seen = None if self.seen is None else self.seen.to(device)

    def sliced(self, ranks: SequenceRanks, filling: int) -> Segments:
        """Segments of a rank's tokens in attention, with `filling` tokens of padding as one more sequence."""
        device, added = self.cu_seqlens.device, (filling,) if filling else ()
        layout = self.layout if self.layout is None or not filling else self.layout.appended(filling)
        filled = Segments((*self.lengths, *added), device, own_lengths=(*self.own_lengths, *added), layout=layout)
        if isinstance(ranks, ContextRanks):
            return filled._of_chunks(ranks)
        filled.heads = ranks
        return filled

    def _of_chunks(self, ranks: ContextRanks) -> Segments:
        """Segments of the tokens that this rank's chunks have of each sequence, behind all keys that these see."""
        total, context = sum(self.own_lengths), ranks.context
        places = chunk_places(total, context.size)[context.rank]
        runs = places.tensor_split((places.diff() > 1).nonzero()[:, 0] + 1)  # the last rank's two chunks are neighbours
        end_S, end_K = (list(itertools.accumulate(lengths)) for lengths in (self.own_lengths, self.lengths))
        asking, slots = list[int](), list[Tensor]()
        for run in runs:
            for own, length, end, end_slot in zip(self.own_lengths, self.lengths, end_S, end_K, strict=True):
                start, stop = max(int(run[0]), end - own), min(int(run[-1]) + 1, end)
                if start < stop:
                    asking.append(stop - start)
                    slots.append(torch.arange(end_slot - length, end_slot - (end - stop)))
        seen_K = torch.cat(slots) if self.layout is None else self.layout.gather_K.cpu()[torch.cat(slots)]
        seen_U, number_K = torch.unique(seen_K, return_inverse=True)
        home_U = torch.full_like(seen_U, len(seen_K)).scatter_reduce(0, number_K, torch.arange(len(seen_K)), "amin")
        layout, lengths = TokenLayout.of(number_K, home_U), [*map(len, slots)]
        part = Segments(lengths, self.cu_seqlens.device, own_lengths=asking, layout=layout)
        part.heads, part.seen = ranks.heads, SeenKeys.of(seen_U, total, context)
        return part


def _bounds(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInput:
    """Tokens of one micro-batch and the places of its answers."""

    input_ids: Tensor  # int64 [1, T] packed, [b, L] padded
    position_ids: Tensor  # same shape; of a vision-language model four of them (text, time, height, width)
    attention_mask: Tensor | None  # padded only
    segments: Segments | None  # packed only
    select_N: Tensor  # index into the flattened tokens: hidden states whose output is wanted
    targets_N: Tensor  # the token that follows each of them
    out_N: Tensor  # index into the response tokens of the batch, [T]
    num_out: int  # of these
    images: VisionInput | None = None
    routes: Tensor | None = None  # [flattened tokens, L, k] to be replayed: routes.py
    places_S: Tensor | None = None  # index into the flattened tokens: each token of the rows; -1: it is not there

    def model_kwargs(self) -> dict[str, Any]:
        """Keyword arguments of the Hugging Face backbone."""
        kwargs: dict[str, Any] = {"position_ids": self.position_ids, "attention_mask": self.attention_mask}
        return kwargs if self.segments is None else kwargs | {"segments": self.segments}

    def to(self, device: torch.device) -> ModelInput:
        """The input on a device, images apart, which are there. It leaves pageable memory at once: nobody waits."""
        if self.segments is not None:
            self.segments.move_(device)
        moved = {name: getattr(self, name) for name in _MOVED}
        return dataclasses.replace(
            self, **{n: t.to(device, non_blocking=True) for n, t in moved.items() if t is not None}
        )

    def routes_of_rows(self, noted_L: Sequence[Tensor], dtype: torch.dtype, group: SequenceRanks | None) -> Tensor:
        """Bring routes that a pass noted, [flattened tokens, k] of each layer, to the tokens of the rows: [S, L, k].

        group: ranks that have a slice of the tokens each.
        """
        assert self.places_S is not None
        noted = torch.stack(list(noted_L), 1).int() + 1  # 0: not here
        found = torch.where(self.places_S[:, None, None] >= 0, noted[self.places_S.clamp(min=0)], 0)
        found = found if group is None else group.join(found)
        return torch.where(found > 0, found - 1, unknown(dtype)).to(dtype)

    def unpack(self, values_N: Tensor) -> Tensor:
        """Spread answers [N] or [N, K] over the response tokens of the batch, zero elsewhere; differentiable."""
        return values_N.new_zeros(self.num_out, *values_N.shape[1:]).index_copy(0, self.out_N, values_N)


_MOVED = ("input_ids", "position_ids", "attention_mask", "select_N", "targets_N", "out_N", "routes", "places_S")


def response_positions(batch: Sequences, *, sampled_only: bool) -> Tensor:
    """Mark the response tokens an output is wanted for, bool [T]; all, or only those the policy sampled."""
    return batch.response_mask_T if sampled_only else torch.ones_like(batch.response_mask_T)


def pack(
    batch: Sequences,
    wanted_T: Tensor,
    device: torch.device,
    *,
    share_prompts: bool = False,
    vision: VisionProcessor | None = None,
    notes_routes: bool = False,
    owner_B: Tensor | None = None,
) -> ModelInput:
    """Concatenate the rows.

    Args:
        batch: the rows.
        wanted_T: bool; marks the response tokens whose output is wanted.
        device: where the input goes.
        share_prompts: keep once what several rows begin with (prefix_tree.py).
        vision: image processor of a vision-language model.
        notes_routes: for `ModelInput.routes_of_rows`.
        owner_B: rows of equal numbers are neighbours, in the order of these, and only among themselves by length.
    """
    _check_prompts(batch)
    length_B = (batch.num_tokens_B() - 1).clamp(min=1)
    order = torch.sort(length_B, stable=True).indices
    if owner_B is not None:
        order = order[torch.sort(owner_B[order], stable=True).indices]
    rows, length_S, prompt_S = batch.select(order), length_B[order], batch.prompt_length_B[order]
    holder_S, left_out_S = range(len(rows)), torch.zeros_like(length_S)  # tokens at the start that another row holds
    if share_prompts:
        holder_S, counts = branches(beginnings(rows))
        left_out_S = torch.tensor(counts)
    path_S = paths(length_S, left_out_S, holder_S)
    tokens, position = _real_tokens(rows)
    num_tokens = rows.num_tokens_B()
    row = torch.arange(len(rows)).repeat_interleave(num_tokens)
    kept = (position < length_S[row]) & (position >= left_out_S[row])
    place = torch.full_like(position, -1)  # of each token of the rows in the packed input
    place[position < length_S[row]] = torch.cat(path_S)
    places_S = take_rows(place, num_tokens, torch.argsort(order).tolist()) if notes_routes else None
    places_T = take_rows(torch.arange(len(wanted_T)), batch.response_length_B, order.tolist())  # of rows, in the batch
    chosen_N, row_N, column_N = _wanted(wanted_T[places_T], rows)
    select_N = place[(num_tokens.cumsum(0) - num_tokens)[row_N] + prompt_S[row_N] - 1 + column_N]
    position_ids, images = position[kept][None], None
    if vision is not None:
        axes, features, media = vision.together(_with_media(rows))
        position_ids = torch.cat([position[None], torch.cat(axes, dim=1)])[:, None, kept]
        images = vision.load(torch.cat(features)[kept][None], media, device)
    return ModelInput(
        input_ids=tokens[kept][None],
        position_ids=position_ids,
        attention_mask=None,
        segments=_segments(path_S, left_out_S.tolist(), holder_S),
        select_N=select_N,
        targets_N=rows.response_ids_T[chosen_N].long(),
        out_N=places_T[chosen_N],
        num_out=len(wanted_T),
        images=images,
        routes=None if rows.routes_T is None else rows.routes_T[kept],
        places_S=places_S,
    ).to(device)


def _with_media(rows: Sequences) -> list[tuple[int, Sequence[MediaHandle]]]:
    """Collect each row's length and images."""
    return list(zip(rows.num_tokens_B().tolist(), rows.media or [()] * len(rows), strict=True))


def _wanted(wanted_T: Tensor, rows: Sequences) -> tuple[Tensor, Tensor, Tensor]:
    """Places of the wanted response tokens: number among all, row, and number in the row; int64 [N] each."""
    chosen_N, length_B = wanted_T.nonzero().flatten(), rows.response_length_B
    row_N = on_rows(torch.arange(len(rows)), length_B)[chosen_N]
    return chosen_N, row_N, chosen_N - (length_B.cumsum(0) - length_B)[row_N]


def _segments(path_S: Sequence[Tensor], shared_S: Sequence[int], holder_S: Sequence[int]) -> Segments:
    lengths, device = [len(path) for path in path_S], path_S[0].device
    if not any(shared_S):
        return Segments(lengths, device)
    asks = [
        s for s, shared in enumerate(shared_S) if shared < lengths[s]
    ]  # others have nothing of their own to compute
    number = {s: i for i, s in enumerate(asks)}
    path_S, shared_S, lengths = ([of_rows[s] for s in asks] for of_rows in (path_S, shared_S, lengths))
    own_lengths = [length - shared for length, shared in zip(lengths, shared_S, strict=True)]
    holders = [number[holder_S[s]] for s in asks]
    layout = path_layout(path_S, shared_S)
    return Segments(lengths, device, own_lengths=own_lengths, layout=layout, holders=holders)


def pad(
    batch: Sequences, wanted_T: Tensor, device: torch.device, *, vision: VisionProcessor | None = None
) -> ModelInput:
    """Put each row into a row of its own, right padded with token 0. Routes of padding are unknown."""
    _check_prompts(batch)
    length_B = batch.num_tokens_B()
    tokens, position = _real_tokens(batch)
    input_ids = torch.nn.utils.rnn.pad_sequence(tokens.split(length_B.tolist()), batch_first=True)
    width = input_ids.shape[1]
    position_ids, images = torch.arange(width).expand_as(input_ids), None
    attention_mask = (position_ids < length_B[:, None]).long()
    if vision is not None:
        axes, features, media = vision.together(_with_media(batch))
        axes_3BL = torch.stack([torch.nn.functional.pad(axis, (0, width - axis.shape[1])) for axis in axes], dim=1)
        position_ids = torch.cat([position_ids[None], axes_3BL])
        feature_ids = torch.nn.utils.rnn.pad_sequence(features, batch_first=True, padding_value=-1)
        images = vision.load(feature_ids, media, device)
    chosen_N, row_N, column_N = _wanted(wanted_T, batch)
    places_S, routes = on_rows(torch.arange(len(batch)) * width, length_B) + position, None
    if batch.routes_T is not None:
        shape, fill = (input_ids.numel(), *batch.routes_T.shape[1:]), unknown(batch.routes_T.dtype)
        routes = batch.routes_T.new_full(shape, fill).index_copy(0, places_S, batch.routes_T)
    return ModelInput(
        input_ids=input_ids,
        position_ids=position_ids,
        attention_mask=attention_mask,
        segments=None,
        select_N=row_N * width + batch.prompt_length_B[row_N] - 1 + column_N,
        targets_N=batch.response_ids_T[chosen_N].long(),
        out_N=chosen_N,
        num_out=len(wanted_T),
        images=images,
        routes=routes,
        places_S=places_S,
    ).to(device)


def placeholder(device: torch.device, *, packed: bool, vision: VisionProcessor | None = None) -> ModelInput:
    """Make a micro-batch of one token, for a rank that has no rows left but must take part in the collectives."""
    zero = torch.zeros(1, 1, dtype=torch.int64, device=device)
    return ModelInput(
        input_ids=zero,
        position_ids=zero if vision is None else zero.expand(4, 1, 1),
        attention_mask=None if packed else torch.ones_like(zero),
        segments=Segments([1], device) if packed else None,
        select_N=zero[0],
        targets_N=zero[0],
        out_N=zero[0],
        num_out=1,
        images=None if vision is None else vision.load(zero - 1, (), device),
    )


def take_slice(whole: ModelInput, parallel: SequenceRanks) -> ModelInput:
    """Cut the tokens of this rank out of a packed input, which is filled up with a segment of padding at its end.

    Targets were taken before, so a token whose successor is on another rank keeps its own; positions are those in the
    whole. Cut it on the CPU: on a device the host would wait for the number of answers.
    """
    assert whole.segments is not None
    filling = -whole.input_ids.shape[1] % parallel.unit
    total = whole.input_ids.shape[1] + filling
    mine = parallel.places(total)
    here = torch.full((total,), -1).index_copy(0, mine, torch.arange(len(mine)))  # place on this rank; -1: elsewhere
    mine_N = here[whole.select_N] >= 0
    routes, places_S = whole.routes, whole.places_S
    if routes is not None:
        routes = torch.cat([routes, routes.new_full((filling, *routes.shape[1:]), unknown(routes.dtype))])[mine]
    if places_S is not None:
        places_S = torch.where(places_S >= 0, here[places_S], -1)
    return ModelInput(
        input_ids=torch.nn.functional.pad(whole.input_ids, (0, filling))[:, mine],
        position_ids=torch.nn.functional.pad(whole.position_ids, (0, filling))[:, mine],
        attention_mask=None,
        segments=whole.segments.sliced(parallel, filling),
        select_N=here[whole.select_N[mine_N]],
        targets_N=whole.targets_N[mine_N],
        out_N=whole.out_N[mine_N],
        num_out=whole.num_out,
        routes=routes,
        places_S=places_S,
    )


def _real_tokens(rows: Sequences) -> tuple[Tensor, Tensor]:
    """Collect all tokens without padding, row after row (int64 [total]), and each one's position in its row."""
    prompts = rows.prompt_ids_T.split(rows.prompt_length_B.tolist())
    responses = rows.response_ids_T.split(rows.response_length_B.tolist())
    ids = torch.cat([part for pair in zip(prompts, responses, strict=True) for part in pair]).long()
    length_B = rows.num_tokens_B()
    return ids, torch.arange(len(ids)) - on_rows(length_B.cumsum(0) - length_B, length_B)


def _check_prompts(batch: Sequences) -> None:
    if len(batch) == 0 or int(batch.prompt_length_B.min()) < 1:
        raise ValueError("every sequence needs a prompt token: the first response token is predicted from it")
