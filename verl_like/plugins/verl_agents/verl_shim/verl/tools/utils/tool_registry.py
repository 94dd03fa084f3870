"""verl.tools.utils.tool_registry, where verl up to 0.7 has it."""

from ..tool_registry import initialize_tools_from_config

__all__ = ["initialize_tools_from_config"]
