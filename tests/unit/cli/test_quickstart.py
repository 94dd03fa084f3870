"""`verl-like quickstart`: the recipe's script in a clone; tests/e2e/test_wheel.py has that of a wheel."""

from __future__ import annotations

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
