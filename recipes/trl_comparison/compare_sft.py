"""The same supervised steps through TRL's SFTTrainer, padded and packed, and through verl_like: tokens/s and losses.

    python recipes/trl_comparison/compare_sft.py --trl-python trl_env/bin/python

TRL's environment is the README's. Both sides train the same tokens, in the same order, on a new Qwen2 model of 4.7
million parameters in float32, with a learning rate of 0: so each step's loss is one of the same weights. TRL runs with
each of the micro-batch sizes given; its fastest run counts, padded or packed.
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
from pathlib import Path
from typing import Any

STEPS, ROWS = 3, int(os.environ.get("ROWS", "64"))
VOCABULARY = 2048


def write_inputs(folder: Path) -> None:
    """A model, and conversations of random words: 16 to 64 tokens asked, answers of 8 to 400, short ones mostly."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    words = ["<pad>", "<eos>", "<unk>", *(f"w{number}" for number in range(VOCABULARY - 3))]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
    fast.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=5,
        num_attention_heads=8,
        num_key_value_heads=2,
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
        return " ".join(f"w{draw.randrange(VOCABULARY - 3)}" for _ in range(count)) + " "

    lengths = [
        (draw.randint(16, 64), min(400, max(8, round(draw.lognormvariate(4.3, 0.8))))) for _ in range(STEPS * ROWS)
    ]
    rows = [
        {"messages": [{"role": "user", "content": text(asked)}, {"role": "assistant", "content": text(answered)}]}
        for asked, answered in lengths
    ]
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))


def of_verl_like(folder: Path, threads: int) -> dict[str, Any]:
    """Seconds of a step (without the first), tokens and losses; the tokens are written for the other side."""
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
    metrics = [*verl_like.run(verl_like.compose(settings)).steps.values()]
    data = DataConfig(messages_key="messages", train_files=[settings["data.train_files"]])
    tokenizer = load_tokenizer(str(folder / "tokenizer"), False, "data.tokenizer")
    dataset = SFTDataset(data, data.train_files, tokenizer, split="train", sft=SFTConfig())
    rows = [dataset.rows(number)[0] for number in range(len(dataset))]
    tokens = [{"input_ids": row.ids.tolist(), "completion_mask": row.trained.astype(int).tolist()} for row in rows]
    (folder / "tokens.json").write_text(json.dumps(tokens))
    return {
        "seconds": [step["timing_s/step"] for step in metrics],
        "losses": [step["train/loss"] for step in metrics],
        "tokens": [step["train/tokens"] for step in metrics],
        "threads": threads,
    }


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

    ends: list[float] = []

    class Ends(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            ends.append(time.perf_counter())

        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append(time.perf_counter())

    rows = json.loads((folder / "tokens.json").read_text())
    settings: dict[str, Any] = {"packing": True, "max_length": 1024} if packed else {"max_length": 1024}
    steps = -(-ROWS // micro_batch)
    if packed:  # a pack of 1,024 tokens takes the place of several rows: as many packs a step as hold its tokens
        each = sum(len(row["input_ids"]) for row in rows) / STEPS
        steps, micro_batch = max(1, round(each / 1024 / micro_batch)), micro_batch
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
    seconds = [after - before for before, after in itertools.pairwise(ends)]
    seen = [log["num_tokens"] for log in logs]
    tokens = [after - before for before, after in zip([0, *seen], seen, strict=False)]
    return {"seconds": seconds, "losses": [log["loss"] for log in logs], "tokens": tokens}


def speed(found: dict[str, Any]) -> float:
    """Tokens a second of all steps but the first."""
    return sum(found["tokens"][1:]) / sum(found["seconds"][1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trl-python", default=sys.executable)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[4, 16])
    parser.add_argument("--side", nargs=3, metavar=("FOLDER", "MICRO_BATCH", "PACKED"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.side:
        folder, micro_batch, packed = arguments.side
        found = of_trl(Path(folder), int(micro_batch), packed=packed == "packed")
        (Path(folder) / "found.json").write_text(json.dumps(found))
        return
    os.environ["OMP_NUM_THREADS"] = str(arguments.threads)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_inputs(folder)
        own = of_verl_like(folder, arguments.threads)
        print(f"verl_like       {speed(own):8,.0f} tokens/s  losses {own['losses']}", flush=True)
        best, padded = 0.0, own["losses"]
        for kind in ("padded", "packed"):
            for size in arguments.micro_batches:
                command = [arguments.trl_python, __file__, "--side", name, str(size), kind]
                subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
                found = json.loads((folder / "found.json").read_text())
                best = max(best, speed(found))
                padded = found["losses"] if kind == "padded" else padded
                print(f"TRL {kind} {size:>3}  {speed(found):8,.0f} tokens/s  losses {found['losses']}", flush=True)
        gap = max(abs(one - other) / abs(other) for one, other in zip(own["losses"], padded, strict=True))
        print(f"{speed(own) / best:.2f} times TRL's fastest; losses differ from its padded ones by {gap:.1e} at most")


if __name__ == "__main__":
    main()
