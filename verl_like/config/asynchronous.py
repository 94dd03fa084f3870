"""`trainer.mode` and `async_training.*`: groups of responses that live through several versions of the weights.

docs/async.md explains them. Standard library only.
"""

import math
from dataclasses import dataclass

from verl_like.config.base import ConfigNode, above, at_least, key, one_of

BEYOND = ("wait", "continue", "drop")


@dataclass(kw_only=True, slots=True)
class AsyncTrainingConfig(ConfigNode):
    """`async_training.*`: of trainer.mode=colocate_async and separate_async."""

    over_sample_rate: float = key(0.5, above(0), unit="share of a batch")
    """What is begun beyond the batch that is wanted next: responses that run, and groups that have ended and wait, are
    together one batch and this share of another."""
    max_staleness: int = key(4, at_least(1), unit="weight versions")
    """How old a group may be when it is trained: the version before the update less the one under which its prompt was
    begun. At most max_staleness + 1 batches of groups are begun and not trained, except with beyond=continue."""
    beyond: str = key("wait", one_of(*BEYOND))
    """What becomes of a group that would be older. wait: the step before waits for it, so none is. continue: it is
    trained when it ends, however old. drop: it is aborted, and its prompt is not trained in this epoch, which favours
    short responses."""

    def groups_running(self, batch: int) -> int:
        """[groups] Whose responses run, or that have ended and wait. batch: data.train_batch_size."""
        return batch + math.ceil(batch * self.over_sample_rate)

    def groups_under_way(self, batch: int) -> float:
        """[groups] That are begun and not trained, at most: a step trains one batch, and none may be too old. Where
        they may (`continue`), a long response keeps no other group out."""
        return math.inf if self.beyond == "continue" else (self.max_staleness + 1) * batch
