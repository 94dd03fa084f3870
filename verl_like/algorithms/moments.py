"""Mean and variance over all values seen so far, joined batch by batch, without keeping the values."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningMoments:
    """Running count, mean and variance, an immutable value: `update` returns the next one.

    Parallel variance (Chan, Golub and LeVeque 1979), in float64.
    """

    count: int = 0
    mean: float = 0.0
    var: float = 0.0  # biased: divided by count

    @property
    def std(self) -> float:
        """Unbiased standard deviation; 0 with fewer than two values."""
        return math.sqrt(self.var * self.count / (self.count - 1)) if self.count > 1 else 0.0

    def update(self, values_B: Tensor) -> RunningMoments:
        """The moments after these values too."""
        added = len(values_B)
        if not added:
            return self
        values = values_B.double()
        mean, var = values.mean().item(), values.var(correction=0).item()
        total, difference = self.count + added, mean - self.mean
        squares = self.var * self.count + var * added + difference**2 * self.count * added / total
        return RunningMoments(count=total, mean=self.mean + difference * added / total, var=squares / total)

    def state_dict(self) -> dict[str, float]:
        """Plain numbers for the checkpoint; JSON keeps them exactly."""
        return dataclasses.asdict(self)

    @classmethod
    def from_state_dict(cls, state: dict[str, float]) -> RunningMoments:
        """Restore the moments from the numbers that `state_dict` gave."""
        return cls(count=int(state["count"]), mean=state["mean"], var=state["var"])
