from __future__ import annotations

import pytest
import torch

from verl_like.weight_sync.probe import Probe, probe_sequences

F32, BF16 = torch.float32, torch.bfloat16


def test_first_sync_calibrates_never_under_the_floor() -> None:
    probe = Probe(F32, F32, None)
    assert probe.problem(0.9e-3) is None
    assert "0.0011 nats" in str(probe.problem(1.1e-3))
    probe.passed(5e-5)
    assert probe.tolerance == pytest.approx(5e-4)
    probe.passed(1.0)  # later syncs do not move it
    assert probe.tolerance == pytest.approx(5e-4)
    exact = Probe(F32, F32, None)
    exact.passed(1e-7)
    assert exact.tolerance == 1e-4


def test_half_precision_on_either_side_has_wider_limits() -> None:
    for rollout, trainer in ((BF16, F32), (F32, BF16), (BF16, BF16)):
        probe = Probe(rollout, trainer, None)
        assert probe.problem(0.09) is None
        probe.passed(1e-3)
        assert probe.tolerance == 2e-2


def test_configured_tolerance_wins() -> None:
    probe = Probe(F32, F32, 0.5)
    probe.passed(1e-6)
    assert probe.problem(0.49) is None
    assert probe.problem(0.51) is not None


def test_nan_is_a_problem() -> None:
    assert Probe(F32, F32, 0.5).problem(float("nan")) is not None


def test_gap_is_the_largest_in_float32_and_the_mean_in_half_precision() -> None:
    trained, scored = torch.zeros(1, 4), torch.tensor([[0.0, 0.0, 0.0, 0.4]])
    assert Probe(F32, F32, None).gap(trained, scored) == pytest.approx(0.4)
    assert Probe(BF16, F32, None).gap(trained, scored) == pytest.approx(0.1)


def test_probe_tokens_exist_fit_and_change_with_the_version() -> None:
    first, again, second = (probe_sequences(50, 20, version) for version in (1, 1, 2))
    first.check()
    assert torch.equal(first.response_ids_BR, again.response_ids_BR)
    assert not torch.equal(first.response_ids_BR, second.response_ids_BR)
    assert int(first.num_tokens_B().max()) == 19
    assert int(first.response_ids_BR.max()) < 50


def test_rounding_of_very_unlikely_tokens_counts_in_proportion() -> None:
    probe = Probe(torch.float32, torch.float32, None)
    trained_BR = torch.tensor([[-1.0, -16.0, -64.0]])
    for column, expected in ((0, 0.5), (1, 0.5), (2, 0.125)):
        scored_BR = trained_BR.clone()
        scored_BR[0, column] -= 0.5
        assert probe.gap(trained_BR, scored_BR) == pytest.approx(expected)
