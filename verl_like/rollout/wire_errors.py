"""Errors between processes, as names and texts: an exception's own class may not be importable where it is told."""

from __future__ import annotations

from verl_like.models.images import MediaError
from verl_like.rollout.rollout_engine import ResumeError, RolloutError, UnloadedError, WeightLoadError

# Errors that arrive as what they were; others as RolloutError.
_KNOWN: dict[str, type[Exception]] = {
    error.__name__: error
    for error in (ValueError, MediaError, RuntimeError, RolloutError, UnloadedError, ResumeError, WeightLoadError)
}

Told = tuple[str, str]  # class name, message


def told(error: BaseException) -> Told:
    """Encode an error as name and text.

    A ValueError of a library's own kind is a ValueError: it refuses one request.
    """
    name = type(error).__name__
    return "ValueError" if name not in _KNOWN and isinstance(error, ValueError) else name, str(error)


def heard(what: Told) -> Exception:
    """Decode the error of the other end."""
    name, text = what
    return _KNOWN[name](text) if name in _KNOWN else RolloutError(f"{name}: {text}")
