"""Checks of `env.*`."""

from collections.abc import Iterator

from verl_like.config.ppo import PPOConfig
from verl_like.config.rollout import runs_agent_loops, runs_programs
from verl_like.config.schema import Idle

_GATEWAY = "actor_rollout_ref.rollout.gateway."


def has_turns(config: PPOConfig) -> bool:
    """Return True where an episode may have several turns."""
    rollout = config.actor_rollout_ref.rollout
    return (
        rollout.multi_turn.enable or runs_agent_loops(rollout) or runs_programs(rollout) or bool(config.env.train.tags)
    )


def impossible_environments(config: PPOConfig) -> Iterator[str]:
    """Combinations that cannot work: keys, values, fix."""
    rollout, tags = config.actor_rollout_ref.rollout, config.env.train.tags
    if runs_programs(rollout) and (rollout.multi_turn.enable or runs_agent_loops(rollout) or tags):
        yield (
            f"{_GATEWAY}path={rollout.gateway.path}, {_GATEWAY}command={rollout.gateway.command} beside "
            "multi_turn.enable=True, agent loops or env.train.tags: a program is the whole episode; choose one of them"
        )
    elif rollout.gateway.path is not None and rollout.gateway.command is not None:
        yield f"{_GATEWAY}path={rollout.gateway.path} beside {_GATEWAY}command: one program is the episode; remove one"
    if runs_programs(rollout) or not tags:
        return
    if rollout.multi_turn.enable or runs_agent_loops(rollout):
        yield (
            f"env.train.tags={tags} beside actor_rollout_ref.rollout.multi_turn.enable=True or agent loops: an "
            "environment answers every message itself; choose one of them"
        )
    if config.data.chat_template == "none":
        yield f"env.train.tags={tags} with data.chat_template=none: a conversation needs a chat template"
    if config.trainer.total_training_steps is None:
        yield f"env.train.tags={tags}: environments have no last row; set trainer.total_training_steps"


_OF_FILES = (
    *("data.train_files", "data.val_files", "data.shuffle", "data.seed", "data.prompt_key", "data.train_max_samples"),
    *("data.val_max_samples", "data.filter_overlong_prompts", "data.truncation", "data.domain_weights"),
    *("data.custom_cls.", "custom_reward_function.path", "reward_model.rule", "trainer.total_epochs"),
)
ENV_IDLE: tuple[Idle, ...] = (
    Idle(_OF_FILES, lambda c: bool(c.env.train.tags), "env.train.tags plays environments, which score themselves"),
    Idle(
        (f"{_GATEWAY}host", f"{_GATEWAY}port"),
        lambda c: not runs_programs(c.actor_rollout_ref.rollout),
        f"neither {_GATEWAY}path nor {_GATEWAY}command is set",
    ),
)
