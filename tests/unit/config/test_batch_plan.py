"""BatchPlan: hand-computed sizes on one rank and many, and the message of each size that does not fit."""

import dataclasses
from typing import Any

import pytest

from verl_like.config import (
    ActorConfig,
    ActorRolloutRefConfig,
    AlgorithmConfig,
    CriticConfig,
    DataConfig,
    FSDPConfig,
    PolicyLossConfig,
    PPOConfig,
    RefConfig,
    RewardModelConfig,
    RolloutConfig,
    TrainerConfig,
)
from verl_like.config.batch_plan import BatchPlan, MicroBatchRule
from verl_like.config.errors import ConfigError


def config(*, batch=64, mini=16, n=8, actor=None, rollout=None, ref=None, critic=None, algorithm=None, trainer=None):
    return PPOConfig(
        data=DataConfig(train_batch_size=batch),
        actor_rollout_ref=ActorRolloutRefConfig(
            actor=ActorConfig(ppo_mini_batch_size=mini, **(actor or {})),
            rollout=RolloutConfig(n=n, **(rollout or {})),
            ref=RefConfig(**(ref or {})),
        ),
        critic=CriticConfig(**(critic or {})),
        algorithm=AlgorithmConfig(**({"adv_estimator": "grpo"} | (algorithm or {}))),
        trainer=TrainerConfig(**(trainer or {})),
    )


def test_one_rank_by_hand():
    plan = BatchPlan.build(config(actor={"ppo_epochs": 2}), world_size=1, num_train_prompts=7473)
    actor = plan.roles["actor"]
    assert plan.sequences_per_step == 512
    assert plan.sequences_per_rank == 512
    assert (actor.mini_batches, actor.mini_batch_prompts, actor.mini_batch_sequences) == (4, 16, 128)
    assert actor.updates_per_step == 8
    assert (plan.steps_per_epoch, plan.total_training_steps) == (116, 3480)  # 7473 // 64, 30 epochs
    assert plan.optimizer_steps("actor") == 3480 * 8
    assert plan.old_log_probs == "recompute"
    assert "critic" not in plan.roles


@pytest.mark.parametrize(
    ("actor", "algorithm", "outputs"),
    [
        ({}, {}, set()),
        ({"use_kl_loss": True}, {}, {"log_probs"}),
        ({"use_kl_loss": True, "kl_loss_type": "full"}, {}, set()),
        ({}, {"use_kl_in_reward": True}, {"log_probs"}),
        ({}, {"use_kl_in_reward": True, "kl_penalty": "full"}, {"full_kl"}),
        ({"use_kl_loss": True}, {"use_kl_in_reward": True, "kl_penalty": "full"}, {"full_kl", "log_probs"}),
    ],
)
def test_passes_of_the_reference(actor, algorithm, outputs):
    plan = BatchPlan.build(config(actor=actor, algorithm=algorithm), world_size=1, num_train_prompts=99)
    assert plan.reference_outputs == outputs
    assert ("ref" in plan.roles) == bool(actor or algorithm)


def test_exact_kl_needs_both_models_on_the_same_slices():
    built = config(
        actor={"ulysses_sequence_parallel_size": 2}, algorithm={"use_kl_in_reward": True, "kl_penalty": "full"}
    )
    with pytest.raises(ConfigError, match="ulysses_sequence_parallel_size for actor and ref, but they are 2 and 1"):
        BatchPlan.build(built, world_size=2, num_train_prompts=99)


def test_many_ranks_by_hand():
    built = config(
        actor={"ulysses_sequence_parallel_size": 2, "ppo_max_token_len_per_gpu": 1000},
        rollout={"tensor_model_parallel_size": 4},
        trainer={"total_training_steps": 10},
    )
    plan = BatchPlan.build(built, world_size=8)
    assert (plan.roles["actor"].data_parallel_size, plan.rollout_replicas, plan.tensor_parallel_size) == (4, 2, 4)
    assert plan.sequences_per_rank == 128
    assert plan.roles["actor"].update == MicroBatchRule(max_tokens=2000)
    assert (plan.steps_per_epoch, plan.total_training_steps, plan.optimizer_steps("actor")) == (None, 10, 40)


def test_rows_shared_by_chunks_and_by_heads():
    """Of 16 processes two times two share rows; the reference follows, a critic has its own."""
    shared = {"fsdp_config": FSDPConfig(context_parallel_size=2)}
    budget = {"ppo_max_token_len_per_gpu": 1000, "ulysses_sequence_parallel_size": 2, "use_kl_loss": True}
    built = config(actor=budget | shared, ref=shared, algorithm={"adv_estimator": "gae"})
    built.critic.model.fsdp_config.context_parallel_size, built.critic.ppo_mini_batch_size = 4, 16
    roles = BatchPlan.build(built, world_size=16, num_train_prompts=99).roles
    assert {name: role.data_parallel_size for name, role in roles.items()} == {"actor": 4, "ref": 8, "critic": 4}
    assert roles["actor"].update == MicroBatchRule(max_tokens=4000)
    with pytest.raises(ConfigError, match=r"context_parallel_size x .*ulysses_sequence_parallel_size=4: must divide"):
        BatchPlan.build(built, world_size=2, num_train_prompts=99)
    kl = {"use_kl_in_reward": True, "kl_penalty": "full"}
    with pytest.raises(ConfigError, match=r"one .*context_parallel_size for actor and ref, but they are 2 and 1"):
        BatchPlan.build(config(actor=shared, algorithm=kl), world_size=2, num_train_prompts=99)


def test_lengths_stay_open_when_nobody_knows_them():
    plan = BatchPlan.build(config(), 1)
    assert (plan.steps_per_epoch, plan.total_training_steps, plan.optimizer_steps("actor")) == (None, None, None)


def test_the_critic_has_its_own_sizes_and_warm_up_takes_actor_steps_away():
    built = config(
        algorithm={"adv_estimator": "gae"},
        critic={"ppo_mini_batch_size": 32, "ppo_epochs": 3},
        trainer={"total_training_steps": 10, "critic_warmup": 4},
    )
    plan = BatchPlan.build(built, 2)
    critic = plan.roles["critic"]
    assert (critic.mini_batches, critic.mini_batch_sequences) == (2, 256)
    assert (critic.updates_per_step, plan.optimizer_steps("critic")) == (6, 60)
    assert plan.optimizer_steps("actor") == (10 - 4) * 4


def test_critic_enable_overrules_the_estimator():
    built = config(critic={"enable": True, "ppo_mini_batch_size": 64})
    assert "critic" in BatchPlan.build(built, 1).roles


@pytest.mark.parametrize(
    ("mini", "choice", "kl_in_reward", "expected"),
    [
        (64, "auto", False, "detach"),
        (64, "auto", True, "recompute"),
        (16, "auto", False, "recompute"),
        (64, "recompute", False, "recompute"),
        (16, "rollout", False, "rollout"),
        (64, "detach", False, "detach"),
    ],
)
def test_old_log_probs(mini, choice, kl_in_reward, expected):
    built = config(mini=mini, actor={"old_log_probs": choice}, algorithm={"use_kl_in_reward": kl_in_reward})
    assert BatchPlan.build(built, 1).old_log_probs == expected


def test_detach_is_refused_where_it_would_be_wrong():
    with pytest.raises(ValueError, match=r"old_log_probs=detach: holds for one update per step, here are 4"):
        BatchPlan.build(config(actor={"old_log_probs": "detach"}), 1)
    built = config(mini=64, actor={"old_log_probs": "detach"}, algorithm={"use_kl_in_reward": True})
    with pytest.raises(ValueError, match=r"use_kl_in_reward=True needs them earlier"):
        BatchPlan.build(built, 1)


@pytest.mark.parametrize("loss", ["clip_cov", "kl_cov"])
def test_losses_that_select_tokens_need_old_log_probs_before_the_update(loss):
    """One update per step would detach: the driver then has nothing to select by."""
    policy_loss = PolicyLossConfig(loss_mode=loss)
    assert BatchPlan.build(config(mini=64, actor={"policy_loss": policy_loss}), 1).old_log_probs == "recompute"
    with pytest.raises(ValueError, match=rf"loss_mode={loss}, which selects tokens by them"):
        BatchPlan.build(config(mini=64, actor={"policy_loss": policy_loss, "old_log_probs": "detach"}), 1)


@pytest.mark.parametrize(("loss", "reward", "needed"), [(0, 0, False), (1, 0, True), (0, 1, True)])
def test_reference_exists_with_a_kl_term(loss, reward, needed):
    built = config(actor={"use_kl_loss": bool(loss)}, algorithm={"use_kl_in_reward": bool(reward)})
    assert ("ref" in BatchPlan.build(built, 1).roles) is needed


BY_COUNT = {"use_dynamic_bsz": False}
LOG_BY_COUNT = {"log_prob_use_dynamic_bsz": False}


def test_micro_sizes_by_count_fall_back_on_the_actors():
    built = config(
        actor=BY_COUNT | {"ppo_micro_batch_size_per_gpu": 4, "use_kl_loss": True},
        rollout=LOG_BY_COUNT,
        ref=LOG_BY_COUNT | {"log_prob_micro_batch_size_per_gpu": 16},
    )
    plan = BatchPlan.build(built, 2)
    assert plan.roles["actor"].update == plan.roles["actor"].forward == MicroBatchRule(max_sequences=4)
    assert plan.roles["ref"].forward == MicroBatchRule(max_sequences=16)


SIZE, DYNAMIC = {"ppo_micro_batch_size_per_gpu": 4}, {"use_dynamic_bsz": True}
SEQUENCES, BUDGET = MicroBatchRule(max_sequences=4), MicroBatchRule(max_tokens=16384)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, {"actor": BUDGET, "log_prob": BUDGET, "ref": BUDGET}),
        ({"actor": SIZE}, {"actor": SEQUENCES, "log_prob": SEQUENCES, "ref": SEQUENCES}),
        ({"actor": {"ppo_micro_batch_size": 8}}, {"actor": SEQUENCES, "log_prob": SEQUENCES}),
        ({"actor": SIZE | DYNAMIC}, {"actor": BUDGET, "log_prob": BUDGET}),
        ({"actor": SIZE | DYNAMIC, "rollout": LOG_BY_COUNT}, {"actor": BUDGET, "log_prob": SEQUENCES}),
        ({"actor": SIZE, "rollout": {"log_prob_use_dynamic_bsz": True}}, {"actor": SEQUENCES, "log_prob": BUDGET}),
        (
            {"rollout": {"log_prob_micro_batch_size_per_gpu": 4}, "ref": {"log_prob_micro_batch_size": 8}},
            {"actor": BUDGET, "log_prob": SEQUENCES, "ref": SEQUENCES},
        ),
        ({"critic": SIZE}, {"actor": BUDGET, "critic": SEQUENCES, "critic_forward": SEQUENCES}),
        ({"critic": {"forward_micro_batch_size_per_gpu": 4}}, {"critic_forward": SEQUENCES}),
    ],
)  # fmt: skip
def test_a_size_that_is_given_wins_over_the_default_of_cutting_by_tokens(settings, expected):
    """...and use_dynamic_bsz, where it is given, over sizes; passes without a size of their own take the update's."""
    actor = {"use_kl_loss": True} | settings.get("actor", {})
    settings = settings | {"actor": actor, "critic": {"ppo_mini_batch_size": 16} | settings.get("critic", {})}
    plan = BatchPlan.build(config(algorithm={"adv_estimator": "gae"}, **settings), 2)
    actor, ref, critic = (plan.roles[name] for name in ("actor", "ref", "critic"))
    rules = {"actor": actor.update, "log_prob": actor.forward, "ref": ref.forward,
             "critic": critic.update, "critic_forward": critic.forward}  # fmt: skip
    assert {name: rules[name] for name in expected} == expected


@pytest.mark.parametrize("role", ["rollout", "ref"])
def test_log_probs_by_count_need_a_size(role):
    settings: dict[str, Any] = {role: LOG_BY_COUNT, "actor": {"use_kl_loss": True}}
    with pytest.raises(ValueError, match=rf"{role}.log_prob_use_dynamic_bsz=False without a micro-batch size: set "):
        BatchPlan.build(config(**settings), 2)


def test_a_reward_model_with_a_size_counts_sequences():
    built = config()
    built.reward_model = RewardModelConfig(enable=True, micro_batch_size_per_gpu=4)
    assert BatchPlan.build(built, 2).roles["reward"].forward == SEQUENCES


def test_deprecated_global_micro_sizes_are_divided_by_the_data_parallel_size():
    built = config(
        algorithm={"adv_estimator": "gae"},
        actor=BY_COUNT | {"ppo_micro_batch_size": 64, "ulysses_sequence_parallel_size": 2, "use_kl_loss": True},
        rollout=LOG_BY_COUNT | {"log_prob_micro_batch_size": 128},
        ref=LOG_BY_COUNT | {"log_prob_micro_batch_size": 32},
        critic=BY_COUNT | {"ppo_micro_batch_size": 16, "forward_micro_batch_size": 24, "ppo_mini_batch_size": 64},
    )
    plan = BatchPlan.build(built, 8)  # 4 data parallel for the actor, 8 for reference and critic
    sizes = [
        plan.roles["actor"].update,
        plan.roles["actor"].forward,
        plan.roles["ref"].forward,
        plan.roles["critic"].update,
        plan.roles["critic"].forward,
    ]
    assert [rule.max_sequences for rule in sizes] == [16, 32, 4, 2, 3]


def test_all_sizes_that_do_not_fit_are_listed_with_numbers():
    built = config(
        batch=100,
        mini=30,
        actor=BY_COUNT | {"ppo_micro_batch_size": 10},
        rollout={"tensor_model_parallel_size": 2},
    )
    with pytest.raises(ValueError) as caught:
        BatchPlan.build(built, world_size=3, num_train_prompts=99)
    message = str(caught.value)
    assert "tensor_model_parallel_size=2: must divide the number of processes" in message
    assert "= 3)" in message
    assert "ppo_mini_batch_size=30: must divide data.train_batch_size=100; the nearest that does is 25" in message
    assert "data.train_batch_size=100: there are only 99 training prompts" in message
    assert "ppo_micro_batch_size=10: must be a multiple of the data-parallel size 3" in message


def test_a_mini_batch_larger_than_the_batch_names_the_fix():
    with pytest.raises(ValueError, match=r"set actor_rollout_ref.actor.ppo_mini_batch_size=64 or less"):
        BatchPlan.build(config(mini=256), 1)


def test_counting_without_a_size_is_an_error():
    with pytest.raises(ValueError, match=r"set actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu, or .*=true"):
        BatchPlan.build(config(actor=BY_COUNT), 1)


def test_the_critic_is_not_checked_when_there_is_none():
    BatchPlan.build(config(critic=BY_COUNT | {"ppo_mini_batch_size": 7}), 1)


def test_rule_holds_exactly_one_bound():
    for bounds in ({}, {"max_tokens": 1, "max_sequences": 1}):
        with pytest.raises(ValueError, match="exactly one"):
            MicroBatchRule(**bounds)


def test_table_shows_what_a_user_asks_for():
    plan = BatchPlan.build(config(actor={"use_kl_loss": True}), 2, 640)
    table = plan.table()
    assert "64 prompts x 8 = 512 sequences" in table
    assert "4 mini-batches of 16 prompts (128 sequences), 4 optimizer steps" in table
    assert "reference micro-batch" in table
    assert "critic" not in table
    assert "300 (1,200 optimizer steps of the actor)" in table
    widths = {len(line) - len(line[2:].lstrip()) for line in table.splitlines()[1:]}
    assert widths == {2}


@pytest.mark.parametrize(
    ("trainer", "val_files", "found"),
    [
        ({}, ["v"], []),
        (
            {"save_freq": -1, "test_freq": -1},
            ["v"],
            ["nothing will be saved (trainer.save_freq=-1)", "validated before the first step only"],
        ),
        ({"test_freq": -1, "val_before_train": False}, ["v"], ["the policy is never validated (trainer.test_freq=-1)"]),
        ({"save_freq": 5, "test_freq": 5}, [], ["never validated (data.val_files is empty)"]),
        ({"save_freq": 5, "test_freq": 5}, ["v"], []),
        ({"val_only": True}, ["v"], []),
    ],
)
def test_a_run_that_leaves_nothing_behind_is_warned_about(trainer, val_files, found):
    built = config(trainer=trainer)
    built.data.val_files = val_files
    plan = BatchPlan.build(built, 1)
    assert len(plan.warnings) == len(found)
    for warning, part in zip(plan.warnings, found, strict=True):
        assert part in warning and f"  WARNING: {warning}" in plan.table().splitlines()


def test_plan_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        BatchPlan.build(config(), 1).prompts_per_step = 3  # pyright: ignore


def split(size: int, **more: Any) -> dict[str, Any]:
    return {"fsdp_config": FSDPConfig(tensor_parallel_size=size, **more)}


def test_ranks_of_a_tensor_parallel_group_share_their_rows():
    """Eight processes, the actor's layers split in two, the reference's in four: four and two shares of the rows."""
    plan = BatchPlan.build(
        config(
            actor=BY_COUNT | {"ppo_micro_batch_size": 64} | split(2, fsdp_size=4),
            ref=split(4),
            algorithm={"use_kl_in_reward": True},
        ),
        world_size=8,
        num_train_prompts=64,
    )
    assert [plan.roles[name].ranks_per_row for name in ("actor", "ref")] == [2, 4]
    assert plan.roles["actor"].data_parallel_size == 4 and plan.sequences_per_rank == 128
    assert plan.roles["actor"].update == MicroBatchRule(max_sequences=16)  # 64 over all processes, by four


def test_the_token_budget_of_a_tensor_parallel_group_is_one_processs():
    """Inside attention and the MLP each rank sees all tokens of the micro-batch; Ulysses ranks never do."""
    budget = {"ppo_max_token_len_per_gpu": 1000}
    plan = BatchPlan.build(config(actor=budget | split(2)), world_size=2, num_train_prompts=64)
    assert plan.roles["actor"].update == MicroBatchRule(max_tokens=1000)


@pytest.mark.parametrize(
    ("actor", "ref", "message"),
    [
        (split(3), {}, r"actor.fsdp_config.tensor_parallel_size=3: must divide the number of processes .* = 8\)"),
        (split(4, fsdp_size=2), {}, r"tensor_parallel_size=4 does not divide .*actor.fsdp_config.fsdp_size=2"),
        (
            split(4, pipeline_parallel_size=4),
            {},
            r"actor.fsdp_config.tensor_parallel_size=4: must divide the 2 processes that have the same stage "
            r"\(8 processes with one copy of the model, .*pipeline_parallel_size=4\)",
        ),
        (
            split(2) | {"use_kl_loss": True, "kl_loss_type": "full"},
            {},
            r"needs one fsdp_config.tensor_parallel_size for actor and ref, but they are 2 and 1",
        ),
    ],
)
def test_tensor_parallel_sizes_that_do_not_fit(actor: dict[str, Any], ref: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        BatchPlan.build(config(actor=actor, ref=ref), world_size=8, num_train_prompts=64)


def test_with_lora_the_reference_has_the_actors_groups():
    settings = config(actor=split(2) | {"use_kl_loss": True})
    settings.actor_rollout_ref.model.lora_rank = 8
    assert BatchPlan.build(settings, world_size=2, num_train_prompts=64).roles["ref"].ranks_per_row == 2
