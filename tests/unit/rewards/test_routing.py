"""Which grader grades which row: by data source, by the row's style, by reward_model.rule*."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.unit.data.factory import CharTokenizer as PromptTokenizer
from tests.unit.rewards.factory import CharTokenizer, make_rollouts
from verl_like.config import CustomRewardFunctionConfig, DataConfig, RewardModelConfig
from verl_like.data.dataset import PromptDataset
from verl_like.rewards import graders
from verl_like.rewards.manager import RewardManager

ROOT = Path(__file__).resolve().parents[3]


def manager_with(**keys: Any) -> RewardManager:
    return RewardManager(CustomRewardFunctionConfig(), RewardModelConfig(**keys), DataConfig(), CharTokenizer())


def test_every_grader_loads_and_is_documented() -> None:
    page = (ROOT / "docs" / "rewards.md").read_text()
    for name in graders.GRADERS:
        assert callable(graders.grader_by_name(name))
        assert f"`{name}`" in page, f"docs/rewards.md has no row for {name}"


def test_every_route_leads_to_a_grader() -> None:
    assert set(graders.ROUTES.values()) <= set(graders.GRADERS)


@pytest.mark.parametrize(
    ("source", "grader"),
    [
        ("MATH", "math"),
        ("math500", "math"),
        ("AI-MO/NuminaMath-CoT", "math"),
        ("HuggingFaceH4/aime_2024", "math_dapo"),
        ("BytedTsinghua-SIA/DAPO-Math-17k", "math_dapo"),
    ],
)
def test_data_sets_are_known_by_their_names_on_the_hub(source: str, grader: str) -> None:
    assert graders.choose().grader_of_row(source) == grader


def test_an_exact_name_comes_before_a_pattern_and_patterns_count_from_the_top() -> None:
    choice = graders.choose(by_source={"math*": "arithmetic", "*": "countdown", "math_a": "gsm8k"})
    assert [choice.grader_of_row(s) for s in ("math_a", "math_b", "x")] == ["gsm8k", "arithmetic", "countdown"]


def test_the_users_choice_comes_before_the_rows_and_the_rows_before_the_table() -> None:
    row = ("openai/gsm8k", "arithmetic")
    assert graders.choose().grader_of_row("openai/gsm8k", "rule") == "gsm8k"
    assert graders.choose().grader_of_row("openai/gsm8k", "rule-something-else") == "gsm8k"
    assert graders.choose().grader_of_row(*row) == "arithmetic"
    assert graders.choose(rule="countdown").grader_of_row(*row) == "countdown"
    both = graders.choose(rule="countdown", by_source={"openai/*": "gsm8k_flexible"})
    assert both.grader_of_row(*row) == "gsm8k_flexible"
    assert both.grader_of_row("mine") == "countdown"


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"rule": "gsm9k"}, r"reward_model\.rule=gsm9k: .*gsm8k_flexible"),
        ({"by_source": {"a": "b"}}, r"reward_model\.rule_by_source\.a=b: "),
        ({"rule_kwargs": {"method": "flexible"}}, r"reward_model\.rule_kwargs\.method='flexible': whose.*<grader>"),
        ({"rule": "gsm8k", "rule_kwargs": {"methd": 1}}, r"grader gsm8k has no option 'methd' \(it has: method,"),
        ({"rule_kwargs": {"gsm8k": {"score": 1, "x": 2}}}, r"grader gsm8k has no option 'x'"),
    ],
)
def test_wrong_choices_are_named(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        graders.choose(**keys)


def test_a_wrong_choice_is_found_before_workers_start() -> None:
    with pytest.raises(ValueError, match=r"reward_model\.rule=gsm9k"):
        manager_with(rule="gsm9k")


def test_rule_and_its_options_reach_the_workers() -> None:
    rollouts = make_rollouts(["it is 5", "#### 4"], data_source="mine")
    with manager_with(rule="gsm8k", rule_kwargs={"method": "flexible", "score": 3.0, "format_score": 0.5}) as manager:
        assert manager.score(rollouts, step=1).score_B.tolist() == [3.0, 0.5]


def test_rule_by_source_and_options_by_grader_reach_the_workers() -> None:
    rollouts = make_rollouts(["5", "it is 5", "it is 5"], data_source=["a", "b/1", "b/2"])
    keys = {"rule_by_source": {"a": "arithmetic", "b/*": "gsm8k_flexible"}}
    with manager_with(**keys, rule_kwargs={"gsm8k_flexible": {"score": 2.0}}) as manager:
        assert manager.score(rollouts, step=1).score_B.tolist() == [1.0, 2.0, 2.0]
        with pytest.raises(ValueError, match=r"'c'.*reward_model\.rule"):
            manager.check_rows([("a", ""), ("c", "rule")])


def test_the_style_of_a_row_names_its_grader() -> None:
    rollouts = make_rollouts(["it is 5"], data_source="mine", style="gsm8k_flexible")
    with manager_with() as manager:
        assert manager.score(rollouts, step=1).score_B.tolist() == [1.0]


def test_a_data_set_says_which_sources_and_styles_it_has(tmp_path: Path) -> None:
    rows = {
        "data_source": ["a", "a", "a", "b"],
        "prompt": ["hi"] * 4,
        "reward_model": [{"style": style, "ground_truth": "1"} for style in ("rule", "boxed", "rule", None)],
    }
    pq.write_table(pa.table(rows), tmp_path / "rows.parquet")
    keys = DataConfig(filter_overlong_prompts=False)
    dataset = PromptDataset(keys, str(tmp_path / "rows.parquet"), PromptTokenizer(), split="train")
    assert dataset.reward_styles() == [("a", "boxed"), ("a", "rule"), ("b", "")]
    assert dataset.row(1).style == "boxed"
