"""Selection of the groups of a step's batch, and of the moment at which another prompt is begun: pure bookkeeping.

A group is begun, and when it ends it is of use (kept) or not. `admits` says how many more to begin, `batch` which the
step trains. Here are the orders of a step that begins with nothing and leaves nothing: what was begun and is in neither
`chosen` nor `dropped` goes back to the data. staleness.py has the order of groups that live across steps.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass

_PRIOR = 8  # groups that what was expected before counts as much as


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Sizes of one step's collection, in groups.

    wanted: of the batch. in_flight: that run at once, at most. most: that are started at all. extra: beyond those that
    are expected to fill the batch. expected: share that is kept, as far as is known before. wave: groups that are begun
    together, the next ones when all of these have ended; 0: as groups end.
    """

    wanted: int
    in_flight: int
    most: int
    extra: int = 0
    expected: float = 1.0
    wave: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.wanted <= self.in_flight:
            raise ValueError(f"in_flight={self.in_flight} groups cannot fill a batch of {self.wanted}")


class Order(ABC):
    """The bookkeeping that a source of batches asks. Groups are named by the numbers of their draws, each once."""

    @abstractmethod
    def admits(self) -> int:
        """Count the groups to be begun now."""

    @abstractmethod
    def begin(self, group: int, version: int = 0, *, overdue: bool = False) -> None:
        """Take in a group that runs from now on.

        version: of the weights that it begins under. overdue: an earlier batch went on without it.
        """

    def sampled(self, group: int, responses: int | None = None) -> int:
        """Free the places of so many responses of a group, by default of all; says of how many it had."""
        return 0  # places are counted in groups

    @abstractmethod
    def end(self, group: int, *, kept: bool = True) -> None:
        """Take in that a group has ended, and is of use or not."""

    @abstractmethod
    def batch(self, version: int = 0) -> list[int] | None:
        """Name the groups to be trained at this version of the weights; None while they are not there."""

    @abstractmethod
    def exhausted(self) -> bool:
        """Tell whether the batch can no longer be filled."""

    @abstractmethod
    def dropped(self) -> list[int]:
        """Name the groups that were of no use and are used up, since the batch before."""


class Selection(Order):
    """The bookkeeping of one step, which its two orders share."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._kept: dict[int, bool | None] = {}  # None while it runs
        self._num_running = self._num_kept = 0
        self._chosen: list[int] = []
        self._dropped: list[int] = []

    def admits(self) -> int:
        """Count the groups to be begun now: as many as are expected to fill the batch, by the share kept so far."""
        if self.limits.wave:
            return 0 if self._num_running or self.complete() else min(self.limits.wave, self.room())
        missing = self.limits.wanted - self._num_kept
        if missing <= 0 or self.complete():
            return 0
        judged = len(self._kept) - self._num_running
        share = (self._num_kept + _PRIOR * self.limits.expected) / (judged + _PRIOR)
        running = min(math.ceil(missing / share) + self.limits.extra, self.limits.in_flight)
        return max(0, min(running - self._num_running, self.room()))

    def room(self) -> int:
        """Count the groups that may still be begun, ever."""
        return self.limits.most - len(self._kept)

    def begin(self, group: int, version: int = 0, *, overdue: bool = False) -> None:
        self._kept[group] = None
        self._num_running += 1

    def end(self, group: int, *, kept: bool = True) -> None:
        self._kept[group] = kept
        self._num_running -= 1
        self._num_kept += kept

    @abstractmethod
    def complete(self) -> bool:
        """Tell whether the batch is known."""

    def batch(self, version: int = 0) -> list[int] | None:
        return self.chosen() if self.complete() else None

    def exhausted(self) -> bool:
        """Tell whether nothing runs, nothing more may be begun, and the batch is not full."""
        return not self.complete() and self._num_running == 0 and self.room() == 0

    def chosen(self) -> list[int]:
        """Name the groups of the batch, when it is complete."""
        return self._chosen

    def dropped(self) -> list[int]:
        return self._dropped


class DrawOrder(Selection):
    """The first `wanted` kept groups in the order in which their prompts were drawn, however long others took.

    So the batch is a function of the draws alone: nothing favours short responses, and a resumed run takes the same.
    """

    def __init__(self, limits: Limits) -> None:
        super().__init__(limits)
        self._ahead: deque[int] = deque()  # all but the judged beginning of the draws

    def begin(self, group: int, version: int = 0, *, overdue: bool = False) -> None:
        super().begin(group)
        self._ahead.append(group)

    def end(self, group: int, *, kept: bool = True) -> None:
        super().end(group, kept=kept)
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

    def begin(self, group: int, version: int = 0, *, overdue: bool = False) -> None:
        super().begin(group)
        if overdue:
            self._overdue.add(group)

    def end(self, group: int, *, kept: bool = True) -> None:
        super().end(group, kept=kept)
        ended = self._late if group in self._overdue else self._chosen
        self._overdue.discard(group)
        (ended if kept else self._dropped).append(group)

    def complete(self) -> bool:
        return not self._overdue and self._num_kept >= self.limits.wanted

    def chosen(self) -> list[int]:
        return [*self._late, *self._chosen][: self.limits.wanted]
