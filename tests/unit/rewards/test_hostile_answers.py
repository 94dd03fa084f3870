"""No input crashes or hangs a grader: made-up garbage in this process, known horrors through the real pool."""

from __future__ import annotations

import math
import re
import time
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from verl_like.plugins.math_grading.math_equal import compare
from verl_like.rewards.graders import GRADERS, compute_score
from verl_like.rewards.reward_call import RewardCall, ScorerSpec
from verl_like.services.pool import WorkerPool

INSTRUCTIONS = {
    "instruction_id_list": [
        "keywords:existence",
        "length_constraints:number_words",
        "length_constraints:number_sentences",
        "length_constraints:number_paragraphs",
        "detectable_format:number_bullet_lists",
        "detectable_format:number_highlighted_sections",
        "detectable_format:json_format",
        "detectable_format:title",
        "combination:two_responses",
        "detectable_content:postscript",
    ],
    "kwargs": [
        {"keywords": ["x"]},
        {"num_words": 3},
        {"num_sentences": 3},
        {"num_paragraphs": 2},
        {"num_bullets": 2},
        {"num_highlights": 2},
        {},
        {},
        {},
        {"postscript_marker": "P.S."},
    ],
}
TRUTHS: dict[str, Any] = {
    "gsm8k": "72",
    "gsm8k_flexible": "1,000",
    "countdown": {"target": 24, "numbers": [1, 2, 3]},
    "multiple_choice": "B",
    "instruction": INSTRUCTIONS,
    "tool_call": {"name": "look_up", "arguments": {"city": "Paris", "days": 3}},
    "knights_and_knaves": "Zoey is a knave, Noah is a knight",
}
MATHS = [r"\frac{1}{2}", "x^2+1", r"(1,2]\cup(3,4)", r"\{1,2\}", "x=5", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}"]
# graders that run other programs have their own tests of hostile input
NAMES = [name for name, entry in GRADERS.items() if not entry.runs_programs]
LONG = [
    '"',
    "'",
    "x=",
    "1 or ",
    "\\\\",
    r"1\over ",
    "{1",
    r"\{x|x>",
    "x>1,",
    r"\approx 1",
    ". ",
    r"\text{ m",
    "a long ",
]
FRAGMENTS = re.split(
    " ",
    r"\frac \sqrt \sin \cos \log_ \ln \pi \infty \cup \cap \pm \{ \} \\ \le \text{ \boxed{ \left( \right) \binom{9}{3} "
    r"\begin{pmatrix} \end{pmatrix} \int \sum_{k=1}^{n} \lfloor \rfloor ^\circ \% {} { } ( ) [ ] ^ _ ! & , ; : = < > "
    "| / * - + 1 2 10 999 0.5 x y i e a B 10^{10^{10}} 9!! <answer> </answer> <think> </think> Answer: #### (B) \n "
    "√ ½ ² cm $ **",
)
FRAMES = [r"\boxed{%s}", "<think></think><answer>%s</answer>", "Answer: %s", "#### %s", "%s"]

MANY = 50_000
HORRORS = {
    "nothing": "",
    "open braces": r"\boxed" + "{" * MANY,
    "balanced braces": r"\boxed{" + "{" * 490 + "1" + "}" * 490 + "}",
    "boxes": r"\boxed{" * MANY,
    "nested fractions": r"\boxed{" + r"\frac{1}{1+" * 60 + "x" + "}" * 60 + "}",
    "nested roots": r"\boxed{" + r"\sqrt{" * 30 + "2" + "}" * 30 + "}",
    "tower": r"\boxed{10^{10^{10}}}",
    "high tower": r"\boxed{9^{9^{9^{9^{9}}}}}",
    "plain tower": r"\boxed{9**9**9**9}",
    "long exponent": r"\boxed{2^{99999999999}}",
    "factorials": r"\boxed{((9!)!)!}",
    "large factorial": r"\boxed{100000!}",
    "many digits": r"\boxed{" + "9" * MANY + "}",
    "few hundred digits": r"\boxed{" + "9" * 900 + "}",
    "exponent float": r"\boxed{1e999999999}",
    "binomial": r"\boxed{\binom{99999999}{4999999}}",
    "sum": r"\boxed{\sum_{k=1}^{10^{9}} \sin k}",
    "product": r"\boxed{\prod_{k=1}^{99999} k}",
    "integral": r"\boxed{\int_0^1 e^{-x^2} \sin(x^x) dx}",
    "trigonometric": r"\boxed{\sin(720x)\cos(840x)\tan(360x)}",
    "polynomial": r"\boxed{(x+y+z)^{1999}}",
    "determinant": r"\boxed{\det\begin{pmatrix}" + r"x & y \\ " * 40 + r"\end{pmatrix}}",
    "large matrix": r"\boxed{\begin{pmatrix}" + r" & ".join(["1"] * 200) + r"\end{pmatrix}}",
    "huge list": r"\boxed{" + ",".join(["1"] * 450) + "}",
    "logarithm": r"\boxed{\log_{0} 0 / 0}",
    "division by zero": r"\boxed{\frac{1}{0}}",
    "spaces": "answer" + " " * MANY + "x",
    "stars": "**" + "a" * MANY,
    "stars alone": "*" * MANY,
    "full stops": "." * MANY + "x",
    "new lines": "\n" * MANY + "x",
    "answer tags": "<answer>" * (MANY // 8),
    "closing tags": "<think>" + "</think>" * (MANY // 8) + r"\boxed{1",
    "tool calls": "<tool_call>" * (MANY // 8),
    "deep tool call": "<tool_call>" + "[" * MANY + "</tool_call>",
    "brackets": "[" * MANY,
    "deep json": "[" * MANY + "]" * MANY,
    "punctuation in a box": r"\boxed{" + "." * MANY + "}",
    "parentheses": "<answer>" + "(" * 150 + ")" * 150 + "</answer>",
    "surrogate": "\\boxed{\ud800}",
    "controls": "\\boxed{\x00\x01\x1b}",
    "bidi": "\\boxed{\u202e12\u202c}",
    "digits of other scripts": "\\boxed{٣٤} #### ٣٤ Answer: ٣٤ <answer>²³</answer>",
    "code": r"\boxed{__import__('os').system('true')}",
}


def truth_for(name: str, number: int = 0) -> Any:
    return TRUTHS.get(name, MATHS[number % len(MATHS)])


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    frame=st.sampled_from(FRAMES),
    body=st.one_of(st.text(max_size=60), st.lists(st.sampled_from(FRAGMENTS), max_size=30).map("".join)),
    number=st.integers(0, 5),
)
def test_garbage_gets_a_finite_score(name: str, frame: str, body: str, number: int) -> None:
    graded = compute_score("any", frame % body, truth_for(name, number), {}, grader=name)
    assert math.isfinite(graded["score"])
    assert isinstance(graded["pred"], str) and len(graded["pred"]) <= 1000


EXPRESSIONS = st.recursive(
    st.sampled_from(["1", "2", "0", "0.5", "-3", "10", "x", "y", "n", "i", "e", r"\pi ", r"\infty ", "x_1", "50\\%"]),
    lambda inner: st.builds(
        lambda form, left, right: form.replace("A", left).replace("B", right),
        st.sampled_from(
            [
                r"\frac{A}{B}",
                r"\sqrt{A}",
                r"\sqrt[3]{A}",
                "A+B",
                "A-B",
                r"A\cdot B",
                "(A)(B)",
                "(A)^{B}",
                "A!",
                "|A|",
                r"\sin(A)",
                r"\tan A",
                r"\ln(A)",
                r"\log_{A} B",
                r"\binom{A}{B}",
                "-A",
                "A/B",
                r"\lfloor A \rfloor",
            ]
        ),
        inner,
        inner,
    ),
    max_leaves=8,
)
ANSWERS = st.builds(
    lambda form, left, right: form.replace("A", left).replace("B", right),
    st.sampled_from(
        [
            "A",
            "A",
            "A=B",
            "x=A",
            "y=A+B",
            "(A,B)",
            "[A,B)",
            r"(A,B]\cup(B,\infty)",
            r"\{A,B\}",
            "A, B",
            r"A \pm B",
            r"A < x \le B",
            "x > A",
            r"\begin{pmatrix}A&B\\B&A\end{pmatrix}",
            r"A \text{ cm}",
            r"A^\circ",
            r"A \approx B",
        ]
    ),
    EXPRESSIONS,
    EXPRESSIONS,
)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(truth=ANSWERS, answer=ANSWERS)
def test_well_formed_answers_compare(truth: str, answer: str) -> None:
    """Every pair has a verdict, and every answer is the same as itself, also with other spaces."""
    assert compare(truth, answer).same in (True, False)
    assert compare(truth, f" ${truth}$. ").same
    assert compare(f"({truth})", f"({truth})").same


def test_horrors_through_the_pool_cost_no_worker() -> None:
    """All of them, by every grader: each is graded, none needs the pool's kill."""
    calls = [
        RewardCall(data_source="any", solution_str=text, ground_truth=truth_for(name, number), grader=name)
        for number, text in enumerate(HORRORS.values())
        for name in NAMES
    ]
    pool = WorkerPool(ScorerSpec(timeout=30.0), num_workers=1)
    try:
        pool.start()
        (worker,) = pool.worker_pids()
        outcomes = [future.result() for future in pool.submit(calls)]
        assert pool.worker_pids() == [worker]
    finally:
        pool.close()
    failed = [
        (call.grader, call.solution_str[:40], o.message) for call, o in zip(calls, outcomes, strict=True) if o.kind
    ]
    assert failed == []
    right = [
        (call.grader, call.solution_str[:40]) for call, o in zip(calls, outcomes, strict=True) if o.extras.get("acc")
    ]
    assert {grader for grader, _ in right} <= {"contains", "instruction"}


def test_the_pool_kills_a_grader_that_takes_too_long_and_grades_the_next_row() -> None:
    """The last resort, on a built-in grader: importing sympy alone takes longer than this limit."""
    slow = RewardCall(data_source="any", solution_str=r"\boxed{\lfloor 3.5 \rfloor}", ground_truth="3", grader="math")
    quick = RewardCall(data_source="any", solution_str="5", ground_truth="5", grader="arithmetic")
    pool = WorkerPool(ScorerSpec(timeout=0.1), num_workers=1)
    try:
        pool.start()
        kinds = [future.result().kind for future in pool.submit([slow, quick])]
    finally:
        pool.close()
    assert kinds == ["timeout", None]


@pytest.mark.parametrize("unit", LONG)
@pytest.mark.parametrize("frame", ["@", "x=@5", r"\{x|@\}"])
def test_an_answer_of_one_thing_again_and_again_takes_no_time(frame: str, unit: str) -> None:
    compare("5", "5!")  # what is loaded at the first use is loaded
    for length in (960, 20_000):
        before = time.process_time()
        compare("5", frame.replace("@", unit * (length // len(unit))))
        assert time.process_time() - before < 1
