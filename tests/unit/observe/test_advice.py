"""Advice: each rule speaks in its own situation, the costliest cause wins, and silence where nothing is to gain."""

import pytest

from verl_like.config.batch_plan import BatchPlan
from verl_like.kit.speed.advice import Settings, advise
from verl_like.kit.speed.report import settings_of
from verl_like.trainer.compose import compose

GOOD = Settings(
    token_budget=1000,
    balance_batch=True,
    old_log_probs="detach",
    optimizer_steps_per_rollout=1,
    gradient_checkpointing=False,
    async_reward=True,
    groups_cost=False,
    num_ranks=2,
)
SECONDS = {"step": 10.0, "gen": 4.0, "update_actor": 4.0, "reward": 1.0, "old_log_prob": 1.0}


def settings(**changes):
    return Settings(**({name: getattr(GOOD, name) for name in GOOD.__slots__} | changes))


def test_nothing_to_say():
    assert advise(SECONDS, {}, GOOD) is None


@pytest.mark.parametrize(
    "changes, metrics, words",
    [
        ({}, {"perf/micro_batch_fill": 0.62, "perf/micro_batches": 4}, "leaves 38% of each micro-batch empty"),
        ({}, {"global_seqlen/mean": 100, "global_seqlen/balanced_max": 150}, "50% more tokens"),
        (
            {"balance_batch": False},
            {"global_seqlen/mean": 100, "global_seqlen/balanced_max": 150},
            "balance_batch=True",
        ),
        ({}, {"response_length/mean": 100, "response_length/max": 800}, "8.0 times the mean"),
        ({"groups_cost": True}, {"critic/group_zero_std_fraction": 0.4}, "40% of the groups"),
        ({"async_reward": False}, {}, "launch_reward_fn_async"),
        ({"old_log_probs": "recompute"}, {}, "old_log_probs=auto"),
        ({"gradient_checkpointing": True}, {"perf/memory_used_fraction": 0.2}, "enable_gradient_checkpointing=False"),
    ],
)
def test_each_cause_has_its_sentence(changes, metrics, words):
    sentence = advise(SECONDS, metrics, settings(**changes))
    assert sentence is not None and words in sentence


@pytest.mark.parametrize(
    "changes, metrics",
    [
        ({}, {"perf/micro_batch_fill": 0.62, "perf/micro_batches": 1}),  # one micro-batch: nothing to merge
        ({}, {"perf/micro_batch_fill": 0.84, "perf/micro_batches": 3}),  # 2.5 budgets of tokens need three
        ({"num_ranks": 1}, {"global_seqlen/mean": 100, "global_seqlen/balanced_max": 150}),
        ({"old_log_probs": "recompute", "optimizer_steps_per_rollout": 2}, {}),
        ({"gradient_checkpointing": True}, {"perf/memory_used_fraction": 0.9}),
    ],
)
def test_no_cause_no_sentence(changes, metrics):
    assert advise(SECONDS, metrics, settings(**changes)) is None


def test_the_costliest_cause_wins():
    metrics = {"critic/group_zero_std_fraction": 0.9, "perf/micro_batch_fill": 0.62, "perf/micro_batches": 4}
    assert "90% of the groups" in advise(SECONDS, metrics, settings(groups_cost=True))


def test_housekeeping_is_named_by_its_key():
    often = settings(save_freq=2, test_freq=2)
    assert "takes 20% of the time: raise trainer.save_freq from 2" in advise(
        {**SECONDS, "step": 15.0, "save_checkpoint": 5.0}, {}, often
    )
    assert "trainer.test_freq" in advise({**SECONDS, "step": 15.0, "testing": 5.0}, {}, often)
    assert "weight sync takes 30%" in advise({**SECONDS, "update_weights": 3.0}, {}, GOOD)


@pytest.mark.parametrize("changes", [{}, {"test_freq": -1}, {"test_freq": 25}])
def test_a_validation_of_now_and_then_is_no_cause(changes):
    """At the end of a run, or every 25 steps, it costs what it is spread over."""
    assert advise({**SECONDS, "step": 15.0, "testing": 5.0}, {}, settings(**changes)) is None


def test_no_advice_against_what_the_run_needs_or_does_not_train_on() -> None:
    distilled = ["distillation.enabled=True", "distillation.teacher_model.model_path=T"]
    alone = "distillation.distillation_loss.use_task_rewards=False"
    lines = {
        (): ("auto", True),
        ("actor_rollout_ref.actor.old_log_probs=recompute",): ("recompute", True),
        ("trainer.mode=colocate_async",): ("auto", True),  # where the plan says recompute: no choice of the user's
        ("actor_rollout_ref.actor.old_log_probs=recompute", "algorithm.use_kl_in_reward=True"): ("auto", True),
        tuple(distilled): ("auto", True),
        (*distilled, alone): ("auto", False),
    }
    for keys, expected in lines.items():
        config = compose(["preset=lite_ppo", *keys])
        found = settings_of(config, BatchPlan.build(config, world_size=1))
        assert (found.old_log_probs, found.groups_cost) == expected, keys
