"""The door to what the trainer does not import: plugins and the kit, found by menu and name.

A part is a row of registry.txt, `module:name`, until a run needs it; then `user_code` loads it, as it loads code of the
user's own. So the trainer runs without a plugin that it does not use, and a plugin's imports cost nothing before.
Graders (`rewards/graders.txt`), engines (`config/engines.py`) and verbs (`cli/verbs.txt`) have tables of their own,
whose rows say more than a place.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from verl_like.user_code import load

PARTS: dict[str, dict[str, str]] = {}  # menu -> name -> place: the rows of registry.txt
for _row in Path(__file__).with_suffix(".txt").read_text(encoding="utf-8").splitlines():
    if _row and not _row.startswith("#"):
        _menu, _name, _place = _row.split()
        PARTS.setdefault(_menu, {})[_name] = f"verl_like.{_place}"


def part(menu: str, name: str) -> Any:
    """The object behind a row of PARTS. Raises KeyError for a menu or name that it lacks."""
    return load(PARTS[menu][name], f"{menu}.{name}")
