"""A table of right answers with something around or inside them, each with the verdict that is due.

Made from the parts of data/wrappings.txt with a fixed seed: every part with every reference it is meant for.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from pathlib import Path

SEED = 20261125
PARTS = Path(__file__).resolve().parent / "data" / "wrappings.txt"
NUMBERS = ("5", "12", "36", "128", "4096", "3.5", "0.25", r"\frac{3}{4}", r"2\sqrt{3}", r"\frac{7\pi}{6}", "-17")
# references of a section, each with what stands for # (no part may turn it into the reference) and for ~v
GOLDS = {
    "any": (
        *NUMBERS,
        "0",
        "x+1",
        r"\begin{pmatrix} 1 & 0 \\ 2 & 3 \end{pmatrix}",
        "x>3",
        r"(1,2)",
        r"\{3,11\}",
        r"(-\infty,4]",
        r"3n^2-2n",
        "2, 7",
        "y=2x+1",
    ),
    "number": (*NUMBERS, "0"),
    "positive": (*(number for number in NUMBERS if re.fullmatch(r"[\d.]+", number)), "0"),
    "decimal": ("3.5", "0.25"),
    "scaled": tuple(n for n in NUMBERS if re.fullmatch(r"-?[\d.]+|\\frac\{3\}\{4\}", n)),
    "metres": (r"5\text{ m}", r"12 \text{ meters}", r"3.5\mathrm{\,m}"),
    "dollars": (r"\$5", r"12\text{ dollars}"),
    "words": ("even", "Sunday", "orange"),
}
OTHERS = ("6", "8", "19", "47")
WRAPPERS = ("{}", r"\text{{{}}}", r"\mathrm{{{}}}", r"\mbox{{{}}}", r"\textbf{{{}}}")


@dataclass(frozen=True, slots=True)
class Entry:
    """A reference, an answer, and whether they are the same; `part` is what the answer was made from."""

    truth: str
    answer: str
    right: bool
    part: str


def table() -> list[Entry]:
    """All entries, the same at every call, without repetitions."""
    draw, golds, found = random.Random(SEED), (), {}
    for line in PARTS.read_text(encoding="utf-8").splitlines():
        if heading := re.match(r"\[(\w+)\] (?:same|wrong)$", line):
            golds = GOLDS[heading[1]]
        elif line[:2] in ("= ", "! "):
            for truth in golds:
                answer = _filled(line[2:], truth, draw)
                found.setdefault((truth, answer), Entry(truth, answer, line[0] == "=", line))
    return list(found.values())


def _filled(part: str, truth: str, draw: random.Random) -> str:
    number = re.match(r"\\?\$?(-?[\d.]+)", truth)
    answer = re.sub(r"\\u([0-9a-f]{4})", lambda code: chr(int(code[1], 16)), part)
    answer = re.sub(r"<(?!/|!--|br>|del>|s>)([^<>]*[A-Za-z][^<>]*)>", lambda words: _worded(words[1], draw), answer)
    answer = answer.replace("~v", number[1] if number else truth)
    return answer.replace("@", truth).replace("#", draw.choice(OTHERS))


def _worded(words: str, draw: random.Random) -> str:
    """Words as they are or in a command, with a space on either side."""
    wrapper = draw.choice(WRAPPERS)
    return wrapper.format(words if wrapper == "{}" else f" {words} ")
