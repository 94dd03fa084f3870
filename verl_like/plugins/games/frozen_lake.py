"""FrozenLake with start and goal anywhere (RAGEN, ROLL): reach the goal, do not fall into a hole."""

from __future__ import annotations

import random
from typing import Any

from verl_like.plugins.games.actions import ANSWER, belongs, move, share, split_of

ACTIONS = ("Left", "Down", "Right", "Up")
_STEPS = ((0, -1), (1, 0), (0, 1), (-1, 0))
_NAMES = {"_": "ice", "O": "hole", "G": "goal", "P": "player on ice", "X": "player in hole", "√": "player on goal"}
_TASK = "You are solving the FrozenLake puzzle: go to the goal and avoid the holes."
_ANSWERS = "Your answer must be one of Left, Down, Right, Up, like <answer>Right</answer>."
VIEWS = {
    "picture": "Symbols: P you, _ frozen, O hole, G goal.",
    "places": "P you, G the goal, O a hole, each with its row from above and its column from the left.",
}
_TRIES = 10_000  # maps without a path, or of the other split


class FrozenLake:
    """Frozen lake: reward 1 at the goal, else 0. A move that cannot be read moves nothing and counts as a step.

    size: rows and columns of the square.
    p: share of frozen tiles.
    is_slippery: a move goes where it should one time in three, else to either side.
    max_steps: moves after which the episode is truncated.
    holdout: share of all maps that only validation plays.
    view: the map as a picture, or the places of what is on it.
    """

    def __init__(
        self,
        size: int = 4,
        p: float = 0.8,
        is_slippery: bool = False,
        max_steps: int = 100,
        action_pattern: str = ANSWER,
        holdout: float = 0.0,
        view: str = "picture",
    ) -> None:
        if size < 2 or max_steps < 1 or not 0 < p <= 1:
            raise ValueError(
                f"size={size}, p={p}, max_steps={max_steps}: at least 2, above 0 and at most 1, at least 1"
            )
        self._size, self._p, self._slippery, self._max_steps = size, p, is_slippery, max_steps
        self._pattern, self._holdout = action_pattern, share(holdout, "holdout")
        if view not in VIEWS:
            raise ValueError(f"view={view!r}: choose one of {', '.join(VIEWS)}")
        self._view, self.instruction = view, f"{_TASK} {VIEWS[view]} {_ANSWERS}"
        self._rng = random.Random(0)
        self.tiles: list[str] = []  # rows of _, O and G
        self.place = (0, 0)
        self._steps = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """A map of this seed. Raises ValueError where the settings leave no map."""
        self._rng, self._steps = random.Random(seed), 0
        for _ in range(_TRIES):
            self.tiles, self.place = self._level()
            if self._reachable() and belongs(self._picture(), self._holdout, split_of(options)):
                return self._seen(), {}
        raise ValueError(f"no map with size={self._size}, p={self._p}, holdout={self._holdout} in {_TRIES} tries")

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        number = move(action, self._pattern, ACTIONS)
        self._steps += 1
        if number is not None:
            if self._slippery:
                number = (number + self._rng.choice((-1, 0, 1))) % 4
            self.place = self._after(self.place, number)
        tile = self.tiles[self.place[0]][self.place[1]]
        info = {"action_is_valid": number is not None, "success": tile == "G"}
        return self._seen(), float(tile == "G"), tile in "GO", self._steps >= self._max_steps, info

    def get_state(self) -> str:
        return self._picture()

    def cells(self) -> list[list[str]]:
        """Name the content of each tile, for drawing."""
        return [[_NAMES[symbol] for symbol in row] for row in self._picture().split("\n")]

    def _level(self) -> tuple[list[str], tuple[int, int]]:
        places = [(row, column) for row in range(self._size) for column in range(self._size)]
        start, goal = self._rng.sample(places, 2)
        frozen = {place for place in places if self._rng.random() < self._p} | {start}
        rows = range(self._size)
        tiles = ["".join("G" if (r, c) == goal else "_" if (r, c) in frozen else "O" for c in rows) for r in rows]
        return tiles, start

    def _after(self, place: tuple[int, int], number: int) -> tuple[int, int]:
        row, column = (place[axis] + _STEPS[number][axis] for axis in (0, 1))
        return (row, column) if 0 <= row < self._size and 0 <= column < self._size else place

    def _reachable(self) -> bool:
        seen, left = {self.place}, [self.place]
        while left:
            place = left.pop()
            if self.tiles[place[0]][place[1]] == "G":
                return True
            near = {self._after(place, number) for number in range(4)} - seen
            near = {each for each in near if self.tiles[each[0]][each[1]] != "O"}
            seen |= near
            left += near
        return False

    def _seen(self) -> str:
        if self._view == "picture":
            return self._picture()
        numbered = [(f"{r}{c}", tile) for r, row in enumerate(self.tiles) for c, tile in enumerate(row)]
        things = [f"{tile}{place}" for tile in "GO" for place, found in numbered if found == tile]
        return " ".join([f"P{self.place[0]}{self.place[1]}", *things])

    def _picture(self) -> str:
        rows = [list(row) for row in self.tiles]
        row, column = self.place
        rows[row][column] = {"_": "P", "O": "X", "G": "√"}[rows[row][column]]
        return "\n".join(map("".join, rows))
