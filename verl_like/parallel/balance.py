"""Balance of rows: micro-batches under a token budget, and equal work for every rank. Pure, deterministic.

Micro-batches: `few_bins` finds how few hold all rows (in practice the lower bound or one more); Karmarkar-Karp
differencing then tries to even the bins out. Where the evened-out bins would break the budget, the packed ones stay: a
budget is never exceeded, except by a row that is longer than it on its own.

Few bins: best-fit decreasing first: at most 11/9 of the optimum + 1, and for small sizes the least number. Where it
needs more than the sizes add up to, bins are filled one by one instead: the largest size left, and with it those of the
others that fill the rest best (a subset sum), large ones preferred; the better of the two is taken. That is the idea of
minimum bin slack (Gupta and Ho, A new heuristic algorithm for the one-dimensional bin-packing problem, 1999; from
memory).

With `model.share_prompts` what rows begin with counts once wherever they travel together. Groups are kept whole where
that costs nothing, and cut where a budget or the balance of the ranks asks for it; each part then needs it again.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from verl_like.config.batch_plan import MicroBatchRule

_CANDIDATES = 256  # sizes that are tried beside the largest one of a bin: bounds the work of a bin


def few_bins(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Pack sizes into few bins: positions in each bin. No bin holds more than `capacity`, which no size exceeds."""
    first = best_fit_decreasing(sizes, capacity)
    if len(first) <= least(sizes, capacity):
        return first
    second = fullest_bins(sizes, capacity)
    return second if len(second) < len(first) else first


def least(sizes: Sequence[int], capacity: int) -> int:
    """Lower bound of the number of bins: what the sizes add up to, or one for each that is over half."""
    return max(math.ceil(sum(sizes) / capacity), sum(2 * size > capacity for size in sizes))


def best_fit_decreasing(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Pack the largest size first, each into the fullest bin that still has room for it."""
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
    """Fill bin after bin with the largest size left and the best company for it."""
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
    """Pick at most `_CANDIDATES` of the positions, evenly spread over the order."""
    count = len(positions)
    return positions if count <= _CANDIDATES else [positions[k * count // _CANDIDATES] for k in range(_CANDIDATES)]


def _largest_first(sizes: Sequence[float]) -> list[int]:
    return sorted(range(len(sizes)), key=lambda i: (-sizes[i], i))


MOST_REPEATED = 16  # whole tokens of a micro-batch's rows, for each token of its budget
_SEARCHED = 64  # groups looked at when a gap is to be filled with a part of one
_EVEN = (1.0, 1.01, 1.03, 1.06, 1.12)  # of the mean: how full the fullest micro-batch may be, tried in this order


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedRows:
    """Costs of what rows begin with in common (tokens, or operations).

    place: of each row in an order in which rows that begin alike are neighbours.
    common: by place, the cost of what the row there and the one before it begin with; saved where both are computed.
    number: of each row, equal for those of one group: they stay together where that costs nothing.
    """

    place: Sequence[int]
    common: Sequence[float]
    number: Sequence[int]

    def total(self, rows: Sequence[int], costs: Sequence[float]) -> float:
        """Cost of these rows together; `costs` are those of each row alone."""
        places = sorted(self.place[i] for i in rows)
        return sum(costs[i] for i in rows) - sum(self._between(a, b) for a, b in itertools.pairwise(places))

    def shared(self, row: int, other: int) -> float:
        """Cost of what two rows begin with."""
        return self._between(*sorted((self.place[row], self.place[other])))

    def _between(self, a: int, b: int) -> float:
        return self.common[b] if b == a + 1 else min(self.common[a + 1 : b + 1])

    def groups(self, rows: Sequence[int]) -> list[list[int]]:
        """Group the rows: groups in order of first appearance, their rows with those that begin alike as neighbours."""
        found: dict[int, list[int]] = {}
        for i in rows:
            found.setdefault(self.number[i], []).append(i)
        return [sorted(group, key=self.place.__getitem__) for group in found.values()]


def fill_budget(rows: Sequence[int], tokens: Sequence[int], shared: SharedRows, budget: int) -> list[list[int]]:
    """Pack rows into micro-batches of at most `budget` tokens, about equally full.

    `tokens[i]` <= budget is the whole row.
    """
    if not rows:
        return []
    groups = shared.groups(rows)
    filled = _fill(groups, tokens, shared, budget)
    mean = sum(shared.total(part, tokens) for part in filled) / len(filled)
    longest = max(tokens[i] for i in rows)
    for slack in _EVEN:
        capacity = max(int(mean * slack) + 1, longest)
        if capacity >= budget:
            break
        even = _fill(groups, tokens, shared, capacity)
        if len(even) <= len(filled):
            return even
    return filled


def divide_groups(costs: Sequence[float], shared: SharedRows, num_parts: int) -> list[list[list[int]]]:
    """Ways to cut the rows into units for `num_parts` ranks: whole groups, halves, quarters ... single rows."""
    groups = shared.groups(range(len(costs)))
    ways, largest, pieces = [], max((len(group) for group in groups), default=0), 1
    while pieces < largest and num_parts > 1:
        ways.append([part for group in groups for part in _slices(group, pieces)])
        pieces *= 2
    return [*ways, [[i] for i in range(len(costs))]]


def _slices(group: list[int], pieces: int) -> list[list[int]]:
    bounds = [round(k * len(group) / pieces) for k in range(pieces + 1)]
    return [group[a:b] for a, b in itertools.pairwise(bounds) if b > a]


def _fill(groups: list[list[int]], tokens: Sequence[int], shared: SharedRows, capacity: int) -> list[list[int]]:
    """Take the largest group that fits, again and again; then parts of groups, while worth what they repeat."""
    waiting = dict(enumerate(groups))
    sizes = sorted((shared.total(group, tokens), g) for g, group in waiting.items())
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
                g, part = _best_part(sizes[:_SEARCHED], waiting, tokens, shared, room)
                left = _without(waiting[g], part)
                whole, size, rest = (shared.total(rows, tokens) for rows in (waiting[g], part, left))
                if not part or (chosen and whole - rest < size + rest - whole):
                    break
                sizes.remove((whole, g))
                waiting[g] = left
                bisect.insort(sizes, (rest, g))
            chosen += part
            room -= size
        bins.append(sorted(chosen))
    return bins


def _best_part(
    candidates: list[tuple[float, int]],
    waiting: dict[int, list[int]],
    tokens: Sequence[int],
    shared: SharedRows,
    room: float,
) -> tuple[int, list[int]]:
    """Find the group whose rows, as far as they fit, leave the group with least to do; and those rows.

    Tried are the longest rows and those that begin most alike. candidates: (tokens, group).
    """
    best: tuple[float, int, list[int]] = (0.0, candidates[0][1], [])
    for size, g in candidates:
        for order in (waiting[g], sorted(waiting[g], key=lambda i: -tokens[i])):
            part = _fitting(order, tokens, shared, room)
            fresh = size - shared.total(_without(waiting[g], part), tokens)
            if part and (fresh > best[0] or not best[2]):
                best = (fresh, g, part)
    return best[1], best[2]


def _fitting(order: Sequence[int], tokens: Sequence[int], shared: SharedRows, room: float) -> list[int]:
    """Take row after row that has room; up to `_SEARCHED` others are passed over."""
    part, missed = list[int](), 0  # rows by place
    for i in order:
        at = bisect.bisect(part, shared.place[i], key=shared.place.__getitem__)
        more = tokens[i] - max((shared.shared(i, other) for other in part[max(0, at - 1) : at + 1]), default=0)
        if more <= room:
            part.insert(at, i)
            room -= more
        else:
            missed += 1
            if missed > _SEARCHED:
                break
    return part


def _without(rows: Sequence[int], taken: Sequence[int]) -> list[int]:
    left_out = set(taken)
    return [i for i in rows if i not in left_out]


_EVEN_ENOUGH = 1.001


def micro_batches(num_tokens: Sequence[int], rule: MicroBatchRule, shared: SharedRows | None = None) -> list[list[int]]:
    """Cut rows into micro-batches: positions of the rows in each; a row is in exactly one.

    Args:
        num_tokens: length of each row in tokens.
        rule: `max_tokens`: no micro-batch holds more tokens, but a longer row travels alone. `max_sequences`: no
            micro-batch holds more rows. Tokens are balanced in both cases.
        shared: what rows of one micro-batch begin with counts once; a token budget makes use of it. Its rows have
            `MOST_REPEATED` budgets of tokens at most, every row whole: attention has their keys and values.
    """
    if not num_tokens:
        return []
    if rule.max_tokens is not None:
        return _by_tokens(num_tokens, rule.max_tokens, shared)
    if rule.max_sequences is None:
        raise ValueError("a MicroBatchRule needs max_tokens or max_sequences")
    return _by_count(num_tokens, rule.max_sequences)


def balance_ranks(costs: Sequence[float], num_ranks: int, shared: SharedRows | None = None) -> list[list[int]]:
    """Give every rank about the same total cost; row counts may differ and be zero. Rows stay in ascending order.

    `shared`: what rows of one rank begin with costs once. Of the cuts into whole groups, halves of groups ... single
    rows, the one is taken whose most loaded rank has least to do; finer ones are not tried where they could not win a
    thousandth.
    """
    if num_ranks < 1:
        raise ValueError(f"cannot balance over {num_ranks} ranks")
    if shared is None:
        return [sorted(rows) for rows in _karmarkar_karp(costs, num_ranks)]
    best: tuple[float, list[list[int]]] | None = None
    least = shared.total(range(len(costs)), costs) / num_ranks  # all of it once: no cut has less on its fullest rank
    for units in divide_groups(costs, shared, num_ranks):
        parts = _karmarkar_karp([shared.total(unit, costs) for unit in units], num_ranks)
        shares = [sorted(i for unit in part for i in units[unit]) for part in parts]
        load = max(shared.total(rows, costs) for rows in shares)
        if best is None or load < best[0] * (1 - 1e-9):
            best = (load, shares)
        if load <= least * _EVEN_ENOUGH:
            break
    assert best is not None
    return best[1]


def _by_tokens(num_tokens: Sequence[int], budget: int, shared: SharedRows | None) -> list[list[int]]:
    if sum(num_tokens) <= budget:
        return [list(range(len(num_tokens)))]
    alone = [[i] for i, n in enumerate(num_tokens) if n >= budget]
    fitting = [i for i, n in enumerate(num_tokens) if n < budget]
    packed = few_bins([num_tokens[i] for i in fitting], budget)
    chosen = None
    if shared is not None:
        filled = fill_budget(fitting, num_tokens, shared, budget)
        chosen = [part for rows in filled for part in _not_too_deep(rows, num_tokens, shared, MOST_REPEATED * budget)]
    if chosen is None or len(chosen) > len(packed):
        even = _karmarkar_karp([num_tokens[i] for i in fitting], len(packed)) if packed else []
        fits = all(sum(num_tokens[fitting[j]] for j in rows) <= budget for rows in even)
        chosen = [sorted(fitting[j] for j in rows) for rows in (even if fits else packed)]
    return sorted((rows for rows in alone + chosen if rows), key=lambda rows: rows[0])


def _not_too_deep(rows: list[int], tokens: Sequence[int], shared: SharedRows, most: int) -> list[list[int]]:
    """Cut rows where those of a part would have more than `most` tokens, every row whole; neighbours stay together."""
    parts, whole = [list[int]()], 0
    for i in sorted(rows, key=shared.place.__getitem__):
        if parts[-1] and whole + tokens[i] > most:
            parts.append([])
            whole = 0
        parts[-1].append(i)
        whole += tokens[i]
    return [sorted(part) for part in parts]


def _by_count(num_tokens: Sequence[int], max_rows: int) -> list[list[int]]:
    """Put the longest rows first, each into the bin with the fewest tokens that still has room."""
    num_bins = math.ceil(len(num_tokens) / max_rows)
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    heap = [(0, b) for b in range(num_bins)]
    for i in _largest_first(num_tokens):
        total, b = heapq.heappop(heap)
        bins[b].append(i)
        if len(bins[b]) < max_rows:
            heapq.heappush(heap, (total + num_tokens[i], b))
    return sorted((sorted(rows) for rows in bins), key=lambda rows: rows[0])


def _karmarkar_karp(costs: Sequence[float], num_bins: int) -> list[list[int]]:
    """Multi-way largest differencing method: join the two most uneven partial partitions until one is left.

    Source: Karmarkar and Karp (1982), The differencing method of set partitioning.
    """
    if not costs:
        return [[] for _ in range(num_bins)]
    # A partial partition: its bins that hold something, ascending by sum. The empty ones before them are not listed.
    heap = []
    for i, cost in enumerate(costs):
        heapq.heappush(heap, (-float(cost), i, [(float(cost), [i])]))
    order = len(costs)
    while len(heap) > 1:
        (_, _, a), (_, _, b) = heapq.heappop(heap), heapq.heappop(heap)
        joined = _joined(a, b, num_bins)
        smallest = joined[0][0] if len(joined) == num_bins else 0.0
        heapq.heappush(heap, (smallest - joined[-1][0], order, joined))
        order += 1
    filled = [rows for _, rows in heap[0][2]]
    return [[] for _ in range(num_bins - len(filled))] + filled


_Bins = list[tuple[float, list[int]]]


def _joined(a: _Bins, b: _Bins, num_bins: int) -> _Bins:
    """Join the fullest bin of `a` with the emptiest of `b`, and so on."""
    shared = max(0, len(a) + len(b) - num_bins)
    backwards = b[::-1]
    alone = len(b) - shared  # the fullest of b, which meet empty bins
    both = [(s + t, x + y) for (s, x), (t, y) in zip(a, backwards[alone:], strict=False)]
    return sorted([*backwards[:alone], *both, *a[shared:]], key=_sum)


_sum = operator.itemgetter(0)
