"""Prepare the recipe: pictures of a disc and a square, and a tiny vision-language model that often names the wrong one.

    python recipes/vision/prepare.py --output-dir outputs/vision --seed 1

writes OUTPUT/data/{train,val}.parquet, the same with the pictures dealt to other questions (shuffled_*.parquet, for the
control), and OUTPUT/model (a Hugging Face folder). The warm start is supervised: its teacher names the colour of the
other shape in most lessons, so that the model sees colours and shapes, and is mostly wrong.
"""

from __future__ import annotations

import argparse
import io
import math
import random
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from PIL import Image
from scene import Scene, build_model, build_processor, build_tokenizer, save, scene
from transformers import PreTrainedTokenizerFast, Qwen2VLForConditionalGeneration

NUM_TRAIN, NUM_VAL, NUM_LESSONS = 1500, 300, 3000
WRONG = 0.6  # of the lessons
STEPS, BATCH, LEARNING_RATE = 500, 64, 1e-3


def rows(scenes: list[Scene], pictures: list[bytes], split: str) -> list[dict]:
    """Rows of verl's schema."""
    return [
        {
            "data_source": "disc_and_square",
            "prompt": [{"role": "user", "content": each.question}],
            "images": [{"bytes": picture}],
            "ability": "vision",
            "reward_model": {"style": "rule", "ground_truth": each.answer},
            "extra_info": {"split": split, "index": index},
        }
        for index, (each, picture) in enumerate(zip(scenes, pictures, strict=True))
    ]


def write(folder: Path, split: str, scenes: list[Scene], rng: random.Random) -> None:
    """Both files of a split, in row groups small enough to be read one at a time."""
    folder.mkdir(parents=True, exist_ok=True)
    pictures = [each.picture for each in scenes]
    dealt = rng.sample(pictures, len(pictures))
    for name, chosen in ((split, pictures), (f"shuffled_{split}", dealt)):
        table = pa.Table.from_pylist(rows(scenes, chosen, split))
        pq.write_table(table, folder / f"{name}.parquet", row_group_size=100)


class Lessons:
    """Scenes as tensors: tokens of question and answer [N, S], and patches [N, patches, width]."""

    def __init__(self, scenes: list[Scene], answers: list[str], tokenizer: PreTrainedTokenizerFast) -> None:
        images = [Image.open(io.BytesIO(each.picture)) for each in scenes]
        processed = build_processor()(images=images, return_tensors="pt")
        self.grid = processed["image_grid_thw"][0]
        self.patches = processed["pixel_values"].view(len(scenes), int(self.grid.prod()), -1)
        placeholders = "<|image_pad|>" * (int(self.grid.prod()) // 4)
        image = f"<|vision_start|>{placeholders}<|vision_end|>"
        texts = [
            f"{each.question.replace('<image>', image)}{answer}<|im_end|>"
            for each, answer in zip(scenes, answers, strict=True)
        ]
        self.ids = torch.tensor(tokenizer(texts)["input_ids"])
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
    model: Qwen2VLForConditionalGeneration, scenes: list[Scene], tokenizer: PreTrainedTokenizerFast, seed: int
) -> None:
    """Supervised learning from a teacher who mostly names the other shape's colour."""
    rng = random.Random(seed)
    lessons = Lessons(scenes, [each.colors[each.asked ^ (rng.random() < WRONG)] for each in scenes], tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    generator = torch.Generator().manual_seed(seed)
    for step in range(1, STEPS + 1):
        cosine = 0.5 * (1 + math.cos(math.pi * step / STEPS))
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * min(1.0, step / 20) * cosine
        chosen = torch.randint(len(scenes), (BATCH,), generator=generator)
        targets = lessons.ids[chosen, -2:].flatten()
        loss = torch.nn.functional.cross_entropy(lessons.logits(model, chosen).flatten(0, 1), targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 100 == 0:
            print(f"  step {step}/{STEPS}  loss {loss.item():.3f}", flush=True)


@torch.no_grad()
def accuracy(
    model: Qwen2VLForConditionalGeneration, scenes: list[Scene], tokenizer: PreTrainedTokenizerFast
) -> tuple[float, float]:
    """Share of right answers: (greedy, sampled at temperature 1)."""
    lessons = Lessons(scenes, [each.answer for each in scenes], tokenizer)
    probabilities = lessons.logits(model, torch.arange(len(scenes)))[:, 0].softmax(-1)
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
    train, val, taught = ([scene(rng) for _ in range(count)] for count in (NUM_TRAIN, NUM_VAL, NUM_LESSONS))
    for split, scenes in (("train", train), ("val", val)):
        write(out / "data", split, scenes, rng)
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, seed)
    print(f"Warm start of a new {model.num_parameters() / 1e6:.2f}M-parameter Qwen2-VL:")
    started = time.time()
    warm_start(model, taught, tokenizer, seed)
    greedy, sampled = accuracy(model, val, tokenizer)
    save(out / "model", model, tokenizer)
    print(f"It took {time.time() - started:.0f} s; right on validation: greedy {greedy:.2f}, sampled {sampled:.2f}")


if __name__ == "__main__":
    main()
