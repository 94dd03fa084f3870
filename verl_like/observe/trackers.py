"""Trackers of metrics: `trainer.logger` picks console, a service (plugins/trackers) or a class of the user's.

A jsonl file is always written.
"""

from __future__ import annotations

import logging
import math
import os
import queue
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

from verl_like.batch import scalar
from verl_like.config import TrainerConfig
from verl_like.config.trainer import LOGGERS
from verl_like.observe.console import StepTable
from verl_like.observe.redaction import redacted_tree
from verl_like.observe.run_folder import METRICS
from verl_like.observe.samples import Sample, free_name, samples_text, to_json
from verl_like.registry import PARTS, part
from verl_like.small_files import parse_object
from verl_like.text import whole
from verl_like.user_code import check_call, is_reference, load

logger = logging.getLogger(__name__)
T = TypeVar("T")

_MAX_FAILURES = 3  # in a row, then a tracker is left out for the rest of the run
_PATIENCE_S = 120.0  # one that has not come back by then is left out too: a service that is cut off may hang for ever
_FINISH_S = 600.0  # the same at the end of the run, when a service sends what it still has


class Tracker(Protocol):
    """One destination. `metrics` holds finite and non-finite Python floats."""

    name: str

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def log_samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Show a few validation responses (`samples.pick_samples`)."""

    def finish(self) -> None: ...


def build_trackers(
    trainer: TrainerConfig,
    resolved_config: Mapping[str, Any],
    log_dir: str | os.PathLike[str],
    *,
    resumed_at: int | None,
    run_id: str = "",
) -> Trackers:
    """All trackers of a run. `log_dir` gets metrics.jsonl, val_generations.jsonl, tensorboard/, wandb/, swanlog/. They
    get the configuration without secrets.

    resumed_at: the last finished step of the run that is continued; None for a new run, which sets an older run's jsonl
    files aside.

    ValueError if trainer.logger names one that does not exist or whose package is missing.
    """
    folder, config = Path(log_dir).expanduser(), redacted_tree(resolved_config)
    names, callers = check_trackers(trainer), dict[str, _Caller]()
    trackers: list[Tracker] = [JsonlTracker(folder, new_run=resumed_at is None, last_step=resumed_at)]
    if "console" in names:
        trackers.append(ConsoleTracker())
    for name in names:
        if name in PARTS["tracker"]:
            trackers.append(part("tracker", name)(trainer, config, folder, resumed_at=resumed_at))
        elif is_reference(name):
            options = trainer.logger_kwargs.get(name, {})
            callers[name] = _Caller(name)
            build = partial(OwnTracker, name, options, config=config, folder=folder, resumed_at=resumed_at)
            try:
                trackers.append(callers[name].call(build, _PATIENCE_S))
            except _Hangs as error:
                raise ValueError(f"trainer.logger={name}: its constructor gives {error}") from None
    if trainer.prometheus_port is not None:
        trackers.append(part("metrics", "prometheus")(trainer, run_id))
    return Trackers(trackers, callers)


def check_trackers(trainer: TrainerConfig) -> list[str]:
    """List the names in trainer.logger, once each.

    Raises ValueError for one that does not exist or whose package is missing, and for a port that is taken.

    Keeps nothing, so that a run can ask before its processes start.
    """
    names = list(dict.fromkeys(trainer.logger))
    if strangers := sorted(set(trainer.logger_kwargs) - set(names)):
        raise ValueError(f"trainer.logger_kwargs has arguments of {strangers}, but trainer.logger={names}: add them")
    for name in filter(is_reference, names):
        OwnTracker.load(name, trainer.logger_kwargs.get(name, {}))
    unknown = [name for name in names if name not in LOGGERS and not is_reference(name)]
    if unknown:
        raise ValueError(
            f"trainer.logger={names}: {', '.join(unknown)} not available yet. "
            f"Available: {', '.join(LOGGERS)} (jsonl is always on)."
        )
    for name in names:
        if name in PARTS["tracker"]:
            part("tracker", name).require()
    if trainer.prometheus_port is not None:
        part("metrics", "prometheus").require_port(trainer)
    return names


class Trackers:
    """Sends everything to every tracker.

    The jsonl file is the run's record: if it cannot be written, the error is raised. Any other tracker (a service that
    is unreachable, say) may fail: that is logged with its traceback, and after three failures in a row it is left out;
    one that does not come back is left out at once.
    """

    def __init__(self, trackers: Sequence[Tracker], callers: Mapping[str, _Caller] | None = None) -> None:
        """Take the trackers.

        callers: threads of those that were built in one of their own.
        """
        self._trackers, self._callers = list(trackers), dict(callers or {})
        self._failures = dict.fromkeys((tracker.name for tracker in trackers), 0)
        self._warned: set[str] = set()

    @property
    def names(self) -> list[str]:
        """Trackers still in use."""
        return [tracker.name for tracker in self._trackers]

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Log one step. Values may be Python or numpy numbers or one-element tensors.

        Raises TypeError, which names any other.
        """
        numbers = {whole(name): _number(name, value) for name, value in metrics.items()}
        self._warn_not_finite(step, numbers)
        for tracker in list(self._trackers):
            self._attempt(tracker, lambda t=tracker: t.log(step, numbers))

    def log_samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Show validation responses, see `samples.pick_samples`."""
        if samples:
            samples = whole(list(samples))  # a grader may read half of a surrogate pair out of a response
            for tracker in list(self._trackers):
                self._attempt(tracker, lambda t=tracker: t.log_samples(step, samples))

    def finish(self) -> None:
        """Flush and close. May be called twice."""
        for tracker in self._trackers:
            self._attempt(tracker, tracker.finish, _FINISH_S)
        for caller in self._callers.values():
            caller.end()
        self._trackers, self._callers = [], {}

    def _attempt(self, tracker: Tracker, action: Callable[[], None], patience_s: float | None = None) -> None:
        if isinstance(tracker, JsonlTracker):
            action()
            return
        try:
            if tracker.name not in self._callers:
                self._callers[tracker.name] = _Caller(tracker.name)
            self._callers[tracker.name].call(action, patience_s or _PATIENCE_S)
            self._failures[tracker.name] = 0
        except Exception as error:
            self._failures[tracker.name] += 1
            give_up = self._failures[tracker.name] >= _MAX_FAILURES or isinstance(error, _Hangs)
            logger.error("Tracker %s failed%s", tracker.name, " and is off now" if give_up else "", exc_info=True)
            if give_up:
                self._trackers = [other for other in self._trackers if other is not tracker]

    def _warn_not_finite(self, step: int, metrics: Mapping[str, float]) -> None:
        bad = {name: value for name, value in metrics.items() if not math.isfinite(value) and name not in self._warned}
        if bad:
            self._warned |= set(bad)
            shown = ", ".join(f"{name}={value}" for name, value in bad.items())
            logger.warning("Step %d: metrics that are not finite (each name is reported once): %s", step, shown)


class _Hangs(Exception):
    """Error of a call that did not come back."""


class _Caller:
    """Thread for all calls of one tracker.

    Some packages are tied to one thread (sqlite3), and it can be left behind where a call does not come back.
    """

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        threading.Thread(target=self._work, name=f"tracker {name}", daemon=True).start()

    def call(self, action: Callable[[], T], seconds: float) -> T:
        """Run `action` in the tracker's thread and return its result or raise its error; _Hangs if it takes longer."""
        future: Future[T] = Future()
        self._calls.put((action, future))
        if not wait([future], timeout=seconds).done:
            raise _Hangs(f"no answer within {seconds:g} s")
        return future.result()

    def end(self) -> None:
        """End the thread after the calls that were made."""
        self._calls.put(None)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            action, future = call
            try:
                future.set_result(action())
            except BaseException as error:  # SystemExit too: nobody else would hear of it
                future.set_exception(error if isinstance(error, Exception) else RuntimeError(repr(error)))


def _number(name: str, value: Any) -> float:
    number = scalar(value)
    if number is None:
        raise TypeError(f"metric {name} must be one number, got {type(value).__name__}: {value!r:.80}")
    return number


class JsonlTracker:
    """One flat JSON object a line: {"step", "time" (seconds since 1970), name: number or null, ...}, which
    `pandas.read_json(path, lines=True)` reads as it is.

    Each line is written at once, so a run that is killed loses nothing but the line it was writing. A resumed run
    continues the file after `last_step`, the step of its checkpoint: where later lines have to go, because their steps
    are done again, the whole old file is kept as metrics.jsonl.1, .2, ... A new run in an old folder begins a file of
    its own, and the old one becomes such a file.
    """

    name = "jsonl"

    def __init__(self, folder: Path, *, new_run: bool = False, last_step: int | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / METRICS
        self._samples_path = folder / "val_generations.jsonl"
        for path in (self._path, self._samples_path):
            if new_run:
                _set_aside(path)
            _cut_unfinished_line(path)
            if last_step is not None:
                _cut_steps_after(last_step, path)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        record = {"step": step, "time": round(time.time(), 3), **metrics}
        _append(self._path, to_json(record) + "\n")

    def log_samples(self, step: int, samples: Sequence[Sample]) -> None:
        _append(self._samples_path, "".join(to_json({**sample, "step": step}) + "\n" for sample in samples))

    def finish(self) -> None:
        """Do nothing: no file is held open."""


def _append(path: Path, text: str) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(text)


def _set_aside(path: Path) -> None:
    """Give a file of an earlier run the first free number, so that two runs do not mix."""
    if path.exists():
        aside = free_name(path)
        path.rename(aside)
        logger.info("%s of an earlier run is now %s", path, aside.name)


def _cut_steps_after(last_step: int, path: Path) -> None:
    """Remove the lines of steps that a resumed run does again; the whole file is kept under the first free number."""
    # As bytes: str.splitlines also cuts at U+2028 and U+0085, which responses may hold and JSON does not escape.
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    kept = []
    for number, line in enumerate(lines, start=1):
        try:
            keeps = parse_object(line, f"{path}, line {number}", {"step": int})["step"] <= last_step
        except ValueError as error:
            logger.warning("%s: it is left out", error)
            keeps = False
        kept += [line] * keeps
    if len(kept) == len(lines):
        return
    aside, shortened = free_name(path), path.with_name(f".{path.name}.{os.getpid()}")
    shutil.copy2(path, aside)
    shortened.write_bytes(b"".join(kept))
    shortened.replace(path)
    logger.info("%s ends at step %d now, from where the run goes on; it is kept as %s", path, last_step, aside.name)


def _cut_unfinished_line(path: Path) -> None:
    """Remove what a killed run left behind after the last line end: it is no JSON and would spoil the next line."""
    if not path.exists():
        return
    content = path.read_bytes()
    complete = content.rfind(b"\n") + 1
    if complete < len(content):
        logger.warning("%s ends in the middle of a line; its last %d bytes are cut", path, len(content) - complete)
        os.truncate(path, complete)


class ConsoleTracker:
    """Columns in the log at INFO (`console.StepTable`); all metrics, one a line, at DEBUG (so they are in the file)."""

    name = "console"

    def __init__(self) -> None:
        self._table = StepTable()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for line in self._table.lines(step, metrics):
            logger.info("%s", line)
        if logger.isEnabledFor(logging.DEBUG):
            rows = "\n".join(f"  {name} = {value:.6g}" for name, value in sorted(metrics.items()))
            logger.debug("step %d, all metrics:\n%s", step, rows)

    def log_samples(self, step: int, samples: Sequence[Sample]) -> None:
        logger.info("%s", samples_text(f"step {step}, {len(samples)} validation answers:", samples))

    def finish(self) -> None: ...


class OwnTracker:
    """A tracker class of the user's, named by reference: built as cls(config=, folder=, resumed_at=, **options), see
    docs/extending.md. It needs log(step, metrics); log_samples(step, samples) and finish() are called if it has them.
    """

    def __init__(self, reference: str, options: Mapping[str, Any], **facts: Any) -> None:
        self.name = reference
        self._tracker = self.load(reference, options)(**facts, **options)

    @staticmethod
    def load(reference: str, options: Mapping[str, Any]) -> type:
        """The class. Raises ValueError unless it can be built so and has a `log`."""
        found = load(reference, "trainer.logger")
        if not isinstance(found, type) or not callable(getattr(found, "log", None)):
            raise ValueError(f"trainer.logger={reference} must be a class with log(step, metrics)")
        keywords = dict.fromkeys(("config", "folder", "resumed_at", *options))
        check_call(found, f"trainer.logger={reference}", keywords=keywords)
        check_call(found.log, f"trainer.logger={reference}", "self", "step", "metrics")
        return found

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._tracker.log(step, metrics)

    def log_samples(self, step: int, samples: Sequence[Sample]) -> None:
        if hasattr(self._tracker, "log_samples"):
            self._tracker.log_samples(step, samples)

    def finish(self) -> None:
        if hasattr(self._tracker, "finish"):
            self._tracker.finish()
