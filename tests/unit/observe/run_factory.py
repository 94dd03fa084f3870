"""A run's folder as the trainer writes it, with metrics, samples and environment, made without a run."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from verl_like.observe.environment import write_environment
from verl_like.observe.run_folder import CONFIG, SAMPLES
from verl_like.observe.samples import Sample, SampleStore, runs
from verl_like.observe.trackers import JsonlTracker
from verl_like.trainer.compose import compose, save_resolved

WORDS = ("the", " sum", " of", " two", " is", " so", " we", "\n", " 42", " <b>", "</script>")
PROMPTS = ("What is 6 times 7?", "How many <b>bold</b> words are there?", "Write a poem about rain.", "2+2=")


def write_run(
    folder: Path,
    *,
    steps: int = 40,
    sample_every: int = 5,
    tokens: int = 12,
    groups: int = 2,
    planted: Callable[[int], Mapping[str, float]] = lambda step: {},
    overrides: tuple[str, ...] = (),
) -> Path:
    """planted: metrics of a step that replace the healthy ones. tokens: of a response, on average."""
    config = compose(["data.train_files=a.parquet", "data.val_files=b.parquet", *overrides])
    folder.mkdir(parents=True)
    save_resolved(config, folder / CONFIG)
    write_environment(folder, device="cpu", processes=2)
    tracker, store = JsonlTracker(folder, new_run=True), SampleStore(folder / SAMPLES, 200.0, None)
    for step in range(steps + 1):
        if step % 10 == 0:
            tracker.log(step, {"val-core/toy/acc/mean@1": 0.3 + 0.5 * step / steps})
            store.write("validation", step, [_sample(step, n, n, tokens, "validation") for n in range(4)])
        if step:
            tracker.log(step, {**healthy(step, steps), **planted(step)})
        if step and step % sample_every == 0:
            rows = [_sample(step, group, i, tokens, "train") for group in range(groups) for i in range(8)]
            store.write("train", step, rows)
    tracker.finish()
    return folder


def healthy(step: int, steps: int = 40) -> dict[str, float]:
    """Metrics of a step in a run that learns."""
    noise = random.Random(step).uniform(-1, 1)
    done = step / steps
    return {
        "critic/score/mean": 0.2 + 0.5 * done + 0.04 * noise,
        "critic/score/max": 1.0,
        "critic/score/min": 0.0,
        "critic/rewards/mean": 0.2 + 0.5 * done,
        "critic/group_zero_std_fraction": 0.3 + 0.1 * noise,
        "actor/entropy": 1.2 * math.exp(-done),
        "actor/grad_norm": 1.0 + 0.3 * noise,
        "actor/pg_clipfrac": 0.02 + 0.01 * noise,
        "actor/ppo_kl": 1e-4,
        "actor/skipped_steps": 0.0,
        "actor/lr": 1e-6,
        "training/rollout_probs_diff_mean": 0.004,
        "training/weight_staleness": 0.0,
        "weight_sync/num_changed": 20.0,
        "response_length/mean": 100 + 30 * done,
        "perf/cpu_memory_used_gb": 20 + 2 * noise,
        "training/not_finite": 0.0,
        "response_length/clip_ratio": 0.02,
        "response/duplicate_fraction": 0.05,
        "response/aborted_ratio": 0.0,
        "reward/failure_fraction": 0.0,
        "perf/throughput": 4000 + 300 * noise,
        "timing_s/gen": 2.0 + 0.2 * noise,
        "timing_s/update_actor": 1.5,
        "timing_s/testing": 1.0 if step % 10 == 0 else 0.0,
        "timing_s/step": 3.6 + 0.2 * noise,
        "perf/floor_ratio/gen": 8.0,
        "perf/floor_ratio/update_actor": 3.0,
    }


def _sample(step: int, group: int, i: int, tokens: int, part: str) -> Sample:
    dice = random.Random(f"{part} {step} {group} {i}")
    length = max(2, round(tokens * dice.uniform(0.5, 1.5)))
    texts = [dice.choice(WORDS) for _ in range(length)]
    tool = length // 3  # the middle of every fourth response is a tool's
    mask = [int(not (i % 4 == 3 and tool <= k < 2 * tool)) for k in range(length)]
    sampled = [round(-dice.expovariate(3), 4) for _ in range(length)]
    columns: dict[str, Any] = {"rollout_log_probs": sampled}
    if part == "train":
        columns["log_probs"] = [round(value + dice.gauss(0, 0.02), 4) for value in sampled]
        columns["entropy"] = [round(dice.uniform(0, 2), 4) for _ in range(length)]
        columns["advantages"] = [0.5 if i % 2 else -0.5] * length
    failed = i == 7 and part == "train"
    sample: Sample = {
        "acc": float(i % 2),
        "input": PROMPTS[group % len(PROMPTS)],
        "output": "".join(texts),
        "gts": "42",
        "score": None if failed else float(i % 2),
        "step": step,
        "data_source": "toy",
        "finish_reason": "stop" if i else "length",
        "outcome": "grader_error" if failed else "finished" if i else "truncated",
        "group": 100 * step + group,
        "dataset_index": group,
        "prompt_tokens": 9,
        "response_tokens": length,
        "sampled_tokens": sum(mask),
        "weight_version": step - 1,
        "tokens": {"text": texts, "sampled": runs(mask), "weight_version": [[step - 1, length]], **columns},
    }
    if part == "train":
        sample |= {"advantage": 0.5 if i % 2 else -0.5, "chosen": "chance"}
    if failed:
        sample["failure"] = "timeout: over 60 s"
    return sample
