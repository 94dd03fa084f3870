from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.unit.observe import factory
from verl_like.batch import numeric_extras, scalar
from verl_like.observe.metrics import (
    memory_gib,
    memory_metrics,
    perf_metrics,
    rollout_metrics,
    sequence_balance_metrics,
    training_metrics,
)


def test_rollout_metrics_by_hand() -> None:
    rollouts = factory.rollouts(
        [[5, 6, 7, 8], [5], [], [5, 6, 7]],
        prompts=[[1], [1, 2, 3], [1, 2], [1, 2]],
        finish_reasons=["length", "stop", "stop", "abort"],
    )
    assert rollout_metrics(rollouts, max_prompt_length=3) == {
        "response_length/mean": 2.0,
        "response_length/max": 4.0,
        "response_length/min": 0.0,
        "response_length/clip_ratio": 0.25,
        "prompt_length/mean": 2.0,
        "prompt_length/max": 3.0,
        "prompt_length/min": 1.0,
        "prompt_length/clip_ratio": 0.25,
        "response/aborted_ratio": 0.5,  # the empty one and the one that was called off
        "response/duplicate_fraction": 0.0,
    }


def test_cut_off_is_what_a_length_ended() -> None:
    """Not what is as long as a response may be, whose last token may be its end; and also what a program, a turn or the
    validation allows no more than that. An episode is what its last row is."""
    reasons = ["stop", "length", "length", "stop", "stop", "length"]
    batch = factory.rollouts([[5, 6, 7, 1], [5, 6, 7, 8], [5], [5, 1], [1], [5]], finish_reasons=reasons)
    assert rollout_metrics(batch, 4)["response_length/clip_ratio"] == 0.5
    whole = batch.replace(episode_B=torch.tensor([0, 1, 2, 2, 3, 4]), group_B=torch.tensor([0, 1, 2, 2, 3, 4]))
    assert rollout_metrics(whole, 4)["response_length/clip_ratio"] == pytest.approx(2 / 5)


def test_a_duplicate_is_an_equal_response_to_the_same_prompt() -> None:
    responses = [[5, 6], [5, 6], [5, 6, 7], [5, 6], [5, 6]]
    rollouts = factory.rollouts(responses, groups=[0, 0, 0, 1, 1])
    assert rollout_metrics(rollouts, 4)["response/duplicate_fraction"] == pytest.approx(2 / 5)


def test_rollout_metrics_do_not_depend_on_padding() -> None:
    batch = factory.rollouts([[5, 6, 7], [5]])
    wider = batch.select([1, 0, 1])  # still padded to 3
    assert rollout_metrics(wider.select([0]), 8)["response_length/max"] == 1.0


def test_perf_metrics_are_per_device_and_second() -> None:
    assert perf_metrics(total_tokens=6000, step_seconds=2.0, num_devices=3) == {
        "perf/total_num_tokens": 6000.0,
        "perf/time_per_step": 2.0,
        "perf/throughput": 1000.0,
    }


def test_memory_of_the_machine_is_total_minus_available() -> None:
    text = "MemTotal:       8388608 kB\nMemAvailable:    6291456 kB\nHugePages_Total: 0\n"
    assert memory_gib(text) == (2.0, 8.0)


@pytest.mark.skipif(not Path("/proc/meminfo").exists(), reason="Linux only")
def test_memory_metrics_of_this_machine_are_plausible() -> None:
    assert 0.05 < memory_metrics()["perf/cpu_memory_used_gb"] < 10_000


def test_sequence_balance_by_hand() -> None:
    metrics = sequence_balance_metrics([10, 20, 30, 40], rank_rows=[[0, 3], [1, 2]])
    assert metrics == {
        "global_seqlen/min": 30.0,
        "global_seqlen/max": 70.0,
        "global_seqlen/minmax_diff": 40.0,
        "global_seqlen/balanced_min": 50.0,
        "global_seqlen/balanced_max": 50.0,
        "global_seqlen/mean": 50.0,
    }


def test_sequence_balance_with_uneven_rows_and_an_empty_rank() -> None:
    metrics = sequence_balance_metrics([9, 1], rank_rows=[[0], [], [1]])
    assert metrics["global_seqlen/balanced_min"] == 0.0
    assert metrics["global_seqlen/mean"] == pytest.approx(10 / 3)


@pytest.mark.parametrize("rank_rows", [[[0, 1], [1]], [[0], [2]], [[0], []]])
def test_sequence_balance_refuses_a_split_that_loses_or_repeats_rows(rank_rows: list[list[int]]) -> None:
    with pytest.raises(ValueError, match="exactly once"):
        sequence_balance_metrics([1, 2], rank_rows)


def test_numeric_extras_leave_out_text_answers_and_non_finite_values() -> None:
    extra = {"acc": True, "format": 0.5, "f": np.float32(2), "note": "x", "pred": 3, "score": 1.0, "bad": float("nan")}
    assert numeric_extras(extra) == {"acc": 1.0, "format": 0.5, "f": 2.0}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (True, 1.0), (3, 3.0), (np.int64(4), 4.0), (np.float32(0.5), 0.5), (np.array(2), 2.0),
        (torch.tensor([7.0]), 7.0), ("3", None), (None, None), ([1], None), (torch.ones(2), None), (np.ones(1), None),
    ],
)  # fmt: skip
def test_scalar(value: object, expected: float | None) -> None:
    assert scalar(value) == expected


def test_training_metrics() -> None:
    assert training_metrics(12, 3) == {"training/global_step": 12.0, "training/epoch": 3.0}
