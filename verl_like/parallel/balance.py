"""Which rows travel together: micro-batches under a token budget, and equal work for every rank. Pure, deterministic.

Micro-batches: bin_packing.py finds how few bins hold all rows (in practice the lower bound or one more);
Karmarkar-Karp differencing then tries to even the bins out. Where the evened-out bins would break the budget, the
packed ones stay: a budget is never exceeded, except by a row that is longer than it on its own.
"""

from __future__ import annotations

import heapq
import math
import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING

from verl_like.parallel.bin_packing import few_bins
from verl_like.parallel.shared_balance import PromptsOfRows, divide_groups, fill_budget

if TYPE_CHECKING:
    from verl_like.config.batch_plan import MicroBatchRule


_EVEN_ENOUGH = 1.001


def micro_batches(
    num_tokens: Sequence[int], rule: MicroBatchRule, prompts: PromptsOfRows | None = None
) -> list[list[int]]:
    """Cut rows into micro-batches; each row is in exactly one. `num_tokens[i]` is the length of row i in tokens.

    `rule.max_tokens`: no micro-batch holds more tokens, but a longer row travels alone.
    `rule.max_sequences`: no micro-batch holds more rows. Tokens are balanced in both cases.
    `prompts`: rows of one micro-batch share their prompt, which then counts once; a token budget makes use of it.
    """
    if not num_tokens:
        return []
    if rule.max_tokens is not None:
        return _by_tokens(num_tokens, rule.max_tokens, prompts)
    if rule.max_sequences is None:
        raise ValueError("a MicroBatchRule needs max_tokens or max_sequences")
    return _by_count(num_tokens, rule.max_sequences)


def balance_ranks(costs: Sequence[float], num_ranks: int, prompts: PromptsOfRows | None = None) -> list[list[int]]:
    """Give every rank about the same total cost; row counts may differ and be zero. Rows stay in ascending order.

    `prompts`: rows of one rank share their prompt. Of whole groups, halves of groups ... single rows, that cut is taken
    whose most loaded rank has least to do; finer ones are not tried where they could not win a thousandth.
    """
    if num_ranks < 1:
        raise ValueError(f"cannot balance over {num_ranks} ranks")
    if prompts is None:
        return [sorted(rows) for rows in _karmarkar_karp(costs, num_ranks)]
    best: tuple[float, list[list[int]]] | None = None
    least = prompts.total(range(len(costs)), costs) / num_ranks  # each prompt once: no cut has less on its fullest rank
    for units in divide_groups(costs, prompts, num_ranks):
        parts = _karmarkar_karp([prompts.total(unit, costs) for unit in units], num_ranks)
        shares = [sorted(i for unit in part for i in units[unit]) for part in parts]
        load = max(prompts.total(rows, costs) for rows in shares)
        if best is None or load < best[0] * (1 - 1e-9):
            best = (load, shares)
        if load <= least * _EVEN_ENOUGH:
            break
    assert best is not None
    return best[1]


def _by_tokens(num_tokens: Sequence[int], budget: int, prompts: PromptsOfRows | None) -> list[list[int]]:
    alone = [[i] for i, n in enumerate(num_tokens) if n >= budget]
    shared = [i for i, n in enumerate(num_tokens) if n < budget]
    packed = few_bins([num_tokens[i] for i in shared], budget)
    chosen = None if prompts is None else fill_budget(shared, num_tokens, prompts, budget)
    if chosen is None or len(chosen) > len(packed):
        even = _karmarkar_karp([num_tokens[i] for i in shared], len(packed)) if packed else []
        fits = all(sum(num_tokens[shared[j]] for j in rows) <= budget for rows in even)
        chosen = [sorted(shared[j] for j in rows) for rows in (even if fits else packed)]
    return sorted((rows for rows in alone + chosen if rows), key=lambda rows: rows[0])


def _by_count(num_tokens: Sequence[int], max_rows: int) -> list[list[int]]:
    """Longest rows first, each to the bin with the fewest tokens that still has room."""
    num_bins = math.ceil(len(num_tokens) / max_rows)
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    heap = [(0, b) for b in range(num_bins)]
    for i in _longest_first(num_tokens):
        total, b = heapq.heappop(heap)
        bins[b].append(i)
        if len(bins[b]) < max_rows:
            heapq.heappush(heap, (total + num_tokens[i], b))
    return sorted((sorted(rows) for rows in bins), key=lambda rows: rows[0])


def _longest_first(sizes: Sequence[float]) -> list[int]:
    return sorted(range(len(sizes)), key=lambda i: (-sizes[i], i))


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
    """The fullest bin of one with the emptiest of the other, and so on."""
    shared = max(0, len(a) + len(b) - num_bins)
    backwards = b[::-1]
    alone = len(b) - shared  # the fullest of b, which meet empty bins
    both = [(s + t, x + y) for (s, x), (t, y) in zip(a, backwards[alone:], strict=False)]
    return sorted([*backwards[:alone], *both, *a[shared:]], key=_sum)


_sum = operator.itemgetter(0)
