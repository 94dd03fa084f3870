"""verl.experimental.agent_loop: what agent loops import. Modules of the same name elsewhere on the path count too."""

from pkgutil import extend_path

from .agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput, AsyncLLMServerManager, register

__path__ = extend_path(__path__, __name__)
__all__ = ["AgentLoopBase", "AgentLoopMetrics", "AgentLoopOutput", "AsyncLLMServerManager", "register"]
