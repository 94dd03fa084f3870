"""Reward shaping: hand values, naive loops, edge cases, invariances, and a table that turns every knob."""

from __future__ import annotations

import json
import math
import statistics
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.algorithms.builders import evaluated, rollouts, scores
from verl_like.algorithms.experience import make_experience
from verl_like.algorithms.reward_shaping import (
    RunningMoments,
    ShapedRewards,
    clip,
    pf_ppo_rows,
    pf_ppo_weights,
    row_groups,
    shape_rewards,
    shape_token_rewards,
)
from verl_like.batch import Rollouts, Scores
from verl_like.config import (
    ActorConfig,
    AgentRewardNormConfig,
    AlgorithmConfig,
    LengthRewardConfig,
    OverlongBufferConfig,
    PFPPOConfig,
    RewardModelConfig,
    RewardNormConfig,
    RewardScalingConfig,
)

PLAIN, NO_TERMS = AlgorithmConfig(adv_estimator="reinforce"), RewardModelConfig()
VALUES = [1.0, 0.0, 0.5, 2.0, 2.0, -1.0]
GROUPS = [0, 0, 1, 1, 1, 2]
LENGTHS = (3, 5, 8, 1, 6, 2)
BUDGET = 8


def shape(
    algorithm: AlgorithmConfig = PLAIN,
    reward_model: RewardModelConfig = NO_TERMS,
    *,
    values: list[float] = VALUES,
    groups: list[int] = GROUPS,
    lengths: tuple[int, ...] = LENGTHS,
    moments: RunningMoments | None = None,
    batch: Rollouts | None = None,
    graded: Scores | None = None,
) -> ShapedRewards:
    return shape_rewards(
        algorithm,
        reward_model,
        batch or rollouts(lengths, groups),
        graded or scores(values),
        moments or RunningMoments(),
        BUDGET,
    )


def norm(**scopes: Any) -> AlgorithmConfig:
    return AlgorithmConfig(adv_estimator="reinforce", reward_norm=RewardNormConfig(**scopes))


def naive_norm(values: list[float], groups: list[int], mean: str | None, std: str | None) -> list[float]:
    """reward_norm over batch and group, one row at a time."""

    def mates(scope: str, group: int) -> list[float]:
        return values if scope == "batch" else [v for v, g in zip(values, groups, strict=True) if g == group]

    result = []
    for value, group in zip(values, groups, strict=True):
        centred = value - (statistics.fmean(mates(mean, group)) if mean else 0.0)
        spread = statistics.stdev(mates(std, group)) if std and len(mates(std, group)) > 1 else 0.0
        result.append(centred / (spread + 1e-6) if std and spread > 0 else centred)
    return result


# ---- off


def test_nothing_is_changed_by_default() -> None:
    shaped = shape()
    assert shaped.reward_B.tolist() == VALUES and shaped.metrics == {} and shaped.moments == RunningMoments()


# ---- length reward and overlong buffer


def test_length_reward_by_hand() -> None:
    model = RewardModelConfig(length_reward=LengthRewardConfig(enable=True, coef=-0.4))
    expected = [value - 0.4 * length / BUDGET for value, length in zip(VALUES, LENGTHS, strict=True)]
    assert shape(reward_model=model).reward_B.tolist() == pytest.approx(expected)


def overlong(**options: Any) -> RewardModelConfig:
    return RewardModelConfig(overlong_buffer=OverlongBufferConfig(enable=True, len=4, penalty_factor=0.8, **options))


def with_reasons(reasons: list[str]) -> Rollouts:
    return rollouts(LENGTHS, GROUPS).replace(finish_reasons=reasons)


CUT = ["stop", "stop", "length", "stop", "stop", "stop"]


@pytest.mark.parametrize(("truncated", "of_the_cut_row"), [("penalise", 0.5 - 0.8), ("keep", 0.5), ("zero", 0.0)])
def test_overlong_buffer_by_hand(truncated: str, of_the_cut_row: float) -> None:
    """Budget 8, buffer 4: lengths 5, 8 and 6 lose 1/4, 4/4 and 2/4 of 0.8; the cut-off row is the knob's business."""
    shaped = shape(reward_model=overlong(truncated=truncated, log=True), batch=with_reasons(CUT))
    assert shaped.reward_B.tolist() == pytest.approx([1.0, -0.2, of_the_cut_row, 2.0, 2.0 - 0.4, -1.0])
    punished = [0.2, 0.8, 0.4] if truncated == "penalise" else [0.2, 0.4]
    assert shaped.metrics["reward/overlong_reward/mean"] == pytest.approx(-sum(punished) / 6)
    assert shaped.metrics["reward/overlong/mean"] == pytest.approx(len(punished) / 6)
    assert shape(reward_model=overlong(truncated=truncated), batch=with_reasons(CUT)).metrics == {}


def test_a_response_that_ends_at_the_limit_is_not_cut_off() -> None:
    ended = shape(reward_model=overlong(truncated="zero"), batch=with_reasons(["stop"] * 6))
    assert ended.reward_B[2].item() == pytest.approx(0.5 - 0.8)


def test_an_episode_of_several_rows_loses_no_more_than_the_factor() -> None:
    """Equation 13 ends at -1, and an episode's rows together may be longer than a response may be: 12 of 8 here."""
    batch = rollouts((6, 6, 3), [0, 0, 1]).replace(episode_B=torch.tensor([0, 0, 1]))
    shaped = shape(reward_model=overlong(), batch=batch, values=[1.0, 1.0, 1.0], groups=[0, 0, 1])
    assert shaped.reward_B.tolist() == pytest.approx([0.2, 0.2, 1.0])


def test_overlong_buffer_spares_rows_without_the_key() -> None:
    """Colossal-RL punishes only rows in which an answer was found."""
    found = [True, False, 1, True, 0, False]
    graded = scores(VALUES).replace(extras=[{"found": value} for value in found])
    shaped = shape(reward_model=overlong(only_key="found"), graded=graded)
    assert shaped.reward_B.tolist() == pytest.approx([1.0, 0.0, 0.5 - 0.8, 2.0, 2.0, -1.0])
    assert shape(reward_model=overlong(only_key="answer"), graded=graded).reward_B.isnan().all()
    lost = shape(reward_model=overlong(only_key="found"), graded=graded.replace(extras=[{}, *graded.extras[1:]]))
    assert lost.reward_B.tolist()[1:] == shaped.reward_B.tolist()[1:] and lost.reward_B[0].isnan()


@settings(max_examples=40, deadline=None)
@given(lengths=st.lists(st.integers(1, BUDGET), min_size=1, max_size=8), width=st.integers(1, BUDGET))
def test_overlong_punishment_equals_verls_formula(lengths: list[int], width: int) -> None:
    """verl: min(-(len - (max_resp_len - buffer)) / buffer * factor, 0)."""
    model = RewardModelConfig(overlong_buffer=OverlongBufferConfig(enable=True, len=width, penalty_factor=0.7))
    rows = len(lengths)
    shaped = shape(reward_model=model, values=[1.0] * rows, groups=[0] * rows, lengths=tuple(lengths))
    expected = [1.0 + min(-(length - (BUDGET - width)) / width * 0.7, 0.0) for length in lengths]
    assert shaped.reward_B.tolist() == pytest.approx(expected)


# ---- reward_norm


def test_group_norm_by_hand() -> None:
    shaped = shape(norm(kind="group"))
    std = math.sqrt(0.5)
    assert shaped.reward_B[:2].tolist() == pytest.approx([0.5 / std, -0.5 / std], rel=1e-4)
    assert shaped.reward_B[5].item() == 0.0  # a group of one is its own mean


@settings(max_examples=80, deadline=None)
@given(
    rows=st.lists(st.tuples(st.sampled_from([-1.5, 0.0, 0.25, 1.0, 3.0]), st.integers(0, 3)), min_size=1, max_size=10),
    mean=st.sampled_from([None, "batch", "group"]),
    std=st.sampled_from([None, "batch", "group"]),
)
def test_norm_equals_a_naive_loop(rows: list[tuple[float, int]], mean: str | None, std: str | None) -> None:
    values, groups = [v for v, _ in rows], [g for _, g in rows]
    shaped = shape(norm(mean=mean, std=std), values=values, groups=groups, lengths=(2,) * len(rows))
    assert shaped.reward_B.tolist() == pytest.approx(naive_norm(values, groups, mean, std), rel=1e-5, abs=1e-6)


@pytest.mark.parametrize(
    ("short", "long"),
    [
        ({"kind": "batch"}, {"mean": "batch", "std": "batch"}),
        ({"kind": "group", "shift": True}, {"mean": "group"}),
        ({"kind": "batch", "scale": True}, {"std": "batch"}),
        ({"kind": "running", "shift": True, "scale": True}, {"mean": "running"}),
    ],
)
def test_short_forms(short: dict[str, Any], long: dict[str, Any]) -> None:
    assert torch.equal(shape(norm(**short)).reward_B, shape(norm(**long)).reward_B)


@pytest.mark.parametrize(("center", "mean"), [(False, None), (True, "running")])
def test_reward_scaling_is_a_short_form_too(center: bool, mean: str | None) -> None:
    scaling = AlgorithmConfig(adv_estimator="reinforce", reward_scaling=RewardScalingConfig(enable=True, center=center))
    moments = RunningMoments().update(torch.tensor([5.0, 7.0, -2.0]))
    expected = shape(norm(mean=mean, std="running"), moments=moments)
    assert torch.equal(shape(scaling, moments=moments).reward_B, expected.reward_B)
    alone = AlgorithmConfig(adv_estimator="reinforce", reward_scaling=RewardScalingConfig(center=True))
    assert shape(alone).reward_B.tolist() == VALUES  # centring belongs to scaling: the doctor says so


@pytest.mark.parametrize("scope", ["batch", "group", "running"])
def test_rewards_without_spread_do_not_explode(scope: str) -> None:
    shaped = shape(norm(std=scope), values=[3.0] * 6)
    assert shaped.reward_B.tolist() == [3.0] * 6
    assert shape(norm(kind=scope), values=[3.0] * 6).reward_B.abs().max() == 0.0


def test_running_moments_take_the_batch_in_before_they_are_used() -> None:
    """Two steps: the second is normalised by the mean and deviation of both batches' values."""
    first = shape(norm(kind="running"))
    second_values = [4.0, 4.0, 0.0, 1.0, 0.0, 1.0]
    second = shape(norm(kind="running"), values=second_values, moments=first.moments)
    seen = VALUES + second_values
    mean, std = statistics.fmean(seen), statistics.stdev(seen)
    expected = [(value - mean) / (std + 1e-6) for value in second_values]
    assert second.reward_B.tolist() == pytest.approx(expected, rel=1e-6)
    assert second.moments.count == 12
    assert second.metrics["critic/running_reward/mean"] == pytest.approx(mean)
    assert second.metrics["critic/running_reward/std"] == pytest.approx(std)


@settings(max_examples=40, deadline=None)
@given(parts=st.lists(st.lists(st.floats(-100, 100, width=32), max_size=6), min_size=1, max_size=5))
def test_moments_of_parts_are_the_moments_of_the_whole(parts: list[list[float]]) -> None:
    moments, seen = RunningMoments(), [value for part in parts for value in part]
    for part in parts:
        moments = moments.update(torch.tensor(part))
    assert moments.count == len(seen)
    if seen:
        assert moments.mean == pytest.approx(statistics.fmean(seen), rel=1e-9, abs=1e-9)
        assert moments.std == pytest.approx(statistics.stdev(seen) if len(seen) > 1 else 0.0, rel=1e-7, abs=1e-6)


def test_moments_survive_a_checkpoint_bit_by_bit() -> None:
    moments = RunningMoments().update(torch.tensor([0.1, 0.7, 1 / 3])).update(torch.tensor([1e-9, 12.3]))
    restored = RunningMoments.from_state_dict(json.loads(json.dumps(moments.state_dict())))
    assert restored == moments
    assert restored.update(torch.tensor([0.2])) == moments.update(torch.tensor([0.2]))


def test_only_rows_that_are_trained_on_count() -> None:
    """A failed row and one in which nothing was sampled are in no statistic, and have no reward."""
    lengths = (*LENGTHS, 3, 0)
    batch = rollouts(lengths, [*GROUPS, 0, 1])
    graded = scores([*VALUES, 50.0, 70.0], failed=(6,))
    for algorithm in (norm(kind="batch"), norm(kind="group"), norm(kind="running")):
        shaped, without = shape(algorithm, batch=batch, graded=graded), shape(algorithm)
        assert torch.equal(shaped.reward_B[:6], without.reward_B)
        assert shaped.reward_B[6:].isnan().all() and shaped.moments == without.moments


def test_a_batch_without_a_row_to_train_on_stays_quiet_until_make_experience() -> None:
    graded = scores([0.0, 0.0], failed=(0, 1))
    shaped = shape(norm(kind="running"), batch=rollouts((2, 2), [0, 0]), graded=graded)
    assert shaped.reward_B.isnan().all() and shaped.moments == RunningMoments()


# ---- agentic grouping


def agent(**options: Any) -> AlgorithmConfig:
    return AlgorithmConfig(adv_estimator="reinforce", agent_reward_norm=AgentRewardNormConfig(**options))


def agent_batch() -> Rollouts:
    """Groups 0, 1, 2; two kinds of task; a column of levels."""
    batch = rollouts(LENGTHS, GROUPS)
    sources, levels = ["a", "a", "b", "b", "b", "a"], [1, 2, 1, 2, 1, 2]
    rows = [
        row.__class__(index=row.index, data_source=source, messages=[], extra_info={"level": level})
        for row, source, level in zip(batch.rows, sources, levels, strict=True)
    ]
    return batch.replace(rows=rows)


@pytest.mark.parametrize(
    ("grouping", "groups"),
    [
        ("state", GROUPS),
        ("inductive", [0, 0, 1, 1, 1, 0]),
        ("batch", [0] * 6),
        ("level", [0, 1, 0, 1, 0, 1]),
        ("data_source", [0, 0, 1, 1, 1, 0]),
        ("index", GROUPS),
    ],
)
@pytest.mark.parametrize("method", ["mean", "mean_std", "asym_clip"])
def test_agentic_grouping_equals_a_naive_loop(grouping: str, groups: list[int], method: str) -> None:
    shaped = shape(agent(grouping=grouping, method=method, clip=[-0.5, 0.75]), batch=agent_batch())
    for i, value in enumerate(VALUES):
        mates = [v for v, g in zip(VALUES, groups, strict=True) if g == groups[i]]
        expected = value - statistics.fmean(mates)
        if method != "mean":
            std = statistics.stdev(mates) if len(mates) > 1 else 0.0
            expected = expected / (std + 1e-6) if std > 1e-6 else 0.0
        if method == "asym_clip":
            expected = min(max(expected, -0.5), 0.75)
        assert shaped.reward_B[i].item() == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_identity_leaves_rewards_alone_and_unknown_columns_are_named() -> None:
    assert shape(agent(grouping="nowhere"), batch=agent_batch()).reward_B.tolist() == VALUES
    with pytest.raises(ValueError, match=r"grouping=nowhere: dataset row 0 .*\['level'\]"):
        row_groups(agent_batch(), "nowhere")


# ---- clips and whitening


def test_reward_clip_and_its_fraction() -> None:
    shaped = shape(AlgorithmConfig(reward_clip=1.0))
    assert shaped.reward_B.tolist() == [1.0, 0.0, 0.5, 1.0, 1.0, -1.0]
    assert shaped.metrics == {"critic/reward_clip_frac": pytest.approx(2 / 6)}  # +-1 themselves are not outside
    assert shape(AlgorithmConfig(reward_clip=0.0)).reward_B.tolist() == VALUES  # 0 is off


def test_rewards_are_normalised_then_clipped() -> None:
    both = AlgorithmConfig(reward_norm=RewardNormConfig(kind="batch"), reward_clip=0.5)
    whole = naive_norm(VALUES, GROUPS, "batch", "batch")
    assert shape(both).reward_B.tolist() == pytest.approx([min(max(value, -0.5), 0.5) for value in whole])


def test_token_rewards_are_clipped_then_whitened_over_sampled_tokens() -> None:
    mask = torch.tensor([[True, True, False], [True, False, False]])
    rewards = torch.tensor([[0.0, 3.0, 0.0], [-5.0, 0.0, 0.0]])
    clipped, metrics = shape_token_rewards(AlgorithmConfig(token_reward_clip=2.0), rewards, mask)
    assert clipped.tolist() == [[0.0, 2.0, 0.0], [-2.0, 0.0, 0.0]]
    assert metrics == {"critic/token_reward_clip_frac": pytest.approx(2 / 3)}
    both, _ = shape_token_rewards(AlgorithmConfig(token_reward_clip=2.0, whiten_rewards=True), rewards, mask)
    values = [0.0, 2.0, -2.0]
    expected = [(v - 0.0) / statistics.stdev(values) for v in values]
    assert both[mask].tolist() == pytest.approx(expected, rel=1e-5) and (both[~mask] == 0).all()


def test_clip_of_nothing() -> None:
    empty = torch.zeros(2, 0)
    assert clip(empty, 1.0, "m", empty.bool())[1] == {"m": 0.0}


# ---- PF-PPO


def test_pf_ppo_weights_by_hand() -> None:
    score = torch.tensor([0.0, -2.0, 1.0, 3.0])
    assert pf_ppo_weights(score, PFPPOConfig(weight_pow=2)).tolist() == pytest.approx([1e-8, 4, 1, 9])
    assert pf_ppo_weights(score, PFPPOConfig(weight_pow=0.5)).tolist() == pytest.approx([1e-8, 2**0.5, 1, 3**0.5])
    assert pf_ppo_weights(score, PFPPOConfig(reweight_method="max_min")).tolist() == pytest.approx([1e-8, 1, 1e-8, 1])
    random = pf_ppo_weights(score, PFPPOConfig(reweight_method="max_random")).tolist()
    assert random == pytest.approx([0.1, 0.1, 0.1, 0.4])


def test_pf_ppo_draws_in_proportion_and_by_seed() -> None:
    score = torch.tensor([1.0, 2.0] * 5000)
    rows, metrics = pf_ppo_rows(score, PFPPOConfig(weight_pow=2), seed=3)
    assert (score[rows] == 2).double().mean().item() == pytest.approx(0.8, abs=0.02)
    assert metrics["training/pf_ppo_distinct_rows"] == len(set(rows.tolist())) / 10000
    assert torch.equal(rows, pf_ppo_rows(score, PFPPOConfig(weight_pow=2), seed=3)[0])
    assert not torch.equal(rows, pf_ppo_rows(score, PFPPOConfig(weight_pow=2), seed=4)[0])
    assert len(pf_ppo_rows(torch.zeros(64), PFPPOConfig(), seed=0)[0].unique()) > 20  # all scores 0: any row


def test_pf_ppo_moves_whole_rows() -> None:
    """Tokens, log-probs, values and advantages of a row stay together, whatever was drawn."""
    batch = rollouts((1, 2, 3, 4), [0, 1, 2, 3])
    batch = batch.replace(response_ids_BR=batch.response_ids_BR * torch.arange(10, 50, 10, dtype=torch.int32)[:, None])
    algorithm = AlgorithmConfig(adv_estimator="reinforce", use_pf_ppo=True)
    experience, metrics = make_experience(
        algorithm, ActorConfig(), batch, scores([1.0, 2.0, 3.0, 4.0]), evaluated(batch, values=True), 0.0, seed=5
    )
    assert len(experience) == 4 and metrics["training/pf_ppo_distinct_rows"] < 1
    for row in range(4):
        number = experience.response_length_B[row].item()
        assert experience.group_B[row] == number - 1
        assert experience.response_ids_BR[row, 0] == 10 * number
        assert experience.advantages_BR[row, 0].item() == number
        assert experience.response_mask_BR[row].sum() == number
        assert experience.values_BR is not None and experience.values_BR[row].sum().item() == pytest.approx(number / 4)


def test_pf_ppo_draws_by_scores_whatever_their_shaping_is() -> None:
    batch = rollouts((1, 2, 3, 4), [0, 1, 2, 3])
    experience, _ = make_experience(
        AlgorithmConfig(adv_estimator="reinforce", use_pf_ppo=True, pf_ppo=PFPPOConfig(reweight_method="max_min")),
        ActorConfig(),
        batch,
        scores([1.0, 2.0, 3.0, 4.0]),
        evaluated(batch),
        0.0,
        reward_B=torch.tensor([1.0, 4.0, 0.0, 2.0]),
    )
    assert set(experience.group_B.tolist()) <= {0, 3}  # the worst and the best score


# ---- invariances


ALL_KINDS = [
    norm(kind="batch"),
    norm(mean="group", std="batch"),
    norm(mean="batch", std="group"),
    norm(kind="running"),
    agent(method="asym_clip"),
    agent(method="mean_std", grouping="inductive"),
    AlgorithmConfig(adv_estimator="reinforce", reward_clip=0.7),
]


@pytest.mark.parametrize("algorithm", ALL_KINDS)
@settings(max_examples=15, deadline=None)
@given(order=st.permutations(range(6)), shift=st.integers(-3, 1000))
def test_row_order_and_group_labels_do_not_matter(algorithm: AlgorithmConfig, order: list[int], shift: int) -> None:
    model = overlong(truncated="zero")
    plain = shape(algorithm, model, batch=with_reasons(CUT))
    moved = shape(
        algorithm,
        model,
        values=[VALUES[i] for i in order],
        batch=rollouts(tuple(LENGTHS[i] for i in order), [shift - 7 * GROUPS[i] for i in order]).replace(
            finish_reasons=[CUT[i] for i in order]
        ),
    )
    assert torch.allclose(moved.reward_B, plain.reward_B[list(order)], atol=1e-6)
    assert moved.moments.mean == pytest.approx(plain.moments.mean, abs=1e-12)


# ---- every knob changes its number, and only that


def outcome(algorithm: AlgorithmConfig, model: RewardModelConfig = NO_TERMS) -> dict[str, Any]:
    """What each stage gave for one fixed batch: the numbers that the table below looks at."""
    batch, graded = agent_batch().replace(finish_reasons=CUT), scores(VALUES)
    shaped = shape_rewards(algorithm, model, batch, graded, RunningMoments(), BUDGET)
    experience, metrics = make_experience(
        algorithm, ActorConfig(), batch, graded, evaluated(batch, ref=True), 0.1, reward_B=shaped.reward_B, seed=1
    )
    metrics |= shaped.metrics
    return {
        "score": metrics["critic/score/mean"],
        "response rewards": shaped.reward_B.tolist(),
        "token rewards": (metrics["critic/rewards/mean"], metrics["critic/rewards/max"]),
        "advantages": experience.advantages_BR.tolist(),
        "rows": experience.group_B.tolist(),
        "moments": shaped.moments,
        "metric names": sorted(metrics),
    }


REWARD, ADVANTAGE = {"response rewards", "token rewards", "advantages"}, {"advantages"}
CLIPPED = {"metric names"}  # a fraction is reported
KNOBS: list[tuple[str, dict[str, Any], dict[str, Any], set[str]]] = [
    ("reward_norm.mean", {"reward_norm": RewardNormConfig(mean="batch")}, {}, REWARD),
    ("reward_norm.std", {"reward_norm": RewardNormConfig(std="group")}, {}, REWARD),
    ("reward_norm.kind", {"reward_norm": RewardNormConfig(kind="running")}, {}, REWARD | {"moments", "metric names"}),
    ("reward_scaling", {"reward_scaling": RewardScalingConfig(enable=True)}, {}, REWARD | {"moments", "metric names"}),
    ("agent_reward_norm", {"agent_reward_norm": AgentRewardNormConfig(method="mean")}, {}, REWARD),
    ("reward_clip", {"reward_clip": 0.75}, {}, REWARD | CLIPPED),
    ("token_reward_clip", {"token_reward_clip": 0.75}, {}, {"token rewards", "advantages"} | CLIPPED),
    ("whiten_rewards", {"whiten_rewards": True}, {}, {"token rewards", "advantages"}),
    ("whiten_advantages", {"whiten_advantages": True}, {}, ADVANTAGE | {"metric names"}),
    ("advantage_clip", {"advantage_clip": 0.75}, {}, ADVANTAGE | CLIPPED),
    ("use_pf_ppo", {"use_pf_ppo": True}, {}, {"advantages", "rows", "metric names"}),
    ("length_reward", {}, {"length_reward": LengthRewardConfig(enable=True, coef=0.5)}, REWARD),
    ("overlong", {}, {"overlong_buffer": OverlongBufferConfig(enable=True, len=4, penalty_factor=0.8)}, REWARD),
]
SECONDARY: list[tuple[str, dict[str, Any], dict[str, Any], set[str]]] = [
    ("reward_norm.shift", {"reward_norm": [RewardNormConfig(kind="batch"), RewardNormConfig(kind="batch", shift=True)]},
     {}, REWARD),
    ("reward_norm.scale", {"reward_norm": [RewardNormConfig(kind="batch"), RewardNormConfig(kind="batch", scale=True)]},
     {}, REWARD),
    ("reward_scaling.center", {"reward_scaling": [RewardScalingConfig(enable=True),
                                                  RewardScalingConfig(enable=True, center=True)]}, {}, REWARD),
    ("agent.grouping", {"agent_reward_norm": [AgentRewardNormConfig(method="mean"),
                                              AgentRewardNormConfig(method="mean", grouping="batch")]}, {}, REWARD),
    ("agent.clip", {"agent_reward_norm": [AgentRewardNormConfig(method="asym_clip"),
                                          AgentRewardNormConfig(method="asym_clip", clip=[-0.1, 0.1])]}, {}, REWARD),
    ("pf_ppo.reweight_method", {"use_pf_ppo": [True, True], "pf_ppo": [PFPPOConfig(), PFPPOConfig(
        reweight_method="max_random")]}, {}, {"advantages", "rows", "metric names"}),
    ("pf_ppo.weight_pow", {"use_pf_ppo": [True, True], "pf_ppo": [PFPPOConfig(), PFPPOConfig(weight_pow=0)]}, {},
     {"advantages", "rows", "metric names"}),
    ("overlong.len", {}, {"overlong_buffer": [OverlongBufferConfig(enable=True, len=4, penalty_factor=1),
                                              OverlongBufferConfig(enable=True, len=2, penalty_factor=1)]}, REWARD),
    ("overlong.truncated", {}, {"overlong_buffer": [
        OverlongBufferConfig(enable=True, len=4, penalty_factor=1),
        OverlongBufferConfig(enable=True, len=4, penalty_factor=1, truncated="keep")]}, REWARD),
    ("overlong.log", {}, {"overlong_buffer": [
        OverlongBufferConfig(enable=True, len=4, penalty_factor=1),
        OverlongBufferConfig(enable=True, len=4, penalty_factor=1, log=True)]}, {"metric names"}),
]  # fmt: skip


def changed(before: dict[str, Any], after: dict[str, Any]) -> set[str]:
    return {name for name in before if before[name] != after[name]}


@pytest.mark.parametrize(("knob", "algorithm", "model", "numbers"), KNOBS, ids=[row[0] for row in KNOBS])
def test_a_knob_changes_its_number_and_nothing_else(
    knob: str, algorithm: dict[str, Any], model: dict[str, Any], numbers: set[str]
) -> None:
    before = outcome(PLAIN)
    after = outcome(AlgorithmConfig(adv_estimator="reinforce", **algorithm), RewardModelConfig(**model))
    assert changed(before, after) == numbers, knob


@pytest.mark.parametrize(("knob", "algorithm", "model", "numbers"), SECONDARY, ids=[row[0] for row in SECONDARY])
def test_a_dependent_knob_changes_its_number_and_nothing_else(
    knob: str, algorithm: dict[str, Any], model: dict[str, Any], numbers: set[str]
) -> None:
    sides = [
        outcome(
            AlgorithmConfig(adv_estimator="reinforce", **{name: pair[side] for name, pair in algorithm.items()}),
            RewardModelConfig(**{name: pair[side] for name, pair in model.items()}),
        )
        for side in (0, 1)
    ]
    difference = changed(*sides)
    assert difference and difference <= numbers, knob
    assert numbers & {"advantages"} <= difference


# ---- metrics


def test_metrics_show_before_and_after() -> None:
    algorithm = AlgorithmConfig(adv_estimator="grpo", reward_clip=1.0, advantage_clip=0.1)
    batch = rollouts(LENGTHS, GROUPS)
    shaped = shape(algorithm)
    _, metrics = make_experience(
        algorithm, ActorConfig(), batch, scores(VALUES), evaluated(batch), 0.0, reward_B=shaped.reward_B
    )
    assert metrics["critic/score/max"] == 2.0 and metrics["critic/rewards/max"] == 1.0
    assert metrics["critic/advantages/max"] == pytest.approx(0.1)
    assert metrics["critic/raw_advantages/max"] > 0.5
    assert 0 < metrics["critic/advantage_clip_frac"] < 1
