"""math-verify behind a guard: sympy decides what our own comparison does not understand.

github.com/huggingface/Math-Verify (latex2sympy2_extended parses, sympy compares). Its own time limits are signals,
which are switched off here: they work in main threads only, and sympy swallows their exceptions. Expressions that are
known to explode are refused before they are parsed; the others get a few seconds of processor time (not of the clock: a
verdict should not depend on how busy the machine is). Answers that need more are not equal.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import math
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from verl_like.plugins.math_grading.expression import understood

_MAX_CHARS = 200
_MAX_DEPTH = 8
_MAX_OPERATORS = 40
_MAX_SECONDS = 4.0  # of processor time for one comparison
_MAX_TERMS = 500  # of a power of a sum, multiplied out
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
_POWER_OF_BRACKET = re.compile(r"[)\]}](?:\\right)?\s*\^\s*\{?\s*(\d{1,4})")
_OPERATOR = re.compile(r"[-+*/^=<>]|\\[A-Za-z]+")


class _TookTooLong(BaseException):
    """Time-out. Not an Exception: sympy catches those."""


def equal(truth: str, answer: str) -> bool:
    """Compare two LaTeX answers with math-verify. False also for an answer that it cannot parse or that is too hard."""
    if _too_hard(truth) or _too_hard(answer) or ("\\infty" in truth) != ("\\infty" in answer):
        return False
    if not understood(truth, answer):  # math-verify leaves out what it does not know
        return False
    from math_verify import verify

    try:
        with _limited(_MAX_SECONDS):
            left, right = _parse(truth), _parse(answer)
            if left is None or right is None:
                return False
            return bool(verify(left, right, timeout_seconds=None, allow_set_relation_comp=True))
    except (RecursionError, _TookTooLong):
        return False


@contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """Raise _TookTooLong in the midst of the block when this thread has worked on it for `seconds`; in any thread."""
    ident, lock, over = threading.get_ident(), threading.Lock(), threading.Event()
    used = _processor_clock(ident)
    start = used()

    def watch() -> None:
        while not over.wait(seconds / 4):
            with lock:
                if used() - start > seconds and not over.is_set():  # again and again, for whoever catches it
                    _raise_in(ident, _TookTooLong)

    watcher = threading.Thread(target=watch, name="math-verify-limit", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        with lock:
            over.set()
            _raise_in(ident, None)  # forget one that was not delivered yet


def _processor_clock(ident: int) -> Callable[[], float]:
    """Processor seconds of a thread, readable from another one; seconds of the clock where a platform lacks it."""
    if not hasattr(time, "pthread_getcpuclockid"):
        return time.monotonic
    clock = time.pthread_getcpuclockid(ident)
    return lambda: time.clock_gettime(clock)


def _raise_in(ident: int, error: type[BaseException] | None) -> None:
    argument = None if error is None else ctypes.py_object(error)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), argument)


def _too_hard(text: str) -> bool:
    if len(text) > _MAX_CHARS or not text.isprintable() or _EXPLOSIVE.search(text):
        return True
    if _TRIGONOMETRIC.search(text) and _LARGE.search(text):
        return True
    if len(_OPERATOR.findall(text)) > _MAX_OPERATORS or any(terms > _MAX_TERMS for terms in _terms_of_powers(text)):
        return True
    depth = deepest = 0
    for char in text:
        depth += (char in "([{") - (char in ")]}")
        deepest = max(deepest, depth)
        if depth < 0:
            return True
    return depth != 0 or deepest > _MAX_DEPTH


def _terms_of_powers(text: str) -> Iterator[int]:
    """Count, for each power of a bracketed sum, the terms that it has when it is multiplied out."""
    for match in _POWER_OF_BRACKET.finditer(text):
        depth, start = 0, match.start()
        while start >= 0:
            depth += (text[start] in ")]}") - (text[start] in "([{")
            if depth == 0:
                break
            start -= 1
        inside, power = text[start + 1 : match.start()], int(match[1])
        terms = 1 + len(re.findall(r"[^(\[{\s^]\s*[-+]", inside))
        yield math.comb(power + terms - 1, terms - 1)


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
