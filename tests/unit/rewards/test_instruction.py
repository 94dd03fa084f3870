"""IFEval's instructions: each is seen obeyed and disobeyed."""

from __future__ import annotations

import json
from typing import Any

import pytest

from verl_like.plugins.text_grading.instruction import CHECKS, obeys
from verl_like.rewards.graders import compute_score

CASES: list[tuple[str, dict[str, Any], str, str]] = [  # name, arguments, obeying, disobeying
    ("keywords:existence", {"keywords": ["red", "C++"]}, "Red and c++", "red and C"),
    ("keywords:frequency", {"keyword": "ha", "frequency": 2, "relation": "at least"}, "haha", "ha"),
    ("keywords:frequency", {"keyword": "ha", "frequency": 2, "relation": "less than"}, "ha", "haha"),
    ("keywords:forbidden_words", {"forbidden_words": ["art"]}, "party", "modern Art."),
    ("keywords:letter_frequency", {"letter": "E", "let_frequency": 3, "let_relation": "at least"}, "eEe", "ee"),
    ("length_constraints:number_words", {"num_words": 3, "relation": "at least"}, "one two three", "one two"),
    ("length_constraints:number_words", {"num_words": 3, "relation": "less than"}, "one two", "one two three"),
    ("length_constraints:number_sentences", {"num_sentences": 2}, "One. Two?", "One, 2.5 two!"),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "a\n***\nb", "a\n***\nb\n***\nc"),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "***\na\n***\nb\n***", "a\n***\n***\nb"),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "then"},
        'First.\n\n"Then" it ended.',
        "Then.\n\nLast it ended.",
    ),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, "[name] at [place]", "[name]"),
    ("detectable_content:postscript", {"postscript_marker": "P.P.S"}, "text\nP. P. S more", "text\nP.S. more"),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "* a\n- b", "* a\n- b\n- c"),
    ("detectable_format:number_bullet_lists", {"num_bullets": 1}, "* a", "**a**"),
    ("detectable_format:constrained_response", {}, "My answer is no.", "No."),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 2}, "*a* and **b**", "*a* and * *"),
    (
        "detectable_format:multiple_sections",
        {"section_spliter": "SECTION", "num_sections": 2},
        "SECTION 1 a SECTION 2 b",
        "SECTION 1 a SECTION b",
    ),
    ("detectable_format:json_format", {}, '```json\n{"a": 1}\n```', '{"a": 1'),
    ("detectable_format:json_format", {}, "[1, 2]", "a: 1"),
    ("detectable_format:title", {}, "<<poem of joy>>\ntext", "<< >>\ntext"),
    ("combination:two_responses", {}, "a******b", "a******a"),
    ("combination:two_responses", {}, "a\n******\nb", "a\n******\nb\n******\nc"),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Say it. "}, "say it. Yes", "Yes. Say it."),
    ("startend:end_checker", {"end_phrase": "The end."}, 'It is. "the end."', "The end. Or not"),
    ("startend:quotation", {}, '"quoted"', '"quoted" not'),
    ("change_case:capital_word_frequency", {"capital_frequency": 2, "capital_relation": "at least"}, "A BC d", "Ab BC"),
    ("change_case:english_capital", {}, "ALL 3 OF IT", "All"),
    ("change_case:english_lowercase", {}, "all 3 of it", "All"),
    ("punctuation:no_comma", {}, "no such thing", "no, such"),
]


@pytest.mark.parametrize(("name", "arguments", "good", "bad"), CASES)
def test_instructions(name: str, arguments: dict[str, Any], good: str, bad: str) -> None:
    assert obeys(name, arguments, good)
    assert not obeys(name, arguments, bad)
    assert not obeys(name, arguments, "")  # saying nothing obeys nothing


def test_every_instruction_has_a_case() -> None:
    assert {case[0] for case in CASES} == set(CHECKS)


def grade(text: str, truth: Any, **options: Any) -> dict[str, Any]:
    return compute_score("ifeval", text, truth, {}, grader="instruction", options={"instruction": options})


TRUTH = {
    "instruction_id_list": ["punctuation:no_comma", "length_constraints:number_words"],
    "kwargs": [{"num_words": None}, {"num_words": 2, "relation": "at least", "keyword": None}],  # as parquet fills it
}


def test_all_or_a_share() -> None:
    assert grade("two words", TRUTH) == {"score": 1.0, "acc": 1.0, "share": 1.0, "pred": "all obeyed"}
    half = grade("one", TRUTH)
    assert (half["score"], half["acc"], half["share"]) == (0.0, 0.0, 0.5)
    assert half["pred"] == "broken: length_constraints:number_words"
    assert grade("one", TRUTH, partial_credit=True, score=2.0)["score"] == 1.0


def test_other_spellings_of_the_ground_truth_and_thoughts_do_not_count() -> None:
    assert grade("a, b </think> two words", json.dumps(TRUTH))["score"] == 1.0
    listed = [{"instruction_id": "punctuation:no_comma"}]
    assert grade("a, b", listed)["score"] == 0.0


@pytest.mark.parametrize(
    ("truth", "message"),
    [
        ({"instruction_id_list": ["no:such"]}, "unknown instruction 'no:such'"),
        ({"instruction_id_list": ["length_constraints:number_words"]}, "does not fit its arguments"),
        ({"instruction_id_list": []}, "no instructions"),
        (
            {"instruction_id_list": ["length_constraints:number_words"], "kwargs": [{"num_words": 1, "relation": "x"}]},
            "relation must be",
        ),
    ],
)
def test_broken_rows_are_errors(truth: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        grade("some text", truth)
