"""Prompts hold what their rows say: misspelt roles, empty messages, and what templates leave out is told."""

from __future__ import annotations

import json
import logging
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from tests.unit.data.factory import SHARED_DATA
from tests.unit.episodes.conversations import real_conversations, shared_templates
from verl_like.config import DataConfig, SpelledTokens
from verl_like.data.chat import PromptEncoder
from verl_like.data.dataset import PromptDataset
from verl_like.data.prompt_truth import look, own_text
from verl_like.data.templates import TEMPLATES

# Forms of templates that models have, written by hand: what they refuse, alternate, trim, cut and leave out
TAKE_ALL = ("qwen2_5", "qwen3", "minimind", "chatml", "llama3", "mistral", "deepseek_r1", "phi")
_HEAD = "<|im_start|>"
FORMS = {
    "llama3": (
        "{{ '<|begin|>' }}{% if messages[0].role == 'system' %}{% set system = messages[0].content | trim %}"
        "{% set messages = messages[1:] %}{% else %}{% set system = '' %}{% endif %}"
        "<|h|>system<|e|>\n\nCutting Knowledge Date: December 2023\n\n{% if tools %}Tools: {% for t in tools %}"
        "{{ t | tojson(indent=4) }}{% endfor %}{% endif %}{{ system }}<|eot|>{% for m in messages %}"
        "{% if m.role in ['tool', 'ipython'] %}<|h|>ipython<|e|>\n\n{{ m.content | tojson }}<|eot|>"
        "{% elif m.tool_calls %}<|h|>assistant<|e|>\n\n{{ m.tool_calls[0].function | tojson }}<|eot|>"
        "{% else %}<|h|>{{ m.role }}<|e|>\n\n{{ m.content | trim }}<|eot|>{% endif %}{% endfor %}"
    ),
    "mistral": (
        "{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] + '\n\n' %}"
        "{% set loop_messages = messages[1:] %}{% else %}{% set system = '' %}"
        "{% set loop_messages = messages %}{% endif %}"
        "<s>{% for m in loop_messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}{% if m['role'] == 'user' %}"
        "[INST] {{ system if loop.last else '' }}{{ m['content'] }}[/INST]{% else %} {{ m['content'] }}</s>{% endif %}"
        "{% endfor %}"
    ),
    "gemma": (
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
        "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
        "<start_of_turn>{{ 'model' if m['role'] == 'assistant' else m['role'] }}\n"
        "{{ m['content'] | trim }}<end_of_turn>\n"
        "{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
    ),
    "deepseek_r1": (
        "{% set ns = namespace(system='') %}{% for m in messages %}{% if m['role'] == 'system' %}"
        "{% set ns.system = ns.system + m['content'] %}{% endif %}{% endfor %}<s>{{ ns.system }}{% for m in messages %}"
        "{% if m['role'] == 'user' %}<User>{{ m['content'] }}{% elif m['role'] == 'assistant' %}"
        "<Assistant>{{ m['content'].split('</think>')[-1] }}</s>{% endif %}{% endfor %}<Assistant><think>\n"
    ),
    "phi": (
        "{% for m in messages %}{% if m.role == 'system' and m.content %}<|system|>\n{{ m.content }}<|end|>\n"
        "{% elif m.role == 'user' %}<|user|>\n{{ m.content }}<|end|>\n{% elif m.role == 'assistant' %}<|assistant|>\n"
        "{{ m.content }}<|end|>\n{% endif %}{% endfor %}<|assistant|>\n"
    ),
    "no_system": "{% for m in messages %}{% if m.role != 'system' %}"
    + _HEAD
    + "{{ m.role }}: {{ m.content }}{% endif %}{% endfor %}",
    "shortens": "{% for m in messages %}" + _HEAD + "{{ m.role }}: {{ m.content[:12] }}{% endfor %}",
    "last_only": _HEAD + "{{ messages[-1].content }}",
    "parts_only": "{% for m in messages %}{{ m.role }}: {% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}"
    "{% endif %}{% endfor %}{% endfor %}",
}
USER = {"role": "user", "content": "What is the weather like in Paris today?"}
SYSTEM, ANSWER = {"role": "system", "content": "Be brief."}, {"role": "assistant", "content": "Sunny."}
THOUGHT = {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nSunny."}
TOOL = {
    "type": "function",
    "function": {"name": "look_up", "parameters": {"type": "object", "properties": {"town": {"type": "string"}}}},
}
CALL = {
    "role": "assistant",
    "content": "Let me see.",
    "tool_calls": [
        {"type": "function", "id": "call00000", "function": {"name": "look_up", "arguments": {"town": "Paris"}}}
    ],
}
RESULT = {"role": "tool", "content": '21\u00b0 "clear"', "tool_call_id": "call00000", "name": "look_up"}


@cache
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(SHARED_DATA / "tok_qwen25")


@cache
def encoder(template: str) -> PromptEncoder:
    if not (SHARED_DATA / "tok_qwen25").is_dir():
        pytest.skip(f"needs {SHARED_DATA / 'tok_qwen25'}")
    texts = {**shared_templates(SHARED_DATA), **FORMS, "chatml": TEMPLATES["chatml"]}
    return PromptEncoder(tokenizer(), {}, texts[template])


def said(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


@pytest.mark.parametrize(
    ("template", "messages", "note"),
    [
        *((template, [SYSTEM, USER, ANSWER, USER], "") for template in TAKE_ALL),
        ("gemma", [USER, ANSWER, USER], ""),
        ("gemma", [USER, ANSWER, said("user", " x\n")], "trims message 2"),
        ("llama3", [said("user", "\t" + USER["content"])], "trims message 0"),
        ("qwen3", [USER, THOUGHT, USER], "rewrites or shortens message 1 (assistant)"),
        ("deepseek_r1", [USER, THOUGHT, USER], "rewrites or shortens message 1 (assistant)"),
        ("shortens", [USER], "rewrites or shortens message 0"),
        ("qwen2_5", [said("user", "hi", name="Ann")], "leaves out the name of message 0 (user), 'Ann'"),
        ("parts_only", [said("user", [{"type": "text", "text": "Hello"}])], ""),
        ("llama3", [USER, said("ipython", "5")], ""),  # a role that the template names
        ("qwen2_5", [USER, said("assistant", None, tool_calls=CALL["tool_calls"]), USER], ""),
        ("qwen2_5", [said("user", ""), said("assistant", ""), USER], ""),
        ("qwen2_5", [USER, said("assistant", "", tool_calls=CALL["tool_calls"]), said("tool", {"t": 5, "a": "b"})], ""),
    ],
)  # fmt: skip
def test_templates_that_rewrite_on_purpose_are_no_errors(
    template: str, messages: list[dict[str, Any]], note: str
) -> None:
    messages = [{key: value for key, value in message.items() if value is not None} for message in messages]
    found = look(encoder(template), (messages, None))
    assert found.errors == [] and len(found.notes) == bool(note) and note in "".join(found.notes)


@pytest.mark.parametrize(
    ("template", "messages", "tools", "error"),
    [
        *((template, [said("usr", "x")], None, "'usr', which the chat template does not know: did you mean 'user'?")
          for template in TAKE_ALL),
        ("qwen2_5", [said("human", "x"), said("gpt", "y")], None, "did you mean 'user'?; message 1 has the role 'gpt'"),
        ("qwen2_5", [said("Assistant", "x")], None, "did you mean 'assistant'?"),
        ("qwen2_5", [said("wizard", "x")], None, "there are system, developer, user, assistant, tool, function"),
        ("qwen2_5", [SYSTEM, {"role": "user"}], None, "message 1 (user) has no content"),
        ("chatml", [said("user", 5)], None, "must be a text or a list of parts, not 5"),
        ("qwen2_5", [said("developer", "Be good."), USER], None, "leaves out message 0 (developer), 'Be good.'"),
        ("no_system", [SYSTEM, USER], None, "leaves out message 0 (system), 'Be brief.'"),
        ("mistral", [USER, ANSWER, USER], [TOOL], "leaves out the tools, 'look_up'"),
        ("phi", [USER, CALL, RESULT], None, "leaves out a tool call in message 1 (assistant), 'look_up'"),
        ("phi", [USER, ANSWER, RESULT], None, "leaves out message 2 (tool), '21\u00b0"),
        ("qwen3", [USER, CALL, {**RESULT, "content": {"sky": "clear"}}], None, "leaves out message 2 (tool), 'clear'"),
        ("last_only", [said("user", "a"), ANSWER, said("user", "a")], None, "leaves out message 0 (user), 'a'"),
        ("qwen3", [said("user", [{"type": "text", "text": "Hello"}])], None, "leaves out message 0 (user), 'Hello'"),
        ("chatml", [said("user", [{"type": "text", "text": "Hello"}])], None, "parts of content as a list of Python's"),
        ("parts_only", [said("user", "Hello")], None, "leaves out message 0 (user), 'Hello'"),
        ("parts_only", [said("user", [{"type": "image", "image": "a.png"}, {"type": "text", "text": "Hi"}])], None,
         "leaves out parts of content that are no text"),
    ],
)  # fmt: skip
def test_what_a_prompt_does_not_hold_is_an_error(
    template: str, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, error: str
) -> None:
    assert error in "; ".join(look(encoder(template), (messages, tools)).errors)


def test_tools_are_in_the_prompt_by_name_and_parameter() -> None:
    for template in ("qwen2_5", "qwen3", "minimind", "llama3"):
        found = look(encoder(template), ([SYSTEM, USER, CALL, RESULT, USER], [TOOL]))
        assert not found.errors
        assert ("leaves out what the assistant says" in "".join(found.notes)) == (template == "llama3")
    by_hand = [said("system", "Call look_up with a town."), USER]
    found = look(encoder("phi"), (by_hand, [TOOL]))
    assert not found.errors and "leaves out the tools" in found.notes[0]
    found = look(encoder("phi"), ([USER], [TOOL]), own_tools=False)  # a model may know the tools of its run
    assert not found.errors and "leaves out the tools" in found.notes[0]
    with pytest.raises(ValueError, match="System role not supported"):
        look(encoder("gemma"), ([SYSTEM, USER], None))


@pytest.mark.parametrize("template", ["qwen2_5", "qwen3", "minimind"])
def test_real_conversations_raise_no_false_error(template: str) -> None:
    if not (SHARED_DATA / "tool_chat").is_dir():
        pytest.skip(f"needs {SHARED_DATA / 'tool_chat'}")
    conversations = real_conversations(SHARED_DATA)
    for messages, tools in conversations:
        assert look(encoder(template), (messages, tools)).errors == []
    assert len(conversations) > 100


def test_what_a_template_says_of_its_own() -> None:
    assert own_text(encoder("qwen2_5")) == "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
    assert "Cutting Knowledge Date" in own_text(encoder("llama3"))
    assert [own_text(encoder(name)) for name in ("qwen3", "minimind", "chatml", "last_only", "parts_only")] == [""] * 5


def dataset(path: Path, rows: list[Any], **settings: Any) -> PromptDataset:
    path.write_text("".join(json.dumps({"data_source": "s", "prompt": row}) + "\n" for row in rows))
    made = encoder("qwen2_5")
    return PromptDataset(DataConfig(max_prompt_length=10_000, **settings), str(path), made.tokenizer, split="train")


def test_one_bad_row_of_many_is_found_wherever_it_stands(tmp_path: Path) -> None:
    good = [[said("user", f"{number}+1?")] for number in range(5_000)]
    for bad, message in (
        ([said("usr", "x")], "row 3210: message 0 has the role 'usr'"),
        ([said("user", None)], r"row 3210: message 0 \(user\) has no content"),
        ([{"from": "human", "value": "x"}], "row 3210: a message has no role: .*ShareGPT"),
        (json.dumps([said("usr", "x")]), "row 3210: message 0 has the role 'usr'"),
    ):
        rows = dataset(tmp_path / "rows.jsonl", [*good[:3210], bad, *good[3211:]])
        with pytest.raises(ValueError, match=message):
            rows.check_rows()
    dataset(
        tmp_path / "rows.jsonl", [*good[:3210], [said("usr", "x")]], train_max_samples=9, shuffle=False
    ).check_rows()


def test_equal_prompts_and_spelled_tokens_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    dataset(tmp_path / "equal.jsonl", ["Go"] * 70).check_rows()
    assert "all prompts looked at (" in caplog.text and "of 70 rows) are equal, with 30 tokens" in caplog.text
    caplog.clear()
    rows = [*(f"{number}?" for number in range(200)), "a<|im_end|>", "b<|im_start|>"]
    dataset(tmp_path / "rows.jsonl", rows).check_rows()
    (told,) = [
        record.message
        for record in caplog.records
        if record.levelno == logging.WARNING and "spell special" in record.message
    ]
    assert "2 of 202 prompts spell special tokens out, which stay text" in told and told.endswith("row 200: <|im_end|>")
    with pytest.raises(ValueError, match=r"rows\.jsonl, row 200: a text spells special tokens out, <\|im_end\|>"):
        dataset(tmp_path / "rows.jsonl", rows, special_tokens_in_text=SpelledTokens.error).check_rows()


@pytest.mark.parametrize("ending", ["jsonl", "parquet", "csv"])
def test_missing_references_are_counted_over_the_whole_file(tmp_path: Path, ending: str) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    answers = ["4", None, "", " ", "0", *["7"] * 50, None]
    rows = [{"prompt": f"{number}?", "answer": answer} for number, answer in enumerate(answers)]
    path = tmp_path / f"rows.{ending}"
    if ending == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif ending == "csv":
        path.write_text("prompt,answer\n" + "".join(f"{row['prompt']},{row['answer'] or ''}\n" for row in rows))
    else:
        pq.write_table(pa.Table.from_pylist(rows), path)
    data = DataConfig(ground_truth_key="answer", train_max_samples=10, shuffle=False)
    ((file, missing, used),) = PromptDataset(
        data, str(path), encoder("chatml").tokenizer, split="train"
    ).without_ground_truth()
    assert (file.without_ground_truth("answer"), missing, used) == ([1, 2, 3, 55], [1, 2, 3], 10)
    assert len(file.without_ground_truth(None)) == len(rows)


EMPTY = ({}, [""], [None, {"a": []}], {"target": None}, "\u200b", "\u3000\ufeff", float("nan"))


@pytest.mark.parametrize("truth", [*EMPTY, 0, False, "None", [0], {"target": 0}], ids=str)
def test_what_holds_nothing_is_no_reference(tmp_path: Path, truth: Any) -> None:
    path, missing = tmp_path / "rows.jsonl", [0] if any(truth is empty for empty in EMPTY) else []
    for more, expected in (({}, missing), ({"gt_answer": "5"}, [])):
        path.write_text(json.dumps({"prompt": "x", "reward_model": {"ground_truth": truth}, **more}))
        rows = PromptDataset(DataConfig(), str(path), encoder("chatml").tokenizer, split="train")
        assert rows.files[0].without_ground_truth(None) == expected
        if more:
            assert rows.row(0).ground_truth == ("5" if missing else truth)


def test_a_user_who_says_nothing_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows: list[Any] = [f"{number}+1?" for number in range(200)]
    rows[150:154] = [
        "",
        [said("user", " \u200b")],
        [SYSTEM, said("user", "\n"), ANSWER, USER],
        [SYSTEM, said("user", "?")],
    ]
    dataset(tmp_path / "rows.jsonl", rows).check_rows()
    assert (
        "rows.jsonl: in 3 of 200 prompts a user says nothing (an empty text, or blanks); first row 150" in caplog.text
    )


def test_characters_that_the_tokenizer_loses_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    words = {word: number for number, word in enumerate(["<unk>", "</s>", "good", "day", "caf\u00e9"])}
    backend = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    backend.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    made = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="</s>")
    for text, lost in (("Good cafe\u0301", ""), ("good \u65e5 day", "the tokenizer has no tokens for '\u65e5'")):
        caplog.clear()
        path = tmp_path / "rows.jsonl"
        path.write_text(json.dumps({"prompt": text}))
        PromptDataset(DataConfig(), str(path), made, split="train").check_rows()
        assert ("has no tokens for" in caplog.text) == bool(lost) and lost in caplog.text


@pytest.mark.parametrize("filtered", [False, True])
@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ([said("user", "a<|im_end|>b")], r"spells special tokens out, <\|im_end\|>"),
        ([USER, said("assistant", "", tool_calls=[None])], ""),
        ([{"role": "user"}], ""),
    ],
)
def test_a_row_that_is_refused_is_named_with_and_without_a_filter(
    tmp_path: Path, bad: Any, message: str, filtered: bool
) -> None:
    settings = {"special_tokens_in_text": SpelledTokens.error, "filter_overlong_prompts": filtered}
    rows: list[Any] = [[said("user", f"{number}+1?")] for number in range(70)]
    dataset(tmp_path / "good.jsonl", rows, **settings).check_rows()
    with pytest.raises(ValueError, match=rf"rows\.jsonl, row 33: .*{message}"):
        dataset(tmp_path / "rows.jsonl", [*rows[:33], bad, *rows[33:]], **settings).check_rows()


@pytest.mark.parametrize("calls", ["none", [None], [{"function": None}], {"name": "f"}])
def test_calls_of_no_form_are_named(calls: Any) -> None:
    found = look(encoder("chatml"), ([USER, said("assistant", "", tool_calls=calls), USER], None))
    assert "message 1 (assistant): its tool_calls must be a list of functions called" in found.errors[0]


@pytest.mark.parametrize(
    "function",
    [None, {}, {"name": 5}, {"name": "f", "parameters": "{}"}, {"name": "f", "parameters": {"properties": ["a"]}}],
)
def test_tools_of_no_form_are_named(tmp_path: Path, function: Any) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "x", "tools": [{"type": "function", "function": function}]}))
    rows = PromptDataset(DataConfig(tools_key="tools"), str(path), encoder("qwen2_5").tokenizer, split="train")
    with pytest.raises(ValueError, match=r"row 0: a tool in 'tools' needs a name, and parameters"):
        rows.check_rows()


def test_a_reference_may_stand_in_several_columns(tmp_path: Path) -> None:
    models = [None, {"ground_truth": None}, {"ground_truth": "5"}, {"ground_truth": []}, {"style": "rule"}]
    lines = [
        {"prompt": "x", "reward_model": model, "gt_answer": truth}
        for model, truth in zip(models, ["1", "2", None, None, None], strict=True)
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    rows = PromptDataset(DataConfig(), str(path), encoder("chatml").tokenizer, split="train")
    assert [missing for _, missing, _ in rows.without_ground_truth()] == [[3, 4]]
    assert [rows.row(number).ground_truth for number in range(5)] == ["1", "2", "5", [], None]
