"""Every syntax of tool calls by hand: what is a call, what is malformed, what is content and thinking."""

from __future__ import annotations

import gc
import json
import random
import sys
import time
from typing import Any

import pytest

from verl_like.plugins.agents.tool_calls.call import Parsed
from verl_like.plugins.agents.tool_calls.formats import FORMATS, parser_of

pytestmark = pytest.mark.filterwarnings("ignore:invalid escape sequence")  # pytest sets aside the package's own filter
SYNTAXES = ("hermes", "qwen3_coder", "llama3_json", "mistral", "gpt-oss", "pythonic")


def calls(parsed: Parsed) -> list[tuple[str, dict[str, Any]]]:
    return [(call.name, call.arguments) for call in parsed.calls]


def hermes_call(text: str) -> str:
    return f"<tool_call>\n{text}\n</tool_call>"


F1 = '{"name": "f", "arguments": {"a": 1}}'
G = '{"name": "g", "arguments": {}}'
THE_F1, THE_G = ("f", {"a": 1}), ("g", {})
XML_F = "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
XML_G = "<tool_call>\n<function=g>\n</function>\n</tool_call>"
LLAMA_F, LLAMA_G = F1.replace("arguments", "parameters"), G.replace("arguments", "parameters")
HARMONY_F = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}'
HARMONY_G = "<|start|>assistant<|channel|>commentary to=functions.g <|constrain|>json<|message|>{}"

# format, text, calls, content, reasoning
WELL_FORMED = [
    ("hermes", "Let me see.\n" + hermes_call(F1), [THE_F1], "Let me see.\n", None),
    ("hermes", hermes_call(F1) + "\n" + hermes_call(G), [THE_F1, THE_G], "\n", None),
    ("hermes", f"<tool_call>{F1}</tool_call> behind", [THE_F1], " behind", None),
    ("hermes", "no call, but {braces} and <tags>", [], "no call, but {braces} and <tags>", None),
    ("hermes", "", [], "", None),
    ("hermes", f"<think>\nhm\n</think>\n\n{hermes_call(F1)}", [THE_F1], "\n\n", "\nhm\n"),
    ("hermes", f"<think>{hermes_call(G)}</think>{hermes_call(F1)}", [THE_F1], "", hermes_call(G)),
    ("hermes", f"begun in the prompt {hermes_call(G)}</think>yes", [], "yes", f"begun in the prompt {hermes_call(G)}"),
    ("hermes", f"a <tool_call> I should write</think>{hermes_call(F1)}", [THE_F1], "", "a <tool_call> I should write"),
    ("hermes", f"<think>cut off {hermes_call(G)}", [], "", f"cut off {hermes_call(G)}"),
    ("hermes", f"<think>a</think>b<think>c</think>{hermes_call(G)}</think>d", [THE_G], "bd", "a\nc"),
    ("qwen3_coder", "Look:\n" + XML_F, [("f", {"a": "1"})], "Look:\n", None),
    ("qwen3_coder", XML_F + "\n" + XML_G, [("f", {"a": "1"}), THE_G], "\n", None),
    ("qwen3_coder", f"<think>{XML_G}</think>{XML_F}", [("f", {"a": "1"})], "", XML_G),
    ("llama3_json", LLAMA_F, [THE_F1], "", None),
    ("llama3_json", f"<|python_tag|>{LLAMA_F}; {LLAMA_G}", [THE_F1, THE_G], "", None),
    ("llama3_json", f"I call {F1}\n{G}", [THE_F1, THE_G], "I call \n", None),
    ("llama3_json", '{"type": "function", "name": "g", "parameters": {}}', [THE_G], "", None),
    ("llama3_json", r"So \boxed{4} and {1, 2}", [], r"So \boxed{4} and {1, 2}", None),
    ("llama3_json", '{"name": "Ann", "age": 3}', [], '{"name": "Ann", "age": 3}', None),
    ("mistral", f"[TOOL_CALLS][{F1}, {G}]", [THE_F1, THE_G], "", None),
    ("mistral", f"Now: [TOOL_CALLS] {F1}", [THE_F1], "Now: ", None),
    ("mistral", 'Now: [TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g{}', [THE_F1, THE_G], "Now: ", None),
    ("mistral", '[TOOL_CALLS]f[CALL_ID]a1B2c3D4e[ARGS]{"a": 1}', [THE_F1], "", None),
    ("mistral", "[THINK]a [TOOL_CALLS]g{} b[/THINK]yes", [], "yes", "a [TOOL_CALLS]g{} b"),
    ("gpt-oss", HARMONY_F, [THE_F1], "", None),
    ("gpt-oss", f"{HARMONY_F}<|call|>{HARMONY_G}", [THE_F1, THE_G], "", None),
    (
        "gpt-oss",
        f"<|channel|>analysis<|message|>{F1} to=functions.g<|end|><|start|>assistant{HARMONY_F}",
        [THE_F1],
        "",
        f"{F1} to=functions.g",
    ),
    ("gpt-oss", f"<|channel|>commentary<|message|>Now.<|end|>{HARMONY_G}", [THE_G], "Now.", None),
    (
        "gpt-oss",
        "<|channel|>analysis<|message|>2+2<|end|><|start|>assistant<|channel|>final<|message|>4",
        [],
        "4",
        "2+2",
    ),
    ("gpt-oss", ' to=functions.f<|channel|>commentary json<|message|>{"a": 1}', [THE_F1], "", None),
    ("gpt-oss", "no header", [], "no header", None),
    ("pythonic", "[f(a=1), g()]", [THE_F1, THE_G], "", None),
    ("pythonic", " [\n  f(\n    a=1,\n  ),\n]", [THE_F1], "", None),
    ("pythonic", "<|python_start|>[g()]<|python_end|>", [THE_G], "", None),
    (
        "pythonic",
        "[a.b.c(x=[1, -2.5, (True, None)], y={'k': null, 'l': false})]",
        [("a.b.c", {"x": [1, -2.5, [True, None]], "y": {"k": None, "l": False}})],
        "",
        None,
    ),
    (
        "pythonic",
        r"""[f(a="x, y] \" ' (", b='\d', c='''it's''')]""",
        [("f", {"a": "x, y] \" ' (", "b": r"\d", "c": "it's"})],
        "",
        None,
    ),
    ("pythonic", "The integral of [f(x), g(x)]", [], "The integral of [f(x), g(x)]", None),
]


@pytest.mark.parametrize(("syntax", "text", "expected", "content", "reasoning"), WELL_FORMED)
def test_well_formed(syntax: str, text: str, expected: list[Any], content: str, reasoning: str | None) -> None:
    parsed = parser_of(syntax).parse(text)
    assert (calls(parsed), parsed.content, parsed.reasoning) == (expected, content, reasoning)
    assert parsed.malformed == ()


# format, text, what is said about each call that cannot be read, calls that can
BROKEN = [
    (
        "hermes",
        hermes_call('{"name": "f", "arguments": 91651772023}'),
        ["arguments are an object, these are a number"],
        [],
    ),
    ("hermes", hermes_call("91651772023"), ["no JSON object"], []),
    ("hermes", hermes_call("[1]"), ["a call is a JSON object, this is a list"], []),
    ("hermes", hermes_call('{"name": "f"}'), ["no arguments"], []),
    ("hermes", hermes_call('{"name": "f", "parameters": {}}'), ["no arguments"], []),
    ("hermes", hermes_call('{"name": "f", "arguments": null}'), ["these are null"], []),
    ("hermes", hermes_call('{"name": "f", "arguments": "a"}'), ["these are a string"], []),
    ("hermes", hermes_call('{"name": "f", "arguments": "{} {}"}'), ["text after the arguments"], []),
    ("hermes", hermes_call('{"name": "", "arguments": {}}'), ["no name"], []),
    ("hermes", hermes_call('{"name": 3, "arguments": {}}'), ["no name"], []),
    ("hermes", hermes_call('{"name": "f", "arguments": {"a": 1, "a": 2}}'), ["the same key twice"], []),
    ("hermes", hermes_call('{"name": "f", "arguments": {"a": NaN}}'), ["NaN is not JSON"], []),
    ("hermes", hermes_call('{"name": "f", "arguments": {"a": -Infinity}}'), ["-Infinity is not JSON"], []),
    ("hermes", hermes_call('{"name": "f", "arguments": {"a": 1e999}}'), ["too large"], []),
    ("hermes", hermes_call(F1.replace("1", "7" * 5000)), ["more than 4300 digits"], []),
    ("hermes", hermes_call(r'{"name": "f", "arguments": {"a": "\ud800"}}'), ["surrogate"], []),
    ("hermes", hermes_call('{"name": "f", "arguments": {"a": "line\nbreak"}}'), ["Invalid control character"], []),
    ("hermes", hermes_call("{'name': 'f', 'arguments': {}}"), ["no valid JSON"], []),
    ("hermes", hermes_call(F1 + "}"), ["text between the JSON and </tool_call>"], []),
    ("hermes", f"<tool_call>{F1}", ["no </tool_call>"], []),
    ("hermes", f"{hermes_call(F1)}<tool_call>\n" + G[:-4], ["JSON without an end"], [THE_F1]),
    ("hermes", hermes_call(F1[:-1]) + hermes_call(G), ["JSON without an end"], [THE_G]),
    ("hermes", hermes_call('{"name": "f, "arguments": {}}') + hermes_call(G), ["JSON without an end"], [THE_G]),
    ("hermes", f"<tool_call>{F1}\n{hermes_call(G)}", ["text between"], [THE_G]),
    ("hermes", f"{G}</tool_call>{hermes_call(F1)}", ["</tool_call> outside of a call"], [THE_F1]),
    ("hermes", hermes_call("f(a=1)") + hermes_call("") + hermes_call(G), ["no JSON object"] * 2, [THE_G]),
    ("qwen3_coder", hermes_call(F1), ["no <function=NAME>"], []),
    ("qwen3_coder", XML_F.replace("</parameter>", ""), ["no </parameter> of a"], []),
    ("qwen3_coder", XML_F.replace("</parameter>", "") + XML_G, ["no </parameter> of a"], [THE_G]),
    ("qwen3_coder", XML_F.replace("</function>", "") + XML_G, ["no </function></tool_call>"], [THE_G]),
    ("qwen3_coder", XML_F.replace("</function>", "or so</function>"), ["no </function></tool_call>"], []),
    ("qwen3_coder", XML_F.replace("<function=f>", "<function=>"), ["no <function=NAME>"], []),
    ("qwen3_coder", XML_F.removeprefix("<tool_call>"), ["<function= outside", "</tool_call> outside"], []),
    ("qwen3_coder", XML_F.removesuffix("</tool_call>"), ["no </function></tool_call>"], []),
    ("qwen3_coder", XML_F.replace("</function>", "<parameter=a>2</parameter></function>"), ["parameter a twice"], []),
    ("llama3_json", "<|python_tag|>print(1)", ["no JSON object"], []),
    ("llama3_json", LLAMA_F[:-2], ["JSON without an end"], []),
    ("llama3_json", f"{LLAMA_F[:-1]}; {LLAMA_G}", ["JSON without an end"], [THE_G]),
    ("llama3_json", '{"name": "f, "parameters": {}}; ' + LLAMA_G, ["JSON without an end"], [THE_G]),
    ("llama3_json", '{"name": "f", "parameters": {"name": "g", "parameters": {}}', ["JSON without an end"], []),
    ("llama3_json", f'{{"name": "f", "parameters": 5}}\n{LLAMA_G}', ["these are a number"], [THE_G]),
    ("llama3_json", LLAMA_F + "}", ["more closing brackets"], []),
    ("mistral", f"[TOOL_CALLS][{F1}, {G[:-1]}", ["JSON without an end"], [THE_F1]),
    ("mistral", f"[TOOL_CALLS][{F1}, {{'a': 1}}, {G}]", ["no valid JSON"], [THE_F1, THE_G]),
    ("mistral", f"[TOOL_CALLS][{F1}", ["a list of calls without an end"], [THE_F1]),
    ("mistral", "[TOOL_CALLS][]", ["an empty list of calls"], []),
    ("mistral", "[TOOL_CALLS]f[ARGS]5", ["no list of calls, and no name"], []),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"a": [TOOL_CALLS]g[ARGS]{}', ["JSON without an end"], [THE_G]),
    ("mistral", "[TOOL_CALLS]f[ARGS]{}}[TOOL_CALLS]g[ARGS]{}", ["more closing brackets"], [THE_G]),
    ("mistral", "[TOOL_CALLS]", ["no list of calls, and no name"], []),
    ("gpt-oss", HARMONY_F[:-1], ["JSON without an end"], []),
    ("gpt-oss", HARMONY_F + " or so<|call|>" + HARMONY_G, ["text behind the arguments"], [THE_G]),
    ("gpt-oss", HARMONY_F.replace('{"a": 1}', "5") + "<|call|>" + HARMONY_G, ["no JSON object"], [THE_G]),
    ("gpt-oss", HARMONY_F.replace('{"a": 1}', "[1]"), ["arguments are an object, these are a list"], []),
    ("gpt-oss", HARMONY_F.replace("functions.f", "python"), ["python is no functions.NAME"], []),
    ("gpt-oss", HARMONY_F.partition("<|message|>")[0], ["no <|message|>"], []),
    (
        "pythonic",
        "[f(a=1), g(5), h(b=1, b=2), g()]",
        ["an argument without a name", "the same name twice"],
        [THE_F1, THE_G],
    ),
    ("pythonic", "[f(a=1), g(**{'a': 1})]", ["an argument without a name"], [THE_F1]),
    ("pythonic", "[f(a=1), g(", ["a list of calls without an end"], [THE_F1]),
    ("pythonic", "[f(a=1), 5]", ["no call"], [THE_F1]),
    ("pythonic", "[f(a=1), (lambda: 0)()]", ["the name of a call"], [THE_F1]),
    ("pythonic", "[g(), f(a=__import__('os').system('true'))]", ["Call is no literal"], [THE_G]),
    (
        "pythonic",
        "[g(), f(a=b'x'), f(a={1}), f(a={1: 2}), f(a={'k': 1, 'k': 2})]",
        ["Constant is no literal", "Set is no literal", "keys are strings", "the same name twice"],
        [THE_G],
    ),
    ("pythonic", "[g(), f(a=1e999), f(a=0x" + "f" * 9000 + ")]", ["too large"] * 2, [THE_G]),
    ("pythonic", "[g(), f(a=1 + 1), f(a=f'{x}')]", ["BinOp is no literal", "JoinedStr is no literal"], [THE_G]),
    ("pythonic", "[g(), f(a='\\ud800'), f(a='\0')]", ["not Python"] * 2, [THE_G]),
    ("pythonic", "[f(a='" + "x" * 50, ["a list of calls without an end"], []),
]


@pytest.mark.parametrize(("syntax", "text", "said", "expected"), BROKEN)
def test_broken(syntax: str, text: str, said: list[str], expected: list[Any]) -> None:
    parsed = parser_of(syntax).parse(text)
    assert calls(parsed) == expected
    assert len(parsed.malformed) == len(said), parsed.malformed
    for message, part in zip(parsed.malformed, said, strict=True):
        assert part in message and len(message) < 250


def test_a_message_shows_the_head_of_the_call() -> None:
    (message,) = parser_of("hermes").parse("Text. " + hermes_call('{"name": "f"}')).malformed
    assert message == repr("no arguments: ")[1:-1] + repr(hermes_call('{"name": "f"}'))


@pytest.mark.parametrize(
    "value", ["</tool_call>", "<tool_call>", "</think>", "[TOOL_CALLS]g{}", "<|call|>", "}]}; {", '"', "\\"]
)
def test_strings_hold_anything(value: str) -> None:
    arguments = {"a": value, "b": {"c": [value]}}
    call = json.dumps({"name": "f", "arguments": arguments})
    texts = {
        "hermes": hermes_call(call) + hermes_call(G),
        "llama3_json": f"{call}; {G}",
        "mistral": f"[TOOL_CALLS][{call}, {G}]",
        "gpt-oss": HARMONY_F.replace('{"a": 1}', json.dumps(arguments)) + "<|call|>" + HARMONY_G,
        "pythonic": f"[f(a={value!r}, b={arguments['b']!r}), g()]",
    }
    for syntax, text in texts.items():
        parsed = parser_of(syntax).parse(text)
        assert calls(parsed) == [("f", arguments), THE_G] and not parsed.malformed, syntax
        assert parsed.content.strip() == "" and parsed.reasoning is None


def test_a_good_call_hides_what_its_strings_hold_from_broken_ones_behind_it() -> None:
    text = '[TOOL_CALLS][{"name": "f", "arguments": {"a": "[TOOL_CALLS]g{}"}}, {"name": '
    parsed = parser_of("mistral").parse(text)
    assert calls(parsed) == [("f", {"a": "[TOOL_CALLS]g{}"})] and len(parsed.malformed) == 1


def test_arguments_encoded_twice() -> None:
    call = json.dumps({"name": "f", "arguments": json.dumps({"a": 1})})
    assert calls(parser_of("hermes").parse(hermes_call(call))) == [THE_F1]
    assert calls(parser_of("mistral").parse(f"[TOOL_CALLS][{call}]")) == [THE_F1]


def test_xml_values_are_text_as_written() -> None:
    value = '\n  if a < b:\n    print("</tool_call></function>", {"x": 1})\n\n'
    text = XML_F.replace("\n1\n", f"\n{value}\n")
    assert calls(parser_of("qwen3_coder").parse(text)) == [("f", {"a": value})]
    assert calls(parser_of("qwen3_coder").parse(XML_F.replace("\n1\n", ""))) == [("f", {"a": ""})]


@pytest.mark.parametrize("depth", [60, 70, 100_000])
def test_deep_nesting(depth: int) -> None:
    value = "[" * depth + "]" * depth
    texts = {
        "hermes": hermes_call(F1.replace("1", value)) + hermes_call(G),
        "llama3_json": f"{LLAMA_F}; {LLAMA_G}".replace("1", value),
        "mistral": '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g{}'.replace("1", value),
        "gpt-oss": HARMONY_F.replace("1", value) + "<|call|>" + HARMONY_G,
    }
    for syntax, text in texts.items():
        parsed = parser_of(syntax).parse(text)
        assert [call.name for call in parsed.calls] == (["f", "g"] if depth < 64 else ["g"]), syntax
        assert ["deeper" in message for message in parsed.malformed] == [True] * (depth > 64)
    assert len(parser_of("pythonic").parse(f"[f(a={value})]").malformed) == (depth > 64)


def test_a_deep_stack_of_the_caller() -> None:
    def at_depth(left: int) -> Parsed:
        return (
            at_depth(left - 1) if left else parser_of("hermes").parse(hermes_call(F1.replace("1", "[" * 60 + "]" * 60)))
        )

    limit = sys.getrecursionlimit()
    outcomes = set[int]()
    for left in range(limit - 150, limit):
        try:
            parsed = at_depth(left)
        except RecursionError:  # of the functions here, in which no text is involved
            continue
        outcomes.add(len(parsed.calls) + len(parsed.malformed))
    assert outcomes == {1}


@pytest.mark.parametrize(
    "value", ["-" * 50_000 + "1", "not " * 50_000 + "1", "1" + "+1" * 50_000, "x" + ".y" * 50_000, "1" * 50_000]
)
def test_python_that_exhausts_its_parser(value: str) -> None:
    parsed = parser_of("pythonic").parse(f"[g(), f(a={value}), g()]")
    assert calls(parsed) == [THE_G, THE_G] and len(parsed.malformed) == 1


PIECES = (
    *("<tool_call>", "</tool_call>", "<think>", "</think>", '<tool_call>{"', '<tool_call>{\\"', '<tool_call>{"a":"'),
    *("<tool_call>{", "<tool_call><function=f><parameter=a>", "<tool_call><function=", "<function=", "<parameter="),
    *('{"name":', '{"name":;', "{;", ";{", "{", "[", '"', "'", "\\", '\\"', " ", "\n", "'''", '"""'),
    *("<|python_tag|>", '<|python_tag|>{"', '<|python_tag|>{\\"', "[TOOL_CALLS]", "[TOOL_CALLS]f{", '[TOOL_CALLS]f{"'),
    *('[TOOL_CALLS]f{\\"', "[TOOL_CALLS][{", "[TOOL_CALLS]f[CALL_ID]", "[THINK]", "[/THINK]"),
    *("<|message|>", "<|channel|>", "<|start|> to=functions.f<|message|>{", ' to=functions.f<|message|>{"'),
    *("to=", " to=f", "[f(", "f(a=", "[f(a=1),", "<|python_start|>[f("),
)


# what a call begins with, cut off where anything may follow
OPEN = {
    "hermes": '<tool_call>{"name": "f", "arguments": {"a": ',
    "qwen3_coder": "<tool_call><function=f><parameter=a>",
    "llama3_json": '<|python_tag|>{"name": "f", "parameters": {"a": ',
    "mistral": '[TOOL_CALLS]f[ARGS]{"a": ',
    "gpt-oss": ' to=functions.f<|channel|>commentary<|message|>{"a": ',
    "pythonic": "[f(a=",
}


@pytest.mark.parametrize("syntax", SYNTAXES)
def test_time_is_linear(syntax: str) -> None:
    """16 times the text takes about 16 times as long, not 256 times: measured where it takes long at all."""
    parser = parser_of(syntax)

    def seconds(text: str) -> float:
        gc.disable()  # a collection looks at all that other tests have left
        start = time.process_time()
        parser.parse(text)
        end = time.process_time()
        gc.enable()
        return end - start

    for piece in PIECES:
        for begin in ("", OPEN[syntax]):
            small, large = (begin + piece * (size // len(piece)) for size in (2048, 32_768))
            if seconds(large) > 0.1:
                long, short = (min(seconds(text) for _ in range(3)) for text in (large, small))
                assert long < 64 * short, (piece, begin)


@pytest.mark.parametrize("syntax", SYNTAXES)
def test_anything_is_read(syntax: str) -> None:
    """Pieces in any order, and good and broken responses with some of their characters exchanged, never raise."""
    drawn = random.Random(syntax)
    texts = [case[1] for case in (*WELL_FORMED, *BROKEN) if case[0] == syntax and case[1]]
    for number in range(1500):
        if number % 2:
            text = list(drawn.choice(texts)[:2000])
            for _ in range(drawn.randint(1, 4)):
                text.insert(drawn.randint(0, len(text)), drawn.choice(PIECES) if number % 3 or not text else text.pop())
        else:
            text = drawn.choices((*PIECES, "a", "1", ",", ":", "]", "}", ")", '"a": ', "e9", "f", "\ud800"), k=12)
        parsed = parser_of(syntax).parse("".join(text))
        assert all(call.name and json.dumps(call.arguments, allow_nan=False) for call in parsed.calls)


@pytest.mark.parametrize("syntax", SYNTAXES)
def test_a_megabyte(syntax: str) -> None:
    big = {"a": 'x\n"\\' * 250_000, "b": list(range(1000))}
    call = json.dumps({"name": "f", "arguments": big})
    text = {
        "hermes": hermes_call(call),
        "qwen3_coder": XML_F.replace("\n1\n", "x" * 1_000_000),
        "llama3_json": call,
        "mistral": f"[TOOL_CALLS][{call}]",
        "gpt-oss": HARMONY_F.replace('{"a": 1}', json.dumps(big)),
        "pythonic": f"[f(a={big['a']!r}, b={big['b']!r})]",
    }[syntax]
    start = time.process_time()
    parsed = parser_of(syntax).parse(text)
    assert len(parsed.calls) == 1 and not parsed.malformed and time.process_time() - start < 5
    assert len(parser_of(syntax).parse(text[: len(text) // 2]).malformed) == 1


def test_names() -> None:
    assert set(SYNTAXES) <= set(FORMATS) and parser_of("qwen3") is parser_of("hermes")
    with pytest.raises(ValueError, match=r"actor_rollout_ref.rollout.multi_turn.format='xml' .*hermes.*qwen3_coder"):
        parser_of("xml")
