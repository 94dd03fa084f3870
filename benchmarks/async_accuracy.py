"""Accuracy of the quickstart's run in trainer.mode=sync and colocate_async, with groups that are carried over.

    python benchmarks/async_accuracy.py --seeds 1 2 3

A seeded 30% of the groups (`--carried`) are late: their responses are handed on only some seconds after they are
sampled, as a slow tool or grader would do, so that a step of the asynchronous mode goes on without them. Everything
else is recipes/quickstart/run.sh, on one process with the hf engine, validated greedily on 2,000 sums that neither the
warm start nor the training has seen.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import subprocess
import sys
from pathlib import Path
from statistics import fmean

import verl_like
from verl_like.batch import Prompt
from verl_like.episodes.episode import Ask, Episode, SingleTurn

RECIPE = Path(__file__).parents[1] / "recipes/quickstart"
sys.path.insert(0, str(RECIPE))
from prepare import Recipe, prepare  # noqa: E402  # pyright: ignore[reportMissingImports]


def delay(share: float, seed: int, longest_s: float) -> None:
    """From now on this share of all groups is late, by a time of its own."""
    plain = SingleTurn.run

    async def run(self: SingleTurn, prompt: Prompt, sample: int, ask: Ask) -> Episode:
        episode = await plain(self, prompt, sample, ask)
        drawn = random.Random(f"{seed}-{prompt.group}")
        if ask.__class__.__name__ == "Asker" and drawn.random() < share and ask.of.how.purpose == "train":  # type: ignore[attr-defined]
            await asyncio.sleep(drawn.uniform(0.3, 1.0) * longest_s)
        return episode

    SingleTurn.run = run  # type: ignore[method-assign]


def arguments(out: Path, mode: str, seed: int, steps: int, rate: float) -> list[str]:
    """Those of run.sh, but for what is compared and where it runs."""
    text = (RECIPE / "run.sh").read_text()
    lines = dict(re.findall(r"^    ([\w.]+)=(\S+) \\$", text, flags=re.MULTILINE))
    lines = {key: value.strip('"').replace("$OUT", str(out)) for key, value in lines.items()}
    lines |= {
        "custom_reward_function.path": str(RECIPE / "reward.py"),
        "data.seed": str(seed),
        "trainer.seed": str(seed),
        "trainer.mode": mode,
        "async_training.over_sample_rate": str(rate),
        "algorithm.rollout_correction.rollout_is": "token" if mode != "sync" else "null",
        "actor_rollout_ref.rollout.name": "hf",
        "trainer.launcher": "local",
        "trainer.n_gpus_per_node": "1",
        "trainer.total_training_steps": str(steps),
        "actor_rollout_ref.actor.optim.total_training_steps": str(steps),
        "trainer.test_freq": str(steps),
        "trainer.val_before_train": "False",
        "trainer.save_freq": "-1",
        "trainer.logger": "[]",
        "trainer.default_local_dir": str(out / f"runs/{mode}_{seed}"),
        "trainer.rollout_data_dir": "null",
        "trainer.validation_data_dir": "null",
    }
    return [f"{key}={value}" for key, value in lines.items()]


def one(options: argparse.Namespace, mode: str, seed: int) -> dict[str, float]:
    if mode != "sync":  # there every step would only wait
        delay(options.carried, seed, options.longest)
    run = verl_like.run(verl_like.compose(arguments(options.out, mode, seed, options.steps, options.over_sample_rate)))
    records = list(run.steps.values())
    steps = [record for record in records if "staleness/mean" in record]
    (accuracy,) = [value for name, value in records[-1].items() if re.fullmatch(r"val-core/.*/acc/mean@1", name)]
    return {
        "accuracy": accuracy,
        "staleness/mean": fmean([record["staleness/mean"] for record in steps] or [0.0]),
        "staleness/max": max([record["staleness/max"] for record in steps] or [0.0]),
        "late": fmean([1 - record.get("staleness/share_0", 0.0) for record in steps] or [0.0]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("outputs/async_accuracy"))
    parser.add_argument("--modes", nargs="+", default=["sync", "colocate_async"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--carried", type=float, default=0.3, help="share of groups that are late")
    parser.add_argument("--over-sample-rate", type=float, default=1.0)
    parser.add_argument("--longest", type=float, default=3.0, help="[s] how late at most")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print("RESULT " + json.dumps(one(options, options.one[0], int(options.one[1]))))
        return
    print(f"greedy accuracy after the warm start: {prepare(options.out, Recipe(num_validation_pairs=2000)):.3f}")
    for mode in options.modes:
        found = []
        for seed in options.seeds:
            line = [sys.executable, *sys.argv, "--one", mode, str(seed)]
            done = subprocess.run(line, capture_output=True, text=True)
            results = [text for text in done.stdout.splitlines() if text.startswith("RESULT ")]
            if not results:
                sys.exit(done.stdout[-2000:] + done.stderr[-4000:])
            found.append(json.loads(results[0].removeprefix("RESULT ")))
            print(mode, seed, {name: round(value, 4) for name, value in found[-1].items()}, flush=True)
        print(f"{mode}: mean accuracy {fmean(each['accuracy'] for each in found):.4f}", flush=True)


if __name__ == "__main__":
    main()
