"""Each health rule speaks in a run in which its fault was planted, and only it; a run that learns is left in peace."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from tests.unit.observe.run_factory import healthy
from verl_like.config.trainer import HEALTH_RULES
from verl_like.observe.health import RULES, Verdict, check_health
from verl_like.observe.health_watch import HealthWatch
from verl_like.observe.trackers import JsonlTracker

STEPS = 60
Planted = Callable[[int], Mapping[str, float]]


def verdicts(planted: Planted) -> dict[str, Verdict]:
    history = {step: {**healthy(step, STEPS), **planted(step)} for step in range(1, STEPS + 1)}
    return {verdict.rule.name: verdict for verdict in check_health(history)}


def late(**values: float) -> Planted:
    """These values in the last ten steps. Names with __ for the slash."""
    given = {name.replace("__", "/"): value for name, value in values.items()}
    return lambda step: given if step > STEPS - 10 else {}


FAULTS: dict[str, Planted] = {
    "mismatch drift": late(training__rollout_probs_diff_mean=0.05),
    "entropy collapse": late(actor__entropy=0.03),
    "reward saturation": late(critic__score__mean=0.995),
    "score fell": lambda step: {"critic/score/mean": 0.2 + (0.015 * step if step <= 40 else 0.6 - 0.05 * (step - 40))},
    "groups without signal": late(critic__group_zero_std_fraction=0.97),
    "length growth": late(response_length__mean=400.0),
    "truncated responses": late(response_length__clip_ratio=0.4),
    "clip storm": late(actor__pg_clipfrac=0.4),
    "policy jump": late(actor__ppo_kl=0.5),
    "gradient spikes": lambda step: {"actor/grad_norm": 30.0} if step == 55 else {},
    "skipped updates": lambda step: {"actor/skipped_steps": 1.0} if step == 58 else {},
    "numbers not finite": lambda step: {"training/not_finite": 2.0} if step == 58 else {},
    "memory growth": late(perf__cpu_memory_used_gb=40.0),
    "stale weights": late(training__weight_staleness=3.0),
    "weights that do not move": late(weight_sync__num_changed=0.0),
    "duplicates": late(response__duplicate_fraction=0.8),
    "failed rewards": lambda step: (
        {"reward/failure_fraction": 0.1, "reward/failures/timeout": 2.0} if step == 57 else {}
    ),
    "lost responses": lambda step: {"response/aborted_ratio": 0.1} if step == 59 else {},
}


def test_every_rule_has_a_planted_fault_and_a_name_in_the_settings() -> None:
    assert set(FAULTS) == {rule.name for rule in RULES}
    assert tuple(rule.name.replace(" ", "_") for rule in RULES) == HEALTH_RULES


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_told_with_its_steps_and_alone(name: str) -> None:
    found = verdicts(FAULTS[name])
    assert [verdict.rule.name for verdict in found.values() if verdict.state != "ok"] == [name]
    verdict = found[name]
    assert verdict.state == "fires" and verdict.sentence and verdict.rule.fix and verdict.metric
    assert min(verdict.steps) > 40 and max(verdict.steps) <= STEPS


def test_a_run_that_learns_is_left_in_peace() -> None:
    assert {verdict.state for verdict in verdicts(lambda step: {}).values()} == {"ok"}


def test_a_fault_that_is_over_is_told_as_earlier() -> None:
    found = verdicts(lambda step: {"actor/grad_norm": 30.0} if step == 30 else {})["gradient spikes"]
    assert (found.state, found.steps) == ("fired", (30,))


def test_log_probs_of_the_engine_that_are_no_numbers_are_told_too() -> None:
    found = verdicts(lambda step: {"training/rollout_log_probs_nonfinite": 4.0} if step == 58 else {})
    assert [name for name, verdict in found.items() if verdict.state != "ok"] == ["numbers not finite"]


def test_failures_are_told_by_kind() -> None:
    kinds = {"reward/failure_fraction": 0.2, "reward/failures/crash": 1.0, "reward/failures/timeout": 4.0}
    found = verdicts(lambda step: kinds if step in (51, 52) else {})["failed rewards"]
    assert "(timeout: 8, crash: 2)" in found.sentence


def test_short_answers_that_repeat_are_no_fault() -> None:
    repeated = late(response__duplicate_fraction=0.9, response_length__mean=4.0)
    assert verdicts(repeated)["duplicates"].state == "ok"


def test_a_metric_that_a_run_lacks_is_said() -> None:
    (first, *_) = check_health({1: {"critic/score/mean": 1.0}})
    assert (first.state, first.value) == ("unknown", None)
    assert all(verdict.state == "unknown" for verdict in check_health({}))


def watched(watch: HealthWatch, planted: Planted, steps: range) -> list[int]:
    """Steps at which the run would be stopped."""
    stopped = []
    for step in steps:
        watch.look(step, {**healthy(step, STEPS), "response_length/mean": 50.0, **planted(step)})
        stopped += [step] if watch.stopping else []
        watch.stopping = None
    return stopped


def test_a_rule_warns_once_when_it_begins_and_again_when_it_begins_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(step: int) -> Mapping[str, float]:
        return {"reward/failure_fraction": 0.1, "reward/failures/timeout": 4.0} if step in (20, 21, 50) else {}

    (tmp_path / "samples" / "train").mkdir(parents=True)
    for step in (15, 20):
        (tmp_path / "samples" / "train" / f"{step:06d}.jsonl").touch()
    assert watched(HealthWatch({}, tmp_path, None), failing, range(1, 61)) == []
    told = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(told) == 2 and all("health: failed rewards: more than 1%" in text for text in told)
    assert "could not be computed (timeout: 4)" in told[0]
    assert "reward/failure_fraction=0.1 (threshold 0.01), at step(s) 20. Responses: " in told[0]
    assert "samples/train/000020.jsonl. What helps: repair the reward function" in told[0]
    caplog.clear()
    watched(HealthWatch({"failed_rewards": "off"}, tmp_path, None), failing, range(1, 61))
    assert not caplog.records


def test_a_rule_stops_where_the_newest_step_shows_its_fault(tmp_path: Path) -> None:
    def storm(step: int) -> Mapping[str, float]:
        return {"actor/pg_clipfrac": 0.4} if step in (30, 31, 33, 35) else {}

    assert watched(HealthWatch({"clip_storm": "stop"}, tmp_path, None), storm, range(1, 61)) == [33, 35]


def test_a_resumed_run_goes_by_how_the_run_began(tmp_path: Path) -> None:
    tracker = JsonlTracker(tmp_path, new_run=True)
    for step in range(1, 21):
        tracker.log(step, {"actor/entropy": 2.0})
    calm: Planted = lambda step: {"actor/entropy": 0.05}  # noqa: E731
    actions = {"entropy_collapse": "stop"}
    assert watched(HealthWatch(actions, tmp_path, 20), calm, range(21, 27)) == [25, 26]
    assert watched(HealthWatch(actions, tmp_path, None), calm, range(21, 47)) == []


def test_a_long_run_is_watched_at_a_bounded_cost(tmp_path: Path) -> None:
    watch = HealthWatch({"entropy_collapse": "stop"}, tmp_path, None)
    for step in range(1, 1201):
        watch._add(step, {"actor/entropy": 2.0, "actor/other": 1.0})
    assert len(watch._history) == 1010 and min(watch._history) == 1 and 11 not in watch._history
    assert watch._history[1200] == {"actor/entropy": 2.0}
