"""docs/tools.md, as it stands: its files, its conversation, and what it says comes of that."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parents[4] / "docs" / "tools.md"


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
@pytest.mark.timeout(120)
def test_the_conversation_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = PAGE.read_text()
    blocks = re.findall(r"```(?:python|yaml)\n(.*?)```", text, re.S)
    for block in blocks:
        if name := re.match(r"# (\S+\.(?:py|yaml))\n", block):
            (tmp_path / name[1]).write_text(block.replace("timeout: 5", "timeout: 5, min_level: limits"))
    assert len(list(tmp_path.iterdir())) == 4
    monkeypatch.chdir(tmp_path)
    space: dict[str, Any] = {}
    exec(compile(blocks[-1], str(PAGE), "exec"), space)
    shown = " ".join(text[text.index("    offered") : text.index("A session")].split())
    end = space["end"]
    rewards = ", ".join(f"{name} {reward}" for name, reward in end.metrics.items())
    assert shown == (
        f"offered {', '.join(space['offered'])} said {' | '.join(space['said'])} end reward {end.reward}: {rewards}"
    )
