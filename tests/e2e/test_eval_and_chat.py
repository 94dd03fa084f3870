"""`verl-like eval` and `chat`, from a trained run to what a user sees."""

from __future__ import annotations

import io
import json
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.e2e.support import metrics_of, overrides, write_task
from verl_like.cli.main import main
from verl_like.trainer.compose import compose
from verl_like.trainer.run import run


@pytest.fixture(scope="module")
def trained(
    tmp_path_factory: pytest.TempPathFactory, make_tiny_model: Callable[..., Path]
) -> tuple[Path, dict[str, float]]:
    """A run of two steps with a checkpoint, and what its last validation said."""
    folder = tmp_path_factory.mktemp("trained")
    keys = overrides(
        write_task(folder, num_rows=16),
        make_tiny_model(),
        folder / "run",
        trainer__total_training_steps=2,
        trainer__save_freq=2,
        trainer__test_freq=2,
        actor_rollout_ref__actor__optim__lr=1e-3,
    )
    run(compose(keys))
    last = metrics_of(folder / "run")[-1]
    return folder / "run", {name: value for name, value in last.items() if name.startswith(("val-core", "val-aux"))}


def test_a_checkpoint_gives_what_the_runs_own_validation_gave(
    trained: tuple[Path, dict[str, float]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the checkpoint's own configuration, without a training engine."""
    folder, validation = trained
    main(["eval", str(folder), "--json", str(tmp_path / "all.json"), "--samples", str(tmp_path / "answers.jsonl")])
    told = capsys.readouterr().out.splitlines()
    assert json.loads((tmp_path / "all.json").read_text()) == pytest.approx(validation)
    mean = validation["val-core/sevens/acc/mean@1"]
    assert 0 < validation["val-aux/sevens/reward/mean@1"] < 1  # a number that another model would not have
    assert told[0].split() == ["data", "source", "n", "of", "mean", "failed", "tokens", "cut", "off"]
    assert told[1].split()[:5] == ["sevens", "16", "acc", f"{mean:.4f}", "0"]
    answers = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert len(answers) == 16 and sum(each["acc"] for each in answers) / 16 == pytest.approx(mean)


def test_any_model_with_several_answers(
    trained: tuple[Path, dict[str, float]], tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A Hugging Face folder under the configuration of a run of several processes; keys on the command line win."""
    file = ["--config-path", str(trained[0]), "--config-name", "config"]
    of_many = ["actor_rollout_ref.actor.ulysses_sequence_parallel_size=2", "data.train_batch_size=7"]
    main(["eval", str(tiny_model), *file, "-n", "4", "data.seed=3", *of_many])
    told = capsys.readouterr().out.splitlines()
    source, n, _, mean, best, failed, *_ = told[1].split()
    assert (source, n, failed) == ("sevens", "16", "0") and float(best) >= float(mean)
    assert "64 answers" in told[-1]


def test_what_cannot_be_evaluated_is_told(trained: tuple[Path, dict[str, float]], tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"data\.val_files names no validation set"):
        main(["eval", str(trained[0]), "data.val_files=null"])
    with pytest.raises(SystemExit, match="is neither a run's folder"):
        main(["eval", str(tmp_path)])
    with pytest.raises(SystemExit, match=r"reward_model\.enable"):
        main(["eval", str(trained[0]), "reward_model.enable=True", "reward_model.model.path=nowhere"])


def test_the_run_tells_how_it_starts_and_what_to_do_next(
    trained: tuple[Path, dict[str, float]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every command of the closing block does what it says, as it stands there."""
    folder, _ = trained
    log = (folder / "verl_like.log").read_text()
    for phase in ("tokenizer, data, graders", "1 worker(s): weights, hf", "first weight sync and its proof"):
        assert re.search(rf"start: {re.escape(phase)} took \d+\.\d s", log), phase
    assert re.search(r"start: actor \d+\.\d s, rollout \d+\.\d s", log)
    block = dict(line.split(maxsplit=1) for line in log.rpartition("the run ends\n")[2].splitlines())
    assert block["done"].startswith("2 steps in ") and block["checkpoint"] == str(folder / "global_step_2")
    commands = {name: shlex.split(block[name]) for name in ("resume", "look", "export")}
    assert all(words[0].endswith("verl-like") or words[1:3] == ["-m", "verl_like.cli"] for words in commands.values())
    own = {name: words[1:] if words[0].endswith("verl-like") else words[3:] for name, words in commands.items()}
    main([*own["export"][:2], str(tmp_path / "model")])
    main([*own["look"], "-p", "1+1=", "--max-tokens", "2"])
    assert len(capsys.readouterr().out.splitlines()[-1]) <= 6
    shutil.copytree(folder, tmp_path / "run")
    elsewhere = [f"trainer.default_local_dir={tmp_path / 'run'}", f"trainer.log_dir={tmp_path / 'run'}"]
    main([*own["resume"], *elsewhere, "actor_rollout_ref.actor.optim.lr=0.0"])
    assert (tmp_path / "run" / "global_step_4").is_dir() and not (tmp_path / "run-2").exists()


def test_chat_answers_with_what_the_model_would_say(
    trained: tuple[Path, dict[str, float]], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy, against transformers' own generate on the exported folder; from options and from a pipe."""
    folder, _ = trained
    main(["export", str(folder), str(folder / "exported")])
    tokenizer = AutoTokenizer.from_pretrained(folder / "exported")
    model = AutoModelForCausalLM.from_pretrained(folder / "exported", dtype=torch.float32)
    conversation = [{"role": "user", "content": "12+3="}]
    ids = tokenizer.apply_chat_template(conversation, add_generation_prompt=True, return_tensors="pt")["input_ids"]
    said = model.generate(ids, max_new_tokens=5, do_sample=False)[0, ids.shape[1] :]
    expected = tokenizer.decode(said, skip_special_tokens=True)
    capsys.readouterr()
    options = ["--temperature", "0", "--max-tokens", "5"]
    main(["chat", str(folder), "--prompt", "12+3=", *options])
    assert capsys.readouterr().out == f"{expected}\n"
    monkeypatch.setattr("sys.stdin", io.StringIO("12+3=\n/new\n12+3=\n/exit\nnot read\n"))
    main(["chat", str(folder / "exported"), *options])
    assert capsys.readouterr().out == f"{expected}\n" * 2


def test_chat_refuses_what_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="is no Hugging Face folder"):
        main(["chat", str(tmp_path), "-p", "x"])
