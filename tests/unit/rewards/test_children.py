"""Reward functions that start processes: these find the function's file, and one that dies is told."""

from __future__ import annotations

import logging
import textwrap
from pathlib import Path

import pytest

from tests.unit.rewards.factory import make_manager, make_rollouts

pytestmark = pytest.mark.timeout(60)

# As verl 0.9's math_verify.py: a pool of processes that find the function by its module's name, and a 0 for any failure
POOLED = """
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor
    import {imported}

    def grade(truth, response):
        import {imported}
        assert {imported}.__file__ != __file__
        return float(truth == response)

    _pool = None

    def compute_score(data_source, solution_str, ground_truth, extra_info=None):
        global _pool
        _pool = _pool or {pool}
        try:
            return _pool.{call}
        except Exception as error:
            print(f"Error: {{error}}")
            return 0.0
"""
EXECUTOR = "ProcessPoolExecutor(1, mp_context=multiprocessing.get_context({how!r}))"
SUBMIT = "submit(grade, ground_truth, solution_str).result(timeout=30)"


@pytest.mark.parametrize(
    ("name", "imported", "pool", "call"),
    [
        ("math_verify.py", "math_verify", EXECUTOR.format(how="spawn"), SUBMIT),
        ("my-reward.py", "json", EXECUTOR.format(how="forkserver"), SUBMIT),
        (
            "json.py",
            "math",
            'multiprocessing.get_context("spawn").Pool(1)',
            "apply(grade, (ground_truth, solution_str))",
        ),
    ],
)
def test_what_it_starts_can_import_it(
    name: str, imported: str, pool: str, call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the file is called like a package, which it imports, and lies where the run is started."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / name).write_text(textwrap.dedent(POOLED.format(imported=imported, pool=pool, call=call)))
    with make_manager(tmp_path / name) as manager:
        assert manager.score(make_rollouts(["5", "6", "5"]), step=1).score_B.tolist() == [1.0, 0.0, 1.0]


DYING = """
    import multiprocessing, os, signal, sys, time

    def task(how):
        exec(how)

    def compute_score(data_source, solution_str, ground_truth, extra_info=None):
        child = multiprocessing.get_context("fork").Process(target=task, args=(ground_truth,))
        child.start()
        if "sleep" in ground_truth:
            child.terminate()
        child.join()
        return float(len(solution_str))
"""


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("sys.stderr = None; raise RuntimeError", "EXITED WITH STATUS 1"),
        ("os._exit(7)", "EXITED WITH STATUS 7"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "WAS KILLED BY SIGNAL 9"),
        ("pass", ""),
        ("time.sleep(60)", ""),
    ],
)
def test_equal_scores_beside_a_process_that_died_are_told(
    how: str, told: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "reward.py").write_text(textwrap.dedent(DYING))
    with make_manager(tmp_path / "reward.py") as manager, caplog.at_level(logging.ERROR):
        assert manager.score(make_rollouts(["a", "b"], ground_truths=[how] * 2), step=3).score_B.tolist() == [1.0, 1.0]
        assert ("step 3: 2 RESPONSES ALL SCORE 1.0, AND A PROCESS" in caplog.text) == bool(told) and told in caplog.text
        caplog.clear()
        manager.score(make_rollouts(["a", "bb"], ground_truths=[how] * 2), step=4)
        assert not caplog.text  # it can tell them apart
        manager.try_out(make_rollouts(["5"], ground_truths=[how]).rows[0], ["a", "b"])
        assert ("name=compute_score: 2 RESPONSES ALL SCORE" in caplog.text) == bool(told)
