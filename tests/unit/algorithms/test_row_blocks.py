"""Long batches are worked on in blocks of rows: whatever the cut, the same numbers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.unit.algorithms.builders import evaluated, rollouts, scores
from verl_like.algorithms import advantages, corrections, masked
from verl_like.algorithms.experience import make_experience
from verl_like.algorithms.masked import masked_var, masked_whiten, row_blocks, token_spread
from verl_like.config import ActorConfig, AlgorithmConfig, RolloutCorrectionConfig

LENGTHS, GROUPS = (5, 1, 4, 4, 2, 5, 3, 1), [0, 0, 0, 1, 1, 2, 2, 2]
CORRECTION = {"rollout_is_threshold": 1.2, "rollout_rs": "token_k1", "rollout_rs_threshold": "0.5_1.5"}


def one_row_each(shape: torch.Size, entries: int = 0) -> Iterator[slice]:
    return (slice(row, row + 1) for row in range(shape[0]))


def cut_up(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (masked, corrections, advantages):
        monkeypatch.setattr(module, "row_blocks", one_row_each)


def test_blocks_hold_all_rows_once() -> None:
    assert list(row_blocks((7, 2**18))) == [slice(0, 2), slice(2, 4), slice(4, 6), slice(6, 8)]
    assert list(row_blocks((2, 2**30))) == [slice(0, 1), slice(1, 2)]
    assert list(row_blocks((0, 5))) == []


@pytest.mark.parametrize(
    ("estimator", "correction"),
    [
        ("grpo", RolloutCorrectionConfig()),
        ("gae", RolloutCorrectionConfig()),
        ("reinforce_plus_plus", RolloutCorrectionConfig(rollout_is="token", **CORRECTION)),
        ("grpo", RolloutCorrectionConfig(rollout_is="sequence", rollout_is_batch_normalize=True, **CORRECTION)),
        ("grpo", RolloutCorrectionConfig(rollout_is="token", rollout_is_batch_normalize=True, **CORRECTION)),
    ],
)
def test_an_experience_does_not_depend_on_the_cut(
    estimator: str, correction: RolloutCorrectionConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    batch, given = rollouts(LENGTHS, GROUPS), [1.0, 0.0, 0.5, 1.0, 0.0, 0.25, 1.0, 0.0]
    said = evaluated(batch, values=estimator == "gae")
    said = said.replace(old_log_probs_BR=batch.rollout_log_probs_BR + 0.3 * torch.randn(len(LENGTHS), 5))
    algorithm = AlgorithmConfig(adv_estimator=estimator, rollout_correction=correction)
    whole, metrics = make_experience(algorithm, ActorConfig(), batch, scores(given), said, 0.0)
    cut_up(monkeypatch)
    cut, cut_metrics = make_experience(algorithm, ActorConfig(), batch, scores(given), said, 0.0)
    assert cut_metrics == pytest.approx(metrics, rel=1e-12) and any("rollout_corr" in name for name in metrics)
    for name, column in whole.columns().items():
        if isinstance(column, torch.Tensor):
            torch.testing.assert_close(getattr(cut, name), column, rtol=1e-6, atol=0, msg=name)


def test_statistics_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    values, mask = torch.randn(6, 50), torch.rand(6, 50) > 0.4
    real = values[mask].double()
    for _ in range(2):
        assert list(token_spread(values, mask)) == pytest.approx(
            [real.mean().item(), real.max().item(), real.min().item()]
        )
        assert masked_var(values, mask).item() == pytest.approx(real.var().item(), rel=1e-5)
        white = masked_whiten(values, mask)
        expected = ((real - real.mean()) * torch.rsqrt(real.var() + 1e-8)).float()
        assert torch.equal(white[~mask], torch.zeros(int((~mask).sum()))) and torch.allclose(white[mask], expected)
        cut_up(monkeypatch)
    with pytest.raises(ValueError, match="no token"):
        token_spread(values, torch.zeros_like(mask))
