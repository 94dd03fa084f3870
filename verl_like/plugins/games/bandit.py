"""Two arms, one choice (RAGEN): the one pays little for certain, the other much now and then."""

from __future__ import annotations

import random
from typing import Any

from verl_like.plugins.games.actions import ANSWER, move


class Bandit:
    """Game of two arms, a safe and a risky one.

    lo_arm_score: pay of the safe arm.
    hi_arm_hiscore: pay of the risky arm, with probability hi_arm_hiscore_prob.
    hi_arm_loscore: its pay otherwise.
    """

    def __init__(
        self,
        lo_arm_name: str = "Phoenix",
        hi_arm_name: str = "Dragon",
        lo_arm_score: float = 0.1,
        hi_arm_loscore: float = 0.0,
        hi_arm_hiscore: float = 1.0,
        hi_arm_hiscore_prob: float = 0.25,
        action_pattern: str = ANSWER,
    ) -> None:
        self._names, self._pattern = (lo_arm_name, hi_arm_name), action_pattern
        self._low, self._high = lo_arm_score, (hi_arm_loscore, hi_arm_hiscore)
        self._chance = hi_arm_hiscore_prob
        self._rng = random.Random(0)
        self.instruction = f"You are at a machine with two arms. Pull one, like <answer>{lo_arm_name}</answer>."

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        self._rng = random.Random(seed)
        return f"Arms: {' and '.join(self._rng.sample(self._names, 2))}", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        number = move(action, self._pattern, self._names)
        if number is None:
            return "That is none of the arms.", 0.0, True, False, {"action_is_valid": False, "success": False}
        reward = self._high[self._rng.random() < self._chance] if number else self._low
        return f"It pays {reward:g}.", reward, True, False, {"action_is_valid": True, "success": number == 1}

    def get_state(self) -> str:
        return "before the choice"
