"""Reward functions that harm their own process: it costs their row, at most, and nothing of it is left."""

from __future__ import annotations

import logging
import math
import signal
import socket
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.unit.rewards.factory import make_manager, make_rollouts
from tests.unit.rewards.test_manager import gone, write
from verl_like.batch import PromptRow
from verl_like.rewards.grading import RewardError, to_scores
from verl_like.rewards.reward_call import RewardCall, RewardFunctionError, RewardOutcome, ScorerSpec
from verl_like.rewards.worker import to_outcome
from verl_like.services import pool
from verl_like.services.channel import BrokenChannelError, Channel

pytestmark = [pytest.mark.timeout(120), pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")]

# Each text makes the worker do something to itself or to its channel; others are scored by their length.
HARM = """
    import gc, os, signal, socket, sys, threading, time

    def end_of_channel():
        return next(o for o in gc.get_objects() if isinstance(o, socket.socket) and o.fileno() >= 0).fileno()

    def every(action):
        for number in map(int, os.listdir("/proc/self/fd")):
            try: number < 3 or action(number)
            except OSError: pass

    class Odd:
        def __str__(self): raise RuntimeError("no text")
        def __float__(self): return 1.0

    def compute_score(data_source, solution_str, ground_truth, extra_info=None):
        if solution_str == "rubbish": os.write(end_of_channel(), b"hello")
        if solution_str == "rubbish, then hang": os.write(end_of_channel(), b"hello"); time.sleep(1000)
        if solution_str == "huge": os.write(end_of_channel(), b"\\xb7vl\\x1e" + b"\\xff" * 8)
        if solution_str == "negative": os.write(end_of_channel(), b"\\xff" * 64)
        if solution_str == "half": os.write(end_of_channel(), b"\\xb7vl\\x1e" + bytes([9, 0])); os._exit(0)
        if solution_str == "no pickle": os.write(end_of_channel(), b"\\xb7vl\\x1e\\x03" + bytes(7) + b"abc")
        if solution_str == "no message": os.write(end_of_channel(), b"\\xb7vl\\x1e\\x04" + bytes(7) + b"\\x80\\x04N.")
        while solution_str == "flood": os.write(end_of_channel(), bytes(10 ** 6))
        if solution_str == "everywhere": every(lambda n: os.write(n, b"x" * 100))
        if solution_str == "close all": every(os.close)
        if solution_str == "kill group": os.killpg(0, signal.SIGKILL)
        if solution_str == "abort": os.abort()
        if solution_str == "terminate": os.kill(os.getpid(), signal.SIGTERM)
        if solution_str == "terminate parent": os.kill(os.getppid(), signal.SIGTERM)
        if solution_str == "deep":
            value = []
            for _ in range(100_000): value = [value]
            return {"score": 1, "parts": value}
        if solution_str == "loop":
            value = {"score": 1}
            value["self"] = value
            return value
        if solution_str == "odd": return Odd()
        if solution_str == "odd inside": return {"score": 1, "x": Odd()}
        if solution_str == "big": return 10 ** 5000
        if solution_str == "big inside": return {"score": 1, "n": 10 ** 5000, "text": "x" * 10 ** 7}
        if solution_str == "recursion": return compute_score(data_source, solution_str, ground_truth)
        if solution_str == "stdin": sys.stdin.close(); sys.stdout.close(); return 1
        return len(solution_str)
"""
CRASHES = [
    "rubbish",
    "rubbish, then hang",
    "huge",
    "negative",
    "half",
    "no pickle",
    "no message",
    "everywhere",
    "flood",
]
CRASHES += ["close all", "kill group", "abort"]
BAD_VALUES = ["deep", "loop", "odd", "odd inside", "big"]


def test_harm_costs_its_own_row(tmp_path: Path) -> None:
    texts = ["ok"]
    for text in [*CRASHES, *BAD_VALUES, "recursion"]:
        texts += [text, "good"]
    texts += ["terminate", "terminate parent", "big inside", "stdin", "last"]
    expected: dict[str, str | None] = dict.fromkeys(texts)
    expected |= dict.fromkeys(CRASHES, "crash") | dict.fromkeys(BAD_VALUES, "bad_value") | {"recursion": "exception"}
    with make_manager(write(tmp_path, HARM), timeout=20) as manager:
        scores = manager.score(make_rollouts(texts), step=1)
        metrics = manager.metrics(scores)
    assert {t: f and f.kind for t, f in zip(texts, scores.failures, strict=True)} == expected
    messages = {f.message for t, f in zip(texts, scores.failures, strict=True) if f and t == "rubbish"}
    assert any("did not keep to its channel" in text and "b'hello" in text for text in messages)
    assert scores.score_B[[0, 2, -1]].tolist() == [2.0, 4.0, 4.0]
    inside = scores.extras[texts.index("big inside")]
    assert inside["n"] == "a number of 16610 bits" and len(inside["text"]) == 65536
    assert "reward/n/mean" not in metrics


def test_a_worker_that_does_not_read_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An `async` function that blocks, and more text for it than a socket takes."""
    path = write(
        tmp_path,
        """
        import time
        async def compute_score(data_source, solution_str, ground_truth, extra_info=None):
            if solution_str == "block": time.sleep(1000)
            return len(solution_str)
        """,
    )
    texts = ["block", *["x" * 40_000] * 40]
    monkeypatch.setattr(pool, "_ASYNC_GRACE_S", 0.5)
    with make_manager(path, timeout=0.5, num_workers=2) as manager:
        scores = manager.score(make_rollouts(texts), step=1)
    assert [f and f.kind for f in scores.failures] == ["timeout", *[None] * 40]


def test_a_row_that_cannot_be_sent_fails_alone() -> None:
    calls = [RewardCall(data_source="arithmetic", solution_str="5", ground_truth="5") for _ in range(5)]
    calls[2] = replace(calls[2], extra_info={"function": lambda: 0})
    reward_pool = pool.WorkerPool(ScorerSpec(), num_workers=1)
    try:
        outcomes = [future.result(20) for future in reward_pool.submit(calls)]
        assert [outcome.score for outcome in outcomes] == [1.0, 1.0, None, 1.0, 1.0]
        assert outcomes[2].kind == "exception" and "extra_info cannot be sent" in outcomes[2].message
    finally:
        reward_pool.close()


def test_async_graders_beside_an_async_function(tmp_path: Path) -> None:
    """In one event loop: those of the user's own are awaited there, or called."""
    text = """
        async def compute_score(data_source, solution_str, ground_truth, extra_info=None): return 1
        async def waits(data_source, solution_str, ground_truth, extra_info=None): return 2
        def plain(data_source, solution_str, ground_truth, extra_info=None): return 3
        """
    path = write(tmp_path, text)
    call = RewardCall(data_source="x", solution_str="#### 5", ground_truth="5")
    named = [None, f"{path}:waits", f"{path}:plain", "gsm8k"]
    reward_pool = pool.WorkerPool(ScorerSpec(path=str(path)), num_workers=1)
    try:
        futures = reward_pool.submit([replace(call, grader=name) for name in named])
        assert [future.result(20).score for future in futures] == [1, 2, 3, 1]
    finally:
        reward_pool.close()


class TestMemoryLimit:
    LEAK = """
        import os
        kept, calls = [], 0
        def compute_score(data_source, solution_str, ground_truth, extra_info=None):
            global calls
            calls += 1
            if solution_str == "greedy": return len(bytearray(10 ** 10))
            kept.append(bytearray(40 * 2 ** 20))
            return {"score": 1, "calls": calls}
        """

    @pytest.mark.parametrize("num_workers", [1, 2])
    def test_a_leak_costs_processes_and_no_rows(self, tmp_path: Path, num_workers: int) -> None:
        with make_manager(write(tmp_path, self.LEAK), memory_limit_mb=512, num_workers=num_workers) as manager:
            before = manager.worker_pids()
            scores = manager.score(make_rollouts(["x"] * 16 + ["greedy"] + ["x"] * 2), step=1)
            after = manager.worker_pids()
        assert [f and f.kind for f in scores.failures] == [None] * 16 + ["memory"] + [None] * 2
        assert max(extras.get("calls", 0) for extras in scores.extras) < 14
        assert len(after) == num_workers and set(after) != set(before)

    def test_a_batch_function_is_tried_again_as_a_whole(self, tmp_path: Path) -> None:
        from tests.unit.rewards.test_reward_managers import manager

        path = write(
            tmp_path,
            """
            kept = []
            def compute_score(data_sources, solution_strs, ground_truths, extra_infos):
                kept.append(bytearray(300 * 2 ** 20))
                return [1.0] * len(solution_strs)
            """,
        )
        with manager(path, reward_manager="batch", custom={"memory_limit_mb": 512}) as made:
            for step in (1, 2, 3):
                assert made.score(make_rollouts(["x"] * 3), step=step).score_B.tolist() == [1.0] * 3


START_CHILDREN = """
    import os, subprocess, sys
    def compute_score(data_source, solution_str, ground_truth, extra_info=None):
        session = subprocess.Popen(["sleep", "1000"], start_new_session=True, env={})
        daemon = subprocess.run(["/bin/sh", "-c", "setsid sleep 1000 >/dev/null & echo $!"], stdout=subprocess.PIPE)
        home = os.getcwd()
        os.chdir(os.environ["TMPDIR"])
        for _ in range(1100):
            os.makedirs("nested", exist_ok=True), os.chdir("nested")
        os.chdir(home)
        pids = [session.pid, int(daemon.stdout)]
        with open(ground_truth, "w") as file:
            file.write(" ".join(map(str, [*pids, os.getpid()])) + "\\n" + os.environ["TMPDIR"])
        if solution_str == "crash": os._exit(3)
        if solution_str == "hang": import time; time.sleep(1000)
        return 1
"""


def left_by(note: Path) -> tuple[list[int], Path]:
    pids, folder = note.read_text().split("\n")
    return [int(pid) for pid in pids.split()], Path(folder)


def test_a_worker_that_is_slow_to_die_costs_no_other_worker_its_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pool's thread waits for the end of one worker, longer than the other one may take for its call."""
    path = write(
        tmp_path,
        """
        def compute_score(data_source, solution_str, ground_truth, extra_info=None):
            import os, time
            if solution_str == "crash": os._exit(1)
            time.sleep(0.6)
            return 1.0
        """,
    )
    kill = pool._Worker.kill

    def slowly(worker: Any) -> None:
        dying = not worker.channel.closed
        kill(worker)
        time.sleep(2.0 * dying)

    monkeypatch.setattr(pool._Worker, "kill", slowly)
    with make_manager(path, timeout=1.5, num_workers=2) as manager:
        scores = manager.score(make_rollouts(["fine", "crash"]), step=1)
    assert [f and f.kind for f in scores.failures] == [None, "crash"]


@pytest.mark.parametrize("how", ["close", "crash", "hang"])
def test_daemons_of_a_reward_function_end_with_its_worker(tmp_path: Path, how: str) -> None:
    note = tmp_path / "note"
    with make_manager(write(tmp_path, START_CHILDREN), timeout=2) as manager:
        rollouts = make_rollouts([how, "x"], ground_truths=[str(note), str(tmp_path / "other")])
        scores = manager.score(rollouts, step=1)
        pids, folder = left_by(note)
        assert len(pids) == 3
        assert [f and f.kind for f in scores.failures][1] is None
        if how == "close":
            assert all(Path(f"/proc/{pid}").exists() for pid in pids)
        else:
            assert all(gone(pid) for pid in pids)
    assert all(gone(pid, 0.5) for pid in pids)
    assert not folder.exists()


def test_nothing_is_left_when_the_trainer_is_killed(tmp_path: Path) -> None:
    note = tmp_path / "note"
    script = f"""
        import time
        from verl_like.services.pool import WorkerPool
        from verl_like.rewards.reward_call import RewardCall, ScorerSpec
        pool = WorkerPool(ScorerSpec(path={str(write(tmp_path, START_CHILDREN))!r}), num_workers=1)
        pool.submit([RewardCall(data_source="a", solution_str="x", ground_truth={str(note)!r})])[0].result()
        print("ready", flush=True)
        time.sleep(1000)
    """
    trainer = subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, text=True)
    try:
        assert trainer.stdout is not None and trainer.stdout.readline() == "ready\n"
        pids, folder = left_by(note)
    finally:
        trainer.kill()
        trainer.wait()
    assert all(gone(pid) for pid in pids)
    deadline = time.monotonic() + 5
    while folder.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not folder.exists()


def test_a_signal_to_the_whole_job_leaves_the_workers_to_the_trainer(tmp_path: Path) -> None:
    """Batch systems send SIGTERM to every process; the trainer then finishes its step. Children heed it as ever."""
    path = write(
        tmp_path,
        """
        import multiprocessing, os, signal, subprocess, time
        def compute_score(data_source, solution_str, ground_truth, extra_info=None):
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getppid(), signal.SIGTERM)
            program = subprocess.Popen(["sleep", "1000"])
            fork = multiprocessing.get_context("fork").Process(target=time.sleep, args=(1000,))
            fork.start()
            program.terminate(), fork.terminate()
            fork.join()
            return {"score": 1, "ends": [program.wait(), fork.exitcode]}
        """,
    )
    with make_manager(path) as manager:
        (pid,) = manager.worker_pids()
        scores = manager.score(make_rollouts(["x"]), step=1)
        assert manager.worker_pids() == [pid]
    assert scores.extras[0]["ends"] == [-signal.SIGTERM] * 2


class TestShareOfFailures:
    FAILS = """
        def compute_score(data_source, solution_str, ground_truth, extra_info=None):
            return None if solution_str == "none" else 1
        """

    def test_too_many_failures_stop_the_run_and_are_shown(self, tmp_path: Path) -> None:
        path = write(tmp_path, self.FAILS)
        with make_manager(path, max_failure_fraction=0.5) as manager:
            scores = manager.score(make_rollouts(["none", "x"]), step=1)
            assert scores.valid_B.tolist() == [False, True]
            with pytest.raises(RewardError) as caught:
                manager.score(make_rollouts(["none", "x", "none"]), step=4)
            with pytest.raises(RewardError, match=r"every response \(2\) failed"):
                manager.score(make_rollouts(["none"] * 2), step=5)
        message = str(caught.value)
        assert "step 4: 2 of 3 rewards failed (2 x bad_value)" in message
        assert "reward_model.max_failure_fraction=0.5" in message and "reward_model.failure_penalty" in message
        assert f"custom_reward_function.path={path}, name=compute_score" in message
        assert "row 0 of data_source arithmetic: bad_value: score must be a number, not None (NoneType)" in message
        assert "row 2" not in message  # whose text is the same

    def test_a_function_without_rewards_is_found_before_training(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        row = PromptRow(index=7, data_source="arithmetic", messages=[], ground_truth="5", extra_info={})
        with make_manager(write(tmp_path, self.FAILS)) as manager, caplog.at_level(logging.WARNING, "verl_like"):
            manager.try_out(row, ["x", "y"])
            assert not caplog.text
            manager.try_out(row, ["x", "none"])
            assert "1 of 2 calls failed" in caplog.text
            message = r"(?s)reward\.py, name=compute_score: tried with row 7 .*'none': score must be .*not None"
            with pytest.raises(RewardFunctionError, match=message):
                manager.try_out(row, ["none", "none"])
        with make_manager() as manager:
            manager.try_out(row, ["x"])  # no function of the user's


class TestValues:
    @pytest.mark.parametrize(
        ("value", "score"),
        [
            (True, 1.0),
            (Decimal("0.25"), 0.25),
            (Fraction(1, 4), 0.25),
            (np.float16(0.5), 0.5),
            (np.bool_(True), 1.0),
            (np.array(0.5), 0.5),
            (np.array([2]), 2.0),
            (torch.tensor(0.5), 0.5),
            (torch.tensor([[3]]), 3.0),
            (3.4028235e38, 3.4028235e38),
            ({"score": torch.tensor(1.0, requires_grad=True)}, 1.0),
        ],
    )
    def test_numbers_of_all_kinds(self, value: Any, score: float) -> None:
        outcome = to_outcome(value)
        assert (outcome.kind, outcome.score) == (None, score) and type(outcome.score) is float

    @pytest.mark.parametrize(
        "value",
        [
            *(1e39, -1e39, 10**400, 2**1023, math.inf, Decimal("NaN"), Decimal("1e50"), np.float64("inf")),
            *(1j, np.complex64(1), torch.tensor([1.0, 2.0]), np.zeros(0), [1.0], (), ("1", 1.0), b"1", "1"),
            *({}, {"score": None}, {"score": {"score": 1}}),
        ],
    )
    def test_what_is_no_finite_number_is_a_failure(self, value: Any) -> None:
        outcome = to_outcome(value)
        assert (outcome.kind, outcome.score) == ("bad_value", None) and outcome.message

    def test_a_sum_too_large_for_the_tensor_is_a_failure(self) -> None:
        scores = to_scores([RewardOutcome(score=1.0), RewardOutcome(score=1e39)], ["a", "a"])
        assert scores.valid_B.tolist() == [True, False] and scores.score_B[1].isnan()
        assert scores.failures[1] is not None and scores.failures[1].kind == "bad_value"


class TestChannel:
    def ends(self) -> tuple[Channel, Channel, socket.socket]:
        ours, theirs = socket.socketpair()
        return Channel(ours), Channel(theirs), theirs

    def test_messages_larger_than_the_socket_pass_in_parts(self) -> None:
        trainer, worker, _ = self.ends()
        message = {"text": "x" * 3_000_000}
        trainer.post(message)
        assert trainer.unsent
        received = []
        while trainer.unsent:
            trainer.flush()
            received += worker.arrived()
        received += worker.arrived()
        assert received == [message] and not trainer.unsent

    def test_half_a_message_and_the_end(self) -> None:
        trainer, worker, end = self.ends()
        worker.send("whole")
        end.sendall(b"\xb7vl")
        assert list(trainer.arrived()) == ["whole"] and list(trainer.arrived()) == []
        worker.close()
        with pytest.raises(EOFError):
            list(trainer.arrived())

    def test_what_was_written_before_an_end_with_something_unread(self) -> None:
        trainer, worker, _ = self.ends()
        trainer.post("never read")
        worker.send("read")
        worker.close()
        assert list(trainer.arrived()) == ["read"]
        with pytest.raises(EOFError):
            list(trainer.arrived())

    def test_rubbish_is_told_at_its_first_byte(self) -> None:
        trainer, _, end = self.ends()
        end.sendall(b"x")
        with pytest.raises(BrokenChannelError, match="b'x'"):
            list(trainer.arrived())

    def test_what_came_before_rubbish_counts(self) -> None:
        """They may be read together: the answer of one row must not be lost with the harm of the next."""
        trainer, worker, end = self.ends()
        worker.send("an answer")
        end.sendall(b"hello")
        arrived = trainer.arrived()
        assert next(arrived) == "an answer"
        with pytest.raises(BrokenChannelError, match="b'hello'"):
            next(arrived)


def test_idle_rubbish_costs_a_process_and_no_row(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        """
        import gc, os, socket, threading
        def compute_score(data_source, solution_str, ground_truth, extra_info=None):
            if solution_str == "later":
                end = next(o for o in gc.get_objects() if isinstance(o, socket.socket) and o.fileno() >= 0).fileno()
                threading.Timer(0.1, os.write, (end, b"boo")).start()
            return 1
        """,
    )
    with make_manager(path) as manager:
        (pid,) = manager.worker_pids()
        assert manager.score(make_rollouts(["later"]), step=1).valid_B.all()
        assert gone(pid)
        assert manager.score(make_rollouts(["x"] * 3), step=2).valid_B.all()
        assert len(manager.worker_pids()) == 1
