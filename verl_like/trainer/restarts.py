"""Whether a run that has lost its workers begins again, and when."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

from verl_like.checkpoint.layout import STATE_FILE, find_latest, whole_checkpoints
from verl_like.cluster.lifecycle import StopFlag, graceful_interrupt
from verl_like.cluster.worker_group import WorkerDied, WorkerError, WorkerTimeout
from verl_like.config import TrainerConfig
from verl_like.parallel.host_memory import tells_of_memory

logger = logging.getLogger(__name__)

_LOST = frozenset({"OutOfMemoryError", "MemoryError", "EngineLostError"})
_LONGEST_S = 600.0
_LOOK_S = 0.5  # how soon an interrupt ends a wait
Wait = Callable[[float, StopFlag], None]


class Restarts:
    """Of one run: at most trainer.max_restarts from the same checkpoint, each after twice the wait of the last."""

    def __init__(self, trainer: TrainerConfig, wait: Wait | None = None) -> None:
        self._trainer, self._wait = trainer, wait or wait_unless_stopped
        self.count = 0  # of the whole run
        self._in_vain = 0  # since the newest checkpoint
        self._newest = self._checkpoint()
        root = Path(trainer.default_local_dir).expanduser()
        self._before = {_written(path) for path in whole_checkpoints(root)}

    @property
    def saved(self) -> bool:
        """Whether the newest checkpoint is of this run: not of an earlier one, which the user may have rejected."""
        newest = self._checkpoint()
        return newest is not None and newest not in self._before

    def wait_before_next(self, error: WorkerError) -> None:
        """Return when it is time to begin again; raise `error` when it is not one that a new start can cure, when the
        restarts are used up, or when the user asks to stop meanwhile."""
        newest = self._checkpoint()
        if newest != self._newest:
            self._newest, self._in_vain = newest, 0
        if not is_loss(error) or self._in_vain >= self._trainer.max_restarts:
            raise error
        wait_s = min(self._trainer.restart_delay * 2**self._in_vain, _LONGEST_S)
        self.count, self._in_vain = self.count + 1, self._in_vain + 1
        logger.error(
            "%s\nbeginning again in %g s from %s (restart %d of %d: trainer.max_restarts)",
            *(str(error).splitlines()[0], wait_s, self._beginning(), self._in_vain, self._trainer.max_restarts),
        )
        with graceful_interrupt() as stop:
            self._wait(wait_s, stop)
        if stop.requested:
            raise error

    def _beginning(self) -> str:
        if self.saved and self._newest is not None:
            return str(self._newest[0])
        return f"where it began (trainer.resume_mode={self._trainer.resume_mode})"

    def _checkpoint(self) -> tuple[Path, int] | None:
        try:
            newest = find_latest(Path(self._trainer.default_local_dir).expanduser())
        except ValueError as error:  # a start repairs what can be repaired, and refuses the rest by itself
            logger.debug("there is no whole checkpoint to count from: %s", error)
            return None
        return None if newest is None else _written(newest)


def _written(path: Path) -> tuple[Path, int]:
    """A checkpoint and when it was written: a step may be saved again."""
    return path, (path / STATE_FILE).stat().st_mtime_ns


def wait_unless_stopped(seconds: float, stop: StopFlag) -> None:
    """Sleep; an interrupt ends it."""
    end = time.monotonic() + seconds
    while not stop.requested and (left := end - time.monotonic()) > 0:
        time.sleep(min(left, _LOOK_S))


def is_loss(error: WorkerError) -> bool:
    """Whether processes (an engine's own too), a node or their memory were lost, or answered no more: not an exception
    of a program's own."""
    of_torch = error.error_type == "RuntimeError" and tells_of_memory(str(error).splitlines()[0])  # on a CPU
    return isinstance(error, (WorkerDied, WorkerTimeout)) or error.error_type in _LOST or of_torch
