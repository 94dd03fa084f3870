"""Multiple choice: the letter of the right option."""

from __future__ import annotations

import re
from typing import Any

from verl_like.plugins.math_grading.latex import last_boxed, plain_text
from verl_like.plugins.math_grading.think_answer import extract_answer

TAIL_CHARS = 400
_LETTER_ALONE = r"\(?\[?\**\s*([A-Z])\s*\**\]?\)?(?![A-Za-z'])"
_SAYS = re.compile(
    r"(?i:answer|option|choice)\**\s*(?:(?i:is|:|would be|must be|should be)\s*)+\**:?\s*(?i:option|choice)?\s*"
    + _LETTER_ALONE
)
_BRACKETED = re.compile(r"\(([A-Z])\)")
_ONLY = re.compile(r"^\W*(?i:option|choice)?\W*([A-Z])(?:\W.*)?$", re.DOTALL)


def extract_letter(solution_str: str, *, choices: str = "ABCDEFGHIJ", strict: bool = False) -> str | None:
    """The chosen letter: in the last \\boxed{...}, in <answer> tags, after `answer is` or `Answer:`, or a last line
    that is nothing but a letter; then, unless `strict`, the last letter in round brackets."""
    for framed in (last_boxed(solution_str), extract_answer(solution_str)):
        if framed is not None:
            return _first(_ONLY.findall(plain_text(framed[:TAIL_CHARS]).strip()), choices)
    tail = solution_str[-TAIL_CHARS:].strip()
    said = _last(_SAYS.findall(tail), choices)
    if said is not None:
        return said
    line = tail.rpartition("\n")[2]
    if len(line.strip(" .*()[]")) == 1:
        return _first(_ONLY.findall(line), choices)
    return None if strict else _last(_BRACKETED.findall(tail), choices)


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    *,
    score: float = 1.0,
    choices: str = "ABCDEFGHIJ",
    strict: bool = False,
) -> dict[str, Any]:
    """Score `score` for the right letter, 0 otherwise.

    ground_truth: a letter, `(B)`, or the option's number from 0.
    """
    truth = _truth(ground_truth, choices)
    letter = extract_letter(solution_str, choices=choices, strict=strict)
    right = letter == truth
    return {"score": score * right, "acc": float(right), "format": float(letter is not None), "pred": letter or ""}


def _truth(ground_truth: Any, choices: str) -> str:
    if isinstance(ground_truth, int) and not isinstance(ground_truth, bool) and 0 <= ground_truth < len(choices):
        return choices[ground_truth]
    letter = re.sub(r"[\s().\[\]]|\\text\{|\}", "", str(ground_truth)).upper()
    if len(letter) != 1 or letter not in choices:
        raise ValueError(f"the ground truth of a multiple-choice row must be one of {choices}, not {ground_truth!r}")
    return letter


def _first(letters: list[str], choices: str) -> str | None:
    return next((letter for letter in letters if letter in choices), None)


def _last(letters: list[str], choices: str) -> str | None:
    return _first(letters[::-1], choices)
