from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import AddedToken

from tests.unit.observe import factory
from verl_like.batch import Evaluated, Experience
from verl_like.observe.run_folder import FIELDS
from verl_like.observe.samples import (
    Sample,
    TokenTexts,
    add_tokens,
    choose_rows,
    dump_samples,
    make_samples,
    pick_rows,
    pick_samples,
    to_json,
)


class LetterTokenizer:
    """1 is a, 2 is b ...; 0 is a special token."""

    def decode(self, token_ids: Any, *, skip_special_tokens: bool = False) -> str:
        return "".join(chr(96 + i) if i else "" if skip_special_tokens else "<eos>" for i in token_ids)


def test_records_have_verls_fields_without_padding_or_special_tokens() -> None:
    rollouts = factory.rollouts(
        [[3, 4, 0], [5]], prompts=[[1, 2], [2]], finish_reasons=["stop", "length"], sources=["gsm8k", "math"]
    )
    scores = factory.scores([0.5, None], [{"acc": True, "input": "must not hide the prompt", "failure": "none"}, {}])
    samples = make_samples(rollouts, scores, LetterTokenizer(), step=7)
    assert samples[0] == {
        "input": "ab", "output": "cd", "gts": "truth 0", "score": 0.5, "step": 7,
        "data_source": "gsm8k", "finish_reason": "stop", "acc": True, "outcome": "finished", "group": 0,
        "dataset_index": 0, "prompt_tokens": 2, "response_tokens": 3, "sampled_tokens": 3, "weight_version": 0,
    }  # fmt: skip
    assert set(samples[0]) - {"acc"} <= FIELDS and set(samples[1]) <= FIELDS  # the report tells reward parts by them
    assert samples[1]["outcome"] == "grader_error"
    named = make_samples(rollouts.replace(episode_names=["train-0-0", "train-0-1"]), scores, LetterTokenizer(), step=7)
    assert [sample["episode"] for sample in named] == ["train-0-0", "train-0-1"] and set(named[1]) <= FIELDS
    judged = make_samples(rollouts, scores.replace(outcomes=["solved", "tool_error"]), LetterTokenizer(), step=7)
    assert [sample["outcome"] for sample in judged] == ["solved", "tool_error"]
    assert (samples[1]["input"], samples[1]["output"]) == ("b", "e")
    assert samples[1]["failure"] == "timeout: over 60 s"


def test_special_tokens_that_are_text_are_told_from_tokens() -> None:
    class Special(LetterTokenizer):
        added_tokens_decoder = {0: AddedToken("<eos>", special=True)}  # noqa: RUF012
        all_special_tokens = ("<eos>",)

        def decode(self, token_ids: Any, *, skip_special_tokens: bool = False) -> str:
            texts = {26: "<e", 25: "os>"}
            return "".join(
                texts.get(i) or super(Special, self).decode([i], skip_special_tokens=skip_special_tokens)
                for i in token_ids
            )

    rollouts = factory.rollouts(
        [[3, 26, 25, 0], [5, 0]], prompts=[[0, 1], [2]], finish_reasons=["stop", "stop"], sources=["a", "b"]
    )
    forged = dataclasses.replace(rollouts.rows[1], messages=[{"role": "user", "content": "b<eos>"}])
    rollouts = rollouts.replace(rows=[rollouts.rows[0], forged])
    first, second = make_samples(rollouts, factory.scores([0.5, 1.0], [{}, {}]), Special(), step=7)
    assert (
        first["output"] == "c<eos>"
        and first["output_shown"] == "c<eos>\u27e6<eos>\u27e7"
        and "input_shown" not in first
    )
    assert second["input_shown"] == "b" and "output_shown" not in second  # kept ones would stand in brackets


def test_dump_is_read_back_and_replaces_what_was_there(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "rollouts"
    dump_samples(folder, 3, [{"output": "old"}] * 5)
    path = dump_samples(folder, 3, [{"output": "über\n中", "score": float("nan")}, {"output": "b", "score": 1.0}])
    assert path == folder / "000003.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in lines] == [
        {"output": "über\n中", "score": None},
        {"output": "b", "score": 1.0},
    ]
    assert [p.name for p in folder.iterdir()] == ["000003.jsonl"]  # no temporary file left


def test_json_takes_what_reward_functions_return() -> None:
    value = {
        "a": np.float32(0.5), "b": np.array([1.0, np.inf]), "c": torch.tensor([1, 2]), "d": Path("x/y"), "e": {1: (2,)},
        "f": np.float64("nan"), "g": None, "h": np.bool_(True),
    }  # fmt: skip
    assert json.loads(to_json(value)) == {
        "a": 0.5, "b": [1.0, None], "c": [1, 2], "d": "x/y", "e": {"1": [2]}, "f": None, "g": None, "h": True,
    }  # fmt: skip


def test_json_of_half_a_surrogate_pair_can_be_written() -> None:
    """A grader reads one out of a response with json.loads, say; a file's encoding would refuse it."""
    line = to_json({"pred": json.loads('"\\ud83d"'), "text": "中"})
    assert json.loads(line.encode()) == {"pred": "\ud83d", "text": "中"} and "中" in line


def test_the_same_prompts_are_picked_whatever_the_order_and_the_step() -> None:
    samples: list[Sample] = [{"input": f"prompt {i:02d}", "output": str(i)} for i in range(50)]
    picked = pick_samples(samples, 4)
    assert len({sample["input"] for sample in picked}) == 4
    assert pick_samples(samples[::-1], 4) == picked
    assert pick_samples(samples[:3], 10) == samples[:3]
    assert pick_samples(samples, 0) == []


def experience_of(rollouts: Any, rows: list[int], advantages: list[float]) -> Experience:
    kept = rollouts.select(rows)
    return Experience(
        prompt_ids_BP=kept.prompt_ids_BP,
        prompt_length_B=kept.prompt_length_B,
        response_ids_BR=kept.response_ids_BR,
        response_length_B=kept.response_length_B,
        response_mask_BR=kept.response_mask_BR,
        group_B=kept.group_B,
        advantages_BR=torch.tensor(advantages)[:, None] * kept.response_mask_BR,
    )


def test_advantages_find_their_rows_in_an_experience_of_other_order_and_length() -> None:
    rollouts = factory.rollouts([[3, 4, 0], [5], [6, 7]], groups=[0, 0, 1])
    trained = experience_of(rollouts, [2, 0], [0.5, -1.0])  # row 1 was left out
    scores = factory.scores([1.0, 0.0, 1.0])
    samples = make_samples(rollouts, scores, LetterTokenizer(), 1, trained)
    assert [sample.get("advantage") for sample in samples] == [-1.0, None, 0.5]
    add_tokens(samples, rollouts, TokenTexts(LetterTokenizer()), experience=trained)
    assert samples[0]["tokens"]["advantages"] == [-1.0, -1.0, -1.0] and "advantages" not in samples[1]["tokens"]


def test_tokens_have_text_mask_version_and_log_probs() -> None:
    rollouts = factory.rollouts([[3, 4, 0], [5]])
    mask_BR = rollouts.response_mask_BR.clone()
    mask_BR[0, 1] = False
    log_probs_BR = torch.tensor([[-0.123456, 0.0, float("nan")], [-1.0, 0.0, 0.0]])
    rollouts = rollouts.replace(response_mask_BR=mask_BR, rollout_log_probs_BR=log_probs_BR)
    samples = make_samples(rollouts, factory.scores([1.0, 1.0]), LetterTokenizer(), 1)
    own = Evaluated(response_length_B=rollouts.response_length_B, old_log_probs_BR=log_probs_BR - 1)
    add_tokens(samples, rollouts, TokenTexts(LetterTokenizer()), trainer=own)
    assert samples[0]["tokens"] == {
        "text": ["c", "d", "<eos>"], "sampled": [[1, 1], [0, 1], [1, 1]], "weight_version": [[0, 3]],
        "rollout_log_probs": [-0.1235, 0.0, None], "log_probs": [-1.1235, -1.0, None],
    }  # fmt: skip
    assert samples[1]["tokens"]["log_probs"] == [-2.0] and samples[0]["sampled_tokens"] == 2


class ByteTokenizer:
    def decode(self, token_ids: Any, *, skip_special_tokens: bool = False) -> str:
        return bytes(token_ids).decode("utf-8", errors="replace")


def test_a_character_of_several_tokens_stands_at_its_last_one() -> None:
    assert TokenTexts(ByteTokenizer())(list("aß中".encode())) == ["a", "", "ß", "", "", "中"]
    assert "".join(TokenTexts(ByteTokenizer())([*"中".encode()[:2], 97, 98])).endswith("ab")


class WordTokenizer:
    """As sentencepiece: a word's space is not there at the start of a text."""

    def decode(self, token_ids: Any, *, skip_special_tokens: bool = False) -> str:
        return " ".join(["zero", "one", "two"][i] for i in token_ids)


def test_a_word_keeps_its_space() -> None:
    assert TokenTexts(WordTokenizer())([1, 2, 2]) == [" one", " two", " two"]


def test_half_of_the_groups_are_chosen_by_chance_and_half_because_they_tell_most() -> None:
    groups = [group for group in range(8) for _ in range(4)]
    values: list[float | None] = [0.0] * 32
    values[5 * 4] = 1.0  # group 5 has graded answers of two kinds
    rollouts, scores = factory.rollouts([[1]] * 32, groups=groups), factory.scores(values)
    by_seed = [choose_rows(rollouts, scores, 2, 8, seed) for seed in range(20)]
    assert by_seed[0] == choose_rows(rollouts, scores, 2, 8, 0)
    assert all(len(chosen) == 8 for chosen in by_seed)
    told = [{groups[row] for row, why in chosen.items() if why == "telling"} for chosen in by_seed]
    assert sum(found == {5} for found in told) >= 15  # else it was the one by chance
    assert len({groups[row] for chosen in by_seed for row, why in chosen.items() if why == "chance"}) > 4
    values[7 * 4 + 1] = None  # a failed reward tells more
    failing = choose_rows(rollouts, factory.scores(values), 8, 2, 0)
    assert sorted(groups.count(group) for group in {groups[row] for row in failing}) == [4] * 8
    assert len(failing) == 16 and {0.0, 1.0} == {values[row] for row in failing if groups[row] == 5}
    assert 7 in {groups[row] for row, why in choose_rows(rollouts, factory.scores(values), 2, 4, 1).items()}


def test_the_same_prompts_of_a_validation_are_kept_however_it_is_cut() -> None:
    rows = factory.rollouts([[1]] * 20).rows
    whole = [rows[i].index for i in pick_rows([rows], 5, 1)[0]]
    first, second = pick_rows([rows[:7], rows[7:]], 5, 1)
    assert [rows[i].index for i in first] + [rows[7 + i].index for i in second] == whole and len(whole) == 5
    assert pick_rows([rows + rows], 5, 2)[0] == sorted([*whole, *(20 + i for i in whole)])
