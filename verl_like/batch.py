"""The data that moves through a training step: one frozen struct per stage.

    Prompt -> Rollouts -> Scores -> Evaluated -> Experience

Letters in names give the axes: B sequences, T tokens of all of them one after the other. `prompt_ids_T` holds every
prompt's tokens, and with them prompt_length_B[b] belong to row b; all other columns of tokens are of responses, which
response_length_B cuts; routes are of both, and routed_length_B cuts them. Nothing is padded: a struct holds, sends and
selects real tokens only.

Arithmetic over positions needs rectangles. Every column `name_T` can be read as `name_BR` (responses, right padded to
the longest) or `name_BP` (prompts, left padded), and a struct can be made from such columns too; both are made on the
spot. What works on a whole batch uses `name_T`, or pads blocks of rows (ragged.Blocks).

Every struct is a `TensorStruct`: `select`, `split`, `concat`, `to` act on all its fields at once, so that no field can
be reordered alone. Nothing downstream changes an upstream object. An optional field means "this run does not have it"
(no critic, no reference), never "not computed yet": that is another stage.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self, TypeVar

import torch
from torch import Tensor

from verl_like.flat_columns import Side, bounds, flat_rows, padded_rows, places, plain, revived, take_rows

_PROMPTS, _RESPONSES, _BOTH = "prompt_length_B", "response_length_B", "routed_length_B"
_ENDINGS = {_PROMPTS: "_BP", _RESPONSES: "_BR", _BOTH: "_BS"}
_TOO_LARGE = 3.4028235677973366e38  # from here on a 32-bit float is infinite
_SIDES: dict[str, Side] = {_PROMPTS: "left", _RESPONSES: "right", _BOTH: "right"}


def tokens(length: str = _RESPONSES, fill: float = 0, **kwargs: Any) -> Any:
    """Declare a field that is a column [T], whose rows have the lengths of another field.

    fill: value in its padded form.
    """
    return dataclasses.field(metadata={"length": length, "fill": fill}, **kwargs)


def beside(**kwargs: Any) -> Any:
    """Declare a field that is no column: a dictionary."""
    return dataclasses.field(metadata={"beside": True}, **kwargs)


class _Struct(type):
    """Lets a struct be made from padded columns: `name_BR` or `name_BP` in place of `name_T`."""

    def __call__(cls, **columns: Any) -> Any:
        return super().__call__(**_flattened(cls, columns, {}))


class TensorStruct(metaclass=_Struct):
    """Base of all stages. Each field is a tensor [B, ...], a column of tokens [T], a list of B objects, or None."""

    __slots__ = ("_forms",)  # padded forms that were asked for: see `with_forms`
    without_lengths: ClassVar[bool] = False
    """Whether padded columns may come without lengths: all rows are as long as these are wide."""

    def __len__(self) -> int:
        for name, value in self.columns().items():
            if name not in _token_fields(type(self)):
                return len(value)
        raise ValueError(f"{type(self).__name__} holds no column, so it has no length")

    def __getattr__(self, name: str) -> Any:
        """The padded form of a column of tokens, [B, longest]; None where the column is."""
        column = f"{name[:-3]}_T"
        field = _token_fields(type(self)).get(column)
        if field is None or name[-3:] != _ENDINGS[field.metadata["length"]]:
            raise AttributeError(f"{type(self).__name__} has no {name!r}")
        value = getattr(self, column)
        return None if value is None else self.padded(value, field.metadata["length"], field.metadata["fill"])

    def columns(self) -> dict[str, Any]:
        """The fields that are present, by name: tensors and lists."""
        fields = (f for f in dataclasses.fields(self) if "beside" not in f.metadata)  # type: ignore[arg-type]
        return {f.name: value for f in fields if (value := getattr(self, f.name)) is not None}

    def check(self) -> None:
        """Raise ValueError unless all columns have the same number of rows, and of tokens as many as lengths say."""
        columns, fields = self.columns(), _token_fields(type(self))
        rows = {name: len(value) for name, value in columns.items() if name not in fields}
        if len(set(rows.values())) > 1:
            raise ValueError(f"{type(self).__name__}: columns differ in length: {rows}")
        for length in _ENDINGS:
            of_length = [name for name, field in fields.items() if field.metadata["length"] == length]
            held = {name: len(columns[name]) for name in of_length if name in columns}
            total = int(getattr(self, length).sum()) if held else 0
            if held and set(held.values()) != {total}:
                raise ValueError(f"{type(self).__name__}: {length} adds up to {total}, but there are {held} tokens")

    def replace(self, **changes: Any) -> Self:
        """A copy with some fields exchanged. Raises ValueError for lengths without the tokens that they cut."""
        current = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}  # type: ignore[arg-type]
        changes = _flattened(type(self), changes, current)
        for name, field in _token_fields(type(self)).items():
            if field.metadata["length"] in changes and current[name] is not None and name not in changes:
                raise ValueError(f"{type(self).__name__}: {field.metadata['length']} is exchanged, but {name} is not")
        return type(self)(**current | changes)

    def select(self, index: Tensor | Sequence[int]) -> Self:
        """Rows by position (a boolean mask [B] or integers), in the order given; all of them: the struct itself."""
        positions = torch.as_tensor(index)
        if positions.dtype == torch.bool:
            positions = positions.nonzero().flatten()
        positions = positions.long()
        positions = torch.where(positions < 0, positions + len(self), positions)
        chosen = positions.tolist()
        if chosen == list(range(len(self))):
            return self
        fields, changes, ends = _token_fields(type(self)), dict[str, Any](), dict[str, list[int]]()
        for name, value in self.columns().items():
            if isinstance(value, Tensor) and name in fields:
                length = fields[name].metadata["length"]
                if length not in ends:
                    ends[length] = bounds(getattr(self, length))
                changes[name] = take_rows(value, getattr(self, length), chosen, ends[length])
            elif isinstance(value, Tensor):
                changes[name] = value[positions.to(value.device)]
            else:
                changes[name] = [value[i] for i in chosen]
        return self.replace(**changes)

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
        """Rows of all parts one after the other."""
        if not parts:
            raise ValueError(f"cannot concatenate zero {cls.__name__}")
        joined: dict[str, Any] = {}
        for f in dataclasses.fields(cls):  # type: ignore[arg-type]
            values = [getattr(part, f.name) for part in parts]
            missing = [value is None for value in values]
            if any(missing) and not all(missing):
                raise ValueError(f"{cls.__name__}.{f.name} is present in some parts and missing in others")
            if all(missing) or "beside" in f.metadata:
                joined[f.name] = values[0]
            elif isinstance(values[0], Tensor):
                joined[f.name] = torch.cat(values)
            else:
                joined[f.name] = [item for items in values for item in items]
        return cls(**joined)

    def to(self, device: torch.device | str) -> Self:
        """A copy with every tensor on `device`. The host waits for what comes to it, and not for what goes."""
        ahead, tensors = torch.device(device).type != "cpu", self.columns().items()
        return self.replace(**{n: v.to(device, non_blocking=ahead) for n, v in tensors if isinstance(v, Tensor)})

    def with_forms(self, device: torch.device | str | None = None) -> Self:
        """A copy, on `device` where one is given, that keeps the padded form of each column from when it is first asked
        for: a micro-batch's, whose loss asks often. Of a whole batch they would be most of the memory."""
        copy = self.replace() if device is None else self.to(device)
        lengths = {name: value for name in _ENDINGS if (value := getattr(self, name, None)) is not None}
        widths = {(name, "width"): int(value.max()) if len(value) else 0 for name, value in lengths.items()}
        object.__setattr__(copy, "_forms", widths)  # of the lengths here: a device would be waited for
        return copy

    def padded(self, values_T: Tensor, length: str = _RESPONSES, fill: float = 0) -> Tensor:
        """Values at this struct's tokens as [B, longest]: those of responses, or of prompts (length="prompt_length_B").

        Differentiable.
        """
        forms: dict[Any, Any] = self._forms if hasattr(self, "_forms") else {}
        key = (id(values_T), length, fill)
        if key in forms:
            return forms[key][1]
        length_B = getattr(self, length)
        if length not in forms:  # the same for all columns
            width = forms[length, "width"] if forms else int(length_B.max()) if len(length_B) else 0
            index = values_T.device.type != "cpu" or values_T.requires_grad
            forms[length] = width, places(length_B, width, _SIDES[length], len(values_T)) if index else None
        width, places_T = forms[length]
        padded = padded_rows(values_T, length_B, width, _SIDES[length], fill, places_T)
        forms[key] = (values_T, padded)  # held, so that its id stays its own
        return padded

    def flat(self, values_BR: Tensor) -> Tensor:
        """Inverse of `padded` for responses: the entries [T] of [B, R or more] that are tokens."""
        return flat_rows(values_BR, self.response_length_B, "right")

    def __reduce__(self) -> tuple[Any, ...]:
        named = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}  # type: ignore[arg-type]
        return _revive, (type(self), {n: plain(v) if isinstance(v, Tensor) else v for n, v in named.items()})


def _revive(cls: type[TensorStruct], columns: dict[str, Any]) -> TensorStruct:
    return cls(**{name: revived(value) for name, value in columns.items()})


def _token_fields(cls: type) -> dict[str, dataclasses.Field[Any]]:
    """The columns of tokens that a struct can have, by name."""
    if "_known_token_fields" not in cls.__dict__:
        known = {f.name: f for f in dataclasses.fields(cls) if "length" in f.metadata}  # type: ignore[arg-type]
        cls._known_token_fields = known  # type: ignore[attr-defined]
    return cls.__dict__["_known_token_fields"]


def _flattened(cls: type, columns: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    """The columns with padded ones flat. Lengths are those among them, else the known ones, or there need not be
    any (`without_lengths`). Where both are given the padded one counts (dataclasses.replace)."""
    fields, padded = _token_fields(cls), dict[str, Any]()
    for name in columns:
        field = fields.get(f"{name[:-3]}_T")
        if field is not None and name[-3:] == _ENDINGS[field.metadata["length"]]:
            padded[name] = field
    flat = {name: value for name, value in columns.items() if name not in padded}
    without = {field.metadata["length"] for field in padded.values()} - flat.keys() - known.keys()
    for name, field in padded.items():
        value, length = columns[name], field.metadata["length"]
        length_B = flat.get(length, known.get(length))
        if value is not None and length_B is None:
            if not cls.without_lengths:  # type: ignore[attr-defined]
                raise TypeError(f"{cls.__name__}: {name} needs {length}, which says what of it is padding")
            length_B = flat[length] = torch.full((len(value),), value.shape[1], dtype=torch.int64)
        size = None if length_B is None or not len(length_B) else (len(length_B), int(length_B[0]))
        if value is not None and size is not None and length in without and value.shape[:2] != size:
            raise ValueError(f"{cls.__name__}: padded columns differ: {name} is {tuple(value.shape)}")
        flat[field.name] = None if value is None else flat_rows(value, length_B, _SIDES[length])
    return flat


def pad_rows(rows: Iterable[Sequence[float] | Tensor], *, side: Side, dtype: torch.dtype, fill: float = 0) -> Tensor:
    """Stack sequences of different lengths into [B, longest], padded with `fill` on `side` ("left" or "right")."""
    tensors = [torch.as_tensor(row, dtype=dtype) for row in rows]
    length_B = torch.tensor([len(row) for row in tensors])
    return padded_rows(torch.cat(tensors), length_B, int(length_B.max()), side, fill)


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaHandle:
    """Location of an image or video of a row: in its file, and among a prompt's tokens.

    models/images.py and videos.py open the file.
    """

    kind: str  # "image" or "video"
    path: str  # of the data file
    column: str
    row: int  # in that file
    number: int  # in the cell's list
    source: str | dict[str, Any] | list[Any] = ""  # the item itself where it is not in a parquet file: a path or URL
    grid: tuple[int, int, int] = (0, 0, 0)  # patches: time, height, width
    starts: tuple[int, ...] = ()  # the first of its tokens in the row; one for each time where text stands between them
    seconds: float = 1.0  # of a video: from one time to the next, where the model's positions count them

    def __post_init__(self) -> None:  # lists, where it was written as JSON
        object.__setattr__(self, "grid", tuple(self.grid))
        object.__setattr__(self, "starts", tuple(self.starts))

    @property
    def image(self) -> tuple[str, str, int, int, str]:
        """Key that is equal for the same image, wherever it stands."""
        return self.path, self.column, self.row, self.number, str(self.source)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRow:
    """Content of a dataset row beyond its tokens. Fields are those of verl's parquet schema.

    Example: PromptRow(index=7, data_source="openai/gsm8k", ability="math", ground_truth="72",
    messages=[{"role": "user", "content": "Natalia sold ..."}], extra_info={"split": "train", "index": 7})
    """

    index: int  # position in the dataset before shuffling
    data_source: str  # picks the grader and names the validation metrics
    messages: list[dict[str, Any]]  # the prompt before the chat template
    begun: str = ""  # the answer as far as the prompt has it: of a last message that is the assistant's
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
    problem: str = ""  # why it cannot be answered: its episodes are lost


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequences(TensorStruct):
    """Prompts with a response each: what a forward pass of a training engine needs."""

    prompt_ids_T: Tensor = tokens(_PROMPTS)  # int32
    prompt_length_B: Tensor  # int64
    response_ids_T: Tensor = tokens()  # int32: all tokens after the prompt, tool text included
    response_length_B: Tensor  # int64
    response_mask_T: Tensor = tokens()  # bool: true only for tokens that the policy sampled
    media: list[list[MediaHandle]] | None = None  # images of each row, in order; None: no row has any
    # Experts of each token of prompt and response: [tokens, layers, k], models/routes.py has their type
    routes_T: Tensor | None = tokens(_BOTH, default=None)
    routed_length_B: Tensor | None = None  # int64: num_tokens_B, where there are routes

    def with_routes(self, other: Sequences | Evaluated | None) -> Self:
        """A copy with the routes of `other`, or without any."""
        taken = (None, None) if other is None else (other.routes_T, other.routed_length_B)
        return self.replace(routes_T=taken[0], routed_length_B=taken[1])

    def num_tokens_B(self) -> Tensor:
        """Prompt plus response tokens of each row, int64 [B]: the cost that balancing and budgets count."""
        return self.prompt_length_B + self.response_length_B

    def prompt_lists(self) -> list[list[int]]:
        """The prompts as Python lists."""
        return [ids.tolist() for ids in self.prompt_ids_T.split(self.prompt_length_B.tolist())]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollouts(Sequences):
    """Sampled responses: B = prompts x n rows. Log-probs are those of the distribution that was sampled from."""

    group_B: Tensor  # int64: rows with the same number answer the same prompt of the data
    # int64: rows with the same number are parts of one episode whose history was rewritten, in the order in which they
    # were sampled; all have its reward. Unique within a run, as group_B. None: every row is an episode. See `Episodes`.
    episode_B: Tensor | None = None
    rollout_log_probs_T: Tensor | None = tokens(default=None)  # float32, 0 outside response_mask
    weight_version_T: Tensor = tokens()  # int32: version of the weights that sampled each token
    finish_reasons: list[str]  # "stop" (end token), "length" (response budget used up) or "abort"
    rows: list[PromptRow]
    episode_names: list[str] | None = None  # as in logs and samples: train-17-0
    # Multi-turn only. A turn is what the policy sampled between two observations; it is counted in the whole episode.
    step_T: Tensor | None = tokens(fill=-1, default=None)  # int32: turn of a sampled token, 0, 1, 2 ...; -1
    anchor_T: Tensor | None = tokens(fill=-1, default=None)  # int64: id of the state before the turn
    step_rewards_T: Tensor | None = tokens(default=None)  # float32: the environment's, on a turn's end

    @property
    def cut_off_B(self) -> Tensor:
        """Mark the responses that a length ended: bool, by their finish reasons, which alone know it."""
        return torch.tensor([reason == "length" for reason in self.finish_reasons], dtype=torch.bool)


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
    outcomes: list[str] | None = None  # how each episode ended (docs/outcomes.md); None: nobody has said so


def usable_number(value: Any) -> float | None:
    """Convert a boolean or one number, finite also as the 32-bit float of training, to a float; None for all else."""
    number = value if isinstance(value, int) else scalar(value)  # an int may be too large for a float
    return float(number) if number is not None and abs(number) < _TOO_LARGE else None


def scalar(value: Any) -> float | None:
    """Convert one number (Python, numpy or a one-element tensor) to a float; None for all else."""
    if isinstance(value, bool | int | float):
        return float(value)
    if isinstance(value, Tensor):
        return float(value) if value.numel() == 1 else None
    # numpy scalars and 0-d arrays, without importing numpy for them
    if type(value).__module__ == "numpy" and value.shape == () and value.dtype.kind in "biuf":
        return float(value)
    return None


def numeric_extras(extra: Mapping[str, Any]) -> dict[str, float]:
    """The usable numbers (booleans as 0/1) among the further values of a reward function.

    Left out: "score", the reward itself, which has its own metrics, and "pred", an answer, whose mean says nothing.
    """
    numbers = {key: usable_number(value) for key, value in extra.items() if key not in ("score", "pred")}
    return {key: number for key, number in numbers.items() if number is not None}


def unusable_extras(extras: Sequence[Mapping[str, Any]]) -> dict[str, list[int]]:
    """List, for each number of a reward function that some rows lack, the rows whose value is no usable number."""
    numbers = {key for e in extras for key, v in e.items() if isinstance(v, int) or scalar(v) is not None}
    keys = numbers - {"score", "pred"}
    rows = {key: [i for i, e in enumerate(extras) if key in e and usable_number(e[key]) is None] for key in keys}
    return {key: found for key, found in sorted(rows.items()) if found}


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated(TensorStruct):
    """Results of the trained models on the rollouts, before any update. Only columns that the run needs are present."""

    response_length_B: Tensor  # int64
    old_log_probs_T: Tensor | None = tokens(default=None)
    entropy_T: Tensor | None = tokens(default=None)
    sum_pi_squared_T: Tensor | None = tokens(default=None)  # over the vocabulary, of squared probabilities
    ref_log_probs_T: Tensor | None = tokens(default=None)
    full_kl_T: Tensor | None = tokens(default=None)  # KL to the reference over the whole vocabulary
    values_T: Tensor | None = tokens(default=None)
    teacher_B: Tensor | None = None  # int64: number of the row's teacher (distillation)
    teacher_log_probs_T: Tensor | None = tokens(default=None)  # [T] of the tokens, or [T, K] of teacher_ids_T
    teacher_ids_T: Tensor | None = tokens(default=None)  # int32 [T, K]: the ids that the teacher finds likeliest
    routes_T: Tensor | None = tokens(_BOTH, default=None)  # as in Sequences: of the pass of old log-probs
    routed_length_B: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Experience(Sequences):
    """Data that an update needs.

    old_log_probs_T: None when the update detaches its own (one update per batch).
    rollout_log_probs_T: present when the update is the first to see the trainer's log-probs next to them.
    """

    group_B: Tensor
    episode_B: Tensor | None = None  # int64: as in Rollouts
    episode_tokens_B: Tensor | None = None  # int64: trained tokens of the row's episode, in all its rows
    rewards_T: Tensor | None = tokens(default=None)  # after shaping and penalty; the workers do not get them
    advantages_T: Tensor = tokens()
    returns_T: Tensor | None = tokens(default=None)
    old_log_probs_T: Tensor | None = tokens(default=None)
    ref_log_probs_T: Tensor | None = tokens(default=None)
    rollout_log_probs_T: Tensor | None = tokens(default=None)
    rollout_is_weights_T: Tensor | None = tokens(default=None)  # constants on the policy loss
    values_T: Tensor | None = tokens(default=None)
    teacher_B: Tensor | None = None  # the teacher's columns: as in Evaluated
    teacher_log_probs_T: Tensor | None = tokens(default=None)
    teacher_ids_T: Tensor | None = tokens(default=None)
    selected_T: Tensor | None = tokens(default=None)  # bool: tokens chosen over the mini-batch (clip_cov ...)
    score_B: Tensor | None = None  # float32: as graded
    truncated_B: Tensor | None = None  # bool: the response hit its length limit
    difficulty_B: Tensor | None = None  # float32: of the dataset row
    sample_weight_B: Tensor | None = None  # float32: weight of the row in the policy loss


Struct = TypeVar("Struct", bound=TensorStruct)


@dataclass(frozen=True, slots=True, kw_only=True)
class Episodes:
    """Grouping of rows into episodes, so that whatever counts responses counts an episode once.

    `join` gives one row per episode, its rows' responses one after the other, on which all statistics of responses are
    taken as if the history had never been rewritten; `of_rows` and `cut` give results back to the rows. Episodes are in
    order of their first rows. Where every row is an episode, methods return what they are given. Letter: E episodes.

    Example: a, b are rows of episode 4, c of 9, in the order a, c, b: join gives [a b], [c].
    """

    length_B: Tensor  # int64: response tokens of each row
    number_B: Tensor | None = None  # int64: which of the E episodes the row is in; None: each row is one

    @classmethod
    def of(cls, rows: Rollouts | Experience) -> Episodes:
        """The episodes of these rows. Raises ValueError where one has rows in several groups."""
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
        """Count the episodes: E."""
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
        """Repeat each episode's value for its rows: [E] to [B]."""
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
            name: self.join_tokens(columns[name])
            for name, field in _token_fields(type(rows)).items()
            if field.metadata["length"] == _RESPONSES and name in columns
        }
        if _RESPONSES in columns:
            changes[_RESPONSES] = self.sums(self.length_B)
        if "finish_reasons" in columns:
            changes["finish_reasons"] = [columns["finish_reasons"][int(part[-1])] for part in parts]
        return rows.select(chosen).replace(**changes)

    def join_tokens(self, values_T: Tensor | None) -> Tensor | None:
        """A column of response tokens with the rows of each episode one after the other."""
        if self.number_B is None or values_T is None:
            return values_T
        return take_rows(values_T, self.length_B, torch.argsort(self.number_B, stable=True).tolist())

    def cut(self, values_T: Tensor) -> Tensor:
        """Inverse of `join_tokens`."""
        if self.number_B is None:
            return values_T
        order_B = torch.argsort(self.number_B, stable=True)
        return take_rows(values_T, self.length_B[order_B], torch.argsort(order_B).tolist())


def whole_episodes(rollouts: Rollouts, scores: Scores) -> tuple[Rollouts, Scores]:
    """Join rollouts and scores to one row per episode, for whatever counts responses."""
    episodes = Episodes.of(rollouts)
    return episodes.join(rollouts), episodes.join(scores)


@dataclass(frozen=True, slots=True, kw_only=True)
class Denominators:
    """Divisors of a mini-batch's loss sums: counted over all ranks, before any backward pass."""

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
