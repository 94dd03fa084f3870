"""docs/extending.md: every example of the page, as it stands there, in one training run without Ray.

One run of the whole loop (about ten seconds) proves all extension points together; what they refuse is tested in
tests/unit/test_user_code.py.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import pytest
from support import main_ppo, metrics_of, overrides, write_task

from verl_like.algorithms.kl import KL_ESTIMATORS
from verl_like.trainer.build import prepared, started
from verl_like.trainer.compose import compose
from verl_like.trainer.run import run as train
from verl_like.workers.spec import WorkerSpec

PAGE = Path(__file__).parents[2] / "docs" / "extending.md"


@pytest.fixture(autouse=True)
def own_menus(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the page's plugin registers is forgotten after a test: the next one imports it from another folder."""
    monkeypatch.setattr(KL_ESTIMATORS, "_entries", dict(KL_ESTIMATORS._entries))


def examples() -> tuple[dict[str, str], list[str]]:
    """(text of each file by name, all settings) of the page."""
    blocks = re.findall(r"```(python|bash|yaml)\n(.*?)```", PAGE.read_text(), re.S)
    files = {match[1]: text for kind, text in blocks if kind == "python" and (match := re.match(r"# (\S+)\n", text))}
    settings = [word for kind, text in blocks if kind == "bash" for word in shlex.split(text, comments=True)]
    assert len(files) == sum(kind == "python" for kind, _ in blocks), "each file of the page begins with its name"
    files["mine.yaml"] = next(text for kind, text in blocks if kind == "yaml")
    return files, settings


def command(folder: Path, model: Path, **settings: object) -> list[str]:
    """All examples' files in `folder`; the command line that uses them."""
    files, own = examples()
    for name, text in files.items():
        (folder / name).write_text(text)
    task = write_task(folder)
    del task["custom_reward_function.path"]
    task["data.val_files"] = "[]"
    unused = [name for name in files if name.endswith(".py") and not any(name in setting for setting in own)]
    assert not unused, f"no setting on the page uses {unused}"
    settings = {"data.max_prompt_length": 16, "trainer.total_training_steps": 1} | settings
    return [*overrides(task, model, folder / "out", **settings), *own]


def test_every_example_of_the_page_in_one_run(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = command(tmp_path, tiny_model, trainer__rollout_data_dir=str(tmp_path / "samples"))
    monkeypatch.chdir(tmp_path)
    config = compose([word for word in line if not word.startswith("actor_rollout_ref.rollout.n=")], ["mine.yaml"])
    assert (config.actor_rollout_ref.rollout.n, config.actor_rollout_ref.actor.optim.weight_decay) == (4, 0.0)
    train(config)
    (record,) = metrics_of(tmp_path / "out")
    samples = [json.loads(text) for text in (tmp_path / "samples" / "000001.jsonl").read_text().splitlines()]
    assert len(samples) == 8 * 4
    scores = [sample["score"] for sample in samples]
    above_mean = max(scores) - sum(scores) / len(scores)
    assert record["critic/advantages/max"] == pytest.approx(above_mean, abs=1e-4)  # above_batch_mean
    assert record["actor/ratio_distance"] == 0.0  # quadratic, on the policy that sampled
    assert record["actor/kl_loss"] == 0.0 and record["critic/kl"] == 0.0  # both estimators, of the same policy
    assert {sample["unshifted"] for sample in samples} <= {0.0, 2.0}  # starts_with, times its bonus
    assert record["reward/rule_score/mean"] == pytest.approx(record["reward/unshifted/mean"] + 0.5)  # Shifted
    assert record["reward/model_score/mean"] < -0.5  # PrefersShort
    assert all("0" in sample["input"][-14:] for sample in samples)  # WithSuffix
    logged = (tmp_path / "out" / "scores.txt").read_text().split()
    assert logged == ["1", str(record["critic/score/mean"])]  # TextFile
    assert record["own/longest_response"] >= 1  # ReportsLongest


WORKER = """
import pathlib, sys
from verl_like.cluster.rank_process import RankProcess, StartRequest
from verl_like.cluster.worker_group import RankEnv
from verl_like.cluster.environment import free_port

env = RankEnv(rank=0, world_size=1, local_rank=0, local_world_size=1, node_rank=0, master_address="127.0.0.1",
              master_port=free_port(), run_id="extending", device="cpu")
request = StartRequest(worker="verl_like.workers.host:RoleHost", rank_env=env, cuda_devices=(), environment={},
                       log_path=sys.argv[1] + "/worker.log", working_directory=sys.argv[1])
process = RankProcess()
outcome = process.start(request, pathlib.Path(sys.argv[1], "spec.pickle").read_bytes())
print("found:", outcome.message, [type(process._worker.roles["reward"]).__name__], file=open("outcome.txt", "w"))
"""


def test_a_worker_process_finds_all_by_path(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a Ray actor does, in a fresh process (its imports take seconds) that gets the pickled spec and nothing else:
    relative paths, and the driver's VERL_USE_EXTERNAL_MODULES, which the process itself does not have."""
    line = command(tmp_path, tiny_model)
    line.remove("actor_rollout_ref.model.external_lib=my_plugin.py")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VERL_USE_EXTERNAL_MODULES", "my_plugin.py")

    def connect(spec: WorkerSpec, device: str) -> NoReturn:
        (tmp_path / "spec.pickle").write_bytes(pickle.dumps(spec))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), prepared(compose(line)) as ready, started(ready, connect):
        pass
    environment = {name: value for name, value in os.environ.items() if name != "VERL_USE_EXTERNAL_MODULES"}
    arguments = [sys.executable, "-c", WORKER, str(tmp_path)]
    root = {"PYTHONPATH": str(PAGE.parents[1])}
    run = subprocess.run(arguments, cwd="/", env=environment | root, capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, run.stderr + (tmp_path / "worker.log").read_text()[-3000:]
    assert (tmp_path / "outcome.txt").read_text() == "found:  ['PrefersShort']\n"


@pytest.mark.slow
def test_every_example_in_ray_workers(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two spawned ranks load the same files by path; the plugin comes through verl's environment variable."""
    line = command(tmp_path, tiny_model, trainer__launcher="ray", trainer__n_gpus_per_node=2, ray_init__num_cpus=4)
    line.remove("actor_rollout_ref.model.external_lib=my_plugin.py")
    monkeypatch.setenv("VERL_USE_EXTERNAL_MODULES", "my_plugin")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    line = [word.replace("=my_", f"={tmp_path}/my_").replace(",my_", f",{tmp_path}/my_") for word in line]
    result = main_ppo(line, timeout=600)
    assert result.returncode == 0, result.stdout[-3000:]
    (record,) = metrics_of(tmp_path / "out")
    assert record["actor/ratio_distance"] == 0.0 and record["own/longest_response"] >= 1
