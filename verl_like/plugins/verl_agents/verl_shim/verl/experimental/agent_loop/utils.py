"""verl.experimental.agent_loop.utils: paths, and gpt-oss's tool messages, which its template cannot render alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any


def resolve_config_path(config_path: str) -> str:
    """An absolute path; relative ones begin in the folder where the run was started. FileNotFoundError."""
    path = Path(config_path).resolve()
    if not path.exists():
        raise FileNotFoundError(f"{config_path}: there is no such file ({path})")
    return str(path)


def format_gpt_oss_tool_response_manually(tool_response: str, tool_call_name: str) -> str:
    """One tool message in harmony's form."""
    header = f"<|start|>functions.{tool_call_name} to=assistant<|channel|>commentary"
    return f"{header}<|message|>{tool_response}<|end|>"


def add_generation_prompt_for_gpt_oss(message_content: str) -> str:
    """The text, ready for an answer."""
    return f"{message_content}<|start|>assistant"


def build_gpt_oss_tool_response_text(messages: Sequence[dict[str, Any]], tool_call_names: Sequence[str]) -> str:
    """All tool messages of a turn, ready for an answer."""
    pairs = zip(messages, tool_call_names, strict=False)
    texts = [format_gpt_oss_tool_response_manually(message["content"], name) for message, name in pairs]
    return add_generation_prompt_for_gpt_oss("".join(texts))
