"""Messages between the trainer and a worker that runs agent loops."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from verl_like.services.service import Outcome, OwnSpec, ServiceError

KEY = "actor_rollout_ref.rollout.agent.agent_loop_config_path"


class AgentLoopError(ServiceError):
    """The agent loops cannot be used at all: a bad file, a missing class, a failing import."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The loop wants the policy's continuation of these tokens. sampling: what it changes, by SamplingParams' names."""

    number: int
    context_ids: NDArray[np.int32]
    sampling: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """Tokens that the policy sampled for one request of a loop."""

    number: int
    token_ids: NDArray[np.int32]
    log_probs: NDArray[np.float32]
    finish_reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopRow:
    """Row of verl's AgentLoopOutput: a context, and what follows it; mask_R is 1 at the tokens to be trained."""

    prompt_ids_P: NDArray[np.int32]
    response_ids_R: NDArray[np.int32]
    mask_R: NDArray[np.bool_]
    reward: float | None = None
    num_turns: int = 0
    metrics: dict[str, float] = field(default_factory=dict)  # seconds: generate_sequences, tool_calls
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentReply(Outcome):
    """State of a loop.

    asked: new requests to the policy.
    rows: the loop's result; None while it runs.
    """

    asked: tuple[Asked, ...] = ()
    rows: tuple[LoopRow, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentRequest:
    """Message to a worker.

    action: "start", "resume" (with answers, or to ask for news) or "end".
    sampling: the run's sampling parameters, under verl's names.
    fields: the row's, by column (`plugins.agents.tools.toolbox.fields_of`).
    """

    action: str
    session: str
    name: str = ""
    fields: dict[str, Any] = field(default_factory=dict)
    sampling: dict[str, Any] = field(default_factory=dict)
    answers: tuple[Answered, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentLoopSpec(OwnSpec):
    """Agent loops of one run: a file that lists them, or a completion callback, at least one of both.

    timeout: of a loop's own code between two requests to the policy.
    config_path: the file that lists loops.
    callback: verl's completion callback, which is one more.
    encoder: the pickled PromptEncoder of the run.
    end_ids: tokens that end a turn.
    settings: the whole configuration, as plain values.
    """

    factory: str = "verl_like.plugins.verl_agents.service:AgentLoopService"
    concurrency: int = 256
    noun: str = "agent loop"
    section: str = "actor_rollout_ref.rollout.multi_turn.tool_"  # tool_timeout, tool_memory_limit_mb

    config_path: str | None = None
    callback: str | None = None
    encoder: bytes
    end_ids: tuple[int, ...] = ()
    settings: dict[str, Any]
    model_type: str | None = None

    outcome: ClassVar[type[Outcome]] = AgentReply
    error: ClassVar[type[ServiceError]] = AgentLoopError
    payload_name: ClassVar[str] = "the row"

    @property
    def source(self) -> str:
        return f"{KEY}={self.config_path}" if self.config_path else f"completion_callback={self.callback}"
