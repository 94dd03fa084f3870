"""Prompts drawn by what they are expected to teach (data.curriculum).

Each prompt has a success rate that is not known: Beta(a, b) as far as its responses tell. a and b are the prior's plus
the successes and failures so far, older ones weighing less (posterior and forgetting as in MoPPS, arXiv 2507.04632). A
group of n responses teaches a group-relative estimator something if it is mixed (DAPO, arXiv 2503.14476, section 3.2),
which by the beta-binomial distribution has the probability

    signal = 1 - B(a + n, b) / B(a, b) - B(a, b + n) / B(a, b)

Prompts come in the order of a run without a curriculum, pass after pass, and each is taken with the probability
signal / best, best = 1 - 2^(1-n) being the signal of a success rate that is known to be 1/2; else this pass skips it.
"""

from __future__ import annotations

import base64
import logging
import math
from typing import Any

import numpy as np

from verl_like.batch import Prompt, Scores, numeric_extras, usable_number
from verl_like.config.data import CurriculumConfig
from verl_like.config.errors import RunStopped
from verl_like.data.sampler import ResumableSampler

logger = logging.getLogger(__name__)

POOLS = ("fresh", "hopeless", "hard", "middling", "easy", "solved")
_FRESH, _HOPELESS, _HARD, _MIDDLING, _EASY, _SOLVED = range(len(POOLS))
_STRETCH = 4096  # prompts of a pass that are looked at together


def mixed_probability(a: np.ndarray, b: np.ndarray, n: int) -> np.ndarray:
    """Compute the probability that n responses neither all succeed nor all fail, for success rates of Beta(a, b)."""
    all_right, all_wrong = np.ones_like(a), np.ones_like(b)
    for k in range(n):
        all_right *= (a + k) / (a + b + k)
        all_wrong *= (b + k) / (a + b + k)
    return 1 - all_right - all_wrong


class CurriculumSampler(ResumableSampler):
    """Sampler that skips prompts of little expected signal; `epoch` counts its passes. State rules: ResumableSampler.

    A scored prompt whose chance is below min_signal is dropped, as solved or hopeless; it comes back in the first pass
    after revisit_epochs times as many draws as there are prompts. n: responses of a group.
    """

    learns = True

    def __init__(
        self, config: CurriculumConfig, num_rows: int, n: int, *, shuffle: bool, seed: int, identity: dict[str, Any]
    ) -> None:
        self._dice: tuple[int, np.ndarray] | None = None  # of one pass
        super().__init__(num_rows, shuffle=shuffle, seed=seed, identity=identity)
        self.config, self._n, self._best = config, n, 1 - 2.0 ** (1 - n)
        self._evidence = np.zeros((num_rows, 2))  # successes, failures
        self._last = np.full(num_rows, -1)  # number of the draw that was scored last; -1: none
        self._begin_period()

    def _begin_period(self) -> None:
        """Count anew what `metrics` tells."""
        self._walked = self._taken = self._early = self._without = 0
        self._told: list[str] = []  # numbers that the reward function returned
        self._scored: list[tuple[int, float, float, float, bool]] = []  # pool, expected success and signal, what came

    def beliefs(self, places: Any = slice(None)) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return mean success rate, signal and pool of the prompts at these positions, as far as is known."""
        a, b = (self._evidence[places] + self.config.prior).T
        mean, signal = a / (a + b), mixed_probability(a, b, self._n)
        pool = np.select([mean < 1 / 3, mean <= 2 / 3], [_HARD, _MIDDLING], _EASY)
        pool = np.where(signal < self.config.min_signal * self._best, np.where(mean < 0.5, _HOPELESS, _SOLVED), pool)
        return mean, signal, np.where(self._last[places] < 0, _FRESH, pool)

    def chances(self, places: Any = slice(None)) -> np.ndarray:
        """Return the probability with which a pass takes each of these prompts."""
        _, signal, pool = self.beliefs(places)
        after = math.inf if self.config.revisit_epochs is None else self.config.revisit_epochs * self._num_rows
        due = self.draws - self._last[places] >= after
        return np.where(_dropped(pool), due, signal / self._best)

    def _fresh(self, count: int, *, drop_last: bool) -> list[int]:
        """Walk on until `count` prompts are taken, none of them twice; passes end inside batches.

        Where a whole pass takes too few, the rest are those that it passed over: fresh ones, then those that were
        scored longest ago, dropped ones last.
        """
        rows, walked = list[int](), 0
        while len(rows) < count and walked < self._num_rows:
            if self.position == self._num_rows:
                self.epoch, self.position = self.epoch + 1, 0
                self._order = self._epoch_order()
            stretch = slice(self.position, self.position + min(_STRETCH, self._num_rows - walked))
            places = self._order[stretch]
            takes = (self._rolled()[stretch] < self.chances(places)) & ~np.isin(places, rows)
            chosen = np.flatnonzero(takes)[: count - len(rows)]
            rows += places[chosen].tolist()
            passed = int(chosen[-1]) + 1 if len(rows) == count else len(places)
            self.position, walked = self.position + passed, walked + passed
        self._walked, self._taken = self._walked + walked, self._taken + len(rows)
        if (missing := count - len(rows)) > 0:
            order = np.roll(self._order, -self.position)
            order = order[~np.isin(order, rows)]
            dropped = _dropped(self.beliefs(order)[2])
            best = np.lexsort((self._last[order], dropped))[:missing]  # of equal ones, as the pass goes on
            rows += order[best].tolist()
            self._early += int(dropped[best].sum())
        return rows

    def _rolled(self) -> np.ndarray:
        """Return what was rolled for each place of this pass: a function of seed and pass, as the order is."""
        if self._dice is None or self._dice[0] != self.epoch:
            self._dice = self.epoch, np.random.default_rng([self._seed, self.epoch, 1]).random(self._num_rows)
        return self._dice[1]

    def judged(self, prompt: Prompt, scores: Scores) -> None:
        """Learn how often the responses to a prompt succeed. Those without a score say nothing."""
        config, place = self.config, prompt.position
        extras = [scores.extras[row] for row in scores.valid_B.nonzero().flatten().tolist()]
        if config.metric in (None, "score"):
            values = scores.score_B[scores.valid_B].tolist()
        else:
            values = [value for extra in extras if (value := usable_number(extra.get(config.metric))) is not None]
        if not values:
            self._without += bool(extras)
            self._told = sorted({*self._told, *(name for extra in extras for name in numeric_extras(extra))})
            return
        success = sum(value > config.success_above for value in values)
        (mean,), (signal,), (pool,) = self.beliefs([place])
        self._scored.append((pool, mean, signal, success / len(values), 0 < success < len(values)))
        self._evidence[place] = self._evidence[place] * config.memory + [success, len(values) - success]
        self._last[place] = prompt.group

    def metrics(self) -> dict[str, float]:
        """Return curriculum/*, of the prompts scored since they were asked for last, against all.

        Raises RunStopped where no response had the number that says whether it succeeds.
        """
        if self._without and not self._scored:
            raise RunStopped(
                f"data.curriculum.metric={self.config.metric}: no response has this number (the reward function "
                f"returned: {', '.join(self._told) or 'a score'}); name another, or set it to null for the score"
            )
        if not self._scored:
            return {}
        pools, means, signals, successes, mixed = map(np.array, zip(*self._scored, strict=True))
        all_means, all_signals, all_pools = self.beliefs()
        again = mixed[_dropped(pools)]
        found = {
            "curriculum/success/all": all_means.mean(),
            "curriculum/success/drawn": means.mean(),
            "curriculum/success/observed": successes.mean(),
            "curriculum/signal/all": all_signals.mean(),
            "curriculum/signal/drawn": signals.mean(),
            "curriculum/signal/observed": mixed.mean(),
            "curriculum/skipped": 1 - self._taken / max(self._walked, 1),
            "curriculum/revisits": len(again),
            "curriculum/early_revisits": self._early,
        }
        for number, name in enumerate(POOLS):
            found[f"curriculum/pool/{name}"] = (all_pools == number).mean()
            found[f"curriculum/drawn/{name}"] = (pools == number).mean()
        if len(again):
            found["curriculum/revisits_mixed"] = again.mean()
        self._begin_period()
        return {name: float(value) for name, value in found.items()}

    def state_dict(self) -> dict[str, Any]:
        """Plain values: the place in the passes, and of each scored prompt its position, last draw and evidence."""
        places = np.flatnonzero(self._last >= 0)
        known = np.column_stack([places, self._last[places], self._evidence[places]])
        return {**super().state_dict(), "curriculum": base64.b64encode(known.tobytes()).decode()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state; all prompts of one without a curriculum are fresh."""
        super().load_state_dict(state)
        if "curriculum" not in state:
            logger.warning("the checkpoint was written without data.curriculum: all its prompts count as fresh")
        known = np.frombuffer(base64.b64decode(state.get("curriculum", "")), dtype=float).reshape(-1, 4)
        places = known[:, 0].astype(int)
        self._evidence[:], self._last[:], self._dice = 0, -1, None
        self._evidence[places], self._last[places] = known[:, 2:], known[:, 1].astype(int)


def _dropped(pools: np.ndarray) -> np.ndarray:
    return (pools == _HOPELESS) | (pools == _SOLVED)
