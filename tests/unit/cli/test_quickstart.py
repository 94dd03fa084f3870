"""`verl-like quickstart`: the recipe's script, from a clone and from an installed wheel."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from verl_like.cli import quickstart
from verl_like.cli.main import main

ROOT = Path(__file__).resolve().parents[3]


def test_a_clone_runs_its_own_recipe() -> None:
    assert quickstart.script() == ROOT / "recipes" / "quickstart" / "run.py"


def test_options_and_the_exit_status_pass_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "run.py"
    script.write_text(f"import sys\nopen({str(tmp_path / 'seen')!r}, 'w').write(' '.join(sys.argv[1:]))\nsys.exit(7)\n")
    monkeypatch.setattr(quickstart, "script", lambda: script)
    with pytest.raises(SystemExit) as ended:
        main(["quickstart", "trainer.save_freq=5", "--rollout", "hf", "--seed", "3"])
    assert ended.value.code == 7
    expected = "--output-dir outputs/quickstart --seed 3 --rollout hf trainer.save_freq=5"
    assert (tmp_path / "seen").read_text() == expected


@pytest.mark.slow
def test_a_wheel_brings_it_along(tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip"]
    wheel = [*pip, "wheel", str(ROOT), "--no-deps", "--no-build-isolation", "--no-index", "-q", "-w", str(tmp_path)]
    subprocess.run(wheel, check=True, timeout=300)
    (file,) = tmp_path.glob("*.whl")
    prefix = tmp_path / "prefix"
    install = ["install", "--no-deps", "--no-index", "-q", "--ignore-installed", "--prefix", str(prefix), str(file)]
    subprocess.run([*pip, *install], check=True, timeout=300)
    (packages,) = prefix.glob("lib/python3*/site-packages")
    code = "from verl_like.cli.quickstart import script; print(script())"
    environment = os.environ | {"PYTHONPATH": str(packages)}
    found = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=100
    )
    path = Path(found.stdout.strip())
    assert path.is_relative_to(prefix), found.stderr
    subprocess.run([sys.executable, str(path), "--help"], env=environment, cwd=tmp_path, check=True, timeout=100)
