"""Prepare the recipe: pictures of a disc, and a tiny vision-language model that mostly gives it the wrong name.

    python recipes/vision/prepare.py --output-dir outputs/vision --seed 1

writes OUTPUT/data/{train,val}.parquet, the same with the pictures dealt to other rows (shuffled_*.parquet, for the
control), and OUTPUT/model (a Hugging Face folder). The warm start is a supervised run (`verl-like sft`, in
OUTPUT/warm_start) on pictures and the words of a teacher who mixes colours up: mostly red is called green, blue yellow,
purple white, and the other way round. So the model sees the colours, and nearly all of its likeliest answers are wrong:
reinforcement learning has to look at the pictures to mend that.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from scene import COLORS, QUESTION, build_model, build_tokenizer, picture, save

sys.path.append(str(Path(__file__).resolve().parents[1] / "quickstart"))
from warm_start import supervised

NUM_TRAIN, NUM_VAL, NUM_LESSONS = 1500, 300, 2000
MIXED_UP = 0.65  # of the lessons
EPOCHS, BATCH, LEARNING_RATE = 8, 64, 1e-3
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


def lessons(rows: list[dict[str, Any]], rng: random.Random) -> list[dict[str, Any]]:
    """What the teacher says, who mixes colours up."""
    shown = []
    for row in rows:
        color = NAMES.index(row["reward_model"]["ground_truth"]) ^ int(rng.random() < MIXED_UP)
        said = {"role": "assistant", "content": NAMES[color]}
        shown.append({"messages": [*row["prompt"], said], "images": row["images"]})
    return shown


def warm_start(folder: Path, seed: int, rng: random.Random) -> Path:
    """Supervised learning from the teacher, `verl-like sft`: 20 steps of warm-up, cosine decay to zero. The model's
    folder."""
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, seed)
    print(f"Warm start of a new {model.num_parameters() / 1e6:.2f}M-parameter Qwen2-VL:", flush=True)
    save(folder / "new_model", model, tokenizer)
    return supervised(
        folder / "new_model",
        lessons(draw_rows(NUM_LESSONS, "lessons", rng), rng),
        folder / "run",
        steps=EPOCHS * (NUM_LESSONS // BATCH),
        batch_size=BATCH,
        seed=seed,
        optim__lr=LEARNING_RATE,
        sft__max_length=32,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-dir", type=Path, default=Path("outputs/vision"))
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    out, seed = arguments.output_dir, arguments.seed
    done = out / "prepared.json"
    if done.exists() and json.loads(done.read_text()) == {"seed": seed}:
        print(f"Using the data and model prepared earlier in {out} (delete the folder to start over).")
        return
    done.unlink(missing_ok=True)
    rng = random.Random(seed)
    train, val = draw_rows(NUM_TRAIN, "train", rng), draw_rows(NUM_VAL, "val", rng)
    for split, rows in (("train", train), ("val", val)):
        write(out / "data", split, rows, rng)
    started = time.time()
    for folder in ("warm_start", "model"):
        shutil.rmtree(out / folder, ignore_errors=True)
    shutil.copytree(warm_start(out / "warm_start", seed, rng), out / "model")
    done.write_text(json.dumps({"seed": seed}))
    print(f"Warm start took {time.time() - started:.0f} s")


if __name__ == "__main__":
    main()
