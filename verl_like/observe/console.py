"""A run in the log as aligned columns: one line a step, a header every 20, validations on lines of their own."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

_HEADER_EVERY = 20


@dataclass(frozen=True, slots=True)
class _Column:
    """Column of the table.

    metrics: names of metrics, of which the first that the run has is shown.
    """

    title: str
    metrics: tuple[str, ...]
    width: int
    text: Callable[[float], str]


def _significant(value: float) -> str:
    """Format with three digits; small and large numbers with an exponent, of one digit where that suffices."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    if 0.01 <= abs(value) < 1000:
        return f"{value:.3f}"[:5] if abs(value) < 100 else f"{value:.0f}"
    mantissa, _, exponent = f"{value:.1e}".partition("e")
    return f"{mantissa}e{int(exponent)}"


def _count(value: float) -> str:
    """Format a count: 5.4k, 120k, 3.2M."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= 0.9995 * size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.0f}"


def _seconds(value: float) -> str:
    return f"{value:.2f}s" if value < 10 else f"{value:.0f}s" if value < 1000 else f"{value / 60:.0f}min"


COLUMNS = (
    _Column("score", ("critic/score/mean",), 7, _significant),
    _Column("loss", ("train/loss",), 8, _significant),
    _Column("length", ("response_length/mean",), 7, lambda value: f"{value:.0f}" if value >= 100 else f"{value:.1f}"),
    _Column("cut", ("response_length/clip_ratio",), 5, lambda value: f"{value:.0%}"),
    _Column("entropy", ("actor/entropy",), 8, _significant),
    _Column("kl", ("actor/kl_loss", "actor/ppo_kl"), 9, _significant),
    _Column("grad", ("actor/grad_norm",), 9, _significant),
    _Column("tok/s", ("perf/throughput",), 6, _count),
    _Column("time", ("timing_s/step",), 6, _seconds),
)


class StepTable:
    """The lines of one run. The columns stay those of its first step; what a step lacks is a dash."""

    def __init__(self) -> None:
        self._columns: tuple[_Column, ...] = ()
        self._num_lines = 0

    def lines(self, step: int, metrics: Mapping[str, float]) -> Iterator[str]:
        """Write the lines of a step, at most three: header, values, validation."""
        if any(name in metrics for column in COLUMNS for name in column.metrics):
            if not self._columns:
                found = (column for column in COLUMNS if any(name in metrics for name in column.metrics))
                self._columns = tuple(found)
            if self._num_lines % _HEADER_EVERY == 0:
                yield f"{'step':>5}" + "".join(f"{column.title:>{column.width}}" for column in self._columns)
            self._num_lines += 1
            yield f"{step:>5}" + "".join(f"{_cell(column, metrics):>{column.width}}" for column in self._columns)
        validation = validation_text(metrics)
        if validation:
            yield f"validation at step {step}: {validation}"


def _cell(column: _Column, metrics: Mapping[str, float]) -> str:
    name = next((name for name in column.metrics if name in metrics), None)
    return "-" if name is None else column.text(metrics[name])


def validation_text(metrics: Mapping[str, float]) -> str:
    """Write `gsm8k acc/mean@1 0.512, ...` of all data sources; empty where there is no validation."""
    means = {name: value for name, value in metrics.items() if name.startswith("val-core/") and "/mean@" in name}
    parts = []
    for name, value in means.items():
        source, _, variable = name.removeprefix("val-core/").rpartition("/")
        source, _, kind = source.rpartition("/")
        parts.append(f"{source} {kind}/{variable} {value:.4g}")
    return ", ".join(parts)
