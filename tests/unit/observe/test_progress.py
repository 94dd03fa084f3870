from __future__ import annotations

import io
import logging
import re
import sys
import threading

import pytest
from rich.console import Console

from verl_like.observe.live_display import (
    LiveProgress,
    PlainProgress,
    ProgressDisplay,
    RunState,
    build_progress,
    duration,
    sparkline,
)
from verl_like.observe.logs import driver_console, setup_driver_logging
from verl_like.observe.timing import StepClock

METRICS = {
    "critic/score/mean": 0.5,
    "response_length/mean": 18.2,
    "perf/throughput": 12345.6,
    "perf/time_per_step": 10.0,
    "timing_s/step": 10.0,
}


class FakeTime:
    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


class Screen(io.StringIO):
    """A file that says it can do UTF-8 (rich asks)."""

    encoding = "utf-8"


def terminal(screen: io.StringIO, width: int = 100) -> Console:
    return Console(file=screen, force_terminal=True, width=width, height=20, _environ={"TERM": "xterm"})


def drawn(display: LiveProgress) -> str:
    """The panel as plain text."""
    console = Console(file=Screen(), width=100, force_terminal=False)
    console.print(display.render())
    return console.file.getvalue()  # type: ignore[attr-defined]


@pytest.fixture(autouse=True)
def _restore_package_logger():
    logger = logging.getLogger("verl_like")
    before = logger.handlers[:], logger.level, logger.propagate
    logger.propagate = True
    yield
    logger.handlers[:], logger.level, logger.propagate = before


def test_eta_follows_the_latest_steps() -> None:
    now = FakeTime()
    state = RunState(total_steps=30, now=now)
    assert state.eta is None
    now.seconds = 100.0  # start-up does not count
    state.step_finished(1, {"timing_s/step": 4.0})
    assert state.eta == 29 * 4.0
    now.seconds += 8.0  # a checkpoint was saved in between
    state.step_finished(2, {"timing_s/step": 2.0})
    assert state.eta == 28 * 6.0
    for step in range(3, 29):
        now.seconds += 2.0
        state.step_finished(step, {"timing_s/step": 2.0})
    assert state.eta == 2 * 2.0  # the slow steps are forgotten
    state.step_finished(30, {"timing_s/step": 2.0})
    assert state.eta == 0.0


def test_no_eta_without_a_known_end() -> None:
    state = RunState(total_steps=None, now=FakeTime())
    state.step_finished(1, {"timing_s/step": 4.0})
    assert state.eta is None and state.position() == "step 1"


def test_a_validation_alone_is_no_step() -> None:
    state = RunState(total_steps=100, now=FakeTime())
    state.step_finished(90, {"val-core/toy/reward/mean@1": 0.5})  # before the training of a resumed run
    assert state.eta is None
    state.step_finished(91, {"timing_s/step": 2.0})
    assert state.eta == 18.0


def test_the_innermost_phase_is_shown() -> None:
    now = FakeTime()
    state = RunState(total_steps=2, now=now)
    clock = StepClock(LiveProgress(state, terminal(Screen()), auto_refresh=False), now=now)
    with clock("step"):
        now.seconds = 1.0
        with clock("gen"):
            now.seconds = 4.0
            assert state.phase == ("gen", 3.0)
        assert state.phase == ("step", 4.0)
    assert state.phase is None


def test_the_panel_shows_everything_at_once() -> None:
    now = FakeTime()
    display = LiveProgress(RunState(total_steps=200, now=now), terminal(Screen()), auto_refresh=False)
    try:
        now.seconds = 45.0
        display.step_finished(9, METRICS | {"critic/score/mean": 0.1})
        now.seconds = 55.0
        display.step_finished(10, METRICS | {"val-core/gsm8k/acc/mean@1": 0.25})
        now.seconds = 65.0
        display.step_finished(11, METRICS | {"critic/score/mean": 0.9})
        display.phase_started("update_actor")
        now.seconds = 72.5
        text = drawn(display)
    finally:
        display.close()
    assert "step 11/200" in text
    assert "elapsed 1:12, ETA 31:30" in text  # 189 steps of 10 s
    assert "update_actor 7s" in text
    assert "0.9  ▁▅█" in text
    assert "18 tokens/response, 12,346 tokens/s/device, 10.0 s/step" in text
    assert "gsm8k/acc/mean@1 0.25 (step 10)" in text


class FakeStdout(io.StringIO):
    def __init__(self, is_terminal: bool) -> None:
        super().__init__()
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal


def test_log_lines_and_prints_stay_whole_above_the_panel(monkeypatch: pytest.MonkeyPatch) -> None:
    stdout = FakeStdout(is_terminal=True)
    monkeypatch.setattr(sys, "stdout", stdout)
    screen = Screen()
    console = terminal(screen)
    setup_driver_logging(None, console=console)
    with LiveProgress(RunState(total_steps=5), console, auto_refresh=False) as display:
        display.phase_started("gen")
        logging.getLogger("verl_like.test").info("a line of the log")
        print("a line that some library prints")
        display.phase_ended("gen", 1.0)
    output = screen.getvalue()
    for wanted in ("a line of the log", "a line that some library prints"):
        assert wanted in output
        # After the line comes a newline and then the panel's frame; nothing of the panel is in the line.
        line = next(part for part in output.split("\n") if wanted in part)
        assert "╭" not in line[line.index(wanted) :] and "│" not in line[line.index(wanted) :]
    assert sys.stdout is stdout


def test_a_stdout_that_is_piped_elsewhere_keeps_its_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    stdout, screen = FakeStdout(is_terminal=False), Screen()
    monkeypatch.setattr(sys, "stdout", stdout)
    with LiveProgress(RunState(total_steps=5), terminal(screen), auto_refresh=False):
        print("for the pipe")
    assert stdout.getvalue() == "for the pipe\n" and "for the pipe" not in screen.getvalue()


def test_the_cursor_is_given_back() -> None:
    screen = Screen()
    display = LiveProgress(RunState(total_steps=5), terminal(screen), auto_refresh=False)
    display.close()
    display.close()
    assert screen.getvalue().rfind("\x1b[?25h") > screen.getvalue().rfind("\x1b[?25l") >= 0


def test_an_ascii_terminal_gets_an_ascii_trend() -> None:
    class AsciiScreen(io.StringIO):
        encoding = "ascii"

    display = LiveProgress(RunState(total_steps=5), terminal(AsciiScreen()), auto_refresh=False)
    display.step_finished(1, {"critic/score/mean": 0.0})
    display.step_finished(2, {"critic/score/mean": 1.0})
    text = drawn(display)
    display.close()
    assert "1  _#" in text


def test_a_display_that_breaks_leaves_the_run_alone(caplog: pytest.LogCaptureFixture) -> None:
    class BrokenScreen(Screen):
        def write(self, text: str) -> int:
            raise OSError("terminal is gone")

    stderr = sys.stderr
    with LiveProgress(RunState(total_steps=5), terminal(BrokenScreen()), auto_refresh=False) as display:
        for step in (1, 2):
            display.phase_started("gen")
            display.phase_ended("gen", 1.0)
            display.step_finished(step, METRICS)
    warnings = [r for r in caplog.records if "display failed" in r.getMessage()]
    assert len(warnings) == 1 and warnings[0].exc_info is not None
    assert sys.stderr is stderr


def test_odd_metrics_do_not_break_the_panel() -> None:
    display = LiveProgress(RunState(total_steps=0), terminal(Screen()), auto_refresh=False)
    display.step_finished(1, {"critic/score/mean": float("nan"), "response_length/mean": float("inf")})
    display.step_finished(2, {"val-core/[red]x[/]/reward/mean@1": 0.5})
    text = drawn(display)
    display.close()
    assert "inf tokens/response" in text and "reward/mean@1 0.5" in text


def test_plain_records_have_no_control_characters(caplog: pytest.LogCaptureFixture) -> None:
    now = FakeTime()
    display = PlainProgress(RunState(total_steps=20, now=now), Console(file=io.StringIO()), every_s=3600)
    display.step_finished(4, METRICS)
    now.seconds = 3700.0
    display.phase_started("gen")
    now.seconds = 3705.0
    record = display.record()
    display.close()
    assert record == "step 4/20, gen running for 5s, elapsed 1:01:45, ETA 2:40"
    assert re.fullmatch(r"[ -~]+", record)


def test_plain_progress_reports_a_phase_that_does_not_end(caplog: pytest.LogCaptureFixture) -> None:
    seen = threading.Event()

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "gen running for" in record.getMessage():
                seen.set()

    logger, handler = logging.getLogger("verl_like.observe.live_display"), Handler()
    logger.addHandler(handler)
    try:
        with (
            caplog.at_level(logging.INFO, logger="verl_like"),
            PlainProgress(RunState(total_steps=20), Console(file=io.StringIO()), every_s=0.01) as display,
        ):
            display.phase_started("gen")
            assert seen.wait(timeout=20)
    finally:
        logger.removeHandler(handler)
    assert "progress" not in {thread.name for thread in threading.enumerate()}


def test_the_display_fits_the_console() -> None:
    plain = build_progress(enabled=True, total_steps=3, console=Console(file=io.StringIO()))
    live = build_progress(enabled=True, total_steps=3, console=terminal(Screen()))
    off = build_progress(enabled=False, total_steps=3, console=terminal(Screen()))
    for display in (plain, live, off):
        display.close()
    assert [type(d) for d in (plain, live, off)] == [PlainProgress, LiveProgress, ProgressDisplay]


def test_log_lines_and_display_share_one_console_by_default() -> None:
    setup_driver_logging(None)
    display = build_progress(enabled=True, total_steps=3)
    display.close()
    assert isinstance(display, PlainProgress | LiveProgress)
    assert display._console is driver_console()


def test_without_the_console_logger_nothing_is_drawn() -> None:
    screen = Screen()
    with build_progress(enabled=False, total_steps=3, console=terminal(screen)) as display:
        display.phase_started("gen")
        display.step_finished(1, METRICS)
    assert screen.getvalue() == ""


def test_sparkline_and_duration() -> None:
    assert sparkline([0.0, 0.5, 1.0], "012") == "012"
    assert sparkline([3.0, 3.0], "012") == "00"
    assert [duration(s) for s in (7.9, 185, 7385)] == ["7s", "3:05", "2:03:05"]
