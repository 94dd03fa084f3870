"""Messages between the trainer and a reward worker. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from verl_like.rewards.graders import GraderChoice
from verl_like.services.service import Outcome, OwnSpec, ServiceError

_TOO_LARGE = 3.4028235677973366e38  # from here on a 32-bit float is infinite


class RewardFunctionError(ServiceError):
    """The reward function cannot be used at all: missing file, missing function, wrong signature, failing import."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardOutcome(Outcome):
    """Result of one call. `kind` is None when `score` is good; besides the kinds of `Outcome`, it may be "bad_value".

    lost: a failure that says nothing about the response: left out whatever reward_model.failure_penalty is.
    child_died: end of a process that the function had started in its worker, in this call or before; else "".
    """

    score: float | None = None
    lost: bool = False
    child_died: str = ""
    extras: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScorerSpec(OwnSpec):
    """Function that a worker loads: of a user's file or module (`path`), or the built-in graders (`path` is None).

    A call that names a built-in grader is graded by that one in either case.

    batch: the function takes lists.
    """

    factory: str = "verl_like.rewards.worker:Grader"
    noun: str = "reward"
    section: str = "custom_reward_function."

    path: str | None = None  # file.py or pkg://module
    name: str = "compute_score"
    kwargs: dict[str, Any] = field(default_factory=dict)
    options: dict[str, dict[str, Any]] = field(default_factory=dict)  # of the built-in graders, by name
    choice: GraderChoice = field(default_factory=GraderChoice)  # which built-in grader a manager's compute_score takes
    manager: str | None = None  # a class around the function: file.py:Name or pkg://module:Name
    manager_kwargs: dict[str, Any] = field(default_factory=dict)
    own_graders: dict[str, str] = field(default_factory=dict)  # graders named by reference: config key -> file.py:name
    served_path: str | None = None  # of the reward model on servers of the run, which the function may ask
    served_folder: str | None = None  # where that model lies on this machine
    served_trust: bool = False  # its tokenizer may be code of its own

    outcome: ClassVar[type[Outcome]] = RewardOutcome
    error: ClassVar[type[ServiceError]] = RewardFunctionError
    payload_name: ClassVar[str] = "ground_truth or extra_info"

    @property
    def source(self) -> str:
        return f"custom_reward_function.path={self.path}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardCall:
    """One response to be scored: the arguments of verl's reward function signature."""

    data_source: str
    solution_str: str
    ground_truth: Any = None
    extra_info: dict[str, Any] = field(default_factory=dict)
    question: str = ""  # the last user message of the prompt
    grader: str | None = None  # built-in grader by name; None where the user's own function scores
    server: str = ""  # host:port of a server of the run's reward model


def is_finite_reward(value: float) -> bool:
    """True where a number is finite as the 32-bit float that training uses."""
    return abs(value) < _TOO_LARGE
