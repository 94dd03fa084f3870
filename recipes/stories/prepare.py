"""Story openings in verl's row schema, as prompts for the stories260k model.

python recipes/stories/prepare.py --output-dir outputs/stories
"""

from __future__ import annotations

import argparse
import itertools
import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

HEROES = ("Lily", "Tom", "Ben", "Mia", "Sam", "Anna", "Max", "Lucy", "Tim", "Sue", "Jack", "Amy")
KINDS = ("a little girl", "a little boy", "a small dog", "a big cat", "a happy bird", "a brave mouse")
PLACES = ("in the park", "at home", "in the garden", "near the sea", "in the woods", "at school")


def openings() -> list[str]:
    """All openings: "Once upon a time, there was a small dog named Max. One day, Max was in the park."."""
    return [
        f"Once upon a time, there was {kind} named {hero}. One day, {hero} was {place}."
        for hero, kind, place in itertools.product(HEROES, KINDS, PLACES)
    ]


def rows(prompts: list[str], split: str) -> list[dict]:
    return [
        {
            "data_source": "stories",
            "prompt": [{"role": "user", "content": prompt}],
            "ability": "writing",
            "reward_model": {"style": "rule", "ground_truth": ""},
            "extra_info": {"split": split, "index": index},
        }
        for index, prompt in enumerate(prompts)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-dir", type=Path, default=Path("outputs/stories"))
    parser.add_argument("--num-validation", type=int, default=32)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    prompts = openings()
    random.Random(arguments.seed).shuffle(prompts)
    folder = arguments.output_dir / "data"
    folder.mkdir(parents=True, exist_ok=True)
    splits = {"val": prompts[: arguments.num_validation], "train": prompts[arguments.num_validation :]}
    for split, chosen in splits.items():
        pq.write_table(pa.Table.from_pylist(rows(chosen, split)), folder / f"{split}.parquet")
        print(f"{folder / f'{split}.parquet'}: {len(chosen)} story openings")


if __name__ == "__main__":
    main()
