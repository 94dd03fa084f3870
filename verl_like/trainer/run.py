"""Run of a checked configuration as a whole: workers, trainer, fit, a restart where workers are lost, the end."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from verl_like.checkpoint.files import linked_folders
from verl_like.checkpoint.layout import STATE_FILE, find_latest, whole_checkpoints
from verl_like.checkpoint.lock import held
from verl_like.cluster.environment import omp_threads
from verl_like.cluster.lifecycle import StopFlag, graceful_interrupt
from verl_like.cluster.worker_group import WorkerDied, WorkerError, WorkerTimeout, new_run_id
from verl_like.config import PPOConfig, TrainerConfig
from verl_like.config.errors import ConfigError, RunStopped, input_errors, problems_of, raise_if_any
from verl_like.config.micro_batches import Lowered
from verl_like.config.schema import to_dict
from verl_like.observe.environment import own_files, write_environment
from verl_like.observe.logs import setup_driver_logging, told_in_a_line
from verl_like.observe.redaction import hidden, print_hidden, remember, secrets_of
from verl_like.observe.run_folder import CONFIG, STEP_PROOF
from verl_like.parallel.host_memory import tells_of_memory
from verl_like.registry import part
from verl_like.trainer.build import prepare, prepared, started
from verl_like.trainer.compose import save_resolved
from verl_like.trainer.facts import Facts
from verl_like.trainer.folders import check_output_folders, log_dir, profile_dir, with_free_folder
from verl_like.trainer.loop import Loop
from verl_like.trainer.nsight import restart_under_nsight
from verl_like.trainer.own_code import check_given, with_reward
from verl_like.trainer.start_checks import early_problems
from verl_like.trainer.start_messages import closing_text, cpu_seconds, process_age, ready_text, start_phase
from verl_like.trainer.workers import Launcher

logger = logging.getLogger(__name__)

_LOST = frozenset({"OutOfMemoryError", "MemoryError", "PassTooLarge", "EngineLostError"})
_LONGEST_S = 600.0
_LOOK_S = 0.5  # how soon an interrupt ends a wait
Wait = Callable[[float, StopFlag], None]


def run(config: PPOConfig) -> None:
    """Run a command line's configuration.

    An error of its inputs, or one that stops it, ends the program with the error's message.
    """
    sys.excepthook = print_hidden
    begun: list[bool] = []
    try:
        began = time.perf_counter() - process_age(), 0.0
        with told_in_a_line("the start", over=lambda: bool(begun)):
            _, signal_name = _fit(config, restart=restart_under_nsight, began=began, before=lambda: begun.append(True))
    except (ConfigError, RunStopped) as error:  # what only files, processes or training itself could show to be wrong
        logger.debug("the run ends", exc_info=True)
        sys.exit(hidden(f"error: {error}"))
    if signal_name is not None:  # what a shell wrote behind && is not for a run that is not done
        sys.exit(128 + signal.Signals[signal_name])


def fit(config: PPOConfig, **own: Any) -> Path:
    """Run the trainer's `fit`; return the folder of the run's files.

    It is begun again from the newest checkpoint as often as trainer.max_restarts allows when workers are lost.
    Arguments
    and errors: see `opened`.
    """
    return _fit(config, **own)[0]


def _fit(config: PPOConfig, before: Callable[[], None] = lambda: None, **own: Any) -> tuple[Path, str | None]:
    """Run `fit`; return the folder, and the signal that ended the run before its last step.

    before: called when all is started.
    """
    began, first_step = time.perf_counter(), None
    with _prepared(config, **own) as run:
        restarts, stop = Restarts(run.ready.config.trainer), StopFlag()
        while True:
            try:
                with run.started(again=restarts.saved, lowered=restarts.lowered) as trainer:
                    stop = trainer.stop
                    before()
                    try:
                        trainer.fit()
                    finally:
                        first_step = trainer.first_step if first_step is None else first_step
                break
            except WorkerError as error:
                if stop.requested:
                    raise
                restarts.wait_before_next(error)
    config, folder = trainer.config, log_dir(trainer.config)
    if config.trainer.val_only:
        return folder, None
    steps = {"step": trainer.state.step, "first_step": first_step or 0, "total_steps": trainer.total_steps}
    logger.info("%s", closing_text(config, folder, **steps, seconds=time.perf_counter() - began))
    return folder, stop.signal_name if trainer.state.step < trainer.total_steps else None


@contextmanager
def opened(config: PPOConfig, *own: Any, **more: Any) -> Iterator[Loop]:
    """Build everything, and take it down at the end; trainer.default_local_dir is this run's alone meanwhile.

    Arguments and errors: see `_prepared`.
    """
    with _prepared(config, *own, **more) as run, run.started(again=False, lowered={}) as trainer:
        yield trainer


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """Run that can be started: all checks passed, its folder held, its graders running, its Ray kept."""

    ready: Facts
    launcher: Launcher
    confirm: Callable[[], None]
    kind: type[Loop] | None
    began: tuple[float, float]

    @contextmanager
    def started(self, *, again: bool, lowered: Mapping[str, Lowered]) -> Iterator[Loop]:
        """Start the trainer; see `build.started`."""
        parts = (self.ready, self.launcher, self.confirm, self.kind)
        with started(*parts, again=again, lowered=lowered) as trainer:
            began = (time.perf_counter(), cpu_seconds()) if again else self.began  # not what a lost start took
            processes = {"processes": trainer.plan.world_size, "device": self.ready.device}
            trainer.on_start = partial(_describe, trainer.config, began, run_id=self.launcher.run_id, **processes)
            yield trainer


@contextmanager
def _prepared(
    config: PPOConfig,
    reward: Callable[..., Any] | None = None,
    kind: type[Loop] | None = None,
    restart: Callable[[PPOConfig, Path], None] = lambda config, folder: None,
    began: tuple[float, float] | None = None,
) -> Iterator[_Run]:
    """Prepare everything that comes before the workers.

    Args:
        config: the run.
        reward: object in place of custom_reward_function.path.
        kind: class in place of trainer.trainer_class.
        restart: may replace this process.
        began: when the wait for this run began, and the CPU seconds at that time; None: now.

    Raises ConfigError, RunStopped: what is wrong, for people.
    """
    run_id, began = new_run_id(), began or (time.perf_counter(), cpu_seconds())
    remember(secrets_of(os.environ, to_dict(config)))
    with input_errors():
        told = [*problems_of(lambda: check_given(config, reward, kind)), *early_problems(config)]
        if told and reward is None:  # whose graders cannot be known without the folder
            with ExitStack() as stack:
                prepare(config, stack, told)
        raise_if_any(told)
    if Path(config.trainer.default_local_dir).expanduser().is_dir():
        with held(config.trainer.default_local_dir, run_id):  # a live run is refused, not avoided
            config = with_free_folder(config)
    raise_if_any(check_output_folders(config))
    folder = log_dir(config)
    restart(config, profile_dir(config))
    with ExitStack() as stack:
        lock = stack.enter_context(held(config.trainer.default_local_dir, run_id))
        # Not before: the log of a run that is going on is not this one's to write.
        setup_driver_logging(folder, as_json=config.trainer.log_format == "json", run_id=run_id)
        logger.info("this run's files go to %s", folder)
        spent = time.perf_counter() - began[0], cpu_seconds() - began[1]
        logger.info("start: command line and imports took %.1f s, %.1f s of CPU", *spent)
        for line in linked_folders("trainer.log_dir", folder):
            logger.info("%s", line)
        for key, file in own_files(to_dict(config)).items():
            logger.info("code of yours: %s=%s, sha256 %s", key, file["path"], file["sha256"])
        if kind is not None:
            logger.info("the trainer is %s.%s, as given", kind.__module__, kind.__qualname__)
        if reward is not None:
            with input_errors():
                config = with_reward(config, reward, folder)
        ready = stack.enter_context(prepared(config))
        if config.trainer.prove_step:
            with start_phase("proof of whole steps"):
                part("proof", "step")(config, ready.plan.pools[0].ranks_per_node, folder / STEP_PROOF)
        launcher = stack.enter_context(Launcher(config, run_id))
        yield _Run(ready=ready, launcher=launcher, confirm=lock.confirm, kind=kind, began=began)


def _describe(config: PPOConfig, began: tuple[float, float], **run: Any) -> None:
    """Log what the start took, and write config.yaml and environment.json.

    They are not written before all that can be refused was looked at, as a start that failed describes no run, and not
    in place of a training run's where this one only validates.
    """
    logger.info("%s", ready_text(time.perf_counter() - began[0], cpu_seconds() - began[1], omp_threads(1, "cpu")))
    folder = log_dir(config)
    if not (config.trainer.val_only and (folder / CONFIG).exists()):
        save_resolved(config, folder / CONFIG)
    write_environment(folder, code=own_files(to_dict(config)), **run)


class Restarts:
    """Restarts of one run: at most trainer.max_restarts from the same checkpoint, each after twice the last wait.

    One that goes on with smaller micro-batches does not count among these, nor does it wait longer: it does not meet
    the same failure again, and sizes end at single rows, whose failure counts.

    lowered: by role, what the next start goes on with in place of the configuration's sizes.
    """

    def __init__(self, trainer: TrainerConfig, wait: Wait | None = None) -> None:
        self._trainer, self._wait = trainer, wait or wait_unless_stopped
        self.count, self.lowered = 0, dict[str, Lowered]()  # of the whole run
        self._in_vain = 0  # since the newest checkpoint
        self._newest = self._checkpoint()
        root = Path(trainer.default_local_dir).expanduser()
        self._before = {_written(path) for path in whole_checkpoints(root)}

    @property
    def saved(self) -> bool:
        """True where the newest checkpoint is of this run: not of an earlier one, which the user may have rejected."""
        newest = self._checkpoint()
        return newest is not None and newest not in self._before

    def wait_before_next(self, error: WorkerError) -> None:
        """Return when it is time to begin again.

        Raises `error` when it is not one that a new start can cure, when the restarts are used up, or when the user
        asks to stop meanwhile.
        """
        newest = self._checkpoint()
        if newest != self._newest:
            self._newest, self._in_vain = newest, 0
        most, smaller = self._trainer.max_restarts, error.lowered
        used_up = self._in_vain >= most if smaller is None else most == 0
        if used_up or not is_loss(error):
            raise error
        if smaller is not None:
            wait_s, which = self._trainer.restart_delay, "with smaller micro-batches"
            self.lowered[smaller.role] = smaller
        else:
            wait_s = min(self._trainer.restart_delay * 2**self._in_vain, _LONGEST_S)
            self._in_vain += 1
            which = f"restart {self._in_vain} of {most}"
        self.count += 1
        logger.error(
            "%s\nbeginning again in %g s from %s (%s: trainer.max_restarts)",
            *(str(error).splitlines()[0], wait_s, self._beginning(), which),
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
    """Identify a checkpoint by its path and when it was written: a step may be saved again."""
    return path, (path / STATE_FILE).stat().st_mtime_ns


def wait_unless_stopped(seconds: float, stop: StopFlag) -> None:
    """Sleep so many seconds; an interrupt ends the sleep."""
    end = time.monotonic() + seconds
    while not stop.requested and (left := end - time.monotonic()) > 0:
        time.sleep(min(left, _LOOK_S))


def is_loss(error: WorkerError) -> bool:
    """True where processes (an engine's own too), a node or their memory were lost, or answered no more.

    False for an exception of a program's own.
    """
    of_torch = error.error_type == "RuntimeError" and tells_of_memory(str(error).splitlines()[0])  # on a CPU
    return isinstance(error, (WorkerDied, WorkerTimeout)) or error.error_type in _LOST or of_torch
