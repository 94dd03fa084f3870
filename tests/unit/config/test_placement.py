"""Which processes host which roles, and what cannot be placed so."""

from __future__ import annotations

from pathlib import Path

import pytest

from verl_like.config.batch_plan import BatchPlan
from verl_like.config.pools import Pool
from verl_like.trainer.compose import compose, compose_with_warnings

OWN_ROLLOUT = ("actor_rollout_ref.hybrid_engine=False", "actor_rollout_ref.rollout.nnodes=1")
OWN_REWARD = (
    "reward_model.enable=True",
    "reward_model.model.path=somewhere",
    "reward_model.enable_resource_pool=True",
    "reward_model.nnodes=2",
    "reward_model.n_gpus_per_node=3",
)


def pools(*overrides: str, world_size: int = 4) -> dict[str, Pool]:
    config = compose(["data.train_batch_size=4", "actor_rollout_ref.actor.ppo_mini_batch_size=4", *overrides])
    return {pool.name: pool for pool in BatchPlan.build(config, world_size).pools}


def hosted(*overrides: str) -> dict[str, tuple[tuple[str, ...], int]]:
    return {name: (pool.roles, pool.world_size) for name, pool in pools(*overrides).items()}


def test_everybody_shares_one_pool_unless_told_otherwise() -> None:
    assert hosted() == {"main": (("actor", "critic", "rollout"), 4)}
    kl = "actor_rollout_ref.actor.use_kl_loss=True"
    assert hosted(kl, "critic.enable=False", "algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=2") == {
        "main": (("actor", "ref", "rollout"), 4)
    }


def test_the_short_forms_and_the_table_say_the_same() -> None:
    short = hosted(*OWN_ROLLOUT, "actor_rollout_ref.rollout.n_gpus_per_node=2", *OWN_REWARD)
    rollout, reward = "{roles:[rollout],n_gpus_per_node:2}", "{roles:[reward],nnodes:2,n_gpus_per_node:3}"
    table = f"trainer.placement={{rollout:{rollout},reward:{reward}}}"
    long = hosted(*OWN_REWARD[:2], table)
    assert short == long == {"main": (("actor", "critic"), 4), "rollout": (("rollout",), 2), "reward": (("reward",), 6)}


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        ("{rollout:2,critic:1}", {"main": (("actor",), 4), "rollout": (("rollout",), 2), "critic": (("critic",), 1)}),
        ("{rollout:[4,5],critic:[5,4]}", {"main": (("actor",), 4), "rollout_critic": (("critic", "rollout"), 2)}),
        (
            "{actor:[0,1,2,3],critic:[0,1,2,3],rollout:[4,5]}",
            {"main": (("actor", "critic"), 4), "rollout": (("rollout",), 2)},
        ),
        ("{rollout:[[2,3],[2,3]]}", {"main": (("actor", "critic"), 4), "rollout": (("rollout",), 4)}),
    ],
)
def test_roles_may_name_their_devices(table: str, expected: dict[str, tuple[tuple[str, ...], int]]) -> None:
    assert hosted(f"trainer.placement={table}") == expected


def test_the_actors_devices_are_the_size_of_the_main_pool() -> None:
    config = compose(["trainer.placement={actor:[[0,1,2],[0,1,2]]}"])
    assert (config.trainer.nnodes, config.trainer.n_gpus_per_node) == (2, 3)
    with pytest.raises(ValueError, match=r"trainer.nnodes=1 trainer.n_gpus_per_node=4 say something else; leave them"):
        compose(["trainer.placement={actor:[0,1]}", "trainer.n_gpus_per_node=4"])


def test_roles_without_a_run_make_no_pool_and_say_so() -> None:
    config = compose(
        ["algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=2", "critic.enable=False",
         "trainer.placement={values:{roles:[critic]}}"]
    )  # fmt: skip
    plan = BatchPlan.build(config, 1)
    assert [pool.name for pool in plan.pools] == ["main"]
    assert any("trainer.placement.values has no effect in this run: it has no critic" in line for line in plan.warnings)


def test_sizes_are_checked_against_the_roles_own_pool() -> None:
    critic = "trainer.placement={values:{roles:[critic],n_gpus_per_node:3}}"
    with pytest.raises(ValueError, match=r"critic.ulysses_sequence_parallel_size=2: must divide .*values.nnodes x"):
        pools(critic, "critic.ulysses_sequence_parallel_size=2")
    assert pools(critic, "critic.ulysses_sequence_parallel_size=3")["values"].world_size == 3
    with pytest.raises(ValueError, match=r"tensor_model_parallel_size=2: must divide .*rollout.n_gpus_per_node = 3"):
        pools(*OWN_ROLLOUT, "actor_rollout_ref.rollout.n_gpus_per_node=3",
              "actor_rollout_ref.rollout.tensor_model_parallel_size=2")  # fmt: skip


def test_the_table_shows_every_pool() -> None:
    config = compose([*OWN_ROLLOUT, "actor_rollout_ref.rollout.n_gpus_per_node=2"])
    assert "pool rollout" in (table := BatchPlan.build(config, 1).table()) and "2 processes: rollout" in table


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["trainer.placement={main:{roles:[critic]}}"], "any name but worker and main, the pool of trainer.nnodes"),
        (["trainer.placement={worker:{roles:[critic]}}"], "any name but worker and main"),
        (["trainer.placement={a: {roles: [[critic]]}}"], "a.roles: write"),
        (
            [*OWN_ROLLOUT, "actor_rollout_ref.rollout.n_gpus_per_node=1",
             "trainer.placement={rollout:{roles:[critic]}}"],
            "another pool has the name rollout already",
        ),
        (["trainer.placement={main:{}}"], "any name but worker and main"),
        (["trainer.placement={main:2}"], "any name but worker and main"),
        (["trainer.placement={actor:[0,1],rollout:[2,3],main:[0,1]}"], "any name but worker and main"),
        (["trainer.placement={a-b:{roles:[critic]}}"], "a name of letters and digits"),
        (
            ["trainer.placement={actor:[0,1],rollout:[2,3]}", "trainer.nnodes=2"],
            "trainer.nnodes=2 trainer.n_gpus_per_node=auto say something else",
        ),
        (["trainer.placement={a:{roles:[actor]}}"], "the actor stays in the pool main"),
        (["trainer.placement={a:{roles:[critc]}}"], "choose among ref, critic, reward, rollout"),
        (["trainer.placement={a:{roles:[]}}"], "a.roles: write"),
        (["trainer.placement={rollout:[2,2]}"], "rollout: [2, 2]: write {rollout: 2}"),
        (["trainer.placement={rollout:[]}"], "rollout: []: write"),
        (["trainer.placement={rollout:[[0,1],[0]]}"], "every node gives as many devices"),
        (["trainer.placement={rollout:0}"], "rollout: write {rollout: 2}"),
        (["trainer.placement={actor:2}"], "the actor's number is trainer.n_gpus_per_node"),
        (["trainer.placement={rolout:[2]}"], "rolout in the pool rolout: choose among"),
        (["trainer.placement={actor:[0],rolout:[0]}"], "rolout in the pool main: choose among"),
        (["trainer.placement={actor:[0,1],rollout:[1,2]}"], "actor and rollout share device 1 of node 0, but not all"),
        (["trainer.placement={a:{roles:[critic],gpus:2}}"], "unknown ['gpus']"),
        (["trainer.placement={a:{roles:[critic],nnodes:0}}"], "with sizes of at least 1"),
        (["trainer.placement={a:{roles:[critic]},b:{roles:[critic]}}"], "critic is in the pools a, b"),
        ([*OWN_REWARD, "trainer.placement={a:{roles:[reward]}}"], "reward is in the pools a, reward"),
        (
            ["trainer.placement={actor:[0,1],rollout:[0,1],p:{roles:[rollout]}}"],
            "rollout is in the pools main, p",
        ),
        (
            [*OWN_ROLLOUT, "actor_rollout_ref.rollout.n_gpus_per_node=2",
             "trainer.placement={actor:[0,1],rollout:[0,1]}"],
            "rollout is in the pools main, rollout",
        ),
        ([*OWN_REWARD, "trainer.placement={actor:[0],reward:[0]}"], "reward is in the pools main, reward"),
        (
            ["actor_rollout_ref.rollout.name=recorded", "trainer.placement={actor:[0],rollout:[1]}"],
            "there is no engine to be in a pool of its own",
        ),
        (["trainer.launcher=local", "trainer.placement={a:{roles:[critic]}}"], "set trainer.launcher=ray"),
        (list(OWN_ROLLOUT), "n_gpus_per_node=0: the pool of rollout needs both sizes above 0"),
        (
            ["actor_rollout_ref.actor.use_kl_loss=True", "actor_rollout_ref.model.lora_rank=4",
             "trainer.placement={a:{roles:[ref]}}"],
            "with actor_rollout_ref.model.lora_rank=4: with LoRA ref is the actor",
        ),
        (
            ["actor_rollout_ref.actor.use_kl_loss=True", "actor_rollout_ref.actor.kl_loss_type=full",
             "trainer.placement={a:{roles:[ref]}}"],
            "ref reads the rows together with the actor",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_placed_so_is_refused_with_the_fix(overrides: list[str], line: str) -> None:
    with pytest.raises(ValueError) as caught:
        compose(overrides)
    assert line in str(caught.value)


def test_sizes_of_a_pool_that_is_not_there_are_idle(tmp_path: Path) -> None:
    _, warnings = compose_with_warnings(["actor_rollout_ref.rollout.nnodes=1"])
    assert any("rollout.nnodes has no effect in this run" in line for line in warnings)
