"""Runs on preferences from the command line to the checkpoint, against plain transformers row by row."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support import MEASURED, metrics_of, overrides, with_answers, write_task
from torch.nn.functional import logsigmoid
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from verl_like.batch import Rollouts, Scores
from verl_like.plugins.preference.__main__ import OBJECTIVE
from verl_like.trainer.compose import compose
from verl_like.trainer.recording import read_step
from verl_like.trainer.run import run as train


def said(role: str, text: str) -> list[dict[str, str]]:
    return [{"role": role, "content": text}]


ROWS = [
    {
        "prompt": said("user", f"{number}+{number}="),
        "chosen": said("assistant", str(2 * number)),
        "rejected": said("assistant", str(number) * (1 + number % 3)),
    }
    for number in range(24)
]


def run(folder: Path, model: Path, name: str, **more: Any) -> list[dict[str, float]]:
    """A run of pairs; its metrics."""
    few = {"data.max_token_len_per_gpu": 60, "trainer.total_epochs": 9}
    train(compose([OBJECTIVE, *with_answers(folder, model, name, ROWS, **(few | more))]))
    return metrics_of(folder / name)


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "actor" / "huggingface" / "model.safetensors")


def plain_run(model: Path, steps: int, beta: float) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    """The same training by transformers, an answer at a time; losses, norms and weights in the end."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    policy, reference = (AutoModelForCausalLM.from_pretrained(model) for _ in range(2))
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-2, eps=1e-4, weight_decay=0.01)

    def log_prob(network: Any, prompt: Any, answer: Any) -> torch.Tensor:
        start = len(tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False))
        text = tokenizer.apply_chat_template(prompt + answer, tokenize=False).rstrip()
        ids = torch.tensor(tokenizer(text)["input_ids"])
        log_probs = network(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])
        return log_probs[start - 1 :].sum()

    found = []
    for step in range(steps):
        terms = []
        for row in ROWS[8 * step : 8 * step + 8]:
            w, r = (log_prob(policy, row["prompt"], row[key]) for key in ("chosen", "rejected"))
            with torch.no_grad():
                w_ref, r_ref = (log_prob(reference, row["prompt"], row[key]) for key in ("chosen", "rejected"))
            terms.append(-logsigmoid(beta * ((w - w_ref) - (r - r_ref))))
        loss = torch.stack(terms).mean()
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        found.append({"train/loss": loss.item(), "actor/grad_norm": norm.item()})
    return found, policy.state_dict()


def test_a_run_is_transformers_row_by_row(tmp_path: Path, chat_model: Path) -> None:
    """Losses, gradients, validation; and a second run finds the reference's log-probs of the first."""
    shared = {"data.val_files": tmp_path / "val.jsonl", "preference.reference_cache": tmp_path / "cache"}
    records = run(tmp_path, chat_model, "out", **shared, **{"trainer.test_freq": 1, "preference.beta": 0.5})
    expected, weights = plain_run(chat_model, 3, beta=0.5)
    for record, plain in zip(records, expected, strict=True):
        assert {name: record[name] for name in plain} == pytest.approx(plain, rel=2e-6)
    for name, tensor in weights_of(tmp_path / "out" / "global_step_3").items():
        torch.testing.assert_close(tensor, weights[name], rtol=1e-5, atol=3e-6)
    assert records[2]["val/loss"] < records[0]["val/loss"] and records[2]["val/accuracy"] > 0.8
    assert records[2]["val-core/preference/loss/mean@1"] == records[2]["val/loss"]
    made = {file.name: file.stat().st_mtime_ns for file in (tmp_path / "cache").iterdir()}
    run(tmp_path, chat_model, "again", **shared, **{"preference.loss": "ipo", "trainer.total_training_steps": 1})
    assert len(made) == 2 and made == {file.name: file.stat().st_mtime_ns for file in (tmp_path / "cache").iterdir()}


def test_a_resumed_run_is_the_same_and_stops_early(tmp_path: Path, chat_model: Path) -> None:
    lora = {"model.lora_rank": 4, "model.lora_alpha": 8, "optim.lr_scheduler_type": "cosine", "data.shuffle": True}
    lora |= {"optim.total_training_steps": 4, "data.val_files": tmp_path / "val.jsonl", "trainer.test_freq": 1}
    lora |= {"preference.loss": "kto"}
    whole = run(tmp_path, chat_model, "whole", **lora, **{"trainer.total_training_steps": 4})
    run(tmp_path, chat_model, "parts", **lora, **{"trainer.total_training_steps": 2})
    parts = run(tmp_path, chat_model, "parts", **lora, **{"trainer.total_training_steps": 4})
    for one, other in zip(whole, parts, strict=True):
        assert {k: v for k, v in one.items() if not k.startswith(MEASURED)} == {
            k: v for k, v in other.items() if not k.startswith(MEASURED)
        }
    assert whole[0]["train/loss"] == pytest.approx(0.5) and whole[3]["train/loss"] < 0.5
    first, second = (weights_of(tmp_path / name / "global_step_4") for name in ("whole", "parts"))
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())
    best = {"trainer.best_metric": "val/loss", "trainer.early_stop_patience": 1, "trainer.best_mode": "max"}
    assert len(run(tmp_path, chat_model, "early", **lora, **best, **{"trainer.total_training_steps": 9})) == 2


def test_a_reward_model_judges_a_run_whose_answers_are_then_compared(tmp_path: Path, tiny_model: Path) -> None:
    """Pairs of a file make a reward model, which scores a run's answers; its best and worst are pairs again."""
    draw = random.Random(1)
    texts = [["".join(draw.choices("0123456777", k=6)) for _ in range(2)] for _ in range(200)]
    ordered = [sorted(pair, key=lambda text: -text.count("7")) for pair in texts]
    rows = [
        {"prompt": f"{draw.randrange(10)}+1=", "chosen": more, "rejected": fewer, "margin": 0.1}
        for more, fewer in ordered
        if more.count("7") > fewer.count("7")
    ]
    (tmp_path / "sevens.jsonl").write_text("\n".join(map(json.dumps, rows)))
    files = {"data.train_files": tmp_path / "sevens.jsonl", "data.val_files": tmp_path / "sevens.jsonl"}
    short = {"trainer.total_training_steps": 20, "trainer.total_epochs": 9, "data.train_batch_size": 32}
    short |= {"data.max_token_len_per_gpu": 2000, "optim.lr": 3e-3}
    learnt = run(tmp_path, tiny_model, "judge", **files, **short, **{"preference.loss": "reward"})
    assert learnt[0]["train/accuracy"] < 0.7 and learnt[-1]["val/accuracy"] > 0.9
    log = (tmp_path / "judge" / "verl_like.log").read_text()
    assert "the first row's chosen answer, what is" in log and "the first row's rejected answer, what is" in log
    judge = tmp_path / "judge" / "global_step_20" / "actor" / "huggingface"
    task = write_task(tmp_path) | {"custom_reward_function.path": "null", "data.val_files": "[]"}
    more = {"reward_model.enable": True, "reward_model.model.path": str(judge), "trainer.record_freq": 1}
    train(compose(overrides(task, tiny_model, tmp_path / "rl", trainer__total_training_steps=2, **more)))
    step = read_step(tmp_path / "rl" / "recorded" / "step_1.safetensors")
    rollouts, scores = step.stage("rollouts", Rollouts), step.stage("scores", Scores)
    model = AutoModelForSequenceClassification.from_pretrained(judge)
    row = rollouts.select([0])
    ids = torch.cat([row.prompt_ids_T, row.response_ids_T])
    assert float(scores.score_B[0]) == pytest.approx(model(ids[None].long()).logits.item(), abs=1e-5)
    own = {"preference.rollouts": f"[{tmp_path / 'rl'}]", "data.train_batch_size": 8, "preference.min_gap": 1e-6}
    compared = run(tmp_path, tiny_model, "dpo", **own)
    assert len(compared) == 3 and compared[0]["train/loss"] == pytest.approx(0.6931, abs=1e-4)


def test_what_would_part_the_two_passes_is_refused(tmp_path: Path, chat_model: Path) -> None:
    changed = {"model.override_config": "{attention_dropout: 0.1}", "data.train_files": tmp_path / "none.jsonl"}
    with pytest.raises(SystemExit, match=r"(?s)none\.jsonl.*drops attention_dropout in training.*override_config="):
        run(tmp_path, chat_model, "out", **changed)
