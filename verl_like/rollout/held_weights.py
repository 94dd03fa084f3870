"""Weights that one rank of vLLM or SGLang holds, by Hugging Face name.

Fused modules are taken apart, packed weights unpacked, and the rank's part of each tensor put in its place in the
whole. The checksums of the parts of all ranks add up to those of whole tensors (parallel/checksum.py).
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from verl_like.models.checkpoint_names import sent_as
from verl_like.parallel.checksum import WIDTH, Slice, as_matrix, checksum_of, sketch, total, values_of

Box = tuple[int, int, int, int]  # row, column, rows, columns
Found = TypeVar("Found")  # of a box: its checksum, or its sketch
_EXPERT_PARTS = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))  # of checkpoints: gate, up, down
_STACKED = ("input_linear", "output_linear")  # of GraniteMoE: gate above up, and down, of all experts


class Reader(Protocol):
    """Questions to an engine's modules: vllm/reader.py and sglang/compat.py have these functions."""

    def fused_parts(self, model: nn.Module) -> dict[str, list[str]]: ...

    def stored_name(self, model: nn.Module, name: str, stored: Container[str], /) -> str: ...

    def unpacked_linear(self, module: nn.Module) -> Tensor | None: ...

    def unpacked_experts(self, module: nn.Module) -> tuple[Tensor, Tensor] | None: ...


@dataclass(frozen=True, slots=True)
class Held:
    """Part of the tensor `name`. place: where it stands in this rank's model; the same on all ranks."""

    name: str
    place: str
    part: Slice


@dataclass(frozen=True, slots=True)
class Layout:
    """Shapes of whole tensors by Hugging Face name, and the number of this rank among how many."""

    shapes: dict[str, torch.Size]
    rank: int
    size: int

    def held(self, name: str, place: str, local: Tensor) -> Held | None:
        """Place `local`, this rank's part of `name` along every axis, in the whole; None where it cannot be one."""
        shape = self.shapes[name]
        if self.size == 1:  # SGLang pads towers on a CPU
            local = local[tuple(slice(length) for length in shape[: local.ndim])]
        starts = [self._start(mine, whole) for mine, whole in zip(local.shape, shape, strict=False)]
        if len(shape) != local.ndim or None in starts:
            return None
        first, last = (starts[0] or 0, starts[-1] or 0) if starts else (0, 0)
        if local.ndim < 2:
            return Held(name, place, Slice(as_matrix(local), 0, first))
        return Held(name, place, Slice(as_matrix(local), first * shape[1:-1].numel(), last))

    def _start(self, mine: int, whole: int) -> int | None:
        """Start of this rank's part along an axis; None where the sizes do not fit.

        Ranks hold equal parts in order; where there are fewer parts than ranks, neighbours hold the same.
        """
        parts = whole // mine if mine else 0
        if parts == 0 or parts * mine != whole or self.size % parts:
            return None
        return self.rank * parts // self.size * mine


def held_by(model: nn.Module, layout: Layout, reader: Reader, *, quantised: bool = False) -> Iterator[Held]:
    """Yield every part of the tensors of `layout` that is in the model; a packed copy beside a plain one counts.

    quantised: only what is quantised, as the engine computes with it; else all but that.
    """
    fused = reader.fused_parts(model)
    owners = {id(p): reader.stored_name(model, name, layout.shapes) for name, p in model.named_parameters()}
    for where, module in model.named_modules():
        path = reader.stored_name(model, f"{where}.", layout.shapes).removesuffix(".")
        if {"w13_weight", "w2_weight"} <= module._parameters.keys():
            yield from _experts(path, module, layout, reader)
            continue
        for leaf, parameter in (module._parameters | module._buffers).items():  # routers' bias may be a buffer
            if parameter is None:
                continue
            names = _names(f"{path}.{leaf}", fused, layout) or _names(owners.get(id(parameter), ""), fused, layout)
            if len(names) == 1 and len(_rows_of_parts(module)) > 1 and not _as_it_came(path, fused, layout):
                continue
            if leaf == "weight" and ((meant := dequantised(module)) is not None or quantised):
                if quantised and names and meant is not None:
                    yield from _of_module(module, names, f"{path}.quantised", meant, layout)
                continue
            if quantised:
                continue
            packed = reader.unpacked_linear(module) if names and leaf == "weight" else None
            for place, local in ((f"{path}.{leaf}", parameter.detach()), (f"{path}.packed", packed)):
                if names and local is not None and local.numel():
                    yield from _of_module(module, names, place, local, layout)


def _as_it_came(path: str, fused: dict[str, list[str]], layout: Layout) -> bool:
    """True where a fused module with one Hugging Face name holds the rows in their order.

    That is so if vLLM lists it and does not split it (Phi-3). Of others its loader exchanges rows (GPT-NeoX); split,
    each rank has several ranges of them, which are known where all are of one length (a tower's).
    """
    leaf = path.rpartition(".")[2]
    return leaf in fused and (layout.size == 1 or fused[leaf] == [leaf])


def dequantised(module: nn.Module) -> Tensor | None:
    """Restore the weight [outputs, inputs] of a linear layer that vLLM has quantised to 8 bits; None for others.

    vLLM keeps the weight the other way round. Source: vLLM 0.32, layers/quantization/online/fp8.py.
    """
    weight, scale = module._parameters.get("weight"), module._parameters.get("weight_scale")
    if weight is None or scale is None or weight.element_size() > 1 or weight.ndim != 2:
        return None
    return weight.detach().t().float() * scale.detach().float().reshape(-1, 1)


def sketches(parts: Iterator[Held], layout: Layout, group: Any) -> list[tuple[str, Tensor]]:
    """Compute (Hugging Face name, sketch) of whole matrices; collective over `group`.

    Matrices of which a part was not found are left out. A rank sees its own part where others hold the same, as in
    `checksums`.
    """
    mine: dict[tuple[str, str], dict[Box, Tensor]] = {}
    for item in parts:
        part = item.part
        mine.setdefault(("", item.name), {})[part.row, part.column, *part.values.shape] = sketch(part)
    found = []
    for name, boxes in _whole(mine, layout, group):
        whole = torch.zeros(layout.shapes[name][0], WIDTH, dtype=torch.float64)
        for (row, _, rows, _), part in boxes.items():
            whole[row : row + rows] += part
        found.append((name, whole))
    return found


def _whole(
    mine: dict[tuple[str, str], dict[Box, Found]], layout: Layout, group: Any
) -> Iterator[tuple[str, dict[Box, Found]]]:
    """Yield (Hugging Face name, parts found by all ranks) for each (place, name) of this rank that misses no part.

    Collective over `group`.
    """
    everyones = [mine]
    if group is not None:
        everyones = [{} for _ in range(layout.size)]
        dist.all_gather_object(everyones, mine, group=group)
    for place, name in mine:
        boxes: dict[Box, Found] = {}
        for theirs in [*everyones, mine]:
            boxes |= theirs.get((place, name), {})
        if sum(rows * columns for _, _, rows, columns in boxes) == layout.shapes[name].numel():
            yield name, boxes


def checksums(parts: Iterator[Held], layout: Layout, dtype: torch.dtype, group: Any) -> list[tuple[str, int]]:
    """Compute (Hugging Face name, checksum) of every whole tensor, once for each place that holds it.

    Collective over `group`. Tensors of which some part was not found are left out. A rank sees its own part where
    others hold the same, so that each copy is seen by somebody.

    dtype: precision in which tensors were sent.
    """
    held: list[tuple[str, str, Box]] = []
    sums: list[Tensor] = []
    for item in parts:
        part = item.part
        held.append((item.place, item.name, (part.row, part.column, *part.values.shape)))
        sums.append(_sum_in(part, sent_as(item.name, dtype)))
    mine: dict[tuple[str, str], dict[Box, int]] = {}
    for (place, name, box), number in zip(held, values_of(sums), strict=True):
        mine.setdefault((place, name), {})[box] = number
    return [(name, total(list(boxes.values()))) for name, boxes in _whole(mine, layout, group)]


def _sum_in(part: Slice, dtype: torch.dtype) -> Tensor:
    """Compute the checksum in another precision than the part is held in; a wrong one if something would be lost."""
    if part.values.dtype == dtype:
        return checksum_of(part)
    values = part.values.to(dtype)
    return checksum_of(replace(part, values=values)) + (values.to(part.values.dtype) != part.values).any()


def _names(parameter: str, fused: dict[str, list[str]], layout: Layout) -> list[str]:
    """Hugging Face names of the tensors in a parameter of vLLM; empty where it is something else."""
    path, _, leaf = parameter.replace(".base_layer.", ".").rpartition(".")
    parent, _, module = path.rpartition(".")
    apart = [f"{parent}.{part}.{leaf}" for part in fused.get(module, [])]
    names = apart if set(apart) & layout.shapes.keys() else [f"{path}.{leaf}"]  # some files hold them fused (GLM)
    return names if all(name in layout.shapes for name in names) else []


def _rows_of_parts(module: nn.Module) -> list[int]:
    """Count the rows that each part of a fused module has on this rank; vLLM and SGLang say it alike."""
    return list(vars(module).get("output_partition_sizes", []))


def _vocabulary_range(module: nn.Module) -> tuple[int, int] | None:
    """Range of ids that an embedding or head has on this rank; None for other modules."""
    indices = vars(module).get("shard_indices")
    return None if indices is None else (indices.org_vocab_start_index, indices.org_vocab_end_index)


def _of_module(module: nn.Module, names: list[str], place: str, local: Tensor, layout: Layout) -> Iterator[Held]:
    """Yield the parts in a linear layer, embedding or norm: one tensor, or several one below the other."""
    vocabulary = _vocabulary_range(module)
    if vocabulary is not None:  # padded to a multiple of 64 rows on every rank
        start, end = vocabulary
        rows = as_matrix(local[: end - start])
        yield Held(names[0], place, Slice(rows, 0, start) if local.ndim < 2 else Slice(rows, start, 0))
        return
    parts = _rows_of_parts(module)
    if len(names) == 1 and len(parts) > 1 and layout.size > 1:
        yield from _of_each_part(names[0], place, local, parts, layout)
        return
    sizes = [local.shape[0]] if len(names) == 1 else parts
    if len(sizes) > len(names) and layout.size == 1:  # a tensor of the file may be several parts (Qwen3.5)
        sizes = [layout.shapes[name][0] for name in names]
    if len(sizes) != len(names) or sum(sizes) != local.shape[0]:
        return
    for name, piece in zip(names, local.split(sizes), strict=True):
        held = layout.held(name, place, piece)
        if held is not None:
            yield held


def _of_each_part(name: str, place: str, local: Tensor, sizes: list[int], layout: Layout) -> Iterator[Held]:
    """Yield the parts of a tower's attention: some heads of the queries, then of the keys, then of the values.

    Each has as many. vLLM's and SGLang's loaders cut the tensors they get whole into these.
    """
    whole = layout.shapes[name][0] // len(sizes)
    if sum(sizes) != local.shape[0] or any(size * layout.size != whole for size in sizes):
        return
    for number, piece in enumerate(local.split(sizes)):
        first, rows = number * whole + layout.rank * sizes[0], as_matrix(piece)
        yield Held(name, place, Slice(rows, 0, first) if local.ndim < 2 else Slice(rows, first, 0))


def _experts(path: str, module: nn.Module, layout: Layout, reader: Reader) -> Iterator[Held]:
    """Yield the parts of a stack of experts, where every rank has its part of each: gate above up, and down."""
    above = path.split(".experts")[0]
    base = f"{above}.experts"
    parts = next((p for p in _EXPERT_PARTS if f"{base}.0.{p[0]}.weight" in layout.shapes), None)
    unpacked = reader.unpacked_experts(module)
    if unpacked is None:
        return
    gate_up, down = unpacked  # [E, 2 x padded width, hidden], [E, hidden, padded width]
    stacked = [f"{above}.{leaf}.weight" for leaf in _STACKED]
    if parts is None and layout.shapes.keys() >= set(stacked):
        yield from _of_stack(path, stacked, gate_up, down, layout)
    if parts is None:
        return
    if f"{base}.{len(down)}.{parts[0]}.weight" in layout.shapes:
        return  # some of the experts are elsewhere
    width, padded = layout.shapes[f"{base}.0.{parts[0]}.weight"][0] // layout.size, down.shape[2]
    for expert in range(len(down)):
        of_each = (gate_up[expert, :width], gate_up[expert, padded : padded + width], down[expert, :, :width])
        for part, local in zip(parts, of_each, strict=True):
            held = layout.held(f"{base}.{expert}.{part}.weight", path, local)
            if held is not None:
                yield held


def _of_stack(path: str, names: list[str], gate_up_EON: Tensor, down_ENO: Tensor, layout: Layout) -> Iterator[Held]:
    """Yield the parts of experts that files hold as two tensors: [E, 2 x width, hidden] and [E, hidden, width]."""
    _, hidden, whole = layout.shapes[names[1]]
    width, padded = whole // layout.size, down_ENO.shape[2]
    for expert, (gate_up, down) in enumerate(zip(gate_up_EON, down_ENO, strict=True)):
        for half in (0, 1):
            row = (2 * expert + half) * whole + layout.rank * width
            yield Held(names[0], path, Slice(gate_up[half * padded :][:width], row, 0))
        yield Held(names[1], path, Slice(down[:, :width], expert * hidden, layout.rank * width))
