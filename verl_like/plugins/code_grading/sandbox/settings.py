"""Limits of a program's resources, and how strictly it is locked up. Standard library only."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

LEVELS = ("limits", "filtered", "isolated")  # from weakest to strongest


class SandboxError(RuntimeError):
    """The sandbox cannot be started, or is weaker here than the configuration demands."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxSettings:
    """Limits of one program run, and the weakest protection that is acceptable."""

    min_level: str = "isolated"  # one of LEVELS
    timeout: float = 10.0  # [s] wall clock of one run; CPU time is limited to the next whole second
    total_timeout: float = 30.0  # [s] wall clock of all tests of one response
    memory_limit_mb: int = 1024  # address space of each process
    max_output_kb: int = 4096  # stdout, and the same again for stderr
    scratch_mb: int = 64  # files the program may write, in /tmp
    max_processes: int = 1  # 1: it can start threads, but no process
    python_path: Sequence[str] = field(default_factory=tuple)  # folders with packages it may import, read-only

    @property
    def report_bytes(self) -> int:
        """Limit of what a run may give back besides its output: the result of a function, or reports of tests."""
        return 16 * 1024**2

    @property
    def reply_bytes(self) -> int:
        """Limit of the reply about a run: in JSON, a byte may take six."""
        return 6 * (2 * self.max_output_kb * 1024 + self.report_bytes) + 1024**2

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> SandboxSettings:
        return cls(**json.loads(text))
