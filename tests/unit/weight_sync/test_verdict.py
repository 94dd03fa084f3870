from __future__ import annotations

import pickle
from dataclasses import replace

import pytest
import torch

from verl_like.rollout.rollout_engine import HeldWeights
from verl_like.weight_sync.header import Wanted, mark_of
from verl_like.weight_sync.probe import Gap
from verl_like.weight_sync.verdict import Receipt, Sent, WeightSyncError, verdict

SENT = Sent(version=4, form="merged", mark="m", num_changed=2, seconds=1.0)
RECEIPT = Receipt(mark="m", seconds=2.0, bytes=80, num_tensors=3, num_read_back=3, gap=Gap(mean=1e-7, largest=1e-6))
WANTED = Wanted(dtype=torch.float32, keeps_adapters=True, tokenizer_size=9, max_model_len=8, held=None)


def test_a_sync_that_succeeded_everywhere() -> None:
    """Seconds: the slowest header, then the slowest receiver; the probe's worst."""
    slow = replace(RECEIPT, seconds=5.0, num_read_back=2, gap=Gap(mean=3e-7, largest=2e-6))
    report = verdict([SENT, replace(SENT, seconds=1.5)], [RECEIPT, slow, RECEIPT])
    assert (report.version, report.seconds, report.num_read_back, report.bytes) == (4, 6.5, 2, 80)
    assert (report.probe_gap, report.probe_gap_mean, report.num_changed) == (2e-6, 3e-7, 2)
    assert verdict([SENT], [replace(RECEIPT, gap=None)]).probe_gap is None


def test_what_any_rank_found_is_the_error_and_travels() -> None:
    bad = {"rollout rank 3": ["missing: a", "missing: b"]}
    failed = [replace(RECEIPT, mark=None, problems=bad), replace(RECEIPT, mark=None, problems=bad)]
    with pytest.raises(WeightSyncError) as caught:
        verdict([replace(SENT, problems={"trainer rank 0": ["lost it", "missing: a"]})], [RECEIPT, *failed])
    expected = "weight sync failed on trainer rank 0, rollout rank 3. Trainer rank 0: lost it; missing: a"
    assert str(caught.value) == expected
    assert caught.value.problems == ["lost it", "missing: a", "missing: b"]
    there = pickle.loads(pickle.dumps(caught.value))
    assert (str(there), there.problems) == (expected, caught.value.problems)


def test_many_problems_and_ranks_are_counted() -> None:
    problems = {f"rank {i}": [f"missing: {j}" for j in range(20)] for i in range(30)}
    text = str(WeightSyncError.of(problems))
    assert "rank 11 and others. Rank 0: missing: 0" in text and text.endswith("missing: 11; and 8 more")


def test_a_receiver_that_holds_something_else() -> None:
    """Nobody has found a fault, but one of them answers for another update."""
    with pytest.raises(WeightSyncError, match=r"rollout engines hold \['m', 'old'\], the trainer has sent \['m'\]"):
        verdict([SENT], [RECEIPT, replace(RECEIPT, mark="old")])


def test_several_receivers_want_one_stream() -> None:
    held = [HeldWeights(version=3, mark=mark) for mark in ("a", "a", "b")]
    wants = [replace(WANTED, held=found) for found in held]
    assert Wanted.of_all(wants[:2]).held == held[0]
    assert Wanted.of_all(wants).held is None and Wanted.of_all([*wants[:2], WANTED]).held is None
    with pytest.raises(ValueError, match="want different weights"):
        Wanted.of_all([WANTED, replace(WANTED, dtype=torch.bfloat16)])


def test_a_mark_names_weights_by_what_they_are() -> None:
    marks = {
        mark_of({"a": 1, "b": 2}, torch.float32, ""),
        mark_of({"b": 2, "a": 1}, torch.float32, ""),
        mark_of({"a": 1, "b": 3}, torch.float32, ""),
        mark_of({"a": 1, "b": 2}, torch.bfloat16, ""),
        mark_of({"a": 1, "b": 2}, torch.float32, "base"),
    }
    assert len(marks) == 4
