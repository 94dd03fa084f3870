"""The same GRPO steps through TRL and through verl_like: seconds, losses and gradient norms side by side.

    python recipes/trl_comparison/compare.py --trl-python /path/to/trl/environment/bin/python

TRL samples and trains; verl_like then generates as many tokens per response as TRL did, and trains on TRL's tokens.
Weights stay frozen (learning rate 0), so that both sides see the same model at every step. See README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
from pathlib import Path
from typing import Any

from verl_like.cli.main import main as verl_like
from verl_like.kit.bench.inputs import write_inputs
from verl_like.kit.bench.shapes import MODELS, WORKLOADS

HERE = Path(__file__).resolve().parent
SAME_ALGORITHM = [
    "algorithm.norm_adv_by_std_in_grpo=False",  # TRL: scale_rewards=none
    "actor_rollout_ref.actor.loss_agg_mode=token-mean",  # TRL: loss_type=dapo
    "actor_rollout_ref.actor.optim.lr=0",
    "actor_rollout_ref.actor.grad_clip=1.0",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl-python", required=True, help="interpreter of an environment with trl")
    parser.add_argument(
        "--micro-batches", type=int, nargs="+", default=[32, 64, 128], help="TRL's; the best one counts"
    )
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=2, help="worker processes of verl_like")
    parser.add_argument("--threads", type=int, default=2, help="threads of TRL; verl_like's ranks share as many")
    parser.add_argument("--out", type=Path, default=Path("outputs/trl_comparison"))
    parser.add_argument("overrides", nargs="*", help="further keys of main_ppo")
    arguments = parser.parse_args()
    workload = WORKLOADS["cpu"]
    inputs = arguments.out / "cpu_cpu"
    write_inputs(inputs, MODELS["cpu"], workload, num_steps=arguments.steps)

    runs = [trl_run(arguments, inputs, size) for size in arguments.micro_batches]
    best = min(runs, key=lambda run: settled(run["seconds"]))
    ours = verl_like_run(arguments, best)
    print(report(runs, best, ours))


def trl_run(arguments: argparse.Namespace, inputs: Path, micro_batch: int) -> dict[str, Any]:
    """One run of TRL's side, in its own environment."""
    out = arguments.out / f"trl_{micro_batch}.json"
    workload = WORKLOADS["cpu"]
    command = [arguments.trl_python, str(HERE / "trl_side.py"), "--inputs", str(inputs), "--out", str(out)]
    command += ["--prompts", str(workload.num_prompts), "--responses", str(workload.responses_per_prompt)]
    command += ["--max-tokens", str(workload.max_response), "--micro-batch", str(micro_batch)]
    command += ["--steps", str(arguments.steps), "--threads", str(arguments.threads)]
    environment = os.environ | {"OMP_NUM_THREADS": str(arguments.threads)}
    subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
    return json.loads(out.read_text())


def verl_like_run(arguments: argparse.Namespace, best: dict[str, Any]) -> dict[str, Any]:
    """The same steps on TRL's tokens, through `verl-like bench grpo`; the first step is also its warm-up."""
    replay, out = arguments.out / "tokens.json", arguments.out / "verl_like.json"
    replay.write_text(json.dumps(best["tokens"]))
    os.environ["OMP_NUM_THREADS"] = str(max(1, arguments.threads // arguments.ranks))
    command = ["bench", "grpo", "--model", "cpu", "--workload", "cpu", "--ranks", str(arguments.ranks)]
    command += ["--warmup", "0", "--steps", str(arguments.steps), "--out", str(arguments.out)]
    command += ["--replay", str(replay), "--json", str(out), "--", *SAME_ALGORITHM, *arguments.overrides]
    verl_like(command)
    return json.loads(out.read_text())["figures"]


def report(runs: list[dict[str, Any]], best: dict[str, Any], ours: dict[str, Any]) -> str:
    """Medians over all steps but the first (warm-up), and how far losses and gradient norms are apart."""
    lines = ["", "TRL, seconds a step (median without the first step):"]
    lines += [f"  micro-batches of {run['micro_batch']:>3}: {settled(run['seconds']):.2f}" for run in runs]
    theirs, mine = settled(best["seconds"]), settled(ours["step_seconds_each"])
    lines += [
        f"verl_like, the same tokens: {mine:.2f} seconds a step; TRL / verl_like = {theirs / mine:.2f}",
        f"gradient norms, largest relative difference: {apart(best['grad_norms'], ours['grad_norms']):.2e}",
        f"losses, largest difference by the gradient norm: {loss_gap(best, ours):.2e}",
    ]
    return "\n".join(lines)


def settled(seconds: list[float]) -> float:
    """Median without the first step, which warms up."""
    return statistics.median(seconds[1:] or seconds)


def apart(left: list[float], right: list[float]) -> float:
    return max(abs(a - b) / abs(a) for a, b in zip(left, right, strict=True))


def loss_gap(theirs: dict[str, Any], ours: dict[str, Any]) -> float:
    """A loss at ratio 1 is a mean of advantages, near 0: its own size is no yardstick."""
    pairs = zip(theirs["losses"], ours["losses"], theirs["grad_norms"], strict=True)
    return max(abs(a - b) / norm for a, b, norm in pairs)


if __name__ == "__main__":
    main()
