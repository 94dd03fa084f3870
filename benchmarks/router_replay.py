"""Mismatch of trainer and rollout engine in a mixture of experts, with router replay (R3) and without.

    python -m benchmarks.router_replay --rollout vllm --processes 2

A Qwen3-MoE with random weights (4 layers, 32 experts, 4 of them for a token) answers sums, in bfloat16 on both sides.
Both runs sample the same prompts with the same seeds and weights; the numbers are means over the steps.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import fmean

import pyarrow as pa
import pyarrow.parquet as pq
from transformers import Qwen3MoeConfig

from verl_like.observe.run_folder import read_metrics

RECIPE = Path(__file__).parents[1] / "recipes/quickstart"
sys.path.insert(0, str(RECIPE))
from model import build_tokenizer  # noqa: E402  # pyright: ignore[reportMissingImports]

SHOWN = ("rollout_corr/kl", "rollout_corr/k3_kl", "training/rollout_probs_diff_mean", "router/differing_share")


def prepare(folder: Path) -> dict[str, str]:
    """Write model, data and grader; return the keys that name them."""
    tokenizer = build_tokenizer()
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=128,
        moe_intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        num_experts=32,
        num_experts_per_tok=4,
        norm_topk_prob=True,
        initializer_range=0.1,
        tie_word_embeddings=False,
        architectures=["Qwen3MoeForCausalLM"],
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    config.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    sums = [f"{i % 10}{i // 10 % 10}+{i % 7}=" for i in range(64)]
    rows = [{"data_source": "sums", "prompt": [{"role": "user", "content": text}]} for text in sums]
    pq.write_table(
        pa.Table.from_pylist([row | {"reward_model": {"style": "rule", "ground_truth": "7"}} for row in rows]),
        folder / "train.parquet",
    )
    (folder / "reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return solution_str.count(ground_truth) / 24\n"
    )
    return {
        "data.train_files": str(folder / "train.parquet"),
        "data.val_files": "null",
        "custom_reward_function.path": str(folder / "reward.py"),
        "actor_rollout_ref.model.path": str(folder / "model"),
    }


def run(folder: Path, keys: dict[str, str], options: argparse.Namespace, mode: str) -> dict[str, float]:
    """Train a few steps; return the means of what is shown."""
    values = keys | {
        "algorithm.adv_estimator": "grpo",
        "data.train_batch_size": "16",
        "data.max_prompt_length": "16",
        "data.max_response_length": "48",
        "actor_rollout_ref.actor.ppo_mini_batch_size": "16",
        "actor_rollout_ref.actor.old_log_probs": "recompute",
        "actor_rollout_ref.actor.optim.lr": "1e-6",
        "actor_rollout_ref.actor.fsdp_config.dtype": "bfloat16",
        "actor_rollout_ref.actor.router_replay.mode": mode,
        "actor_rollout_ref.rollout.enable_rollout_routing_replay": "true",
        "actor_rollout_ref.rollout.name": options.rollout,
        "actor_rollout_ref.rollout.dtype": "bfloat16",
        "actor_rollout_ref.rollout.sync_probe_tolerance": "1",  # it measures without routes, which differ here
        "actor_rollout_ref.rollout.enforce_eager": "true",
        "actor_rollout_ref.rollout.ignore_eos": "true",
        "actor_rollout_ref.rollout.n": "8",
        "trainer.launcher": "ray" if options.processes > 1 else "local",
        "trainer.n_gpus_per_node": str(options.processes),
        "trainer.device": options.device,
        "trainer.total_training_steps": str(options.steps),
        "trainer.val_before_train": "false",
        "trainer.save_freq": "-1",
        "trainer.test_freq": "-1",
        "trainer.report_freq": "-1",
        "trainer.default_local_dir": str(folder / mode),
    }
    if options.device == "cpu":
        values |= {"ray_init.num_cpus": str(2 * options.processes)}
    command = [sys.executable, "-m", "verl_like.trainer.main_ppo", *(f"{k}={v}" for k, v in values.items())]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise SystemExit(done.stdout)
    for line in done.stdout.splitlines():
        if "router replay: " in line:
            print(f"{mode}: check at the start: {line.partition('router replay: ')[2]}")
    (metrics,) = (folder / mode).glob("*.jsonl")
    steps = read_metrics(metrics).values()
    return {name: fmean(step[name] or 0.0 for step in steps) for name in SHOWN}


def main() -> None:
    """Print both runs side by side."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rollout", default="vllm", choices=["vllm", "hf"])
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        keys = prepare(Path(folder))
        found = {mode: run(Path(folder), keys, options, mode) for mode in ("disabled", "R3")}
    print(f"{'':36}{'without':>12}{'with R3':>12}{'ratio':>8}")
    for name in SHOWN:
        without, replayed = found["disabled"][name], found["R3"][name]
        ratio = f"{replayed / without:.2f}" if min(without, replayed) > 0 else ""  # the first estimate may be below 0
        print(f"{name:36}{without:12.3g}{replayed:12.3g}{ratio:>8}")


if __name__ == "__main__":
    main()
