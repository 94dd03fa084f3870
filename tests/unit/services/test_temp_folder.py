"""Folders of a killed trainer are removed by the next one; those in use are not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from verl_like.services import temp_folder
from verl_like.services.temp_folder import TempFolder, remove_leftovers

_KILLED = """
import os, signal
from verl_like.services.temp_folder import TempFolder
print(TempFolder().path, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_only_the_folder_of_a_killed_process_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    out = subprocess.run(
        [sys.executable, "-c", _KILLED], stdout=subprocess.PIPE, text=True, env={**os.environ, "TMPDIR": str(tmp_path)}
    ).stdout
    left, mine, foreign = Path(out.strip()), TempFolder(), tmp_path / "other"
    (left / "file").write_text("x")
    foreign.mkdir()
    assert remove_leftovers() == []  # it may be locked in a moment
    monkeypatch.setattr(temp_folder, "_NEW_S", -1.0)
    assert remove_leftovers() == [left.name]
    assert sorted(tmp_path.iterdir()) == sorted([Path(mine.path), foreign])
    mine.remove()
    assert list(tmp_path.iterdir()) == [foreign]
