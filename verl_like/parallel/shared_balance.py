"""Balancing rows that share prompts: a prompt counts once wherever its rows travel together. Pure, deterministic.

Groups are kept whole where that costs nothing, and cut where a budget or the balance of the ranks asks for it; each
part then needs the prompt again. Companion of balance.py, for packed input with `model.share_prompts`.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

_SEARCHED = 64  # groups looked at when a gap is to be filled with a part of one
_EVEN = (1.0, 1.01, 1.03, 1.06, 1.12)  # of the mean: how full the fullest micro-batch may be, tried in this order


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptsOfRows:
    """Which rows have the same prompt, and what a prompt costs (tokens, or operations)."""

    numbers: Sequence[int]  # equal for rows with the same prompt
    costs: Sequence[float]  # of each row's prompt: saved where another row of the same prompt is there already

    def total(self, rows: Sequence[int], costs: Sequence[float]) -> float:
        """Cost of these rows together; `costs` are those of each row alone, prompt included."""
        repeated = sum(self.costs[i] for i in rows) - sum({self.numbers[i]: self.costs[i] for i in rows}.values())
        return sum(costs[i] for i in rows) - repeated

    def groups(self, rows: Sequence[int]) -> list[list[int]]:
        """The rows by prompt, in order of first appearance."""
        found: dict[int, list[int]] = {}
        for i in rows:
            found.setdefault(self.numbers[i], []).append(i)
        return list(found.values())


def fill_budget(rows: Sequence[int], tokens: Sequence[int], prompts: PromptsOfRows, budget: int) -> list[list[int]]:
    """Micro-batches of at most `budget` tokens, about equally full. `tokens[i]` <= budget includes row i's prompt."""
    if not rows:
        return []
    groups = prompts.groups(rows)
    filled = _fill(groups, tokens, prompts, budget)
    mean = sum(prompts.total(part, tokens) for part in filled) / len(filled)
    longest = max(tokens[i] for i in rows)
    for slack in _EVEN:
        capacity = max(int(mean * slack) + 1, longest)
        if capacity >= budget:
            break
        even = _fill(groups, tokens, prompts, capacity)
        if len(even) <= len(filled):
            return even
    return filled


def divide_groups(costs: Sequence[float], prompts: PromptsOfRows, num_parts: int) -> list[list[list[int]]]:
    """Ways to cut the rows into units for `num_parts` ranks: whole groups, halves, quarters ... single rows."""
    groups = prompts.groups(range(len(costs)))
    ways, largest, pieces = [], max((len(group) for group in groups), default=0), 1
    while pieces < largest and num_parts > 1:
        ways.append([part for group in groups for part in _slices(group, pieces)])
        pieces *= 2
    return [*ways, [[i] for i in range(len(costs))]]


def _slices(group: list[int], pieces: int) -> list[list[int]]:
    bounds = [round(k * len(group) / pieces) for k in range(pieces + 1)]
    return [group[a:b] for a, b in itertools.pairwise(bounds) if b > a]


def _fill(groups: list[list[int]], tokens: Sequence[int], prompts: PromptsOfRows, capacity: int) -> list[list[int]]:
    """The largest group that fits, again and again; then parts of groups, as long as they are worth their prompt."""
    waiting = {g: sorted(group, key=lambda i: -tokens[i]) for g, group in enumerate(groups)}
    sizes = sorted((prompts.total(group, tokens), g) for g, group in waiting.items())
    bins: list[list[int]] = []
    while sizes:
        chosen: list[int] = []
        room: float = capacity
        while sizes:
            at = bisect.bisect_right(sizes, (room, len(groups))) - 1
            if at >= 0:
                size, g = sizes.pop(at)
                part = waiting.pop(g)
            else:
                g, part = _best_part([g for _, g in sizes[:_SEARCHED]], waiting, tokens, prompts, room)
                if not part or (chosen and _own(part, tokens, prompts) < prompts.costs[part[0]]):
                    break
                sizes.remove((prompts.total(waiting[g], tokens), g))
                taken = set(part)
                waiting[g] = [i for i in waiting[g] if i not in taken]
                bisect.insort(sizes, (prompts.total(waiting[g], tokens), g))
                size = prompts.total(part, tokens)
            chosen += part
            room -= size
        bins.append(sorted(chosen))
    return bins


def _best_part(
    candidates: list[int],
    waiting: dict[int, list[int]],
    tokens: Sequence[int],
    prompts: PromptsOfRows,
    room: float,
) -> tuple[int, list[int]]:
    """The group whose longest rows, as far as they fit, leave the least room; and those rows."""
    best: tuple[float, int, list[int]] = (0.0, -1, [])
    for g in candidates:
        prompt = prompts.costs[waiting[g][0]]
        left, part = room - prompt, []
        for i in waiting[g]:
            if tokens[i] - prompt <= left:
                part.append(i)
                left -= tokens[i] - prompt
        own = _own(part, tokens, prompts)
        if part and (own > best[0] or not best[2]):
            best = (own, g, part)
    return best[1], best[2]


def _own(part: Sequence[int], tokens: Sequence[int], prompts: PromptsOfRows) -> float:
    """Tokens after the prompt."""
    return sum(tokens[i] - prompts.costs[i] for i in part)
