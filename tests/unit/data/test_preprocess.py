"""Preprocessing scripts: what they write loads, is graded right against itself, and splits do not overlap."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from tests.unit.data.factory import SHARED_DATA, CharTokenizer
from verl_like.config import DataConfig
from verl_like.data.dataset import PromptDataset
from verl_like.kit.datasets import arithmetic, countdown, gsm8k, schema
from verl_like.rewards.graders import compute_score


def read(path: Path) -> list[dict[str, Any]]:
    return pq.read_table(path).to_pylist()


def write_gsm8k(folder: Path, count: int = 3) -> Path:
    lines = [json.dumps({"question": f"{i}?", "answer": f"it is\n#### 1,00{i}"}) for i in range(count)]
    for split in ("train", "test"):
        (folder / f"{split}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def test_gsm8k_rows_have_verls_form(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_gsm8k(tmp_path)
    gsm8k.main(["--local_dataset_path", str(tmp_path), "--local_save_dir", str(tmp_path / "out")])
    rows = read(tmp_path / "out" / "train.parquet")
    assert rows[2] == {
        "data_source": "openai/gsm8k",
        "prompt": [
            {
                "role": "user",
                "content": '2? Let\'s think step by step and output the final answer after "####".',
            }
        ],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "1002"},
        "extra_info": {"split": "train", "index": 2, "answer": "it is\n#### 1,002", "question": "2?"},
    }
    out = capsys.readouterr().out
    assert "train.parquet: 3 rows" in out and "test.parquet: 3 rows" in out and "first row:" in out


def test_gsm8k_real_files(tmp_path: Path) -> None:
    source = SHARED_DATA / "gsm8k"
    if not source.exists():
        pytest.skip(f"{source} is not there")
    gsm8k.main(["--local_dataset_path", str(source), "--local_save_dir", str(tmp_path)])
    files = [str(tmp_path / "train.parquet"), str(tmp_path / "test.parquet")]
    dataset = PromptDataset(DataConfig(max_prompt_length=2000), files, CharTokenizer(), split="train")
    assert len(dataset) == 7473 + 1319
    _, row = dataset[8791]
    assert compute_score(row.data_source, row.extra_info["answer"], row.ground_truth)["score"] == 1.0


def test_errors_of_scripts_are_one_clear_line(tmp_path: Path) -> None:
    write_gsm8k(tmp_path)
    (tmp_path / "train.jsonl").write_text('{"question": "?", "reply": "x"}\n')
    for arguments, message in [
        (["--local_dataset_path", str(tmp_path)], "train.jsonl, row 0 has no answer (it has: question, reply)"),
        (["--local_dataset_path", str(tmp_path / "no")], "there is no folder"),
        ([], "--local_dataset_path is missing"),
    ]:
        command = [sys.executable, "-m", "verl_like.kit.datasets.gsm8k", "--local_save_dir", str(tmp_path / "out")]
        root = Path(__file__).resolve().parents[3]
        done = subprocess.run([*command, *arguments], capture_output=True, text=True, cwd=root)
        assert done.returncode == 1
        assert done.stderr.startswith("error: ") and message in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("line", ["{", '{"question": "?", "answer": "no number"}'])
def test_broken_lines(tmp_path: Path, line: str) -> None:
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text(line)
    with pytest.raises(ValueError, match=r"is not JSON|does not end in"):
        gsm8k.main(["--local_dataset_path", str(tmp_path), "--local_save_dir", str(tmp_path / "out")])


SCRIPTS = sorted(
    path.stem for path in Path(schema.__file__).parent.glob("[a-z]*.py") if path.stem not in ("catalogue", "schema")
)


@pytest.mark.parametrize("module", SCRIPTS)
def test_help_needs_no_torch(module: str) -> None:
    code = (
        f"import sys; from verl_like.kit.datasets import {module} as m\n"
        "try: m.main(['--help'])\nexcept SystemExit: pass\nassert 'torch' not in sys.modules"
    )
    root = Path(__file__).resolve().parents[3]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root)
    assert done.returncode == 0, done.stderr
    assert "--local_save_dir" in done.stdout


def test_arithmetic_splits_share_no_operands(tmp_path: Path) -> None:
    options = ["--num_train", "200", "--num_val", "20", "--max_operand", "15", "--seed", "3"]
    arithmetic.main(["--local_save_dir", str(tmp_path), *options])
    train, val = read(tmp_path / "train.parquet"), read(tmp_path / "val.parquet")
    assert (len(train), len(val)) == (200, 20)

    def operands(rows: list[dict[str, Any]]) -> list[tuple[int, int]]:
        return [tuple(map(int, row["prompt"][0]["content"].rstrip("=").split("+"))) for row in rows]  # type: ignore[misc]

    assert not {frozenset(pair) for pair in operands(train)} & {frozenset(pair) for pair in operands(val)}
    assert len(set(operands(train))) == 200
    for row, (a, b) in zip(train, operands(train), strict=True):
        truth = row["reward_model"]["ground_truth"]
        assert truth == str(a + b)
        assert compute_score(row["data_source"], truth, truth)["score"] == 1.0
    assert arithmetic.split_pairs(200, 20, 15, 3) == arithmetic.split_pairs(200, 20, 15, 3)
    assert arithmetic.split_pairs(200, 20, 15, 4) != arithmetic.split_pairs(200, 20, 15, 3)


def test_arithmetic_says_when_there_are_not_enough_pairs() -> None:
    with pytest.raises(ValueError, match=r"num_train=200 is more than"):
        arithmetic.split_pairs(200, 2, 9, 1)
    with pytest.raises(ValueError, match=r"num_val=55 needs more than 55"):
        arithmetic.split_pairs(1, 55, 9, 1)


def puzzles_of(path: Path) -> list[tuple[tuple[int, ...], int]]:
    truths = [row["reward_model"]["ground_truth"] for row in read(path)]
    return [(tuple(sorted(truth["numbers"])), truth["target"]) for truth in truths]


def solvable(numbers: tuple[int, ...], target: int) -> bool:
    """Whether plain search reaches the target (exact integers only, as the generator makes them)."""
    if len(numbers) == 1:
        return numbers[0] == target
    for i, a in enumerate(numbers):
        for j, b in enumerate(numbers):
            if i == j:
                continue
            rest = tuple(n for k, n in enumerate(numbers) if k not in (i, j))
            results = [a + b, a - b, a * b] + ([a // b] if b and a % b == 0 else [])
            if any(solvable((*rest, value), target) for value in results):
                return True
    return False


def test_generated_countdown_puzzles_are_solvable_and_disjoint(tmp_path: Path) -> None:
    countdown.main(["--local_save_dir", str(tmp_path), "--num_train", "60", "--num_test", "20", "--template", "base"])
    train, test = puzzles_of(tmp_path / "train.parquet"), puzzles_of(tmp_path / "test.parquet")
    assert (len(train), len(test)) == (60, 20)
    assert len({*train, *test}) == 80
    assert all(solvable(numbers, target) for numbers, target in (*train, *test))
    prompt = read(tmp_path / "train.parquet")[0]["prompt"][0]["content"]
    assert prompt.startswith("A conversation between User and Assistant.") and prompt.endswith("\n<think>")


def test_the_base_template_is_that_of_the_public_countdown_data(tmp_path: Path) -> None:
    source = SHARED_DATA / "countdown" / "countdown_test.parquet"
    if not source.exists():
        pytest.skip(f"{source} is not there")
    theirs = read(source)[0]
    puzzle = countdown.Puzzle(tuple(theirs["nums"]), theirs["target"])
    ours = countdown.to_row(puzzle, 0, split="test", template="base")
    assert ours == {key: theirs[key] for key in ours}


def test_countdown_from_files(tmp_path: Path) -> None:
    (tmp_path / "24.csv").write_text("Rank,Puzzles\n" + "".join(f"{i},1 2 {i} {i}\n" for i in range(1, 13)))
    options = ["--local_save_dir", str(tmp_path / "out"), "--num_test", "4", "--local_dataset_path"]
    countdown.main([*options, str(tmp_path / "24.csv")])
    train, test = puzzles_of(tmp_path / "out" / "train.parquet"), puzzles_of(tmp_path / "out" / "test.parquet")
    assert (len(train), len(test), len({*train, *test})) == (8, 4, 12)
    assert read(tmp_path / "out" / "train.parquet")[0]["data_source"] == "game24"
    countdown.main([*options, str(tmp_path / "out" / "train.parquet")])  # parquet in, parquet out
    assert sorted(
        puzzles_of(tmp_path / "out" / "train.parquet") + puzzles_of(tmp_path / "out" / "test.parquet")
    ) == sorted(train)
    with pytest.raises(ValueError, match=r"leaves nothing of the 4 puzzles"):
        countdown.main([*options, str(tmp_path / "out" / "test.parquet")])
    (tmp_path / "bad.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match=r"no column Puzzles \(it has: a, b\)"):
        countdown.main([*options, str(tmp_path / "bad.csv")])


def test_write_rows_refuses_nothing_to_write(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no rows"):
        schema.write_rows([], tmp_path / "a.parquet")
