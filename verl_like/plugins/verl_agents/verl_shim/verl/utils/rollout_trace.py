"""verl.utils.rollout_trace: tracing of tool calls, which is not done here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


def rollout_trace_op(func: Callable[..., Any]) -> Callable[..., Any]:
    """The function as it is."""
    return func


@contextmanager
def rollout_trace_attr(*args: Any, **kwargs: Any) -> Iterator[None]:
    """Accept the tracing attributes and ignore them."""
    yield
