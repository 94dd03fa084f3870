"""Long batches are worked on in blocks of rows: whatever the cut, the same numbers."""

from __future__ import annotations

import pytest
import torch

from tests.unit.algorithms.builders import evaluated, rollouts, scores
from verl_like import flat_columns
from verl_like.algorithms import advantages, masked
from verl_like.algorithms.experience import make_experience
from verl_like.algorithms.masked import masked_var, masked_whiten, token_spread
from verl_like.config import ActorConfig, AlgorithmConfig, RolloutCorrectionConfig

LENGTHS, GROUPS = (5, 1, 4, 4, 2, 5, 3, 1), [0, 0, 0, 1, 1, 2, 2, 2]
CORRECTION = {"rollout_is_threshold": 1.2, "rollout_rs": "token_k1", "rollout_rs_threshold": "0.5_1.5"}


def cut_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of one row, or group, each."""
    for module, name in ((masked, "_BLOCK"), (flat_columns, "_BLOCK"), (advantages, "_LOOP_BLOCK")):
        monkeypatch.setattr(module, name, 1)


@pytest.mark.parametrize(
    ("estimator", "correction"),
    [
        ("grpo", RolloutCorrectionConfig()),
        ("gae", RolloutCorrectionConfig()),
        ("optimal_token_baseline", RolloutCorrectionConfig()),
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
    drift, squares = 0.3 * torch.randn(sum(LENGTHS)), torch.rand(sum(LENGTHS))
    said = said.replace(old_log_probs_T=batch.rollout_log_probs_T + drift, sum_pi_squared_T=squares)
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
