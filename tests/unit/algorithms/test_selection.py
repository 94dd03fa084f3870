"""clip_cov and kl_cov: which tokens of a mini-batch are chosen; nothing but the mini-batch and the seed decides."""

from __future__ import annotations

import pytest
import torch

from tests.unit.algorithms.builders import denominators, experience, outputs_for
from verl_like.algorithms.objectives import PolicyObjective
from verl_like.algorithms.preparation import select_tokens, token_covariance
from verl_like.batch import Experience, merge_metrics
from verl_like.config import ActorConfig, PolicyLossConfig
from verl_like.config.menus import LOSSES

SEED = (1, 2, 0, 0)


def actor(mode: str, **keys: float) -> ActorConfig:
    return ActorConfig(policy_loss=PolicyLossConfig(loss_mode=mode, **keys))  # type: ignore[arg-type]


def hand_rows() -> Experience:
    """Means: A 1, old -2. Covariances: (2)(1) = 2, (-1)(0) = 0; (0)(-2) = 0, (-1)(1) = -1; one token of tool text."""
    rows = experience(0, lengths=(2, 3), width=3)
    return rows.replace(
        response_mask_BR=torch.tensor([[True, True, False], [True, False, True]]),
        advantages_BR=torch.tensor([[3.0, 0.0, 99.0], [1.0, 99.0, 0.0]]),
        old_log_probs_BR=torch.tensor([[-1.0, -2.0, 99.0], [-4.0, -99.0, -1.0]]),
    )


def test_covariance_by_hand() -> None:
    assert token_covariance(hand_rows()).tolist() == [2.0, 0.0, 0.0, 0.0, -1.0]


def test_kl_cov_takes_the_largest() -> None:
    chosen = select_tokens(hand_rows(), actor("kl_cov", kl_cov_ratio=0.25), SEED)
    assert chosen is not None and chosen.tolist() == [True, False, False, False, False]
    several = select_tokens(hand_rows(), actor("kl_cov", kl_cov_ratio=0.75), SEED)
    assert several is not None and several.tolist() == [True, True, True, False, False]


def test_clip_cov_draws_from_the_window() -> None:
    for seed in range(20):
        chosen = select_tokens(
            hand_rows(), actor("clip_cov", clip_cov_ratio=0.25, clip_cov_lb=-0.5, clip_cov_ub=1.0), (seed,)
        )
        assert chosen is not None and chosen.sum() == 1
        assert bool(chosen[1]) or bool(chosen[2])  # the two zeros
    nothing = select_tokens(hand_rows(), actor("clip_cov", clip_cov_lb=3.0, clip_cov_ub=9.0), SEED)
    assert nothing is not None and not nothing.any()


@pytest.mark.parametrize(("share", "count"), [(0.0, 0), (1e-9, 1), (0.5, 2), (1.0, 4)])
def test_share_of_all_tokens_at_least_one(share: float, count: int) -> None:
    chosen = select_tokens(hand_rows(), actor("kl_cov", kl_cov_ratio=share), SEED)
    assert chosen is not None and int(chosen.sum()) == count


def naive_kl_cov(rows: Experience, share: float) -> set[tuple[int, int]]:
    assert rows.old_log_probs_BR is not None
    tokens = [(i, t) for i, t in rows.response_mask_BR.nonzero().tolist()]
    mean_a = sum(rows.advantages_BR[i, t].item() for i, t in tokens) / len(tokens)
    mean_old = sum(rows.old_log_probs_BR[i, t].item() for i, t in tokens) / len(tokens)
    size = {
        (i, t): (rows.advantages_BR[i, t].item() - mean_a) * (rows.old_log_probs_BR[i, t].item() - mean_old)
        for i, t in tokens
    }
    return set(sorted(tokens, key=lambda token: -size[token])[: max(int(share * len(tokens)), 1)])


@pytest.mark.parametrize("seed", range(5))
def test_kl_cov_equals_a_naive_loop_and_follows_a_permutation(seed: int) -> None:
    rows, options = experience(seed), actor("kl_cov", kl_cov_ratio=0.3)
    chosen = select_tokens(rows, options, SEED)
    assert chosen is not None
    assert {(i, t) for i, t in rows.padded(chosen).nonzero().tolist()} == naive_kl_cov(rows, 0.3)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))
    moved = select_tokens(rows.select(order), options, SEED)
    assert moved is not None and torch.equal(rows.select(order).padded(moved), rows.padded(chosen)[order])


def test_the_draw_follows_the_seed_alone() -> None:
    rows = experience(3, lengths=(8,) * 12, width=8)
    options = actor("clip_cov", clip_cov_ratio=0.2, clip_cov_lb=-9.0, clip_cov_ub=9.0)
    first, again = (select_tokens(rows, options, SEED) for _ in range(2))
    torch.manual_seed(99)
    other_global_seed = select_tokens(rows, options, SEED)
    other_step = select_tokens(rows, options, (1, 3, 0, 0))
    assert torch.equal(first, again) and torch.equal(first, other_global_seed)
    assert not torch.equal(first, other_step)


def test_only_these_losses_select_and_they_need_old_log_probs() -> None:
    rows = experience(0)
    assert {mode for mode in LOSSES if select_tokens(rows, actor(mode), SEED) is not None} == {"clip_cov", "kl_cov"}
    with pytest.raises(ValueError, match="old_log_probs=recompute"):
        select_tokens(rows.replace(old_log_probs_BR=None), actor("kl_cov"), SEED)


def test_the_update_reports_how_many_tokens_were_chosen() -> None:
    """Three of four tokens, in two micro-batches."""
    options = actor("kl_cov", kl_cov_ratio=0.75)
    rows = hand_rows()
    rows = rows.replace(selected_T=select_tokens(rows, options, SEED))
    outputs, parts = outputs_for(rows), []
    for row in range(2):
        one = rows.select([row])
        part = {name: value[[row], : one.response_mask_BR.shape[1]] for name, value in outputs.items()}
        parts.append(PolicyObjective(options)(part, one, denominators(rows))[1])
    found = merge_metrics(parts)
    assert found["selected_tokens"].value == 3 and found["selected_frac"].value == 0.75


def test_equal_advantages_choose_the_first_and_stay_finite() -> None:
    rows = hand_rows().replace(advantages_BR=torch.zeros(2, 3))
    chosen = select_tokens(rows, actor("kl_cov", kl_cov_ratio=0.25), SEED)
    assert chosen is not None and chosen.tolist() == [True, False, False, False, False]
