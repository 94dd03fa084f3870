"""Responses whose right grade is known: reference answers of GSM8K and MATH, as they are, respelled, and made wrong."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from verl_like.kit.datasets.gsm8k import final_answer

FILLER = (
    "Let us work through this step by step. First we simplify $3x + 2 = 11$ to get \\boxed{x = 3}? No, not yet. " * 5
)
FORMS = ("reference", "respelled", "perturbed")


@dataclass(frozen=True, slots=True)
class GradedRow:
    """One response. `right`: what a grader should say."""

    data_source: str
    form: str
    truth: str
    response: str
    right: bool


def gsm8k_rows(folder: Path) -> list[GradedRow]:
    """All reference solutions of the train and test files. Rows whose form cannot be made are left out."""
    rows = []
    for split in ("train", "test"):
        for line in (folder / f"{split}.jsonl").read_text().splitlines():
            solution = json.loads(line)["answer"]
            truth = final_answer(solution)
            body = solution.rsplit("####", 1)[0]
            answers = zip(FORMS, (truth, _respell_number(truth), perturb(truth)), strict=True)
            rows += [
                GradedRow("openai/gsm8k", form, truth, f"{body}#### {answer}", form != "perturbed")
                for form, answer in answers
            ]
    return rows


def math_rows(file: Path) -> list[GradedRow]:
    """All problems of the MATH file that have an answer."""
    rows = []
    for problem in json.loads(file.read_text()):
        truth = str(problem["answer"] or "")
        if not truth:
            continue
        for form, answer in zip(FORMS, (truth, respell(truth), perturb(truth)), strict=True):
            response = f"{FILLER} Therefore the answer is $\\boxed{{{answer}}}$."
            rows.append(GradedRow("lighteval/MATH", form, truth, response, form != "perturbed"))
    return rows


def cases(file: Path) -> list[tuple[str, str]]:
    """(reference, answer) of a file of hand-written cases: lines `reference ~~ answer` or `reference !~ answer`."""
    lines = [line for line in file.read_text().splitlines() if line and not line.startswith("#")]
    return [(pair[0], pair[1]) for pair in (re.split(r" [~!]~ ", line) for line in lines)]


def respell(answer: str) -> str:
    """The same answer, written differently where that can be done without reading it."""
    changed = re.sub(r"(?<![\da-z}] )(?<![\da-z}])\\[dt]?frac\{(-?\d+)\}\{(\d+)\}(?! ?\\[a-z])", r"(\1)/(\2)", answer)
    changed = changed.replace("\\left", "").replace("\\right", "").replace("pmatrix", "bmatrix")
    changed = re.sub(r"(?<![\d.])(\d+) ?\\sqrt\{(\d+)\}", r"\\sqrt{\2}\\cdot \1", changed)
    return _respell_number(changed) if re.fullmatch(r"-?\d+", changed) else changed


def _respell_number(number: str) -> str:
    return f"{number}.0" if re.fullmatch(r"-?[\d,]+", number) else number


def perturb(answer: str) -> str:
    """A wrong answer close by: its last digit is one higher (9 becomes 0); without digits, something is added."""
    digits = list(re.finditer(r"\d", answer))
    if digits:
        at = digits[-1].start()
        return f"{answer[:at]}{(int(answer[at]) + 1) % 10}{answer[at + 1 :]}"
    return f"W{answer}" if "\\text" in answer or re.fullmatch(r"[A-Z]", answer) else f"{answer}+1"
