"""Losses of a token, written down twice: those of the run and those of the check agree, and so do their gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from verl_like.algorithms.objectives import PolicyObjective
from verl_like.algorithms.policy_losses import POLICY_LOSSES, PolicyBatch
from verl_like.config import ActorConfig
from verl_like.config.menus import LOSSES
from verl_like.kit.selfcheck.plain_modes import joined_by, mode_loss
from verl_like.trainer.compose import compose

ACTOR = "actor_rollout_ref.actor"
VARIANTS = {
    "topr": [f"{ACTOR}.policy_loss.topr.ratio_level=token", f"{ACTOR}.policy_loss.topr.reward_source=score"],
    "vanilla": [f"{ACTOR}.clip_ratio_c=null", f"{ACTOR}.clip_ratio_low=0.1"],
    "dppo_tv": [f"{ACTOR}.clip_ratio_c=null"],
}
CASES = [(mode, [key] if key else []) for mode in LOSSES for key in ["", *VARIANTS.get(mode, [])]]


def actor_of(mode: str, keys: list[str]) -> ActorConfig:
    given = ["data.train_files=x", "actor_rollout_ref.model.path=x", "algorithm.adv_estimator=grpo"]
    given += ["actor_rollout_ref.rollout.n=4", f"{ACTOR}.policy_loss.loss_mode={mode}", *keys]
    return compose(given).actor_rollout_ref.actor


def one_row(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, float]:
    """Log-probs of now and before (near or far), advantages with a 0, mask, selection, score."""
    drawn = torch.Generator().manual_seed(seed)
    log_p, noise, gain = (torch.randn(12, generator=drawn, dtype=torch.float64) for _ in range(3))
    log_p, old = -log_p.abs(), (-log_p.abs() + (2.0 if seed % 2 else 0.1) * noise).clamp(max=-1e-3)
    gain[3] = 0.0
    mask, chosen = (torch.rand(2, 12, generator=drawn) < torch.tensor([[0.8], [0.3]])).unbind()
    return log_p.requires_grad_(), old, gain, mask, chosen, float(torch.randn((), generator=drawn))


@pytest.mark.parametrize(("mode", "keys"), CASES)
def test_a_loss_is_what_its_formula_says(mode: str, keys: list[str]) -> None:
    actor = actor_of(mode, keys)
    assert joined_by(actor) == PolicyObjective(actor).aggregation
    for seed in range(20):
        log_p, old, gain, mask, chosen, score = one_row(seed)
        batch = PolicyBatch(
            log_probs_BR=log_p[None],
            old_log_probs_BR=old[None],
            advantages_BR=gain[None],
            mask_BR=mask[None],
            selected_BR=chosen[None],
            score_B=torch.tensor([score], dtype=torch.float64),
        )
        found = POLICY_LOSSES.lookup(mode).function(batch, actor).loss_BR[0].expand(12)[mask]
        plain = mode_loss(actor, log_p, old, gain, mask, chosen, score)
        assert plain is not None
        plain = plain.expand(12)[mask]
        torch.testing.assert_close(found, plain, rtol=1e-6, atol=1e-6)
        slopes = [torch.autograd.grad(each.sum(), log_p, retain_graph=True)[0] for each in (found, plain)]
        torch.testing.assert_close(*slopes, rtol=1e-6, atol=1e-6)
