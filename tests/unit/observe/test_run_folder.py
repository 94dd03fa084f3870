"""What a run leaves behind can be read back, by `verl_like.read_run` and by pandas alone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import verl_like
from tests.unit.observe.run_factory import write_run
from verl_like.observe.environment import describe, write_environment
from verl_like.observe.redaction import is_secret, redacted, redacted_text
from verl_like.observe.run_folder import flat, read_metrics


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    bad = {7: {"actor/grad_norm": float("nan")}}
    return write_run(tmp_path_factory.mktemp("runs") / "a", steps=20, planted=lambda step: bad.get(step, {}))


def test_a_run_is_read_back(folder: Path) -> None:
    run = verl_like.read_run(folder)
    assert list(run.steps) == list(range(21)) and "actor/grad_norm" not in run.steps[7]
    assert [row["step"] for row in run.validation] == [0, 10, 20]
    assert run.validation[-1]["val-core/toy/acc/mean@1"] == pytest.approx(0.8)
    assert run.config["trainer"]["report_freq"] == 20 and run.environment["processes"] == 2
    assert {sample["step"] for sample in run.samples} == {5, 10, 15, 20} and len(run.samples) == 64
    assert {sample["step"] for sample in run.validation_samples} == {0, 10, 20}


def test_metrics_are_a_table_of_pandas(folder: Path) -> None:
    pandas = pytest.importorskip("pandas")
    table = verl_like.read_run(folder).metrics
    assert table.index.name == "step" and table.loc[20, "critic/score/mean"] > table.loc[1, "critic/score/mean"]
    line = pandas.read_json(folder / "metrics.jsonl", lines=True)  # without verl_like
    assert line["critic/score/mean"].count() == 20 and line["val-core/toy/acc/mean@1"].count() == 3


def test_older_files_are_read_too(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 1, "time": 1.0, "data": {"x": 1.0}}\n{"step": 1, "time": 2.0, "y": 2.0}\n{"step": 2, "ti'
    )
    assert read_metrics(tmp_path / "metrics.jsonl") == {1: {"x": 1.0, "y": 2.0}}


def test_a_wrong_folder_is_told_with_the_right_one(folder: Path) -> None:
    with pytest.raises(FileNotFoundError, match=f"did you mean {folder}"):
        verl_like.read_run(folder.parent)
    with pytest.raises(FileNotFoundError, match="no such folder"):
        verl_like.read_run(folder / "nowhere")


def test_reading_a_run_needs_no_torch(folder: Path) -> None:
    code = f"import sys, verl_like; verl_like.read_run({str(folder)!r}).steps; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "False"
    with pytest.raises(AttributeError, match="read_rum"):
        verl_like.read_rum  # noqa: B018


def test_secrets_stay_out_of_what_is_written() -> None:
    given = [
        "train",
        "wandb_api_key=abc",
        "--api-key",
        "abc",
        "trainer.x=https://me:abc@host/x",
        "data.max_token_len=5",
    ]
    hidden = " ".join(redacted(given))
    assert "abc" not in hidden and "max_token_len=5" in hidden and "host/x" in hidden
    assert "hf_" not in redacted_text("token hf_AbCdEfGhIjKlMnOpQrSt used")
    inside = redacted_text(
        "+runtime_env={env_vars:{WANDB_API_KEY:0123abc, MODE: 'x'}, api_key: mine, max_token_len: 7}"
    )
    assert "0123abc" not in inside and "mine" not in inside and "max_token_len: 7" in inside and "'x'" in inside
    assert is_secret("HF_TOKEN") and is_secret("model.password") and not is_secret("ppo_max_token_len_per_gpu")


def test_the_environment_names_command_versions_and_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "abc")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(
        sys, "orig_argv", ["python", "-m", "verl_like.trainer.main_ppo", "x.token=abc", "trainer.seed=3"]
    )
    found = describe("cpu", 2)
    assert found["command"] == "python -m verl_like.trainer.main_ppo 'x.token=(hidden)' trainer.seed=3"
    assert found["variables"]["OMP_NUM_THREADS"] == "1" and found["variables"]["HF_TOKEN"] == "(hidden)"
    assert found["packages"]["torch"] and found["packages"]["verl_like"] == verl_like.__version__
    write_environment(tmp_path, device="cpu", processes=1)
    write_environment(tmp_path, device="cpu", processes=4)
    again = json.loads((tmp_path / "environment.json").read_text())
    assert again["processes"] == 4 and [start["processes"] for start in again["earlier"]] == [1]
    assert "abc" not in (tmp_path / "environment.json").read_text()


def test_nested_sections_become_dotted_keys() -> None:
    assert flat({"a": {"b": 1, "c": {"d": [2], "e": {}}}}) == {"a.b": 1, "a.c.d": [2], "a.c.e": {}}
