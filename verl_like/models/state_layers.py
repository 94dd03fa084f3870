"""Layers that carry state from token to token, on packed rows: gated delta rule, Mamba, short convolutions.

Only two functions of such a layer look beyond one token, the convolution and the scan; projections, gates and norms
treat each token for itself. So these two alone are exchanged in a loaded model's mixers, and everything else of the
layer sees the packed tokens [1, T], as attention, MLP and head do.

A convolution gets the own tokens of every row behind the few inputs before them: those on its path (prefix_tree.py), or
zeros at the start of a row. For scans, rows are cut into pieces (`pieces_of`): what a set of rows begins with is one,
and the rest of each row's path goes on from the state behind it, which is computed once and branched. Where some of
them share more than that, the scan alone goes through it for each: further branchings would be calls one after the
other, each with a few short rows. A scan gets pieces of like length as the rows of one call, padded inside it: the
pieces that others go on from on the left, with zeros, which leave the empty state empty; all others on the right, where
nothing comes after. Where transformers found the kernels of flash-linear-attention, the kernel is given the pieces'
bounds instead.

Mamba 1 (jamba): its scan takes no state to begin with, so there alone every row's whole path is scanned.

Letters: T packed tokens, K tokens of all whole rows one after the other, n pieces of one call, L their longest.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from verl_like.models.token_layout import TokenLayout

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from verl_like.models.packing import Segments

_LIKE = 0.75  # of a call's longest piece: shorter ones get a call of their own. Measured on a CPU, docs/performance.md
_DELTA_CHUNK = 64  # [tokens] transformers' default; both forms of the delta rule round a row up to whole chunks
Scan = Callable[..., tuple[Tensor, Tensor | None]]  # tensors [n, L, ...], initial state -> [n, L, ...], last state


def put_in(hf: PreTrainedModel) -> int:
    """Exchange convolution and scan in all layers of the model that carry state, in place; counts the layers.

    They do so where the call of the layer has `segments`; without it they are transformers' own.
    """
    mixers = [(parent, mixer) for parent in hf.modules() for mixer in parent.children() if _names_in(type(mixer))]
    for parent, mixer in mixers:
        packed = PackedFunctions()
        mixer.forward = MethodType(_bound(type(mixer), packed), mixer)
        parent.register_forward_pre_hook(
            packed.take_segments, with_kwargs=True
        )  # called again where layers are recomputed
    return len(mixers)


def _names_in(mixer: type[nn.Module]) -> list[str]:
    """Names of the functions below that the class's forward calls, out of its module's globals."""
    forward = inspect.unwrap(mixer.forward)
    known = isinstance(forward, FunctionType) and mixer.__module__.startswith("transformers.models.")
    return [n for n in FUNCTIONS if known and n in forward.__code__.co_names and n in forward.__globals__]


def _bound(mixer: type[nn.Module], packed: PackedFunctions) -> FunctionType:
    """Copy the class's forward, with those names bound to the functions for packed rows."""
    own = inspect.unwrap(mixer.forward)
    assert isinstance(own, FunctionType)
    ours = {name: _with_usual(getattr(packed, FUNCTIONS[name]), own.__globals__[name]) for name in _names_in(mixer)}
    forward = FunctionType(own.__code__, own.__globals__ | ours, own.__name__, own.__defaults__, own.__closure__)
    forward.__kwdefaults__ = own.__kwdefaults__
    return forward


def _with_usual(ours: Callable[..., Any], usual: Callable[..., Any]) -> Callable[..., Any]:
    @torch.compiler.disable  # pieces differ from call to call
    def function(*args: Any, **kwargs: Any) -> Any:
        return ours(usual, *args, **{name: value for name, value in kwargs.items() if name != "segments"})

    return function


class PackedFunctions:
    """Functions of one mixer, as its forward calls them; the first argument is transformers' own function."""

    def __init__(self) -> None:
        self.segments: Segments | None = None

    def take_segments(self, _: nn.Module, __: Any, kwargs: dict[str, Any]) -> None:
        self.segments = kwargs.get("segments")

    def convolution(self, usual: Callable[..., Tensor], x: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """[1, channels, T] -> [1, channels, T]; weight [channels, width]."""
        if self.segments is None:
            return usual(x, weight, *args, **kwargs)
        layout, outside_K = _kept(self.segments, ("behind", weight.shape[-1] - 1), _behind_context, x.device)
        kwargs = {name: value for name, value in kwargs.items() if name != "seq_idx"}
        laid_out = layout.spread(x[0].transpose(0, 1)).masked_fill(outside_K[:, None], 0)
        output = usual(laid_out.transpose(0, 1)[None], weight, *args, **kwargs)
        return layout.collect(output[0].transpose(0, 1)).transpose(0, 1)[None]

    def delta_rule(self, usual: Callable[..., Any], *args: Tensor, g: Tensor, beta: Tensor, **kwargs: Any) -> Any:
        """query, key [1, T, heads, D], value [1, T, heads, D'], g, beta [1, T, heads] -> [1, T, heads, D'], None."""
        if self.segments is None:
            return usual(*args, g=g, beta=beta, **kwargs)
        normed = kwargs["use_qk_l2norm_in_kernel"]

        def scan(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **state: Any) -> Any:
            return usual(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=normed, **state)

        flat = _is_kernel(usual)
        plan = _kept(self.segments, ("scan", _DELTA_CHUNK, True, flat), _plan, args[0].device)
        return plan.run(scan, *args, g, beta)[None], None

    def mamba2(
        self, usual: Callable[..., Any], x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, **kwargs: Any
    ) -> Any:
        """x [1, T, heads, D], dt [1, T, heads], a [heads], b, c [1, T, groups, N] -> [1, T, heads, D]."""
        if self.segments is None:
            return usual(x, dt, a, b, c, **kwargs)
        options = kwargs | {"return_final_states": False}

        def scan(
            x: Tensor, dt: Tensor, b: Tensor, c: Tensor, *, initial_state: Tensor | None, output_final_state: bool
        ) -> Any:
            state = {"initial_states": initial_state, "return_final_states": output_final_state}
            output = usual(x, dt, a, b, c, **options | state)
            return output if output_final_state else (output, None)

        plan = _kept(self.segments, ("scan", kwargs["chunk_size"], True, False), _plan, x.device)
        return plan.run(scan, x, dt, b, c)[None]

    def mamba1(
        self, usual: Callable[..., Any], x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, **kwargs: Any
    ) -> Any:
        """x, dt, z [1, channels, T], a [channels, N], b, c [1, N, T] -> [1, channels, T]."""
        if self.segments is None:
            return usual(x, dt, a, b, c, **kwargs)

        def scan(*tensors: Tensor, **_: Any) -> Any:
            x, dt, b, c, z = (tensor.transpose(1, 2) for tensor in tensors)
            return usual(x, dt, a, b, c, **kwargs | {"z": z}).transpose(1, 2), None

        plan = _kept(self.segments, ("scan", 1, False, False), _plan, x.device)
        return plan.run(scan, *(t.transpose(1, 2) for t in (x, dt, b, c, kwargs["z"]))).transpose(0, 1)[None]

    def whole_mixer(self, usual: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Convolution, scan and norm in one kernel: None, which its caller takes for "not installed"."""
        return usual(*args, **kwargs) if self.segments is None else None


FUNCTIONS = {
    "causal_conv1d_fn": "convolution",
    "torch_chunk_gated_delta_rule": "delta_rule",
    "mamba2_chunk_scan": "mamba2",
    "mamba2_split_conv1d_scan_combined": "whole_mixer",
    "mamba_selective_scan": "mamba1",
}


def _is_kernel(function: Callable[..., Any]) -> bool:
    """True where transformers' function runs a package's kernel; false, right for both, where nothing tells."""
    known = inspect.getclosurevars(function).nonlocals if inspect.isfunction(function) else {}
    return bool(known.get("is_new_implementation", False))


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Neighbouring tokens of a whole row; the first ones of a row may stand for those of several.

    start: its first token among those of all whole rows.
    parent: number of the piece that it goes on from.
    """

    start: int
    length: int
    parent: int | None = None


def pieces_of(segments: Segments) -> list[Piece]:
    """Cut the rows: what a set of them begins with, and what comes after it in each. Parents come first."""
    pieces: list[Piece] = []
    parents: dict[int, int] = {}
    for s, (start, (top, begin)) in enumerate(zip(_starts(segments), _sets(segments), strict=True)):
        if begin and top == s:
            parents[s] = len(pieces)
            pieces.append(Piece(start=start, length=begin))
        length = segments.lengths[s] - begin
        if length:  # none where a response of one token ends with its prompt
            pieces.append(Piece(start=start + begin, length=length, parent=parents.get(top)))
    return pieces


def _sets(segments: Segments) -> list[tuple[int, int]]:
    """Choose the rows that branch from one state: the first row of each one's set, and the tokens that it begins with.

    Two sets become one where more tokens need no scan then, from the longest beginnings to the shortest. A set's first
    row holds the tokens of its beginning, or has them from outside; the others have nothing of their own in it.
    """
    rows = list(_rows(segments))
    top, size, begin = list(range(len(rows))), [1] * len(rows), [0] * len(rows)

    def first_of(s: int) -> int:
        return s if top[s] == s else first_of(top[s])

    shared = [(length - own, s) for s, (holder, length, own) in enumerate(rows) if holder != s]
    for count, s in sorted(shared, reverse=True):
        a, b = sorted((first_of(s), first_of(rows[s][0])))
        if (size[a] + size[b] - 1) * count > (size[a] - 1) * begin[a] + (size[b] - 1) * begin[b]:
            top[b], begin[a], size[a] = a, count, size[a] + size[b]
    return [(first_of(s), begin[first_of(s)]) for s in range(len(rows))]


def _rows(segments: Segments) -> Iterator[tuple[int, int, int]]:
    return zip(segments.holders, segments.lengths, segments.own_lengths, strict=True)


def _starts(segments: Segments) -> list[int]:
    """Number of each row's first token among those of all whole rows."""
    return list(itertools.accumulate(segments.lengths[:-1], initial=0))


def _whole(segments: Segments) -> TokenLayout:
    """Layout of the whole rows, on the CPU."""
    number = torch.arange(sum(segments.lengths))
    layout = segments.layout
    return TokenLayout(gather_K=number, home_T=number) if layout is None else layout.to(torch.device("cpu"))


def _kept(segments: Segments, key: tuple[Any, ...], build: Callable[..., Any], device: torch.device) -> Any:
    """Call `build(segments, device, *key[1:])`, once: its result is kept with the segments for the next layer."""
    if key not in segments.kept:
        segments.kept[key] = build(segments, device, *key[1:])
    return segments.kept[key]


def _behind_context(segments: Segments, device: torch.device, width: int) -> tuple[TokenLayout, Tensor]:
    """Layout of every row's own tokens behind the `width` before them, and the slots before a row's start: bool [K]."""
    gather_K = _whole(segments).gather_K
    slots: list[Tensor] = []
    homes: list[Tensor] = []
    slot = 0
    for start, (_, length, own) in zip(_starts(segments), _rows(segments), strict=True):
        before = gather_K[start + max(0, length - own - width) : start + length]
        slots += [torch.full((width + own - len(before),), -1), before]
        homes.append(slot + width + torch.arange(own))
        slot += width + own
    token_K, home_T = torch.cat(slots), torch.cat(homes)
    return TokenLayout.of(token_K, home_T).to(device), (token_K < 0).to(device)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """One call of a scan: `count` rows of `width` slots.

    goes_on: each piece has a state to begin with.
    gives: its last states are those that others begin with.
    blank: bool [count, width], slots on the left that hold zeros, so that a row ends with its last slot.
    bounds: int64 [pieces + 1] of packed pieces, which a kernel takes as one row.
    """

    count: int
    width: int
    goes_on: bool
    gives: bool
    blank: Tensor | None = None
    bounds: Tensor | None = None

    @property
    def num_states(self) -> int:
        return self.count if self.bounds is None else len(self.bounds) - 1

    def run(self, scan: Scan, tensors: Iterable[Tensor], state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Run the scan on tensors [count * width, ...]; its output, of that length, and the last states."""
        rows = [tensor.unflatten(0, (self.count, self.width)) for tensor in tensors]
        if self.blank is not None:
            rows = [row.masked_fill(self.blank[(...,) + (None,) * (row.ndim - 2)], 0) for row in rows]
        bounds = {} if self.bounds is None else {"cu_seqlens": self.bounds}
        output, last = scan(*rows, initial_state=state, output_final_state=self.gives, **bounds)
        return output.flatten(0, 1), last


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanPlan:
    """Calls of a scan, those that give states first.

    layout: slots of all calls, one after the other; None where these are the packed tokens.
    states: layout of all states given, and behind them of those that pieces begin with.
    """

    calls: list[_Call]
    layout: TokenLayout | None
    states: TokenLayout | None

    def run(self, scan: Scan, *packed: Tensor) -> Tensor:
        """Run the scan on packed tensors [1, T, ...]; its output [T, ...]."""
        sizes = [call.count * call.width for call in self.calls]
        tensors = [tensor[0] if self.layout is None else self.layout.spread(tensor[0]) for tensor in packed]
        outputs: list[Tensor] = []
        given: list[Tensor] = []
        begins: Iterator[Tensor] = iter(())
        for call, slots in zip(self.calls, zip(*(t.split(sizes) for t in tensors), strict=True), strict=True):
            if call.goes_on and given:
                begins, given = self._branched(torch.cat(given)), []
            output, last = call.run(scan, slots, next(begins) if call.goes_on else None)
            outputs.append(output)
            if last is not None:
                given.append(last)
        joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return joined if self.layout is None else self.layout.collect(joined)

    def _branched(self, given: Tensor) -> Iterator[Tensor]:
        assert self.states is not None
        begins = self.states.spread(given)[len(given) :]
        return iter(begins.split([call.num_states for call in self.calls if call.goes_on]))


def _plan(segments: Segments, device: torch.device, chunk: int, branches: bool, flat: bool) -> ScanPlan:
    """Plan the calls of a scan.

    chunk: the scan rounds rows up to whole ones of so many tokens.
    branches: it takes a state to begin with; otherwise each row's whole path is scanned.
    flat: it takes bounds of packed pieces.
    """
    starts, lengths = _starts(segments), segments.lengths
    rows = [Piece(start=start, length=length) for start, length in zip(starts, lengths, strict=True)]
    pieces = pieces_of(segments) if branches else rows
    parents = {piece.parent for piece in pieces if piece.parent is not None}
    groups = _groups(pieces, parents, chunk, flat)
    made = [_call([pieces[i] for i in part], not parents.isdisjoint(part), flat, device) for part in groups]
    calls = [call for call, _, _ in made]
    slot_K, real = torch.cat([slots for _, slots, _ in made]), torch.cat([real for _, _, real in made])
    whole, place_K = _whole(segments), torch.empty(sum(lengths), dtype=torch.int64)
    place_K[slot_K[real]] = real.nonzero()[:, 0]
    token_K, home_T = whole.gather_K[slot_K], place_K[whole.home_T]
    layout: TokenLayout | None = TokenLayout.of(token_K.where(real, -1), home_T)
    if torch.equal(token_K, torch.arange(len(home_T))):
        layout = None
    given = [i for members, call in zip(groups, calls, strict=True) if call.gives for i in members]
    begins = [given.index(p) for members in groups for i in members if (p := pieces[i].parent) is not None]
    number_G = torch.arange(len(given))
    states = TokenLayout.of(torch.cat([number_G, torch.tensor(begins)]), number_G).to(device) if begins else None
    return ScanPlan(calls=calls, layout=None if layout is None else layout.to(device), states=states)


def _groups(pieces: Sequence[Piece], parents: set[int], chunk: int, flat: bool) -> list[list[int]]:
    """Numbers of the pieces of each call: parents, then those that nobody goes on from, then those that go on."""
    kinds: dict[str, list[int]] = {"first": [], "alone": [], "last": []}
    for i, piece in enumerate(pieces):
        kinds["last" if piece.parent is not None else "first" if flat or i in parents else "alone"].append(i)
    if flat:
        return [members for members in kinds.values() if members]
    groups: list[list[int]] = []
    for members in kinds.values():
        most = 0  # chunks of the longest of the call
        for i in sorted(members, key=lambda i: -pieces[i].length):
            chunks = -(-pieces[i].length // chunk)
            if not most or chunks < _LIKE * most:
                groups.append([])
                most = chunks
            groups[-1].append(i)
    return groups


def _call(pieces: Sequence[Piece], gives: bool, flat: bool, device: torch.device) -> tuple[_Call, Tensor, Tensor]:
    """Make one call: the call, the token of each slot, int64 [slots], and which slots are no padding."""
    start_n = torch.tensor([piece.start for piece in pieces])[:, None]
    length_n = torch.tensor([piece.length for piece in pieces])[:, None]
    width, goes_on = int(length_n.max()), pieces[0].parent is not None
    column = torch.arange(width) - (width - length_n if gives and not flat else 0)
    real = (column >= 0) & (column < length_n)
    gather = start_n + torch.minimum(column.clamp(min=0), length_n - 1)
    if flat:
        bounds = torch.nn.functional.pad(length_n[:, 0].cumsum(0), (1, 0)).to(device)
        gather = gather[real]
        call = _Call(count=1, width=len(gather), goes_on=goes_on, gives=gives, bounds=bounds)
        return call, gather, torch.ones_like(gather, dtype=torch.bool)
    blank = ~real.to(device) if gives and not bool(real.all()) else None
    call = _Call(count=len(pieces), width=width, goes_on=goes_on, gives=gives, blank=blank)
    return call, gather.flatten(), real.flatten()
