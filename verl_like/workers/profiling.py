"""Profiles of chosen training steps, one rank at a time: torch traces, or the window that Nsight Systems records.

A torch trace is a gzipped Chrome trace, `<folder>/step_<n>/rank<r>[_<role>_<method>].json.gz`: open it at
ui.perfetto.dev or in chrome://tracing. With `discrete` a role gets a trace for each of its calls, otherwise one trace
covers the whole step.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from verl_like.config import ProfilerConfig
from verl_like.config.trainer import ProfileTool

logger = logging.getLogger(__name__)


class WorkerProfiler:
    """Recorder of the steps that the driver asks for, on the ranks that each role's profiler section names.

    roles: the name of each role that is hosted, and its section. Only one recording runs at a time; calls outside a
    profiled step cost nothing.
    """

    def __init__(
        self, roles: Mapping[str, ProfilerConfig], *, rank: int, device: torch.device, folder: Path, tool: ProfileTool
    ) -> None:
        self.rank, self.device, self.folder, self.tool = rank, device, folder, tool
        chosen = {role: section for role, section in roles.items() if is_chosen(section, rank)}
        self._discrete = frozenset(role for role, section in chosen.items() if section.discrete)
        self._whole_steps = any(not section.discrete for section in chosen.values())
        self._step: int | None = None
        self._recording: profile | None = None

    def start(self, step: int) -> None:
        """Begin to record a step."""
        self._step = step
        if self._whole_steps:
            self._begin()

    def stop(self) -> None:
        """End the step and write its trace."""
        if self._whole_steps:
            self._end(f"rank{self.rank}")
        self._step = None

    @contextmanager
    def phase(self, role: str, name: str) -> Iterator[None]:
        """Record one call of a role.

        It gets a trace of its own where the role is discrete, a named range in the step's trace else.
        """
        if self._step is None:
            yield
        elif role in self._discrete and not self._whole_steps:
            self._begin()
            try:
                yield
            finally:
                self._end(f"rank{self.rank}_{role}_{name}")
        else:
            with record_function(f"verl_like::{role}.{name}"):
                yield

    def _begin(self) -> None:
        if self.tool == ProfileTool.nsys:
            torch.cuda.profiler.start()
            return
        activities = [ProfilerActivity.CPU]
        if self.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        recording = profile(activities=activities)
        recording.start()
        self._recording = recording

    def _end(self, name: str) -> None:
        if self.tool == ProfileTool.nsys:
            torch.cuda.profiler.stop()
            return
        assert self._recording is not None and self._step is not None
        self._recording.stop()
        path = self.folder / f"step_{self._step}" / f"{name}.json.gz"
        path.parent.mkdir(parents=True, exist_ok=True)
        self._recording.export_chrome_trace(str(path))
        self._recording = None
        logger.info("profile of step %d: %s", self._step, path)


def is_chosen(section: ProfilerConfig, rank: int) -> bool:
    """True for all ranks (all_ranks), those listed, or rank 0 by default; false where the role is switched off."""
    return section.enable and (section.all_ranks or rank in (section.ranks if section.ranks is not None else (0,)))
