"""RewardManager end to end: real worker processes, and every way a reward function can go wrong."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from tests.unit.rewards.factory import make_manager, make_rollouts
from verl_like.batch import Rollouts, Scores
from verl_like.config import CustomRewardFunctionConfig, DataConfig, RewardModelConfig
from verl_like.rewards.grading import RewardError
from verl_like.rewards.manager import RewardManager
from verl_like.rewards.reward_call import RewardFunctionError

pytestmark = pytest.mark.timeout(60)

BAD_ROWS = """
    import os, signal, sys, time

    def compute_score(data_source, solution_str, ground_truth, extra_info=None):
        if solution_str == "hang": time.sleep(1000)
        if solution_str == "spin":
            while True: pass
        if solution_str == "raise": raise KeyError("no such thing")
        if solution_str == "exit": sys.exit(0)
        if solution_str == "die": os._exit(3)
        if solution_str == "segv": os.kill(os.getpid(), signal.SIGSEGV)
        if solution_str == "nan": return float("nan")
        if solution_str == "none": return None
        if solution_str == "text": return "1.0"
        if solution_str == "keys": return {"acc": 1}
        return float(len(solution_str))
"""


def write(folder: Path, source: str, name: str = "reward.py") -> Path:
    path = folder / name
    path.write_text(textwrap.dedent(source))
    return path


def score(path: Path | None, rollouts: Rollouts, **custom: object) -> Scores:
    with make_manager(path, **custom) as manager:
        return manager.score(rollouts, step=1)


def gone(pid: int, seconds: float = 5.0) -> bool:
    """Whether the process ends (or is a zombie) within `seconds`."""
    limit = time.monotonic() + seconds
    while time.monotonic() < limit:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.02)
    return False


def test_built_in_graders_by_data_source() -> None:
    rollouts = make_rollouts(
        ["5", " 6", "#### 5", "5"],
        data_source=["arithmetic", "arithmetic", "openai/gsm8k", "openai/gsm8k"],
    )
    with make_manager() as manager:
        scores = manager.score(rollouts, step=1)
        metrics = manager.metrics(scores, rollouts.rows)
    assert scores.score_B.tolist() == [1.0, 0.0, 1.0, 0.0]
    assert scores.valid_B.all()
    assert scores.extras[1] == {"acc": 0.0, "pred": "6"}
    assert metrics["reward/arithmetic/score/mean"] == 0.5
    assert metrics["reward/failures"] == 0


def test_unknown_data_source_stops_the_run() -> None:
    with make_manager() as manager:
        with pytest.raises(ValueError, match=r"'mystery'.*built in: .*openai/gsm8k.*custom_reward_function\.path"):
            manager.score(make_rollouts(["5"], data_source="mystery"), step=1)
        with pytest.raises(ValueError, match="mystery"):
            manager.check_rows([("arithmetic", "rule"), ("mystery", "rule")])


def test_each_kind_of_failure_is_typed_and_costs_its_own_row_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    texts = ["aa", "hang", "b", "raise", "die", "ccc", "segv", "nan", "none", "text", "keys", "exit", "spin", "dddd"]
    kinds = [None, "timeout", None, "exception", "crash", None, "crash"]
    kinds += ["bad_value", "bad_value", "bad_value", "bad_value", "exception", "timeout", None]
    with (
        make_manager(write(tmp_path, BAD_ROWS), timeout=0.5, num_workers=2) as manager,
        caplog.at_level(logging.WARNING, "verl_like"),
    ):
        scores = manager.score(make_rollouts(texts), step=7)
        metrics = manager.metrics(scores)
        assert manager.score(make_rollouts(["eeeee"] * 3), step=8).score_B.tolist() == [5.0] * 3  # it goes on
    assert [f and f.kind for f in scores.failures] == kinds
    good = [i for i, kind in enumerate(kinds) if kind is None]
    assert scores.valid_B.tolist() == [kind is None for kind in kinds]
    assert scores.score_B[good].tolist() == [2.0, 1.0, 3.0, 4.0]
    assert scores.score_B[~scores.valid_B].isnan().all()
    failure = scores.failures[3]
    assert failure is not None and failure.row == 3 and "no such thing" in failure.message
    assert "reward.py" in failure.message  # the traceback's tail
    assert metrics["reward/failures"] == 10
    assert metrics["reward/timeouts"] == 2
    assert metrics["reward/failure_fraction"] == pytest.approx(10 / 14)
    assert "step 7: 10 of 14 rewards failed" in caplog.text
    assert "row 1 (dataset index 1, data_source arithmetic), response 'hang'" in caplog.text


@pytest.mark.parametrize(
    "source",
    [
        "def compute_score(solution_str, ground_truth, method='strict'): return solution_str == ground_truth",
        "def compute_score(data_source, solution_str, ground_truth): return solution_str == ground_truth",
        "def compute_score(model_output, ground_truth, timeout_score=0): return (model_output == ground_truth, 1, 'x')",
        "def compute_score(predict_str, extra_info): return predict_str == str(extra_info['index'] + 5)",
        "async def compute_score(solution_str, ground_truth): return {'score': solution_str == ground_truth}",
        "def compute_score(completion, **rest): return completion == rest['ground_truth']",
    ],
)
def test_a_function_may_take_some_of_the_arguments_also_by_the_names_of_verls_own_graders(
    tmp_path: Path, source: str
) -> None:
    scores = score(write(tmp_path, source), make_rollouts(["5", "7"]))
    assert scores.score_B.tolist() == [1.0, 0.0]


def test_what_verl_adds_to_extra_info_is_there(tmp_path: Path) -> None:
    """Its functions for conversations read these without asking; what the row or its episode says comes first."""
    source = (
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    return extra_info['num_turns'] + len(extra_info['rollout_reward_scores'])"
    )
    rollouts = make_rollouts(["5", "5"])
    rollouts.rows[1].extra_info.update(num_turns=6, rollout_reward_scores={"tool": 1.0})
    assert score(write(tmp_path, source), rollouts).score_B.tolist() == [2.0, 7.0]


def test_all_rows_failing_raises_with_the_first_traceback(tmp_path: Path) -> None:
    with pytest.raises(RewardError, match=r"(?s)every response \(2\).*2 x exception.*no such thing"):
        score(write(tmp_path, BAD_ROWS), make_rollouts(["raise", "raise"]))


def test_order_is_kept_and_extras_arrive(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        """
        import enum, time
        import numpy as np

        class Kind(str, enum.Enum):
            good = "good"

        class Odd:
            def __str__(self): return "odd one"

        def grade(data_source, solution_str, ground_truth, extra_info, *, scale):
            assert extra_info["split"] == "train" and data_source == "arithmetic" and ground_truth == "5"
            time.sleep(0.002 * (extra_info["index"] % 3))
            return {"score": np.float32(scale * int(solution_str)), "acc": np.bool_(True), "n": np.int64(3),
                    "pred": "p" + solution_str, "kind": Kind.good, "odd": Odd(), "parts": (1, {"a": None})}
        """,
    )
    texts = [str(i) for i in range(100)]
    with make_manager(path, name="grade", reward_kwargs={"scale": 0.5}, num_workers=3) as manager:
        scores = manager.score(make_rollouts(texts), step=1)
        metrics = manager.metrics(scores)
    assert scores.score_B.tolist() == [0.5 * i for i in range(100)]
    expected = {"acc": True, "n": 3, "pred": "p7", "kind": "good", "odd": "odd one", "parts": [1, {"a": None}]}
    assert scores.extras[7] == expected
    assert type(scores.extras[7]["kind"]) is str
    assert metrics["reward/n/mean"] == 3
    assert "reward/pred/mean" not in metrics


def test_bool_and_int_scores(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None): return solution_str == '5'",
    )
    assert score(path, make_rollouts(["5", "6"])).score_B.tolist() == [1.0, 0.0]


ASYNC = """
    import asyncio, os, time

    async def compute_score(data_source, solution_str, ground_truth, extra_info=None):
        if solution_str == "never": await asyncio.sleep(1000)
        if solution_str == "block": time.sleep(1000)
        if solution_str == "raise": raise RuntimeError("judge said no")
        if solution_str == "die": os._exit(1)
        await asyncio.sleep(0.2)
        return {"score": float(solution_str)}
"""


def test_async_functions_run_concurrently(tmp_path: Path) -> None:
    texts = [str(i) for i in range(40)]
    with make_manager(write(tmp_path, ASYNC)) as manager:
        start = time.monotonic()
        scores = manager.score(make_rollouts(texts), step=1)
        assert time.monotonic() - start < 40 * 0.2 / 4  # one after the other takes 8 s
    assert scores.score_B.tolist() == [float(i) for i in range(40)]


def test_async_failures(tmp_path: Path) -> None:
    texts = ["1", "never", "2", "raise", "die", "3", "block", "4"]
    scores = score(write(tmp_path, ASYNC), make_rollouts(texts), timeout=0.6)
    kinds = [None, "timeout", None, "exception", "crash", None, "timeout", None]
    assert [f and f.kind for f in scores.failures] == kinds
    assert scores.score_B[scores.valid_B].tolist() == [1.0, 2.0, 3.0, 4.0]


def test_async_functions_that_never_wait_are_not_timed_out_for_each_other(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        """
        import time
        async def compute_score(data_source, solution_str, ground_truth, extra_info=None):
            time.sleep(0.05)
            return 1
        """,
    )
    assert score(path, make_rollouts(["x"] * 20), timeout=0.5).valid_B.all()  # together they take a second


def test_a_batch_of_512_rows_through_one_worker() -> None:
    scores = score(None, make_rollouts(["5", "6"] * 256))
    assert scores.score_B.sum() == 256


@pytest.mark.parametrize(
    ("source", "custom", "message"),
    [
        ("x = 1", {}, r"custom_reward_function\.name=compute_score: .*has no such name 'compute_score'"),
        ("compute_score = 3", {}, r"custom_reward_function\.name=compute_score: .*int, which cannot be called"),
        ("def compute_score(a): return 1", {}, r"(?s)defines compute_score\(a\), which cannot be called as"),
        (
            "def compute_score(data_source, solution_str, ground_truth, extra_info=None): return 1",
            {"reward_kwargs": {"scale": 2}},
            r"custom_reward_function\.reward_kwargs",
        ),
        (
            "import nothing_of_this_name",
            {},
            r"(?s)custom_reward_function\.path=.*could not be imported.*ModuleNotFound",
        ),
        ("raise SystemExit(3)", {}, r"custom_reward_function\.path=.*could not be imported"),
        ("def compute_score(:", {}, r"(?s)could not be imported.*SyntaxError"),
        ("import os; os._exit(4)", {}, r"custom_reward_function\.path=.*exited with status 4"),
    ],
)
def test_a_wrong_reward_file_is_found_at_start(
    tmp_path: Path, source: str, custom: dict[str, object], message: str
) -> None:
    with pytest.raises(RewardFunctionError, match=message):
        make_manager(write(tmp_path, source), **custom)


def test_missing_file_and_unsupported_managers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"custom_reward_function\.path=.*absent\.py: there is no such file"):
        make_manager(tmp_path / "absent.py")
    for reward_model in (RewardModelConfig(reward_manager="batch"),):
        with pytest.raises(ValueError, match=r"reward_model\.reward_manager=batch .*is not set"):
            RewardManager(CustomRewardFunctionConfig(), reward_model, DataConfig(), None)


def test_helpers_beside_the_file_and_modules_by_name(tmp_path: Path) -> None:
    write(tmp_path, "VALUE = 0.25", name="helper_of_reward.py")
    path = write(
        tmp_path,
        """
        from helper_of_reward import VALUE
        def compute_score(data_source, solution_str, ground_truth, extra_info=None): return VALUE
        """,
    )
    assert score(path, make_rollouts(["x"])).score_B.tolist() == [0.25]
    with RewardManager(
        CustomRewardFunctionConfig(path="pkg://verl_like.plugins.math_grading.arithmetic"),
        RewardModelConfig(),
        DataConfig(),
        make_manager.__globals__["CharTokenizer"](),
    ) as manager:
        assert manager.score(make_rollouts(["5"], data_source="anything"), step=1).score_B.tolist() == [1.0]


def test_workers_do_not_import_torch(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        """
        import sys
        def compute_score(data_source, solution_str, ground_truth, extra_info=None):
            return {"score": 1, "heavy": [name for name in ("torch", "numpy", "transformers") if name in sys.modules]}
        """,
    )
    assert score(path, make_rollouts(["x"])).extras[0]["heavy"] == []


def test_close_kills_workers_and_their_children(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        """
        import subprocess
        def compute_score(data_source, solution_str, ground_truth, extra_info=None):
            return {"score": 1, "pid": subprocess.Popen(["sleep", "1000"]).pid}
        """,
    )
    manager = make_manager(path, num_workers=2)
    child = manager.score(make_rollouts(["x"]), step=1).extras[0]["pid"]
    pids = [*manager.worker_pids(), child]
    assert len(pids) == 3 and all(Path(f"/proc/{pid}").exists() for pid in pids)
    manager.close()
    manager.close()
    assert all(gone(pid) for pid in pids)
    with pytest.raises(RuntimeError, match="closed"):
        manager.score(make_rollouts(["x"]), step=2)


def test_an_idle_worker_that_dies_is_replaced(tmp_path: Path) -> None:
    with make_manager() as manager:
        (pid,) = manager.worker_pids()
        os.kill(pid, signal.SIGKILL)
        assert gone(pid)
        assert manager.score(make_rollouts(["5"] * 4), step=1).score_B.tolist() == [1.0] * 4


def test_sigterm_to_all_processes_is_left_to_the_trainer() -> None:
    with make_manager() as manager:
        pids = manager.worker_pids()
        os.kill(pids[0], signal.SIGTERM)
        assert manager.score(make_rollouts(["5"]), step=1).score_B.tolist() == [1.0]
        assert manager.worker_pids() == pids


@pytest.mark.skipif(sys.platform != "linux", reason="uses the parent-death signal of Linux")
def test_workers_die_with_a_killed_trainer(tmp_path: Path) -> None:
    path = write(tmp_path, BAD_ROWS)
    script = f"""
        import time
        from verl_like.services.pool import WorkerPool
        from verl_like.rewards.reward_call import RewardCall, ScorerSpec
        pool = WorkerPool(ScorerSpec(path={str(path)!r}, timeout=1000), num_workers=2)
        pool.start()
        pool.submit([RewardCall(data_source="a", solution_str="spin")] * 2)
        time.sleep(0.3)
        print(*pool.worker_pids(), flush=True)
        time.sleep(1000)
    """
    root = Path(__file__).resolve().parents[3]
    trainer = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, text=True, cwd=root
    )
    try:
        assert trainer.stdout is not None
        pids = [int(pid) for pid in trainer.stdout.readline().split()]
        assert len(pids) == 2
    finally:
        trainer.kill()
        trainer.wait()
    assert all(gone(pid) for pid in pids)
