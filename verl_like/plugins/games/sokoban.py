"""Sokoban: push every box onto a target. Levels are generated, or read from files of Boxoban's form.

Rewards of gym-sokoban: -0.1 a step, +1 for a box pushed onto a target, -1 for one pushed off, +10 when all are there.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from verl_like.plugins.games.actions import ANSWER, belongs, move, share, split_of

ACTIONS = ("Up", "Down", "Left", "Right")
_STEPS = ((-1, 0), (1, 0), (0, -1), (0, 1))
# ROLL's numbers of what a tile shows: wall, floor, target, box on target, box, player, player on target
LOOKUP = {0: "#", 1: "_", 2: "O", 3: "√", 4: "X", 5: "P", 6: "S"}
NAMES = ("wall", "floor", "target", "box on target", "box", "player", "player on target")
_FILE = {"#": 0, " ": 1, ".": 2, "*": 3, "$": 4, "@": 5, "+": 6}
_TRIES = 1000

Place = tuple[int, int]


class Sokoban:
    """Sokoban. A move that cannot be read is a step in which nothing moves.

    dim_room: rows and columns, with the walls around.
    search_depth: moves that the generator plays backwards.
    levels: a text file of Boxoban's form instead of the generator; its levels have their own size and boxes.
    grid_lookup: other symbols, by ROLL's numbers.
    holdout: share of all levels that only validation plays.
    """

    def __init__(
        self,
        dim_room: Sequence[int] = (6, 6),
        num_boxes: int = 1,
        search_depth: int = 30,
        max_steps: int = 100,
        action_pattern: str = ANSWER,
        grid_lookup: Mapping[Any, str] | None = None,
        grid_vocab: Mapping[str, str] | None = None,
        levels: str | None = None,
        holdout: float = 0.0,
    ) -> None:
        if len(dim_room) != 2 or min(dim_room) < 5 or not 0 < num_boxes <= (dim_room[0] - 2) * (dim_room[1] - 2) // 4:
            raise ValueError(f"dim_room={dim_room}, num_boxes={num_boxes}: 5 x 5 at least, a box for 4 tiles at most")
        if max_steps < 1 or search_depth < 1:
            raise ValueError(f"max_steps={max_steps}, search_depth={search_depth}: at least 1")
        self._shape, self._num_boxes, self._depth = (dim_room[0], dim_room[1]), num_boxes, search_depth
        self._max_steps, self._pattern, self._holdout = max_steps, action_pattern, share(holdout, "holdout")
        self._symbols = LOOKUP | {int(number): str(symbol) for number, symbol in (grid_lookup or {}).items()}
        if len(set(self._symbols.values())) != len(LOOKUP):
            raise ValueError(f"grid_lookup={dict(grid_lookup or {})}: two kinds of tiles would look the same")
        meaning = grid_vocab or {self._symbols[number]: name for number, name in enumerate(NAMES)}
        self.instruction = (
            "You are solving the Sokoban puzzle: push all boxes onto the targets; boxes cannot be pulled. Symbols: "
            f"{', '.join(f'{symbol} {name}' for symbol, name in meaning.items())}. Your answer must be one of "
            "Up, Down, Left, Right, like <answer>Up</answer>."
        )
        self._levels = None if levels is None else read_levels(levels)
        self.walls: set[Place] = set()
        self.targets: set[Place] = set()
        self.boxes: set[Place] = set()
        self.player: Place = (0, 0)
        self._steps = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """A level of this seed. Raises ValueError where the settings leave none."""
        rng, self._steps = random.Random(seed), 0
        for _ in range(_TRIES):
            if self._levels is not None:
                self._read(rng.choice(self._levels))
            elif not self._generate(rng):
                continue
            if belongs(self._picture(LOOKUP), self._holdout, split_of(options)):
                return self._picture(self._symbols), {}
        what = f"dim_room={self._shape}, num_boxes={self._num_boxes}, search_depth={self._depth}"
        raise ValueError(
            f"no level with {what}, holdout={self._holdout} in {_TRIES} tries; search deeper, or less boxes"
        )

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        number = move(action, self._pattern, ACTIONS)
        before = len(self.boxes & self.targets)
        self._steps += 1
        if number is not None:
            self._push(_STEPS[number])
        solved = self.boxes == self.targets
        reward = -0.1 + len(self.boxes & self.targets) - before + 10.0 * solved
        info = {"action_is_valid": number is not None, "success": solved}
        return self._picture(self._symbols), reward, solved, self._steps >= self._max_steps, info

    def get_state(self) -> str:
        return self._picture(LOOKUP)

    def cells(self) -> list[list[str]]:
        """Name the content of each tile, for drawing."""
        return [[NAMES[number] for number in row] for row in self._numbers()]

    def _push(self, step: Place) -> None:
        ahead, beyond = _plus(self.player, step), _plus(self.player, step, 2)
        if ahead in self.boxes and beyond not in self.boxes | self.walls:
            self.boxes = self.boxes - {ahead} | {beyond}
        if ahead not in self.boxes | self.walls:
            self.player = ahead

    def _read(self, level: str) -> None:
        self.walls, self.targets, self.boxes = set(), set(), set()
        rows = level.split("\n")
        self._shape = (len(rows), max(map(len, rows)))
        for place, number in (((r, c), _FILE[s]) for r, row in enumerate(rows) for c, s in enumerate(row)):
            self.walls |= {place} if number == 0 else set()
            self.targets |= {place} if number in (2, 3, 6) else set()
            self.boxes |= {place} if number in (3, 4) else set()
            self.player = place if number in (5, 6) else self.player

    def _generate(self, rng: random.Random) -> bool:
        """A room dug by a random walk, and a game played backwards from its end: so it can be won."""
        height, width = self._shape
        inside = [(r, c) for r in range(1, height - 1) for c in range(1, width - 1)]
        here, dug = rng.choice(inside), set[Place]()
        while len(dug) < 0.65 * len(inside):
            dug.add(here)
            ahead = _plus(here, rng.choice(_STEPS))
            here = ahead if ahead in inside else here
        self.walls = {(r, c) for r in range(height) for c in range(width)} - dug
        *targets, self.player = rng.sample(sorted(dug), self._num_boxes + 1)
        self.targets = self.boxes = set(targets)
        for _ in range(self._depth * 10):  # most of these only walk
            step = rng.choice(_STEPS)
            ahead, behind = _plus(self.player, step), _plus(self.player, step, -1)
            if ahead in self.walls | self.boxes:
                continue
            if behind in self.boxes and rng.random() < 0.7:
                self.boxes = self.boxes - {behind} | {self.player}
            self.player = ahead
        return not self.boxes & self.targets

    def _numbers(self) -> list[list[int]]:
        height, width = self._shape
        return [[self._number((row, column)) for column in range(width)] for row in range(height)]

    def _number(self, place: Place) -> int:
        if place in self.walls:
            return 0
        on_target = place in self.targets
        if place in self.boxes:
            return 3 if on_target else 4
        if place == self.player:
            return 6 if on_target else 5
        return 2 if on_target else 1

    def _picture(self, symbols: Mapping[int, str]) -> str:
        return "\n".join("".join(symbols[number] for number in row) for row in self._numbers())


def _plus(place: Place, step: Place, times: int = 1) -> Place:
    return place[0] + times * step[0], place[1] + times * step[1]


@functools.cache
def read_levels(path: str) -> tuple[str, ...]:
    """The levels of a file: rows of # space . $ * @ +, with a line `; number` before each. ValueError, OSError."""
    levels, rows = [], list[str]()
    for line in [*Path(path).expanduser().read_text(encoding="utf-8").splitlines(), ";"]:
        if line.startswith(";") or not line.strip():
            levels += ["\n".join(rows)] if rows else []
            rows = []
        elif set(line) <= set(_FILE):
            rows.append(line)
        else:
            raise ValueError(f"levels={path}: {line!r} is no row of a level: it may have {' '.join(_FILE)}")
    if bad := [level for level in levels if level.count("@") + level.count("+") != 1 or "$" not in level]:
        raise ValueError(f"levels={path}: this level has not one player and at least one box:\n{bad[0]}")
    return tuple(levels)
