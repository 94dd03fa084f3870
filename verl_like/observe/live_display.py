"""The live display of a run for people: a panel at the bottom of a terminal, plain lines elsewhere.

It only shows. A failure while drawing is logged once with its traceback, then the display stays off; the run goes on.
"""

from __future__ import annotations

import atexit
import logging
import math
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

from rich.console import Console, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from verl_like.observe.logs import driver_console

logger = logging.getLogger(__name__)

_BARS = "▁▂▃▄▅▆▇█"
_ASCII_BARS = "_.-=+*%#"
_SPARK_STEPS = 32
_ETA_STEPS = 20  # the estimate follows the mean of the latest steps, not of the whole run


def build_progress(
    *, enabled: bool, total_steps: int | None, first_step: int = 0, console: Console | None = None
) -> ProgressDisplay:
    """The display that fits: nothing if not `enabled` (trainer.logger without console), else live or plain.

    `first_step`: the last finished step of a resumed run. `console` must be the one that logging uses;
    left out, it is `logs.driver_console()` on both sides.
    """
    shown_on = console or driver_console()
    kind = LiveProgress if shown_on.is_terminal and not shown_on.is_dumb_terminal else PlainProgress
    return (kind if enabled else ProgressDisplay)(RunState(total_steps, first_step), shown_on)


class RunState:
    """State of a run that the displays show, without any drawing.

    The run's thread writes and the display's thread reads: collections are exchanged, never changed in place.
    """

    def __init__(self, total_steps: int | None, first_step: int = 0, now: Callable[[], float] = time.monotonic) -> None:
        self.total_steps = total_steps
        self.step = first_step
        self.rewards: tuple[float, ...] = ()
        self.metrics: dict[str, float] = {}
        self.validation: dict[str, float] = {}
        self.validation_step: int | None = None
        self._now = now
        self._started = now()
        self._last_finished: float | None = None
        self._step_seconds: tuple[float, ...] = ()
        self._phases: tuple[tuple[str, float], ...] = ()

    def phase_started(self, name: str) -> None:
        self._phases = (*self._phases, (name, self._now()))

    def phase_ended(self, name: str) -> None:
        self._phases = tuple(phase for phase in self._phases if phase[0] != name)

    def step_finished(self, step: int, metrics: Mapping[str, float]) -> None:
        if "timing_s/step" in metrics:  # not for the record of a validation alone
            # From end to end where possible: saving and validating between steps take time too.
            now, last = self._now(), self._last_finished
            seconds = metrics["timing_s/step"] if last is None else now - last
            self._step_seconds = (*self._step_seconds, seconds)[-_ETA_STEPS:]
            self._last_finished = now
        self.step = step
        self.metrics = {**self.metrics, **metrics}
        reward = metrics.get("critic/score/mean")
        if reward is not None and math.isfinite(reward):
            self.rewards = (*self.rewards, reward)[-_SPARK_STEPS:]
        validation = {name: value for name, value in metrics.items() if name.startswith("val-core/")}
        if validation:
            self.validation, self.validation_step = validation, step

    @property
    def phase(self) -> tuple[str, float] | None:
        """The innermost running phase and its seconds so far."""
        phases = self._phases
        return (phases[-1][0], self._now() - phases[-1][1]) if phases else None

    @property
    def elapsed(self) -> float:
        return self._now() - self._started

    @property
    def eta(self) -> float | None:
        """Seconds until the last step, None while unknown."""
        if self.total_steps is None or not self._step_seconds:
            return None
        return max(0, self.total_steps - self.step) * sum(self._step_seconds) / len(self._step_seconds)

    def position(self) -> str:
        return f"step {self.step}/{self.total_steps}" if self.total_steps is not None else f"step {self.step}"


class ProgressDisplay:
    """Display that shows nothing, and the part of others that keeps the state, and drawing errors away from the run.

    It is also a `timing.PhaseObserver`: give it to the StepClock.
    """

    def __init__(self, state: RunState, console: Console) -> None:
        self.state = state
        self._console = console
        self._broken = False
        self._guard(self._start)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def phase_started(self, name: str) -> None:
        self.state.phase_started(name)
        self._guard(self._changed)

    def phase_ended(self, name: str, seconds: float) -> None:
        self.state.phase_ended(name)
        self._guard(self._changed)

    def step_finished(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show a finished step.

        metrics: everything that the step logged; validation metrics are recognised by their names.
        """
        self.state.step_finished(step, metrics)
        self._guard(self._changed)

    def close(self) -> None:
        """Leave the terminal as it was. May be called twice."""
        try:
            self._stop()
        except Exception:
            self._give_up()

    def _guard(self, action: Callable[[], None]) -> None:
        if self._broken:
            return
        try:
            action()
        except Exception:
            self._give_up()

    def _give_up(self) -> None:
        # Declared exception to "nothing is swallowed": a terminal that cannot be drawn to must not end a training run.
        if not self._broken:
            self._broken = True
            logger.warning("The progress display failed and is off from now on; the run goes on.", exc_info=True)

    def _start(self) -> None: ...

    def _changed(self) -> None: ...

    def _stop(self) -> None: ...


class PlainProgress(ProgressDisplay):
    """Display without a terminal: one log record now and then with position, running phase, elapsed time and ETA.

    The step's numbers are the console tracker's lines. A thread writes the records, so that a log also shows a phase
    that never ends.
    """

    def __init__(self, state: RunState, console: Console, every_s: float = 60.0) -> None:
        self._every_s = every_s
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        super().__init__(state, console)

    def record(self) -> str:
        """One line, ASCII only."""
        state = self.state
        parts = [state.position()]
        if state.phase is not None:
            parts.append(f"{state.phase[0]} running for {duration(state.phase[1])}")
        parts.append(f"elapsed {duration(state.elapsed)}")
        if state.eta is not None:
            parts.append(f"ETA {duration(state.eta)}")
        return ", ".join(parts)

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="progress", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stopped.wait(self._every_s):
            self._guard(lambda: logger.info("progress: %s", self.record()))

    def _stop(self) -> None:
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()


class LiveProgress(ProgressDisplay):
    """Display in a terminal: a panel at the bottom, redrawn 4 times a second; log lines scroll above it."""

    def __init__(self, state: RunState, console: Console, auto_refresh: bool = True) -> None:
        self._auto_refresh = auto_refresh
        self._live: Live | None = None
        super().__init__(state, console)

    def _start(self) -> None:
        # stdout and stderr are redirected through the console while the panel is up, so that whatever a library or
        # Ray prints appears above it. A stdout that goes to a file or a pipe must keep going there.
        self._live = live = Live(
            console=self._console,
            get_renderable=self._render_safely,
            auto_refresh=self._auto_refresh,
            refresh_per_second=4,
            redirect_stdout=sys.stdout.isatty(),
        )
        atexit.register(self.close)  # a run that dies before it closes the display must not leave the cursor hidden
        live.start()

    def _changed(self) -> None:
        if self._live is not None and not self._auto_refresh:
            self._live.refresh()

    def _stop(self) -> None:
        atexit.unregister(self.close)
        if self._live is not None:
            self._live.stop()

    def _render_safely(self) -> RenderableType:
        if not self._broken:
            try:
                return self.render()
            except Exception:
                self._give_up()
        return Text("")

    def render(self) -> RenderableType:
        """The panel for the state as it is now."""
        state, unicode = self.state, self._console.encoding.lower().startswith("utf")
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="dim", no_wrap=True)
        grid.add_column(overflow="fold")
        grid.add_row("progress", self._position_row())
        name, seconds = state.phase or ("waiting", 0.0)
        grid.add_row("phase", f"{name} {duration(seconds)}")
        if state.rewards:
            trend = sparkline(state.rewards, _BARS if unicode else _ASCII_BARS)
            grid.add_row("reward", f"{state.rewards[-1]:.4g}  {trend}")
        speed = speed_text(state.metrics)
        if speed:
            grid.add_row("speed", speed)
        if floors := floor_text(state.metrics):
            grid.add_row("floors", floors)
        if state.validation:
            scores = ", ".join(f"{k.removeprefix('val-core/')} {v:.4g}" for k, v in headline(state.validation).items())
            grid.add_row("validation", f"{scores} (step {state.validation_step})")
        return Panel(grid, title="verl_like", title_align="left", border_style="cyan")

    def _position_row(self) -> RenderableType:
        state = self.state
        times = f"elapsed {duration(state.elapsed)}"
        if state.eta is not None:
            times += f", ETA {duration(state.eta)}"
        row: list[Any] = [state.position(), times]
        if state.total_steps:
            row.insert(1, ProgressBar(total=state.total_steps, completed=state.step, width=24))
        grid = Table.grid(padding=(0, 2))
        grid.add_row(*row)
        return grid


def headline(validation: Mapping[str, float]) -> dict[str, float]:
    """Choose four of the validation's numbers at most, means first."""
    means = {name: value for name, value in validation.items() if "/mean@" in name}
    return dict(list((means or dict(validation)).items())[:4])


def speed_text(metrics: Mapping[str, float]) -> str:
    """Response length, tokens per second and seconds per step, as far as they are known."""
    shown = [
        ("response_length/mean", "{:.0f} tokens/response"),
        ("perf/throughput", "{:,.0f} tokens/s/device"),
        ("perf/time_per_step", "{:.1f} s/step"),
    ]
    return ", ".join(form.format(metrics[name]) for name, form in shown if name in metrics)


def floor_text(metrics: Mapping[str, float]) -> str:
    """The longest phases of the last step, each as a multiple of the time that the hardware needs at least."""
    known = [
        (seconds, name.removeprefix("timing_s/"), metrics[floor])
        for name, seconds in metrics.items()
        if (floor := name.replace("timing_s/", "perf/floor_ratio/")) != name and floor in metrics
    ]
    longest = sorted(known, reverse=True)[:4]
    parts = [f"{name} {ratio:.1f}x" if ratio < 100 else f"{name} >100x" for _, name, ratio in longest]
    return f"{', '.join(parts)} of the hardware's time" if parts else ""


def sparkline(values: Sequence[float], bars: str = _BARS) -> str:
    """One character a value, from the lowest to the highest of them; a flat line if all are equal."""
    low, high = min(values), max(values)
    if high == low:
        return bars[0] * len(values)
    return "".join(bars[round((value - low) / (high - low) * (len(bars) - 1))] for value in values)


def duration(seconds: float) -> str:
    """Format seconds as `7s`, `3:05` (minutes) or `2:03:05` (hours)."""
    whole = int(seconds)
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    if hours:
        return f"{hours}:{minutes:02d}:{rest:02d}"
    return f"{minutes}:{rest:02d}" if minutes else f"{rest}s"
