"""Train a small reward model on preference pairs: a sequence classifier with one label, for reward_model.enable.

    python recipes/reward_model/train.py --pairs pairs.json --tokenizer FOLDER --output-dir outputs/reward_model

PAIRS is a JSON list of {"conversations": [{"from", "value"}], "chosen": {"value"}, "rejected": {"value"}}. A new model
is trained by `verl-like preference preference.loss=reward`, in OUTPUT/run, and stands in OUTPUT/model. The loss is
-log sigmoid(score(chosen) - score(rejected)) (Bradley and Terry 1952; Ouyang et al. 2022, arXiv 2203.02155).
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForSequenceClassification

import verl_like

Row = dict[str, Any]  # prompt, chosen, rejected: chat messages, or texts with data.chat_template=none
ROLES = {"human": "user", "gpt": "assistant", "system": "system"}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Size of the model and of the training."""

    hidden_size: int = 128
    num_layers: int = 2
    max_length: int = 2048
    steps: int = 120
    batch_size: int = 8
    learning_rate: float = 1e-3
    seed: int = 1


def read_pairs(path: Path) -> list[Row]:
    """Rows of `verl-like preference`, without those whose answers are the same."""
    rows = []
    for record in json.loads(path.read_text(encoding="utf-8")):
        prompt = [{"role": ROLES[m["from"]], "content": m["value"]} for m in record["conversations"]]
        sides = {side: [{"role": "assistant", "content": record[side]["value"]}] for side in ("chosen", "rejected")}
        if sides["chosen"] != sides["rejected"]:
            rows.append({"prompt": prompt, **sides})
    return rows


def build_model(vocab_size: int, pad_id: int, settings: Settings) -> Qwen2ForSequenceClassification:
    """A random Qwen2 with a scoring head."""
    torch.manual_seed(settings.seed)
    config = Qwen2Config(
        vocab_size=vocab_size,
        hidden_size=settings.hidden_size,
        intermediate_size=3 * settings.hidden_size,
        num_hidden_layers=settings.num_layers,
        num_attention_heads=settings.hidden_size // 32,
        num_key_value_heads=settings.hidden_size // 32,
        max_position_embeddings=4096,
        num_labels=1,
        pad_token_id=pad_id,
        bos_token_id=None,
        eos_token_id=None,
    )
    return Qwen2ForSequenceClassification(config).float()


def train(
    folder: Path, tokenizer: Any, training: list[Row], held_out: list[Row], settings: Settings, **more: Any
) -> float:
    """Write folder/model, trained. The share of held-out pairs whose chosen answer scores higher. more: keys."""
    for name in ("new_model", "run", "model"):
        shutil.rmtree(folder / name, ignore_errors=True)
    build_model(len(tokenizer), tokenizer.pad_token_id, settings).save_pretrained(folder / "new_model")
    tokenizer.save_pretrained(folder / "new_model")
    for split, rows in (("train", training), ("val", held_out)):
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    values = {
        "trainer.objective": "preference",
        "preference.loss": "reward",
        "data.train_files": str(folder / "train.jsonl"),
        "data.val_files": str(folder / "val.jsonl"),
        "data.train_batch_size": settings.batch_size,
        "data.filter_overlong_prompts": True,
        "sft.max_length": settings.max_length,
        "data.seed": settings.seed,
        "model.path": str(folder / "new_model"),
        "model.enable_gradient_checkpointing": False,
        "optim.lr": settings.learning_rate,
        "checkpoint.save_contents": ["hf_model"],
        "trainer.total_training_steps": settings.steps,
        "trainer.device": "cpu",
        "trainer.launcher": "local",
        "trainer.seed": settings.seed,
        "trainer.report_freq": -1,
        "trainer.default_local_dir": str(folder / "run"),
    }
    verl_like.run(verl_like.compose(values | more))
    shutil.copytree(folder / "run" / f"global_step_{settings.steps}" / "actor" / "huggingface", folder / "model")
    last = (folder / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[-1]
    return json.loads(last)["val/accuracy"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=Path, required=True)
    parser.add_argument("--tokenizer", required=True, help="folder or hub name")
    parser.add_argument("--output-dir", type=Path, default=Path("outputs/reward_model"))
    parser.add_argument("--steps", type=int, default=Settings.steps)
    parser.add_argument("--held-out", type=int, default=40, help="pairs kept for the accuracy")
    arguments = parser.parse_args()
    settings = Settings(steps=arguments.steps)
    try:
        pairs = read_pairs(arguments.pairs)
    except (OSError, ValueError, KeyError, TypeError) as error:
        form = f"a JSON list of conversations of {', '.join(ROLES)}, each with chosen and rejected"
        parser.error(f"--pairs={arguments.pairs}: {type(error).__name__}: {error}; it has to be {form}")
    if len(pairs) <= arguments.held_out:
        parser.error(f"--held-out={arguments.held_out}: {arguments.pairs} has {len(pairs)} pairs of unlike answers")
    random.Random(settings.seed).shuffle(pairs)
    held_out, training = pairs[: arguments.held_out], pairs[arguments.held_out :]
    try:
        tokenizer = AutoTokenizer.from_pretrained(arguments.tokenizer)
    except (OSError, ValueError) as error:
        parser.error(f"--tokenizer={arguments.tokenizer}: {str(error).splitlines()[0]}")
    accuracy = train(arguments.output_dir, tokenizer, training, held_out, settings)
    model = arguments.output_dir / "model"
    print(f"accuracy: {accuracy:.3f} on pairs that it has not seen")
    print(f"wrote {model}: reward_model.enable=True reward_model.model.path={model}")


if __name__ == "__main__":
    main()
