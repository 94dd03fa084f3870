"""Menus of the algorithms that a key can choose, a row each: estimators, policy losses, KL kinds, aggregations.

A row (menus.txt) owns its name, the keys it reads, what it needs of the run, its source, the place of its code and its
line in docs/algorithms.md. Ranges, suggestions, warnings, the roles of a run, look-ups and the tables of the page
follow from the rows; tests/unit/algorithms prove them against the code. Code of the user's own has no row: nothing is
known of it. Standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from verl_like.text import table_rows
from verl_like.user_code import load

KL_MENU = "algorithm.kl_penalty / actor.kl_loss_type"
DEFAULT_AGGREGATION = "token-mean"  # where loss_agg_mode is null and the loss has none of its own


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One value of a key.

    code: place of its function, module:name below verl_like.algorithms; empty where the engine computes it.
    cells: of its row in docs/algorithms.md.
    knobs: keys that it reads and others of its menu do not; those that end in "." are sections.
    """

    name: str
    code: str = ""
    cells: tuple[str, ...] = ()
    knobs: tuple[str, ...] = ()

    @property
    def reads(self) -> tuple[str, ...]:
        return self.knobs

    def load(self, code: str = "") -> Any:
        """Import its function, or another one that its row names."""
        return load(f"verl_like.algorithms.{code or self.code}", self.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimator(Choice):
    """A value of algorithm.adv_estimator. Its knobs stand below `algorithm`.

    critic: it needs values.
    compares: it compares the responses of a group, and learns nothing from a group of one.
    turns: it needs the turns of multi-turn rollout.
    greedy: it needs a greedy response to each prompt, as a baseline.
    sum_pi_squared: it needs each token's sum of squared probabilities, from the pass of old log-probs.
    whitens: its advantages are whitened.
    """

    critic: bool = False
    compares: bool = False
    turns: bool = False
    greedy: bool = False
    sum_pi_squared: bool = False
    whitens: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss(Choice):
    """A value of actor.policy_loss.loss_mode. Its knobs stand below `actor_rollout_ref.actor`.

    of_ratio: further keys that it reads, which change no gradient while every ratio is 1.
    aggregation: how its tokens are joined (a value of loss_agg_mode, which then joins entropy, KL and sft terms alone);
        None: as loss_agg_mode says, or, where that is null, as `default_aggregation`.
    pulls_without_advantage: a term of its own has a gradient even where the advantage is 0.
    one_weight_per_row: it is one of the whole row: importance weights are joined by their geometric mean.
    selects: place of the function that chooses its tokens over the mini-batch, from the old log-probs.
    without_ratio: nothing compares with the policy before the update, or holds later updates back.
    """

    of_ratio: tuple[str, ...] = ()
    aggregation: str | None = None
    default_aggregation: str = DEFAULT_AGGREGATION
    pulls_without_advantage: bool = False
    one_weight_per_row: bool = False
    selects: str = ""
    without_ratio: bool = False

    @property
    def reads(self) -> tuple[str, ...]:
        return self.of_ratio + self.knobs


@dataclass(frozen=True, slots=True, kw_only=True)
class KLKind(Choice):
    """A value of algorithm.kl_penalty and actor.kl_loss_type.

    unbiased: on samples of the policy; a ratio carries such an estimate over to other samples.
    aimless: its gradient has mean 0 as a loss.
    """

    unbiased: bool = False
    aimless: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Aggregation(Choice):
    """A value of actor.loss_agg_mode and critic.loss_agg_mode."""


Row = TypeVar("Row", bound=Choice)


def readers(menu: Mapping[str, Choice]) -> dict[str, tuple[str, ...]]:
    """Key -> the choices that read it."""
    keys = dict.fromkeys(key for row in menu.values() for key in row.reads)
    return {key: tuple(name for name, row in menu.items() if key in row.reads) for key in keys}


def _menu(kind: type[Row]) -> dict[str, Row]:
    """Read the rows below a class's heading, by name."""
    text = _TEXT.partition(f"\n[{kind.__name__}]\n")[2].partition("\n[")[0]
    rows: dict[str, Row] = {}
    for names, code, traits, *cells in table_rows(text):
        given: dict[str, Any] = {}
        for trait in filter(None, traits.split("; ")):
            key, _, value = trait.partition("=")
            given[key] = tuple(value.split()) if key in ("knobs", "of_ratio") else value or True
        rows |= {name: kind(name=name, code=code, cells=tuple(cells), **given) for name in names.split()}
    return rows


_TEXT = Path(__file__).with_suffix(".txt").read_text(encoding="utf-8")
ESTIMATORS, LOSSES, KL_KINDS, AGGREGATIONS = _menu(Estimator), _menu(Loss), _menu(KLKind), _menu(Aggregation)
