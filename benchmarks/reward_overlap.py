"""What overlapping a slow grader with the rest of the step is worth: three runs that differ only in when it grades.

    python -m benchmarks.reward_overlap --milliseconds 50

at the end     the grader gets the whole batch when the last response is there (reward_manager=batch)
as they end    each response is graded when it ends (the default)
async          the same, and scores are awaited only after the log-prob passes (launch_reward_fn_async=True)

The grader sleeps (it waits for a service), so that it takes no CPU from the trainer: with one that computes, on a
machine without idle cores, there is less to win. The ratio is that of the medians of timing_s/step.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from verl_like.kit.bench.inputs import write_inputs
from verl_like.kit.bench.shapes import MODELS, Workload
from verl_like.observe.run_folder import read_metrics

_SLEEPY = """
import time


def score(solution_str):
    numbers = [int(word[1:]) for word in solution_str.split() if word[1:].isdigit()]
    return sum(number % 2 == 0 for number in numbers) / max(len(numbers), 1)


def compute_score(data_source, solution_str, ground_truth, extra_info=None, seconds=0.0):
    time.sleep(seconds)
    return score(solution_str)


def compute_batch(data_sources, solution_strs, ground_truths, extra_infos, seconds=0.0):
    time.sleep(seconds * len(solution_strs))
    return [score(text) for text in solution_strs]
"""
_WORKLOAD = Workload(num_prompts=4, responses_per_prompt=8, prompt_length=32, mean_response=None, max_response=192)
_MODES: dict[str, dict[str, Any]] = {
    "at the end": {"reward_model.reward_manager": "batch", "custom_reward_function.name": "compute_batch"},
    "as they end": {},
    "async": {"reward_model.launch_reward_fn_async": True},
}
_WARM_UP = 1  # steps that are not counted


def main(arguments: list[str] | None = None) -> dict[str, float]:
    """Run the three modes and print their table; median seconds of a step by mode."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--milliseconds", type=float, default=50.0, help="time to grade one response")
    parser.add_argument("--steps", type=int, default=5, help="measured steps of each mode")
    parser.add_argument("--rollout", default="hf", choices=("hf", "vllm"))
    parser.add_argument("--out", type=Path, default=Path("outputs/bench/reward_overlap"))
    options = parser.parse_args(arguments)
    num_steps = options.steps + _WARM_UP
    write_inputs(options.out, MODELS["cpu"], _WORKLOAD, num_steps=num_steps)
    (options.out / "reward.py").write_text(_SLEEPY)
    medians: dict[str, float] = {}
    for mode, settings in _MODES.items():
        records = _run(options, mode, settings, num_steps)[_WARM_UP:]
        phases = {name: statistics.median(r[f"timing_s/{name}"] for r in records) for name in ("step", "gen", "reward")}
        medians[mode] = phases["step"]
        ratio = medians["at the end"] / phases["step"]
        times = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in phases.items())
        print(f"{mode:12} {times}; {ratio:.2f}x the speed of grading at the end", flush=True)
    return medians


def _run(options: argparse.Namespace, mode: str, settings: dict[str, Any], num_steps: int) -> list[dict[str, Any]]:
    out = options.out.resolve()
    run = out / mode.replace(" ", "_")
    values = {
        "algorithm.adv_estimator": "grpo",
        "data.train_files": out / "train.parquet",
        "data.val_files": "[]",
        "data.tokenizer": out / "tokenizer",
        "data.train_batch_size": _WORKLOAD.num_prompts,
        "data.max_prompt_length": _WORKLOAD.prompt_length,
        "data.max_response_length": _WORKLOAD.max_response,
        "custom_reward_function.path": out / "reward.py",
        "+custom_reward_function.reward_kwargs.seconds": options.milliseconds / 1000,
        "actor_rollout_ref.model.path": out / "model",
        "actor_rollout_ref.actor.ppo_mini_batch_size": _WORKLOAD.num_prompts,
        "actor_rollout_ref.actor.use_kl_loss": True,
        "actor_rollout_ref.actor.old_log_probs": "recompute",
        "actor_rollout_ref.rollout.n": _WORKLOAD.responses_per_prompt,
        "actor_rollout_ref.rollout.name": options.rollout,
        "trainer.launcher": "local",
        "trainer.logger": "[jsonl]",
        "trainer.default_local_dir": run,
        "trainer.resume_mode": "disable",
        "trainer.val_before_train": False,
        "trainer.save_freq": -1,
        "trainer.total_training_steps": num_steps,
    }
    command = [f"{key}={value}" for key, value in (values | settings).items()]
    subprocess.run(
        [sys.executable, "-m", "verl_like.trainer.main_ppo", *command], check=True, stdout=subprocess.DEVNULL
    )
    (path,) = run.glob("*.jsonl")
    return [record for _, record in sorted(read_metrics(path).items()) if "timing_s/step" in record]


if __name__ == "__main__":
    main()
