"""What stands beside or inside a right answer and is not understood makes it another one; what is usual does not."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.rewards.math_wrappings import table
from verl_like.plugins.math_grading.latex import last_boxed
from verl_like.plugins.math_grading.math_equal import equal
from verl_like.rewards.graders import choose, compute_score

SHARED = Path(__file__).resolve().parents[4] / "shared" / "data"
SAMPLE = 300
_NUMBER = re.compile(r"-?[\d.,]+|-?\\[dt]?frac\{?\d+\}?\{?\d+\}?")
_NAMELESS = re.compile(r"=|\\text|\\mbox|,|\\le|\\cup|[<>]|^\s*[(\[]|\\begin|:|_|[A-Z]{2}")


def _is_number(answer: str) -> bool:
    return _NUMBER.fullmatch(answer) is not None


def _is_single(answer: str) -> bool:
    return not _NAMELESS.search(answer)


def _is_plain(answer: str) -> bool:
    return answer.count("$") == answer.count("\\$")


def _sized(answer: str) -> str:
    """With \\left and \\right, where it is one pair of brackets."""
    whole = re.fullmatch(r"([(\[])([^()\[\]]*)([)\]])", answer)
    return rf"\left{whole[1]}{whole[2]}\right{whole[3]}" if whole else answer


def _always(answer: str) -> bool:
    return True


# what people and models put around an answer: the frame, and for which answers it is meant
FRAMES: dict[str, tuple[str | Callable[[str], str], Callable[[str], bool]]] = {
    "as it is": ("@", _always),
    "a dollar on each side": ("$@$", _is_plain),
    "in \\( \\)": (r"\(@\)", _always),
    "in \\[ \\]": (r"\[ @ \]", _always),
    "a full stop": ("@.", _always),
    "spaces": ("  @ \n", _always),
    "a box in the box": (r"\boxed{@}", _always),
    "bold": ("**@**", _always),
    "displaystyle": (r"\displaystyle @", _always),
    "left and right": (_sized, _always),
    "left and right around it": (
        r"\left(@\right)",
        lambda answer: _is_single(answer) and answer[-1] != "." and "approx" not in answer,
    ),
    "braces": ("{@}", lambda answer: "," not in answer and "text" not in answer and _is_single(answer)),
    "The answer is": ("The answer is @", _always),
    "The answer is, in text": (r"\text{The answer is } @", _always),
    "x =": ("x = @", _is_single),
    "f(3) =": ("f(3) = @", _is_single),
    "an angle =": (r"\angle ABC = @", _is_single),
    "Area =": (r"\text{Area} = @", _is_single),
    "centimetres": (r"@ \text{ cm}", _is_number),
    "square units": (r"@\text{ square units}", _is_number),
    "kilometres": (r"@ \mathrm{~km}", _is_number),
    "degrees": (r"@^\circ", _is_number),
    "degrees in words": ("@ degrees", _is_number),
    "dollars": (r"@ \text{ dollars}", _is_number),
    "a dollar sign": (r"\$@", lambda answer: re.fullmatch(r"[\d.,]+", answer) is not None),
    "students": (r"@ \text{ students}", _is_number),
    "positive integers": ("@ positive integers", _is_number),
    "bold numbers": (r"\mathbf{@}", _is_number),
}


def test_the_table_of_what_may_stand_around_an_answer() -> None:
    entries = table()
    assert len(entries) >= 2000 and len({(entry.truth, entry.answer) for entry in entries}) == len(entries)
    assert Counter(entry.right for entry in entries)[True] >= 1000
    assert [entry for entry in entries if equal(entry.truth, entry.answer) != entry.right] == []


@pytest.mark.parametrize("count", [SAMPLE, pytest.param(None, marks=pytest.mark.slow)])
def test_references_in_usual_frames_are_themselves(count: int | None) -> None:
    file = SHARED / "math" / "math_train.json"
    if not file.exists():
        pytest.skip(f"{file} is not there")
    answers = sorted({str(row["answer"]) for row in json.loads(file.read_text()) if row["answer"]})
    if count is not None:
        answers = random.Random(0).sample(answers, count)
    missed = [
        (name, framed)
        for name, (frame, suits) in FRAMES.items()
        for answer in answers
        if suits(answer)
        and not equal(answer, framed := frame.replace("@", answer) if isinstance(frame, str) else frame(answer))
    ]
    assert missed == []


@pytest.mark.parametrize(
    ("data_source", "response", "truth", "right"),
    [
        ("lighteval/MATH", r"\boxed{\phantom{5}}", "5", False),
        ("lighteval/MATH", r"\boxed{5 \text{ (or 6)}}", "5", False),
        ("lighteval/MATH", r"\boxed{0 \text{ or maybe } 6}", "0", False),
        ("numina_olympiads", r"\boxed{5 \text{ tens}}", "5", False),
        ("numina_olympiads", r"\boxed{5 \text{ apples}}", "5", True),
        ("hiyouga/geometry3k", r"<think>a</think>\boxed{5 \text{ factorial}}", "5", False),
        ("hiyouga/geometry3k", r"<think>a</think>\boxed{x = 5}", "5", True),
        ("math_dapo", "Answer: 5 factorial", "5", False),
        ("math_dapo", "Answer: 5 (or 6)", "5", False),
        ("math_dapo", "Answer: not 5", "5", False),
        ("math_dapo", "Answer: 5 cm", "5", True),
        ("math_dapo", r"Answer: The answer is $5$.", "5", True),
        ("openai/gsm8k", "#### 5 or 6", "5", True),  # verl's: the number after the last ####
        ("lighteval/MATH", r"\boxed{6} or \boxed{5}", "5", True),  # verl's: the last box
    ],
)
def test_the_graders_of_data_sources(data_source: str, response: str, truth: str, right: bool) -> None:
    grader = choose().grader_of_row(data_source)
    graded = compute_score(data_source, response, truth, {}, grader=grader)
    assert (graded["score"] > 0.5) is right


@pytest.mark.parametrize(
    ("text", "box"),
    [
        (r"\boxed{5+\boxed{1}}", r"5+\boxed{1}"),
        (r"\boxed{\boxed{\boxed{4}}}", "4"),
        (r"\boxed{\fbox{4} - 1}", r"\fbox{4} - 1"),
        (r"\boxed{1+\boxed{2}} so \boxed{3}", "3"),
        (r"\\boxed{3}", "3"),
        (r"\boxed{ \boxed{2}", "2"),
        (r"\boxed{\{ \boxed{2} \}}", r"\{ \boxed{2} \}"),
    ],
)
def test_of_boxes_in_boxes_the_outermost_is_the_answer(text: str, box: str) -> None:
    assert last_boxed(text) == box


def test_many_boxes_in_boxes_take_linear_time() -> None:
    assert last_boxed(r"\boxed{" * 20_000 + "1" + "}" * 20_000) == "1"
