"""`verl-like eval` and `chat`, from a trained run to what a user sees."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.e2e.support import metrics_of, overrides, write_task
from tests.unit.rewards.test_judge import Endpoint
from tests.unit.rewards.test_judge import endpoint as endpoint
from verl_like.cli.main import main
from verl_like.cluster.environment import free_port
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


def outside(url: str, *more: str) -> list[str]:
    section = "actor_rollout_ref.rollout"
    return [f"{section}.name=openai", f"{section}.openai.url={url}", f"{section}.openai.retry_delay=0.01", *more]


def test_a_model_behind_an_endpoint(
    tmp_path: Path,
    tiny_model: Path,
    endpoint: Endpoint,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Its texts are graded; what it does not answer is a failed row; a refused key ends all; none is trained."""
    monkeypatch.setenv("OUTSIDE_KEY", "sk-open-sesame")
    keys = overrides(write_task(tmp_path, num_rows=16), tiny_model, tmp_path / "run")
    keys += outside(endpoint.url, "actor_rollout_ref.rollout.openai.api_key_env=OUTSIDE_KEY")
    keys += ["reward_model.max_failure_fraction=0.5"]
    endpoint.answer = lambda text: "777777" if text.startswith(("0", "1", "2")) else "12"
    endpoint.faults = [(400, "no")]
    samples = tmp_path / "answers.jsonl"
    main(["eval", str(tiny_model), *keys, "--samples", str(samples)])
    told = capsys.readouterr()
    source, n, _, mean, failed, tokens, _ = told.out.splitlines()[1].split()
    answers = [json.loads(line) for line in samples.read_text().splitlines()]
    right = sum(each["acc"] for each in answers if each["output"])
    assert (source, n, failed) == ("sevens", "16", "1") and float(mean) == pytest.approx(right / 15, abs=1e-4)
    assert 2 < float(tokens) < 6 and {each["output"] for each in answers} == {"777777", "12", ""}
    assert all("sesame" not in text for text in (told.out, told.err, samples.read_text()))
    endpoint.faults = [(401, "no such key: sk-open-sesame")] * 16
    with pytest.raises(SystemExit, match=r"HTTP 401: no such key: \*\*\*"):
        main(["eval", str(tiny_model), *keys])
    with pytest.raises(SystemExit, match=r"rollout\.name=openai: an endpoint takes no weights"):
        run(compose(keys))


@pytest.mark.slow  # vLLM's own server: a minute, three on a busy machine
@pytest.mark.timeout(400)
def test_vllms_own_server_answers_what_vllm_answers_here(
    tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("vllm")
    keys = overrides(write_task(tmp_path, num_rows=16), tiny_model, tmp_path / "run")
    port = free_port("127.0.0.1")
    found = []
    with vllm_server(tiny_model, port, tmp_path / "server.log"):
        of_server = ["actor_rollout_ref.rollout.openai.model=tiny", "actor_rollout_ref.rollout.openai.api_key_env=HOME"]
        for more in (outside(f"http://127.0.0.1:{port}/v1", *of_server), ["actor_rollout_ref.rollout.name=vllm"]):
            samples = tmp_path / "answers.jsonl"
            main(["eval", str(tiny_model), *keys, *more, "--samples", str(samples)])
            answers = [json.loads(line) for line in samples.read_text().splitlines()]
            found.append({each["input"]: each["output"] for each in answers})
    assert len(found[0]) > 8 and found[0] == found[1]


@contextmanager
def vllm_server(model: Path, port: int, log: Path) -> Iterator[None]:
    """vLLM's OpenAI server, until the end of the context."""
    options = (
        f"--served-model-name tiny --port {port} --host 127.0.0.1 --max-model-len 64 --dtype float32 --enforce-eager"
    )
    own = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1"}
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), *options.split()]
    with log.open("w") as out:
        server = subprocess.Popen(
            command, env=os.environ | own, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        deadline = time.monotonic() + 300
        while True:
            assert server.poll() is None and time.monotonic() < deadline, log.read_text()[-4000:]
            with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                break
            time.sleep(0.5)
        yield
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)


def test_what_cannot_be_evaluated_is_told(trained: tuple[Path, dict[str, float]], tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"no validation set is named: give data\.val_files=FILE"):
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
        assert re.search(rf"start: {re.escape(phase)} took \d+\.\d s, \d+\.\d s of CPU", log), phase
    assert re.search(
        r"start: imports \d+\.\d s \(\d+\.\d s of CPU\), actor \d+\.\d s \(.*\), rollout \d+\.\d s \(", log
    )
    assert re.search(r"start: ready after \d+\.\d s; \d+\.\d s of CPU, on \d+ core", log)
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
