"""TRL's side of the comparison: GRPO steps on the benchmark's model and prompts, with everything recorded.

Runs in an environment of its own that has `trl`, `accelerate` and `datasets` (see README.md); it does not import
verl_like. Writes OUT: per step the seconds, loss and gradient norm, and every response's tokens.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch
from datasets import Dataset
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class StepTimer(TrainerCallback):
    """Wall-clock seconds from the end of one optimizer step to the end of the next: generation, scoring, update."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.ends.append(time.perf_counter())

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.ends.append(time.perf_counter())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=Path, required=True, help="folder made by `verl-like bench grpo`")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--responses", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--micro-batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)

    compute_score = load_reward(arguments.inputs / "reward.py")
    recorded: list[list[list[int]]] = []
    generation: list[list[int]] = []

    def reward(completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        generation.extend([list(map(int, ids)) for ids in completion_ids])
        return [float(compute_score("", text, "")) for text in completions]

    timer = StepTimer()
    rows = pq.read_table(arguments.inputs / "train.parquet").to_pylist()[: arguments.steps * arguments.prompts]
    sequences = arguments.prompts * arguments.responses
    trainer = GRPOTrainer(
        model=Qwen2ForCausalLM.from_pretrained(arguments.inputs / "model", dtype=torch.float32),
        reward_funcs=reward,
        processing_class=PreTrainedTokenizerFast.from_pretrained(arguments.inputs / "tokenizer", padding_side="left"),
        train_dataset=Dataset.from_list([{"prompt": row["prompt"][0]["content"]} for row in rows]),
        callbacks=[timer],
        args=GRPOConfig(
            output_dir=str(arguments.out.parent / "trl_output"),
            per_device_train_batch_size=arguments.micro_batch,
            gradient_accumulation_steps=sequences // arguments.micro_batch,
            num_generations=arguments.responses,
            max_completion_length=arguments.max_tokens,
            max_steps=arguments.steps,
            learning_rate=0.0,  # frozen weights: every step can be compared with the same model on the other side
            lr_scheduler_type="constant",
            beta=0.0,
            num_iterations=1,
            loss_type="dapo",
            scale_rewards="none",
            temperature=1.0,
            shuffle_dataset=False,
            gradient_checkpointing=False,
            max_grad_norm=1.0,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            bf16=False,
            disable_tqdm=True,
            seed=1,
        ),
    )
    trainer.train()
    for step in range(arguments.steps):
        recorded.append(generation[step * sequences : (step + 1) * sequences])
    logs = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    result = {
        "seconds": [end - start for start, end in zip(timer.ends, timer.ends[1:], strict=False)],
        "losses": [entry["loss"] for entry in logs],
        "grad_norms": [entry["grad_norm"] for entry in logs],
        "tokens": recorded,
        "micro_batch": arguments.micro_batch,
    }
    arguments.out.write_text(json.dumps(result))


def load_reward(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location("reward", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.compute_score


if __name__ == "__main__":
    main()
