"""docs/metrics.md names every metric that this package makes."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

from tests.unit.observe import factory
from verl_like.observe.console import COLUMNS
from verl_like.observe.metrics import (
    memory_metrics,
    perf_metrics,
    rollout_metrics,
    sequence_balance_metrics,
    training_metrics,
)

_DOCS = Path(__file__).parents[3] / "docs" / "metrics.md"


def documented() -> set[str]:
    """Names in backquotes, with a/{b,c} spelled out."""
    names: set[str] = set()
    for quoted in re.findall(r"`([^`]+)`", _DOCS.read_text(encoding="utf-8")):
        parts = [
            part.strip("{}").split(",") if part[0] == "{" else [part]
            for part in re.split(r"(\{[^}]*\})", quoted)
            if part
        ]
        names |= {"".join(combination) for combination in itertools.product(*parts)}
    return names


def made() -> set[str]:
    return {
        *rollout_metrics(factory.rollouts([[1]]), 4),
        *perf_metrics(1, 1.0, 1),
        *sequence_balance_metrics([1], [[0]]),
        *training_metrics(1, 0),
        *memory_metrics(),
        *(name for column in COLUMNS for name in column.metrics),
    }


@pytest.mark.parametrize("name", sorted(made()))
def test_every_metric_is_documented(name: str) -> None:
    assert name in documented()


def test_the_check_can_fail() -> None:
    assert "perf/unheard_of" not in documented()
