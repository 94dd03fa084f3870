"""Units, percent signs and currencies around an answer: 20 \\text{ sq units}, 5 cm, \\$42, 50\\%, 30^\\circ."""

from __future__ import annotations

import re
from collections.abc import Set
from dataclasses import dataclass
from pathlib import Path

# units.txt: name -> words; a unit by its spellings, and lists of other words
_LISTS: dict[str, list[str]] = {}
for _line in (Path(__file__).parent / "units.txt").read_text().splitlines():
    _list_name, _, _words = _line.partition(":")
    if not _line.startswith("#"):
        _LISTS.setdefault(_list_name, []).extend(_words.split())
_THINGS, _QUALITIES, _CHANGING = (frozenset(_LISTS.pop(name)) for name in ("things", "qualities", "changing"))
_CANONICAL = {spelling: name for name, spellings in _LISTS.items() for spelling in spellings}
_SQUARE, _CUBIC = ("sq", "square", "squared"), ("cu", "cubic", "cubed")
_ONE_LETTER = {unit for unit in _CANONICAL if len(unit) == 1 and unit.islower()} | {"L"}  # 5 M is no length, nor is 5M
_SCALES = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12}
_CHANGES = re.compile(rf"(?<![A-Za-z\\])(?:{'|'.join([*_CHANGING, *_SCALES])}|times (?=[a-z]))(?![A-Za-z])")

_WRAPPER = r"\\(?:text|textrm|textbf|textit|textnormal|mathrm|mbox|rm)\s*\{"
_POWER = r"(?:\s*\^\s*\{?\s*([23])\s*\}?)?"
_WRAPPED_UNIT = re.compile(rf"^(?P<value>.*[^\s,+\-*/^_=<>]) ?\s*{_WRAPPER}(?P<words>[^{{}}]*)\}}{_POWER}$", re.DOTALL)
_BARE_UNIT = re.compile(
    rf"^(?P<value>.*[\d)}}\]]) ?(?P<words>[A-Za-z]{{1,12}}(?:[ /][A-Za-z]{{1,12}}){{0,3}}){_POWER}$",
    re.DOTALL,
)
_SCALED = re.compile(
    rf"^(?P<value>-?[\d.,]*\d|-?\\frac\{{\d+\}}\{{\d+\}}) ?\s*(?:{_WRAPPER})?\s*(?P<scale>{'|'.join(_SCALES)})s?"
    r"(?![a-z])\s*\}?(?P<rest>.*)$",
    re.DOTALL,
)
_COUNTED = re.compile(r"^(?P<value>-?[\d.,/]*\d) (?P<words>(?!or |and |pi\b)[a-z]{3,20}(?: [a-z]{2,20}){0,3})$")
_DEGREE = re.compile(
    rf"^(?P<value>.*?)\s*\^\s*\{{?\s*\\circ\s*\}}?\s*(?:{_WRAPPER}\s*)?(?P<scale>[CF]?)\s*\}}?$", re.DOTALL
)
_ANGLE_OF = re.compile(r"(?<![A-Za-z\\])\\?(?:sin|cos|tan|cot|sec|csc)(?!\s*\^|[a-z])")  # the inverse ones give degrees
_ANGLE = re.compile(r"(\d+(?:\.\d+)?)\s*\^\s*\{?\s*\\circ\s*\}?")
_PERCENT = re.compile(r"^(?P<value>.*?)\s*(?:\\?%|(?:\\text\s*\{)?\s*\b(?:percent|per cent)\b\s*\}?)$", re.DOTALL)
_CURRENCY = re.compile(
    r"^(?P<sign>-?)\s*(?P<currency>\\\$|\$|\u20ac|\u00a3)\s*(?P<value>(?:[-\d.(]|\\(?:frac|sqrt|pi)).*)$", re.DOTALL
)
_MEASURED = re.compile(r"(?<=[A-Za-z]) (?:in total|total|in all|long|tall|high|wide|deep|away|old)$")
_DEGREES = {"": "degree", "C": "degree celsius", "F": "degree fahrenheit"}
_SIGNS = {"\u20ac": "euro", "\u00a3": "pound"}


@dataclass(frozen=True, slots=True)
class Quantity:
    """An answer without its unit. `unit` is "" for none, "things" for what is counted, "other" for the reference's own
    words."""

    value: str
    unit: str = ""
    percent: bool = False


def split_unit(text: str, *, one_letter: bool = False, known: Set[str] | None = None) -> Quantity:
    """Take a unit, percent or currency sign off. Words that are not understood stay in the value.

    one_letter: read `5 m` as metres, not as 5 times m.
    known: words that count as a unit besides those listed above: the reference's, for an answer; None: any, for the
        reference itself.
    """
    text = re.sub(r"^\(([^()]*)\)$", r"\1", text)
    if match := _PERCENT.match(text):
        return Quantity(match["value"], percent=True)
    if match := _CURRENCY.match(text):
        unit = _SIGNS.get(match["currency"], "dollar")
        inner = split_unit(match["value"], known=known)
        fits = inner.unit in ("", "other", unit) or inner.unit.startswith("/")
        return Quantity(match["sign"] + inner.value, unit) if fits else Quantity(text)
    if match := _SCALED.match(text):
        counted = split_unit(f"1 {match['rest'].strip(' }')}", known=known)
        if counted.value == "1" or not match["rest"].strip(" }"):
            return Quantity(f"{match['value']}*{_SCALES[match['scale']]}", counted.unit)
    if _ANGLE_OF.search(text) and "circ" in text:  # \cos 60^\circ has no unit: its argument is in radians
        return Quantity(_ANGLE.sub(r"(\\frac{\1\\pi}{180})", text))
    if match := _DEGREE.match(text):
        return Quantity(match["value"], _DEGREES[match["scale"]]) if match["value"] else Quantity(text)
    if match := _WRAPPED_UNIT.match(text):
        name = _name(match["words"], match[3]) or _counted(match["words"], match["value"], known, match[3])
        if name:
            return Quantity(match["value"].strip(), name)
    if match := _BARE_UNIT.match(text):
        words = match["words"]
        if len(words) > 1 or (words in _ONE_LETTER and one_letter and text[match.start("words") - 1] == " "):
            name = _name(words, match[3]) or ("" if known is None else _counted(words, match["value"], known, match[3]))
            if name:
                return Quantity(match["value"].strip(), name)
    if (match := _COUNTED.match(text)) and (name := _counted(match["words"], match["value"], known)):
        return Quantity(match["value"], name)
    return Quantity(text)


def _counted(words: str, value: str, known: Set[str] | None, power: str | None = None) -> str:
    """Return "things" or "other" (see Quantity) for words that say what is counted, "" for any others."""
    if known is None:
        return "" if _CHANGES.search(words) else "other"
    words, _, each = _MEASURED.sub("", words.strip()).partition(" per ")
    if each and not _name(each, None):
        return ""
    *before, last = words.lower().strip(" .").split() or [""]
    if power or not _QUALITIES.union(known).issuperset(before):
        return ""
    listed = last in _THINGS or (value.strip() == "1" and f"{last}s" in _THINGS)
    return "other" if last in known else "things" if listed else ""


def words_of(text: str) -> Set[str]:
    """The words of a reference that may stand beside a number without changing it."""
    return {word for word in re.findall(r"(?<![\\A-Za-z])[a-z]{3,}", text.lower()) if not _CHANGES.fullmatch(word)}


def says_more_than_the_number(text: str) -> bool:
    """True where a word is left that no unit explains and that changes the number's meaning: 5 squared, not 0."""
    return _CHANGES.search(text) is not None


def compatible(truth: Quantity, answer: Quantity) -> bool:
    """True where two units do not contradict each other: one is missing, or they are the same."""
    units = ["percent" if side.percent else side.unit for side in (truth, answer)]
    return units[0] == units[1] or any(unit in ("", "unit", "unit2", "unit3") for unit in units)


def _name(words: str, power: str | None) -> str:
    """Canonical name of a unit such as `square feet` or `km/h`, or "" if a word of it is unknown."""
    exponent, names = power or "", []
    for part in re.split(r"\s*/\s*|(?:^|\s+)per\s+", _MEASURED.sub("", words.strip().strip("."))):
        known = []
        for word in re.split(r"[\s.\-]+", part):
            word = word.lower() if len(word) > 1 or word == "L" else word
            if (word in _SQUARE or word in _CUBIC) and not exponent and word.endswith("ed") == bool(known):
                exponent = "2" if word in _SQUARE else "3"
            elif word in _CANONICAL or word.removesuffix("s") in _CANONICAL:
                known.append(_CANONICAL.get(word) or _CANONICAL[word.removesuffix("s")])
            elif word:
                return ""
        names.append(" ".join(known))
    return "/".join(names) + exponent if any(names) else ""
