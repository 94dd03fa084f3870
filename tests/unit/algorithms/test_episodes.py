"""Rows of one episode are counted once: a batch whose rows were cut into several has all numbers of the whole one.

Decided over every estimator, reward option, filter, loss and aggregation that is registered. Where a ratio is one of
the row (gspo ...), cutting changes the loss by design: there the ratios are 1, and the joining alone is seen.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.unit.algorithms.builders import MAX_RESPONSE_LENGTH, experience, outputs_for, rollouts, scores
from tests.unit.algorithms.combinations import KL_TERMS, LOSSES, KLTerm, actor_of, legal
from tests.unit.algorithms.episode_rows import drawn_parts, split, split_column, twice, whole
from verl_like.algorithms.aggregate import AGGREGATIONS
from verl_like.algorithms.corrections import correct_on_driver
from verl_like.algorithms.experience import make_experience
from verl_like.algorithms.minibatch import count_episode_tokens, cut_minibatches, denominators_of
from verl_like.algorithms.objectives import PolicyObjective, ValueObjective
from verl_like.algorithms.preparation import prepare_batch, prepare_minibatch
from verl_like.algorithms.reward_shaping import RunningMoments, baseline_rewards, has_signal_B, shape_rewards
from verl_like.batch import Episodes, Evaluated, Experience, Metric, Rollouts, Scores, merge_metrics
from verl_like.config import (
    ActorConfig,
    AgentRewardNormConfig,
    AlgorithmConfig,
    CriticConfig,
    FilterGroupsConfig,
    LengthRewardConfig,
    OverlongBufferConfig,
    PFPPOConfig,
    RewardModelConfig,
    RewardNormConfig,
    RewardScalingConfig,
    RolloutCorrectionConfig,
)
from verl_like.config.menus import ESTIMATORS
from verl_like.config.shaping import AgentNormMethod, TruncatedRows

WIDTH = 8
Batch = tuple[Rollouts, Scores, Evaluated]


def batch(seed: int, num_rows: int = 9) -> Batch:
    """Groups of three with tool text, turns of two columns that come back to states, and every column present."""
    generator = torch.Generator().manual_seed(seed)
    lengths = tuple(torch.randint(2, WIDTH + 1, (num_rows,), generator=generator).tolist())
    rows = rollouts(lengths, [3 + i // 3 for i in range(num_rows)], WIDTH)
    mask = rows.response_mask_BR & (torch.rand(num_rows, WIDTH, generator=generator) > 0.25)
    mask[:, 0] = True

    def column(scale: float = 1.0, shift: float = 0.0) -> Tensor:
        return (torch.randn(num_rows, WIDTH, generator=generator) * scale + shift) * mask

    turn = (torch.arange(WIDTH) // 2).int().expand(num_rows, WIDTH)
    state = torch.randint(2, (num_rows, WIDTH // 2), generator=generator).repeat_interleave(2, dim=1)
    old = column(0.4, -1.5)
    rows = rows.replace(
        response_mask_BR=mask,
        rollout_log_probs_BR=old + column(0.2),
        finish_reasons=["length" if i % 4 == 1 else "stop" for i in range(num_rows)],
        step_BR=torch.where(mask, turn, -1),
        anchor_BR=torch.where(mask, state, -1),
        step_rewards_BR=column(0.3),
    )
    values = torch.randint(0, 4, (num_rows,), generator=generator).double() / 3
    graded = scores(values.tolist()).replace(
        extras=[{"acc": float(v > 0.5), "answered": i % 2 == 0} for i, v in enumerate(values.tolist())],
        baseline_B=torch.rand(3, generator=generator).repeat_interleave(3)[:num_rows],
    )
    known = Evaluated(
        response_length_B=rows.response_length_B,
        old_log_probs_BR=old,
        entropy_BR=column().abs(),
        sum_pi_squared_BR=torch.rand(num_rows, WIDTH, generator=generator) * mask,
        ref_log_probs_BR=old + column(0.3),
        full_kl_BR=column().abs(),
        values_BR=column(),
    )
    return rows, graded, known


def in_parts(seed: int, given: Batch) -> tuple[Batch, list[tuple[int, int, int]]]:
    parts = drawn_parts(given[0].response_mask_BR, given[0].response_length_B, 3, seed)
    assert len(parts) > len(given[0])
    rows, graded, known = given
    return (split(rows, parts), split(graded, parts), split(known, parts)), parts


def same(a: dict[str, float], b: dict[str, float], without: tuple[str, ...] = ()) -> None:
    def kept(metrics: dict[str, float]) -> dict[str, float]:
        return {name: value for name, value in metrics.items() if not name.startswith(without or ("none",))}

    assert kept(a) == pytest.approx(kept(b), rel=1e-5, abs=1e-6)


# ---- credit

SHAPING: dict[str, dict[str, Any]] = {
    "plain": {},
    "kl": {"use_kl_in_reward": True},
    "full kl": {"use_kl_in_reward": True, "kl_penalty": "full"},
    "tokens": {"token_reward_clip": 0.5, "whiten_rewards": True},
    "advantages": {"whiten_advantages": True, "advantage_clip": 0.4, "norm_adv_by_std_in_grpo": False},
}


def algorithm_of(estimator: str, **keys: Any) -> AlgorithmConfig:
    keys = {"gdpo_reward_keys": ["score", "acc"], "gamma": 0.9, "lam": 0.8, **keys}
    return AlgorithmConfig(adv_estimator=estimator, **keys)


ROWS_ONLY = ("rollout_corr/", "training/rows_empty")  # ratios of rows, by design


@pytest.mark.parametrize("shaping", SHAPING)
@pytest.mark.parametrize("estimator", sorted({*ESTIMATORS, "remax"}))
def test_every_estimator_gives_rows_the_credit_of_their_episode(estimator: str, shaping: str) -> None:
    algorithm = algorithm_of(estimator, **SHAPING[shaping])
    if estimator == "maxrl" and shaping in ("kl", "full kl", "tokens"):
        pytest.skip("refuses negative rewards")
    for seed in range(3):
        given = batch(seed)
        if estimator == "maxrl":
            given = (given[0].replace(step_rewards_BR=None), *given[1:])
        cut, parts = in_parts(seed, given)
        expected, metrics = make_experience(algorithm, ActorConfig(), *given, kl_coef=0.1)
        found, found_metrics = make_experience(algorithm, ActorConfig(), *cut, kl_coef=0.1)
        width = expected.response_mask_BR.shape[1]
        assert torch.allclose(whole(found.advantages_BR, parts, width), expected.advantages_BR, atol=1e-5)
        assert found.returns_BR is not None and expected.returns_BR is not None and expected.truncated_B is not None
        assert torch.allclose(whole(found.returns_BR, parts, width), expected.returns_BR, atol=1e-5)
        assert torch.equal(found.truncated_B, torch.stack([expected.truncated_B[row] for row, _, _ in parts]))
        same(found_metrics, metrics, ROWS_ONLY)


@pytest.mark.parametrize("estimator", sorted({*ESTIMATORS, "remax"}))
def test_episodes_of_one_row_are_rows_bit_by_bit(estimator: str) -> None:
    rows, graded, known = batch(4)
    rows = rows.replace(step_rewards_BR=None)
    numbered = rows.replace(episode_B=torch.arange(len(rows)) + 5)
    plain, metrics = make_experience(algorithm_of(estimator), ActorConfig(), rows, graded, known, kl_coef=0.1)
    named, same_metrics = make_experience(algorithm_of(estimator), ActorConfig(), numbered, graded, known, kl_coef=0.1)
    assert torch.equal(plain.advantages_BR, named.advantages_BR) and metrics == same_metrics


RESPONSE_LEVEL = ("grpo", "dr_grpo", "rloo", "gpg", "grpo_passk", "maxrl", "lite_ppo")


@pytest.mark.parametrize("estimator", RESPONSE_LEVEL)
def test_a_row_that_is_there_twice_shifts_no_statistic(estimator: str) -> None:
    rows, graded, known = batch(1)
    rows = rows.replace(step_rewards_BR=None, step_BR=None, anchor_BR=None)
    algorithm, chosen = algorithm_of(estimator), [0, 4, 4, 8]
    once, metrics = make_experience(algorithm, ActorConfig(), rows, graded, known, kl_coef=0.1)
    more, more_metrics = make_experience(
        algorithm, ActorConfig(), twice(rows, chosen), twice(graded, chosen), twice(known, chosen), kl_coef=0.1
    )
    assert torch.equal(more.advantages_BR[:9], once.advantages_BR)
    assert torch.equal(more.advantages_BR[9:], once.advantages_BR[chosen])
    for name in ("critic/score/mean", "critic/rewards/mean", "critic/group_zero_std_fraction"):
        assert more_metrics[name] == metrics[name]


def test_a_group_of_one_episode_has_no_advantage_however_many_rows_it_has() -> None:
    rows, graded = rollouts((2, 2, 2), [5, 5, 5]).replace(episode_B=torch.tensor([1, 1, 1])), scores([1.0] * 3)
    known = Evaluated(response_length_B=rows.response_length_B)
    found, metrics = make_experience(
        AlgorithmConfig(adv_estimator="grpo"), ActorConfig(), rows, graded, known, kl_coef=0.0
    )
    assert not found.advantages_BR.any() and metrics["critic/group_singleton_fraction"] == 1.0


@pytest.mark.parametrize("estimator", ["gigpo", "step_reinforce"])
def test_turns_that_begin_again_in_each_row_are_refused_by_name(estimator: str) -> None:
    cut, _ = in_parts(0, batch(0))
    steps_BR = cut[0].step_BR
    assert steps_BR is not None
    first = steps_BR.masked_fill(steps_BR < 0, 99).min(dim=1, keepdim=True).values
    again = cut[0].replace(step_BR=torch.where(steps_BR < 0, -1, steps_BR - first))
    with pytest.raises(ValueError, match=f"{estimator}.*numbered through all rows of an episode.*step_BR"):
        make_experience(algorithm_of(estimator), ActorConfig(), again, *cut[1:], kl_coef=0.0)
    make_experience(algorithm_of("grpo"), ActorConfig(), again, *cut[1:], kl_coef=0.0)  # which reads no turns


# ---- which rows are there at all


def test_one_failed_row_fails_its_episode_once() -> None:
    rows = rollouts((2, 2, 2, 2, 2), [1] * 5).replace(episode_B=torch.tensor([1, 2, 1, 3, 3]))
    graded = scores([1.0, 0.5, 1.0, 0.0, 0.0], failed=(2,))
    known = Evaluated(response_length_B=rows.response_length_B)
    found, metrics = make_experience(
        AlgorithmConfig(adv_estimator="dr_grpo"), ActorConfig(), rows, graded, known, kl_coef=0.0
    )
    assert found.episode_B is not None and found.episode_B.tolist() == [2, 3, 3]
    assert found.advantages_BR[:, 0].tolist() == [0.25, -0.25, -0.25]
    assert (metrics["training/rows_without_reward"], metrics["critic/score/mean"]) == (1.0, 0.25)
    signal_B = has_signal_B(FilterGroupsConfig(enable=True), RewardModelConfig(), rows, graded, 8)
    assert signal_B.all()


def test_rows_of_one_episode_must_agree() -> None:
    rows, graded, known = batch(0)
    apart = rows.replace(episode_B=torch.tensor([1, 1, 2, 3, 4, 5, 6, 7, 8]))
    other = graded.replace(score_B=torch.arange(9.0))
    with pytest.raises(ValueError, match="different scores"):
        make_experience(algorithm_of("grpo"), ActorConfig(), apart, other, known, kl_coef=0.0)
    with pytest.raises(ValueError, match="episode 1 has rows in the groups 3 and 4"):
        Episodes.of(rows.replace(episode_B=torch.tensor([1, 2, 3, 1, 4, 5, 6, 7, 8])))


def test_a_row_without_a_sampled_token_leaves_and_its_episode_stays() -> None:
    rows = rollouts((2, 2, 3, 1), [1] * 4).replace(episode_B=torch.tensor([1, 1, 1, 2]))
    mask = rows.response_mask_BR.clone()
    mask[1] = False
    known = Evaluated(response_length_B=rows.response_length_B)
    found, metrics = make_experience(
        AlgorithmConfig(adv_estimator="dr_grpo"),
        ActorConfig(),
        rows.replace(response_mask_BR=mask),
        scores([1.0, 1.0, 1.0, 0.0]),
        known,
        kl_coef=0.0,
    )
    assert found.advantages_BR[:, 0].tolist() == [0.5, 0.5, -0.5]
    assert (metrics["training/rows_empty"], metrics["training/rows_without_reward"]) == (1.0, 0.0)


# ---- rewards and filters

REWARDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "length": ({}, {"length_reward": LengthRewardConfig(enable=True, coef=-0.5)}),
    **{
        f"overlong {kind}": (
            {},
            {
                "overlong_buffer": OverlongBufferConfig(
                    enable=True, len=6, penalty_factor=0.7, log=True, truncated=kind, only_key=key
                )
            },
        )
        for kind, key in zip(TruncatedRows, ("answered", None, None), strict=True)
    },
    **{
        f"norm {mean} {std}": ({"reward_norm": RewardNormConfig(mean=mean, std=std)}, {})
        for mean in ("batch", "group", "running")
        for std in ("batch", "group", "running", None)
    },
    "scaling": ({"reward_scaling": RewardScalingConfig(enable=True, center=True), "reward_clip": 0.3}, {}),
    **{
        f"agent {method} {grouping}": (
            {"agent_reward_norm": AgentRewardNormConfig(method=AgentNormMethod(method), grouping=grouping)},
            {},
        )
        for method in ("mean", "mean_std", "asym_clip")
        for grouping in ("state", "batch", "index")
    },
}


@pytest.mark.parametrize("name", REWARDS)
def test_every_reward_option_sees_an_episode_once(name: str) -> None:
    algorithm, model = AlgorithmConfig(**REWARDS[name][0]), RewardModelConfig(**REWARDS[name][1])
    before = RunningMoments(count=5, mean=0.2, var=0.3)
    for seed in range(3):
        given = batch(seed)
        cut, parts = in_parts(seed, given)
        expected = shape_rewards(algorithm, model, *given[:2], before, WIDTH)
        found = shape_rewards(algorithm, model, *cut[:2], before, WIDTH)
        assert torch.allclose(found.reward_B, expected.reward_B[[row for row, _, _ in parts]], atol=1e-6)
        assert found.moments == expected.moments
        same(found.metrics, expected.metrics)
        greedy = baseline_rewards(algorithm, model, *given[:2], WIDTH)
        in_rows = baseline_rewards(algorithm, model, *cut[:2], WIDTH)
        assert torch.allclose(in_rows, greedy[[row for row, _, _ in parts]], atol=1e-6)


@pytest.mark.parametrize(
    "rules",
    [
        {"std_threshold": 0.4},
        {"metric": "acc", "std_threshold": 0.55},
        {"metric": "seq_reward", "std_threshold": 0.2},
        {"range": [0.3, 0.6]},
        {"metric": "seq_final_reward", "range": [-0.1, 0.5], "std_threshold": 0.1},
    ],
)
def test_the_group_filter_sees_an_episode_once(rules: dict[str, Any]) -> None:
    config, model = FilterGroupsConfig(enable=True, **rules), RewardModelConfig()
    model.length_reward = LengthRewardConfig(enable=True, coef=-0.5)
    for seed in range(8):
        given = batch(seed)
        cut, parts = in_parts(seed, given)
        expected = has_signal_B(config, model, *given[:2], MAX_RESPONSE_LENGTH)
        found = has_signal_B(config, model, *cut[:2], MAX_RESPONSE_LENGTH)
        assert torch.equal(found, expected[[row for row, _, _ in parts]])


def test_two_rows_are_no_group_to_compare() -> None:
    """A mean between the bounds; but one episode has nothing to be compared with, and one row more shifts no mean."""
    config = FilterGroupsConfig(enable=True, range=[0.3, 0.6])
    alone = rollouts((2, 2), [1, 1]).replace(episode_B=torch.tensor([4, 4]))
    assert not has_signal_B(config, RewardModelConfig(), alone, scores([0.5, 0.5]), 8).any()
    several = rollouts((2,) * 4, [1] * 4).replace(episode_B=torch.tensor([4, 4, 4, 5]))
    assert has_signal_B(config, RewardModelConfig(), several, scores([1.0, 1.0, 1.0, 0.0]), 8).all()


@pytest.mark.parametrize("method", ["pow", "max_min", "max_random"])
def test_pf_ppo_draws_whole_episodes(method: str) -> None:
    algorithm = algorithm_of("grpo", use_pf_ppo=True, pf_ppo=PFPPOConfig(reweight_method=method))  # type: ignore[arg-type]
    given = batch(2)
    cut, _ = in_parts(2, given)
    expected, metrics = make_experience(algorithm, ActorConfig(), *given, kl_coef=0.1, seed=3)
    found, found_metrics = make_experience(algorithm, ActorConfig(), *cut, kl_coef=0.1, seed=3)
    episodes = Episodes.of(found)
    assert len(episodes) == len(expected) == denominators_of(found, 8).num_sequences  # one that came twice is two
    assert torch.equal(episodes.sums(found.response_mask_BR.sum(dim=1)), expected.response_mask_BR.sum(dim=1))
    assert found_metrics["training/pf_ppo_distinct_rows"] == metrics["training/pf_ppo_distinct_rows"]


# ---- losses

OF_THE_ROW = {"gspo", "gspo_token", "luspo", "geo_mean", "vespo", "kimi"}  # topr by ratio_level
OPTIONS = ("entropy", "imitation", "rl_coef", "weights", "truncated")


def of_the_row(loss: Any) -> bool:
    return loss[0] in OF_THE_ROW or (loss[0] == "topr" and str(loss[1].ratio_level) == "seq")


def loss_rows(seed: int, loss: Any) -> tuple[Experience, dict[str, Tensor]]:
    """Rows with one advantage each and their outputs; ratios of 1 where the loss's ratio is one of the row."""
    generator = torch.Generator().manual_seed(seed)
    lengths = tuple(torch.randint(2, WIDTH + 1, (6,), generator=generator).tolist())
    rows = experience(seed, lengths, WIDTH)
    advantage_B = torch.randn(6, generator=generator, dtype=torch.float64)
    rows = rows.replace(advantages_BR=advantage_B[:, None] * rows.response_mask_BR, selected_BR=None)
    outputs = outputs_for(rows, seed + 1)
    if of_the_row(loss):
        rows = rows.replace(old_log_probs_BR=outputs["log_probs"].detach().clone())
    return rows, outputs


def answer(objective: Any, rows: Experience, outputs: dict[str, Tensor], actor: ActorConfig | None, micro: int) -> Any:
    """Loss, gradients and metrics of a mini-batch in micro-batches of `micro` rows, in another order."""
    width = rows.response_ids_BR.shape[1]
    numbered = torch.arange(len(rows), dtype=torch.int32)[:, None].expand(-1, width)
    kept = rows.replace(response_ids_BR=numbered)
    if actor is not None:
        kept = prepare_minibatch(prepare_batch(kept, actor), actor, seed=(3, 1, 0, 0))
    index, counts = kept.response_ids_BR[:, 0].long(), denominators_of(kept, MAX_RESPONSE_LENGTH)
    kept = count_episode_tokens(kept)
    total, metrics = torch.zeros((), dtype=torch.float64), list[dict[str, Metric]]()
    order = torch.randperm(len(kept), generator=torch.Generator().manual_seed(micro))
    for piece in order.split(micro):
        part = kept.select(piece)
        width = part.response_mask_BR.shape[1]
        loss, found = objective({name: value[index[piece], :width] for name, value in outputs.items()}, part, counts)
        total, metrics = total + loss, [*metrics, found]
    gradients = torch.autograd.grad(total, list(outputs.values()), allow_unused=True)
    return total.detach(), gradients, {name: m.value for name, m in merge_metrics(metrics).items()}


def agree(objective: Any, rows: Experience, outputs: dict[str, Tensor], actor: ActorConfig | None, seed: int) -> None:
    parts = drawn_parts(rows.response_mask_BR, rows.response_length_B, 3, seed, interleaved=False)
    cut = split(rows, parts)
    pieces = {
        name: split_column(value.detach(), parts, cut.response_mask_BR.shape[1]).requires_grad_()
        for name, value in outputs.items()
    }
    loss, gradients, metrics = answer(objective, rows, outputs, actor, 9)
    for micro in (1, 4):
        found, found_gradients, found_metrics = answer(objective, cut, pieces, actor, micro)
        assert torch.allclose(found, loss, rtol=1e-9, atol=1e-10)
        for a, b in zip(found_gradients, gradients, strict=True):
            if b is not None:
                assert torch.allclose(whole(a, parts, b.shape[1]), b, rtol=1e-9, atol=1e-10)
        same(found_metrics, metrics, ("mismatch_tally/",))  # has spreads of rows


@pytest.mark.parametrize("mode", AGGREGATIONS.names())
@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: f"{loss[0]}-{loss[1].ratio_level}-{loss[1].reward_source}")
def test_every_loss_and_aggregation_joins_an_episodes_rows(loss: Any, mode: str) -> None:
    by_token = RolloutCorrectionConfig(rollout_is="token", rollout_rs="token_k1", rollout_rs_threshold="0.4_2.5")
    corrections = [RolloutCorrectionConfig(), by_token]
    for seed, options in enumerate(((), OPTIONS)):
        for term in (KL_TERMS[0], KLTerm("k3", unbiased=seed == 1)):
            actor = actor_of(loss, mode, term, options)
            if not legal(actor):
                continue
            spread = loss[0] in ("gspo", "luspo", "geo_mean")  # a token's weight acts on all tokens of its row
            correction = corrections[0 if spread else seed]
            rows, outputs = loss_rows(seed, loss)
            chosen = {name: value for name, value in outputs.items() if name != "values"}
            agree(PolicyObjective(actor, correction), rows, chosen, actor, seed)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), mode=st.sampled_from(AGGREGATIONS.names()))
def test_drawn_cuts_of_policy_and_value_loss(seed: int, mode: str) -> None:
    rows, outputs = loss_rows(seed, LOSSES[0])
    critic = CriticConfig(loss_agg_mode=mode)
    agree(ValueObjective(critic), rows, {"values": outputs["values"]}, None, seed)
    actor = actor_of(("vanilla", LOSSES[0][1]), mode, KL_TERMS[0], ("weights",))
    chosen = {name: value for name, value in outputs.items() if name != "values"}
    agree(PolicyObjective(actor), rows, chosen, actor, seed)


def test_denominators_by_hand() -> None:
    """Losses 1 2 | 3 and 4: as rows 2 sums of mean (1.5 + 3 + 4) / 3, as episodes (2 + 4) / 2."""
    rows = experience(0, (2, 1, 1), 2).replace(
        response_mask_BR=torch.tensor([[True, True], [True, False], [True, False]]),
        group_B=torch.zeros(3, dtype=torch.int64),
        episode_B=torch.tensor([8, 8, 9]),
    )
    counts, counted = denominators_of(rows, 5), count_episode_tokens(rows)
    assert (counts.num_sequences, counts.num_tokens) == (2, 4)
    assert counted.episode_tokens_B is not None and counted.episode_tokens_B.tolist() == [3, 3, 1]
    loss_BR = torch.tensor([[1.0, 2.0], [3.0, 99.0], [4.0, 99.0]])
    expected = {
        "token-mean": 10 / 4,
        "token-sum": 10.0,
        "seq-mean-token-sum": (6 + 4) / 2,
        "seq-mean-token-mean": (2 + 4) / 2,
        "seq-mean-token-sum-norm": (6 + 4) / 2 / 5,
    }
    for mode, function in ((name, AGGREGATIONS.lookup(name)) for name in AGGREGATIONS.names()):
        found = function(loss_BR, rows.response_mask_BR, counts, 5.0, counted.episode_tokens_B)
        assert found.item() == pytest.approx(expected[mode]), mode


def test_an_episode_is_never_cut_by_mini_batches() -> None:
    cut, _ = in_parts(0, batch(0))
    assert cut[0].episode_B is not None
    for shuffle in (False, True):
        seen = [set(cut[0].episode_B[rows].tolist()) for rows in cut_minibatches(cut[0].group_B, 2, shuffle=shuffle)]
        assert len(seen) == 2 and not seen[0] & seen[1]


# ---- what is counted in rows of one context

SEQUENCE_LEVEL = [
    RolloutCorrectionConfig(),
    RolloutCorrectionConfig(rollout_is="sequence", rollout_is_batch_normalize=True, rollout_is_threshold="1.5"),
    RolloutCorrectionConfig(rollout_is="geometric", rollout_token_veto_threshold=0.7),
    RolloutCorrectionConfig(rollout_rs="seq_mean_k1", rollout_rs_threshold="0.95_1.05"),
    RolloutCorrectionConfig(rollout_rs="seq_max_k3", rollout_rs_threshold="0.02"),
]
# Counted in rows. Without seq_std: the deviation of a sample knows how many rows there are.
OF_ROWS = (
    *("_ppl", "ppl_ratio", "log_ppl_diff", "log_ppl_abs_diff", "log_ppl_diff_max", "log_ppl_diff_min", "chi2_seq"),
    *("seq_mean", "seq_max", "seq_min", "seq_max_deviation", "seq_fraction_high", "seq_fraction_low"),
    *("seq_masked_fraction", "seq_dropped_fraction", "batch_norm_factor", "veto_fraction"),
)


@pytest.mark.parametrize("correction", SEQUENCE_LEVEL, ids=lambda c: f"{c.rollout_is}-{c.rollout_rs}")
def test_a_row_twice_in_one_episode_counts_once_in_the_mismatch(correction: RolloutCorrectionConfig) -> None:
    rows, _, known = batch(3)
    once = correct_on_driver(correction, ActorConfig(), rows, known)
    more = correct_on_driver(correction, ActorConfig(), twice(rows, [1, 1, 5]), twice(known, [1, 1, 5]))
    for name, value in once.metrics.items():
        if name.endswith(OF_ROWS):
            assert more.metrics[name] == pytest.approx(value, rel=1e-6), name
    assert torch.equal(more.mask_T[: len(once.mask_T)], once.mask_T)
    if once.weights_T is not None and more.weights_T is not None:
        assert torch.allclose(more.weights_T[: len(once.weights_T)], once.weights_T)


def test_skipped_rows_count_by_their_share_of_the_episode() -> None:
    rows, outputs = loss_rows(2, LOSSES[0])
    actor = dataclasses.replace(ActorConfig(), ratio_skip_threshold=1.05)
    chosen = {name: value for name, value in outputs.items() if name != "values"}
    doubled = twice(rows, [0, 3])
    inputs = {name: value[[0, 1, 2, 3, 4, 5, 0, 3]] for name, value in chosen.items()}
    expected = answer(PolicyObjective(actor), rows, chosen, actor, 9)[2]["skip_ratio"]
    leaves = {name: value.detach().requires_grad_() for name, value in inputs.items()}
    assert 0 < expected < 1
    assert answer(PolicyObjective(actor), doubled, leaves, actor, 3)[2]["skip_ratio"] == pytest.approx(expected)
