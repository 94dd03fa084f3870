"""Pairs and labels from files: TRL's forms, real pairs, and what is refused before a start."""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from tests.conftest import ROOT, load_script
from tests.unit.data.factory import SHARED_DATA
from verl_like.config import DataConfig
from verl_like.config.preference import PreferenceConfig
from verl_like.config.sft import SFTConfig
from verl_like.data.templates import TEMPLATES
from verl_like.kit.datasets.full_hh_rlhf import to_pair, to_row
from verl_like.plugins.preference.dataset import PreferenceDataset


def said(role: str, text: str) -> dict[str, str]:
    return {"role": role, "content": text}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """A token for each character, and a template that ends turns with a plain one."""
    recipe = load_script(ROOT / "recipes" / "quickstart" / "model.py", "quickstart_model")
    found = recipe.build_tokenizer(string.printable)
    turn, asks = "{{ m.role[0] }}:{{ m.content }};", "{% if add_generation_prompt %}a:{% endif %}"
    found.chat_template = "{% for m in messages %}" + turn + "{% endfor %}" + asks
    return found


def dataset(tokenizer: Any, folder: Path, rows: list[dict[str, Any]], **options: Any) -> PreferenceDataset:
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = {name.removeprefix("data__"): options.pop(name) for name in list(options) if name.startswith("data__")}
    sft = SFTConfig(max_length=options.pop("max_length", 64))
    files, preference = [str(folder / "rows.jsonl")], PreferenceConfig(**options)
    found = PreferenceDataset(DataConfig(**data), files, tokenizer, split="train", sft=sft, preference=preference)
    found.check_rows()
    return found


def texts(found: PreferenceDataset, tokenizer: Any, index: int = 0) -> list[tuple[str, str]]:
    """What stands before each answer, and the answer."""
    parts = []
    for answer in found.item(index).all_answers:
        first = int(np.flatnonzero(answer[0].trained)[0])
        parts.append((tokenizer.decode(answer[0].ids[:first]), tokenizer.decode(answer[0].ids[first:])))
    return parts


ASKED, GOOD, BAD = said("user", "1+1="), said("assistant", "2"), said("assistant", "34")
PAIR_FORMS = [  # of TRL's page "Dataset formats and types"
    {"prompt": [ASKED], "chosen": [GOOD], "rejected": [BAD]},
    {"chosen": [ASKED, GOOD], "rejected": [ASKED, BAD]},
    {"prompt": "1+1=", "chosen": "2", "rejected": "34"},
    {"prompt": [ASKED], "chosen": GOOD, "rejected": json.dumps([BAD])},
    {"prompt": "1+1=", "chosen": [ASKED, GOOD], "rejected": [ASKED, BAD]},  # the prompt again, as in UltraFeedback
]


@pytest.mark.parametrize("row", PAIR_FORMS)
def test_forms_of_pairs(tokenizer: Any, tmp_path: Path, row: dict[str, Any]) -> None:
    found = dataset(tokenizer, tmp_path, [row])
    end = tokenizer.eos_token
    assert texts(found, tokenizer) == [("u:1+1=;a:", f"2{end}"), ("u:1+1=;a:", f"34{end}")]
    assert found.item(0).good == (True, False) and found[0][1].messages == [ASKED]


def test_texts_as_they_stand(tokenizer: Any, tmp_path: Path) -> None:
    """TRL's plain forms, with and without a prompt; a space before an answer is the answer's."""
    end, plain = tokenizer.eos_token, {"data__chat_template": "none"}
    explicit = dataset(tokenizer, tmp_path, [{"prompt": "1+1=", "chosen": " 2", "rejected": " 34"}], **plain)
    assert texts(explicit, tokenizer) == [("1+1=", f" 2{end}"), ("1+1=", f" 34{end}")]
    implicit = dataset(tokenizer, tmp_path, [{"chosen": "1+1= 2", "rejected": "1+1= 34"}], **plain)
    assert texts(implicit, tokenizer) == texts(explicit, tokenizer)


def test_labels_have_answers_of_other_prompts(tokenizer: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [{"prompt": f"{n // 2}=", "completion": str(n), "label": n % 2 == 0} for n in range(6)]
    found = dataset(tokenizer, tmp_path, rows, loss="kto", data__chat_template="none")
    end = tokenizer.eos_token
    assert texts(found, tokenizer, 0) == [("0=", f"0{end}"), ("0=", f"5{end}")]
    assert texts(found, tokenizer, 3) == [("1=", f"3{end}"), ("1=", f"1{end}")]  # 2 answers the same prompt
    batch = found.batch([0, 3], [7, 8])
    assert batch.good_B.tolist() == [True, False, False, False] and batch.unrelated_B.tolist() == [False, True] * 2
    assert batch.group_B.tolist() == [7, 7, 8, 8]
    pairs = dataset(tokenizer, tmp_path, [PAIR_FORMS[2], PAIR_FORMS[2] | {"prompt": "4"}], loss="kto")
    assert len(pairs.item(0).all_answers) == 4 and pairs.item(0).good == (True, False)
    assert "nothing tells" not in caplog.text
    dataset(tokenizer, tmp_path, rows[1::2], loss="kto")
    assert "data.train_files: all 3 answers are bad, so nothing tells what makes them so" in caplog.text


def test_real_pairs(tmp_path: Path) -> None:
    if not (SHARED_DATA / "tool_chat").is_dir():
        pytest.skip(f"needs the pairs of {SHARED_DATA}")
    records = json.loads((SHARED_DATA / "tool_chat" / "dpo_en_demo.json").read_text())
    rows = [to_row(to_pair(record, "r"), n, "train", "rm", "x") for n, record in enumerate(records[::10])]
    tokenizer = AutoTokenizer.from_pretrained(SHARED_DATA / "tok_qwen25")
    tokenizer.chat_template = TEMPLATES["chatml"]
    found = dataset(tokenizer, tmp_path, rows, max_length=4096)
    assert (len(records), len(found)) == (300, 30)
    for number in range(0, 30, 3):
        prompt = tokenizer.apply_chat_template(rows[number]["prompt"], add_generation_prompt=True, tokenize=False)
        answers = [f"{rows[number][key]}<|im_end|>" for key in ("chosen", "rejected")]
        assert texts(found, tokenizer, number) == [(prompt, answer) for answer in answers]
    short = dataset(tokenizer, tmp_path, rows, max_length=300, data__filter_overlong_prompts=True)
    assert 0 < len(short) < 30 and all(len(a[0].ids) <= 300 for n in range(len(short)) for a in short.item(n).answers)


REFUSED = [
    ({}, {"chosen": 0}, {}, r"there are no columns 'chosen' and 'rejected' in .* \(it has prompt, rejected\)"),
    ({"rejected": ""}, {}, {}, "row 1: the column rejected holds no answer"),
    ({"chosen": [ASKED]}, {}, {}, "row 1: chosen: the answer holds no assistant's message"),
    ({"chosen": [said("system", "s"), ASKED, GOOD]}, {}, {}, "row 1: chosen begins with a message of the system, and"),
    ({"chosen": "x" * 99}, {}, {}, r"row 1.* more than sft\.max_length=64"),
    ({"prompt": None}, {}, {}, "row 1: chosen and rejected are texts, and their prompt is not in a column prompt"),
    ({"prompt": None, "chosen": [ASKED, GOOD], "rejected": [ASKED, GOOD]}, {}, {}, "row 1: chosen and rejected must"),
    ({"margin": "big"}, {}, {"loss": "reward"}, "row 1: margin='big' must be a number"),
    ({}, {}, {"margin_key": "gap"}, r"preference\.margin_key=gap: there is no such column"),
    ({}, {}, {"loss": "kto"}, r"preference\.loss=kto needs answers to two prompts at least"),
]


@pytest.mark.parametrize(("change", "without", "options", "message"), REFUSED)
def test_rows_that_are_refused(
    tokenizer: Any, tmp_path: Path, change: Any, without: Any, options: Any, message: str
) -> None:
    rows = [PAIR_FORMS[2] | ({"margin": 1} if "margin" in change else {}), PAIR_FORMS[2] | change]
    rows = [{name: cell for name, cell in row.items() if name not in without} for row in rows]
    with pytest.raises(ValueError, match=message):
        dataset(tokenizer, tmp_path, rows, **options)


def test_pairs_that_are_all_cut_to_equal_answers_are_refused(tokenizer: Any, tmp_path: Path) -> None:
    rows = [{"prompt": "1=", "chosen": f"1{n}", "rejected": f"1{n}0"} for n in range(3)]
    assert len(dataset(tokenizer, tmp_path, rows, max_length=10, data__truncation="right").digest) == 32
    with pytest.raises(ValueError, match=r"all 3 pairs have two equal answers: .* is sft\.max_length=9 long enough"):
        dataset(tokenizer, tmp_path, rows, max_length=9, data__truncation="right")
    dataset(tokenizer, tmp_path, rows, max_length=9, data__truncation="right", loss="orpo")  # which imitates them


def test_a_label_must_be_one(tokenizer: Any, tmp_path: Path) -> None:
    rows = [{"prompt": str(n), "completion": "1", "label": label} for n, label in enumerate([True, "good"])]
    with pytest.raises(ValueError, match="row 1: label='good' must be true or false"):
        dataset(tokenizer, tmp_path, rows, loss="kto")
