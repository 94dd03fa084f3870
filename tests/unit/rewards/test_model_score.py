"""What a reward model reads, and how its score is joined with the rule's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.rewards.factory import CharTokenizer, make_rollouts
from verl_like.batch import PromptRow, Scores
from verl_like.config import CustomRewardFunctionConfig, DataConfig, RewardModelConfig
from verl_like.plugins.reward_models.model_score import ModelScore
from verl_like.rewards.grading import Answer, to_scores
from verl_like.rewards.manager import RewardManager
from verl_like.rewards.reward_call import RewardOutcome


class TemplateTokenizer:
    """Writes "<role:content>" for each message; a character's id is its code."""

    chat_template = "by hand"

    def apply_chat_template(self, messages: list[dict[str, str]], **options: bool) -> str:
        assert options == {"tokenize": False, "add_generation_prompt": False}
        return "".join(f"<{message['role'][0]}:{message['content']}>" for message in messages)

    def __call__(self, texts: list[str], add_special_tokens: bool) -> dict[str, list[list[int]]]:
        assert not add_special_tokens
        return {"input_ids": [[ord(c) for c in text] for text in texts]}


def answer(text: str) -> Answer:
    row = PromptRow(index=0, data_source="s", messages=[{"role": "user", "content": "q"}])
    return Answer(row=row, prompt_ids=[65, 66], response_ids=[*map(ord, text), 1])


def model_score(values: Sequence[float] = (), own: object = None, **settings: Any) -> ModelScore:
    config = RewardModelConfig(**settings)
    return ModelScore(config, lambda texts: values, policy_tokenizer=CharTokenizer(), own_tokenizer=own)


def test_it_reads_the_policys_tokens() -> None:
    assert model_score().texts([answer("ab")]) == [[65, 66, ord("a"), ord("b"), 1]]


def test_with_a_template_of_its_own_it_reads_the_conversation() -> None:
    (text,) = model_score(own=TemplateTokenizer()).texts([answer("ab")])
    assert "".join(map(chr, text)) == "<u:q><a:ab>"  # the end token is not part of what was said


def test_long_texts_are_cut_on_the_right() -> None:
    assert model_score(max_length=3).texts([answer("ab")]) == [[65, 66, ord("a")]]


def test_weights_join_model_and_rule() -> None:
    rule = to_scores([RewardOutcome(score=0.0)] * 2, ["s"] * 2).replace(
        score_B=torch.tensor([1.0, 0.0]), extras=[{"acc": 1}, {"acc": 0}]
    )
    scores = model_score([0.5, -0.5], model_weight=2.0, rule_weight=10.0).add_to(rule, [answer("a"), answer("b")])
    assert scores.score_B.tolist() == [11.0, -1.0]
    assert scores.extras[0] == {"acc": 1, "model_score": 0.5, "rule_score": 1.0}


def test_a_failed_rule_and_a_broken_model_score_stay_failures() -> None:
    failed = Scores(
        score_B=torch.tensor([math.nan, 1.0]),
        valid_B=torch.tensor([False, True]),
        extras=[{}, {}],
        failures=[None, None],
    )
    failed = failed.replace(failures=[_timeout(), None])
    scores = model_score([3.0, math.inf], rule_weight=1.0).add_to(failed, [answer("a"), answer("b")])
    assert scores.valid_B.tolist() == [False, False] and scores.score_B.isnan().all()
    assert [failure.kind for failure in scores.failures if failure] == ["timeout", "bad_value"]


def test_failed_rows_get_the_penalty_beside_a_model_too() -> None:
    rule = to_scores(
        [RewardOutcome(kind="timeout", seconds=2.0), RewardOutcome(score=1.0, seconds=1.0), RewardOutcome(score=1.0)],
        ["s"] * 3,
        failure_penalty=-1.0,
    )
    model = model_score([9.0, math.nan, 3.0], rule_weight=1.0, failure_penalty=-1.0)
    scores = model.add_to(rule, [answer("a")] * 3)
    assert scores.score_B.tolist() == [-1.0, -1.0, 4.0] and scores.valid_B.all()
    assert [failure and failure.kind for failure in scores.failures] == ["timeout", "bad_value", None]
    assert scores.seconds_B is not None and scores.seconds_B.tolist() == [2.0, 1.0, 0.0]


def _timeout() -> object:
    from verl_like.batch import RewardFailure

    return RewardFailure(row=0, data_source="s", kind="timeout", message="")


def test_without_a_rule_weight_no_rule_grades(tmp_path: Path) -> None:
    """A data source without a grader is no error then, and the reward function is not called."""
    config = RewardModelConfig(enable=True)
    rollouts = make_rollouts(["ab", "c"], data_source="nobody grades this")
    with RewardManager(CustomRewardFunctionConfig(), config, DataConfig(), CharTokenizer()) as manager:
        seen: list[Sequence[Sequence[int]]] = []

        def score(texts: Sequence[Sequence[int]]) -> list[float]:
            seen.append(texts)
            return [float(len(text)) for text in texts]

        manager.use_model(ModelScore(config, score, policy_tokenizer=CharTokenizer(), own_tokenizer=None))
        scores = manager.score(rollouts, step=1)
    assert seen == [[[65, ord("a"), ord("b"), 1], [65, ord("c"), 1]]]  # one call for the whole batch, without padding
    assert scores.score_B.tolist() == [4.0, 3.0] and scores.extras[1] == {"model_score": 3.0}


@pytest.mark.parametrize("weight, wanted", [(1.0, [1.25, 0.25]), (0.5, [0.75, 0.25])])
def test_with_a_rule_weight_both_count(weight: float, wanted: list[float]) -> None:
    config = RewardModelConfig(enable=True, rule_weight=weight)
    rollouts = make_rollouts(["5", "6"])
    with RewardManager(CustomRewardFunctionConfig(), config, DataConfig(), CharTokenizer()) as manager:
        manager.use_model(
            ModelScore(config, lambda texts: [0.25] * 2, policy_tokenizer=CharTokenizer(), own_tokenizer=None)
        )
        assert manager.score(rollouts, step=1).score_B.tolist() == wanted
