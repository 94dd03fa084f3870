"""Prepare the quickstart: addition data in verl's row schema, and a model that gets about half of it right.

    python recipes/quickstart/prepare.py --output-dir outputs/quickstart --seed 1

writes OUTPUT/data/{train,val}.parquet and OUTPUT/model (a Hugging Face folder). The warm start is a supervised run
(`verl-like sft`, in OUTPUT/warm_start) on the sums of a sloppy teacher, who forgets to carry the one in most of those
that need it (37+58=085). Those are 45% of all sums, so the model ends up about half right, and reinforcement learning
has something to mend. No validation pair, in either order, is seen by the warm start or by the later training.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from model import build_model, build_tokenizer, save_checkpoint
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2ForCausalLM
from warm_start import supervised

Pair = tuple[int, int]
DATA_SOURCE = "addition"


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that decides what is prepared."""

    seed: int = 1
    num_validation_pairs: int = 512
    forget_carry: float = 0.75  # how often the teacher of the warm start forgets a carry
    warm_start_steps: int = 600
    warm_start_batch: int = 128
    learning_rate: float = 2e-3
    hidden_size: int = 128
    num_layers: int = 2


def split_pairs(seed: int, num_validation: int) -> tuple[list[Pair], list[Pair]]:
    """All pairs of two-digit numbers, shuffled: (training, validation). a+b and b+a are always on the same side."""
    unordered = [(a, b) for a in range(10, 100) for b in range(a, 100)]
    random.Random(seed).shuffle(unordered)
    validation = unordered[:num_validation]
    training = [pair for a, b in unordered[num_validation:] for pair in {(a, b), (b, a)}]
    return training, validation


def question(pair: Pair) -> str:
    return f"{pair[0]}+{pair[1]}="


def answer(number: int) -> str:
    """Always three digits, so that every digit has its place: 37+58=095."""
    return f"{number:03d}"


def rows(pairs: list[Pair], split: str) -> list[dict]:
    """Rows of verl's parquet schema."""
    return [
        {
            "data_source": DATA_SOURCE,
            "prompt": [{"role": "user", "content": question(pair)}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": answer(sum(pair))},
            "extra_info": {"split": split, "index": index},
        }
        for index, pair in enumerate(pairs)
    ]


def sloppy_sum(pair: Pair) -> int:
    """The sum without the carry from the units to the tens."""
    carries = pair[0] % 10 + pair[1] % 10 >= 10
    return sum(pair) - 10 * carries


def lessons(training: list[Pair], recipe: Recipe) -> list[dict[str, str]]:
    """The sums as the sloppy teacher writes them."""
    rng = random.Random(recipe.seed)
    sums = [(sloppy_sum if rng.random() < recipe.forget_carry else sum)(pair) for pair in training]
    return [{"question": question(pair), "answer": answer(said)} for pair, said in zip(training, sums, strict=True)]


@torch.no_grad()
def greedy_accuracy(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, pairs: list[Pair]) -> float:
    """Share of pairs whose greedy answer is right, end token included."""
    texts = [f"{question(pair)}{answer(sum(pair))}{tokenizer.eos_token}" for pair in pairs]
    ids_BS = torch.tensor([tokenizer.encode(text) for text in texts])
    # Teacher forcing answers the same question: a greedy answer is right exactly if each of its tokens is the argmax.
    predicted_BS = model(input_ids=ids_BS).logits.argmax(-1)
    return (predicted_BS[:, -5:-1] == ids_BS[:, -4:]).all(-1).float().mean().item()


def prepare(output_dir: Path, recipe: Recipe) -> float:
    """Write data and warm-started model; return the model's greedy validation accuracy. Reuses a finished folder."""
    done = output_dir / "prepared.json"
    if done.exists() and (found := json.loads(done.read_text()))["recipe"] == asdict(recipe):
        print(f"Using the data and model prepared earlier in {output_dir} (delete the folder to start over).")
        return found["accuracy"]
    done.unlink(missing_ok=True)
    (output_dir / "data").mkdir(parents=True, exist_ok=True)
    training, validation = split_pairs(recipe.seed, recipe.num_validation_pairs)
    for split, pairs in (("train", training), ("val", validation)):
        pq.write_table(pa.Table.from_pylist(rows(pairs, split)), output_dir / "data" / f"{split}.parquet")
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, hidden_size=recipe.hidden_size, num_layers=recipe.num_layers, seed=recipe.seed)
    print(f"{len(training)} training and {len(validation)} validation questions such as {question(training[0])}")
    print(f"Warm start of a new {model.num_parameters() / 1e6:.2f}M-parameter Qwen2 model, about half a minute:")
    started = time.time()
    for folder in ("warm_start", "model"):
        shutil.rmtree(output_dir / folder, ignore_errors=True)
    save_checkpoint(output_dir / "warm_start" / "new_model", model, tokenizer)
    trained = supervised(
        output_dir / "warm_start" / "new_model",
        lessons(training, recipe),
        output_dir / "warm_start" / "run",
        steps=recipe.warm_start_steps,
        batch_size=recipe.warm_start_batch,
        seed=recipe.seed,
        optim__lr=recipe.learning_rate,
        data__messages_key=None,
        data__prompt_key="question",
        sft__response_key="answer",
        sft__max_length=16,
    )
    shutil.copytree(trained, output_dir / "model")
    accuracy = greedy_accuracy(AutoModelForCausalLM.from_pretrained(trained), tokenizer, validation)
    done.write_text(json.dumps({"recipe": asdict(recipe), "accuracy": accuracy}))
    print(f"Warm start took {time.time() - started:.0f} s; greedy validation accuracy {accuracy:.2f}")
    return accuracy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-dir", type=Path, default=Path("outputs/quickstart"))
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    prepare(arguments.output_dir, Recipe(seed=arguments.seed))


if __name__ == "__main__":
    main()
