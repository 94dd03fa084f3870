"""`verl-like check-template` from the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.data.factory import SHARED_DATA
from verl_like.cli.main import main
from verl_like.kit.verbs.template_cases import cases

NUM_CASES, NUM_WITH_TOOLS = len(cases()), sum(case.tools for case in cases())


@pytest.fixture(scope="module")
def qwen() -> str:
    if not (SHARED_DATA / "tok_qwen25").is_dir():
        pytest.skip(f"needs the tokenizer of {SHARED_DATA / 'tok_qwen25'}")
    return str(SHARED_DATA / "tok_qwen25")


def check(capsys: pytest.CaptureFixture[str], *argv: str, status: int = 0) -> list[str]:
    """The lines printed. Fails on another exit status."""
    if status:
        with pytest.raises(SystemExit) as ended:
            main(["check-template", *argv])
        assert ended.value.code == status
    else:
        main(["check-template", *argv])
    printed = capsys.readouterr()
    return (printed.err if status == 2 else printed.out).splitlines()


def test_a_template_that_renders_what_was_written(qwen: str, capsys: pytest.CaptureFixture[str]) -> None:
    lines = check(capsys, qwen)
    assert lines[0] == f"model: {qwen}, template: native"
    assert lines[1].split() == ["case", "history", "ids", "drift"]
    assert all(line.split()[-3:] == ["exact", "equal", "0"] for line in lines[2:-1])
    assert lines[-1] == f"{NUM_CASES} cases: {NUM_CASES} exact, 0 cut, 0 refused"


def test_a_cut_is_shown_and_is_no_failure(qwen: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The template trims answers."""
    template = tmp_path / "trims.jinja"
    template.write_text(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    lines = check(capsys, qwen, "--chat-template", str(template), "--no-tools")
    (cut,) = [line for line in lines if " CUT " in line]
    assert cut.startswith("white space around the answer  CUT") and "'  It is sunny." in cut and "became 'It is" in cut
    num = NUM_CASES - NUM_WITH_TOOLS
    assert lines[-1] == f"{num} cases: {num - 1} exact, 1 cut, 0 refused"


def test_what_a_template_refuses_ends_with_status_1(
    qwen: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Tool messages are left out without a word."""
    template = tmp_path / "no_tools.jinja"
    template.write_text(
        "{% for m in messages if m.role != 'tool' %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>{% endif %}"
    )
    lines = check(capsys, qwen, "--chat-template", str(template), status=1)
    (refused,) = [line for line in lines if line.startswith("one tool call")]
    assert "REFUSED" in refused and "no message of the role tool after this answer: it leaves out" in refused
    num = NUM_CASES - NUM_WITH_TOOLS
    assert lines[-1] == f"{NUM_CASES} cases: {num} exact, 0 cut, {NUM_WITH_TOOLS} refused"


def test_a_template_that_is_not_there_ends_with_status_2(qwen: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "there is no file" in check(capsys, qwen, "--chat-template", "./none.jinja", status=2)[0]


def test_template_variables_are_given(qwen: str, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(SHARED_DATA / "tok_minimind")
    lines = check(capsys, folder, "--template-kwargs", '{"open_thinking": true}')
    assert lines[-1] == f"{NUM_CASES} cases: {NUM_CASES} exact, 0 cut, 0 refused"


def test_a_folder_without_a_tokenizer_ends_with_status_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(capsys, str(tmp_path), status=2)[0].startswith(f"error: MODEL={tmp_path}")


def test_what_prompts_do_not_hold_and_what_the_template_adds(
    qwen: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["check-template", qwen])
    assert "note: the chat template adds where there is no system message: 'You are Qwen, " in capsys.readouterr().err
    template = tmp_path / "no_system.jinja"
    template.write_text(
        "{% for m in messages if m.role != 'system' %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    with pytest.raises(SystemExit, match="1"):
        main(["check-template", qwen, "--chat-template", str(template), "--no-tools"])
    assert "error: the chat template leaves out message 0 (system), 'Answer briefly.'" in capsys.readouterr().err
