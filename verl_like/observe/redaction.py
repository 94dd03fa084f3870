"""Secrets stay out of what a run writes for people: values of keys that are named like one, and what looks like one."""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Collection, Mapping, Sequence
from types import TracebackType
from typing import Any

HIDDEN = "(hidden)"
_SECRET = re.compile(
    r"(?i)(^|[._-])(api[_-]?key|\w*token|\w*secret\w*|\w*passw(or)?d|\w*passphrase|credentials?|(access|private|auth)[_-]?key"
    r"|authorization|cookie|(shared)?account[_-]?key|sharedaccess(signature|key))$"
)
_TOKEN_OF_TEXT = re.compile(r"(.*\.)?(eos|bos|pad|unk|sep|cls|mask|image|video|audio)_token")
_SECRET_VARIABLE = re.compile(r".+_(KEY|PASS|PWD|AUTH|PAT)")  # in capitals: keys of ours are called prompt_key
_IN_URL = re.compile(r"(?<=://)([^/\s:@]*:[^/\s@]+|[^/\s:@]{16,})(?=@)")
_IN_QUERY = re.compile(r"(?i)(?<=[?&])([\w-]*(?:token|key|secret|password|signature)=|sig=)[^&\s]+")
_INSIDE = re.compile(  # of a mapping on a command line, a header, a connection string (a=b;c=d)
    r"([A-Za-z_][\w.-]*)(['\"]?\s*[:=]\s*['\"]?)((?:(?i:bearer|basic)\s+)?(?:(?!;[A-Za-z_][\w.-]*=)[^\s,{}'\"])+)"
)
_VALUE = re.compile(r"(?i)\b(sk|hf|gh[pousr]|github_pat|glpat|xox[abprs])[-_][a-z0-9_-]{16,}|\bAKIA[0-9A-Z]{16}")


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


def redacted_tree(value: Any, name: str = "", *, exact: bool = False) -> Any:
    """A copy of settings: texts below keys that are named like secrets are hidden, and what looks like one.

    exact: other texts stay as they are but for passwords in addresses and access tokens, so that the settings can be
    read again (a template may well say bos_token = ...).
    """
    if isinstance(value, dict):
        return {key: redacted_tree(item, str(key), exact=exact) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [redacted_tree(item, name, exact=exact) for item in value]
    if not isinstance(value, str):
        return value
    return HIDDEN if value and is_secret(name) else _without_values(value) if exact else redacted_text(value)


def secrets_of(environment: Mapping[str, str], settings: Mapping[str, Any]) -> set[str]:
    """The values that `redacted_tree` hides in settings, and those of variables that are named like secrets: what must
    be in no log. Short ones (under 8 characters) are left out, as they stand in other words."""
    found: set[str] = set()

    def look(value: Any, name: str) -> None:
        if isinstance(value, Mapping):
            for key, item in value.items():
                look(item, str(key))
        elif isinstance(value, list | tuple):
            for item in value:
                look(item, name)
        elif isinstance(value, str):
            found.update([value] if is_secret(name) else [])
            found.update(address[0].partition(":")[2] or address[0] for address in _IN_URL.finditer(value))
            found.update(query[0].partition("=")[2] for query in _IN_QUERY.finditer(value))

    look([settings, environment], "")
    return {value for value in found if len(value) >= 8}


_known: list[str] = []


def remember(secrets: Collection[str]) -> None:
    """Set the secrets of a run, which `hidden` looks for in this process from now on."""
    _known[:] = sorted(secrets, key=len, reverse=True)


def hidden(text: str) -> str:
    """The text without the secrets that were remembered, whoever wrote it: an error of a library, for instance."""
    for secret in _known:
        text = text.replace(secret, HIDDEN)
    return text


def print_hidden(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print a traceback without the secrets that were remembered, as `sys.excepthook`."""
    sys.stderr.write(hidden("".join(traceback.format_exception(kind, error, trace))))


def is_secret(name: str) -> bool:
    """True where a key or a variable is named like one that holds a secret (max_token_len and the like are none)."""
    if _TOKEN_OF_TEXT.fullmatch(name):
        return False
    return _SECRET.search(name) is not None or _SECRET_VARIABLE.fullmatch(name) is not None


def redacted_text(text: str) -> str:
    """A text without passwords in addresses, values behind names of secrets, and what looks like an access token."""
    named = _INSIDE.sub(lambda m: f"{m[1]}{m[2]}{HIDDEN if is_secret(m[1]) else m[3]}", text)
    return _without_values(named)


def _without_values(text: str) -> str:
    return _VALUE.sub(HIDDEN, _IN_QUERY.sub(rf"\g<1>{HIDDEN}", _IN_URL.sub(HIDDEN, text)))
