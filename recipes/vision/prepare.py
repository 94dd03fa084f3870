"""Prepare the recipe: pictures of a disc, and a tiny vision-language model that mostly gives it the wrong name.

    python recipes/vision/prepare.py --output-dir outputs/vision --seed 1

writes OUTPUT/data/{train,val}.parquet, the same with the pictures dealt to other rows (shuffled_*.parquet, for the
control), and OUTPUT/model (a Hugging Face folder). The warm start is supervised, by a teacher who mixes colours up:
mostly red is called green, blue yellow, purple white, and the other way round. So the model sees the colours, and
nearly all of its likeliest answers are wrong: reinforcement learning has to look at the pictures to mend that.
"""

from __future__ import annotations

import argparse
import io
import math
import random
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from PIL import Image
from scene import COLORS, QUESTION, build_model, build_processor, build_tokenizer, picture, save
from transformers import PreTrainedTokenizerFast, Qwen2VLForConditionalGeneration

NUM_TRAIN, NUM_VAL, NUM_LESSONS = 1500, 300, 2000
MIXED_UP = 0.65  # of the lessons
STEPS, BATCH, LEARNING_RATE = 250, 64, 1e-3
NAMES = list(COLORS)


def draw_rows(count: int, split: str, rng: random.Random) -> list[dict[str, Any]]:
    """Rows of verl's schema."""
    colors = [rng.choice(NAMES) for _ in range(count)]
    return [
        {
            "data_source": "disc_color",
            "prompt": [{"role": "user", "content": QUESTION}],
            "images": [{"bytes": picture(color, rng)}],
            "ability": "vision",
            "reward_model": {"style": "rule", "ground_truth": color},
            "extra_info": {"split": split, "index": index},
        }
        for index, color in enumerate(colors)
    ]


def write(folder: Path, split: str, rows: list[dict[str, Any]], rng: random.Random) -> None:
    """Both files of a split, in row groups small enough to be read one at a time."""
    folder.mkdir(parents=True, exist_ok=True)
    images = [row["images"] for row in rows]
    for name, chosen in ((split, images), (f"shuffled_{split}", rng.sample(images, len(images)))):
        table = pa.Table.from_pylist([row | {"images": each} for row, each in zip(rows, chosen, strict=True)])
        pq.write_table(table, folder / f"{name}.parquet", row_group_size=100)


class Lessons:
    """Rows as tensors: tokens of question and answer [N, S], and patches [N, patches, width]."""

    def __init__(self, rows: list[dict[str, Any]], answers: list[str], tokenizer: PreTrainedTokenizerFast) -> None:
        images = [Image.open(io.BytesIO(row["images"][0]["bytes"])) for row in rows]
        processed = build_processor()(images=images, return_tensors="pt")
        self.grid = processed["image_grid_thw"][0]
        self.patches = processed["pixel_values"].view(len(rows), int(self.grid.prod()), -1)
        image = f"<|vision_start|>{'<|image_pad|>' * (int(self.grid.prod()) // 4)}<|vision_end|>"
        question = QUESTION.replace("<image>", image)
        self.ids = torch.tensor(tokenizer([f"{question}{answer}<|im_end|>" for answer in answers])["input_ids"])
        self.image_id = tokenizer.convert_tokens_to_ids("<|image_pad|>")

    def logits(self, model: Qwen2VLForConditionalGeneration, chosen: torch.Tensor) -> torch.Tensor:
        """[n, 2, V]: before the answer, and before its end."""
        ids = self.ids[chosen]
        return model(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            mm_token_type_ids=(ids == self.image_id).int(),
            pixel_values=self.patches[chosen].flatten(0, 1),
            image_grid_thw=self.grid.expand(len(chosen), 3),
        ).logits[:, -3:-1]


def warm_start(
    model: Qwen2VLForConditionalGeneration, rows: list[dict[str, Any]], tokenizer: PreTrainedTokenizerFast, seed: int
) -> None:
    """Supervised learning from the teacher who mixes colours up: AdamW, 20 steps of warm-up, cosine decay."""
    rng = random.Random(seed)
    right = [NAMES.index(row["reward_model"]["ground_truth"]) for row in rows]
    lessons = Lessons(rows, [NAMES[color ^ int(rng.random() < MIXED_UP)] for color in right], tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    generator = torch.Generator().manual_seed(seed)
    for step in range(1, STEPS + 1):
        cosine = 0.5 * (1 + math.cos(math.pi * step / STEPS))
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * min(1.0, step / 20) * cosine
        chosen = torch.randint(len(rows), (BATCH,), generator=generator)
        targets = lessons.ids[chosen, -2:].flatten()
        loss = torch.nn.functional.cross_entropy(lessons.logits(model, chosen).flatten(0, 1), targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 0:
            print(f"  step {step}/{STEPS}  loss {loss.item():.3f}", flush=True)


@torch.no_grad()
def accuracy(
    model: Qwen2VLForConditionalGeneration, rows: list[dict[str, Any]], tokenizer: PreTrainedTokenizerFast
) -> tuple[float, float]:
    """Share of right answers: (greedy, sampled at temperature 1)."""
    lessons = Lessons(rows, [row["reward_model"]["ground_truth"] for row in rows], tokenizer)
    probabilities = lessons.logits(model, torch.arange(len(rows)))[:, 0].softmax(-1)
    right = lessons.ids[:, -2]
    greedy = (probabilities.argmax(-1) == right).float().mean()
    return greedy.item(), probabilities.gather(1, right[:, None]).mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-dir", type=Path, default=Path("outputs/vision"))
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    out, seed = arguments.output_dir, arguments.seed
    if (out / "model" / "model.safetensors").exists():
        print(f"Using the data and model prepared earlier in {out} (delete the folder to start over).")
        return
    rng = random.Random(seed)
    train, val = draw_rows(NUM_TRAIN, "train", rng), draw_rows(NUM_VAL, "val", rng)
    for split, rows in (("train", train), ("val", val)):
        write(out / "data", split, rows, rng)
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, seed)
    print(f"Warm start of a new {model.num_parameters() / 1e6:.2f}M-parameter Qwen2-VL:")
    started = time.time()
    warm_start(model, draw_rows(NUM_LESSONS, "lessons", rng), tokenizer, seed)
    greedy, sampled = accuracy(model, val, tokenizer)
    save(out / "model", model, tokenizer)
    print(f"It took {time.time() - started:.0f} s; right on validation: greedy {greedy:.2f}, sampled {sampled:.2f}")


if __name__ == "__main__":
    main()
