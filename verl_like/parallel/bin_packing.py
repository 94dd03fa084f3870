"""Few bins for many sizes. Pure, deterministic.

Best-fit decreasing first: at most 11/9 of the optimum + 1, and for small sizes the least number. Where it needs more
than the sizes add up to, bins are filled one by one instead: the largest size left, and with it those of the others
that fill the rest best (a subset sum), large ones preferred; the better of the two is taken. That is the idea of
minimum bin slack (Gupta and Ho, A new heuristic algorithm for the one-dimensional bin-packing problem, 1999; from
memory).
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence

_CANDIDATES = 256  # sizes that are tried beside the largest one of a bin: bounds the work of a bin


def few_bins(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Positions of the sizes in each bin; no bin holds more than `capacity`, which no size exceeds."""
    first = best_fit_decreasing(sizes, capacity)
    if len(first) <= least(sizes, capacity):
        return first
    second = fullest_bins(sizes, capacity)
    return second if len(second) < len(first) else first


def least(sizes: Sequence[int], capacity: int) -> int:
    """No packing has fewer bins: what the sizes add up to, or one for each that is over half."""
    return max(math.ceil(sum(sizes) / capacity), sum(2 * size > capacity for size in sizes))


def best_fit_decreasing(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Largest size first, each into the fullest bin that still has room for it."""
    bins: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (free space, bin), ascending
    for i in _largest_first(sizes):
        at = bisect.bisect_left(room, (sizes[i], -1))
        free, b = room.pop(at) if at < len(room) else (capacity, len(bins))
        if b == len(bins):
            bins.append([])
        bins[b].append(i)
        bisect.insort(room, (free - sizes[i], b))
    return bins


def fullest_bins(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Bin after bin: the largest size left and the best company for it."""
    left, bins = _largest_first(sizes), []
    while left:
        largest, others = left[0], left[1:]
        room = capacity - sizes[largest]
        fitting = _spread([i for i in others if sizes[i] <= room])
        chosen = {largest, *(fitting[k] for k in best_subset([sizes[i] for i in fitting], room))}
        bins.append(sorted(chosen))
        left = [i for i in others if i not in chosen]
    return bins


def best_subset(sizes: Sequence[int], room: int) -> list[int]:
    """Positions of sizes whose sum is the largest that is not over `room`; of equal sums one with early sizes.

    The sums that can be reached are the bits of one integer per prefix, taken from the end.
    """
    reached, mask = [1], (1 << (room + 1)) - 1
    for size in reversed(sizes):
        reached.append((reached[-1] | (reached[-1] << size)) & mask)
    target, chosen = reached[-1].bit_length() - 1, []
    for k, size in enumerate(sizes):
        without_this = reached[len(sizes) - 1 - k]
        if target >= size and without_this >> (target - size) & 1:
            chosen.append(k)
            target -= size
    return chosen


def _spread(positions: list[int]) -> list[int]:
    """At most `_CANDIDATES` of them, evenly spread over the order."""
    count = len(positions)
    return positions if count <= _CANDIDATES else [positions[k * count // _CANDIDATES] for k in range(_CANDIDATES)]


def _largest_first(sizes: Sequence[int]) -> list[int]:
    return sorted(range(len(sizes)), key=lambda i: (-sizes[i], i))
