"""A reward model that writes text: vLLM's own server, started by the run, asked, and missed when it is gone."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.support import main_ppo, metrics_of, overrides, write_task

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]

PARSER = """
def digits(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": sum(c.isdigit() for c in solution_str) / 8, "judged": len(extra_info["response"])}
"""
# Takes what it cannot ask for 0, as many functions do.
ASKING = """
import json, urllib.request

def compute_score(data_source, solution_str, ground_truth, extra_info, reward_router_address, reward_model_tokenizer):
    assert reward_model_tokenizer.decode(reward_model_tokenizer("1").input_ids) == "1"
    messages = [{"role": "user", "content": solution_str}]
    body = {"model": MODEL, "messages": messages, "max_tokens": 4, "temperature": 1}
    url = f"http://{reward_router_address}/v1/chat/completions"
    try:
        request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=30) as reply:
            answer = json.load(reply)["choices"][0]["message"]["content"]
    except OSError:
        return 0.0
    return sum(c.isdigit() for c in answer) / 4
"""


def run(tmp_path: Path, model: Path, judge: Path, **settings: Any) -> Any:
    values = {
        "reward_model.enable": True,
        "reward_model.model.path": str(judge),
        "reward_model.rollout.name": "vllm",
        "reward_model.rollout.prompt_length": 64,
        "reward_model.rollout.response_length": 16,
        "reward_model.rollout.max_num_seqs": 16,
        "data.val_files": "[]",
        "trainer.total_training_steps": 2,
    } | settings
    return main_ppo(overrides(write_task(tmp_path), model, tmp_path / "out", **values), timeout=500)


def servers() -> list[int]:
    """Processes of vLLM's server on this machine."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if b"vllm.entrypoints.openai.api_server" in (process / "cmdline").read_bytes():
                found.append(int(process.name))
        except OSError:
            continue
    return found


def nobody_writes(log: Path) -> bool:
    """Also of what the server had started, whose names are others."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        writers = [process for process in Path("/proc").glob("[0-9]*") if _output_of(process) == str(log)]
        if not writers:
            return True
        time.sleep(0.2)
    return False


def _output_of(process: Path) -> str:
    try:
        return os.readlink(process / "fd" / "1")
    except OSError:
        return ""


def test_a_judge_with_a_parser_grades_every_response(tmp_path: Path, tiny_model: Path) -> None:
    """Its server is in a pool of its own."""
    pytest.importorskip("vllm")
    before = set(servers())
    (tmp_path / "parser.py").write_text(PARSER)
    result = run(
        tmp_path,
        tiny_model,
        tiny_model,
        **{
            "custom_reward_function.path": None,
            "reward_model.model_type": "generative",
            "reward_model.judge.parser": f"{tmp_path / 'parser.py'}:digits",
            "reward_model.judge.prompt": "'{response}+'",
            "reward_model.judge.max_tokens": 8,
            "reward_model.judge.temperature": 1.0,
            "reward_model.rollout.engine_kwargs.vllm": "{seed:3}",
            "reward_model.enable_resource_pool": True,
            "reward_model.nnodes": 1,
            "reward_model.n_gpus_per_node": 1,
            "trainer.launcher": "ray",
        },
    )
    assert result.returncode == 0, result.stdout[-3000:]
    records = metrics_of(tmp_path / "out")
    assert len(records) == 2
    assert all(record["reward/failures"] == 0 and 0 < record["critic/score/mean"] <= 1 for record in records)
    assert all(record["reward/judged/mean"] > 0 for record in records)
    assert (tmp_path / "out" / "workers" / "judge0.log").stat().st_size > 0
    assert (tmp_path / "out" / "workers" / "reward_rank0.log").exists()
    assert set(servers()) <= before and nobody_writes(tmp_path / "out" / "workers" / "judge0.log")


def test_a_function_asks_it_and_a_dead_server_is_named(tmp_path: Path, tiny_model: Path) -> None:
    """From then on all scores would be 0."""
    pytest.importorskip("vllm")
    before = set(servers())
    function = ASKING.replace("MODEL", repr(str(tiny_model)))
    (tmp_path / "asking.py").write_text(function)
    settings = {"custom_reward_function.path": str(tmp_path / "asking.py"), "trainer.total_training_steps": 200}

    def kill_later() -> None:
        deadline = time.monotonic() + 300
        while time.monotonic() < deadline and not any((tmp_path / "out").glob("*.jsonl")):
            time.sleep(0.2)
        for pid in set(servers()) - before:
            os.kill(pid, signal.SIGKILL)

    thread = threading.Thread(target=kill_later)
    thread.start()
    result = run(tmp_path, tiny_model, tiny_model, **settings)
    thread.join()
    assert result.returncode != 0
    assert re.search(
        r"the reward model's server at 127.0.0.1:\d+ \(process \d+, log .*judge0.log\) does not answer", result.stdout
    ), result.stdout[-3000:]
    records = metrics_of(tmp_path / "out")
    assert 0 < len(records) < 200 and all(record["critic/score/max"] > 0 for record in records)
    assert set(servers()) <= before and nobody_writes(tmp_path / "out" / "workers" / "judge0.log")
