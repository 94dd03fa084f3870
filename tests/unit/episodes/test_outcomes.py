"""What becomes of episodes by their outcome: left out, masked, sampled again; and when the run stops."""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.episodes.faults import FUNCTIONS, Bench, Fault, bench, called
from tests.unit.episodes.fleet import Fleet, collector, dataset
from tests.unit.episodes.tools.rows import write
from verl_like.batch import Scores
from verl_like.config import AlgorithmConfig, FilterGroupsConfig, OutcomesConfig
from verl_like.config.errors import RunStopped
from verl_like.config.outcomes import GRADED, LOST
from verl_like.episodes.episode import Episode, EpisodeFailure, Turn
from verl_like.episodes.outcomes import Policies
from verl_like.rollout.rollout_engine import Sampled

pytestmark = [pytest.mark.timeout(120), pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")]
DIES, WORKS = called("act", what="die"), called("act", what="ok")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    folder = tmp_path_factory.mktemp("outcomes")
    with bench(folder, {"function_tool_path": write(folder, "f.py", FUNCTIONS)}) as made:
        yield made


def asked_for(made: Bench, prompts: int = 0) -> list[Any]:
    """Requests for the first prompt of the last step."""
    first = made.prompts[prompts].group
    return [request for request in made.model.asked if int(request.request_id.split("-")[1]) == first]


def test_a_lost_episode_is_sampled_again_with_another_seed(made: Bench) -> None:
    once = Fault(told="", says=(called("act", what="once"), "Done."))
    rollouts, scores, metrics = made.step(once, tool_error="retry")
    assert scores.valid_B.all() and rollouts.response_mask_BR.any(dim=1).all()
    assert metrics["outcomes/solved"] == 2 and metrics["outcomes/retried"] == 1
    assert metrics["outcomes/retried/tool_error"] == 1 and metrics["outcomes/lost_fraction"] == pytest.approx(1 / 3)
    assert metrics["tool/act/calls"] == 2 and metrics["tool/act/errors"] == 1
    first, *again = asked_for(made)
    assert [request.request_id for request in again] == [
        f"train-{made.prompts[0].group}-0-{turn}-retry1" for turn in (0, 1)
    ]
    assert len({request.seed for request in (first, *again)}) == 3
    assert rollouts.episode_names[:2] == [f"train-{made.prompts[0].group}-0-retry1", f"train-{made.prompts[1].group}-0"]


def test_retries_are_bounded_and_then_it_is_lost(made: Bench) -> None:
    _, scores, metrics = made.step(Fault(told="", says=(DIES,)), tool_error="retry", max_lost_fraction=1)
    assert scores.valid_B.tolist() == [False, True]
    assert metrics["outcomes/retried"] == 2 and metrics["outcomes/tool_error"] == 1
    assert metrics["outcomes/lost_fraction"] == 3 / 4 and metrics["tool/act/errors"] == 3
    assert len(asked_for(made)) == 3


@pytest.mark.parametrize(
    ("says", "ground_truth", "policy", "count"),
    [
        ("aborted", "right", {"aborted": "retry"}, "aborted"),
        ("never", "right", {"timed_out": "retry", "episode_timeout": 0.3}, "timed_out"),
        ("Done.", "raise", {"grader_error": "retry"}, "grader_error"),
    ],
)
def test_each_kind_of_loss_may_be_tried_again(
    made: Bench, says: str, ground_truth: str, policy: dict[str, Any], count: str
) -> None:
    fault = Fault(told="", says=(says,), ground_truth=ground_truth)
    _, scores, metrics = made.step(fault, max_retries=1, max_lost_fraction=1, **policy)
    assert scores.valid_B.tolist() == [False, True]
    assert metrics[f"outcomes/{count}"] == metrics[f"outcomes/retried/{count}"] == 1 and len(asked_for(made)) == 2


def test_lost_episodes_that_were_sampled_again_count_towards_the_stop(made: Bench) -> None:
    told = r"3 of 4 episodes were lost \(3 x tool_error; 2 of them were sampled again\), more than .*=0.5(.|\n)*act: "
    with pytest.raises(RunStopped, match=told):
        made.step(Fault(told="", says=(DIES,)), tool_error="retry")
    made.step(Fault(told="", says=(DIES,)))  # dropped at once: half of them, and no more
    with pytest.raises(RunStopped, match=r"1 of 2 .*outcomes.max_lost_fraction=0.4"):
        made.step(Fault(told="", says=(DIES,)), max_lost_fraction=0.4)


def test_time_in_which_no_replica_serves_is_not_counted(made: Bench) -> None:
    waits = Fault(told="", says=(called("act", what="sleep"), "Done."))
    made.model.clock, asleep = lambda: 5.0, made.model.clock
    try:
        _, scores, _ = made.step(waits, episode_timeout=0.1)
        assert scores.valid_B.all()
    finally:
        made.model.clock = asleep
    _, _, metrics = made.step(waits, episode_timeout=0.1)
    assert metrics["outcomes/timed_out"] == 1
    assert made.toolbox.call("x", "act", {"what": "ok"}).result(20).kind is None  # after the one that is still there


def test_an_episode_that_is_over_its_time_leaves_no_request(made: Bench) -> None:
    made.step(Fault(told="", says=("never",)), episode_timeout=0.2)
    assert made.model._silent == {}


def test_masked_ones_count_in_their_group_and_dropped_ones_do_not(made: Bench) -> None:
    wrong = Fault(told="", ground_truth="wrong")
    _, scores, metrics = made.step(wrong, failed="mask")
    assert scores.trained_B is not None and scores.trained_B.tolist() == [False, True]
    assert scores.score_B.tolist() == [0.0, 1.0] and metrics["outcomes/failed"] == 1
    assert scores.outcomes == ["failed", "solved"]
    _, scores, metrics = made.step(wrong, failed="drop")
    assert scores.valid_B.tolist() == [False, True] and scores.score_B[0].isnan() and scores.failures == [None, None]
    _, scores, _ = made.step(Fault(told="", says=(WORKS,) * 3), truncated="mask", solved_above=2)
    assert scores.trained_B is not None and scores.trained_B.tolist() == [False, True]


def test_a_batch_of_which_all_would_be_dropped_is_masked(made: Bench) -> None:
    _, scores, _ = made.step(solved="drop")
    assert scores.valid_B.all() and scores.trained_B is not None and not scores.trained_B.any()


def turn(reason: str = "stop") -> Turn:
    return Turn(observation_ids=[1], sampled=Sampled.of([2], [-1.0], 0), finish_reason=reason)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("episode", "score", "extras", "outcome"),
    [
        (Episode(turns=(turn(),)), 1.0, {}, "solved"),
        (Episode(turns=(turn(),)), 0.1, {"acc": False}, "failed"),
        (Episode(turns=(turn(),)), -0.5, {"acc": True}, "solved"),
        (Episode(turns=(turn(),)), 0.0, {}, "failed"),
        (Episode(turns=(turn("length"),)), 0.0, {}, "truncated"),
        (Episode(turns=(turn("length"),)), 1.0, {}, "solved"),
        (Episode(turns=(turn(),), counts={"out_of_turns": 1}), 0.0, {}, "truncated"),
        (Episode(turns=(turn(),)), None, {}, "grader_error"),
        (Episode(turns=(turn(),), failure=EpisodeFailure(kind="x", message="", outcome="aborted")), 1.0, {}, "aborted"),
    ],
)
def test_names_of_ends(episode: Episode, score: float | None, extras: dict[str, Any], outcome: str) -> None:
    assert Policies().outcome(episode, score=score, extras=extras) == outcome


def test_a_group_that_loses_its_signal_by_a_policy_is_no_use_to_dynamic_sampling(tmp_path: Path) -> None:
    rules = AlgorithmConfig(filter_groups=FilterGroupsConfig(enable=True, max_num_gen_batches=3))
    policies = Policies.from_config(OutcomesConfig(failed="drop"), max_failure_fraction=1)
    given_up = pytest.raises(RunStopped, match="gave 0 groups with a signal")  # of two, one failed and is dropped
    with collector(dataset(tmp_path), algorithm=rules, policies=policies) as (made, _), given_up:
        made.next_batch(1)


def test_policies_hold_for_episodes_of_groups_that_were_chosen(tmp_path: Path) -> None:
    rules = AlgorithmConfig(filter_groups=FilterGroupsConfig(enable=True))
    policies = Policies.from_config(OutcomesConfig(failed="mask"), max_failure_fraction=1)
    with collector(dataset(tmp_path), algorithm=rules, policies=policies) as (made, _):
        _, pending = made.next_batch(1)
        scores: Scores = pending.result()
        assert scores.trained_B is not None and torch.equal(scores.trained_B, scores.score_B > 0)
        assert made.metrics()["outcomes/failed"] == 4


def test_validation_keeps_all_scores(made: Bench) -> None:
    made.step(Fault(told="", ground_truth="wrong"))
    policies = Policies.from_config(OutcomesConfig(failed="drop", solved="mask"), max_failure_fraction=0)
    how = dataclasses.replace(made.how, purpose="val", policies=policies)
    _, pending = made.collector.answer(made.prompts, how, step=1)
    scores = pending.result()
    assert scores.valid_B.all() and scores.trained_B is None


def test_the_clock_of_a_router_stands_while_it_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("verl_like.rollout.router.time.monotonic", lambda: now[0])
    fleet = Fleet()
    try:
        assert fleet.router.serving_s() == 0  # it was held as it was made
        now[0] += 50
        fleet.router.release()
        now[0] += 3
        assert fleet.router.serving_s() == 3
        fleet.router.release()
        now[0] += 1
        fleet.router.hold()
        now[0] += 50
        assert fleet.router.serving_s() == 4
        fleet.router.release("replica 0")
        now[0] += 2
        assert fleet.router.serving_s() == 6
    finally:
        fleet.close()


@pytest.mark.parametrize("name", [*GRADED, *LOST])
def test_policies_that_cannot_be(name: str) -> None:
    for policy in ("retry", "keep") if name in GRADED else ("train", "mask"):
        with pytest.raises(ValueError, match=re.escape(f"{name}={policy!r}: choose one of ")):
            OutcomesConfig(**{name: policy})
