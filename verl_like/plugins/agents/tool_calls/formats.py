"""The table of formats: `actor_rollout_ref.rollout.multi_turn.format`."""

from __future__ import annotations

from verl_like.plugins.agents.tool_calls.call import ToolCallParser
from verl_like.plugins.agents.tool_calls.harmony import Harmony
from verl_like.plugins.agents.tool_calls.llama import Llama
from verl_like.plugins.agents.tool_calls.marked import Hermes, Mistral, Qwen3Coder
from verl_like.plugins.agents.tool_calls.pythonic import Pythonic

# names as verl, vLLM and SGLang spell them; the first of each line is the one in the documentation
_NAMES: tuple[tuple[ToolCallParser, tuple[str, ...]], ...] = (
    (Hermes(), ("hermes", "qwen", "qwen2.5", "qwen25", "qwen3", "qwen3_json")),
    (Qwen3Coder(), ("qwen3_coder", "qwen3_xml")),
    (Llama(), ("llama3_json", "llama", "llama3", "llama4_json")),
    (Mistral(), ("mistral",)),
    (Harmony(), ("gpt-oss", "gpt_oss", "openai", "harmony")),
    (Pythonic(), ("pythonic", "llama4_pythonic")),
)
FORMATS: dict[str, ToolCallParser] = {name: parser for parser, names in _NAMES for name in names}


def parser_of(format: str) -> ToolCallParser:
    """The parser of a format. Raises ValueError for one that there is not."""
    if format not in FORMATS:
        raise ValueError(
            f"actor_rollout_ref.rollout.multi_turn.format={format!r} is no syntax of tool calls; there is "
            f"{', '.join(sorted(FORMATS))}"
        )
    return FORMATS[format]
