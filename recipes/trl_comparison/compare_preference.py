"""One batch of preferences through TRL's trainers and through verl_like: losses and gradients side by side.

    python recipes/trl_comparison/compare_preference.py

Both packages must be importable: TRL 1.16 beside this environment, by `pip install --target FOLDER trl`, PYTHONPATH.
TRL's own trainers read the same file, make their batch, and compute loss and gradient of the same weights, in float64:
so the rounding is verl_like's alone. The reference has other weights. Prints each loss, how far the gradients are
from each other, relative to their norm, and the largest difference of a number of theirs; then how far TRL's own
gradient in float32 is from its in float64, which is what float32 costs without verl_like.
"""

from __future__ import annotations

import json
import logging
import random
import string
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, RewardConfig, RewardTrainer
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

from verl_like.batch import Denominators
from verl_like.config import DataConfig, PPOConfig, TrainerConfig
from verl_like.config.batch_plan import MicroBatchRule
from verl_like.config.model import ModelConfig
from verl_like.config.preference import PreferenceConfig
from verl_like.config.roles import every_role
from verl_like.config.sft import SFTConfig
from verl_like.engine.fsdp import FSDPEngine
from verl_like.kit.selfcheck.check import minibatch_gradients
from verl_like.parallel.dist import init_distributed
from verl_like.plugins.preference.dataset import PreferenceDataset
from verl_like.plugins.preference.losses import Measured, carried, referenced
from verl_like.plugins.preference.pairs import Carried

ROWS, RULE = 8, MicroBatchRule(max_tokens=150)  # micro-batches of two or three rows
BARE = {
    "report_to": "none",
    "use_cpu": True,
    "bf16": False,
    "max_length": 512,
    "per_device_train_batch_size": ROWS,
    "gradient_checkpointing": False,
}


def write_inputs(folder: Path) -> Any:
    """A policy and a reference of a tiny Qwen2, a tokenizer of characters, pairs and labelled answers as plain text."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    marks = ["<pad>", "<eos>", "<unk>"]
    vocabulary = {word: number for number, word in enumerate([*marks, *string.ascii_letters, *string.digits, " ", "."])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
    config = Qwen2Config(
        vocab_size=len(vocabulary),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.1,
        eos_token_id=1,
        pad_token_id=0,
        bos_token_id=None,
    )
    for seed, name in ((1, "policy"), (2, "reference")):
        torch.manual_seed(seed)
        Qwen2ForCausalLM(config).float().save_pretrained(folder / name)
        fast.save_pretrained(folder / name)
    torch.manual_seed(3)
    head = AutoModelForSequenceClassification.from_pretrained(folder / "policy", num_labels=1)
    head.save_pretrained(folder / "scores")
    fast.save_pretrained(folder / "scores")
    draw = random.Random(1)

    def text(least: int, most: int) -> str:
        return "".join(draw.choice(string.ascii_letters) for _ in range(draw.randint(least, most)))

    pairs = [
        {"prompt": text(5, 20), "chosen": text(3, 30), "rejected": text(3, 30), "margin": row / 10}
        for row in range(ROWS)
    ]
    labelled = [{"prompt": text(5, 20), "completion": text(3, 30), "label": row % 3 > 0} for row in range(ROWS)]
    for name, rows in (("pairs", pairs), ("labelled", labelled)):
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return AutoTokenizer.from_pretrained(folder / "policy")


def of_verl_like(folder: Path, tokenizer: Any, process: Any, preference: PreferenceConfig) -> tuple[float, Any]:
    """Loss and gradient of the file's rows."""
    config = PPOConfig(trainer=TrainerConfig(objective="preference"), preference=preference)
    name = "labelled" if preference.loss == "kto" else "pairs"
    data = DataConfig(chat_template="none")
    parts: dict[str, Any] = {"sft": SFTConfig(max_length=512), "preference": preference, "split": "train"}
    dataset = PreferenceDataset(data, [str(folder / f"{name}.jsonl")], tokenizer, **parts)
    objective = Carried(config)
    (want,) = objective.wants

    def engine(model: str) -> FSDPEngine:
        role = every_role(config)["actor"]
        values = {each: getattr(role, each) for each in ("kind", "optim", "grad_clip")}
        path = str(folder / ("scores" if preference.loss == "reward" else model))
        own = ModelConfig(path=path, enable_gradient_checkpointing=False)
        return FSDPEngine(type(role)(**values, model=own), process, num_schedule_steps=10)

    def said(model: FSDPEngine, rows: Any) -> Tensor:
        return model.forward(rows, want=objective.wants, rule=RULE)[want]

    order = list(range(ROWS))
    if referenced(preference):
        rows = dataset.batch(order, order)
        dataset.references_IS = Measured.of(rows, said(engine("reference"), rows)).policy_IS
    rows, policy = dataset.batch(order, order), engine("policy")
    learnt, metrics = carried(preference, rows, said(policy, rows))
    counts = Denominators(num_tokens=1, num_sequences=1, max_response_length=1)
    return metrics["loss"], minibatch_gradients(policy, learnt, objective, counts, rule=RULE)


def of_trl(folder: Path, tokenizer: Any, kind: Any, arguments: Any, file: str, dtype: torch.dtype) -> tuple[float, Any]:
    """Loss and gradient as a step of this trainer computes them."""
    more = dict[str, Any]()
    rows = [json.loads(line) for line in (folder / f"{file}.jsonl").read_text().splitlines()]
    if kind is not RewardTrainer:
        rows = [{name: value for name, value in row.items() if name != "margin"} for row in rows]
    reader = AutoModelForSequenceClassification if kind is RewardTrainer else AutoModelForCausalLM
    model = reader.from_pretrained(folder / ("scores" if kind is RewardTrainer else "policy"), dtype=dtype)
    if kind in (DPOTrainer, KTOTrainer):
        more["ref_model"] = AutoModelForCausalLM.from_pretrained(folder / "reference", dtype=dtype)
    trainer = kind(
        model=model, args=arguments, train_dataset=Dataset.from_list(rows), processing_class=tokenizer, **more
    )
    batch = trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
    loss = trainer.compute_loss(trainer.model, batch)
    loss.backward()
    return loss.item(), {name: each.grad for name, each in trainer.model.named_parameters()}


def cases(folder: Path) -> list[tuple[str, PreferenceConfig, Callable[..., Any], Any, str]]:
    """Name, our keys, TRL's trainer, its arguments and file."""
    bare = BARE | {"output_dir": str(folder / "trl")}
    dpo = {"loss_type": "sigmoid", "beta": 0.2, "label_smoothing": 0.0}
    return [
        ("dpo", PreferenceConfig(beta=0.2), DPOTrainer, DPOConfig(**bare | dpo), "pairs"),
        (
            "ipo",
            PreferenceConfig(loss="ipo", beta=0.2),
            DPOTrainer,
            DPOConfig(**bare | dpo | {"loss_type": "ipo"}),
            "pairs",
        ),
        (
            "dpo + sft",
            PreferenceConfig(beta=0.2, sft_loss_coef=0.5),
            DPOTrainer,
            DPOConfig(**bare | dpo | {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5]}),
            "pairs",
        ),
        (
            "kto",
            PreferenceConfig(loss="kto", beta=0.2, desirable_weight=1.2, undesirable_weight=0.8),
            KTOTrainer,
            KTOConfig(**bare, beta=0.2, desirable_weight=1.2, undesirable_weight=0.8),
            "labelled",
        ),
        ("orpo", PreferenceConfig(loss="orpo", beta=0.2), ORPOTrainer, ORPOConfig(**bare, beta=0.2), "pairs"),
        (
            "simpo",
            PreferenceConfig(loss="simpo", beta=2.0, margin=1.0, label_smoothing=0.1),
            CPOTrainer,
            CPOConfig(**bare, loss_type="simpo", beta=2.0, simpo_gamma=1.0, label_smoothing=0.1, cpo_alpha=0.0),
            "pairs",
        ),
        (
            "reward",
            PreferenceConfig(loss="reward", center_coef=0.01),
            RewardTrainer,
            RewardConfig(**bare, center_rewards_coefficient=0.01),
            "pairs",
        ),
    ]


def distances(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> tuple[float, float]:
    """Norm of the difference of two gradients over the second one's, and the largest difference of a number."""
    assert ours.keys() == theirs.keys()
    mine, yours = (torch.cat([side[name].double().flatten() for name in ours]) for side in (ours, theirs))
    return float((mine - yours).norm() / yours.norm()), float((mine - yours).abs().max())


def main() -> None:
    """Compare all losses."""
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as place:
        folder, process = Path(place), init_distributed(0, 1, 0, 1, "127.0.0.1", 29_611, "cpu", 300.0)
        tokenizer = write_inputs(folder)
        print(f"{'loss':<10} {'verl_like':>14} {'TRL':>14} {'gradient':>10} {'largest':>10} {'float32':>10}")
        for name, own, kind, arguments, file in cases(folder):
            ours = of_verl_like(folder, tokenizer, process, own)
            theirs, rounded = (
                of_trl(folder, tokenizer, kind, arguments, file, dtype) for dtype in (torch.float64, torch.float32)
            )
            relative, largest = distances(ours[1], theirs[1])
            told = f"{relative:>10.1e} {largest:>10.1e} {distances(rounded[1], theirs[1])[0]:>10.1e}"
            print(f"{name:<10} {ours[0]:>14.9f} {theirs[0]:>14.9f} {told}", flush=True)


if __name__ == "__main__":
    main()
