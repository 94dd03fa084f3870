"""Place where programs in responses run: read from the configuration, passed to the graders, checked at the start."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from verl_like.config import RewardModelConfig
from verl_like.plugins.code_grading.sandbox import probe
from verl_like.plugins.code_grading.sandbox.settings import SandboxError, SandboxSettings
from verl_like.rewards import graders

logger = logging.getLogger(__name__)

_MARGIN_S = 10.0  # to start a jail, and to compare


class ExecutionPlace:
    """Sandbox that programs run in: this machine's, or a remote one (reward_model.sandbox_fusion.url)."""

    def __init__(self, config: RewardModelConfig, *, num_workers: int, call_timeout: float) -> None:
        self._call_timeout = call_timeout
        local, remote = config.sandbox, config.sandbox_fusion
        self._local: dict[str, Any] = {
            "min_level": str(local.min_level),
            "timeout": local.timeout,
            "total_timeout": local.total_timeout,
            "memory_limit_mb": local.memory_limit_mb,
            "max_output_kb": local.max_output_kb,
            "scratch_mb": local.scratch_mb,
            "max_processes": local.max_processes,
            "python_path": tuple(local.python_path),
        }
        self._remote: dict[str, Any] | None = None
        if remote.url is not None:
            self._remote = {
                "url": remote.url,
                "max_concurrent": max(1, remote.max_concurrent // num_workers),  # each process has a client
                "memory_limit_mb": remote.memory_limit_mb,
                "timeout": remote.timeout,
                "max_retries": remote.max_retries,
                "retry_delay": remote.retry_delay,
            }
        self._checked = False

    def add_to(self, options: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
        """Grader options with the place filled in for graders that run programs."""
        place = {"sandbox": self._local, "remote": self._remote}
        running = [name for name, entry in graders.GRADERS.items() if entry.runs_programs]
        return {name: dict(chosen) for name, chosen in options.items()} | {
            name: place | dict(options.get(name, {})) for name in running
        }

    def require(self) -> None:
        """Find out, once, how well this machine locks programs up. Raises ValueError if that is too little."""
        if self._checked or self._remote is not None:
            return
        total = self._local["total_timeout"]
        if total + _MARGIN_S > self._call_timeout:  # a slow program is a wrong one, not a grader that hangs
            raise ValueError(
                f"reward_model.sandbox.total_timeout={total:g} with custom_reward_function.timeout="
                f"{self._call_timeout:g}: a whole reward call needs at least {_MARGIN_S:g} s more than its tests, or "
                "slow programs would be taken for failures of the grader; lower the first or raise the second"
            )
        try:
            found = probe.require(SandboxSettings(**self._local))
        except SandboxError as error:
            raise ValueError(str(error)) from error
        logger.info("sandbox for programs in responses: %s", found.summary())
        self._checked = True
