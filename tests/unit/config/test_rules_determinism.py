"""trainer.full_determinism refuses what depends on time, and verl's spellings of it reach it."""

from __future__ import annotations

import pytest

from verl_like.config.errors import ConfigError
from verl_like.trainer.compose import compose

ON = "trainer.full_determinism=True"
TURNS = "actor_rollout_ref.rollout.multi_turn.enable=True"
ALONE = "actor_rollout_ref.rollout.max_num_seqs=1"


@pytest.mark.parametrize(
    "overrides, fix",
    [
        (["actor_rollout_ref.rollout.scheduler.additional_prompts.enable=True"], "which groups are used depends on"),
        (["algorithm.filter_groups.enable=True"], "scheduler.mode=request: .*; set scheduler.mode=batch"),
        ([TURNS], r"rollout.max_num_seqs=1024: .*; set max_num_seqs=1 \(one request at a time\)"),
        (["env.train.tags=[FrozenLake]", "trainer.total_training_steps=1"], "max_num_seqs=1"),
        (["actor_rollout_ref.rollout.gateway.path=agent.py:run"], "max_num_seqs=1"),
        ([TURNS, ALONE], "rollout.enable_prefix_caching=True: .*; set enable_prefix_caching=False"),
        (["actor_rollout_ref.rollout.scheduler.max_running_requests=8"], "max_num_seqs=1"),
    ],
)
def test_what_depends_on_time_is_refused(overrides: list[str], fix: str) -> None:
    with pytest.raises(ConfigError, match=fix):
        compose([*overrides, "algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=4", ON])


def test_conversations_one_request_at_a_time_are_not() -> None:
    tools = "actor_rollout_ref.rollout.multi_turn.function_tool_path=tools.py"
    compose([TURNS, tools, ALONE, "actor_rollout_ref.rollout.name=hf", ON])
    compose([TURNS, tools, ALONE, "actor_rollout_ref.rollout.enable_prefix_caching=False", ON])


@pytest.mark.parametrize("key", ["actor_rollout_ref.actor.fsdp_config", "actor_rollout_ref.rollout", "critic.fsdp"])
def test_verls_keys_reach_it(key: str) -> None:
    assert compose([f"{key}.full_determinism=True"]).trainer.full_determinism
    assert not compose([f"{key}.full_determinism=False"]).trainer.full_determinism
