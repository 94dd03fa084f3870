"""Which groups make up a batch, and when another prompt is started: pure bookkeeping, in two orders.

A group is started, then judged: kept or dropped. `admits` says how many more to start, `complete` that the batch is
known; what was started and is in neither `chosen` nor `dropped` goes back to the data.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

_PRIOR = 8  # groups that what was expected before counts as much as


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Sizes of one step's collection, in groups.

    wanted: of the batch. in_flight: that run at once, at most. most: that are started at all. extra: beyond those that
    are expected to fill the batch. expected: share that is kept, as far as is known before.
    """

    wanted: int
    in_flight: int
    most: int
    extra: int = 0
    expected: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.wanted <= self.in_flight:
            raise ValueError(f"in_flight={self.in_flight} groups cannot fill a batch of {self.wanted}")


class Selection:
    """The bookkeeping that both orders share. Groups are named by any number, each once."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._kept: dict[int, bool | None] = {}  # None while it runs
        self._num_running = self._num_kept = 0
        self._chosen: list[int] = []
        self._dropped: list[int] = []

    def admits(self) -> int:
        """Groups to be started now: as many as are expected to fill the batch, by the share that was kept so far."""
        missing = self.limits.wanted - self._num_kept
        if missing <= 0 or self.complete():
            return 0
        judged = len(self._kept) - self._num_running
        share = (self._num_kept + _PRIOR * self.limits.expected) / (judged + _PRIOR)
        running = min(math.ceil(missing / share) + self.limits.extra, self.limits.in_flight)
        return max(0, min(running - self._num_running, self.room()))

    def room(self) -> int:
        """Groups that may still be started, ever."""
        return self.limits.most - len(self._kept)

    def start(self, group: int, *, overdue: bool = False) -> None:
        """The next group in the order of draws. overdue: an earlier batch went on without it."""
        self._kept[group] = None
        self._num_running += 1

    def judge(self, group: int, *, kept: bool) -> None:
        """It has ended, and is of use or not."""
        self._kept[group] = kept
        self._num_running -= 1
        self._num_kept += kept

    def complete(self) -> bool:
        """The batch is known."""
        raise NotImplementedError

    def exhausted(self) -> bool:
        """Nothing runs, nothing more may be started, and the batch is not full."""
        return not self.complete() and self._num_running == 0 and self.room() == 0

    def chosen(self) -> list[int]:
        """The batch, when it is complete."""
        return self._chosen

    def dropped(self) -> list[int]:
        """Groups that were judged useless and are used up."""
        return self._dropped


class DrawOrder(Selection):
    """The first `wanted` kept groups in the order in which their prompts were drawn, however long others took.

    So the batch is a function of the draws alone: nothing favours short responses, and a resumed run takes the same.
    """

    def __init__(self, limits: Limits) -> None:
        super().__init__(limits)
        self._ahead: deque[int] = deque()  # all but the judged beginning of the draws

    def start(self, group: int, *, overdue: bool = False) -> None:
        super().start(group)
        self._ahead.append(group)

    def judge(self, group: int, *, kept: bool) -> None:
        super().judge(group, kept=kept)
        while self._ahead and self._kept[self._ahead[0]] is not None and not self.complete():
            first = self._ahead.popleft()
            (self._chosen if self._kept[first] else self._dropped).append(first)

    def complete(self) -> bool:
        return len(self._chosen) == self.limits.wanted


class CompletionOrder(Selection):
    """The first `wanted` kept groups in the order in which they end: no waiting for the longest responses, and so a
    batch of shorter ones than the policy would write.

    Groups that an earlier batch went on without are waited for, and come first: while no more than `wanted` are overdue
    a prompt loses one batch at most.
    """

    def __init__(self, limits: Limits) -> None:
        super().__init__(limits)
        self._overdue: set[int] = set()  # those that still run
        self._late: list[int] = []  # overdue, and kept

    def start(self, group: int, *, overdue: bool = False) -> None:
        super().start(group)
        if overdue:
            self._overdue.add(group)

    def judge(self, group: int, *, kept: bool) -> None:
        super().judge(group, kept=kept)
        ended = self._late if group in self._overdue else self._chosen
        self._overdue.discard(group)
        (ended if kept else self._dropped).append(group)

    def complete(self) -> bool:
        return not self._overdue and self._num_kept >= self.limits.wanted

    def chosen(self) -> list[int]:
        return [*self._late, *self._chosen][: self.limits.wanted]
