"""The quickstart from end to end: prepare data and model, train with GRPO, and say what came out. No download.

make quickstart                                   # or, in the virtual environment:
python recipes/quickstart/run.py --seed 2 trainer.total_training_steps=100
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from prepare import DATA_SOURCE, Recipe, prepare

from verl_like.observe.run_folder import read_metrics

HERE = Path(__file__).resolve().parent
METRIC = f"val-core/{DATA_SOURCE}/acc/mean@1"


def read_accuracies(metrics_file: Path) -> list[tuple[int, float]]:
    """(step, greedy validation accuracy) of every validation of a run, in step order."""
    steps = read_metrics(metrics_file)
    accuracies = [(step, metrics[METRIC]) for step, metrics in steps.items() if METRIC in metrics]
    if not accuracies:
        raise ValueError(f"{metrics_file} does not hold {METRIC}: was validation switched off?")
    return accuracies


def report(output_dir: Path, accuracies: list[tuple[int, float]], seconds: float) -> None:
    (first_step, before), (last_step, after) = accuracies[0], accuracies[-1]
    checkpoints, command = (
        output_dir / "checkpoints",
        f"PYTHON={sys.executable} bash {os.path.relpath(HERE / 'run.sh')}",
    )
    print(
        f"""
------------------------------------------------------------------------------------------------
Greedy accuracy on {Recipe.num_validation_pairs} additions never seen in training, after {seconds:.0f} s:
    step {first_step:>3} (warm start)   {before:.3f}
    step {last_step:>3} (GRPO)         {after:.3f}

checkpoint   {checkpoints / f"global_step_{last_step}"}
model        {checkpoints / f"global_step_{last_step}" / "actor" / "huggingface"} (opens with transformers)
report       {checkpoints / "report.html"} (opens in a browser: curves, time, responses)
metrics      {checkpoints / "metrics.jsonl"}
samples      {output_dir / "samples"} (jsonl: prompts, responses, scores)

Next: the same run with PPO and a critic instead of GRPO, or with your own reward file:
    OUT={output_dir} {command} algorithm.adv_estimator=gae critic.model.path={output_dir}/model
    OUT={output_dir} REWARD=my_reward.py {command}
------------------------------------------------------------------------------------------------"""
    )


def train(output_dir: Path, *, seed: int, rollout: str, reward: Path, overrides: list[str]) -> list[tuple[int, float]]:
    """Run run.sh; return the accuracies of its validations."""
    for leftover in ("checkpoints", "samples"):  # of an earlier quickstart in the same folder
        shutil.rmtree(output_dir / leftover, ignore_errors=True)
    environment = os.environ | {
        "PYTHON": sys.executable,
        "OUT": str(output_dir),
        "SEED": str(seed),
        "ROLLOUT": rollout,
        "REWARD": str(reward),
    }
    training = subprocess.Popen(["bash", str(HERE / "run.sh"), *overrides], env=environment)
    # The training itself finishes its step and saves: a Ctrl-C of the terminal reaches it too, a SIGTERM is passed on.
    signal.signal(signal.SIGINT, lambda number, frame: None)
    signal.signal(signal.SIGTERM, lambda number, frame: training.send_signal(number))
    if status := training.wait():
        print(f"the training run ended with status {status}; its messages are above", file=sys.stderr)
        sys.exit(status if status > 0 else 128 - status)
    return read_accuracies(output_dir / "checkpoints" / "metrics.jsonl")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-dir", type=Path, default=Path("outputs/quickstart"))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rollout", choices=["auto", "vllm", "sglang", "hf"], default="auto")
    parser.add_argument("--reward", type=Path, default=HERE / "reward.py", help="shuffled_reward.py is the control")
    parser.add_argument("overrides", nargs="*", help="further keys of main_ppo, such as actor_rollout_ref.rollout.n=16")
    arguments = parser.parse_args()
    started = time.time()
    output_dir = arguments.output_dir.resolve()
    prepare(output_dir, Recipe(seed=arguments.seed))
    print("\nTraining with GRPO: 2 worker processes, FSDP2, the rollout engine in the same processes.", flush=True)
    accuracies = train(
        output_dir,
        seed=arguments.seed,
        rollout=arguments.rollout,
        reward=arguments.reward.resolve(),
        overrides=arguments.overrides,
    )
    report(output_dir, accuracies, time.time() - started)


if __name__ == "__main__":
    main()
