"""`verl-like`: the options reach the benchmark, and help does not wait for torch."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from verl_like.cli.main import VERBS, Verb, main
from verl_like.config import PPOConfig
from verl_like.kit.bench import grpo
from verl_like.trainer import main_ppo


def test_options_reach_the_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[argparse.Namespace] = []
    monkeypatch.setattr(grpo, "main", seen.append)
    main(["bench", "grpo", "--model", "1.5b", "--workload", "w2", "--ranks", "4", "--json", "x.json", "--", "a.b=1"])
    (arguments,) = seen
    assert (arguments.model, arguments.workload, arguments.ranks) == ("1.5b", "w2", 4)
    assert arguments.json == Path("x.json") and arguments.overrides == ["a.b=1"]


@pytest.mark.parametrize("argv", [[], ["bench"], ["bench", "grpo", "--model", "900b"], ["benhc"]])
def test_a_wrong_command_line_ends_with_status_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert ended.value.code == 2 and "usage: verl-like" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("shell", "told"),
    [
        ("{} data list | true; echo ${{PIPESTATUS[0]}}", "141"),
        ("{} data list >&-; echo $?", "0"),
        ("{} report a 2>&-; echo $?", "1"),
        ("mkdir g; cd g; rmdir ../g; {} doctor; echo $?", "error: the current folder is not there any more;.*1"),
        ("{} data list > /dev/full; echo $?", "error: verl-like data failed: OSError: .*; the whole text is in .*1"),
        # a module that is imported for the verb is interrupted
        ("echo 'raise KeyboardInterrupt' > tempfile.py; PYTHONPATH=.:$PYTHONPATH {} selfcheck; echo $?",
         "error: interrupted\n130"),
    ],
)  # fmt: skip
def test_how_a_program_ends(shell: str, told: str, tmp_path: Path) -> None:
    command = shell.format(f"{sys.executable} -m verl_like.cli")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        ["bash", "-c", command], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60
    )
    text = (done.stderr + done.stdout).strip()
    assert re.fullmatch(told, text, re.S) and "Traceback" not in text, text


@pytest.mark.parametrize("module", ["verl_like.cli.main", "verl_like.trainer.main_ppo"])
def test_what_is_imported_before_interrupts_are_heard_is_small(module: str) -> None:
    code = f"import sys, {module}\nprint([m for m in ('omegaconf', 'verl_like.config') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "[]"


def test_help_imports_neither_torch_nor_ray() -> None:
    code = (
        "import sys\nfrom verl_like.cli.main import main\n"
        "try: main(['bench', 'grpo', '--help'])\nexcept SystemExit: pass\n"
        "print([m for m in ('torch', 'ray', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "[]" and "--workload" in done.stdout


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["trian"], "there is no command 'trian'; did you mean train?"),
        (["train", "--resovle"], "unknown option --resovle; did you mean --resolve?"),
        (
            ["train", "--num-generations", "8"],
            "Colossal-RL's and TRL's --num-generations is our actor_rollout_ref.rollout.n",
        ),
        (["bench", "grop"], "did you mean grpo?"),
        (["bench", "grpo", "--stpes", "3"], "did you mean --steps?"),
    ],
)
def test_what_is_misspelt_gets_the_nearest_name(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert ended.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb.name)
def test_every_verb_shows_examples_that_begin_with_it(verb: Verb, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([verb.name, "--help"])
    shown = capsys.readouterr().out
    assert ended.value.code == 0 and verb.examples
    assert all(f"\n  {example}" in shown and f"verl-like {verb.name}" in example for example in verb.examples)


def test_the_list_of_verbs_imports_no_verb(capsys: pytest.CaptureFixture[str]) -> None:
    code = (
        "import sys\nfrom verl_like.cli.main import main\n"
        "try: main(['--help'])\nexcept SystemExit: pass\n"
        "print([m for m in ('torch', 'ray', 'transformers', 'hydra') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "[]" and all(f"\n  {verb.name} " in done.stdout for verb in VERBS)


def test_train_takes_the_command_line_of_main_ppo(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[PPOConfig] = []
    monkeypatch.setattr(main_ppo, "train", seen.append)
    main(["train", "data.seed=3", "--config-path=config", "--config-name=ppo_trainer", "data.train_batch_size=8"])
    assert [(config.data.seed, config.data.train_batch_size) for config in seen] == [(3, 8)]
    with pytest.raises(SystemExit, match=r"error: unknown key data\.sed; did you mean data\.seed\?"):
        main(["train", "data.sed=3"])
    main(["train", "--cfg", "job", "data.seed=4"])
    assert "seed: 4" in capsys.readouterr().out and len(seen) == 1
