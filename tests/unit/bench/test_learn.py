"""Time to an accuracy: the benchmark whole, with few steps, and its parts beside the recipe's own."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.conftest import ROOT, load_script
from tests.unit.bench.tiny import bench
from tests.unit.teachers.test_teachers import PROMPTS, RESPONSES, rollouts
from verl_like.kit.bench.learn import accuracy, shuffle

_SMALL = ["data.train_batch_size=16", "actor_rollout_ref.actor.ppo_mini_batch_size=16"]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """The quickstart's folder after a shorter warm start, and its script."""
    folder = ROOT / "recipes" / "quickstart"
    sys.path.insert(0, str(folder))
    script = load_script(folder / "prepare.py", "quickstart_prepare")
    sys.path.remove(str(folder))
    out = tmp_path_factory.mktemp("learn") / "seed_1"
    script.prepare(out, script.Recipe(warm_start_steps=20))
    (out / "prepared.json").write_text(json.dumps({"recipe": asdict(script.Recipe()), "accuracy": 0.0}))
    return out, script


def test_all_methods_run_from_one_start(prepared: tuple[Path, Any], tmp_path: Path) -> None:
    options = ["--seeds", "1", "--steps", "2", "--every", "1", "--share", "0", "--out", str(prepared[0].parent)]
    report = bench(tmp_path / "learn.json", "learn", *options, "--", *_SMALL)
    steps = {row.name: row.figures["step"] for row in report.rows}
    assert steps == {f"{name}, seed 1": 1 for name in ("GRPO", "distillation", "shuffled teacher", "SFT")}
    assert all(row.seconds > 0 and row.figures["CPU, s"] > 0 for row in report.rows if row.seconds is not None)
    tokens = [report.row(f"{name}, seed 1").figures["tokens"] for name in ("GRPO", "distillation", "SFT")]
    assert tokens[0] > 6 * tokens[1] and tokens[2] == 16 * 10  # eight responses a prompt, one, and none but the answer
    assert report.figures["control"] is False and "REACHES it: MISSED" in report.notes[1]  # a target of 0


def test_accuracy_is_the_recipes(prepared: tuple[Path, Any]) -> None:
    folder, script = prepared
    _, pairs = script.split_pairs(1, script.Recipe.num_validation_pairs)
    model, tokenizer = (kind.from_pretrained(folder / "model") for kind in (AutoModelForCausalLM, AutoTokenizer))
    known = script.greedy_accuracy(model, tokenizer, pairs)
    assert 0 < known < 1 and accuracy(folder / "model", folder / "data" / "val.parquet") == pytest.approx(known)


def test_a_shuffled_teacher_sees_the_next_rows_prompt() -> None:
    class Seen:
        def evaluate(self, given: Any) -> Any:
            return given

    teachers = Seen()
    shuffle(teachers)
    shown = teachers.evaluate(rollouts())
    assert shown.prompt_lists() == PROMPTS[::-1]
    assert torch.equal(shown.response_ids_T, torch.tensor([i for ids in RESPONSES for i in ids]).int())
