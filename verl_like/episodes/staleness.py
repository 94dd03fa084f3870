"""Which groups a step trains where they live through several versions of the weights. Pure bookkeeping.

A group begins under a version of the weights. It may be trained at any version up to `bound` later: that is its
deadline. A step trains one batch, earliest deadlines first, and in the mode "wait" only when those that are left can
all keep theirs: for each k, at most k batches of them are due within the next k steps.
"""

from __future__ import annotations

from collections.abc import Iterable

from verl_like.batch import Rollouts


class Book:
    """The groups that are begun and not trained. They are named by the numbers of their draws.

    wanted: groups of a batch. bound: [versions] between beginning and training. waits: none may be older.
    """

    def __init__(self, wanted: int, bound: int, *, waits: bool) -> None:
        self.wanted, self._bound, self._waits = wanted, bound, waits
        self.running: dict[int, int] = {}  # group -> version under which it began
        self.ended: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self.running) + len(self.ended)

    def begin(self, group: int, version: int) -> None:
        """It runs from now on."""
        self.running[group] = version

    def end(self, group: int) -> None:
        """It can be trained."""
        self.ended[group] = self.running.pop(group)

    def forget(self, group: int) -> None:
        """It is trained, or never will be."""
        self.running.pop(group, None)
        self.ended.pop(group, None)

    def batch(self, version: int) -> list[int] | None:
        """The groups to be trained at this version, in the order of their draws; None while they are not there."""
        if len(self.ended) < self.wanted:
            return None
        oldest_first = sorted(self.ended, key=lambda group: (self.ended[group], group))
        chosen = oldest_first[: self.wanted]
        left = [*(self.ended[group] for group in oldest_first[self.wanted :]), *self.running.values()]
        if self._waits and self.running and not self._in_time(left, version):
            return None
        return sorted(chosen)

    def too_old(self, version: int) -> list[int]:
        """Groups that would be older than the bound if they were trained at this version."""
        return [group for group, begun in (self.running | self.ended).items() if begun + self._bound < version]

    def _in_time(self, begun: Iterable[int], version: int) -> bool:
        """Whether groups that began under these versions can all be trained in time by the steps after this one."""
        steps_left = sorted(begin + self._bound - version for begin in begun)
        return all(place < steps * self.wanted for place, steps in enumerate(steps_left))


def staleness_metrics(rollouts: Rollouts, version: int) -> dict[str, float]:
    """How old the sampled tokens of a batch are at this version [versions]: staleness/{mean,max}, and the share of
    tokens by age; async/mixed_fraction: rows that several versions sampled; async/reprefill_tokens: context that was
    computed again for them after a change of the weights."""
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
