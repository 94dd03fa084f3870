"""docs/tutorial.md: its files and commands as they stand there, in a fresh folder of what looks like a clone."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```(bash|python|yaml)\n(.*?)^```", re.S | re.M)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_tutorial_as_it_stands(tmp_path: Path) -> None:
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    tools = tmp_path / "bin"  # `python` and `verl-like` of the environment that runs the test
    tools.mkdir()
    for name, command in (("python", ""), ("verl-like", "-m verl_like.cli")):
        (tools / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {command} "$@"\n')
        (tools / name).chmod(0o755)
    path = {"PATH": f"{tools}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    folder, printed, started = tmp_path, "", time.monotonic()
    for kind, text in BLOCK.findall((ROOT / "docs" / "tutorial.md").read_text()):
        if kind != "bash":
            name = re.match(r"# (\S+)\n", text)
            assert name, f"a file of the page begins with its name: {text}"
            (folder / name[1]).write_text(text)
            continue
        script = f"set -e\n{text}\npwd > {tmp_path}/where"
        ran = subprocess.run(["bash", "-c", script], cwd=folder, env=os.environ | path, capture_output=True, text=True)
        assert ran.returncode == 0, f"{text}\n{ran.stdout[-3000:]}\n{ran.stderr[-3000:]}"
        printed += ran.stdout + ran.stderr
        folder = Path((tmp_path / "where").read_text().strip())
    print(printed, f"the page took {time.monotonic() - started:.0f} s")
    right = [float(value) for value in re.findall(r"validation at step \d+: tens acc/mean@1 ([\d.]+)", printed)]
    assert right[0] < 0.05 and right[3] > 0.5, right  # the first run: before, then after 20, 40 and 60 steps
    assert (folder / "my_model" / "model.safetensors").exists() and (folder / "my_run" / "report.html").exists()
    assert "37+58=0" in printed.splitlines()[-1] or "37+58=0" in printed
