"""500 drawn responses, read by vLLM's parsers and by ours.

Where a response is well-formed, names and arguments are the same. Where it is broken, they differ on purpose, and each
kind of difference stands in VLLM: vLLM drops all calls of a response, mends, or passes on what is no object.
"""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.unit.data.factory import SHARED_DATA
from verl_like.plugins.agents.tool_calls.formats import parser_of

pytestmark = pytest.mark.engines  # vLLM takes 10 to 20 seconds to import; our side has its tests in test_tool_calls.py

Calls = list[tuple[str, dict[str, Any]]]
Writer = Callable[[str, Calls], str]
Reader = Callable[[str], list[tuple[str, Any]]]
NUM_WELL_FORMED, NUM_BROKEN = 40, 44
SPECIAL_TOKENS = ("<|python_tag|>", "[TOOL_CALLS]", "<think>", "</think>")
WORDS = (
    "Zürich",
    "東京",
    "🙂",
    'say "hi"',
    "a\\b",
    "line\nbreak",
    "{x}",
    "[1, 2]",
    "it's",
    "a; b",
    "<b>",
    "",
    " ",
    "7",
    "null",
)


def write_hermes(before: str, calls: Calls) -> str:
    return before + "\n".join(f"<tool_call>\n{json_call(call, 'arguments')}\n</tool_call>" for call in calls)


def write_xml(before: str, calls: Calls) -> str:
    def one(name: str, arguments: dict[str, Any]) -> str:
        parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
        return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"

    return before + "\n".join(one(*call) for call in calls)


def write_llama(before: str, calls: Calls) -> str:
    return before + "<|python_tag|>" + "; ".join(json_call(call, "parameters") for call in calls)


def write_mistral_list(before: str, calls: Calls) -> str:
    return f"{before}[TOOL_CALLS] [{', '.join(json_call(call, 'arguments') for call in calls)}]"


def write_mistral_args(before: str, calls: Calls) -> str:
    return before + "".join(f"[TOOL_CALLS]{name}[ARGS]{json.dumps(arguments)}" for name, arguments in calls)


def write_pythonic(before: str, calls: Calls) -> str:
    """Nothing stands before the list in this format."""
    written = (f"{name}({', '.join(f'{key}={value!r}' for key, value in words.items())})" for name, words in calls)
    return f"[{', '.join(written)}]"


def json_call(call: tuple[str, dict[str, Any]], key: str) -> str:
    return json.dumps({"name": call[0], key: call[1]}, ensure_ascii=False)


# our name -> vLLM's, and who writes it; two tokenizers, because vLLM's Mistral parser looks for [ARGS] among the tokens
SYNTAXES: dict[str, tuple[str, str, Writer]] = {
    "hermes": ("hermes", "hermes", write_hermes),
    "qwen3_coder": ("qwen3_coder", "qwen3_coder", write_xml),
    "llama3_json": ("llama3_json", "llama3_json", write_llama),
    "mistral list": ("mistral", "mistral", write_mistral_list),
    "mistral args": ("mistral", "mistral", write_mistral_args),
    "pythonic": ("pythonic", "pythonic", write_pythonic),
}


@pytest.fixture(scope="module")
def readers() -> Iterator[dict[str, Reader]]:
    """vLLM's parsers, by syntax: text -> name and arguments of each call."""
    pytest.importorskip("vllm", reason="compares with vLLM's parsers of tool calls, and vLLM is not installed")
    if not (SHARED_DATA / "tok_qwen25").is_dir():
        pytest.skip(f"needs the tokenizer in {SHARED_DATA / 'tok_qwen25'}")
    from transformers import AutoTokenizer
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers import ToolParserManager

    request = ChatCompletionRequest(model="m", messages=[{"role": "user", "content": "x"}])

    def tokenizer_with(*tokens: str) -> Any:
        tokenizer = AutoTokenizer.from_pretrained(SHARED_DATA / "tok_qwen25")
        tokenizer.add_tokens([*SPECIAL_TOKENS, *tokens], special_tokens=True)
        return tokenizer

    tokenizers = {False: tokenizer_with(), True: tokenizer_with("[ARGS]")}

    def reader(syntax: str) -> Reader:
        parser = ToolParserManager.get_tool_parser(SYNTAXES[syntax][1])(tokenizers[syntax == "mistral args"])

        def read(text: str) -> list[tuple[str, Any]]:
            found = parser.extract_tool_calls(text, request=request).tool_calls
            return [(call.function.name, json_or_text(call.function.arguments)) for call in found]

        return read

    level = logging.getLogger("vllm").level
    logging.getLogger("vllm").setLevel(logging.CRITICAL)  # a traceback for each broken call
    yield {syntax: reader(syntax) for syntax in SYNTAXES}
    logging.getLogger("vllm").setLevel(level)


def json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def draw_value(drawn: random.Random, depth: int = 0) -> Any:
    kinds = ["word", "word", "integer", "float", "flag"] + ["list", "object"] * (depth < 3)
    match drawn.choice(kinds):
        case "word":
            return " ".join(drawn.choices(WORDS, k=drawn.randint(1, 3)))
        case "integer":
            return drawn.choice([0, -1, drawn.randrange(10**6), 2**70])
        case "float":
            return drawn.choice([0.5, -1e-9, 1e300, drawn.random()])
        case "flag":
            return drawn.choice([True, False, None])
        case "list":
            return [draw_value(drawn, depth + 1) for _ in range(drawn.randrange(3))]
        case _:
            return {drawn.choice(WORDS): draw_value(drawn, depth + 1) for _ in range(drawn.randrange(3))}


def draw_calls(drawn: random.Random, syntax: str, num_calls: int) -> Calls:
    def arguments() -> dict[str, Any]:
        names = drawn.sample(["city", "days", "x1", "unit_of"], drawn.randrange(1, 4))
        values = {name: draw_value(drawn) for name in names}
        return {name: str(value).strip("\n") for name, value in values.items()} if syntax == "qwen3_coder" else values

    return [(drawn.choice(["get_weather", "f", "search2"]), arguments()) for _ in range(num_calls)]


def ours(syntax: str, text: str) -> tuple[list[tuple[str, Any]], int]:
    """Calls, and how many are malformed."""
    parsed = parser_of(SYNTAXES[syntax][0]).parse(text)
    return [(call.name, call.arguments) for call in parsed.calls], len(parsed.malformed)


@pytest.mark.parametrize("syntax", SYNTAXES)
def test_well_formed_responses_are_read_the_same(syntax: str, readers: dict[str, Reader]) -> None:
    drawn, write = random.Random(f"well-formed {syntax}"), SYNTAXES[syntax][2]
    for _ in range(NUM_WELL_FORMED):
        calls = draw_calls(drawn, syntax, drawn.randint(1, 3))
        before = drawn.choice(["", "I look it up.\n", "Zürich: ¿qué? 🙂\n\n", "1 < 2 and a; b\n"])
        text = write(before, calls)
        assert ours(syntax, text) == (calls, 0), text
        assert readers[syntax](text) == calls, text


def test_text_without_calls(readers: dict[str, Reader]) -> None:
    for text in ("", "The answer is 4.", r"\boxed{4}", "[1, 2]", "f(x) > 3"):
        for syntax, read in readers.items():
            assert read(text) == [] and ours(syntax, text) == ([], 0)


# How a call begins and with which character its own text ends: between the two it can be cut off.
ENDS = {
    "hermes": ("<tool_call>", ">"),
    "qwen3_coder": ("<tool_call>", ">"),
    "llama3_json": ('{"name":', "}"),
    "mistral list": ('{"name":', "}"),
    "mistral args": ("[TOOL_CALLS]", "}"),
    "pythonic": ("g(", ")"),
}


def cut_off(drawn: random.Random, syntax: str, text: str) -> str:
    begin, end = ENDS[syntax]
    return text[: drawn.randint(text.rindex(begin) + len(begin), text.rindex(end))]


def without_end(drawn: random.Random, syntax: str, text: str) -> str:
    """A bracket less, or in XML the tag that ends the first parameter."""
    if syntax == "qwen3_coder":
        return text.replace("</parameter>", "", 1)
    return text.replace("}", "", 1) if syntax != "pythonic" else text.replace(")", "", 1)


def with_garbage(drawn: random.Random, syntax: str, text: str) -> str:
    """Words where none may stand."""
    garbage = drawn.choice([" or so ", " ** ", " please "])
    place = {"qwen3_coder": "\n</function>", "pythonic": ")"}.get(syntax, "}")
    return text.replace(place, garbage + place, 1)


def with_a_wrong_tag(drawn: random.Random, syntax: str, text: str) -> str:
    wrong = {
        "hermes": ("</tool_call>", "</toolcall>"),
        "qwen3_coder": ("<function=", "<func="),
        "llama3_json": ('{"name":', '{"name";'),
        "mistral list": ('{"name":', '{"name"='),
        "mistral args": ("[ARGS]", "[ARG]"),
        "pythonic": ("b=", "b:"),
    }
    return text.replace(*wrong[syntax], 1)


def with_a_number(drawn: random.Random, syntax: str, text: str) -> str:
    """Arguments that are no object, as a model writes them that was forced to call: the number of the argument `b`."""
    wrong = {"qwen3_coder": ("<parameter=b>", "<parameter>"), "pythonic": ("b=", "")}
    return text.replace(*wrong.get(syntax, ('{"b": 91651772023}', "91651772023")), 1)


BREAKS = (cut_off, without_end, with_garbage, with_a_wrong_tag, with_a_number)
# What vLLM finds in the broken responses: nothing, the good call alone, or both, the broken one mended or as it is.
VLLM: dict[str, tuple[set[str], ...]] = {
    # both: JSON without </tool_call>, and arguments that are a number
    "hermes": ({"none", "both"}, {"none"}, {"none"}, {"none"}, {"both"}),
    # cut values are taken for whole ones, parameters without an end are left out, words between tags are skipped
    "qwen3_coder": ({"both"}, {"both"}, {"both"}, {"good"}, {"both"}),
    "llama3_json": ({"none"}, {"none"}, {"none"}, {"none"}, {"both"}),
    "mistral list": ({"none"}, {"none"}, {"none"}, {"none"}, {"both"}),
    # names and arguments are passed on whatever they are, also as text that is no JSON
    "mistral args": ({"both"}, {"both"}, {"both"}, {"both"}, {"both"}),
    "pythonic": ({"none"}, {"none"}, {"none"}, {"none"}, {"none"}),
}
# In a list, a bracket less in one call leaves nobody knowing where the next one begins.
NONE_HERE = {("mistral list", without_end), ("pythonic", without_end)}


@pytest.mark.parametrize("syntax", SYNTAXES)
def test_of_two_calls_one_is_broken(syntax: str, readers: dict[str, Reader]) -> None:
    """The good one counts here, and the other is listed as malformed. What vLLM makes of it stands in VLLM."""
    drawn, write = random.Random(f"broken {syntax}"), SYNTAXES[syntax][2]
    found = dict[Any, set[str]]()
    for number in range(NUM_BROKEN):
        break_it = BREAKS[number % len(BREAKS)]
        value: Any = "91651772023" if syntax == "qwen3_coder" else 91651772023
        first, second = ("f", {"b": value}), ("g", {"a": "x" * drawn.randint(1, 9)})
        text = break_it(drawn, syntax, write("", [first, second]))
        good = first if break_it is cut_off else second
        calls, num_malformed = ours(syntax, text)
        assert calls == ([] if (syntax, break_it) in NONE_HERE else [good]) and num_malformed >= 1, text
        theirs = readers[syntax](text)
        assert not theirs or good in theirs, text
        found.setdefault(break_it, set()).add(("none", "good", "both")[len(theirs)])
    assert tuple(found[break_it] for break_it in BREAKS) == VLLM[syntax]
