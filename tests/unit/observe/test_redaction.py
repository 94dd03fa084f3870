"""What counts as a secret, and what does not."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest

from verl_like.config.schema import keys
from verl_like.observe.logs import DiscreetFormatter
from verl_like.observe.redaction import is_secret, redacted_text, redacted_tree, remember, secrets_of


@pytest.mark.parametrize(
    "name",
    ["HF_TOKEN", "OPENAI_KEY", "db_password", "AWS_SECRET_ACCESS_KEY", "headers.Authorization", "x.api-key", "DB_PASS"],
)
def test_names_of_secrets(name: str) -> None:
    assert is_secret(name)


@pytest.mark.parametrize("name", ["data.prompt_key", "max_token_len", "eos_token", "monkey", "PATH", "passes", "keys"])
def test_names_of_other_things(name: str) -> None:
    assert not is_secret(name)


def test_no_key_of_ours_is_taken_for_a_secret() -> None:
    assert [key for key in keys() if is_secret(key)] == []


@pytest.mark.parametrize(
    "text, left",
    [
        ("s3://me:pass@host/x", "s3://(hidden)@host/x"),
        ("https://abcdef0123456789abcd@github.com/x", "https://(hidden)@github.com/x"),
        ("ssh://git@host/x", "ssh://git@host/x"),
        ("http://h/?a=1&api_key=abc&b=2", "http://h/?a=1&api_key=(hidden)&b=2"),
        ("use sk-ant-0123456789abcdef01 now", "use (hidden) now"),
        ("AKIA0123456789ABCDEF", "(hidden)"),
        ("redis://:hunter2222@host/0", "redis://(hidden)@host/0"),
        (
            "https://x.blob.core.windows.net/c?sv=2024&sig=ab%2Bcd%3D",
            "https://x.blob.core.windows.net/c?sv=2024&sig=(hidden)",
        ),
    ],
)
def test_what_looks_like_a_secret(text: str, left: str) -> None:
    assert redacted_tree({"x": text}, exact=True) == {"x": left}
    assert redacted_text(text).startswith(left.partition("&b")[0])


@pytest.mark.parametrize(
    "text, left",
    [
        ("Authorization: Bearer abc.def-1 and more", "Authorization: (hidden) and more"),
        ("{'authorization': 'Basic dXNlcjpw'}", "{'authorization': '(hidden)'}"),
        ("AccountName=me;AccountKey=abcd==", "AccountName=me;AccountKey=(hidden)"),
        ("SharedAccessSignature=sv=1&sig=ab", "SharedAccessSignature=(hidden)"),
        ("method: basic training", "method: basic training"),
    ],
)
def test_values_behind_names_of_secrets(text: str, left: str) -> None:
    assert redacted_text(text) == left


def test_a_traceback_holds_no_known_secret(tmp_path: Path) -> None:
    """Of an error that nobody catches, in a program that has called `run`."""
    code = """if True:
        from verl_like.config import PPOConfig
        from verl_like.observe.redaction import remember
        from verl_like.trainer import run
        def fit(*args, **keys):
            remember({"hunter2222"})
            raise RuntimeError("rank 1: redis://:hunter2222@host: no answer")
        run._fit = fit
        run.run(PPOConfig())
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "RuntimeError: rank 1: redis://:(hidden)@host" in done.stderr
    assert "hunter2222@" not in done.stderr


def test_settings_that_are_read_again_keep_their_templates() -> None:
    template = "{% set bos_token = '<s>' %}{{ token: 1 }}"
    assert redacted_tree({"chat_template": template}, exact=True) == {"chat_template": template}


def test_log_lines_hold_no_known_secret() -> None:
    environment = {
        "HF_TOKEN": "aa-long-one",
        "ALL_PROXY": "http://me:proxy-pass@h",
        "PIN_KEY": "short",
        "HOME": "some-place",
    }
    secrets = secrets_of(environment, {"judge": {"api_key": "in-the-config"}, "n": 1})
    assert secrets == {"aa-long-one", "proxy-pass", "in-the-config"}
    remember(secrets)
    try:
        raise ValueError("aa-long-one was refused")
    except ValueError as error:
        trace = (type(error), error, error.__traceback__)
    record = logging.LogRecord("x", logging.ERROR, "f", 1, "in-the-config %s", ("proxy-pass",), trace)
    line = DiscreetFormatter("%(message)s", as_json=True, run_id="r1").format(record)
    assert "(hidden) (hidden)" in line and '"run_id": "r1"' in line and '"traceback": "' in line
    assert not any(secret in line for secret in secrets)
    remember(())
