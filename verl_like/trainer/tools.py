"""The tools of a run (`actor_rollout_ref.rollout.multi_turn.*`), in processes of their own."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, closing
from typing import Any

from verl_like.config import RolloutConfig
from verl_like.data.chat import PromptEncoder
from verl_like.episodes.tools.tool_call import ToolSpec
from verl_like.episodes.tools.toolbox import Toolbox
from verl_like.episodes.transcript import Transcript
from verl_like.user_code import resolve_path


def open_toolbox(rollout: RolloutConfig, stack: ExitStack) -> Toolbox | None:
    """All tools, until `stack` is closed; None where the run has none. ToolError, naming the key, for bad ones."""
    turns = rollout.multi_turn
    if not turns.enable:
        return None
    spec = ToolSpec(
        tool_config_path=_path(turns.tool_config_path, "tool_config_path"),
        function_tool_path=_path(turns.function_tool_path, "function_tool_path"),
        environment_path=_reference(turns.environment_path, "environment_path"),
        max_response_length=turns.max_tool_response_length,
        truncate_side=turns.tool_response_truncate_side,
        timeout=turns.tool_timeout,
        memory_limit_mb=turns.tool_memory_limit_mb,
        concurrency=turns.tool_concurrency,
    )
    return stack.enter_context(closing(Toolbox(spec, num_workers=rollout.agent.num_workers)))


def _path(value: str | None, name: str) -> str | None:
    return None if value is None else resolve_path(value, f"actor_rollout_ref.rollout.multi_turn.{name}")


def _reference(value: str | None, name: str) -> str | None:
    """`file.py:Class`, with the whole path of the file."""
    path, colon, member = (value or "").rpartition(":")
    return f"{_path(path, name)}{colon}{member}" if path else value


def require_tool_messages(encoder: PromptEncoder, schemas: list[dict[str, Any]], eos_ids: Sequence[int]) -> None:
    """ValueError where the chat template has no place for what tools say."""
    messages = [{"role": "user", "content": "x"}]
    (ids,) = encoder.encode([(messages, schemas)])
    transcript = Transcript(encoder, ids, messages, schemas, follow_template=False)
    call = {"name": schemas[0]["function"]["name"], "arguments": {}} if schemas else {"name": "x", "arguments": {}}
    calls = [{"id": "call00000", "type": "function", "function": call}]
    answer = {"role": "assistant", "content": "x", "tool_calls": calls}
    transcript.wrote([*encoder.encode_text("x"), eos_ids[0]], answer)
    try:
        transcript.observe([{"role": "tool", "tool_call_id": "call00000", "name": call["name"], "content": "x"}])
    except ValueError as error:
        raise ValueError(
            f"actor_rollout_ref.rollout.multi_turn.enable=True: {error}. Set data.chat_template to one that has tool "
            "messages"
        ) from error
