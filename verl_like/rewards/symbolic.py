"""math-verify behind a guard: sympy decides what our own comparison does not understand.

github.com/huggingface/Math-Verify (latex2sympy2_extended parses, sympy compares). Its own time limits are signals,
which are switched off here: sympy swallows exceptions, and the reward pool kills a process that takes too long. So that
it rarely has to, expressions that are known to explode are refused before they are parsed.
"""

from __future__ import annotations

import functools
import logging
import re
from typing import Any

_MAX_CHARS = 200
_MAX_DEPTH = 8
_MAX_OPERATORS = 40
# what makes a computer algebra system work for long: unevaluated calculus, long numbers, towers, large factorials
_EXPLOSIVE = re.compile(
    r"\\(?:int|iint|oint|sum|prod|lim|limsup|liminf|det|sup|inf|max|min|gcd|lcm|bigcup|bigcap)(?![A-Za-z])"
    r"|\d{25}"
    r"|\^\s*\{?\s*-?\s*\d{4}"
    r"|\^[^{}\s]*\^|\^\s*\{[^}]*[\^!]"
    r"|\d{3,}\s*!|!\s*[!^]|\)\s*!"
    r"|\d{4,}\s*\}?\s*(?:\\choose|\{)"
)
_TRIGONOMETRIC = re.compile(r"\\(?:arc)?(?:sin|cos|tan|cot|sec|csc)")
_LARGE = re.compile(r"\d{3}|[5-9]\d|!")  # sin(720 x) is expanded into powers
_OPERATOR = re.compile(r"[-+*/^=<>]|\\[A-Za-z]+")


def equal(truth: str, answer: str) -> bool:
    """Whether math-verify holds two LaTeX answers for the same; False also for what it cannot parse or is too hard."""
    if _too_hard(truth) or _too_hard(answer) or ("\\infty" in truth) != ("\\infty" in answer):
        return False
    left, right = _parse(truth), _parse(answer)
    if left is None or right is None:
        return False
    from math_verify import verify

    try:
        return bool(verify(left, right, timeout_seconds=None, allow_set_relation_comp=True))
    except RecursionError:
        return False


def _too_hard(text: str) -> bool:
    if len(text) > _MAX_CHARS or not text.isprintable() or _EXPLOSIVE.search(text):
        return True
    if _TRIGONOMETRIC.search(text) and _LARGE.search(text):
        return True
    if len(_OPERATOR.findall(text)) > _MAX_OPERATORS:
        return True
    depth = deepest = 0
    for char in text:
        depth += (char in "([{") - (char in ")]}")
        deepest = max(deepest, depth)
        if depth < 0:
            return True
    return depth != 0 or deepest > _MAX_DEPTH


@functools.lru_cache(maxsize=4096)
def _parse(text: str) -> Any:
    """The sympy expression, or None if it cannot be parsed."""
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its time limits are off, at each start
    from latex2sympy2_extended.latex2sympy2 import latex2sympy
    from math_verify.grader import should_treat_as_complex

    try:
        return latex2sympy(
            text, is_real=not should_treat_as_complex(text), convert_degrees=False, normalization_config=None
        )
    except Exception:  # a parser of free text raises many things, none of which means more than "not parsable"
        return None
