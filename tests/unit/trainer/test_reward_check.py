"""data.self_check_rows: reference answers that no grader accepts stop the run, the others make a table."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from tests.unit.data.factory import CharTokenizer, write_parquet
from verl_like.batch import PromptRow, Rollouts, Scores
from verl_like.config import CustomRewardFunctionConfig, DataConfig, RewardModelConfig
from verl_like.config.errors import ConfigError
from verl_like.data.dataset import PromptDataset
from verl_like.kit.datasets.schema import make_row
from verl_like.rewards.grading import to_scores
from verl_like.rewards.manager import RewardManager
from verl_like.rewards.reward_call import RewardOutcome
from verl_like.trainer import reward_check
from verl_like.trainer.compose import compose
from verl_like.trainer.reward_check import (
    grade_references,
    grade_sample,
    reference_answers,
    refuse_unknown_numbers,
    self_check,
)


class Tokenizer(CharTokenizer):
    """One text at a time, and back."""

    def __call__(self, texts: Any, add_special_tokens: bool) -> dict[str, Any]:
        if isinstance(texts, str):
            return {"input_ids": [ord(c) for c in texts]}
        return super().__call__(texts, add_special_tokens)

    def decode(self, ids: Any, skip_special_tokens: bool = True) -> str:
        return "".join(chr(i) for i in ids)


def make_dataset(folder: Path, truths: dict[str, list[Any]], **extra: Any) -> PromptDataset:
    rows = [
        make_row(data_source=source, prompt="?", ground_truth=truth, ability="", split="train", index=i, **extra)
        for source, values in truths.items()
        for i, truth in enumerate(values)
    ]
    files = [write_parquet(folder / f"{i}.parquet", [row]) for i, row in enumerate(rows)]
    return PromptDataset(DataConfig(), files, Tokenizer(), split="train")


def test_the_built_in_graders_accept_reference_answers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    dataset = make_dataset(
        tmp_path,
        {"openai/gsm8k": ["72", "1,000", "-3"], "arithmetic": ["5"], "countdown": [{"target": 3, "numbers": [1, 2]}]},
    )
    settings = (CustomRewardFunctionConfig(), RewardModelConfig(), DataConfig(), Tokenizer())
    with RewardManager(*settings) as rewards, caplog.at_level(logging.INFO, "verl_like"):
        reports = self_check(dataset, rewards, Tokenizer(), 2)
    assert (reports["openai/gsm8k"].right, reports["arithmetic"].right) == (2, 1)  # two rows of a source were asked for
    assert (reports["countdown"].no_reference, reports["countdown"].wrong) == (1, 0)
    assert "data source   right  wrong" in caplog.text and "openai/gsm8k      2      0" in caplog.text


class Rewards:
    """Gives each response the outcome of a function."""

    def __init__(self, outcome: Any, penalty: float | None = None) -> None:
        self.outcome, self.penalty = outcome, penalty

    def score(self, rollouts: Rollouts, *, step: int) -> Scores:
        rollouts.check()
        texts = [
            "".join(chr(i) for i in ids[:length])
            for ids, length in zip(rollouts.response_ids_BR, rollouts.response_length_B.tolist(), strict=True)
        ]
        outcomes = [self.outcome(text) for text in texts]
        return to_scores(outcomes, [row.data_source for row in rollouts.rows], failure_penalty=self.penalty)


def test_a_grader_that_accepts_nothing_stops_the_run(tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path, {"math": ["7", "8"]})
    zero = Rewards(lambda text: RewardOutcome(score=0.0))
    with pytest.raises(ValueError, match=r"no reference answer is .*math: row 0, ground truth '7'.*rule_by"):
        self_check(dataset, zero, Tokenizer(), 8)
    slow = RewardOutcome(kind="timeout", message="slow")
    late = Rewards(lambda text: RewardOutcome(score=0.0) if "know" in text else slow)
    with pytest.raises(ValueError, match=r"math: row 0: timeout: slow"):
        self_check(dataset, late, Tokenizer(), 8)


def test_one_row_that_is_right_is_enough(tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path, {"math": ["7", "8"]})
    rewards = Rewards(lambda text: RewardOutcome(score=float(text == "\\boxed{8}")))
    report = self_check(dataset, rewards, Tokenizer(), 8)["math"]
    assert (report.right, report.wrong) == (1, 1) and report.example.startswith("row 0, ground truth '7'")


def test_reference_answers_are_the_rows_own_first() -> None:
    def row(truth: Any, **extra: Any) -> PromptRow:
        return PromptRow(index=0, data_source="s", messages=[], ground_truth=truth, extra_info=extra)

    assert reference_answers(row("5", answer="2+3\n#### 5"))[0] == "2+3\n#### 5"
    assert "```python\nprint(1)\n```" in reference_answers(row({"inputs": []}, canonical_solution="print(1)"))
    assert "\\boxed{5}" in reference_answers(row(["5", "five"]))
    assert reference_answers(row({"inputs": []})) == reference_answers(row(None)) == []
    assert reference_answers(row('{"inputs": ["1"], "outputs": ["2"]}')) == []  # tests as JSON text
    assert "#### [1, 2)" in reference_answers(row("[1, 2)")) and "#### {1}" in reference_answers(row("{1}"))


def test_a_penalty_for_failures_is_no_verdict(tmp_path: Path) -> None:
    """Wrong answers that fail score less than right ones that get 0: still nobody told them apart."""
    dataset = make_dataset(tmp_path, {"math": ["7"]})
    slow = RewardOutcome(kind="timeout", message="slow")
    late = Rewards(lambda text: RewardOutcome(score=0.0) if "know" in text else slow, penalty=1.0)
    with pytest.raises(ValueError, match=r"math: row 0: timeout: slow"):
        self_check(dataset, late, Tokenizer(), 8)


def test_a_truth_that_no_grader_can_read_is_told_at_the_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """IFEval's grader with rows that name functions, and no answer to try: every reward of the run would fail."""
    fits = {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [None]}
    dataset = make_dataset(tmp_path, {"ifeval": [{"func_name": "validate_lowercase"}], "google/IFEval": [fits]})
    settings = (CustomRewardFunctionConfig(), RewardModelConfig(), DataConfig(), Tokenizer())
    with RewardManager(*settings) as rewards:
        reports = grade_sample(dataset, rewards, Tokenizer())
    assert [report.no_reference for report in reports.values()] == [1, 1]
    (told,) = [record.getMessage() for record in caplog.records]
    assert told.startswith("ifeval: no response to row 0 can be graded: exception: ValueError: ground_truth must be")


def test_a_function_that_only_fails_is_told_of_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As recipes/verifiers/reward.py does, where a program gives the reward."""
    (tmp_path / "own.py").write_text("def compute_score(**row):\n    raise RuntimeError('not asked')\n")
    dataset = make_dataset(tmp_path, {"any": ["7", "8"]})
    own = CustomRewardFunctionConfig(path=str(tmp_path / "own.py"))
    with RewardManager(own, RewardModelConfig(), DataConfig(), Tokenizer()) as rewards:
        rewards.try_out(dataset[0][1], ["7", "no"])
        assert grade_sample(dataset, rewards, Tokenizer()) == {}
    (told,) = [record.getMessage() for record in caplog.records]
    assert "2 of 2 calls failed" in told and "RuntimeError: not asked" in told


def test_a_sample_of_64_is_graded_over_all_sources_and_rows(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many of each source, as far as it has them; a slow grader or a judge is asked of the first rows alone."""
    sums = [{"target": "x"} if number == 37 else str(number) for number in range(50)]
    dataset = make_dataset(
        tmp_path, {"arithmetic": sums, "openai/gsm8k": ["72"] * 100, "countdown": [{"target": 3, "numbers": [1, 2]}]}
    )
    settings = (CustomRewardFunctionConfig(), RewardModelConfig(), DataConfig(), Tokenizer())
    with RewardManager(*settings) as rewards:
        reports = grade_sample(dataset, rewards, Tokenizer())
        looked_at = {source: report.looked_at + report.no_reference for source, report in reports.items()}
        assert looked_at == {"arithmetic": 22, "openai/gsm8k": 22, "countdown": 1}
        assert reports["openai/gsm8k"].right == 22 and not caplog.records
        monkeypatch.setattr(reward_check, "_SAMPLE_S", 0.0)  # the first ones took all the time
        assert grade_sample(dataset, rewards, Tokenizer())["arithmetic"].looked_at == 1
    (tmp_path / "odd").mkdir()
    odd = make_dataset(tmp_path / "odd", {"arithmetic": ["1", "2"]})
    asked: list[int] = []

    class Judged(Rewards):
        asks_judge = fails = False

        def score(self, rollouts: Rollouts, *, step: int) -> Scores:
            asked.append(len(rollouts.rows))
            return super().score(rollouts, step=step)

    rewards_of_two = Judged(lambda text: RewardOutcome(score=float("2" in text)))
    monkeypatch.setattr(reward_check, "_SAMPLE_S", 60.0)
    assert grade_sample(odd, rewards_of_two, Tokenizer())["arithmetic"].wrong == 1
    assert "arithmetic: 1 of 2 reference answers looked at are not graded better" in caplog.text and len(asked) == 2
    rewards_of_two.asks_judge = True
    grade_sample(odd, rewards_of_two, Tokenizer())
    assert len(asked) == 3  # a judge is asked of one row


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["algorithm.filter_groups.enable=true", "algorithm.filter_groups.metric=fmt"], "filter_groups.metric=fmt"),
        (["data.curriculum.enable=true", "data.curriculum.metric=acc"], None),
        (["algorithm.filter_groups.enable=true", "algorithm.filter_groups.metric=seq_reward"], None),
        (["data.curriculum.metric=solved"], None),
    ],
)
def test_a_key_that_names_a_number_which_the_graders_do_not_return_is_refused(
    tmp_path: Path, words: list[str], told: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    dataset = make_dataset(tmp_path, {"math": ["7"]})
    rewards = Rewards(lambda text: RewardOutcome(score=float("7" in text), extras={"acc": True, "pred": "x"}))
    reports = grade_references(dataset, rewards, Tokenizer(), [0])
    solved = ["data.curriculum.enable=true", "data.curriculum.metric=solved"]
    refuse_unknown_numbers(compose(["data.train_files=x.parquet", "actor_rollout_ref.rollout.n=2", *solved]), reports)
    assert "data.curriculum.metric=solved: the reward function returned acc for all" in caplog.text
    config = compose(["data.train_files=x.parquet", "actor_rollout_ref.rollout.n=2", *words])
    if told is None:
        return refuse_unknown_numbers(config, reports)
    with pytest.raises(ConfigError, match=rf"{told}: the reward function returned acc for all reference answers"):
        refuse_unknown_numbers(config, reports)
    other_form = Rewards(lambda text: RewardOutcome(score=0.0))  # it takes no reference answer as right
    refuse_unknown_numbers(config, grade_references(dataset, other_form, Tokenizer(), [0]))
    failed = Rewards(lambda text: RewardOutcome(kind="timeout", message="slow"))
    refuse_unknown_numbers(config, grade_references(dataset, failed, Tokenizer(), [0]))  # nothing is known of it
