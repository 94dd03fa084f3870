"""When a run that lost its workers begins again."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch

from verl_like.checkpoint.layout import commit, forget, prepare_step_dir, write_trainer_state
from verl_like.cluster.worker_group import GroupStopped, WorkerDied, WorkerError, WorkerTimeout
from verl_like.config import TrainerConfig
from verl_like.config.micro_batches import Lowered
from verl_like.trainer.run import Restarts, is_loss


def died(kind: type[WorkerError] = WorkerDied, error_type: str = "") -> WorkerError:
    return kind("worker rank 1 of 2: its process died", rank=1, method="actor.update", error_type=error_type)


def of_torch() -> WorkerError:
    """What a rank tells when torch's allocator on a CPU has nothing left."""
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**50)
    kind = type(caught.value).__name__
    return WorkerError(f"rank 1 failed: {kind}: {caught.value}", rank=1, method="actor.update", error_type=kind)


def restarts(folder: Path, most: int) -> tuple[Restarts, list[float]]:
    waits: list[float] = []
    trainer = TrainerConfig(default_local_dir=str(folder), max_restarts=most, restart_delay=3.0)
    return Restarts(trainer, lambda seconds, stop: waits.append(seconds)), waits


def checkpoint(folder: Path, step: int) -> None:
    written = prepare_step_dir(folder, step)
    write_trainer_state(written, {"step": step})
    commit(written)


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (died(), True),
        (died(WorkerTimeout), True),
        (died(WorkerError, "OutOfMemoryError"), True),
        (died(WorkerError, "MemoryError"), True),
        (died(WorkerError, "RuntimeError"), False),
        (of_torch(), True),
        (died(WorkerError, "ValueError"), False),
        (died(GroupStopped), False),
    ],
)
def test_only_what_a_new_start_can_cure_begins_again(tmp_path: Path, error: WorkerError, lost: bool) -> None:
    assert is_loss(error) is lost
    again, waits = restarts(tmp_path, 1)
    if lost:
        again.wait_before_next(error)
        assert (again.count, waits) == (1, [3.0])
    else:
        with pytest.raises(type(error)):
            again.wait_before_next(error)
        assert waits == []


def test_waits_double_and_end_unless_a_checkpoint_is_new(tmp_path: Path) -> None:
    again, waits = restarts(tmp_path, 2)
    again.wait_before_next(died())
    again.wait_before_next(died())
    with pytest.raises(WorkerDied):
        again.wait_before_next(died())
    checkpoint(tmp_path, 4)
    again.wait_before_next(died())
    assert (waits, again.count) == ([3.0, 6.0, 3.0], 3)


def too_large(role: str, size: int, count: int) -> WorkerError:
    lowered = Lowered(role=role, most={"update": size}, count=count)
    about = {"method": f"{role}.update", "error_type": "PassTooLarge", "lowered": lowered}
    return WorkerError("worker rank 1 of 2 failed: out of memory", rank=1, **about)


def test_starts_with_smaller_micro_batches_are_not_in_vain(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """They neither count among trainer.max_restarts nor wait longer; a role goes on with its last sizes."""
    again, waits = restarts(tmp_path, 1)
    for role, size, count in (("actor", 100, 1), ("critic", 80, 1), ("actor", 50, 2)):
        again.wait_before_next(too_large(role, size, count))
    again.wait_before_next(died())
    again.wait_before_next(too_large("actor", 25, 3))
    assert {name: (each.most["update"], each.count) for name, each in again.lowered.items()} == {
        "actor": (25, 3),
        "critic": (80, 1),
    }
    assert (waits, again.count) == ([3.0] * 5, 5)
    assert caplog.text.count("(with smaller micro-batches: trainer.max_restarts)") == 4
    assert caplog.text.count("(restart 1 of 1: trainer.max_restarts)") == 1
    with pytest.raises(WorkerDied):
        again.wait_before_next(died())
    never, _ = restarts(tmp_path, 0)
    with pytest.raises(WorkerError, match="out of memory"):
        never.wait_before_next(too_large("actor", 100, 1))
    assert not never.lowered


def test_without_the_key_the_first_loss_ends_the_run(tmp_path: Path) -> None:
    again, _ = restarts(tmp_path / "not there", 0)
    with pytest.raises(WorkerDied):
        again.wait_before_next(died())


def test_only_a_checkpoint_of_this_run_is_gone_on_from(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Step 100 is of a run that the user went back from (resume_from_path); it counts once it is written again."""
    for step in (50, 100):
        checkpoint(tmp_path, step)
    again, _ = restarts(tmp_path, 1)
    again.wait_before_next(died())
    assert not again.saved and "from where it began (trainer.resume_mode=auto)" in caplog.text
    forget(tmp_path / "global_step_50")
    assert not again.saved
    checkpoint(tmp_path, 100)
    again.wait_before_next(died())
    assert again.saved and f"from {tmp_path}/global_step_100 (restart 1 of 1" in caplog.text


def test_a_user_who_asks_to_stop_meanwhile_is_heard(tmp_path: Path) -> None:
    trainer = TrainerConfig(default_local_dir=str(tmp_path), max_restarts=1, restart_delay=600.0)
    again = Restarts(trainer)
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()
    began = time.monotonic()
    with pytest.raises(WorkerDied):
        again.wait_before_next(died())
    assert time.monotonic() - began < 60
