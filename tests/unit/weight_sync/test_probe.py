from __future__ import annotations

import pytest
import torch

from verl_like.weight_sync.probe import Gap, Probe, gap_between, probe_sequences

F32, BF16 = torch.float32, torch.bfloat16


def even(gap: float) -> Gap:
    return Gap(mean=gap, largest=gap)


def test_first_sync_calibrates_never_under_the_floor() -> None:
    probe = Probe(F32, F32, None)
    assert probe.problem(even(0.9e-3)) is None
    assert "0.0011 nats" in str(probe.problem(even(1.1e-3)))
    probe.passed(even(5e-5))
    assert probe.tolerance == pytest.approx(5e-4)
    probe.passed(even(1.0))  # later syncs do not move it
    assert probe.tolerance == pytest.approx(5e-4)
    exact = Probe(F32, F32, None)
    exact.passed(even(1e-7))
    assert exact.tolerance == 1e-4


def test_calibration_has_a_cap() -> None:
    """Ten times a large first gap would let a fault pass."""
    for rollout, ceiling in ((F32, 1e-3), (BF16, 1e-1)):
        probe = Probe(rollout, F32, None)
        probe.passed(even(0.9 * ceiling))
        assert probe.tolerance == ceiling
        assert probe.problem(even(1.1 * ceiling)) is not None


def test_half_precision_on_either_side_has_wider_limits() -> None:
    for rollout, trainer in ((BF16, F32), (F32, BF16), (BF16, BF16)):
        probe = Probe(rollout, trainer, None)
        assert probe.problem(even(0.09)) is None
        probe.passed(even(1e-3))
        assert probe.tolerance == 2e-2


def test_configured_tolerance_wins() -> None:
    probe = Probe(F32, F32, 0.5)
    probe.passed(even(1e-6))
    assert probe.problem(even(0.49)) is None
    assert probe.problem(even(0.51)) is not None


def test_nan_is_a_problem() -> None:
    nan = float("nan")
    assert Probe(F32, F32, 0.5).problem(Gap(mean=nan, largest=nan)) is not None


def test_one_token_far_off_is_a_problem_in_float32_only() -> None:
    gap = Gap(mean=1e-5, largest=0.2)
    assert Probe(F32, F32, 1e-3).problem(gap) is not None
    assert Probe(F32, F32, 1e-2).problem(gap) is None
    assert Probe(BF16, F32, 1e-3).problem(gap) is None


def test_gap_of_two_tables() -> None:
    trained, scored = torch.zeros(1, 4), torch.tensor([[0.0, 0.0, 0.0, -0.4]])
    gap = gap_between(trained, scored)
    assert (gap.mean, gap.largest) == (pytest.approx(0.1), pytest.approx(0.4))


def test_probe_tokens_exist_fit_and_change_with_the_version() -> None:
    first, again, second = (probe_sequences(50, 20, version) for version in (1, 1, 2))
    first.check()
    assert torch.equal(first.response_ids_BR, again.response_ids_BR)
    assert not torch.equal(first.response_ids_BR, second.response_ids_BR)
    assert int(first.num_tokens_B().max()) == 19
    assert int(first.response_ids_BR.max()) < 50
