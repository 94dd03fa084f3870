"""Several data sources in fixed proportions (data.domain_weights), whatever the number of their rows.

Each draw gives every source its weight as credit, and the source with the most credit the row: after t draws a source
has had its share of t to within a row, in every batch and, because the sources alternate, in every mini-batch of it.
Inside a source the rows come epoch after epoch, in an order that depends on the seed, the source's name and its epoch.
"""

from __future__ import annotations

import difflib
import logging
import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from verl_like.data.sampler import Sampler, check_identity

logger = logging.getLogger(__name__)


class WeightedSampler(Sampler):
    """Sampler that draws dataset positions by weight of their domain. Same state rules as ResumableSampler.

    domains: the data source of each position.
    weights: one for every source that occurs; 0 leaves a source out.
    """

    def __init__(
        self,
        domains: Sequence[str],
        weights: Mapping[str, float],
        *,
        shuffle: bool,
        seed: int,
        identity: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        _check_names(set(domains), weights)
        total = sum(weights.values())
        self.weights = {name: weight / total for name, weight in sorted(weights.items()) if weight > 0}
        sources = np.array(domains, dtype=object)
        self._positions = {name: np.flatnonzero(sources == name) for name in self.weights}
        self._shuffle, self._seed, self._num_rows = shuffle, seed, len(domains)
        self._identity = identity if identity is not None else {"rows": len(domains)}
        self._drawn = dict.fromkeys(self.weights, 0)
        self._credit = dict.fromkeys(self.weights, 0.0)
        self._orders: dict[tuple[str, int], np.ndarray] = {}

    @property
    def epoch(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Count the times that as many rows were drawn as the whole data set has."""
        return self.draws // self._num_rows

    def check_batch(self, batch_size: int) -> None:
        """Raise ValueError if a source's share of a batch is more than its rows: a prompt would be in a batch twice."""
        for name, weight in self.weights.items():
            share, rows = math.ceil(weight * batch_size), len(self._positions[name])
            if share > rows:
                raise ValueError(
                    f"data.domain_weights.{name}: its share of a batch of {batch_size} prompts is {share}, but it has "
                    f"{rows} rows; lower its weight or data.train_batch_size, or give it more rows"
                )

    def _fresh(self, count: int, *, drop_last: bool) -> list[int]:
        """Draw rows by weight. Epochs do not end here, so that `drop_last` drops none."""
        return [self._next() for _ in range(count)]

    def _next(self) -> int:
        for name, weight in self.weights.items():
            self._credit[name] += weight
        chosen = max(self._credit, key=self._credit.__getitem__)
        self._credit[chosen] -= 1.0
        epoch, offset = divmod(self._drawn[chosen], len(self._positions[chosen]))
        if offset == 0 and epoch > 0:
            logger.info("data source %s begins its epoch %d (counted from 0)", chosen, epoch)
        self._drawn[chosen] += 1
        return int(self._order(chosen, epoch)[offset])

    def _order(self, name: str, epoch: int) -> np.ndarray:
        if (name, epoch) not in self._orders:
            for stale in [key for key in self._orders if key[0] == name]:
                del self._orders[stale]
            order = self._positions[name]
            if self._shuffle:
                order = np.random.default_rng([self._seed, zlib.crc32(name.encode()), epoch]).permutation(order)
            self._orders[name, epoch] = order
        return self._orders[name, epoch]

    def state_dict(self) -> dict[str, Any]:
        """Plain values. `load_state_dict` in a new process continues with the very next row."""
        return {
            **self._drawn_state(),
            "drawn": dict(self._drawn),
            "credit": dict(self._credit),
            "weights": dict(self.weights),
            "seed": self._seed,
            "shuffle": self._shuffle,
            "identity": self._identity,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state; changed weights count from here.

        Raises ValueError if the data set is another one.
        """
        if "drawn" not in state:
            raise ValueError(
                "the checkpoint was written without data.domain_weights, so the run cannot continue where it stopped; "
                "leave them out, or start afresh with trainer.resume_mode=disable"
            )
        check_identity(state["identity"], self._identity)
        if state["weights"] != self.weights:
            logger.warning("data.domain_weights changed: %s until now, %s from here", state["weights"], self.weights)
        else:
            self._credit = {name: state["credit"][name] for name in self.weights}
        self._seed, self._shuffle = state["seed"], state["shuffle"]
        self._drawn = {name: state["drawn"].get(name, 0) for name in self.weights}
        self._load_drawn(state)
        self._orders.clear()


def _check_names(present: set[str], weights: Mapping[str, float]) -> None:
    for name in weights:
        if name not in present:
            near = difflib.get_close_matches(name, sorted(present), n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(
                f"data.domain_weights.{name}: no row has this source (there are: {', '.join(sorted(present))}){hint}"
            )
    missing = sorted(present - set(weights))
    if missing:
        raise ValueError(
            f"data.domain_weights has no weight for {', '.join(missing)}; give 0 to leave a data source out"
        )
