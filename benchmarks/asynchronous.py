"""Trained tokens a second of trainer.mode=sync and colocate_async (or separate_async), at prescribed lengths.

    python benchmarks/asynchronous.py --data outputs/quickstart --modes sync colocate_async ideal --steps 20

Every response's length is prescribed by its draw: log-normal, the longest 8 times the mean, end-of-sequence ignored.
The modes take turns (`--rounds`), each in a process of its own, and the table has the ratios to sync. `ideal`: sync
with as many tokens of equal length: no response is waited for, which is what known lengths could be packed to at best.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

import verl_like
from verl_like.batch import Prompt
from verl_like.episodes.episode import Ask, Episode, SingleTurn, Turn
from verl_like.episodes.staleness import CAUSES

WARM_UP = 4  # steps: the engine's first, and those that fill what is under way

CORRECTIONS = {
    "token": {"algorithm.rollout_correction.rollout_is": "token"},
    "bypass": {"algorithm.rollout_correction.bypass_mode": True},
}


def lengths(mean: int, longest: int, count: int, seed: int = 7) -> np.ndarray:
    """Log-normal with these two, [tokens]."""
    drawn = np.random.default_rng(seed).lognormal(0.0, 1.0, count)
    drawn = np.minimum(drawn / drawn.mean() * mean, longest)
    return np.maximum(1, drawn).astype(int)


def prescribe(table: np.ndarray) -> None:
    """From now on a response has the length that the table has for its draw."""

    async def run(self: SingleTurn, prompt: Prompt, sample: int, ask: Ask) -> Episode:
        length = int(table[(prompt.group * 31 + sample) % len(table)])
        return Episode(turns=(Turn.of(prompt.ids, await ask(prompt.ids, max_tokens=length)),))

    SingleTurn.run = run  # type: ignore[method-assign]


def settings(options: argparse.Namespace, mode: str, out: str) -> dict[str, Any]:
    data, longest = options.data, options.mean * 8
    return {
        "algorithm.adv_estimator": "grpo",
        **CORRECTIONS[options.correction],
        "data.train_files": f"{data}/data/train.parquet",
        "data.val_files": [],
        "data.train_batch_size": options.prompts,
        "data.max_prompt_length": 8,
        "data.max_response_length": longest,
        "custom_reward_function.path": str(Path(__file__).parents[1] / "recipes/quickstart/reward.py"),
        "actor_rollout_ref.model.path": f"{data}/model",
        "actor_rollout_ref.model.override_config.max_position_embeddings": 8 + longest,
        "actor_rollout_ref.model.enable_gradient_checkpointing": False,
        "actor_rollout_ref.actor.ppo_mini_batch_size": options.prompts,
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": 8192,
        "actor_rollout_ref.rollout.name": options.engine,
        "actor_rollout_ref.rollout.n": options.n,
        "actor_rollout_ref.rollout.ignore_eos": True,
        "actor_rollout_ref.rollout.max_num_seqs": options.max_num_seqs,
        "trainer.mode": mode,
        "trainer.launcher": "ray" if mode == "separate_async" else "local",
        "trainer.n_gpus_per_node": 1,
        "trainer.device": "cpu",
        "trainer.logger": [],
        "trainer.save_freq": -1,
        "trainer.test_freq": -1,
        "trainer.val_before_train": False,
        "trainer.report_freq": -1,
        "trainer.sample_freq": -1,
        "trainer.total_training_steps": options.steps,
        "trainer.default_local_dir": out,
        "async_training.over_sample_rate": options.over_sample_rate,
        "async_training.max_staleness": options.max_staleness,
        "async_training.beyond": options.beyond,
        **(
            {
                "actor_rollout_ref.hybrid_engine": False,
                "actor_rollout_ref.rollout.nnodes": 1,
                "actor_rollout_ref.rollout.n_gpus_per_node": 1,
            }
            if mode == "separate_async"
            else {}
        ),
    }


def one(options: argparse.Namespace, mode: str) -> dict[str, Any]:
    """One run's figures, of the steps after the warm-up."""
    table = lengths(options.mean, options.mean * 8, 100_003)
    if mode == "ideal":
        mode, table = "sync", np.full_like(table, round(table.mean()))
    prescribe(table)
    with tempfile.TemporaryDirectory() as out:
        line = [
            f"{key}={json.dumps(value) if isinstance(value, list) else value}"
            for key, value in settings(options, mode, out).items()
        ]
        with verl_like.build(verl_like.compose(line)) as trainer:
            trainer.start()
            steps = []
            while not trainer.done():
                steps.append(trainer.step())
            ledger = trainer.source.state_dict()["ledger"]
            trainer.finish()
    steps = steps[WARM_UP:-2]  # the last have nothing to go on with
    total = sum(step["timing_s/step"] for step in steps)
    tokens = sum(step["response_length/mean"] * options.prompts * options.n for step in steps)
    causes = {cause: fmean(step.get(f"async/idle_{cause}", 0.0) for step in steps) for cause in CAUSES}
    idle = sum(causes.values())
    waited = fmean(step.get("async/trainer_waited", 0.0) for step in steps)
    return {
        "tokens/s": tokens / total,
        "step": fmean(step["timing_s/step"] for step in steps),
        "gen": fmean(step["timing_s/gen"] for step in steps),
        "update": fmean(step["timing_s/update_actor"] for step in steps),
        "old_log_prob": fmean(step.get("timing_s/old_log_prob", 0.0) for step in steps),
        "length": fmean(step["response_length/mean"] for step in steps),
        "staleness/mean": fmean(step.get("staleness/mean", 0.0) for step in steps),
        "staleness/max": max(step.get("staleness/max", 0.0) for step in steps),
        "mixed": fmean(step.get("async/mixed_fraction", 0.0) for step in steps),
        "reprefill/token": sum(step.get("async/reprefill_tokens", 0.0) for step in steps) / tokens,
        "idle": idle,
        **{f"idle/{cause}": share for cause, share in causes.items() if share},
        "waited": waited,
        "unexplained": min(idle, waited),  # of two pools: the slower one's waiting, which the other does not explain
        "dropped/token": sum(step.get("async/dropped_tokens", 0.0) for step in steps) / tokens,
        "ledger": ledger,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="outputs/quickstart", help="folder of recipes/quickstart/prepare.py")
    parser.add_argument("--modes", nargs="+", default=["sync", "colocate_async"])
    parser.add_argument("--engine", default="vllm")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--n", type=int, default=8)
    parser.add_argument("--mean", type=int, default=30)
    parser.add_argument("--max-num-seqs", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--over-sample-rate", type=float, default=1.0)
    parser.add_argument("--max-staleness", type=int, default=4)
    parser.add_argument("--beyond", default="wait")
    parser.add_argument("--correction", choices=sorted(CORRECTIONS), default="bypass", help="sync has the same")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print("RESULT " + json.dumps(one(options, options.one)))
        return
    found: dict[str, list[dict[str, Any]]] = {mode: [] for mode in options.modes}
    for _ in range(options.rounds):
        for mode in options.modes:
            done = subprocess.run([sys.executable, *sys.argv, "--one", mode], capture_output=True, text=True)
            lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
            if not lines:
                sys.exit(done.stdout[-2000:] + done.stderr[-4000:])
            found[mode].append(json.loads(lines[0].removeprefix("RESULT ")))
            print(
                mode, {k: round(v, 3) for k, v in found[mode][-1].items() if k != "ledger"}, found[mode][-1]["ledger"]
            )
    base = fmean(each["tokens/s"] for each in found[options.modes[0]])
    for mode, runs in found.items():
        mean = fmean(each["tokens/s"] for each in runs)
        print(f"{mode:16} {mean:9.0f} trained tokens/s  {mean / base:5.2f} x {options.modes[0]}")


if __name__ == "__main__":
    main()
