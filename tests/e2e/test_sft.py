"""Supervised runs from the command line to the checkpoint, against plain transformers row by row."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support import MEASURED, metrics_of, overrides, with_answers, write_task
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.worlds.processes import run_module
from verl_like.data.chat import PromptEncoder
from verl_like.kit.verbs.template_cases import as_written
from verl_like.trainer.compose import compose
from verl_like.trainer.run import run as train
from verl_like.trainer.sft_trainer import OBJECTIVE


def conversation(number: int, turns: int) -> list[dict[str, Any]]:
    """Sums, of which every answer is right; one in three assistant's messages is not trained."""
    found: list[dict[str, Any]] = [{"role": "system", "content": "Add."}] if number % 2 else []
    for turn in range(turns):
        found.append({"role": "user", "content": f"{number}+{turn}="})
        found.append({"role": "assistant", "content": str(number + turn), "train": (number + turn) % 3 != 0})
    return found


ROWS = [conversation(number, 1 + number % 3) for number in range(24)]
TRAINED = [row for row in ROWS if any(message.get("train") for message in row)]  # two steps an epoch; 8 are left out


def settings(folder: Path, model: Path, name: str, **more: Any) -> list[str]:
    """A command line of conversations."""
    return with_answers(folder, model, name, [{"messages": row} for row in ROWS], **more)


def run(folder: Path, model: Path, name: str, **more: Any) -> list[dict[str, float]]:
    train(compose([OBJECTIVE, *settings(folder, model, name, **more)]))
    return metrics_of(folder / name)


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "actor" / "huggingface" / "model.safetensors")


def tokens_of(encoder: PromptEncoder, row: list[dict[str, Any]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids of a conversation [1, T], and which of tokens 1.. are trained, [T - 1]."""
    messages = [{k: v for k, v in message.items() if k != "train"} for message in row]
    ids = torch.tensor(encoder.encode([(messages, None)], to_answer=False))
    trained_T = torch.zeros(ids.shape[1], dtype=torch.bool)
    for place, message in enumerate(row):
        if message.get("train"):
            start = len(encoder.encode([(messages[:place], None)])[0])
            trained_T[start : start + len(as_written(encoder, messages[:place], messages[place], None))] = True
    return ids, trained_T[1:]


def plain_run(model: Path, steps: int) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    """The same training by transformers, a conversation at a time; losses, norms and weights in the end."""
    tokenizer, network = AutoTokenizer.from_pretrained(model), AutoModelForCausalLM.from_pretrained(model)
    encoder, found = PromptEncoder(tokenizer, {}), []
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2, betas=(0.9, 0.95), eps=1e-4, weight_decay=0.01)
    for step in range(steps):
        sums, count = [], 0
        for row in TRAINED[8 * (step % 2) :][:8]:
            ids, mask = tokens_of(encoder, row)
            log_probs = network(ids).logits[0, :-1].log_softmax(-1)
            sums.append(-log_probs[mask, ids[0, 1:][mask]].sum())
            count += int(mask.sum())
        loss = torch.stack(sums).sum() / count
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        found.append({"train/loss": loss.item(), "actor/grad_norm": norm.item(), "train/trained_tokens": count})
    return found, network.state_dict()


def test_a_run_is_transformers_row_by_row(tmp_path: Path, chat_model: Path) -> None:
    """Losses, gradients (their norms, and what AdamW makes of them) and validation."""
    expected, weights = plain_run(chat_model, 3)
    records = run(tmp_path, chat_model, "out", **{"data.val_files": tmp_path / "val.jsonl", "trainer.test_freq": 1})
    for record, plain in zip(records, expected, strict=True):
        assert {name: record[name] for name in plain} == pytest.approx(plain, rel=1e-6)
    saved = weights_of(tmp_path / "out" / "global_step_3")
    for name, tensor in saved.items():
        torch.testing.assert_close(tensor, weights[name], rtol=1e-5, atol=2e-6)
    assert records[2]["val/loss"] < records[0]["val/loss"]
    assert records[2]["val-core/sft/loss/mean@1"] == records[2]["val/loss"]


def test_a_resumed_run_is_the_same_and_stops_early(tmp_path: Path, chat_model: Path) -> None:
    lora = {"model.lora_rank": 4, "model.lora_alpha": 8, "optim.lr_scheduler_type": "cosine", "data.shuffle": True}
    lora |= {"optim.total_training_steps": 4, "data.val_files": tmp_path / "val.jsonl", "trainer.test_freq": 1}
    whole = run(tmp_path, chat_model, "whole", **lora, **{"trainer.total_training_steps": 4})
    run(tmp_path, chat_model, "parts", **lora, **{"trainer.total_training_steps": 2})
    best = {"trainer.best_metric": "val/loss", "trainer.early_stop_patience": 1, "trainer.best_mode": "max"}
    parts = run(tmp_path, chat_model, "parts", **lora, **{"trainer.total_training_steps": 4})
    for one, other in zip(whole, parts, strict=True):
        assert {k: v for k, v in one.items() if not k.startswith(MEASURED)} == {
            k: v for k, v in other.items() if not k.startswith(MEASURED)
        }
    first, second = (weights_of(tmp_path / name / "global_step_4") for name in ("whole", "parts"))
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())
    stopped = run(tmp_path, chat_model, "early", **lora, **best, **{"trainer.total_training_steps": 9})
    assert len(stopped) == 2  # a loss that falls is worse and worse, where the largest is asked for


def test_two_ranks_under_torchrun_make_the_same_run(tmp_path: Path, chat_model: Path) -> None:
    one = run(tmp_path, chat_model, "one")
    words = [word for word in settings(tmp_path, chat_model, "two") if not word.startswith("trainer.launcher")]
    rank = {"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}
    done = run_module("verl_like.trainer.sft_trainer", words, joined=True, timeout=240, OMP_NUM_THREADS="1", **rank)
    assert done.returncode == 0, done.stdout
    other = run_module("verl_like.trainer.sft_trainer", words, joined=True, timeout=60, **rank | {"LOCAL_RANK": "1"})
    assert (other.returncode, other.stdout) == (0, "")
    for single, double in zip(one, metrics_of(tmp_path / "two"), strict=True):
        for name in ("train/loss", "actor/grad_norm", "train/trained_tokens"):
            assert double[name] == pytest.approx(single[name], rel=2e-6), name


def test_reinforcement_learning_begins_with_what_it_writes(tmp_path: Path, tiny_model: Path) -> None:
    rows = [{"extra_info": {"question": f"{i}+{i}=", "answer": str(2 * i)}} for i in range(16)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    columns = {"data.prompt_key": "extra_info", "data.response_key": "extra_info", "data.multiturn.enable": False}
    columns |= {"data.prompt_dict_keys": "[question]", "data.response_dict_keys": "[answer]"}
    more = {"data.train_files": tmp_path / "pairs.jsonl", "trainer.total_training_steps": 1}
    run(tmp_path, tiny_model, "sft", **columns, **more)
    model = tmp_path / "sft" / "global_step_1" / "actor" / "huggingface"
    train(compose(overrides(write_task(tmp_path), model, tmp_path / "rl", trainer__total_training_steps=1)))
    assert "critic/score/mean" in metrics_of(tmp_path / "rl")[0]
    shutil.rmtree(tmp_path / "rl")
    with pytest.raises(SystemExit, match=r"trainer\.objective=rl, but .* is of a run with sft: begin with its model"):
        train(compose(overrides(write_task(tmp_path), model, tmp_path / "sft", trainer__total_training_steps=2)))
