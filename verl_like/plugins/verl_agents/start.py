"""The agent loops of a run (`actor_rollout_ref.rollout.agent.*`), in processes of their own."""

from __future__ import annotations

import difflib
import pickle
from collections.abc import Collection, Iterable, Sequence
from contextlib import ExitStack, closing

from verl_like.config import PPOConfig, RolloutConfig
from verl_like.config.rollout import runs_programs
from verl_like.config.schema import to_dict
from verl_like.data.chat import PromptEncoder
from verl_like.data.dataset import SINGLE_TURN, Dataset
from verl_like.episodes.episode import EpisodeRunner
from verl_like.plugins.agents.tool_calls.formats import parser_of
from verl_like.plugins.verl_agents.callback_loop import NAME
from verl_like.plugins.verl_agents.loading import all_loops
from verl_like.plugins.verl_agents.messages import AgentLoopSpec
from verl_like.plugins.verl_agents.runner import AgentLoops
from verl_like.user_code import resolve_path

TOOL_AGENT = "tool_agent"
BUILT_IN = (SINGLE_TURN, TOOL_AGENT)


def loop_names(rollout: RolloutConfig) -> list[str]:
    """The loops that the run's file lists; none without one.

    Raises ValueError for a bad file, and an unknown default.
    """
    default = rollout.agent.default_agent_loop
    names = list(all_loops(rollout.agent.agent_loop_config_path, rollout.multi_turn.completion_callback))
    _require_known([default], names, "actor_rollout_ref.rollout.agent.default_agent_loop")
    return names


def check_agents(datasets: Iterable[Dataset | None], rollout: RolloutConfig) -> None:
    """Raise ValueError for a row whose agent_name is no loop's, or tool_agent where conversations are off."""
    names, conversations = loop_names(rollout), rollout.multi_turn.enable
    for dataset in filter(None, datasets):
        agents = dataset.agents()
        _require_known(agents, names, "a row's agent_name")
        used = {name or rollout.agent.default_agent_loop for name in agents}
        if TOOL_AGENT in used and not conversations and TOOL_AGENT not in names:
            raise ValueError(
                f"rows with agent_name={TOOL_AGENT} (or as agent.default_agent_loop) are conversations with tools, but "
                "actor_rollout_ref.rollout.multi_turn.enable=False: set it to true, or choose another"
            )


def _require_known(used: Iterable[str], names: Collection[str], what: str) -> None:
    known = dict.fromkeys([*names, *BUILT_IN])
    for name in used:
        if name and name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise ValueError(
                f"{what}={name!r} is the name of no agent loop. There are: {', '.join(known)}{hint}. Loops of your own "
                "are listed in actor_rollout_ref.rollout.agent.agent_loop_config_path"
            )


def open_gateway(config: PPOConfig, encoder: PromptEncoder, eos_ids: Sequence[int], stack: ExitStack) -> EpisodeRunner:
    """The programs of rollout.gateway, until `stack` is closed. Raises ProgramError for those that cannot be loaded."""
    from verl_like.plugins.agents.gateway.program import ProgramSpec
    from verl_like.plugins.agents.gateway.runner import Gateway  # an HTTP server, which few runs need
    from verl_like.plugins.agents.gateway.session import Rules

    rollout, data = config.actor_rollout_ref.rollout, config.data
    gateway, turns = rollout.gateway, rollout.multi_turn
    file, colon, name = (gateway.path or "").rpartition(":")
    path = f"{resolve_path(file, 'actor_rollout_ref.rollout.gateway.path')}{colon}{name}" if file else gateway.path
    spec = ProgramSpec(
        path=path, command=gateway.command, timeout=turns.tool_timeout, memory_limit_mb=turns.tool_memory_limit_mb
    )
    limits = [limit for limit in (turns.max_turns, turns.max_assistant_turns) if limit is not None]
    rules = Rules(
        encoder=encoder,
        parser=parser_of(turns.format),
        end_ids=frozenset(eos_ids),
        response=data.max_response_length,
        total=data.max_prompt_length + data.max_response_length,
        requests=min(limits, default=None),
        forced_as_auto=gateway.forced_tool_choice == "auto",
    )
    where = {"host": gateway.host, "port": gateway.port}
    return stack.enter_context(
        closing(Gateway(spec, rules, num_workers=rollout.agent.num_workers, timeout=turns.tool_timeout, **where))
    )


def with_agent_loops(
    config: PPOConfig,
    others: EpisodeRunner,
    encoder: PromptEncoder,
    model_type: str,
    eos_ids: Sequence[int],
    stack: ExitStack,
) -> EpisodeRunner:
    """Put the loops of the run's file before `others`, until `stack` is closed. Raises AgentLoopError for bad ones."""
    rollout, names = config.actor_rollout_ref.rollout, loop_names(config.actor_rollout_ref.rollout)
    if runs_programs(rollout):
        return open_gateway(config, encoder, eos_ids, stack)
    path, turns = rollout.agent.agent_loop_config_path, rollout.multi_turn
    callback, default = turns.completion_callback, rollout.agent.default_agent_loop
    if path is None and callback is None:
        return others
    spec = AgentLoopSpec(
        config_path=path and resolve_path(path, "actor_rollout_ref.rollout.agent.agent_loop_config_path"),
        callback=callback,
        encoder=pickle.dumps(encoder),
        end_ids=tuple(eos_ids),
        settings=to_dict(config),
        model_type=model_type,
        timeout=turns.tool_timeout,
        memory_limit_mb=turns.tool_memory_limit_mb,
    )
    loops = AgentLoops(
        spec,
        num_workers=rollout.agent.num_workers,
        names=names,
        default=NAME if callback is not None and default in BUILT_IN else default,  # of all rows, as in verl
        others=others,
        prompt=config.data.max_prompt_length,
        response=config.data.max_response_length,
        turn_rewards=turns.turn_rewards,
    )
    return stack.enter_context(closing(loops))
