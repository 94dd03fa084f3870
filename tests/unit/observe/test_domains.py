"""Per-source statistics of a training batch, and named validation sets, by hand."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.observe import factory
from verl_like.batch import Rollouts
from verl_like.observe.metrics import domain_metrics, rollout_metrics
from verl_like.observe.samples import make_samples
from verl_like.observe.validation import validation_metrics
from verl_like.trainer.reporting import by_validation_set


def test_each_source_by_hand() -> None:
    batch = factory.rollouts([[5], [6, 7], [5], [5, 5, 5]], groups=[0, 0, 1, 1], sources=["a", "a", "b", "b"])
    batch = batch.replace(finish_reasons=["stop", "length", "stop", "stop"])
    metrics = domain_metrics(batch, factory.scores([1.0, 0.0, 0.5, None]))
    assert {k.removeprefix("domain/a/"): v for k, v in metrics.items() if k.startswith("domain/a/")} == {
        "num_prompts": 1.0,
        "share": 0.5,
        "response_length/mean": 1.5,
        "response_length/clip_ratio": 0.5,
        "reward_failures": 0.0,
        "score/mean": 0.5,
        "score/std": 0.5,
        "score/max": 1.0,
        "score/min": 0.0,
        "group_zero_std_fraction": 0.0,
    }
    assert (metrics["domain/b/score/mean"], metrics["domain/b/reward_failures"]) == (0.5, 1.0)
    assert metrics["domain/b/group_zero_std_fraction"] == 1.0


def test_one_source_needs_no_statistics_of_its_own() -> None:
    assert domain_metrics(factory.rollouts([[5], [6]]), factory.scores([1.0, 0.0])) == {}


def named(batch: Rollouts, names: list[str]) -> Rollouts:
    rows = [dataclasses.replace(row, validation_set=name) for row, name in zip(batch.rows, names, strict=True)]
    return batch.replace(rows=rows)


def test_named_validation_sets_are_reported_apart() -> None:
    sources = ["gsm8k", "gsm8k", "math", "aime"]
    batch = named(
        factory.rollouts([[5]] * 4, groups=[0, 1, 2, 3], sources=sources), ["easy", "hard", "olympic", "olympic"]
    )
    metrics = validation_metrics([(batch, factory.scores([1.0, 0.0, 0.25, 0.75]))])
    assert {name: value for name, value in metrics.items() if name.startswith("val-core/")} == {
        "val-core/easy/reward/mean@1": 1.0,
        "val-core/hard/reward/mean@1": 0.0,
        "val-core/olympic/math/reward/mean@1": 0.25,  # a set with several sources
        "val-core/olympic/aime/reward/mean@1": 0.75,
    }


class Decoder:
    def decode(self, token_ids: Any, *, skip_special_tokens: bool = False) -> str:
        return str(list(token_ids))


@pytest.mark.parametrize(
    ("names", "sources", "expected"),
    [
        (["", ""], ["a", "a"], {}),
        (["", ""], ["a", "b/c"], {"a": [0], "b_c": [1]}),
        (["x", "x"], ["a", "a"], {"x": [0, 1]}),
        (["x", "y"], ["a", "a"], {"x": [0], "y": [1]}),
    ],
)
def test_a_result_file_for_each_set(names: list[str], sources: list[str], expected: dict[str, list[int]]) -> None:
    batch = named(factory.rollouts([[5], [6]], sources=sources), names)
    samples = make_samples(batch, factory.scores([1.0, 0.0]), Decoder(), 3)
    parts = by_validation_set(samples, batch.rows)
    assert parts == {name: [samples[i] for i in rows] for name, rows in expected.items()}
    assert [sample.get("validation_set", "") for sample in samples] == names


def test_samples_carry_the_prompt_id(tmp_path: Path) -> None:
    batch = factory.rollouts([[5]])
    batch = batch.replace(rows=[dataclasses.replace(batch.rows[0], prompt_id="p-1")])
    (sample,) = make_samples(batch, factory.scores([1.0]), Decoder(), 0)
    assert json.loads(json.dumps(sample["prompt_id"])) == "p-1"


def test_an_episode_of_several_rows_is_one_response() -> None:
    """Its rows counted apart would shift every mean, share and best of n."""
    sources, preds = ["a", "a", "b", "b"], ["7", "7", "3", "9"]
    extras = [{"pred": pred} for pred in preds]
    whole = factory.rollouts([[5, 6, 7], [6], [5], [8, 9]], groups=[0, 0, 1, 1], sources=sources)
    whole = whole.replace(finish_reasons=["length", "stop", "abort", "stop"])
    rows = factory.rollouts([[5], [6], [5], [6], [7], [8], [9]], groups=[0, 0, 1, 0, 0, 1, 1], sources=[*"aabaabb"])
    rows = rows.replace(
        prompt_ids_BP=torch.nn.functional.pad(rows.prompt_ids_BP, (3, 0)),
        prompt_length_B=torch.tensor([2, 2, 2, 5, 4, 2, 3]),
        finish_reasons=["length", "stop", "abort", "stop", "length", "stop", "stop"],
        episode_B=torch.tensor([10, 11, 12, 10, 10, 13, 13]),
    )
    graded = factory.scores([1.0, 0.0, 0.5, None], extras)
    in_rows = factory.scores([1.0, 0.0, 0.5, 1.0, 1.0, 0.25, None], [extras[i] for i in (0, 1, 2, 0, 0, 3, 3)])
    assert domain_metrics(rows, in_rows) == domain_metrics(whole, graded)
    assert validation_metrics([(rows, in_rows)]) == validation_metrics([(whole, graded)])
    assert rollout_metrics(rows, 4) == rollout_metrics(whole, 4)
