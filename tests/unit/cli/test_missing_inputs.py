"""What a verb says of nothing, of what is not there and of files of another kind: at once, of what was typed."""

from __future__ import annotations

import logging
import re
import shlex
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants

from verl_like.cli.main import main
from verl_like.config.errors import ConfigError
from verl_like.kit.evaluation import evaluate
from verl_like.trainer.compose import compose

NOT_SET = r"actor_rollout_ref\.model\.path{} is not set .*data\.train_files is not set .*data\.val_files is not set "
TINY = r"there is no folder {here}/models/tiny \(a relative path counts from the current folder\)"
MODEL = "actor_rollout_ref.model.path"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home without a network, with a text file, a folder and a row of data in it."""
    monkeypatch.setattr(logging, "raiseExceptions", False)  # a verb of another test left a handler of a closed stream
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", lambda *a, **k: pytest.fail("offline, and asked"))
    (tmp_path / "text.txt").write_text("no: [run")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "data_source": "b", "reward_model": {"ground_truth": "c"}}\n')
    for name in ("folder", "run", "bytes"):
        (tmp_path / name).mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 1}\n')
    (tmp_path / "bytes" / "config.yaml").write_bytes(b"a\xff")
    (tmp_path / "group.yaml").write_text("defaults: [{nosuch: x}]")
    return tmp_path


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("train", NOT_SET.format("")),
        ("plan", NOT_SET.format("")),
        (f"plan {MODEL}=models/tiny data.train_files=a.parquet data.val_files=b.parquet", TINY + ".*file {here}/a.p"),
        (f"train {MODEL}=folder data.train_files=row.jsonl", "did you mean rows.jsonl.*val_files is not set"),
        (f"train {MODEL}=models/tiny critic.model.path=no/critic data.tokenizer=tok/x algorithm.adv_estimator=gae",
         TINY + ".*data.tokenizer=tok/x: there is no folder {here}/tok/x .*critic.model.path=no/critic: there is no "),
        ("chat models/tiny", "error: MODEL=models/tiny: " + TINY),
        ("chat text.txt", "MODEL=text.txt is a file; name the model's folder"),
        ("eval models/tiny", "error: MODEL=models/tiny: " + TINY),
        ("check-template models/tiny", "error: MODEL=models/tiny: " + TINY),
        ("data show a.parquet", "FILE: there is no file {here}/a.parquet"),
        ("data show folder", "FILE: {here}/folder is a folder; name the file in it"),
        ("data show rows.jsonl", r"actor_rollout_ref\.model\.path \(--model\) is not set"),
        ("data show rows.jsonl --model models/tiny", TINY),
        (f"selfcheck {MODEL}=models/tiny", f"error: {MODEL}=models/tiny: " + TINY),
        (f"selfcheck --config-path=. -- {MODEL}=M --config-name=mine", "error: --config-name=mine: there is no file "),
        ("export folder out", "folder is neither a run's folder"),
        ("report text.txt", "{here}/text.txt is no run's folder .*it is a file"),
        ("report nothing", "{here}/nothing is no run's folder .*there is no such folder"),
        ("diff nothing folder", "{here}/nothing does not exist"),
        ("diff text.txt text.txt", "text.txt cannot be read"),
        ("replay nothing 3", "{here}/nothing: there is no such folder"),
        ("replay text.txt 3", "{here}/text.txt: it is a file; name the folder of a run"),
        ("bisect folder nothing", r"{here}/folder: it has recorded no step \(trainer.record_freq\)"),
        ("replay folder", "required: STEP$"),
        ("bench grpo --replay a.json", "error: --replay a.json: .*No such file"),
        ("eval ~nosuchuser/m", "^1 error: MODEL=~nosuchuser/m: this machine has no user of that name"),
        ("chat ~nosuchuser", "^1 error: MODEL=~nosuchuser: this machine has no user of that name"),
        ("data show ~nosuchuser/x.jsonl", "^1 error: FILE=~nosuchuser/x.jsonl: this machine has no user"),
        ("report ''", "^1 error: RUN is empty"),
        ("export '' out", "^1 error: CHECKPOINT is empty"),
        ("plan --config-name=", "^1 error: --config-name is empty"),
        ("plan --config-path=~nosuchuser --config-name=x", "^1 error: --config-path=~nosuchuser: this machine has no"),
        ("chat folder --temperature nan", "^2 .*--temperature: nan: give a finite number from 0"),
        ("chat folder --top-p 1.5", "^2 .*--top-p: 1.5: give a finite number from 0 to 1"),
        ("replay folder 1 --tolerance nan", "^2 .*--tolerance: nan: give a finite number"),
        ("selfcheck --rows 0", "^2 .*--rows: 0: give a finite number from 1"),
        ("report run --out folder", "error: --out=folder cannot be written .Is a directory"),
        ("compare run run --out text.txt/x", "error: --out=text.txt/x cannot be written"),
        ("export folder text.txt/out", "error: OUT='text.txt': nothing can be written there .*is a file, not a folder"),
        ("data prepare countdown --out text.txt", "error: --out='text.txt': nothing can be written there"),
        ("diff bytes folder", "error: bytes/config.yaml is damaged: UnicodeDecodeError"),
        ("plan --config-name=group", "error: nosuch=x: there is no such group; choose one of"),
        ("bench packing --compare folder", "folder is no file that a benchmark wrote with --json"),
    ],
)  # fmt: skip
def test_what_is_not_there(line: str, told: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(shlex.split(line))
    text = f"{ended.value.code} {capsys.readouterr().err}"
    assert re.search(told.replace("{here}", str(here)), text.strip(), re.S), text
    assert not any(word in text for word in ("deepseek", "gsm8k", "Traceback")), text
    assert "data.tokenizer" not in text or "data.tokenizer" in line, "advice that this verb cannot take"


@pytest.mark.parametrize("files", [[], ["data.val_files=null"]])
def test_eval_asks_for_a_validation_set(files: list[str], here: Path) -> None:
    with pytest.raises(ConfigError, match=r"^no validation set is named: give data\.val_files=FILE"):
        evaluate(compose([f"{MODEL}=folder", *files]))
