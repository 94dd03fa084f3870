"""What is wrong with one row stays that row's: a bad value planted wherever one is read between grader and gradient."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.unit.algorithms.builders import evaluated, rollouts
from tests.unit.rewards.factory import CharTokenizer
from verl_like.algorithms.completeness import complete
from verl_like.algorithms.experience import make_experience
from verl_like.algorithms.reward_shaping import RunningMoments, pf_ppo_weights, shape_rewards
from verl_like.batch import Episodes, Experience, Prompt, PromptRow, Scores, numeric_extras, unusable_extras
from verl_like.config import (
    ActorConfig,
    AgentRewardNormConfig,
    AlgorithmConfig,
    FilterGroupsConfig,
    OverlongBufferConfig,
    PFPPOConfig,
    RewardModelConfig,
    SampleWeightConfig,
)
from verl_like.config.reward_execution import JudgeConfig
from verl_like.episodes.answering import Member
from verl_like.episodes.episode import Episode, Turn
from verl_like.episodes.outcomes import Policies
from verl_like.observe.samples import to_json
from verl_like.observe.validation import majority_of, validation_metrics
from verl_like.plugins.agents.tools.text import to_reward
from verl_like.plugins.games.forms import step_of
from verl_like.plugins.reward_models.judge import Judge
from verl_like.plugins.reward_models.model_score import ModelScore
from verl_like.plugins.samplers.curriculum import scored_batch
from verl_like.rewards.grading import Answer, to_scores
from verl_like.rewards.manager import RewardManager
from verl_like.rewards.reward_call import RewardCall, RewardOutcome
from verl_like.rewards.worker import _outcomes, to_outcome
from verl_like.rollout.rollout_engine import Sampled

MISSING = object()
BAD: dict[str, Any] = {
    "missing": MISSING,
    "none": None,
    "nan": math.nan,
    "inf": math.inf,
    "minus inf": -math.inf,
    "huge": 1e308,
    "barely huge": 1e39,
    "huge int": 10**400,
    "text": "1.0",
    "list": [1.0],
    "tensor": torch.ones(2),
    "nan tensor": torch.tensor(math.nan),
    "array": np.ones(3),
    "huge numpy": np.float64(1e200),
    "decimal nan": Decimal("NaN"),
    "complex": 1 + 0j,
    "bytes": b"1",
    "dict in dict": {"a": {"b": 1}},
    "object": object(),
}
GOOD: dict[str, Any] = {
    "bool": True,
    "int": 1,
    "numpy": np.float32(1),
    "numpy bool": np.True_,
    "tensor": torch.tensor([1.0]),
    "decimal": Decimal(1),
}
bad = pytest.mark.parametrize("value", BAD.values(), ids=BAD.keys())
good = pytest.mark.parametrize("value", GOOD.values(), ids=GOOD.keys())


def returned(value: Any, score: float = 1.0) -> RewardOutcome:
    """Of a reward function that gives this beside the score."""
    return to_outcome({"score": score} | ({} if value is MISSING else {"part": value}))


def batch_of(
    values: Sequence[Any], infos: Sequence[Mapping[str, Any]] = ({}, {}, {}, {}, {}, {})
) -> tuple[Any, Scores]:
    """Two groups of three, with these values under `part`."""
    groups = [0, 0, 0, 1, 1, 1][: len(values)]
    rows = [
        PromptRow(index=group, data_source="toy", messages=[], extra_info=dict(info))
        for group, info in zip(groups, infos, strict=False)
    ]
    batch = rollouts((2, 3, 1, 2, 2, 4)[: len(values)], groups, width=4).replace(rows=rows)
    outcomes = [returned(value, score) for value, score in zip(values, (1.0, 0.0, 0.5, 2.0, 1.0, 0.0), strict=False)]
    return batch, to_scores(outcomes, ["toy"] * len(values))


SHAPING = {
    "gdpo": (AlgorithmConfig(adv_estimator="gdpo", gdpo_reward_keys=["score", "part"]), RewardModelConfig()),
    "overlong": (
        AlgorithmConfig(adv_estimator="grpo"),
        RewardModelConfig(overlong_buffer=OverlongBufferConfig(enable=True, len=2, only_key="part")),
    ),
    "filter": (
        AlgorithmConfig(adv_estimator="rloo", filter_groups=FilterGroupsConfig(enable=True, metric="part")),
        RewardModelConfig(),
    ),
}


def trained(algorithm: AlgorithmConfig, reward_model: RewardModelConfig, batch: Any, scores: Scores) -> Experience:
    shaped = shape_rewards(algorithm, reward_model, batch, scores, RunningMoments(), 4)
    given = {"kl_coef": 0.0, "reward_B": shaped.reward_B}
    return make_experience(algorithm, ActorConfig(), batch, scores, evaluated(batch), **given)[0]


@pytest.mark.parametrize("way", SHAPING)
@bad
def test_a_row_without_what_training_reads_is_left_out_and_named(way: str, value: Any) -> None:
    algorithm, reward_model = SHAPING[way]
    batch, scores = batch_of([0, value, 1, 1, 0, 1])
    found = complete(scores, batch.rows, algorithm, reward_model=reward_model)
    assert found.valid_B.tolist() == [True, False, True, True, True, True]
    failure = found.failures[1]
    assert failure is not None and (failure.row, failure.kind) == (1, "bad_value")
    key = {
        "gdpo": "algorithm.gdpo_reward_keys",
        "overlong": "reward_model.overlong_buffer.only_key",
        "filter": "algorithm.filter_groups.metric",
    }[way]
    assert failure.message.startswith(f"{key}=part: ")
    others = [0, 2, 3, 4, 5]
    expected = trained(algorithm, reward_model, batch.select(others), scores.select(others))
    experience = trained(algorithm, reward_model, batch, found)
    assert torch.equal(experience.advantages_T, expected.advantages_T) and experience.advantages_T.isfinite().all()
    if way != "filter":  # the functions leave it out without being told, too
        assert torch.equal(trained(algorithm, reward_model, batch, scores).advantages_T, expected.advantages_T)


@pytest.mark.parametrize("way", SHAPING)
@good
def test_numbers_of_all_kinds_are_read(way: str, value: Any) -> None:
    algorithm, reward_model = SHAPING[way]
    batch, scores = batch_of([0, value, 1, 1, 0, 1])
    assert complete(scores, batch.rows, algorithm, reward_model=reward_model).valid_B.all()
    plain = batch_of([0, 1, 1, 1, 0, 1])[1]
    found, expected = (trained(algorithm, reward_model, batch, each).advantages_T for each in (scores, plain))
    assert torch.equal(found, expected)


def test_a_failure_with_a_penalty_is_compared_by_it_in_each_reward() -> None:
    """gdpo: a row whose function failed has no components."""
    algorithm = SHAPING["gdpo"][0]
    reward_model = RewardModelConfig(failure_penalty=-1.0)
    batch, _ = batch_of([0] * 6)
    outcomes = [returned(1), RewardOutcome(kind="timeout"), returned(None), returned(0), returned(1), returned(0)]
    scores = complete(
        to_scores(outcomes, ["toy"] * 6, failure_penalty=-1.0), batch.rows, algorithm, reward_model=reward_model
    )
    assert scores.score_B.tolist() == [1, -1, -1, 1, 1, 1] and scores.valid_B.all()
    by_hand = to_scores([returned(1), returned(-1, -1.0), returned(-1, -1.0), *outcomes[3:]], ["toy"] * 6)
    found, expected = (trained(algorithm, reward_model, batch, each).advantages_T for each in (scores, by_hand))
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("algorithm", "actor", "name"),
    [
        (AlgorithmConfig(), ActorConfig(sample_weight=SampleWeightConfig(difficulty=True)), "difficulty"),
        (AlgorithmConfig(agent_reward_norm=AgentRewardNormConfig(method="mean", grouping="level")), None, "level"),
    ],
)
def test_a_row_of_the_data_without_a_column_that_training_reads(
    algorithm: AlgorithmConfig, actor: ActorConfig | None, name: str
) -> None:
    """Whatever the penalty of failed rewards is: nobody knows what to compare the row with."""
    infos: list[dict[str, Any]] = [{name: 1}, {}, {name: 0}, {name: 1}]
    batch, scores = batch_of([0, 0, 0, 0], infos)
    options = {"reward_model": RewardModelConfig(failure_penalty=-1.0), "actor": actor}
    found = complete(scores, batch.rows, algorithm, **options)
    assert found.valid_B.tolist() == [True, False, True, True] and found.score_B[1].isnan()
    assert found.failures[1] is not None and f"={name}: the row has" in found.failures[1].message


@bad
def test_metrics_and_validation_leave_it_out_count_it_and_stay_right(value: Any) -> None:
    batch, scores = batch_of([0, value, 1, 1, 0, 1])
    given = value is not MISSING
    metrics = RewardManager.metrics(scores)
    assert metrics["reward/part/mean"] == pytest.approx(3 / 5)
    assert metrics.get("reward/part/left_out") == (1.0 if given else None)
    validated = validation_metrics([(batch, scores)])
    assert validated["val-aux/toy/part/mean@3"] == pytest.approx((1 / 2 + 2 / 3) / 2)
    assert validated["val-aux/toy/part/best@3/mean"] == 1.0  # of the group that lost no row
    assert validated.get("val-aux/toy/part/left_out") == (1.0 if given else None)
    assert validated["val-core/toy/reward/mean@3"] == pytest.approx(0.75)
    assert all(math.isfinite(number) for number in (*metrics.values(), *validated.values()))
    assert to_json(scores.extras[1]) is not None


def test_one_unusable_acc_does_not_change_what_a_source_is_judged_by() -> None:
    batch, scores = batch_of([0] * 6)
    acc: list[Any] = [1, 1e308, 1, 0, 0, None]
    metrics = validation_metrics([(batch, scores.replace(extras=[{"acc": each} for each in acc]))])
    assert metrics["val-core/toy/acc/mean@3"] == 0.5 and metrics["val-aux/toy/acc/left_out"] == 2.0
    outcomes = [RewardOutcome(score=1.0, extras={"acc": 1}), RewardOutcome(kind="crash")]
    penalised = to_scores(outcomes * 3, ["toy"] * 6, failure_penalty=-1.0)
    assert validation_metrics([(batch, penalised)])["val-core/toy/acc/mean@3"] == 1.0


@pytest.mark.parametrize("lost", ["none", "one of each prompt", "all but one", "two of each prompt"])
def test_rows_that_failed_do_not_rename_what_a_source_is_judged_by(lost: str) -> None:
    """trainer.best_metric names val-core/toy/reward/mean@3, and the run would end without it."""
    bad_rows = {
        "none": [],
        "one of each prompt": [0, 4],
        "all but one": [0, 1, 2, 3, 4],
        "two of each prompt": [0, 1, 3, 4],
    }
    outcomes = [RewardOutcome(kind="crash") if i in bad_rows[lost] else RewardOutcome(score=1.0) for i in range(6)]
    metrics = validation_metrics([(batch_of([0] * 6)[0], to_scores(outcomes, ["toy"] * 6))])
    assert metrics["val-core/toy/reward/mean@3"] == 1.0
    assert ("val-core/toy/reward/best@3/mean" in metrics) == (lost == "none")  # nobody knows it where each lost a row
    assert ("val-aux/toy/reward/best@2/mean" in metrics) == (lost in ("none", "one of each prompt"))


def test_what_reward_functions_call_their_values_takes_no_place_of_ours() -> None:
    outcomes = [to_outcome({"score": 1.0, "seconds": 7.0, "k" * 10_000: 1.0})] * 2
    metrics = RewardManager.metrics(to_scores(outcomes, ["toy"] * 2))
    assert metrics["reward/seconds/mean"] == 0.0 and max(map(len, metrics)) < 300


@pytest.mark.parametrize(
    "values", [{0: 1.0, 1: 2.0}, {1.0, 2.0}, b"12", "12", None, 1.0, {"a": [1], "b": [1]}], ids=repr
)
def test_what_a_batch_function_returns_is_one_score_a_response(values: Any) -> None:
    """Keys, bytes and a set's elements in whatever order would be taken for scores."""
    outcomes = _outcomes(values, 2)
    assert [outcome.kind for outcome in outcomes] == ["bad_value"] * 2
    assert "a list with the score of each response" in outcomes[0].message


@pytest.mark.parametrize("values", [[1.0, 2], (1.0, 2), np.array([1.0, 2]), torch.tensor([[1.0], [2]]), map(int, "12")])
def test_whatever_else_has_one_for_each_is_read(values: Any) -> None:
    assert [outcome.score for outcome in _outcomes(values, 2)] == [1.0, 2.0]


@pytest.mark.parametrize(
    "value", [np.ma.masked, np.ma.array([2.0], mask=True), np.datetime64(5, "ns"), np.timedelta64(5, "ns")]
)
def test_what_numpy_stores_as_a_number_and_is_none(value: Any) -> None:
    assert to_outcome(value).kind == to_outcome({"score": value}).kind == "bad_value"
    assert numeric_extras(to_outcome({"score": 1.0, "part": value}).extras) == {}


def test_further_values_that_are_texts_or_answers_are_no_numbers_that_were_lost() -> None:
    extras: list[dict[str, Any]] = [{"why": "short", "pred": 3.0}, {"why": "long", "pred": None}]
    assert unusable_extras(extras) == {} and numeric_extras(extras[0]) == {}


@pytest.mark.parametrize("unread", [None, "", "  ", math.nan, "[INVALID]"])
def test_an_answer_that_could_not_be_read_has_no_vote(unread: Any) -> None:
    """Two unreadable ones would be the majority over "7"."""
    batch = rollouts((1, 1, 1), [0, 0, 0])
    preds, values = [unread, unread, "7"], [0.0, 0.0, 1.0]
    scores = to_scores(
        [RewardOutcome(score=v, extras={"pred": p}) for v, p in zip(values, preds, strict=True)], ["toy"] * 3
    )
    metrics = validation_metrics([(batch, scores)])
    assert metrics["val-core/toy/reward/maj@3/mean"] == 1.0
    assert metrics["val-aux/toy/reward/maj@2/mean"] == pytest.approx(2 / 3)  # of two unreadable ones: their mean
    assert majority_of([("", 0.0), ("", 0.5)], 2) == (0.25, 0.0)


@bad
def test_an_outcome_goes_by_the_score_where_acc_is_none(value: Any) -> None:
    extras = returned(value).extras
    turn = Turn(observation_ids=[1], sampled=Sampled.of([2], [0.0], 0), finish_reason="stop")
    policies = Policies()
    acc = {"acc": extras["part"]} if "part" in extras else {}
    assert policies.outcome(Episode(turns=(turn,)), score=1.0, extras=acc) == "solved"
    prompt = Prompt(group=0, position=0, ids=[1], row=PromptRow(index=0, data_source="s", messages=[]))
    info = {} if value is MISSING else {"success": value}
    known = Member(prompt, Episode(turns=(turn,), reward=0.5, info=info)).known_outcome()
    assert known is not None and known.score == 0.5 and known.extras == {}


@bad
def test_rewards_of_turns_tools_and_environments(value: Any) -> None:
    """No reward at all is none for a tool or a loop (the graders are asked), and a failure of an environment's step."""
    if value is None or value is MISSING:
        assert to_reward(None) is None
    else:
        with pytest.raises(ValueError, match="the reward must be a finite number"):
            to_reward(value)
    with pytest.raises((ValueError, TypeError, OverflowError, RuntimeError)):
        step_of(("seen", None if value is MISSING else value, True, False, {}))


@good
def test_good_rewards_of_turns_tools_and_environments(value: Any) -> None:
    assert to_reward(value) == 1.0 and step_of(("seen", value, True, False, {})).reward == 1.0


@pytest.mark.parametrize(("rewards", "kind"), [([3e38, 3e38], "bad_value"), ([1.0, None], None), ([3e38, None], None)])
def test_rewards_of_turns_that_are_finite_one_by_one_alone(rewards: list[float | None], kind: str | None) -> None:
    """Their sum is infinite as a 32-bit float, and would be the advantage of every row."""
    turn = Turn(observation_ids=[1], sampled=Sampled.of([2], [0.0], 0), finish_reason="stop")
    turns = tuple(dataclasses.replace(turn, reward=reward) for reward in rewards)
    prompt = Prompt(group=0, position=0, ids=[1], row=PromptRow(index=0, data_source="toy", messages=[]))
    known = Member(prompt, Episode(turns=turns, reward=0.5)).known_outcome()
    assert known is not None and known.kind == kind and (known.score is None) == known.lost == (kind is not None)
    ungraded = Member(prompt, Episode(turns=turns)).known_outcome()
    assert (ungraded and ungraded.kind) == kind


def test_a_curriculum_gets_lists_of_one_length_row_by_row() -> None:
    batch, scores = batch_of([[1, 2], [3, 4], [5, 6]])
    assert scored_batch(batch, scores).non_tensor_batch["part"].tolist() == [[1, 2], [3, 4], [5, 6]]


def test_the_largest_scores_can_be_drawn_by() -> None:
    weights = pf_ppo_weights(torch.tensor([3e38, 1.0, 0.0]), PFPPOConfig(weight_pow=20.0))
    assert weights.isfinite().all() and int(torch.multinomial(weights, 1)) == 0


class Refuses:
    """The tokenizer of a reward model whose template knows no system."""

    chat_template = "one of its own"

    def apply_chat_template(self, messages: list[dict[str, Any]], **_: Any) -> str:
        if messages[0]["role"] == "system":
            raise ValueError("System role not supported")
        return "m" * len(messages)

    def __call__(self, texts: Sequence[str], **_: Any) -> dict[str, list[list[int]]]:
        return {"input_ids": [[len(text)] for text in texts]}


@pytest.mark.parametrize("penalty", [None, -2.0])
def test_a_conversation_that_the_reward_models_template_refuses(penalty: float | None) -> None:
    seen: list[list[Sequence[int]]] = []

    def score(texts: Sequence[Sequence[int]]) -> list[float]:
        seen.append(list(texts))
        return [0.5 + len(seen[0])] * len(texts)

    rows = [
        PromptRow(index=i, data_source="s", messages=[{"role": role, "content": "x"}])
        for i, role in enumerate(("user", "system", "user"))
    ]
    config = RewardModelConfig(failure_penalty=penalty)
    model = ModelScore(config, score, policy_tokenizer=CharTokenizer(), own_tokenizer=Refuses())
    rule = to_scores([RewardOutcome(score=0.0)] * 3, ["s"] * 3)
    scores = model.add_to(rule, [Answer(row=row, prompt_ids=[1], response_ids=[97]) for row in rows])
    assert seen == [[[2], [2]]]
    assert [scores.score_B[0].item(), scores.score_B[2].item()] == [2.5, 2.5]
    assert scores.failures[1] is not None and "System role not supported" in scores.failures[1].message
    assert bool(scores.valid_B[1]) == (penalty is not None)


def test_whatever_a_judge_meets_is_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    judge = Judge(JudgeConfig(url="http://localhost:9/v1", model="m"))

    def ask(text: str) -> Any:
        if "second" in text:
            raise RecursionError("too deep")
        return None if "third" in text else "Score: 1"

    monkeypatch.setattr(judge, "_ask", ask)
    calls = [RewardCall(data_source="s", solution_str=text) for text in ("first", "second", "third")]
    outcomes = [future.result() for future in judge.submit(calls)]
    judge.close()
    assert outcomes[0].score is not None and [o.kind for o in outcomes] == [None, "exception", "exception"]


def test_episodes_join_what_has_failed(tmp_path: Path) -> None:
    """An episode of two rows fails as a whole."""
    batch, scores = batch_of([0, None, None, 1])
    batch = batch.replace(episode_B=torch.tensor([0, 1, 1, 2]), group_B=torch.tensor([0, 0, 0, 0]))
    scores = scores.replace(score_B=torch.tensor([1.0, 0.0, 0.0, 2.0]))
    experience = trained(*SHAPING["gdpo"], batch, scores)
    assert len(Episodes.of(experience)) == 2 and experience.advantages_T.isfinite().all()
