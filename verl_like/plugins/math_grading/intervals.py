"""Unions of intervals, compared as sets of real numbers: (1,2] \\cup \\{5\\} \\cup [7,\\infty)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from verl_like.plugins.math_grading import expression
from verl_like.plugins.math_grading.expression_value import real_value
from verl_like.plugins.math_grading.latex import plain_text, split_top_level, squeeze

_MAX_PARTS = 40
_ALL_REALS = (r"\mathbb{R}", "R", r"\R")
_CUP = re.compile(r"\\cup(?![A-Za-z])|(?<=[)\]}])\s*U\s*(?=[(\[\\])")
_INFINITY = {"\\infty": float("inf"), "+\\infty": float("inf"), "-\\infty": float("-inf")}


@dataclass(frozen=True, slots=True)
class _End:
    """An end of an interval. `inside`: it belongs to it."""

    value: Any
    inside: bool


def split_union(text: str) -> list[str]:
    """Parts of A \\cup B \\cup C."""
    return [part.strip() for part in _CUP.split(text)]


def same_set(left: str, right: str) -> bool | None:
    """Check that two unions of intervals and finite sets hold the same numbers. None: one of them is no such union."""
    parsed = _parse(left), _parse(right)
    if parsed[0] is None or parsed[1] is None:
        return None
    return _merged(parsed[0]) == _merged(parsed[1])


def _parse(text: str) -> list[tuple[_End, _End]] | None:
    if text.strip() in _ALL_REALS:
        text = r"(-\infty,\infty)"
    found: list[tuple[_End, _End]] = []
    for part in split_union(text):
        pieces = _points(part) if part.startswith("\\{") and part.endswith("\\}") else _interval(part)
        if pieces is None or len(found) > _MAX_PARTS:
            return None
        found += pieces
    return found


def _points(text: str) -> list[tuple[_End, _End]] | None:
    values = [_number(item) for item in split_top_level(text[2:-2])]
    if any(value is None for value in values):
        return None
    return [(_End(value, True), _End(value, True)) for value in values]


def _interval(text: str) -> list[tuple[_End, _End]] | None:
    if len(text) < 5 or text[0] not in "([" or text[-1] not in ")]":
        return None
    ends = [_number(item) for item in split_top_level(text[1:-1])]
    if len(ends) != 2 or ends[0] is None or ends[1] is None or ends[0] > ends[1]:
        return None
    if ends[0] == ends[1]:
        return [(_End(ends[0], True), _End(ends[0], True))] if text[0] + text[-1] == "[]" else None
    return [(_End(ends[0], text[0] == "["), _End(ends[1], text[-1] == "]"))]


def _number(text: str) -> Any:
    """A real number, infinity, or None."""
    plain = squeeze(plain_text(text))
    if plain in _INFINITY:
        return _INFINITY[plain]
    tree = expression.parse(plain)
    return None if tree is None else real_value(tree)


def _merged(intervals: list[tuple[_End, _End]]) -> list[tuple[_End, _End]]:
    """Convert a union to disjoint intervals in order."""
    merged: list[tuple[_End, _End]] = []
    for low, high in sorted(intervals, key=lambda pair: (pair[0].value, not pair[0].inside)):
        if merged and _touches(merged[-1][1], low):
            last_low, last_high = merged[-1]
            if (high.value, high.inside) > (last_high.value, last_high.inside):
                last_high = high
            merged[-1] = (last_low, last_high)
        else:
            merged.append((low, high))
    return merged


def _touches(high: _End, low: _End) -> bool:
    return low.value < high.value or (low.value == high.value and (low.inside or high.inside))
