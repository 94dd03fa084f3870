"""Countdown: an equation of the given numbers, each used once, that reaches the target (RAGEN, TinyZero)."""

from __future__ import annotations

import random
from typing import Any

from verl_like.plugins.games.actions import ANSWER, said
from verl_like.plugins.math_grading.countdown import is_solution


class Countdown:
    """Countdown as a game of one move.

    num_numbers: count of the given numbers, which are 1 to max_number.
    format_score: reward of an answer that is wrong.
    """

    instruction = (
        "Use the numbers, each exactly once, with + - * / and parentheses, to reach the target. "
        "Answer with the expression alone, like <answer>(1 + 2) * 3</answer>."
    )

    def __init__(
        self, num_numbers: int = 3, max_number: int = 99, format_score: float = 0.1, action_pattern: str = ANSWER
    ) -> None:
        if not 2 <= num_numbers <= 8 or max_number < 2:
            raise ValueError(f"num_numbers={num_numbers}, max_number={max_number}: 2 to 8, at least 2")
        self._count, self._most = num_numbers, max_number
        self._format_score, self._pattern = format_score, action_pattern
        self.numbers: list[int] = []
        self.target = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Numbers, and a target that some expression of them reaches."""
        rng, self.target = random.Random(seed), 0
        while not 0 < self.target <= 10 * self._most:
            self.numbers = [rng.randint(1, self._most) for _ in range(self._count)]
            self.target = self.numbers[0]
            for number in self.numbers[1:]:
                self.target = rng.choice((self.target + number, self.target - number, self.target * number))
        return f"Numbers: {self.numbers}, target: {self.target}", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        answer = said(action, self._pattern)
        right = bool(answer) and is_solution(answer, self.numbers, self.target)
        reward = 1.0 if right else self._format_score if answer else 0.0
        return "", reward, True, False, {"action_is_valid": bool(answer), "success": right}
