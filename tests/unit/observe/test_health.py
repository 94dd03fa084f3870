"""Each health rule speaks in a run in which its fault was planted, and only it; a run that learns is left in peace."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest

from tests.unit.observe.run_factory import healthy
from verl_like.observe.health import RULES, Verdict, check_health

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
    "stale weights": late(training__weight_staleness=3.0),
    "weights that do not move": late(weight_sync__num_changed=0.0),
    "duplicates": late(response__duplicate_fraction=0.8),
    "failed rewards": lambda step: (
        {"reward/failure_fraction": 0.1, "reward/failures/timeout": 2.0} if step == 57 else {}
    ),
    "lost responses": lambda step: {"response/aborted_ratio": 0.1} if step == 59 else {},
}


def test_every_rule_has_a_planted_fault() -> None:
    assert set(FAULTS) == {rule.name for rule in RULES}


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
