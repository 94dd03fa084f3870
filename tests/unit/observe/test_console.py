"""The console's columns, and what is said once."""

from __future__ import annotations

import logging
from typing import Any, cast

import pytest

from verl_like.kit.speed.report import SpeedReport
from verl_like.observe import live_display
from verl_like.observe.console import StepTable

METRICS = {
    "critic/score/mean": 0.51234,
    "response_length/mean": 812.4,
    "response_length/clip_ratio": 0.125,
    "actor/entropy": 1.2345,
    "actor/ppo_kl": 3.2e-5,
    "actor/grad_norm": float("nan"),
    "perf/throughput": 12345.6,
    "timing_s/step": 71.4,
    "actor/lr": 1e-6,
}


def test_columns_are_aligned_with_a_header_every_twenty() -> None:
    table = StepTable()
    lines = [line for step in range(1, 42) for line in table.lines(step, METRICS)]
    assert lines[0].split() == ["step", "score", "length", "cut", "entropy", "kl", "grad", "tok/s", "time"]
    assert lines[1].split() == ["1", "0.512", "812", "12%", "1.234", "3.2e-5", "nan", "12.3k", "71s"]
    assert [number for number, line in enumerate(lines) if line == lines[0]] == [0, 21, 42]
    assert len({len(line) for line in lines}) == 1 and len(lines[0]) <= 80 - len("20:45:13 INFO     ")


@pytest.mark.parametrize("value", [0.0, -0.5, 0.0099, 12.345, 999.9, 1234.5, -3.2e-12, 7e15, float("inf")])
def test_no_number_breaks_a_column(value: float) -> None:
    table = StepTable()
    wide = [*table.lines(12345, METRICS), *table.lines(2, METRICS | {"actor/ppo_kl": value, "actor/grad_norm": value})]
    assert len({len(line) for line in wide}) == 1 and len(wide[2].split()) == 9


def test_columns_are_the_runs_own_and_stay() -> None:
    """kl_loss where there is one; without an update of the actor the columns keep their places."""
    table = StepTable()
    header, first = table.lines(1, {"critic/score/mean": 1.0, "actor/kl_loss": 0.25, "actor/ppo_kl": 0.5})
    assert header.split() == ["step", "score", "kl"] and first.split() == ["1", "1.000", "0.250"]
    (second,) = table.lines(2, {"critic/score/mean": 0.5})
    assert second.split() == ["2", "0.500", "-"] and len(second) == len(first)


def test_a_validation_has_a_line_of_its_own() -> None:
    table, validation = (
        StepTable(),
        {"val-core/openai/gsm8k/acc/mean@1": 0.5, "val-core/openai/gsm8k/acc/best@4/mean": 1},
    )
    assert list(table.lines(0, validation)) == ["validation at step 0: openai/gsm8k acc/mean@1 0.5"]
    assert [line.split()[0] for line in table.lines(1, METRICS | validation)] == ["step", "1", "validation"]


def test_advice_is_given_again_after_a_pause_only(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    taking_turns = ["grading takes 20% of the step", "grading takes 35% of the step", None, "raise rollout.n"] * 14
    monkeypatch.setattr("verl_like.kit.speed.report.advise", lambda *_: taking_turns.pop(0))
    report = SpeedReport(cast(Any, None), cast(Any, None))
    with caplog.at_level(logging.INFO, logger="verl_like"):
        for _ in range(53):
            report.log({"step": 1.0, "gen": 0.5}, {"perf/floor_ratio/gen": 602.5})
    messages = [record.getMessage() for record in caplog.records]
    assert messages == [
        "advice: grading takes 20% of the step",
        "advice: raise rollout.n",
        "advice: grading takes 20% of the step",
    ]


def test_floors_are_in_the_panel() -> None:
    metrics = {"timing_s/gen": 2.0, "timing_s/update_actor": 3.0, "timing_s/adv": 0.1, "timing_s/step": 6.0}
    floors = {"perf/floor_ratio/gen": 602.5, "perf/floor_ratio/update_actor": 1.46}
    assert live_display.floor_text(metrics | floors) == "update_actor 1.5x, gen >100x of the hardware's time"
    assert live_display.floor_text(metrics) == ""
