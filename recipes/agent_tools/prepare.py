"""Prepare the recipe: products in verl's row schema, and a model that asks a calculator now and then.

    python recipes/agent_tools/prepare.py --output-dir outputs/agent_tools --seed 1

writes OUTPUT/data/{train,val}.parquet and OUTPUT/model (a Hugging Face folder). The warm start is a supervised run
(`verl-like sft`, in OUTPUT/warm_start) on the conversations of a teacher who calls the calculator for one product in
three, copies what it says, and otherwise writes down the product at once, which a model of this size cannot learn to
do: it is right about as often as it asks.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
import shutil
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "quickstart"))
from model import build_model, save_checkpoint
from warm_start import supervised

Pair = tuple[int, int]
DATA_SOURCE = "product"
PAD, UNKNOWN, START, END = "<pad>", "<unk>", "<|im_start|>", "<|im_end|>"
# A call is JSON in tags, as Qwen's models write it; what never changes in it is one token, so that it stays short.
CALL, CLOSE = '<tool_call>{"name": "calculator", "arguments": {"expression": "', '"}}</tool_call>'
ROLES = ("user\n", "assistant\n", "tool\n")
PIECES = (START, END, CALL, CLOSE, *ROLES, "\n", *"0123456789*=?")
PATTERN = "|".join(re.escape(piece) for piece in sorted(PIECES, key=len, reverse=True))
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that decides what is prepared."""

    seed: int = 1
    num_training: int = 4096
    num_validation: int = 256
    asks: float = 0.35  # how often the teacher calls the calculator
    warm_start_steps: int = 1600
    warm_start_batch: int = 64
    learning_rate: float = 3e-3
    hidden_size: int = 64
    num_layers: int = 3


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each of PIECES."""
    vocabulary = {token: number for number, token in enumerate([PAD, UNKNOWN, *PIECES])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(PATTERN), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=END, unk_token=UNKNOWN)
    fast.add_special_tokens({"additional_special_tokens": [START]})
    # Added tokens are found first: transformers gives every tokenizer of a Qwen2 model that family's word splitting.
    fast.add_tokens([AddedToken(piece, normalized=False) for piece in (CALL, CLOSE, *ROLES, "\n")])
    fast.chat_template = TEMPLATE
    return fast


def question(pair: Pair) -> str:
    return f"{pair[0]}*{pair[1]}=?"


def conversation(pair: Pair, *, asks: bool) -> list[dict[str, str]]:
    """What the teacher shows."""
    user, answer = {"role": "user", "content": question(pair)}, {"role": "assistant", "content": str(math.prod(pair))}
    if not asks:
        return [user, answer]
    call = {"role": "assistant", "content": f"{CALL}{pair[0]}*{pair[1]}{CLOSE}"}
    return [user, call, {"role": "tool", "content": str(math.prod(pair))}, answer]


def rows(pairs: list[Pair], split: str) -> list[dict]:
    """Rows of verl's parquet schema."""
    return [
        {
            "data_source": DATA_SOURCE,
            "prompt": [{"role": "user", "content": question(pair)}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(math.prod(pair))},
            "extra_info": {"split": split, "index": index},
        }
        for index, pair in enumerate(pairs)
    ]


def warm_start(
    folder: Path, model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, training: list[Pair], recipe: Recipe
) -> Path:
    """Supervised learning from the teacher, `verl-like sft`: 20 steps of warm-up, cosine decay to zero. The model's
    folder."""
    rng = random.Random(recipe.seed)
    pairs = rng.choices(training, k=recipe.warm_start_steps * recipe.warm_start_batch)
    save_checkpoint(folder / "new_model", model, tokenizer)
    return supervised(
        folder / "new_model",
        [{"messages": conversation(pair, asks=rng.random() < recipe.asks)} for pair in pairs],
        folder / "run",
        steps=recipe.warm_start_steps,
        batch_size=recipe.warm_start_batch,
        seed=recipe.seed,
        optim__lr=recipe.learning_rate,
        sft__max_length=64,
        data__shuffle=False,  # they come by chance
    )


def prepare(output_dir: Path, recipe: Recipe) -> None:
    """Write data and warm-started model. Reuses a finished folder."""
    done = output_dir / "prepared.json"
    if done.exists() and json.loads(done.read_text()) == asdict(recipe):
        print(f"Using the data and model prepared earlier in {output_dir} (delete the folder to start over).")
        return
    done.unlink(missing_ok=True)
    (output_dir / "data").mkdir(parents=True, exist_ok=True)
    pairs = [(a, b) for a in range(100, 1000) for b in range(10, 100)]
    random.Random(recipe.seed).shuffle(pairs)
    training = pairs[: recipe.num_training]
    validation = pairs[recipe.num_training : recipe.num_training + recipe.num_validation]
    for split, part in (("train", training), ("val", validation)):
        pq.write_table(pa.Table.from_pylist(rows(part, split)), output_dir / "data" / f"{split}.parquet")
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, hidden_size=recipe.hidden_size, num_layers=recipe.num_layers, seed=recipe.seed)
    print(f"{len(training)} training and {len(validation)} validation questions such as {question(training[0])}")
    print(f"Warm start of a new {model.num_parameters() / 1e6:.2f}M-parameter Qwen2 model, a few minutes:")
    started = time.time()
    for folder in ("warm_start", "model"):
        shutil.rmtree(output_dir / folder, ignore_errors=True)
    own = pairs[recipe.num_training + recipe.num_validation :]
    shutil.copytree(warm_start(output_dir / "warm_start", model, tokenizer, own, recipe), output_dir / "model")
    done.write_text(json.dumps(asdict(recipe)))
    print(f"Warm start took {time.time() - started:.0f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-dir", type=Path, default=Path("outputs/agent_tools"))
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    prepare(arguments.output_dir, Recipe(seed=arguments.seed))


if __name__ == "__main__":
    main()
