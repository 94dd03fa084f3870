"""Environments by name: a kind of ours, a preset under ROLL's tag, an adapter's prefix, or a class of the user's."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from verl_like.plugins.games.adapters import ADAPTERS
from verl_like.plugins.games.bandit import Bandit
from verl_like.plugins.games.countdown import Countdown
from verl_like.plugins.games.frozen_lake import FrozenLake
from verl_like.plugins.games.sokoban import Sokoban
from verl_like.user_code import is_reference, load

KINDS: dict[str, type] = {"bandit": Bandit, "countdown": Countdown, "frozen_lake": FrozenLake, "sokoban": Sokoban}
# ROLL's tags: what a run that names one and says no more of it plays
TAGS: dict[str, tuple[str, dict[str, Any]]] = {
    "SimpleSokoban": ("sokoban", {"dim_room": (6, 6), "num_boxes": 1, "max_steps": 10}),
    "LargerSokoban": ("sokoban", {"dim_room": (8, 8), "num_boxes": 2, "search_depth": 10, "max_steps": 10}),
    "SokobanDifferentGridVocab": (
        "sokoban",
        {"grid_lookup": {0: "W", 1: ".", 2: "G", 3: "C", 4: "B", 5: "A", 6: "@"}, "max_steps": 10},
    ),
    "FrozenLake": ("frozen_lake", {"max_steps": 10}),
    "Bandit": ("bandit", {}),
    "Countdown": ("countdown", {}),
}


def make(kind: str, config: Mapping[str, Any], where: str) -> Any:
    """An environment.

    Raises ValueError, which names `where`, the kind and what is wrong with it or with its configuration.
    """
    preset, config = TAGS.get(kind), dict(config)
    if preset is not None:
        kind, config = preset[0], preset[1] | config
    prefix, _, rest = kind.partition(":")
    if kind in KINDS:
        build = KINDS[kind]
    elif prefix in ADAPTERS and rest:
        build, config = ADAPTERS[prefix], {"name": rest, **config}
    elif is_reference(kind):
        build = load(kind, where)
    else:
        known = [*KINDS, *TAGS, *(f"{name}:..." for name in ADAPTERS)]
        near = difflib.get_close_matches(kind, known, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ValueError(f"{where}={kind!r}: {hint}choose one of {', '.join(known)}, or name a class: file.py:Class")
    try:
        return build(**config)
    except TypeError as error:
        raise ValueError(f"{where}={kind} with config={config}: {error}") from error
