"""Cuts rows into several rows of one episode, artificially: contexts aside, nothing about the episode changes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from verl_like.batch import TensorStruct

Struct = TypeVar("Struct", bound=TensorStruct)
Parts = list[tuple[int, int, int]]  # (row, first column, column after the last) of each new row


def drawn_parts(mask_BR: Tensor, length_B: Tensor, most: int, seed: int, *, interleaved: bool = True) -> Parts:
    """Up to `most` parts of each row, every one with a sampled token, in even columns so that turns of two stay whole.

    interleaved: rows of an episode are not neighbours (all first parts come first); their order is kept.
    """
    generator = torch.Generator().manual_seed(seed)
    found: list[list[tuple[int, int, int]]] = []
    for row, length in enumerate(length_B.tolist()):
        parts, start = list[tuple[int, int, int]](), 0
        for column in range(2, length, 2):
            draw = torch.rand((), generator=generator) < 0.6
            if draw and len(parts) < most - 1 and mask_BR[row, start:column].any() and mask_BR[row, column:].any():
                parts.append((row, start, column))
                start = column
        found.append([*parts, (row, start, length)])
    if not interleaved:
        return [part for parts in found for part in parts]
    return [parts[k] for k in range(most) for parts in found if k < len(parts)]


def split(struct: Struct, parts: Parts) -> Struct:
    """The same rows in parts, with their episodes' numbers; later parts have prompts of their own."""
    rows = [row for row, _, _ in parts]
    width = max([stop - start for _, start, stop in parts], default=0)
    changes: dict[str, Any] = {}
    for f in dataclasses.fields(struct):
        value = getattr(struct, f.name)
        if f.name == "episode_B":
            changes[f.name] = torch.tensor([1000 - row for row in rows])
        elif value is not None and f.metadata.get("length") == "response_length_B":
            name = f.name.removesuffix("T") + "BR"
            changes[name] = split_column(getattr(struct, name), parts, width, f.metadata["fill"])
    names = struct.columns()
    if "response_length_B" in names:
        changes["response_length_B"] = torch.tensor([stop - start for _, start, stop in parts])
    if "finish_reasons" in names:  # the end of a part that another one follows says nothing about the episode
        reasons: Any = names["finish_reasons"]
        changes["finish_reasons"] = [reasons[row] if last else "length" for row, last in ends(parts)]
    if "prompt_ids_T" in names:
        ids_BP: Any = struct.prompt_ids_BP
        later = torch.tensor([start for _, start, _ in parts], dtype=ids_BP.dtype)
        changes |= {"prompt_ids_BP": ids_BP[rows] + later[:, None], "prompt_length_B": names["prompt_length_B"][rows]}
    return struct.select(rows).replace(**changes)


def split_column(values_BR: Tensor, parts: Parts, width: int, fill: float = 0) -> Tensor:
    cut = [torch.nn.functional.pad(values_BR[r, a:b], (0, width - (b - a)), value=fill) for r, a, b in parts]
    return torch.stack(cut)


def whole(values_PR: Tensor, parts: Parts, width: int) -> Tensor:
    """Inverse of `split_column`, written as a loop."""
    back = values_PR.new_zeros(max(row for row, _, _ in parts) + 1, width)
    for values_R, (row, start, stop) in zip(values_PR, parts, strict=True):
        back[row, start:stop] = values_R[: stop - start]
    return back


def ends(parts: Parts) -> Iterator[tuple[int, bool]]:
    """(row, whether this is its last part) of each part."""
    last = {row: place for place, (row, _, _) in enumerate(parts)}
    for place, (row, _, _) in enumerate(parts):
        yield row, last[row] == place


def twice(struct: Struct, rows: Sequence[int]) -> Struct:
    """Some rows a second time, as parts of the same episode: counted twice they would shift a mean."""
    order = [*range(len(struct)), *rows]
    changed = struct.select(order)
    if "episode_B" in {f.name for f in dataclasses.fields(struct)}:
        changed = changed.replace(episode_B=torch.tensor(order) + 7)  # type: ignore[call-arg]
    return changed
