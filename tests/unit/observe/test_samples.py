from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.unit.observe import factory
from verl_like.observe.samples import Sample, dump_samples, make_samples, pick_samples, to_json


class LetterTokenizer:
    """1 is a, 2 is b ...; 0 is a special token."""

    def decode(self, token_ids: Any, *, skip_special_tokens: bool = False) -> str:
        assert skip_special_tokens
        return "".join(chr(96 + i) for i in token_ids if i != 0)


def test_records_have_verls_fields_without_padding_or_special_tokens() -> None:
    rollouts = factory.rollouts(
        [[3, 4, 0], [5]], prompts=[[1, 2], [2]], finish_reasons=["stop", "length"], sources=["gsm8k", "math"]
    )
    scores = factory.scores([0.5, None], [{"acc": True, "input": "must not hide the prompt"}, {}])
    samples = make_samples(rollouts, scores, LetterTokenizer(), step=7)
    assert samples[0] == {
        "input": "ab", "output": "cd", "gts": "truth 0", "score": 0.5, "step": 7,
        "data_source": "gsm8k", "finish_reason": "stop", "acc": True,
    }  # fmt: skip
    assert (samples[1]["input"], samples[1]["output"]) == ("b", "e")
    assert samples[1]["failure"] == "timeout: over 60 s"


def test_dump_is_read_back_and_replaces_what_was_there(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "rollouts"
    dump_samples(folder, 3, [{"output": "old"}] * 5)
    path = dump_samples(folder, 3, [{"output": "über\n中", "score": float("nan")}, {"output": "b", "score": 1.0}])
    assert path == folder / "3.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in lines] == [
        {"output": "über\n中", "score": None},
        {"output": "b", "score": 1.0},
    ]
    assert [p.name for p in folder.iterdir()] == ["3.jsonl"]  # no temporary file left


def test_json_takes_what_reward_functions_return() -> None:
    value = {
        "a": np.float32(0.5), "b": np.array([1.0, np.inf]), "c": torch.tensor([1, 2]), "d": Path("x/y"), "e": {1: (2,)},
        "f": np.float64("nan"), "g": None, "h": np.bool_(True),
    }  # fmt: skip
    assert json.loads(to_json(value)) == {
        "a": 0.5, "b": [1.0, None], "c": [1, 2], "d": "x/y", "e": {"1": [2]}, "f": None, "g": None, "h": True,
    }  # fmt: skip


def test_the_same_prompts_are_picked_whatever_the_order_and_the_step() -> None:
    samples: list[Sample] = [{"input": f"prompt {i:02d}", "output": str(i)} for i in range(50)]
    picked = pick_samples(samples, 4)
    assert len({sample["input"] for sample in picked}) == 4
    assert pick_samples(samples[::-1], 4) == picked
    assert pick_samples(samples[:3], 10) == samples[:3]
    assert pick_samples(samples, 0) == []
