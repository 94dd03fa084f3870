"""What travels between the trainer and a reward worker. Standard library only."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, field
from typing import Any

from verl_like.rewards.graders import GraderChoice


@dataclass(frozen=True, slots=True, kw_only=True)
class ScorerSpec:
    """Which function a worker loads: a user's file or module (`path`), or the built-in graders (`path` is None).

    A call that names a built-in grader is graded by that one in either case.
    """

    path: str | None = None  # file.py or pkg://module
    name: str = "compute_score"
    kwargs: dict[str, Any] = field(default_factory=dict)
    options: dict[str, dict[str, Any]] = field(default_factory=dict)  # of the built-in graders, by name
    choice: GraderChoice = field(default_factory=GraderChoice)  # which built-in grader a manager's compute_score takes
    manager: str | None = None  # a class around the function: file.py:Name or pkg://module:Name
    manager_kwargs: dict[str, Any] = field(default_factory=dict)
    own_graders: dict[str, str] = field(default_factory=dict)  # graders named by reference: config key -> file.py:name
    batch: bool = False  # the function takes lists of a whole batch
    concurrency: int = 64  # rows that an `async def` scorer handles at a time in one worker
    timeout: float = 60.0  # seconds per call
    memory_limit_mb: int | None = None  # address space of a worker


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardCall:
    """One response to be scored: the arguments of verl's reward function signature."""

    data_source: str
    solution_str: str
    ground_truth: Any = None
    extra_info: dict[str, Any] = field(default_factory=dict)
    question: str = ""  # the last user message of the prompt
    grader: str | None = None  # built-in grader by name; None where the user's own function scores


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardOutcome:
    """What became of one call. `kind` is None when `score` is good.

    kind: "exception" | "memory" | "timeout" | "crash" | "bad_value"; `message` then tells what happened.
    """

    score: float | None = None
    extras: dict[str, Any] = field(default_factory=dict)
    kind: str | None = None
    message: str = ""
    seconds: float = 0.0  # time inside the reward function


def is_finite_reward(value: float) -> bool:
    """Whether a number is finite as the 32-bit float that training uses."""
    try:
        return math.isfinite(struct.unpack("f", struct.pack("f", value))[0])
    except (OverflowError, struct.error):  # an int may be too large for any float
        return False


class RewardFunctionError(ValueError):
    """The reward function cannot be used at all: missing file, missing function, wrong signature, failing import."""
