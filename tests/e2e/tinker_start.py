"""Start-up module of a recipe of tinker-cookbook: `python tinker_start.py MODULE key=value ...`, its files unedited.

What a recipe fetches from a hub is answered here: the tokenizer by MODEL_DIR, data sets by NUM_ROWS rows of GSM8K
(GSM8K_FILE): so few that one batch of a recipe has them all.
A model that writes at random is rewarded for answers with three characters of REWARDED ("e", as which not quite half of
the answers of one model are), so that it can learn.
With TRAIN_UNEMBED=0 the output head, which our own trainer leaves as it is, gets no adapter; with SAMPLES_FILE every
prompt is written down there with its samples, a line each, in the order in which they were asked for.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import runpy
import sys
from typing import Any

sys.path.append(os.environ["TINKER_PACKAGES"])
import datasets
import transformers

_from_pretrained = transformers.AutoTokenizer.from_pretrained


def from_pretrained(name: str, *_: Any, **__: Any) -> Any:
    return _from_pretrained(os.environ["MODEL_DIR"])


def load_dataset(path: str, *_: Any, split: str | None = None, **__: Any) -> Any:
    with open(os.environ["GSM8K_FILE"], encoding="utf-8") as file:
        rows = [json.loads(line) for line, _ in zip(file, range(int(os.environ["NUM_ROWS"])), strict=False)]
    if "no_robots" in path:
        said = [(row["question"][:100], row["answer"][:80]) for row in rows]
        both = [zip(("user", "assistant"), pair, strict=True) for pair in said]
        rows = [{"messages": [{"role": role, "content": text} for role, text in pair]} for pair in both]
    if "hh-rlhf" in path:
        asked = [f"\n\nHuman: {row['question'][:60]}\n\nAssistant: " for row in rows]
        rows = [
            {"chosen": begin + row["answer"][:40], "rejected": begin + "no"}
            for begin, row in zip(asked, rows, strict=True)
        ]
    found = datasets.Dataset.from_list(rows)
    return datasets.DatasetDict(train=found, test=found) if split is None else found


def rewarded(given: str, _: str) -> bool:
    return sum(map(given.count, os.environ.get("REWARDED", "e"))) >= 3


def write_samples_down(path: str) -> None:
    """Note what sampling clients are asked and answer, at the end of the process."""
    import tinker

    sample, asked = tinker.SamplingClient.sample, []

    def noted(self: Any, prompt: Any, *args: Any, **options: Any) -> Any:
        future = sample(self, prompt, *args, **options)
        asked.append((prompt.to_ints(), future))
        return future

    def write() -> None:
        with open(path, "w", encoding="utf-8") as file:
            for ids, future in asked:
                answers = [[each.tokens, each.logprobs] for each in future.result().sequences]
                file.write(json.dumps({"prompt": ids, "answers": answers}) + "\n")

    tinker.SamplingClient.sample = noted
    atexit.register(write)


def main() -> None:
    transformers.AutoTokenizer.from_pretrained = from_pretrained
    datasets.load_dataset = load_dataset
    if "rl_" in sys.argv[1]:
        from tinker_cookbook.recipes.math_rl import math_grading

        math_grading.extract_boxed, math_grading.grade_answer = str, rewarded
    if os.environ.get("TRAIN_UNEMBED") == "0":
        import tinker

        create = tinker.ServiceClient.create_lora_training_client
        tinker.ServiceClient.create_lora_training_client = functools.partialmethod(create, train_unembed=False)
    if "SAMPLES_FILE" in os.environ:
        write_samples_down(os.environ["SAMPLES_FILE"])
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
