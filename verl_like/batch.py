"""The data that moves through a training step: one frozen struct per stage.

    Prompt -> Rollouts -> Scores -> Evaluated -> Experience

Letters in names give the axes: B sequences, P padded prompt, R padded response. A prompt is left padded to [B, P], a
response right padded to [B, R]; R is the longest response present, never a configured maximum. Every struct is a
`TensorStruct`: `select`, `split`, `concat`, `trim`, `to` act on all its fields at once, so that no field can be
reordered alone. Pickling a struct sends real tokens only: padding is cut off and rebuilt on arrival.

Nothing downstream changes an upstream object. An optional field means "this run does not have it" (no critic, no
reference), never "not computed yet": that is another stage.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import torch
from torch import Tensor

from verl_like.ragged import Side, flat_rows, pad_to_width, padded_rows, plain, revived

_RIGHT: Side = "right"  # [B, R]: row i holds response_length_B[i] real entries, then padding
_LEFT: Side = "left"  # [B, P]: row i holds padding, then prompt_length_B[i] real entries
_LENGTH_FIELD: dict[Side, str] = {_RIGHT: "response_length_B", _LEFT: "prompt_length_B"}


def _padded(side: Side, fill: float = 0, **kwargs: Any) -> Any:
    return dataclasses.field(metadata={"padded": side, "fill": fill}, **kwargs)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorStruct:
    """Base of all stages. Each field is a tensor [B, ...], a list of B Python objects, or None."""

    def __len__(self) -> int:
        for value in self.columns().values():
            return len(value)
        raise ValueError(f"{type(self).__name__} holds no column, so it has no length")

    def columns(self) -> dict[str, Tensor | list[Any]]:
        """The fields that are present, by name."""
        named = ((f.name, getattr(self, f.name)) for f in dataclasses.fields(self))
        return {name: value for name, value in named if value is not None}

    def check(self) -> None:
        """Raise ValueError unless all columns have the same number of rows and padded ones the same width."""
        rows = {name: len(value) for name, value in self.columns().items()}
        if len(set(rows.values())) > 1:
            raise ValueError(f"{type(self).__name__}: columns differ in length: {rows}")
        for side in (_RIGHT, _LEFT):
            widths = {name: getattr(self, name).shape[1] for name in self._padded_names(side)}
            if len(set(widths.values())) > 1:
                raise ValueError(f"{type(self).__name__}: {side}-padded columns differ in width: {widths}")

    def replace(self, **changes: Any) -> Self:
        """A copy with some fields exchanged."""
        return dataclasses.replace(self, **changes)

    def select(self, index: Tensor | Sequence[int]) -> Self:
        """Rows by position (a boolean mask [B] or integers), in the order given; all of them: the struct itself."""
        positions = torch.as_tensor(index)
        if positions.dtype == torch.bool:
            positions = positions.nonzero().flatten()
        positions = positions.long()
        chosen = positions.tolist()
        if chosen == list(range(len(self))):
            return self
        return self._map(lambda t: t[positions.to(t.device)], lambda items: [items[i] for i in chosen])

    def split(self, sizes: Sequence[int]) -> list[Self]:
        """Consecutive pieces of the given sizes, which must add up to the number of rows."""
        if sum(sizes) != len(self):
            raise ValueError(f"split sizes {list(sizes)} add up to {sum(sizes)}, but there are {len(self)} rows")
        pieces, start = [], 0
        for size in sizes:
            pieces.append(self.select(range(start, start + size)))
            start += size
        return pieces

    @classmethod
    def concat(cls, parts: Sequence[Self]) -> Self:
        """Rows of all parts one after the other; padded columns are widened to the widest part."""
        if not parts:
            raise ValueError(f"cannot concatenate zero {cls.__name__}")
        joined: dict[str, Any] = {}
        for f in dataclasses.fields(cls):
            values = [getattr(part, f.name) for part in parts]
            missing = [value is None for value in values]
            if any(missing) and not all(missing):
                raise ValueError(f"{cls.__name__}.{f.name} is present in some parts and missing in others")
            joined[f.name] = None if all(missing) else _concat_column(values, f.metadata)
        return cls(**joined)

    def trim(self) -> Self:
        """Cut padding that no row needs any more (after `select`)."""
        return self._narrowed(slice(None)) if len(self) else self

    def share(self, index: Sequence[int]) -> Self:
        """`select` and `trim` in one: padding that these rows do not need is not copied first."""
        return self._narrowed(torch.tensor(index)).select(index) if len(index) else self.select(index)

    def _narrowed(self, rows: Tensor | slice) -> Self:
        """All rows, as wide as these need."""
        changes: dict[str, Any] = {}
        for side, lengths in _LENGTH_FIELD.items():
            names = self._padded_names(side)
            if names:
                width = int(getattr(self, lengths)[rows].max())
                cut = (lambda t, w=width: t[:, :w]) if side == _RIGHT else (lambda t, w=width: t[:, t.shape[1] - w :])
                changes |= {name: cut(getattr(self, name)) for name in names}
        return self.replace(**changes)

    def to(self, device: torch.device | str) -> Self:
        """A copy with every tensor on `device`."""
        return self._map(lambda t: t.to(device, non_blocking=True), lambda items: items)

    def _padded_names(self, side: Side) -> list[str]:
        return [
            f.name
            for f in dataclasses.fields(self)
            if f.metadata.get("padded") == side and getattr(self, f.name) is not None
        ]

    def _map(self, on_tensor: Any, on_list: Any) -> Self:
        changes = {
            name: on_tensor(value) if isinstance(value, Tensor) else on_list(value)
            for name, value in self.columns().items()
        }
        return self.replace(**changes)

    def __reduce__(self) -> tuple[Any, ...]:
        state: dict[str, Any] = {}
        for f in dataclasses.fields(self):
            value, side = getattr(self, f.name), f.metadata.get("padded")
            if value is not None and side is not None:
                lengths = getattr(self, _LENGTH_FIELD[side]).tolist()
                state[f.name] = (plain(flat_rows(value, lengths, side)), value.shape[1])
            else:
                state[f.name] = plain(value) if isinstance(value, Tensor) else value
        return _rebuild, (type(self), state)


def _real_mask(length_B: Tensor, width: int, side: Side) -> Tensor:
    """[B, width] bool, true where a padded column holds a real entry."""
    position = torch.arange(width, device=length_B.device)
    if side == _RIGHT:
        return position[None, :] < length_B[:, None]
    return position[None, :] >= (width - length_B)[:, None]


def _rebuild(cls: type[TensorStruct], state: dict[str, Any]) -> TensorStruct:
    """Inverse of `TensorStruct.__reduce__`: put the padding back."""
    fields: dict[str, Any] = {}
    for f in dataclasses.fields(cls):
        value, side = state[f.name], f.metadata.get("padded")
        if value is not None and side is not None:
            lengths = revived(state[_LENGTH_FIELD[side]]).tolist()
            fields[f.name] = padded_rows(revived(value[0]), lengths, value[1], side, f.metadata["fill"])
        else:
            fields[f.name] = revived(value)
    return cls(**fields)


def _concat_column(values: list[Any], metadata: Any) -> Any:
    if not isinstance(values[0], Tensor):
        return [item for items in values for item in items]
    side = metadata.get("padded")
    if side is None:
        return torch.cat(values)
    width = max(value.shape[1] for value in values)
    return torch.cat([pad_to_width(value, width, side, metadata["fill"]) for value in values])


def pad_rows(rows: Iterable[Sequence[float] | Tensor], *, side: Side, dtype: torch.dtype, fill: float = 0) -> Tensor:
    """Stack sequences of different lengths into [B, longest], padded with `fill` on `side` ("left" or "right")."""
    tensors = [torch.as_tensor(row, dtype=dtype) for row in rows]
    return pad_values(torch.cat(tensors), [len(row) for row in tensors], side=side, fill=fill)


def pad_values(values_T: Tensor, lengths: Sequence[int], *, side: Side, fill: float = 0) -> Tensor:
    """The same for rows that lie one behind the other: [T], of which row b has `lengths[b]`, as [B, longest]."""
    return padded_rows(values_T, lengths, max(lengths), side, fill)


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaHandle:
    """Where an image or video of a row lies; `verl_like.data.media.load` reads it."""

    kind: str  # "image" or "video"
    path: str  # of the data file
    column: str
    row: int  # in that file
    number: int  # in the cell's list


def _unpadded_left(ids_BP: Tensor, length_B: Tensor) -> list[list[int]]:
    width = ids_BP.shape[1]
    return [ids[width - n :].tolist() for ids, n in zip(ids_BP, length_B.tolist(), strict=True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRow:
    """What a dataset row says beyond its tokens. Fields are those of verl's parquet schema.

    Example: PromptRow(index=7, data_source="openai/gsm8k", ability="math", ground_truth="72",
    messages=[{"role": "user", "content": "Natalia sold ..."}], extra_info={"split": "train", "index": 7})
    """

    index: int  # position in the dataset before shuffling
    data_source: str  # picks the grader and names the validation metrics
    messages: list[dict[str, Any]]  # the prompt before the chat template
    ground_truth: Any = None
    ability: str = ""
    extra_info: dict[str, Any] = dataclasses.field(default_factory=dict)
    style: str = ""  # reward_model.style: "rule", "model", or the name of a built-in grader
    prompt_id: str | None = None  # data.prompt_id_key
    validation_set: str = ""  # its name where data.val_files is a dictionary
    tools: list[dict[str, Any]] | None = None  # schemas that the prompt offers (data.tools_key, rollout.multi_turn)
    agent: str = ""  # the column agent_name
    media: list[MediaHandle] = dataclasses.field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One prompt that was drawn, to be answered by a group of responses."""

    ids: list[int]  # tokens
    row: PromptRow
    group: int  # the draw's running number, unique within a run, the same after a resume
    position: int  # in the data set


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequences(TensorStruct):
    """Prompts with a response each: what a forward pass of a training engine needs."""

    prompt_ids_BP: Tensor = _padded(_LEFT)  # int32
    prompt_length_B: Tensor  # int64
    response_ids_BR: Tensor = _padded(_RIGHT)  # int32: all tokens after the prompt, tool text included
    response_length_B: Tensor  # int64
    response_mask_BR: Tensor = _padded(_RIGHT)  # bool: true only for tokens that the policy sampled

    def num_tokens_B(self) -> Tensor:
        """Prompt plus response tokens of each row, int64 [B]: the cost that balancing and budgets count."""
        return self.prompt_length_B + self.response_length_B

    def prompt_lists(self) -> list[list[int]]:
        """The prompts as Python lists, without padding."""
        return _unpadded_left(self.prompt_ids_BP, self.prompt_length_B)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollouts(Sequences):
    """Sampled responses: B = prompts x n rows. Log-probs are those of the distribution that was sampled from."""

    group_B: Tensor  # int64: rows with the same number answer the same prompt of the data
    # int64: rows with the same number are parts of one episode whose history was rewritten, in the order in which they
    # were sampled; all have its reward. Unique within a run, as group_B. None: every row is an episode. See `Episodes`.
    episode_B: Tensor | None = None
    rollout_log_probs_BR: Tensor | None = _padded(_RIGHT, default=None)  # float32, 0 outside response_mask
    weight_version_BR: Tensor = _padded(_RIGHT)  # int32: version of the weights that sampled each token
    finish_reasons: list[str]  # "stop" (end token), "length" (response budget used up) or "abort"
    rows: list[PromptRow]
    # Multi-turn only. A turn is what the policy sampled between two observations; it is counted in the whole episode.
    step_BR: Tensor | None = _padded(_RIGHT, fill=-1, default=None)  # int32: turn of a sampled token, 0, 1, 2 ...; -1
    anchor_BR: Tensor | None = _padded(_RIGHT, fill=-1, default=None)  # int64: id of the state before the turn
    step_rewards_BR: Tensor | None = _padded(_RIGHT, default=None)  # float32: the environment's, on a turn's end


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardFailure:
    """One row whose reward could not be computed. It is reported and left out of training, never scored 0."""

    row: int  # position in the batch
    data_source: str
    kind: str  # "exception", "timeout", "crash" or "bad_value"
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores(TensorStruct):
    """One reward per response. Where valid_B is false the score is NaN and the row must not be trained on."""

    score_B: Tensor  # float32
    valid_B: Tensor  # bool
    extras: list[dict[str, Any]]  # further values of the reward function, per row ("acc", "pred" ...)
    failures: list[RewardFailure | None]
    baseline_B: Tensor | None = None  # float32: reward of the greedy response to the row's prompt (remax)
    seconds_B: Tensor | None = None  # float32: how long grading took, where that is known
    trained_B: Tensor | None = None  # bool: false where a row stays in the batch, but no token of it is trained on


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated(TensorStruct):
    """What the trained models say about the rollouts, before any update. Only what the run needs is present."""

    response_length_B: Tensor  # int64
    old_log_probs_BR: Tensor | None = _padded(_RIGHT, default=None)
    entropy_BR: Tensor | None = _padded(_RIGHT, default=None)
    sum_pi_squared_BR: Tensor | None = _padded(_RIGHT, default=None)  # over the vocabulary, of squared probabilities
    ref_log_probs_BR: Tensor | None = _padded(_RIGHT, default=None)
    full_kl_BR: Tensor | None = _padded(_RIGHT, default=None)  # KL to the reference over the whole vocabulary
    values_BR: Tensor | None = _padded(_RIGHT, default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Experience(Sequences):
    """What an update needs. old_log_probs_BR is None when the update detaches its own (one update per batch);
    rollout_log_probs_BR is there when the update is the first to see the trainer's log-probs next to them."""

    group_B: Tensor
    episode_B: Tensor | None = None  # int64: as in Rollouts
    episode_tokens_B: Tensor | None = None  # int64: trained tokens of the row's episode, in all its rows
    advantages_BR: Tensor = _padded(_RIGHT)
    returns_BR: Tensor | None = _padded(_RIGHT, default=None)
    old_log_probs_BR: Tensor | None = _padded(_RIGHT, default=None)
    ref_log_probs_BR: Tensor | None = _padded(_RIGHT, default=None)
    rollout_log_probs_BR: Tensor | None = _padded(_RIGHT, default=None)
    rollout_is_weights_BR: Tensor | None = _padded(_RIGHT, default=None)  # constants on the policy loss
    values_BR: Tensor | None = _padded(_RIGHT, default=None)
    selected_BR: Tensor | None = _padded(_RIGHT, default=None)  # bool: tokens chosen over the mini-batch (clip_cov ...)
    score_B: Tensor | None = None  # float32: as graded
    truncated_B: Tensor | None = None  # bool: the response hit its length limit
    difficulty_B: Tensor | None = None  # float32: of the dataset row
    sample_weight_B: Tensor | None = None  # float32: weight of the row in the policy loss


Struct = TypeVar("Struct", bound=TensorStruct)


@dataclass(frozen=True, slots=True, kw_only=True)
class Episodes:
    """Which rows are parts of one episode, so that whatever counts responses counts an episode once.

    `join` gives one row per episode, its rows' responses one after the other, on which all statistics of responses are
    taken as if the history had never been rewritten; `of_rows` and `cut` give results back to the rows. Episodes are in
    order of their first rows. Where every row is an episode, methods return what they are given. Letter: E episodes.

    Example: a, b are rows of episode 4, c of 9, in the order a, c, b: join gives [a b], [c].
    """

    length_B: Tensor  # int64: response tokens of each row
    number_B: Tensor | None = None  # int64: which of the E episodes the row is in; None: each row is one

    @classmethod
    def of(cls, rows: Rollouts | Experience) -> Episodes:
        """The episodes of these rows. ValueError where one has rows in several groups."""
        if rows.episode_B is None:
            return cls(length_B=rows.response_length_B)
        names, known = rows.episode_B.tolist(), dict[int, int]()
        number_B = torch.tensor([known.setdefault(name, len(known)) for name in names], dtype=torch.int64)
        group_of: dict[int, int] = {}
        for name, group in zip(names, rows.group_B.tolist(), strict=True):
            if group_of.setdefault(name, group) != group:
                raise ValueError(f"episode {name} has rows in the groups {group_of[name]} and {group}: it can have one")
        return cls(length_B=rows.response_length_B, number_B=number_B)

    def __len__(self) -> int:
        """E."""
        return len(self.length_B) if self.number_B is None else len(self.number_B.unique())

    def rows(self) -> list[Tensor]:
        """Positions (int64) of each episode's rows, in their order."""
        if self.number_B is None:
            return list(torch.arange(len(self.length_B)).split(1))
        return list(torch.argsort(self.number_B, stable=True).split(torch.bincount(self.number_B).tolist()))

    def once(self, values_B: Tensor) -> Tensor:
        """The first row's value of each episode: [E]."""
        return values_B if self.number_B is None else values_B[[int(rows[0]) for rows in self.rows()]]

    def of_rows(self, values_E: Tensor) -> Tensor:
        """Its episode's value for each row: [B]."""
        return values_E if self.number_B is None else values_E[self.number_B]

    def sums(self, values_B: Tensor) -> Tensor:
        """Sum over the rows of each episode: [E]."""
        if self.number_B is None:
            return values_B
        return values_B.new_zeros(len(self)).index_add(0, self.number_B, values_B)

    def join(self, rows: Struct) -> Struct:
        """One row per episode: response columns joined, lengths added up, the last row's finish reason, and of all
        other columns the first row's. Of scores, those of the first row that is not valid, where there is one."""
        if self.number_B is None:
            return rows
        columns: dict[str, Any] = rows.columns()
        parts = self.rows()
        chosen = [int(part[0]) for part in parts]
        if "valid_B" in columns:
            chosen = [int(part[int(columns["valid_B"][part].int().argmin())]) for part in parts]
        changes: dict[str, Any] = {
            f.name: self.join_tokens(columns[f.name], f.metadata["fill"])
            for f in dataclasses.fields(rows)
            if f.metadata.get("padded") == _RIGHT and f.name in columns
        }
        if "response_length_B" in columns:
            changes["response_length_B"] = self.sums(self.length_B)
        if "finish_reasons" in columns:
            changes["finish_reasons"] = [columns["finish_reasons"][int(part[-1])] for part in parts]
        return rows.select(chosen).replace(**changes)

    def join_tokens(self, values_BR: Tensor | None, fill: float = 0) -> Tensor | None:
        """A response column with the rows of each episode one after the other: [E, R of the longest episode]."""
        if self.number_B is None or values_BR is None:
            return values_BR
        order_B, length_E = torch.argsort(self.number_B, stable=True), self.sums(self.length_B)
        real = values_BR[order_B][_real_mask(self.length_B[order_B], values_BR.shape[1], _RIGHT)]
        inside_ER = _real_mask(length_E, int(length_E.max()) if len(length_E) else 0, _RIGHT)
        return values_BR.new_full(inside_ER.shape, fill).masked_scatter(inside_ER, real)

    def cut(self, values_ER: Tensor, width: int) -> Tensor:
        """Inverse of `join_tokens`: [B, width], 0 in the padding."""
        if self.number_B is None:
            return values_ER
        order_B, length_E = torch.argsort(self.number_B, stable=True), self.sums(self.length_B)
        inside_BR = _real_mask(self.length_B[order_B], width, _RIGHT)
        real = values_ER[_real_mask(length_E, values_ER.shape[1], _RIGHT)]
        return values_ER.new_zeros(inside_BR.shape).masked_scatter(inside_BR, real)[torch.argsort(order_B)]


def whole_episodes(rollouts: Rollouts, scores: Scores) -> tuple[Rollouts, Scores]:
    """Both with one row per episode, for whatever counts responses."""
    episodes = Episodes.of(rollouts)
    return episodes.join(rollouts), episodes.join(scores)


@dataclass(frozen=True, slots=True, kw_only=True)
class Denominators:
    """What a mini-batch's loss sums are divided by: counted over all ranks, before any backward pass."""

    num_tokens: int  # response_mask tokens of the mini-batch
    num_sequences: int  # episodes of the mini-batch: its rows, where every row is one
    max_response_length: int  # the configured constant (seq-mean-token-sum-norm divides by it)


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """A number with the rule that joins it over the micro-batches and ranks of one optimizer step.

    reduction: "mean" (weighted by `weight`), "sum", "max" or "min". A loss term that is already divided by the global
    denominator is a "sum". Over several optimizer steps "mean" and "sum" are averaged, "max" and "min" stay.
    """

    value: float
    reduction: str = "mean"
    weight: float = 1.0


def merge_metrics(parts: Iterable[dict[str, Metric]]) -> dict[str, Metric]:
    """Join metrics of micro-batches or ranks; a name may be missing in some parts."""
    by_name: dict[str, list[Metric]] = {}
    for part in parts:
        for name, metric in part.items():
            by_name.setdefault(name, []).append(metric)
    return {name: _merge(name, metrics) for name, metrics in by_name.items()}


def _merge(name: str, metrics: list[Metric]) -> Metric:
    reductions = {m.reduction for m in metrics}
    if len(reductions) > 1:
        raise ValueError(f"metric {name} is reported with different reductions: {sorted(reductions)}")
    reduction, values = reductions.pop(), [m.value for m in metrics]
    weight = sum(m.weight for m in metrics)
    if reduction == "mean":
        total = sum(m.value * m.weight for m in metrics if m.weight)
        return Metric(value=total / weight if weight else 0.0, reduction=reduction, weight=weight)
    joined = {"sum": sum, "max": max, "min": min}[reduction](values)
    return Metric(value=joined, reduction=reduction, weight=weight)
