"""The other preprocessing scripts: real files where they are, rows that load and grade, and clear refusals."""

from __future__ import annotations

import itertools
import json
import random
import re
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from tests.unit.data.factory import SHARED_DATA, CharTokenizer
from verl_like.config import DataConfig
from verl_like.data.dataset import PromptDataset
from verl_like.kit.datasets import (
    aime,
    code_contests,
    full_hh_rlhf,
    gsm8k_multiturn_w_tool,
    humaneval,
    knights_and_knaves,
    math_dataset,
    schema,
    tool_calls,
)
from verl_like.rewards.graders import compute_score


def shared(name: str) -> str:
    path = SHARED_DATA / name
    if not path.exists():
        pytest.skip(f"{path} is not there")
    return str(path)


def load(path: Path, **data: Any) -> PromptDataset:
    """The file as training sees it; every row is read."""
    dataset = PromptDataset(DataConfig(max_prompt_length=10**6, **data), str(path), CharTokenizer(), split="train")
    for index in range(len(dataset)):
        assert dataset[index][0]
    return dataset


def read(path: Path) -> list[dict[str, Any]]:
    return pq.read_table(path).to_pylist()


def test_math_real_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    math_dataset.main(["--local_dataset_path", shared("math/math_train.json"), "--local_save_dir", str(tmp_path)])
    captured = capsys.readouterr()
    assert "4 of 7474 records have no answer" in captured.err and "train.parquet: 6,970 rows" in captured.out
    train, test = (load(tmp_path / f"{split}.parquet") for split in ("train", "test"))
    assert (len(train), len(test)) == (6970, 500)
    texts = [[row["prompt"][0]["content"] for row in read(tmp_path / f"{s}.parquet")] for s in ("train", "test")]
    assert not set(texts[0]) & set(texts[1])
    for index in range(0, 500, 25):
        row = test[index][1]
        assert row.messages[0]["content"].endswith(math_dataset.INSTRUCTION)
        answer = f"so \\boxed{{{row.ground_truth}}}"
        assert compute_score(row.data_source, answer, row.ground_truth)["score"] == 1.0


@pytest.mark.parametrize(
    ("solution", "answer"),
    [
        (r"a \boxed{1} then \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\fbox{\text{(A)}}", r"\text{(A)}"),
        (r"\boxed{1", None),
        ("none", None),
    ],
)
def test_last_boxed(solution: str, answer: str | None) -> None:
    assert math_dataset.last_boxed(solution) == answer


def test_math_from_a_folder_with_solutions(tmp_path: Path) -> None:
    for split in ("train", "test"):
        record = {"problem": split, "solution": r"x = \boxed{7}", "level": "Level 1"}
        (tmp_path / f"{split}-00000.jsonl").write_text(json.dumps(record))
    math_dataset.main(["--local_dataset_path", str(tmp_path), "--local_save_dir", str(tmp_path / "out")])
    (row,) = read(tmp_path / "out" / "test.parquet")
    assert row["reward_model"] == {"style": "rule", "ground_truth": "7"}
    assert row["extra_info"] == {"split": "test", "index": 0, "level": "Level 1", "solution": r"x = \boxed{7}"}
    (tmp_path / "train-00001.jsonl").write_text("{}")
    with pytest.raises(ValueError, match=r"several train files \(train-00000\.jsonl, train-00001\.jsonl\)"):
        schema.find_splits(tmp_path)
    with pytest.raises(ValueError, match=r"has no file that begins with dev \(it holds: test\.parquet, "):
        schema.find_splits(tmp_path / "out", ("dev",))


def test_aime(tmp_path: Path) -> None:
    records = [
        {"ID": "2024-I-4", "Problem": "How many?", "Answer": 73},
        {"ID": "2024-I-5", "Problem": "?", "Answer": "007"},
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, records)))
    options = ["--local_dataset_path", str(tmp_path / "a.jsonl"), "--local_save_dir", str(tmp_path)]
    aime.main(options)
    dataset = load(tmp_path / "test.parquet")
    rows = [dataset[i][1] for i in range(2)]
    assert [(row.data_source, row.ground_truth) for row in rows] == [("aime2024", "73"), ("aime2024", "7")]
    assert rows[0].extra_info["id"] == "2024-I-4" and "\n\nHow many?\n\n" in rows[0].messages[0]["content"]
    assert compute_score("aime2024", "so\nAnswer: 73", "73")["acc"]
    (tmp_path / "a.jsonl").write_text(json.dumps({"problem": "?", "answer": "1/2"}))
    with pytest.raises(ValueError, match=r"record 0: an AIME answer is a whole number from 0 to 999, not '1/2'"):
        aime.main(options)
    (tmp_path / "a.jsonl").write_text(json.dumps({"question": "?", "answer": "1"}))
    with pytest.raises(ValueError, match=r"has no problem \(it has: answer, question\)"):
        aime.main(options)


def test_preference_pairs_of_real_data(tmp_path: Path) -> None:
    source = shared("tool_chat/dpo_en_demo.json")
    for kind in ("rl", "rm", "sft"):
        options = ["--split", kind, "--num_test", "30", "--local_dataset_path", source]
        full_hh_rlhf.main([*options, "--local_save_dir", str(tmp_path)])
    dataset = load(tmp_path / "rl" / "train.parquet")
    row = dataset[0][1]
    assert len(dataset) == 270 and (row.style, row.ability) == ("model", "alignment")
    rm = read(tmp_path / "rm" / "train.parquet")
    assert rm[0]["chosen"] == row.ground_truth != rm[0]["rejected"]
    assert all(pair["prompt"][-1]["role"] == "user" for pair in rm)
    assert read(tmp_path / "sft" / "test.parquet")[0].keys() == {"prompt", "response", "extra_info"}


def test_forms_of_preference_pairs() -> None:
    talk = "\n\nHuman: hi\n\nAssistant: hello\n\nHuman: why?\n\nAssistant:"
    turns = [("user", "hi"), ("assistant", "hello"), ("user", "why?")]
    for record in (
        {"chosen": f"{talk} good", "rejected": f"{talk} bad"},
        {"prompt": talk, "chosen": " good", "rejected": " bad"},
    ):
        pair = full_hh_rlhf.to_pair(record, "here")
        assert [(m["role"], m["content"]) for m in pair.messages] == turns
        assert (pair.chosen, pair.rejected) == ("good", "bad")
    with pytest.raises(ValueError, match="here: a turn must have from and value"):
        full_hh_rlhf.to_pair({"conversations": [{"from": "nobody"}], "chosen": "a", "rejected": "b"}, "here")


def test_humaneval_real_file(tmp_path: Path) -> None:
    options = ["--local_dataset_path", shared("humaneval/HumanEval.jsonl.gz"), "--local_save_dir", str(tmp_path)]
    humaneval.main(options)
    dataset = load(tmp_path / "test.parquet")
    assert len(dataset) == 164 and not (tmp_path / "train.parquet").exists()
    row = dataset[0][1]
    space: dict[str, Any] = {}
    exec(row.extra_info["reference_solution"] + row.ground_truth["test"], space)  # the data set's own solution
    space["check"](space[row.ground_truth["entry_point"]])


def test_mbpp_splits_by_task_id(tmp_path: Path) -> None:
    record = {
        "text": "Add.",
        "code": "def f(a):\n    return a + 1",
        "test_list": ["assert f(1) == 2"],
        "test_setup_code": "",
    }
    lines = [json.dumps(record | {"task_id": number}) for number in (5, 11, 510, 600, 601, 974)]
    (tmp_path / "mbpp.jsonl").write_text("\n".join(lines))
    options = ["--local_dataset_path", str(tmp_path / "mbpp.jsonl"), "--local_save_dir", str(tmp_path)]
    humaneval.main(options)
    ids = {s: [row["extra_info"]["task_id"] for row in read(tmp_path / f"{s}.parquet")] for s in ("train", "test")}
    assert ids == {"train": ["601", "974"], "test": ["11", "510"]}
    row = load(tmp_path / "test.parquet")[0][1]
    assert row.ground_truth == {"test_list": ["assert f(1) == 2"], "test_setup_code": ""}
    (tmp_path / "mbpp.jsonl").write_text(lines[0])
    with pytest.raises(ValueError, match="no task_id from 11 to 510"):
        humaneval.main(options)


def test_code_contests_real_file(tmp_path: Path) -> None:
    options = ["--local_dataset_path", shared("code_stdio/code_contests.json"), "--local_save_dir", str(tmp_path)]
    code_contests.main(options)
    dataset = load(tmp_path / "train.parquet")
    assert (len(dataset), len(read(tmp_path / "test.parquet"))) == (145, 20)
    row = dataset[0][1]
    tests = json.loads(row.ground_truth)
    assert len(tests["inputs"]) == len(tests["outputs"]) == row.extra_info["num_tests"]
    code_contests.main([*options, "--max_chars", "2000"])
    assert 0 < len(read(tmp_path / "train.parquet")) < 145


@pytest.mark.parametrize(
    ("tests", "message"),
    [
        ({"inputs": ["1"], "outputs": []}, "here: 1 inputs for 0 outputs"),
        ("{'inputs': 1}", "here: the tests are text but no JSON"),
        ([{"input": "1"}], "here: no tests in tests, test_cases"),
        (None, "here: no tests"),
    ],
)
def test_tests_that_cannot_be_used(tests: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        code_contests.tests_of({"problem": "?", "tests": tests}, "here")


def test_function_tests_ask_for_the_function() -> None:
    tests = {"inputs": [[1]], "outputs": [2], "fn_name": "f"}
    row = code_contests.to_row({"question": "Add.", "input_output": json.dumps(tests)}, 0, "train", "apps")
    assert "`f`" in row["prompt"][0]["content"] and json.loads(row["reward_model"]["ground_truth"]) == tests


def statements(prompt: str) -> dict[str, str]:
    return dict(re.findall(r'(\w+) says: "(.*?)\."', prompt))


def says(text: str, roles: dict[str, bool]) -> bool:
    """A second reading of a statement, from its words alone."""
    text = text[0].lower() + text[1:] if text.startswith("If ") else text
    if text.startswith("if "):
        first, second = text[3:].split(" then ")
        return not says(first, roles) or says(second, roles)
    for word, join in (
        (" if and only if ", lambda a, b: a == b),
        (" and ", lambda a, b: a and b),
        (" or ", lambda a, b: a or b),
    ):
        if word in text:
            first, second = text.split(word)
            return join(says(first, roles), says(second, roles))
    name, role = text.split(" is a ")
    return roles[name] == (role == "knight")


def test_knights_and_knaves_have_one_solution_by_a_second_reading(tmp_path: Path) -> None:
    options = ["--num_train", "60", "--num_test", "20", "--num_people", "2", "3", "5", "--seed", "3"]
    knights_and_knaves.main(["--local_save_dir", str(tmp_path), *options])
    rows = read(tmp_path / "train.parquet") + read(tmp_path / "test.parquet")
    assert {row["extra_info"]["num_people"] for row in rows} == {2, 3, 5}
    for row in rows:
        said = statements(row["prompt"][0]["content"])
        fitting = [
            roles
            for roles in (
                dict(zip(said, values, strict=True)) for values in itertools.product((True, False), repeat=len(said))
            )
            if all(says(text, roles) == roles[name] for name, text in said.items())
        ]
        assert len(fitting) == 1
        truth = row["reward_model"]["ground_truth"]
        assert truth == ", ".join(f"{n} is a {'knight' if r else 'knave'}" for n, r in fitting[0].items())
        other = truth.replace("knight", "k").replace("knave", "knight").replace("is a k,", "is a knave,")
        assert compute_score("knights_and_knaves", f"<answer> {truth} </answer>", truth)["score"] == 1.0
        assert compute_score("knights_and_knaves", f"<answer> {other} </answer>", truth)["score"] == 0.0
    assert len({str(row["prompt"]) for row in rows}) == 80
    assert len(load(tmp_path / "test.parquet")) == 20


def test_the_solver_sees_paradoxes_and_ambiguity() -> None:
    claim = knights_and_knaves.Claim
    liar = (claim("knave", 0), claim("knight", 0))  # "I am a knave": nobody can say so
    assert knights_and_knaves.solutions(liar) == []
    mirror = (claim("knight", 1), claim("knight", 0))
    assert knights_and_knaves.solutions(mirror) == [(True, True), (False, False)]
    one = (claim("and", parts=(claim("knave", 0), claim("knave", 1))), claim("knave", 0))
    assert knights_and_knaves.solutions(one) == [(False, True)]
    puzzles = [knights_and_knaves.random_puzzle(4, random.Random(seed)) for seed in (1, 1, 2)]
    assert puzzles[0] == puzzles[1] != puzzles[2]
    with pytest.raises(ValueError, match="must lie between 2 and 8"):
        knights_and_knaves.main(["--local_save_dir", "x", "--num_people", "1"])
    with pytest.raises(ValueError, match="different puzzles found"):
        knights_and_knaves.generate(324, [2], 1)  # all pairs of statements, some of them paradoxes


def test_gsm8k_with_a_tool(tmp_path: Path) -> None:
    record = json.dumps({"question": "1+1?", "answer": "two\n#### 2"})
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text(record)
    options = ["--local_dataset_path", str(tmp_path), "--local_save_dir", str(tmp_path / "out")]
    gsm8k_multiturn_w_tool.main(options)
    row = load(tmp_path / "out" / "train.parquet")[0][1]
    assert [message["role"] for message in row.messages] == ["system", "user"]
    assert row.extra_info["tools_kwargs"] == {"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": "2"}}}
    assert compute_score(row.data_source, row.extra_info["answer"], row.ground_truth)["score"] == 1.0


def test_tool_calls_real_file(tmp_path: Path) -> None:
    source = shared("tool_chat/glaive_toolcall_en_demo.json")
    tool_calls.main(["--local_dataset_path", source, "--local_save_dir", str(tmp_path)])

    class ToolTokenizer(CharTokenizer):
        def apply_chat_template(self, messages: list[dict[str, Any]], **kwargs: Any) -> str:
            return json.dumps(kwargs.pop("tools")) + super().apply_chat_template(messages, **kwargs)

    data = DataConfig(max_prompt_length=10**6, tools_key="tools")
    files = [str(tmp_path / f"{split}.parquet") for split in ("train", "test")]
    dataset = PromptDataset(data, files, ToolTokenizer(), split="train")
    assert len(dataset) == 211  # every call of the file
    for index in range(len(dataset)):
        ids, row = dataset[index]
        call = json.loads(row.ground_truth)
        assert call["name"] in {tool["function"]["name"] for tool in row.tools or []}
        assert f'"name": "{call["name"]}"' in "".join(map(chr, ids))
        assert row.messages[-1]["role"] != "assistant"
        answer = row.extra_info["reference_response"]
        assert compute_score(row.data_source, answer, row.ground_truth)["score"] == 1.0
        assert compute_score(row.data_source, answer.replace('": ', '": 1'), row.ground_truth)["score"] == 0.0


def test_a_broken_call_names_its_place() -> None:
    record = {
        "tools": "[]",
        "conversations": [{"from": "human", "value": "x"}, {"from": "function_call", "value": "f(1)"}],
    }
    with pytest.raises(ValueError, match="here, turn 1: the call is no JSON"):
        tool_calls.to_rows(record, "here")


def test_held_out_rows_and_columns_of_several_kinds(tmp_path: Path) -> None:
    parts = schema.hold_out(list(range(10)), 3, seed=1)
    assert sorted(parts["train"] + parts["test"]) == list(range(10)) and len(parts["test"]) == 3
    assert parts == schema.hold_out(list(range(10)), 3, seed=1) != schema.hold_out(list(range(10)), 3, seed=2)
    with pytest.raises(ValueError, match="--num_test 10 leaves nothing of the 10 records"):
        schema.hold_out(list(range(10)), 10, seed=1)
    schema.write_rows([{"a": 1}, {"a": 2, "b": "x"}], tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet") == [{"a": 1, "b": None}, {"a": 2, "b": "x"}]
    with pytest.raises(ValueError, match=r"a\.parquet: a column holds values of different types"):
        schema.write_rows([{"a": 1}, {"a": "x"}], tmp_path / "a.parquet")


def test_an_interrupted_write_leaves_no_file_that_looks_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A recipe that is started again takes a file that is there for finished."""

    def broken(table: Any, where: Path, **more: Any) -> None:
        where.write_bytes(b"PAR1")
        raise KeyboardInterrupt

    monkeypatch.setattr(schema.pq, "write_table", broken)
    with pytest.raises(KeyboardInterrupt):
        schema.write_rows([{"a": 1}], tmp_path / "train.parquet")
    assert not (tmp_path / "train.parquet").exists()


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    def main(argv: list[str] | None) -> None:
        schema.write_rows([{"a": 1}], tmp_path / "file" / "train.parquet")

    with pytest.raises(SystemExit, match=r"error: .*file"):
        schema.run(main)
