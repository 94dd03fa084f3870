"""`verl-like`: the options reach the benchmark, and help does not wait for torch."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import pytest

from verl_like.bench import grpo
from verl_like.cli.main import main


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


def test_help_imports_neither_torch_nor_ray() -> None:
    code = (
        "import sys\nfrom verl_like.cli.main import main\n"
        "try: main(['bench', 'grpo', '--help'])\nexcept SystemExit: pass\n"
        "print([m for m in ('torch', 'ray', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "[]" and "--workload" in done.stdout
