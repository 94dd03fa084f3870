"""Ground truths that are dictionaries: as such, or as their JSON text (what csv files hold)."""

from __future__ import annotations

import json
from typing import Any


def dictionary_with(ground_truth: Any, *keys: str) -> dict[str, Any]:
    """The ground truth as a dictionary. ValueError, which fails the row, unless it has all `keys`."""
    found = ground_truth
    if isinstance(found, str):
        try:
            found = json.loads(found)
        except ValueError:
            found = None
    if not isinstance(found, dict) or any(found.get(key) is None for key in keys):
        raise ValueError(f"ground_truth must be a dictionary (or its JSON text) with {keys}, not {ground_truth!r:.200}")
    return found
