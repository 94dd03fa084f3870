"""Messages of a run at its beginning, phase by phase, and at its end: where everything is, and what to type next."""

from __future__ import annotations

import logging
import os
import shlex
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from verl_like.checkpoint.layout import find_latest
from verl_like.checkpoint.lock import process_start
from verl_like.config import PPOConfig
from verl_like.config.roles import trains_rewards
from verl_like.observe.live_display import duration
from verl_like.services.keeper import below

logger = logging.getLogger(__name__)


@contextmanager
def start_phase(what: str) -> Iterator[None]:
    """Log what begins, and once it is done the seconds that it took, and those of CPU: no start is silent."""
    logger.info("start: %s ...", what)
    began, cpu = time.perf_counter(), cpu_seconds()
    yield
    logger.info("start: %s took %.1f s, %.1f s of CPU", what, time.perf_counter() - began, cpu_seconds() - cpu)


def cpu_seconds() -> float:
    """CPU time of this process and of all below it on this machine.

    Without /proc: of this process, and of those below it that have ended.
    """
    if not Path("/proc/self/stat").exists():
        return sum(os.times()[:4])
    ticks = 0
    for pid in (os.getpid(), *below(os.getpid())):
        with suppress(OSError):  # it has just ended, and counts as its parent's
            ticks += sum(map(int, Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def process_age() -> float:
    """Seconds since this process was started; without /proc, the CPU seconds that it has taken."""
    started = process_start(os.getpid()) or ""
    if not started.isdigit():
        return time.process_time()
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(started) / os.sysconf("SC_CLK_TCK")


def worker_start_text(seconds_by_rank: Sequence[Mapping[str, tuple[float, float]]]) -> str:
    """Format `imports 6.0 s (4.9 s of CPU), actor 0.3 s (0.2 s of CPU)`: of each part the slowest rank."""
    parts = dict.fromkeys(name for seconds in seconds_by_rank for name in seconds)
    slowest = {name: max(seconds[name] for seconds in seconds_by_rank if name in seconds) for name in parts}
    return ", ".join(f"{name} {wall:.1f} s ({cpu:.1f} s of CPU)" for name, (wall, cpu) in slowest.items())


def ready_text(seconds: float, cpu: float, cores: int) -> str:
    """Say how long a start took to the first proved sync, and how long with its work spread evenly over the cores."""
    return f"start: ready after {seconds:.1f} s; {cpu:.1f} s of CPU, on {cores} core(s) {cpu / cores:.1f} s at best"


def closing_text(
    config: PPOConfig, log_dir: Path, *, step: int, first_step: int, total_steps: int, seconds: float
) -> str:
    """Format the block at the end of a run. first_step: the one that it resumed from, or 0."""
    trainer = config.trainer
    root = Path(trainer.default_local_dir).expanduser()
    latest = find_latest(root) if root.is_dir() else None
    done = f"{step} of {total_steps} steps" if step < total_steps else f"{step} steps"
    done += f", {step - first_step} of them" if first_step else ""
    rows = [("done", f"{done} in {duration(seconds)}")]
    rows.append(("checkpoint", str(latest) if latest is not None else "none (trainer.save_freq)"))
    rows.append(("metrics", str(log_dir / "metrics.jsonl")))
    kept = (trainer.rollout_data_dir, trainer.validation_data_dir, log_dir / "samples", log_dir / "report.html")
    rows += [("samples" if Path(each).suffix == "" else "report", str(each)) for each in kept if each and _there(each)]
    if latest is not None:
        rows.append(("resume", _resume(config, log_dir, step, total_steps)))
        if not trains_rewards(config):
            rows.append(("look", _command("chat", str(latest))))
        rows.append(("export", _command("export", str(latest), f"{root}-model")))
    width = max(len(name) for name, _ in rows)
    return "\n".join(["the run ends", *(f"  {name:<{width}}  {text}" for name, text in rows)])


def _resume(config: PPOConfig, log_dir: Path, step: int, total_steps: int) -> str:
    keys = [f"trainer.total_training_steps={2 * total_steps}"] if step >= total_steps else []
    if str(config.trainer.resume_mode) != "auto":
        keys.append("trainer.resume_mode=auto")
    return _command("train", "--config-path", str(log_dir), "--config-name", "config", *keys)


def _command(*words: str) -> str:
    """Write a command line for the shell that started the run, also where the environment is not activated."""
    program = ["verl-like"] if shutil.which("verl-like") else [sys.executable, "-m", "verl_like.cli"]
    return shlex.join([*program, *words])


def _there(path: str | Path) -> bool:
    return Path(path).expanduser().exists()
