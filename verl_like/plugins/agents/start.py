"""The tools of a run (`actor_rollout_ref.rollout.multi_turn.*`), in processes of their own."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, closing
from typing import Any

from verl_like.config import PPOConfig
from verl_like.config.errors import problems_of, raise_if_any
from verl_like.data.chat import PromptEncoder
from verl_like.data.dataset import Dataset, PromptDataset, make_encoder
from verl_like.episodes.transcript import Transcript
from verl_like.models.vision import VisionProcessor
from verl_like.plugins.agents.tool_agent import Bounds, ToolAgent
from verl_like.plugins.agents.tool_calls.formats import parser_of
from verl_like.plugins.agents.tools.interactions import chosen, interaction_kwargs
from verl_like.plugins.agents.tools.tool_call import ToolSpec
from verl_like.plugins.agents.tools.toolbox import Toolbox
from verl_like.plugins.games.adapters import ADAPTERS
from verl_like.plugins.games.dataset import kinds_of
from verl_like.user_code import resolve_path


def open_toolbox(config: PPOConfig, stack: ExitStack) -> Toolbox | None:
    """All tools and environments, until `stack` is closed; None where the run has none.

    Raises ToolError, naming the key, for bad ones.
    """
    rollout, env = config.actor_rollout_ref.rollout, config.env
    turns = rollout.multi_turn
    if not turns.enable and not env.train.tags:
        return None
    found: dict[str, Callable[[], str | None]] = {
        "tool_config_path": lambda: _path(turns.tool_config_path, "tool_config_path"),
        "function_tool_path": lambda: _path(turns.function_tool_path, "function_tool_path"),
        "environment_path": lambda: _reference(turns.environment_path, "environment_path"),
        "interaction_config_path": lambda: _path(turns.interaction_config_path, "interaction_config_path"),
    }
    raise_if_any(problems_of(*found.values()))
    paths: dict[str, Any] = {name: find() for name, find in found.items()}
    spec = ToolSpec(
        **paths,
        environments=tuple(kinds_of(env)),
        worker_cls=_reference(env.worker_cls, "worker_cls"),
        max_response_length=turns.max_tool_response_length,
        truncate_side=turns.tool_response_truncate_side,
        timeout=turns.tool_timeout,
        memory_limit_mb=turns.tool_memory_limit_mb,
        concurrency=turns.tool_concurrency,
    )
    return stack.enter_context(closing(Toolbox(spec, num_workers=rollout.agent.num_workers)))


def tool_agent(
    config: PPOConfig,
    tokenizer: Any,
    eos_ids: tuple[int, ...],
    toolbox: Toolbox,
    vision: VisionProcessor | None = None,
) -> ToolAgent:
    """The conversations of rollout.multi_turn.

    Raises ValueError for an unknown syntax of calls, and for a chat template that has no place for what tools say.
    """
    data, turns = config.data, config.actor_rollout_ref.rollout.multi_turn
    limits = [limit for limit in (turns.max_turns, turns.max_assistant_turns) if limit is not None]
    bounds = Bounds(
        prompt=data.max_prompt_length,
        response=data.max_response_length,
        turns=min(limits, default=None),
        observations=turns.max_user_turns,
        calls=turns.max_parallel_calls,
    )
    encoder = make_encoder(data, tokenizer)
    require_tool_messages(encoder, toolbox.schemas, eos_ids, users=bool(toolbox.interactions) or toolbox.acts)
    return ToolAgent(
        encoder,
        toolbox,
        parser_of(turns.format),
        bounds,
        end_ids=eos_ids,
        follow_template=turns.use_inference_chat_template,
        malformed_end=turns.malformed_calls == "end",
        turn_rewards=turns.turn_rewards,
        environment=toolbox.gives_reward,
        vision=vision,
        max_megapixels=data.max_image_megapixels,
    )


def _path(value: str | None, name: str) -> str | None:
    return None if value is None else resolve_path(value, f"actor_rollout_ref.rollout.multi_turn.{name}")


def _reference(value: str | None, name: str) -> str | None:
    """Resolve `file.py:Class` to the whole path of the file."""
    path, colon, member = (value or "").rpartition(":")
    return f"{_path(path, name)}{colon}{member}" if path and path not in ADAPTERS else value


def require_tool_messages(
    encoder: PromptEncoder, schemas: list[dict[str, Any]], eos_ids: Sequence[int], *, users: bool = False
) -> None:
    """Raise ValueError where the chat template has no place for what tools say, or (users) simulated users."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "x"}]
    (ids,) = encoder.encode([(messages, schemas or None)])
    transcript = Transcript(encoder, ids, messages, schemas or None, follow_template=False)
    plain: dict[str, Any] = {"role": "assistant", "content": "x"}
    exchanges: list[tuple[dict[str, Any], dict[str, Any]]] = []
    if schemas:
        call = {"name": schemas[0]["function"]["name"], "arguments": {}}
        said = {"role": "tool", "tool_call_id": "call00000", "name": call["name"], "content": "x"}
        exchanges.append(({**plain, "tool_calls": [{"id": "call00000", "type": "function", "function": call}]}, said))
    if users or not schemas:
        exchanges.append((plain, messages[0]))
    for answer, reply in exchanges:
        transcript.wrote([*encoder.encode_text("x"), eos_ids[0]], answer)
        try:
            transcript.observe([reply])
        except ValueError as error:
            raise ValueError(
                f"actor_rollout_ref.rollout.multi_turn.enable=True: {error}. Set data.chat_template to one that has "
                f"{reply['role']} messages after an answer"
            ) from error


def check_interactions(datasets: Iterable[Dataset | None], toolbox: Toolbox | None) -> None:
    """Raise ValueError for the first row that names an unknown simulated user.

    Of a data set with a code of its own only the first row is looked at, as making its rows may take long.
    """
    names = [] if toolbox is None else toolbox.interactions
    for dataset in datasets if names else ():
        if dataset is None:
            continue
        rows = [("the first row", dataset[0][1].extra_info.get("interaction_kwargs"))]
        for place, cell in itertools.chain(
            rows, dataset.extras("interaction_kwargs") if isinstance(dataset, PromptDataset) else ()
        ):
            try:
                if settings := interaction_kwargs({"interaction_kwargs": cell}):
                    chosen(settings, names)
            except ValueError as error:
                raise ValueError(f"{place}: {error}") from error
