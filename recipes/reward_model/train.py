"""Train a small reward model on preference pairs: a sequence classifier with one label, for reward_model.enable.

    python recipes/reward_model/train.py --pairs pairs.json --tokenizer FOLDER --output-dir outputs/reward_model

PAIRS is a JSON list of {"conversations": [{"from", "value"}], "chosen": {"value"}, "rejected": {"value"}}. The loss is
-log sigmoid(score(chosen) - score(rejected)) (Bradley and Terry 1952; Ouyang et al. 2022, arXiv 2203.02155).
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForSequenceClassification

Pair = tuple[list[int], list[int]]  # tokens of the chosen and of the rejected text
ROLES = {"human": "user", "gpt": "assistant", "system": "system"}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Size of the model and of the training."""

    hidden_size: int = 128
    num_layers: int = 2
    max_length: int = 256
    steps: int = 120
    batch_size: int = 8
    learning_rate: float = 1e-3
    seed: int = 1


def read_pairs(path: Path, tokenizer: Any, max_length: int) -> list[Pair]:
    """Each pair as two conversations in the tokenizer's own chat template, cut at max_length tokens."""
    pairs = []
    for record in json.loads(path.read_text(encoding="utf-8")):
        prompt = [{"role": ROLES[m["from"]], "content": m["value"]} for m in record["conversations"]]
        chosen, rejected = (
            tokenizer.apply_chat_template(
                [*prompt, {"role": "assistant", "content": record[side]["value"]}], tokenize=True, return_dict=False
            )[:max_length]
            for side in ("chosen", "rejected")
        )
        if chosen != rejected:
            pairs.append((chosen, rejected))
    return pairs


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


def scores(model: Qwen2ForSequenceClassification, texts: Sequence[Sequence[int]]) -> Tensor:
    """[B]: the head's output at the last token of each text (right padded here)."""
    width = max(len(text) for text in texts)
    ids = torch.tensor([[*text, *[model.config.pad_token_id] * (width - len(text))] for text in texts])
    mask = torch.arange(width)[None, :] < torch.tensor([len(text) for text in texts])[:, None]
    hidden = model.model(input_ids=ids, attention_mask=mask.long()).last_hidden_state
    last = hidden[torch.arange(len(texts)), mask.sum(dim=1) - 1]
    return model.score(last)[:, 0]


def train(model: Qwen2ForSequenceClassification, pairs: Sequence[Pair], settings: Settings) -> None:
    """Pairwise logistic regression on random batches of pairs."""
    generator = random.Random(settings.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, weight_decay=0.01)
    model.train()
    for step in range(settings.steps):
        batch = generator.sample(list(pairs), min(settings.batch_size, len(pairs)))
        both = scores(model, [chosen for chosen, _ in batch] + [rejected for _, rejected in batch])
        margin = both[: len(batch)] - both[len(batch) :]
        loss = -torch.nn.functional.logsigmoid(margin).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 20 == 0:
            print(f"step {step}: loss {loss.item():.3f}")
    model.eval()


@torch.no_grad()
def accuracy(model: Qwen2ForSequenceClassification, pairs: Sequence[Pair]) -> float:
    """Share of pairs whose chosen text scores higher."""
    right = [bool(scores(model, [chosen])[0] > scores(model, [rejected])[0]) for chosen, rejected in pairs]
    return sum(right) / len(right)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=Path, required=True)
    parser.add_argument("--tokenizer", required=True, help="folder or hub name")
    parser.add_argument("--output-dir", type=Path, default=Path("outputs/reward_model"))
    parser.add_argument("--steps", type=int, default=Settings.steps)
    parser.add_argument("--held-out", type=int, default=40, help="pairs kept for the accuracy")
    arguments = parser.parse_args()
    settings = Settings(steps=arguments.steps)
    tokenizer = AutoTokenizer.from_pretrained(arguments.tokenizer)
    pairs = read_pairs(arguments.pairs, tokenizer, settings.max_length)
    random.Random(settings.seed).shuffle(pairs)
    held_out, training = pairs[: arguments.held_out], pairs[arguments.held_out :]
    model = build_model(len(tokenizer), tokenizer.pad_token_id, settings)
    train(model, training, settings)
    print(f"accuracy: {accuracy(model, training[:100]):.3f} on pairs seen, {accuracy(model, held_out):.3f} on others")
    model.save_pretrained(arguments.output_dir)
    tokenizer.save_pretrained(arguments.output_dir)
    print(f"wrote {arguments.output_dir}: reward_model.enable=True reward_model.model.path={arguments.output_dir}")


if __name__ == "__main__":
    main()
