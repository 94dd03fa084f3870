"""Ways to call reward functions (batch, prime, a class of one's own), several rewards a row, limits and penalties."""

from __future__ import annotations

import logging
import math
import os
import re
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.rewards.factory import CharTokenizer, make_rollouts
from verl_like.config import CustomRewardFunctionConfig, DataConfig, RewardModelConfig
from verl_like.rewards.grading import Answer, RewardError
from verl_like.rewards.manager import RewardManager
from verl_like.rewards.reward_call import RewardCall, RewardFunctionError, ScorerSpec
from verl_like.services.pool import WorkerPool

pytestmark = pytest.mark.timeout(60)


def write(folder: Path, text: str, name: str = "reward.py") -> Path:
    path = folder / name
    path.write_text(textwrap.dedent(text))
    return path


def manager(path: Path | None = None, custom: dict[str, Any] | None = None, **reward_model: Any) -> RewardManager:
    return RewardManager(
        CustomRewardFunctionConfig(path=None if path is None else str(path), **(custom or {})),
        RewardModelConfig(**reward_model),
        DataConfig(),
        CharTokenizer(),
    )


class TestBatch:
    TEXT = """
        import os, time
        def compute_score(data_sources, solution_strs, ground_truths, extra_infos, scale=1):
            if "hang" in solution_strs: time.sleep(60)
            if "short" in solution_strs: return [1.0]
            mean = sum(map(len, solution_strs)) / len(solution_strs)
            return [{"score": scale * (len(s) - mean), "seen": len(solution_strs), "source": d}
                    for s, d in zip(solution_strs, data_sources)]
        """

    def test_one_call_with_lists_of_the_whole_batch(self, tmp_path: Path) -> None:
        custom = {"num_workers": 2, "reward_kwargs": {"scale": 2}}
        with manager(write(tmp_path, self.TEXT), custom, reward_manager="batch") as made:
            scores = made.score(make_rollouts(["a", "bbb", "cc"], data_source=["x", "y", "x"]), step=1)
            again = made.score(make_rollouts(["a"] * 40), step=2)
        assert scores.score_B.tolist() == [-2.0, 2.0, 0.0]
        assert [extras["seen"] for extras in scores.extras] == [3, 3, 3]
        assert [extras["source"] for extras in scores.extras] == ["x", "y", "x"]
        assert {extras["seen"] for extras in again.extras} == {40}

    def test_the_batch_fails_as_a_whole(self, tmp_path: Path) -> None:
        path = write(tmp_path, self.TEXT)
        with manager(path, {"timeout": 0.5}, reward_manager="batch") as made:
            with pytest.raises(RewardError, match=r"\(3\) failed \(3 x timeout\)"):
                made.score(make_rollouts(["a", "hang", "b"]), step=1)
            with pytest.raises(RewardError, match=r"(?s)2 x bad_value.*1 scores for 2 responses"):
                made.score(make_rollouts(["short", "b"]), step=1)
            assert made.score(make_rollouts(["a"]), step=1).score_B.tolist() == [0.0]

    def test_the_row_form_is_refused(self, tmp_path: Path) -> None:
        path = write(tmp_path, "def compute_score(data_source, solution_str, ground_truth, extra_info): return 1")
        with pytest.raises(RewardFunctionError, match=r"called as compute_score\(data_sources=, solution_strs="):
            manager(path, reward_manager="batch")


class TestPrime:
    def test_as_many_processes_as_cores_unless_told(self, tmp_path: Path) -> None:
        path = write(tmp_path, "import os\ndef compute_score(**row): return os.getpid()\n")
        with manager(path, reward_manager="prime") as made:
            assert len(made.worker_pids()) == min(64, len(os.sched_getaffinity(0)))
        with manager(path, {"num_workers": 3}, reward_manager="prime") as made:
            assert len(made.worker_pids()) == 3


class TestOwnClass:
    TEXT = """
        class Shaped:
            def __init__(self, compute_score, bonus):
                self.compute_score, self.bonus, self.calls = compute_score, bonus, 0
            def __call__(self, data_source, solution_str, ground_truth, extra_info):
                self.calls += 1
                result = self.compute_score(data_source, solution_str, ground_truth, extra_info)
                return {"score": result["score"] + self.bonus, "calls": self.calls}

        class Async(Shaped):
            async def __call__(self, data_source, solution_str, ground_truth, extra_info):
                return len(solution_str)

        class NoCall: ...
        """

    def test_wraps_the_grader_and_keeps_its_state(self, tmp_path: Path) -> None:
        path = write(tmp_path, self.TEXT, "own.py")
        with manager(reward_manager=f"{path}:Shaped", reward_kwargs={"bonus": 0.5}) as made:
            scores = made.score(make_rollouts(["5", "6", "5"]), step=1)
        assert scores.score_B.tolist() == [1.5, 0.5, 1.5]
        assert [extras["calls"] for extras in scores.extras] == [1, 2, 3]

    def test_wraps_a_custom_function_too(self, tmp_path: Path) -> None:
        function = write(tmp_path, "def compute_score(*row, k): return {'score': k}")
        path = write(tmp_path, self.TEXT, "own.py")
        text = {"reward_kwargs": {"k": 7}}
        function.write_text(
            "def compute_score(data_source, solution_str, ground_truth, extra_info, k): return {'score': k}"
        )
        with manager(function, text, reward_manager=f"{path}:Shaped", reward_kwargs={"bonus": 0.5}) as made:
            assert made.score(make_rollouts(["5"]), step=1).score_B.tolist() == [7.5]

    def test_may_be_async(self, tmp_path: Path) -> None:
        path = write(tmp_path, self.TEXT, "own.py")
        with manager(reward_manager=f"{path}:Async", reward_kwargs={"bonus": 0}) as made:
            assert made.score(make_rollouts(["5", "666"]), step=1).score_B.tolist() == [1.0, 3.0]

    @pytest.mark.parametrize(
        ("name", "message"),
        [("NoCall", "NoCall is no class with a __call__"), ("Nothing", "no such name 'Nothing'"), ("Shaped", "bonus")],
    )
    def test_what_cannot_work_is_told_at_the_start(self, tmp_path: Path, name: str, message: str) -> None:
        path = write(tmp_path, self.TEXT, "own.py")
        with pytest.raises(RewardFunctionError, match=rf"(?s)reward_model\.reward_manager=.*{message}"):
            manager(reward_manager=f"{path}:{name}")

    def test_unknown_names_are_told(self) -> None:
        with pytest.raises(ValueError, match=r"reward_manager='fast'.*naive, batch, prime, dapo"):
            RewardModelConfig(reward_manager="fast")


class TestWeights:
    TEXT = """
        def compute_score(data_source, solution_str, ground_truth, extra_info):
            if solution_str == "raise": raise KeyError("custom trouble")
            return {"score": len(solution_str), "chars": len(solution_str)}
        """

    def test_parts_add_up_by_weight_and_are_reported(self, tmp_path: Path) -> None:
        weights = {"arith*": {"arithmetic": 1.0, "custom": 0.25}, "other": {"custom": -1}}
        rollouts = make_rollouts(["5", "66", "777"], data_source=["arithmetic", "arithmetic", "other"])
        with manager(write(tmp_path, self.TEXT), weights=weights) as made:
            made.check_rows([("arithmetic", ""), ("other", ""), ("third", "")])
            scores = made.score(rollouts, step=1)
            metrics = made.metrics(scores, rollouts.rows)
        assert scores.score_B.tolist() == [1.25, 0.5, -3.0]
        assert scores.extras[0] == {"acc": 1.0, "pred": "5", "part_arithmetic": 1.0, "part_custom": 1.0}
        assert scores.extras[2] == {"chars": 3}
        assert metrics["reward/part_custom/mean"] == 1.5

    def test_a_part_that_fails_fails_the_row(self, tmp_path: Path) -> None:
        weights = {"*": {"arithmetic": 1.0, "custom": 0.5}}
        with manager(write(tmp_path, self.TEXT), weights=weights) as made:
            scores = made.score(make_rollouts(["5", "raise"]), step=1)
        assert scores.valid_B.tolist() == [True, False]
        assert scores.failures[1] is not None and scores.failures[1].message.startswith("custom: ")

    @pytest.mark.parametrize(
        ("weights", "message"),
        [
            ({"x": {"custom": 1}}, r"weights\.x\.custom: custom_reward_function\.path is not set"),
            ({"x": {"judge": 1}}, r"weights\.x\.judge: reward_model\.judge\.url is not set"),
            ({"x": {"gsm9k": 1}}, r"weights\.x\.gsm9k: there is no such part.*gsm8k"),
            ({"x": {"gsm8k": "much"}}, r"weights\.x\.gsm8k='much': a weight is a number"),
            ({"x": 3}, r"weights\.x=3: write"),
        ],
    )
    def test_mistakes_are_told(self, weights: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            manager(weights=weights)

    def test_misspelt_sources_are_named(self, caplog: pytest.LogCaptureFixture) -> None:
        weights = {"openai/gsm8k": {"gsm8k": 1}, "gsm*": {"gsm8k": 1}, "code*": {"gsm8k": 1}}
        with manager(weights=weights, rule_by_source={"openai/*": "gsm8k", "math": "math"}) as made:
            made.warn_of_unknown_sources(["openai/gsm8k", "gsm8k"])
        assert [r.getMessage().split(" has")[0] for r in caplog.records if r.levelno == logging.WARNING] == [
            "reward_model.weights.code*",
            "reward_model.rule_by_source.math",
        ]

    def test_sources_without_weights_still_need_a_grader(self) -> None:
        with manager(weights={"x": {"arithmetic": 2}}) as made:
            made.check_rows([("x", ""), ("gsm8k", "")])
            with pytest.raises(ValueError, match="mystery"):
                made.check_rows([("mystery", "")])


class TestFailures:
    TEXT = """
        import time
        def compute_score(data_source, solution_str, ground_truth, extra_info):
            if solution_str == "raise": raise KeyError("no such thing")
            if solution_str == "slow": time.sleep(1.1)
            if solution_str == "big": return len(bytearray(2 * 1024**3))
            return 1.0
        """

    def test_a_penalty_in_place_of_leaving_the_row_out(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        with (
            manager(write(tmp_path, self.TEXT), failure_penalty=-2.0) as made,
            caplog.at_level(logging.WARNING, "verl_like"),
        ):
            scores = made.score(make_rollouts(["a", "raise"]), step=1)
            metrics = made.metrics(scores)
            with pytest.raises(RewardError):
                made.score(make_rollouts(["raise"]), step=2)  # nothing works: that is no punishment, but a broken run
        assert scores.score_B.tolist() == [1.0, -2.0]
        assert scores.valid_B.tolist() == [True, True]
        assert scores.failures[1] is not None
        assert (metrics["reward/failures"], metrics["reward/failures/exception"]) == (1.0, 1.0)
        assert "1 of 2 rewards failed (1 x exception); these rows score -2" in caplog.text

    def test_memory_limit_is_a_failure_of_its_own(self, tmp_path: Path) -> None:
        with manager(write(tmp_path, self.TEXT), {"memory_limit_mb": 1024}) as made:
            scores = made.score(make_rollouts(["a", "big", "b"]), step=1)
            metrics = made.metrics(scores)
        assert [f and f.kind for f in scores.failures] == [None, "memory", None]
        assert metrics["reward/failures/memory"] == 1.0

    def test_the_slowest_row_is_measured_and_named(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        with manager(write(tmp_path, self.TEXT)) as made, caplog.at_level(logging.INFO, "verl_like"):
            scores = made.score(make_rollouts(["a", "slow", "b"]), step=4)
            metrics = made.metrics(scores)
        assert scores.seconds_B is not None and scores.seconds_B.argmax() == 1
        assert metrics["reward/seconds/max"] > 1.0 > metrics["reward/seconds/mean"]
        assert re.search(r"step 4: the slowest reward took [1-9]\.\d s: row 1 ", caplog.text)

    def test_temporary_files_of_killed_processes_are_deleted(self, tmp_path: Path, monkeypatch: Any) -> None:
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
        (tmp_path / "temporary").mkdir()
        text = "import tempfile\ndef compute_score(**row):\n    tempfile.mkdtemp()\n    return 1\n"
        with manager(write(tmp_path, text)) as made:
            made.score(make_rollouts(["a"]), step=1)
            (folder,) = (tmp_path / "temporary").iterdir()
            assert len(list(folder.iterdir())) == 1
        assert list((tmp_path / "temporary").iterdir()) == []


class TestPool:
    def test_submit_waits_while_the_queue_is_full(self, tmp_path: Path) -> None:
        gate = tmp_path / "gate"
        text = f"""
            import os, time
            def compute_score(data_source, solution_str, ground_truth, extra_info):
                while not os.path.exists({str(gate)!r}): time.sleep(0.01)
                return float(solution_str)
            """
        spec = ScorerSpec(path=str(write(tmp_path, text)), timeout=30)
        pool = WorkerPool(spec, num_workers=1, max_pending=4)
        futures: list[Any] = []

        def produce() -> None:
            for number in range(20):
                futures.extend(pool.submit([RewardCall(data_source="x", solution_str=str(number))]))

        try:
            pool.start()
            producer = threading.Thread(target=produce)
            producer.start()
            time.sleep(0.5)
            assert producer.is_alive() and len(futures) < 20  # held up: at work + 4 waiting
            gate.touch()
            producer.join(20)
            assert [future.result(20).score for future in futures] == list(range(20))
        finally:
            pool.close()

    def test_async_functions_take_rows_as_they_come(self, tmp_path: Path) -> None:
        """A first row that waits does not hold up those that come after it."""
        text = f"""
            import asyncio, os
            async def compute_score(data_source, solution_str, ground_truth, extra_info):
                while solution_str == "wait" and not os.path.exists({str(tmp_path / "go")!r}):
                    await asyncio.sleep(0.01)
                return 1.0
            """
        pool = WorkerPool(ScorerSpec(path=str(write(tmp_path, text)), timeout=20), num_workers=1)
        try:
            pool.start()
            (first,) = pool.submit([RewardCall(data_source="x", solution_str="wait")])
            time.sleep(0.2)
            (second,) = pool.submit([RewardCall(data_source="x", solution_str="go on")])
            assert second.result(10).score == 1.0
            assert not first.done()
            (tmp_path / "go").touch()
            assert first.result(10).score == 1.0
        finally:
            pool.close()

    def test_closing_frees_a_producer_that_waits(self, tmp_path: Path) -> None:
        text = "import time\ndef compute_score(**row): time.sleep(60)\n"
        pool = WorkerPool(ScorerSpec(path=str(write(tmp_path, text))), num_workers=1, max_pending=1)
        told: list[Exception] = []

        def produce() -> None:
            try:
                for _ in range(9):
                    pool.submit([RewardCall(data_source="x", solution_str="")])
            except RuntimeError as error:
                told.append(error)

        pool.start()
        producer = threading.Thread(target=produce)
        producer.start()
        time.sleep(0.3)
        pool.close()
        producer.join(10)
        assert not producer.is_alive() and len(told) == 1


def test_scores_do_not_depend_on_the_order_of_arrival() -> None:
    rollouts = make_rollouts([str(i % 7) for i in range(30)])
    tokens = [
        ids[:n].tolist() for ids, n in zip(rollouts.response_ids_BR, rollouts.response_length_B.tolist(), strict=True)
    ]
    results = []
    with manager(custom={"num_workers": 2}) as made:
        for order in (range(30), range(29, -1, -1)):
            answers = [Answer(row=rollouts.rows[row], prompt_ids=[1], response_ids=tokens[row]) for row in order]
            graded = dict(zip(order, made.grade(answers), strict=True))
            results.append(made.gather([graded[row] for row in range(30)], step=1).result())
    assert torch.equal(results[0].score_B, results[1].score_B)
    assert not math.isnan(float(results[0].score_B.sum()))
    assert (
        [e["pred"] for e in results[0].extras]
        == [e["pred"] for e in results[1].extras]
        == [str(i % 7) for i in range(30)]
    )
