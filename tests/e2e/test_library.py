"""docs/library.md: its code from top to bottom, as a notebook runs it; and functions that are given as objects."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import re
import stat
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from support import ROOT, metrics_of, overrides, write_task

import verl_like
from verl_like.config.errors import ConfigError
from verl_like.trainer.ppo import PPOTrainer

PAGE = ROOT / "docs" / "library.md"


def test_the_page_runs_from_top_to_bottom(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the main thread with an event loop that runs, and in a module named __main__: both as in a notebook."""
    code = "\n".join(re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S))
    assert code.count("Qwen/Qwen2.5-0.5B-Instruct") == 1
    code = code.replace("Qwen/Qwen2.5-0.5B-Instruct", str(tiny_model))
    monkeypatch.chdir(tmp_path)
    cells: dict[str, Any] = {"__name__": "__main__"}

    async def notebook() -> None:
        exec(compile(code, "<cell>", "exec"), cells)

    asyncio.run(notebook())
    first, third = verl_like.read_run("runs/first"), cells["run"]
    assert max(first.steps) == 2 and first.steps[1]["reward/failures"] == 0.0
    assert 0 <= first.steps[2]["reward/right/mean"] <= first.steps[2]["critic/score/max"] <= 1
    numbers = [sample["output"].strip().isdecimal() for sample in first.samples]
    assert any(numbers) and numbers == [sample["score"] >= 0.2 for sample in first.samples]
    assert third.path.samefile("runs/third") and cells["metrics"]["critic/score/mean"] < 0.9
    log = (third.path / "verl_like.log").read_text()
    assert log.count("saved checkpoint") == 2  # of step 1, by finish; of step 2


def task(folder: Path, model: Path, **settings: Any) -> list[str]:
    values = write_task(folder)
    del values["custom_reward_function.path"]
    values["data.val_files"] = "[]"
    return overrides(values, model, folder / "out", **{"trainer__total_training_steps": 1} | settings)


def test_a_function_is_limited_and_counted_as_a_reward_file(tmp_path: Path, tiny_model: Path) -> None:
    """A local function, with its closure, of which some calls hang and some raise; it is found again by path."""
    answers = ["0", "1", "2"]

    def hostile(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
        import time

        place = extra_info["index"] % len(answers)
        if place == 1:
            raise KeyError("a bug")
        while place == 2:
            time.sleep(0.1)
        return float(solution_str.count(ground_truth))

    settings = {"custom_reward_function.timeout": 0.5, "custom_reward_function.num_workers": 4, "data.shuffle": False}
    settings |= {"actor_rollout_ref.rollout.n": 2, "reward_model.max_failure_fraction": 0.9}
    config = verl_like.compose(task(tmp_path, tiny_model, **settings))
    found = verl_like.run(config, reward=hostile)
    assert found.steps[1]["reward/failures/exception"] == 2 * 3.0  # rows 1, 4, 7 of 8, two responses each
    assert found.steps[1]["reward/timeouts"] == 2 * 2.0  # rows 2, 5
    path = Path(found.config["custom_reward_function"]["path"])
    assert path == tmp_path / "out" / "reward_function.py" and stat.S_IMODE(path.stat().st_mode) == 0o600
    assert "# def hostile(data_source" in path.read_text()
    script = f"import sys; sys.path.insert(0, {str(path.parent)!r}); from {path.stem} import compute_score as f; "
    script += "print(f('', '770', '7', {'index': 0}))"
    graded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd="/")
    assert graded.stdout == "2.0\n"


async def slowly(data_source: str, solution_str: str, ground_truth: str, extra_info: Any, *, factor: float) -> float:
    await asyncio.sleep(0.01)
    return factor * solution_str.count(ground_truth)


def test_an_async_function_with_arguments_of_ones_own(tmp_path: Path, tiny_model: Path) -> None:
    config = verl_like.compose(task(tmp_path, tiny_model))
    cloudpickle.register_pickle_by_value(sys.modules[__name__])  # pytest's modules cannot be imported elsewhere
    try:
        found = verl_like.run(config, reward=functools.partial(slowly, factor=-3.0))
    finally:
        cloudpickle.unregister_pickle_by_value(sys.modules[__name__])
    assert found.steps[1]["reward/failures"] == 0.0
    assert {sample["score"] for sample in found.samples} == {-3.0 * s["output"].count("7") for s in found.samples}


class Counts(PPOTrainer):
    pass


@pytest.mark.parametrize(
    ("given", "settings", "message"),
    [
        ({"reward": threading.Lock().acquire}, {}, r"reward=.* cannot be sent to the processes .*cannot pickle"),
        ({"reward": "my_reward.py"}, {}, r"reward='my_reward.py': a str cannot be called"),
        ({"reward": lambda text: 1.0}, {}, r"cannot be called as compute_score\(data_source=, solution_str="),
        ({"reward": len}, {"custom_reward_function.path": "mine.py"}, "both reward=.* and custom_reward_function.path"),
        ({"trainer": dict}, {}, r"trainer=<class 'dict'> must be a class derived from .*PPOTrainer"),
        ({"trainer": Counts}, {"trainer.trainer_class": "a.py:B"}, "both trainer=.*Counts'> and trainer.trainer_class"),
    ],
)  # fmt: skip
def test_what_cannot_be_used_is_refused(
    given: dict[str, Any], settings: dict[str, Any], message: str, tmp_path: Path, tiny_model: Path
) -> None:
    config = verl_like.compose(task(tmp_path, tiny_model, **settings))
    with pytest.raises(ConfigError, match=message):
        verl_like.run(config, **given)


def test_a_dictionary_says_what_a_command_line_says() -> None:
    line = ["preset=dapo", "data.train_files=[a.parquet,b.parquet]", "+data.stride=2", "trainer.logger=[console]"]
    line += ["data.sampler.class_path=my_sampler.py:EveryOther"]
    line += ["reward_model.weights={gsm8k: {custom: 0.5}}", "actor_rollout_ref.rollout.n=4", "trainer.log_dir=null"]
    values = {
        "preset": "dapo",
        "data": {"train_files": ("a.parquet", Path("b.parquet"))},
        "+data.stride": 2,
        "data.sampler.class_path": "my_sampler.py:EveryOther",
        "trainer": {"logger": ["console"], "log_dir": None},
        "reward_model.weights": {"gsm8k": {"custom": 0.5}},
        "actor_rollout_ref.rollout": {"n": 4},
    }
    assert verl_like.compose(values) == verl_like.compose(line)
    with pytest.raises(ConfigError, match=r"'trainer.seed=2': give a list of key=value texts, or a dictionary"):
        verl_like.compose("trainer.seed=2")
    with pytest.raises(ConfigError, match=r"unknown key data.train_flies.*train_files"):
        verl_like.compose({"data": {"train_flies": "a.parquet"}})


SCRIPT = """
import sys
import verl_like

BONUS = 0.25

def score(data_source, solution_str, ground_truth, extra_info=None):
    return solution_str.count(ground_truth) + BONUS

if __name__ == "__main__":
    print(sorted(verl_like.run(verl_like.compose(sys.argv[1:]), reward=score).steps))
"""


@pytest.mark.slow
def test_a_script_with_ray(tmp_path: Path, tiny_model: Path) -> None:
    """Two worker processes; the function is defined in the script's __main__ and refers to a name there."""
    (tmp_path / "script.py").write_text(SCRIPT)
    line = task(tmp_path, tiny_model, trainer__launcher="ray", trainer__n_gpus_per_node=2, ray_init__num_cpus=4)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "script.py", *line]
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.splitlines()[-1] == "[1]"
    (record,) = metrics_of(tmp_path / "out")
    assert record["critic/score/min"] >= 0.25 and json.dumps(record["critic/score/min"])
