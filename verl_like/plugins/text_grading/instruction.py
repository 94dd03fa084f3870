"""Instruction following: the share of IFEval's format instructions that a response obeys.

All checks take time linear in the length of the response: no pattern may look twice at a long run of the same
characters. Names, arguments and meanings are those of IFEval (J. Zhou et al., arXiv 2311.07911) and its
`instruction_id_list`. Departures: sentences are counted by their full stops instead of with nltk, keywords are text,
not regular expressions, and `language:response_language` is not there, for it needs a language detector.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

from verl_like.plugins.math_grading.truth import dictionary_with

_END_OF_THINKING = "</think>"


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    *,
    score: float = 1.0,
    partial_credit: bool = False,
) -> dict[str, Any]:
    """Score `score` if all instructions are obeyed; with partial_credit, that times the share of them that are.

    The text before </think> is not looked at. Returns score, acc (all obeyed), share, and pred: the instructions that
    were not obeyed.

    ground_truth: {"instruction_id_list": [name, ...], "kwargs": [arguments, ...]}, also as a JSON text, or a list of
        {"instruction_id", "kwargs"}.
    """
    instructions = _instructions(ground_truth)
    text = solution_str.rsplit(_END_OF_THINKING, 1)[-1].strip()
    broken = [name for name, arguments in instructions if not obeys(name, arguments, text)]
    share = 1 - len(broken) / len(instructions)
    value = share if partial_credit else float(not broken)
    return {
        "score": score * value,
        "acc": float(not broken),
        "share": share,
        "pred": f"broken: {', '.join(broken)}" if broken else "all obeyed",
    }


def _instructions(ground_truth: Any) -> list[tuple[str, dict[str, Any]]]:
    if isinstance(ground_truth, str) and ground_truth.lstrip().startswith("["):
        ground_truth = json.loads(ground_truth)
    if isinstance(ground_truth, list):
        items = [dictionary_with(item, "instruction_id") for item in ground_truth]
        pairs = [(item["instruction_id"], item.get("kwargs")) for item in items]
    else:
        truth = dictionary_with(ground_truth, "instruction_id_list")
        names = truth["instruction_id_list"]
        pairs = list(zip(names, truth.get("kwargs") or [None] * len(names), strict=True))
    if not pairs:
        raise ValueError(f"the row has no instructions: {ground_truth!r}")
    # parquet gives every row the arguments of all instructions, null where they do not belong
    return [(name, {k: v for k, v in (arguments or {}).items() if v is not None}) for name, arguments in pairs]


Check = Callable[..., bool]

CHOICES = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
_SENTENCE_END = re.compile(r"(?<![.!?])[.!?]++[\"')\]*]*+(?=\s|$)")


def _related(count: int, number: int, relation: str | None) -> bool:
    if relation in (None, "at least"):
        return count >= number
    if relation == "less than":
        return count < number
    if relation == "exactly":
        return count == number
    raise ValueError(f"relation must be `at least`, `less than` or `exactly`, not {relation!r}")


def keywords_existence(text: str, *, keywords: list[str]) -> bool:
    return all(re.search(re.escape(word), text, re.IGNORECASE) for word in keywords)


def keyword_frequency(text: str, *, keyword: str, frequency: int, relation: str | None = None) -> bool:
    return _related(len(re.findall(re.escape(keyword), text, re.IGNORECASE)), frequency, relation)


def forbidden_words(text: str, *, forbidden_words: list[str]) -> bool:
    return not any(re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.IGNORECASE) for word in forbidden_words)


def letter_frequency(text: str, *, letter: str, let_frequency: int, let_relation: str | None = None) -> bool:
    return _related(Counter(text.lower())[letter.lower()], let_frequency, let_relation)


def number_words(text: str, *, num_words: int, relation: str | None = None) -> bool:
    return _related(len(re.findall(r"\w+", text)), num_words, relation)


def number_sentences(text: str, *, num_sentences: int, relation: str | None = None) -> bool:
    pieces = [piece for piece in _SENTENCE_END.split(text) if re.search(r"\w", piece)]
    return _related(len(pieces), num_sentences, relation)


def number_paragraphs(text: str, *, num_paragraphs: int) -> bool:
    """Check the number of paragraphs, parted by ***; empty ones are allowed at the ends only."""
    return _separated(text, r"\s?\*\*\*\s?", num_paragraphs)


def _separated(text: str, separator: str, number: int) -> bool:
    parts = [part.strip() for part in re.split(separator, text)]
    inner = parts[(not parts[0]) : len(parts) - (len(parts) > 1 and not parts[-1])]
    return all(inner) and len(inner) == number


def nth_paragraph_first_word(text: str, *, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    """Check the first word of a paragraph, and the number of paragraphs, parted by an empty line."""
    paragraphs = [part.strip() for part in re.split(r"\n\n", text) if part.strip()]
    if len(paragraphs) != num_paragraphs or not 1 <= nth_paragraph <= len(paragraphs):
        return False
    word = re.match(r"[\"'(]*([^\s.,?!'\")]*)", paragraphs[nth_paragraph - 1])
    return word is not None and word[1].lower() == first_word.lower()


def number_placeholders(text: str, *, num_placeholders: int) -> bool:
    return len(re.findall(r"\[[^\[\]]*\]", text)) >= num_placeholders


def postscript(text: str, *, postscript_marker: str) -> bool:
    spelled = r"\s?".join(re.escape(letter) for letter in re.sub(r"\s", "", postscript_marker.lower()))
    return re.search(spelled, text.lower()) is not None


def number_bullet_lists(text: str, *, num_bullets: int) -> bool:
    return len(re.findall(r"^[ \t]*(?:\*(?!\*)|-(?!-))[ \t]*\S", text, re.MULTILINE)) == num_bullets


def constrained_response(text: str) -> bool:
    return any(choice in text for choice in CHOICES)


def number_highlighted_sections(text: str, *, num_highlights: int) -> bool:
    return sum(bool(part.strip()) for part in re.findall(r"\*{1,2}([^\n*]+)\*{1,2}", text)) >= num_highlights


def multiple_sections(text: str, *, section_spliter: str, num_sections: int) -> bool:
    return len(re.findall(rf"{re.escape(section_spliter)}\s?\d+", text)) >= num_sections


def json_format(text: str) -> bool:
    body = text.strip().removesuffix("```").removeprefix("```").removeprefix("json").removeprefix("JSON")
    try:
        json.loads(body.strip())
    except (ValueError, RecursionError):
        return False
    return True


def title(text: str) -> bool:
    return any(part.strip() for part in re.findall(r"<<([^\n<>]+)>>", text))


def two_responses(text: str) -> bool:
    parts = [part.strip() for part in text.split("******")]
    return _separated(text, r"\*{6}", 2) and len({part for part in parts if part}) == 2


def repeat_prompt(text: str, *, prompt_to_repeat: str) -> bool:
    return text.strip().lower().startswith(prompt_to_repeat.strip().lower())


def end_checker(text: str, *, end_phrase: str) -> bool:
    return text.strip().strip('"').lower().endswith(end_phrase.strip().lower())


def quotation(text: str) -> bool:
    return len(text.strip()) > 1 and text.strip()[0] == text.strip()[-1] == '"'


def capital_word_frequency(text: str, *, capital_frequency: int, capital_relation: str | None = None) -> bool:
    return _related(sum(word.isupper() for word in re.findall(r"\w+", text)), capital_frequency, capital_relation)


CHECKS: dict[str, Check] = {
    "keywords:existence": keywords_existence,
    "keywords:frequency": keyword_frequency,
    "keywords:forbidden_words": forbidden_words,
    "keywords:letter_frequency": letter_frequency,
    "length_constraints:number_words": number_words,
    "length_constraints:number_sentences": number_sentences,
    "length_constraints:number_paragraphs": number_paragraphs,
    "length_constraints:nth_paragraph_first_word": nth_paragraph_first_word,
    "detectable_content:number_placeholders": number_placeholders,
    "detectable_content:postscript": postscript,
    "detectable_format:number_bullet_lists": number_bullet_lists,
    "detectable_format:constrained_response": constrained_response,
    "detectable_format:number_highlighted_sections": number_highlighted_sections,
    "detectable_format:multiple_sections": multiple_sections,
    "detectable_format:json_format": json_format,
    "detectable_format:title": title,
    "combination:two_responses": two_responses,
    "combination:repeat_prompt": repeat_prompt,
    "startend:end_checker": end_checker,
    "startend:quotation": quotation,
    "change_case:capital_word_frequency": capital_word_frequency,
    "change_case:english_capital": str.isupper,
    "change_case:english_lowercase": str.islower,
    "punctuation:no_comma": lambda text: "," not in text,
}


def obeys(name: str, arguments: dict[str, Any], text: str) -> bool:
    """Check that the text obeys one instruction. Raises ValueError for an unknown instruction or unfit arguments."""
    if name not in CHECKS:
        raise ValueError(f"unknown instruction {name!r}; known are {', '.join(CHECKS)}")
    try:
        return bool(text.strip()) and CHECKS[name](text, **arguments)
    except TypeError as error:
        raise ValueError(f"instruction {name} does not fit its arguments {arguments}: {error}") from error
