"""The same supervised steps through TRL's SFTTrainer, padded and packed, and through verl_like: tokens/s and losses.

    python recipes/trl_comparison/compare_sft.py --trl-python trl_env/bin/python --threads 1 --rounds 3

TRL's environment is the README's. Both sides train the same tokens, in the same order, on a new Qwen2 model in float32
(with --vocabulary 64 the benchmarks' `cpu` shape), at a learning rate of 0: so each step's loss is one of the same
weights. Every run is a process; a round is one of verl_like and one of TRL with each micro-batch size, padded and
packed. The first step is not counted. Processor seconds are printed beside the clock's: other programs disturb them
less. Packed, TRL's rows see each other without FlashAttention, which a CPU does not have: its losses are not those of
the data.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

STEPS, ROWS = 3, int(os.environ.get("ROWS", "64"))
OWN = "verl_like"


def write_inputs(folder: Path, vocabulary: int) -> None:
    """A model, and conversations of random words: 16 to 64 tokens asked, answers of 8 to 400, short ones mostly."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    words = ["<pad>", "<eos>", "<unk>", *(f"w{number}" for number in range(vocabulary - 3))]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
    fast.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        eos_token_id=1,
        pad_token_id=0,
        bos_token_id=None,
    )
    torch.manual_seed(1)
    Qwen2ForCausalLM(config).float().save_pretrained(folder / "model")
    fast.save_pretrained(folder / "tokenizer")  # beside the model it would get that family's splitting of words
    draw = random.Random(1)

    def text(count: int) -> str:
        return " ".join(f"w{draw.randrange(vocabulary - 3)}" for _ in range(count)) + " "

    lengths = [
        (draw.randint(16, 64), min(400, max(8, round(draw.lognormvariate(4.3, 0.8))))) for _ in range(STEPS * ROWS)
    ]
    rows = [
        {"messages": [{"role": "user", "content": text(asked)}, {"role": "assistant", "content": text(answered)}]}
        for asked, answered in lengths
    ]
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))


def seconds() -> tuple[float, float]:
    """Time by the clock, and of the processor."""
    return time.perf_counter(), time.process_time()


def of_verl_like(folder: Path) -> dict[str, Any]:
    """Seconds, tokens and losses of the steps; the tokens are written for the other side."""
    import verl_like
    from verl_like.config import DataConfig
    from verl_like.config.sft import SFTConfig
    from verl_like.models.loading import load_tokenizer
    from verl_like.plugins.sft.dataset import SFTDataset

    settings = {
        "trainer.objective": "sft",
        "data.train_files": str(folder / "train.jsonl"),
        "data.train_batch_size": ROWS,
        "data.shuffle": False,
        "data.max_token_len_per_gpu": 4096,
        "model.path": str(folder / "model"),
        "data.tokenizer": str(folder / "tokenizer"),
        "model.enable_gradient_checkpointing": False,
        "optim.lr": 0.0,
        "trainer.device": "cpu",
        "trainer.launcher": "local",
        "trainer.total_epochs": 1,
        "trainer.save_freq": -1,
        "trainer.report_freq": -1,
        "trainer.logger": [],
        "trainer.default_local_dir": str(folder / "run"),
        "trainer.resume_mode": "disable",
    }
    metrics = list[dict[str, float]]()
    with verl_like.build(verl_like.compose(settings)) as trainer:
        trainer.start()
        ends = [seconds()]
        while not trainer.done():
            metrics.append(trainer.step())
            ends.append(seconds())
        trainer.finish()
    data = DataConfig(messages_key="messages", train_files=[settings["data.train_files"]])
    tokenizer = load_tokenizer(str(folder / "tokenizer"), False, "data.tokenizer")
    dataset = SFTDataset(data, data.train_files, tokenizer, split="train", sft=SFTConfig())
    rows = [dataset.rows(number)[0] for number in range(len(dataset))]
    tokens = [{"input_ids": row.ids.tolist(), "completion_mask": row.trained.astype(int).tolist()} for row in rows]
    (folder / "tokens.json").write_text(json.dumps(tokens))
    losses, tokens = ([step[f"train/{name}"] for step in metrics] for name in ("loss", "tokens"))
    return {"ends": ends, "losses": losses, "tokens": tokens}


def of_trl(folder: Path, micro_batch: int, *, packed: bool) -> dict[str, Any]:
    """The same of TRL; it has no verl_like."""
    import torch
    from datasets import Dataset
    from torch.utils.data import SequentialSampler
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    class InOrder(SFTTrainer):
        def _get_train_sampler(self, dataset: Any = None) -> SequentialSampler:
            return SequentialSampler(dataset or self.train_dataset)

    ends = list[tuple[float, float]]()

    class Ends(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            ends.append(seconds())

        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append(seconds())

    rows = json.loads((folder / "tokens.json").read_text())
    settings: dict[str, Any] = {"packing": True, "max_length": 1024} if packed else {"max_length": 1024}
    steps = -(-ROWS // micro_batch)
    if packed:  # a pack of 1,024 tokens takes the place of several rows: as many packs a step as hold its tokens
        each = sum(len(row["input_ids"]) for row in rows) / STEPS
        steps = max(1, round(each / 1024 / micro_batch))
    trainer = InOrder(
        model=AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(folder / "tokenizer"),
        train_dataset=Dataset.from_list(rows),
        callbacks=[Ends()],
        args=SFTConfig(
            output_dir=str(folder / "trl"),
            per_device_train_batch_size=micro_batch,
            gradient_accumulation_steps=steps,
            max_steps=STEPS,
            learning_rate=0.0,
            lr_scheduler_type="constant",
            gradient_checkpointing=False,
            completion_only_loss=True,
            bf16=False,
            use_cpu=True,
            logging_steps=1,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            **settings,
        ),
    )
    trainer.train()
    logs = [log for log in trainer.state.log_history if "loss" in log]
    seen = [log["num_tokens"] for log in logs]
    tokens = [after - before for before, after in itertools.pairwise([0, *seen])]
    return {"ends": ends, "losses": [log["loss"] for log in logs], "tokens": tokens}


def speed(found: dict[str, Any]) -> tuple[float, float]:
    """Tokens of all steps but the first, by second of the clock and of the processor."""
    _, (clock, processor), *_, (last_clock, last_processor) = found["ends"]
    tokens = sum(found["tokens"][1:])
    return tokens / (last_clock - clock), tokens / (last_processor - processor)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trl-python", default=sys.executable)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--vocabulary", type=int, default=64)
    parser.add_argument("--padded", type=int, nargs="+", default=[4, 16], help="rows of TRL's micro-batches")
    parser.add_argument("--packed", type=int, nargs="+", default=[1, 4], help="packs of TRL's micro-batches")
    parser.add_argument("--side", nargs=3, metavar=("FOLDER", "KIND", "MICRO_BATCH"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.side:
        folder, kind, size = Path(arguments.side[0]), arguments.side[1], int(arguments.side[2])
        found = of_verl_like(folder) if kind == OWN else of_trl(folder, size, packed=kind == "packed")
        (folder / "found.json").write_text(json.dumps(found))
        return
    sides = [(OWN, 0), *(("padded", size) for size in arguments.padded), *(("packed", n) for n in arguments.packed)]
    losses, speeds = dict[tuple[str, int], list[float]](), defaultdict[tuple[str, int], list[tuple[float, float]]](list)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_inputs(folder, arguments.vocabulary)
        for kind, size in sides * arguments.rounds:
            command = [sys.executable if kind == OWN else arguments.trl_python, __file__]
            environment = os.environ | {"OMP_NUM_THREADS": str(arguments.threads)}
            side = ["--side", name, kind, str(size)]
            subprocess.run([*command, *side], check=True, stdout=subprocess.DEVNULL, env=environment)
            found = json.loads((folder / "found.json").read_text())
            losses[kind, size] = found["losses"]
            speeds[kind, size].append(speed(found))
            told = "{:,.0f} tokens/s, {:,.0f} by processor second".format(*speeds[kind, size][-1])
            print(f"{kind:>9} {size or '':>3}  {told}; losses {found['losses']}", flush=True)
    middle = {side: [median(column) for column in zip(*found, strict=True)] for side, found in speeds.items()}
    own = middle.pop((OWN, 0))
    ratios = [one / max(column) for one, column in zip(own, zip(*middle.values(), strict=True), strict=True)]
    padded = losses["padded", arguments.padded[0]]
    gap = max(abs(one - other) / abs(other) for one, other in zip(losses[OWN, 0], padded, strict=True))
    print("{:.2f} times TRL's fastest by the clock, {:.2f} by processor time".format(*ratios), end="; ")
    print(f"losses differ from its padded ones by {gap:.1e} at most")


if __name__ == "__main__":
    main()
