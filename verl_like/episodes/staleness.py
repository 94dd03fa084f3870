"""Bookkeeping of groups that live through several versions of the weights, and the choice of those a step trains. Pure.

A group begins under a version of the weights. It may be trained at any version up to `bound` later: that is its
deadline. A step trains one batch, earliest deadlines first, and in the mode "wait" only when those that are left can
all keep theirs: for each k, at most k batches of them are due within the next k steps.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from verl_like.batch import Rollouts
from verl_like.episodes.selection import Order
from verl_like.rollout.client import Occupancy


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """Limits of what may be in flight.

    groups: that are begun and not in the weights.
    responses: that are sampled, or whose group waits for graders or for a step.
    each: responses of a group.
    judged: groups between two batches, after which the next one is not to be hoped for.
    """

    groups: float = math.inf
    responses: float = math.inf
    each: int = 1
    judged: float = math.inf


class Book(Order):
    """The groups that are begun and not trained. They are named by the numbers of their draws.

    wanted: groups of a batch. bound: [versions] between beginning and training. waits: none may be older.

    A group is first in `running`, and as long as responses of it are sampled in `sampling` too; then in `ended`; then
    a step trains it, and its place is free (of `Room.groups`) when that step's weights are there.
    """

    def __init__(self, wanted: int, bound: int, *, waits: bool, room: Room | None = None) -> None:
        self.wanted, self._bound, self._waits, self._room = wanted, bound, waits, room or Room()
        self.running: dict[int, int] = {}  # group -> version under which it began
        self.ended: dict[int, int] = {}
        self.sampling: dict[int, int] = {}  # group -> its responses that are sampled
        self.num_sampling = 0  # responses, the sum of these
        self.needed: float = math.inf  # groups, by this step and those that follow
        self._being_trained = 0  # groups
        self._num_judged, self._dropped = 0, list[int]()  # since the last batch

    def __len__(self) -> int:
        return len(self.running) + len(self.ended)

    def admits(self) -> int:
        """Count the groups to be begun now; none while a whole batch waits."""
        if len(self.ended) >= self.wanted:
            return 0
        waiting = len(self) - len(self.sampling)  # for graders, or for a step
        groups = min(self._room.groups - self._being_trained, self.needed) - len(self)
        return max(0, int(min(groups, (self._room.responses - self.num_sampling) // self._room.each - waiting)))

    def begin(self, group: int, version: int = 0, *, overdue: bool = False) -> None:
        self.running[group] = version
        self.sampling[group] = self._room.each
        self.num_sampling += self._room.each

    def sampled(self, group: int, responses: int | None = None) -> int:
        left = self.sampling.pop(group, 0)
        freed = left if responses is None else min(responses, left)
        self.num_sampling -= freed
        if left > freed:
            self.sampling[group] = left - freed
        return freed

    def end(self, group: int, *, kept: bool = True) -> None:
        self._num_judged += 1
        self.sampled(group)
        begun = self.running.pop(group)
        if kept:
            self.ended[group] = begun
        else:
            self._dropped.append(group)

    def forget(self, group: int) -> None:
        """Take out a group that is trained, or never will be."""
        self.sampled(group)
        self.running.pop(group, None)
        self.ended.pop(group, None)

    def train(self, batch: Iterable[int]) -> None:
        """Take out the groups that a step trains."""
        for group in batch:
            self.forget(group)
        self.needed -= self.wanted
        self._being_trained, self._num_judged, self._dropped = self.wanted, 0, []

    def trained(self) -> None:
        """Free the places of the last batch: it is in the weights."""
        self._being_trained = 0

    def dropped(self) -> list[int]:
        return self._dropped

    def exhausted(self) -> bool:
        return self._num_judged >= self._room.judged

    def batch(self, version: int = 0) -> list[int] | None:
        if len(self.ended) < self.wanted:
            return None
        oldest_first = sorted(self.ended, key=lambda group: (self.ended[group], group))
        chosen = oldest_first[: self.wanted]
        left = [*(self.ended[group] for group in oldest_first[self.wanted :]), *self.running.values()]
        if self._waits and self.running and not self._in_time(left, version):
            return None
        return sorted(chosen)

    def too_old(self, version: int) -> list[int]:
        """Name the groups that would be older than the bound if they were trained at this version."""
        return [group for group, begun in (self.running | self.ended).items() if begun + self._bound < version]

    def why_idle(self, pending: int) -> str:
        """Say why a replica has nothing to sample (see CAUSES). pending: requests that have not ended."""
        if self.num_sampling > pending:
            return "tool"  # of an episode, or its environment
        if len(self.ended) >= self.wanted:
            return "trainer"  # it has a batch to train first
        if len(self.running) > len(self.sampling):  # of some, all responses have ended
            return "grader"
        return "tail"

    def _in_time(self, begun: Iterable[int], version: int) -> bool:
        """Return True where groups begun under these versions can all be trained in time by the steps that follow."""
        steps_left = sorted(begin + self._bound - version for begin in begun)
        return all(place < steps * self.wanted for place, steps in enumerate(steps_left))


def staleness_metrics(rollouts: Rollouts, version: int) -> dict[str, float]:
    """Measure how stale the sampled tokens of a batch are at this version of the weights.

    staleness/{mean,max} [versions] and staleness/share_<age>: the age of tokens, and their share by age.
    async/mixed_fraction: share of rows that several versions sampled.
    async/reprefill_tokens: context that was computed again for these rows after a change of the weights.
    """
    mask_T, versions_T = rollouts.response_mask_T, rollouts.weight_version_T
    age_T = (version - versions_T[mask_T]).double()
    if not len(age_T):
        return {}
    metrics = {"staleness/mean": age_T.mean().item(), "staleness/max": age_T.max().item()}
    for age, count in zip(*(each.tolist() for each in age_T.unique(return_counts=True)), strict=True):
        metrics[f"staleness/share_{int(age)}"] = count / len(age_T)
    mixed = again = 0
    lengths = rollouts.response_length_B.tolist()
    for prompt, sampled_R, version_R in zip(
        rollouts.prompt_length_B.tolist(), mask_T.split(lengths), versions_T.split(lengths), strict=True
    ):
        places = sampled_R.nonzero()[:, 0]
        changed = places[1:][version_R[places].diff() != 0]
        mixed += len(changed) > 0
        again += len(changed) * prompt + int(changed.sum())
    return metrics | {"async/mixed_fraction": mixed / len(lengths), "async/reprefill_tokens": float(again)}


CAUSES: tuple[str, ...] = ("tail", "tool", "grader", "trainer", "weights")


class IdleClock:
    """Shares of the replicas' time by cause, added up at each look.

    paused_too: replicas that serve nothing now wait for weights (where a pool does nothing but sample); otherwise they
    train, and that time does not count.
    """

    def __init__(self, *, paused_too: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._paused_too, self._clock = paused_too, clock
        self._last, self._total_s = clock(), 0.0
        self._idle_s = dict.fromkeys(CAUSES, 0.0)

    def look(self, seen: Occupancy, cause: str) -> None:
        """Add up the time since the last look; `cause` is why replicas that serve have nothing to do."""
        now = self._clock()
        passed, self._last = now - self._last, now
        counted = seen.replicas if self._paused_too else seen.replicas - seen.held
        self._total_s += passed * counted
        self._idle_s[cause] += passed * seen.idle
        if self._paused_too:
            self._idle_s["weights"] += passed * seen.held

    def shares(self) -> dict[str, float]:
        """Tell async/idle_<cause> since the clock was made, or `restart`."""
        return {f"async/idle_{cause}": idle_s / (self._total_s or 1.0) for cause, idle_s in self._idle_s.items()}

    def restart(self) -> None:
        """Count anew."""
        self._total_s, self._idle_s = 0.0, dict.fromkeys(CAUSES, 0.0)
