"""Secrets stay out of what a run writes for people: values of keys that are named like one, and what looks like one."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

HIDDEN = "(hidden)"
_SECRET = re.compile(r"(?i)(^|[._-])(api[_-]?key|\w*token|\w*secret\w*|passw(or)?d|credentials?|access[_-]?key)$")
_IN_URL = re.compile(r"(?<=://)[^/\s:@]+:[^/\s@]+(?=@)")
_INSIDE = re.compile(r"([A-Za-z_][\w.-]*)(['\"]?\s*[:=]\s*['\"]?)([^\s,{}'\"]+)")  # of a mapping on a command line
_VALUE = re.compile(r"(?i)\b(sk|hf|ghp|glpat|xox[bp])[-_][A-Za-z0-9_-]{16,}")


def redacted(arguments: Sequence[str]) -> list[str]:
    """Command-line arguments with the values of secrets hidden: `key=value`, `--key value`, passwords in addresses."""
    found: list[str] = []
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        before = found[-1] if found else ""
        if equals and is_secret(name):
            argument = f"{name}={HIDDEN}"
        elif before.startswith("--") and "=" not in before and is_secret(before.removeprefix("--")):
            argument = HIDDEN
        found.append(redacted_text(argument))
    return found


def redacted_tree(value: Any, name: str = "") -> Any:
    """A copy of settings: texts below keys that are named like secrets are hidden, and what looks like one."""
    if isinstance(value, dict):
        return {key: redacted_tree(item, str(key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [redacted_tree(item, name) for item in value]
    if not isinstance(value, str):
        return value
    return HIDDEN if value and is_secret(name) else redacted_text(value)


def is_secret(name: str) -> bool:
    """Whether a key or a variable is named like one that holds a secret (max_token_len and the like are none)."""
    return _SECRET.search(name) is not None


def redacted_text(text: str) -> str:
    """A text without passwords in addresses, values behind names of secrets, and what looks like an access token."""
    named = _INSIDE.sub(lambda m: f"{m[1]}{m[2]}{HIDDEN if is_secret(m[1]) else m[3]}", text)
    return _VALUE.sub(HIDDEN, _IN_URL.sub(HIDDEN, named))
