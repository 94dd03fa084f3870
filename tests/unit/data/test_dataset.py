"""PromptDataset: files in verl's schema, chat templates, truncation, filtering, sampling, clear errors."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest

from tests.unit.data.factory import SHARED_DATA, CharTokenizer, text_of, write_parquet, write_prompts
from verl_like.config import CustomClassConfig, DataConfig
from verl_like.data.dataset import PromptDataset
from verl_like.data.foreign import build_dataset
from verl_like.models import images

PROMPTS = [f"{i}+1=" for i in range(10)]


def make_dataset(files: str | list[str], split: str = "train", template: bool = True, **data: Any) -> PromptDataset:
    return PromptDataset(DataConfig(**data), files, CharTokenizer(template), split=split)


def texts(dataset: PromptDataset) -> list[str]:
    return [text_of(dataset[i][0]) for i in range(len(dataset))]


def load_tokenizer(name: str) -> Any:
    folder = SHARED_DATA / name
    if not folder.exists():
        pytest.skip(f"{folder} is not there")
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def shared_file(name: str) -> str:
    path = SHARED_DATA / name
    if not path.exists():
        pytest.skip(f"{path} is not there")
    return str(path)


def test_a_row_becomes_tokens_and_plain_python(tmp_path: Path) -> None:
    row = {
        "data_source": "s",
        "prompt": [{"role": "system", "content": "be"}, {"role": "user", "content": "hi"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": {"numbers": [1, 2], "target": 3.5}},
        "extra_info": {"index": 7, "names": ["a"], "nested": {"flag": True}},
    }
    ids, got = make_dataset(write_parquet(tmp_path / "a.parquet", [row]))[0]
    assert text_of(ids) == "system:be|user:hi|assistant:"
    assert (got.index, got.data_source, got.ability) == (0, "s", "math")
    assert got.messages == row["prompt"]
    assert got.ground_truth == {"numbers": [1, 2], "target": 3.5}
    assert got.extra_info == {"index": 7, "names": ["a"], "nested": {"flag": True}}
    assert type(got.ground_truth["numbers"]) is list and type(got.extra_info["index"]) is int


@pytest.mark.parametrize("form", ["parquet", "jsonl"])
def test_a_row_of_any_format_names_its_agent(tmp_path: Path, form: str) -> None:
    rows = [{"data_source": "s", "prompt": "1", "reward_model": {"ground_truth": "2"}, "agent_name": "tool_agent"}]
    rows.append({**rows[0], "agent_name": None})
    path = tmp_path / f"x.{form}"
    if form == "parquet":
        write_parquet(path, rows)
    else:
        path.write_text("\n".join(map(json.dumps, rows)))
    dataset = make_dataset(str(path))
    assert [dataset[i][1].agent for i in range(2)] == ["tool_agent", ""]
    assert dataset.agents() == ["", "tool_agent"]


def test_keys_that_only_other_rows_messages_have_are_dropped(tmp_path: Path) -> None:
    prompts = [
        [{"role": "user", "content": "a"}],
        [{"role": "user", "content": "b", "name": "ann"}],
    ]
    rows = [{"data_source": "s", "prompt": p, "reward_model": {"ground_truth": "1"}} for p in prompts]
    dataset = make_dataset(write_parquet(tmp_path / "a.parquet", rows))
    assert [dataset[i][1].messages for i in range(2)] == prompts


def test_what_the_model_graders_and_tools_are_given_is_what_was_written(tmp_path: Path) -> None:
    """The real template, on rows whose tools, calls and arguments differ; a table gives what the lines give."""
    rows = []
    for name, properties, arguments, extra in (
        ("weather", {"city": {"type": "string"}}, {"city": "Rome"}, {"weather": {"create_kwargs": {"unit": "C"}}}),
        ("sum", {"x": {"type": "number", "enum": [1.5, None]}}, {"x": [None]}, {"sum": {"create_kwargs": {"of": 2}}}),
    ):
        call = {"type": "function", "function": {"name": name, "arguments": arguments}}
        schema = {"name": name, "description": "d", "parameters": {"type": "object", "properties": properties}}
        messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
        rows.append(
            {
                "data_source": "s",
                "prompt": [*messages, {"role": "tool", "content": "ok"}, {"role": "user", "content": "!"}],
                "reward_model": {"style": "rule", "ground_truth": arguments},
                "extra_info": {"tools_kwargs": extra},
                "tools": [{"type": "function", "function": schema}],
            }
        )
    lines = tmp_path / "a.jsonl"
    lines.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer, data = load_tokenizer("tok_qwen25"), DataConfig(tools_key="tools")
    table = write_parquet(tmp_path / "a.parquet", rows)
    one, other = (PromptDataset(data, str(file), tokenizer, split="train") for file in (table, lines))
    assert [one[i] for i in range(2)] == [other[i] for i in range(2)]
    assert [one[i][1].extra_info for i in range(2)] == [row["extra_info"] for row in rows]
    assert '{"name": "weather", "arguments": {"city": "Rome"}}' in tokenizer.decode(one[0][0])
    assert '"properties": {"x": {"type": "number", "enum": [1.5, null]}}' in tokenizer.decode(one[1][0])


def test_half_a_surrogate_pair_in_json_text_is_told_once_a_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tool = json.dumps([{"name": "f", "description": "cut \ud83d", "default": None}])
    row = {"data_source": "s", "tools": tool, "reward_model": {"ground_truth": "1"}}
    prompts = [json.dumps([{"role": "user", "content": text}]) for text in ("whole", "cut \ude00", "cut \ud83d")]
    file = write_parquet(tmp_path / "a.parquet", [row | {"prompt": prompt} for prompt in prompts])
    dataset = make_dataset(file, tools_key="tools", system_prompt="half \ud83d")
    assert [dataset.row(i).messages[1]["content"] for i in range(3)] == ["whole", "cut \ufffd", "cut \ufffd"]
    assert dataset.row(0).messages[0]["content"] == "half \ufffd"
    assert dataset.row(0).tools == [{"name": "f", "description": "cut \ufffd", "default": None}]
    told = [record.getMessage().partition(" (perhaps")[0] for record in caplog.records if "half of" in record.message]
    assert told == ["data.system_prompt", f"{file}, row 0"]


def test_messages_as_json_text_are_messages_and_other_texts_are_not(tmp_path: Path) -> None:
    rows = [{"prompt": '[{"role": "user", "content": "1+1="}]'}, {"prompt": '[{"a": 1}]'}, {"prompt": '[{"role": "us'}]
    dataset = make_dataset(write_parquet(tmp_path / "t.parquet", rows))
    assert texts(dataset) == ["user:1+1=|assistant:", 'user:[{"a": 1}]|assistant:', 'user:[{"role": "us|assistant:']


def test_several_files_with_different_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = write_prompts(tmp_path / "a.parquet", PROMPTS[:3])
    row = {"data_source": "other", "prompt": "plain text", "reward_model": {"ground_truth": 5}, "nums": [1]}
    write_parquet(tmp_path / "b.parquet", [row] * 2)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    dataset = make_dataset([first, "b.parquet", "~/a.parquet"])
    assert len(dataset) == 8
    assert dataset[3][1].messages == [{"role": "user", "content": "plain text"}]
    assert [dataset[i][1].ground_truth for i in range(8)] == ["0", "1", "2", 5, 5, "0", "1", "2"]
    assert [dataset[i][1].index for i in range(8)] == list(range(8))
    assert sorted(set(dataset.domains())) == ["arithmetic", "other"]


def test_countdown_files_of_others_load_as_they_are() -> None:
    files = [shared_file("countdown/countdown_train.parquet"), shared_file("countdown/countdown_test.parquet")]
    tokenizer = load_tokenizer("tok_qwen25")
    dataset = PromptDataset(DataConfig(max_prompt_length=400), files, tokenizer, split="train")
    assert len(dataset) == 10002
    assert sorted(set(dataset.domains())) == ["countdown"]
    ids, row = dataset[8001]
    assert row.ground_truth == {"numbers": [96, 7, 37, 74], "target": 55}
    assert row.extra_info == {"index": 0, "split": "test"}
    assert "Using the numbers [96, 7, 37, 74], create an equation that equals 55." in tokenizer.decode(ids)


def test_the_real_qwen_chat_template(tmp_path: Path) -> None:
    tokenizer = load_tokenizer("tok_qwen25")
    files = write_prompts(tmp_path / "a.parquet", ["What is 2+2?"])
    ids, _ = PromptDataset(DataConfig(), files, tokenizer, split="train")[0]
    assert tokenizer.decode(ids) == (
        "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n"
        "<|im_start|>user\nWhat is 2+2?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert ids.count(tokenizer.convert_tokens_to_ids("<|im_start|>")) == 3  # special tokens, not their letters
    minimind = load_tokenizer("tok_minimind")
    opened, closed = (
        minimind.decode(
            PromptDataset(DataConfig(apply_chat_template_kwargs=kwargs), files, minimind, split="train")[0][0]
        )
        for kwargs in ({"open_thinking": True}, {})
    )
    assert opened != closed and "What is 2+2?" in opened


def test_template_kwargs_are_passed_and_checked(tmp_path: Path) -> None:
    files = write_prompts(tmp_path / "a.parquet", ["x"])
    assert texts(make_dataset(files, apply_chat_template_kwargs={"mark": "#"})) == ["user:x#assistant:"]
    with pytest.raises(ValueError, match=r"a\.parquet, row 0: the chat template refused"):
        texts(make_dataset(files, apply_chat_template_kwargs={"nonsense": 1}))


def test_a_tokenizer_without_template_takes_a_single_user_message(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = write_prompts(tmp_path / "a.parquet", PROMPTS)
    with caplog.at_level(logging.WARNING, "verl_like"):
        assert texts(make_dataset(files, template=False))[3] == "\x023+1="
    assert caplog.text.count("no chat template") == 1
    chat = [{"role": "system", "content": "be"}, {"role": "user", "content": "hi"}]
    row = {"data_source": "s", "prompt": chat, "reward_model": {"ground_truth": "1"}}
    with pytest.raises(
        ValueError, match=r"row 0: the tokenizer has no chat template.*'system', 'user'.*data\.tokenizer"
    ):
        texts(make_dataset(write_parquet(tmp_path / "b.parquet", [row]), template=False))


def test_base_models_get_their_bos() -> None:
    tokenizer = load_tokenizer("stories260k/hf")
    files = shared_file("arithmetic_sequence/train.parquet")
    ids, row = PromptDataset(DataConfig(), files, tokenizer, split="train")[0]
    assert row.messages == [{"role": "user", "content": "8,3:9,4"}]
    assert ids == tokenizer("8,3:9,4")["input_ids"] and ids[0] == tokenizer.bos_token_id


@pytest.mark.parametrize(
    ("how", "expected"), [("left", "56789"), ("right", "01234"), ("middle", "01789"), ("error", None)]
)
def test_truncation(tmp_path: Path, how: str, expected: str | None) -> None:
    files = write_prompts(tmp_path / "a.parquet", ["123456789", "5"])
    dataset = make_dataset(files, template=False, truncation=how, max_prompt_length=5)
    if expected is None:
        with pytest.raises(ValueError, match=r"row 0: the prompt has 10 tokens.*data\.max_prompt_length=5"):
            dataset[0]
    else:
        assert text_of(dataset[0][0]) == expected.replace("0", "\x02")
    assert text_of(dataset[1][0]) == "\x025"  # short ones are left alone


@pytest.mark.parametrize("workers", [1, 2])
def test_overlong_prompts_are_dropped_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, workers: int
) -> None:
    prompts = [str(i) * (1 + i % 5) for i in range(1500 if workers > 1 else 30)]
    files = write_prompts(tmp_path / "a.parquet", prompts)
    limit = {"filter_overlong_prompts": True, "max_prompt_length": 6, "filter_overlong_prompts_workers": workers}
    with caplog.at_level(logging.INFO, "verl_like"):
        dataset = make_dataset(files, template=False, **limit)
    kept = [prompt for prompt in prompts if len(prompt) + 1 <= 6]
    assert 0 < len(kept) < len(prompts)
    assert texts(dataset) == ["\x02" + prompt for prompt in kept]
    assert f"{len(prompts) - len(kept)} of {len(prompts)} prompts are longer" in caplog.text
    assert prompts[dataset[len(dataset) - 1][1].index] == kept[-1]  # the index counts dropped rows too
    with pytest.raises(ValueError, match=r"data\.train_files: no prompt is left.*max_prompt_length=1"):
        make_dataset(files, template=False, filter_overlong_prompts=True, max_prompt_length=1)


def test_max_samples(tmp_path: Path) -> None:
    files = write_prompts(tmp_path / "a.parquet", PROMPTS)
    assert texts(make_dataset(files, template=False, train_max_samples=3, shuffle=False)) == [
        "\x02" + prompt for prompt in PROMPTS[:3]
    ]
    random_rows = [[row.index for _, row in make_dataset(files, train_max_samples=4, seed=s)] for s in (0, 0, 1)]
    assert random_rows[0] == random_rows[1] != random_rows[2]
    assert len(set(random_rows[0])) == 4
    assert len(make_dataset(files, train_max_samples=99)) == 10
    assert len(make_dataset(files, split="val", train_max_samples=3, val_max_samples=5)) == 5


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"prompt_key": "question"}, r"no column 'question' \(it has: data_source, prompt, .*Set data\.prompt_key"),
        ({"reward_fn_key": "source"}, r"no column 'source' \(it has: data_source, prompt, .*Set data\.reward_fn_key"),
    ],
)
def test_missing_columns_name_file_columns_and_key(tmp_path: Path, data: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=r"a\.parquet has " + message):
        make_dataset(write_prompts(tmp_path / "a.parquet", PROMPTS), **data)


def test_a_file_without_data_source_is_taken_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "verl_like"):
        dataset = make_dataset(shared_file("arithmetic_sequence/train.parquet"))
    assert len(dataset) == 800
    _, row = dataset[0]
    assert (row.data_source, row.ground_truth, row.extra_info) == ("unknown", None, {})
    assert sorted(set(dataset.domains())) == ["unknown"]
    assert "no column 'data_source' (it has: prompt)" in caplog.text and "data.reward_fn_key" in caplog.text
    assert "no column 'reward_model'" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING, "verl_like"):
        named = make_dataset(shared_file("arithmetic_sequence/train.parquet"), default_data_source="numbers")
    assert set(named.domains()) == {"numbers"} and "no column 'data_source'" not in caplog.text


def test_other_keys(tmp_path: Path) -> None:
    row = {"question": "why", "grader": "g", "reward_model": {"ground_truth": None}}
    dataset = make_dataset(write_parquet(tmp_path / "a.parquet", [row]), prompt_key="question", reward_fn_key="grader")
    assert dataset[0][1].data_source == "g"


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "text.parquet").write_text("not parquet")
    (tmp_path / "rows.arrow").write_text("{}")
    for name, message in [
        ("absent.parquet", r"data\.train_files: there is no file .*absent\.parquet"),
        (".", r"data\.train_files: .* is a folder"),
        ("text.parquet", r"data\.train_files: .*text\.parquet is not a parquet file"),
        ("rows.arrow", r"data\.train_files: .*rows\.arrow is not an arrow file"),
    ]:
        with pytest.raises(ValueError, match=message):
            make_dataset(os.path.join(tmp_path, name))
    (tmp_path / "none.jsonl").write_text("\n")
    with pytest.raises(ValueError, match=r"data\.train_files: .*none\.jsonl is empty"):
        make_dataset(str(tmp_path / "none.jsonl"))
    with pytest.raises(ValueError, match=r"data\.val_files is empty"):
        make_dataset([], split="val")


def test_bad_prompts(tmp_path: Path) -> None:
    for prompt, message in [([], "must be a list"), (3, "must be a list"), ([{"content": "x"}], "has no role")]:
        row = {"data_source": "s", "prompt": prompt, "reward_model": {"ground_truth": "1"}}
        with pytest.raises(ValueError, match=rf"a\.parquet, row 0: .*{message}"):
            texts(make_dataset(write_parquet(tmp_path / "a.parquet", [row])))


def test_images_are_carried_as_handles(tmp_path: Path) -> None:
    row = {"data_source": "s", "prompt": "x", "reward_model": {"ground_truth": "1"}}
    empty = write_parquet(tmp_path / "a.parquet", [{**row, "images": []}, {**row, "images": None}])
    assert (make_dataset(empty).num_media(), make_dataset(empty)[0][1].media) == (0, [])
    pixels = [{"bytes": b"\x89PNG", "path": None}, {"bytes": b"GIF", "path": None}]
    shown = {**row, "prompt": "a <image> and <image>?"}
    full = write_parquet(tmp_path / "b.parquet", [row | {"images": None}, shown | {"images": pixels}])
    dataset = PromptDataset(DataConfig(), [empty, full], AnyTokenizer(), split="train")
    assert dataset.num_media() == 1
    got = dataset[3][1]
    assert got.messages[0]["content"] == [
        {"type": "text", "text": "a "},
        {"type": "image"},
        {"type": "text", "text": " and "},
        {"type": "image"},
        {"type": "text", "text": "?"},
    ]
    assert [images.read(handle, images.cell_of(handle)) for handle in got.media] == [b"\x89PNG", b"GIF"]
    assert [(handle.kind, handle.number) for handle in got.media] == [("image", 0), ("image", 1)]
    wrong = PromptDataset(DataConfig(image_key="pictures"), full, AnyTokenizer(), split="train")
    assert wrong.num_media() == 0
    with pytest.raises(ValueError, match=r"has <image>, but the file has no column 'pictures' \(data\.image_key\)"):
        wrong.check_rows()
    bare = write_parquet(tmp_path / "c.parquet", [shown])  # <image> in a programming task: nobody asked for a column
    PromptDataset(DataConfig(), bare, AnyTokenizer(), split="train").check_rows()
    plain = PromptDataset(DataConfig(image_key=None), full, AnyTokenizer(), split="train")
    plain.check_rows()
    assert plain[1][1].messages == [{"role": "user", "content": "a <image> and <image>?"}]


def test_media_in_json_and_tags_that_do_not_match(tmp_path: Path) -> None:
    lines = [
        {"prompt": "<video>", "videos": ["a.mp4"], "reward_model": {"ground_truth": "1"}},
        {"prompt": "<image>", "images": [], "reward_model": {"ground_truth": "1"}},
        {"prompt": "<image>", "images": ["a.png", "b.png"], "reward_model": {"ground_truth": "1"}},
    ]
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines))
    dataset = PromptDataset(DataConfig(), str(path), AnyTokenizer(), split="train")
    assert [handle.source for handle in dataset[0][1].media] == ["a.mp4"]
    assert dataset[1][1].messages[0]["content"] == "<image>"  # text about tags, in a row without images
    with pytest.raises(ValueError, match=r"a\.jsonl, row 2: the prompt has 1 <image> tags, but the row has 2 images"):
        dataset[2]


class AnyTokenizer(CharTokenizer):
    """Takes content parts too."""

    def apply_chat_template(self, messages: list[dict[str, Any]], **kwargs: Any) -> str:
        return str(messages)


def test_custom_class(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from verl_like.data.dataset import PromptDataset\n"
        "class Polite(PromptDataset):\n"
        "    def messages(self, row, place):\n"
        "        return [{'role': 'system', 'content': 'please'}, *super().messages(row, place)]\n"
        "class Other: pass\n"
    )
    files = write_prompts(tmp_path / "a.parquet", ["x"])

    def build(path: str, name: str | None) -> PromptDataset:
        data = DataConfig(custom_cls=CustomClassConfig(path=path, name=name))
        return build_dataset(data, files, CharTokenizer(), split="train")

    assert texts(build(str(tmp_path / "mine.py"), "Polite")) == ["system:please|user:x|assistant:"]
    assert texts(build(f"{tmp_path}/mine.py:Polite", None)) == ["system:please|user:x|assistant:"]
    for name, message in [
        ("Other", r"must define Other as a class derived"),
        ("Polit", r"custom_cls\.name=Polit: .*no such name 'Polit' \(it has: Polite, Other\)\. Did you mean 'Polite'"),
        (None, r"custom_cls\.name is not set"),
    ]:
        with pytest.raises(ValueError, match=message):
            build(str(tmp_path / "mine.py"), name)
    with pytest.raises(ValueError, match=r"data\.custom_cls\.path=.*no such file"):
        build(str(tmp_path / "absent.py"), "Polite")
    assert type(build_dataset(DataConfig(), files, CharTokenizer(), split="train")) is PromptDataset


def test_identity_follows_content_and_selection(tmp_path: Path) -> None:
    files = write_prompts(tmp_path / "a.parquet", PROMPTS)
    identity = make_dataset(files).identity()
    (tmp_path / "elsewhere").mkdir()
    moved = write_prompts(tmp_path / "elsewhere" / "a.parquet", PROMPTS)
    assert make_dataset(moved).identity() == identity
    assert make_dataset(files, train_max_samples=5).identity() != identity
    changed = write_prompts(tmp_path / "elsewhere" / "a.parquet", [*PROMPTS[:9], "9+2="])
    assert make_dataset(changed).identity() != identity


def test_colossal_rl_rows(tmp_path: Path) -> None:
    """One message as a dictionary, with gt_answer or test_cases."""
    cases = {"inputs": ["1\n"], "outputs": ["2\n"]}
    lines = [
        {"messages": {"role": "user", "content": "2+2?"}, "gt_answer": "4"},
        {"messages": {"role": "user", "content": "double"}, "test_cases": cases},
    ]
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines))
    dataset = make_dataset(str(path), messages_key="messages", default_data_source="mine", system_prompt="Be brief.")
    assert texts(dataset)[0] == "system:Be brief.|user:2+2?|assistant:"
    assert [dataset[i][1].ground_truth for i in range(2)] == ["4", cases]
    assert dataset.reward_styles() == [("mine", "")]
    with pytest.raises(ValueError, match=r"no column 'prompt'.*Set data\.prompt_key .* or data\.messages_key=messages"):
        make_dataset(str(path))


def test_a_question_and_answer_table(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text('question,answer,kind\n"1,000+1?",1001,sum\n')
    keys = {"prompt_key": "question", "ground_truth_key": "answer", "reward_fn_key": "kind"}
    _, row = make_dataset(str(path), **keys)[0]
    assert (row.messages[0]["content"], row.ground_truth, row.data_source) == ("1,000+1?", "1001", "sum")
    with pytest.raises(ValueError, match=r"no column 'anwser' .*did you mean 'answer'\?.*data\.ground_truth_key"):
        make_dataset(str(path), **(keys | {"ground_truth_key": "anwser"}))


def test_a_system_message_of_the_row_is_kept(tmp_path: Path) -> None:
    chat = [{"role": "system", "content": "own"}, {"role": "user", "content": "hi"}]
    rows = [{"data_source": "s", "prompt": p, "reward_model": {"ground_truth": "1"}} for p in (chat, chat[1:])]
    path = write_parquet(tmp_path / "a.parquet", rows)
    own, given = texts(make_dataset(path, system_prompt="boxed"))
    assert own.startswith("system:own|") and given.startswith("system:Reason step by step")


def test_named_templates(tmp_path: Path) -> None:
    tokenizer = load_tokenizer("tok_qwen25")
    files = write_prompts(tmp_path / "a.parquet", ["What is 2+2?"])

    def prompt(name: str) -> str:
        return tokenizer.decode(PromptDataset(DataConfig(chat_template=name), files, tokenizer, split="train")[0][0])

    assert prompt("qwen2_5") == prompt("native")  # our text of Qwen's format against Qwen's own
    assert prompt("none") == "What is 2+2?"
    assert prompt("chatml") == "<|im_start|>user\nWhat is 2+2?<|im_end|>\n<|im_start|>assistant\n"
    assert prompt("r1_zero").endswith("User: What is 2+2?\nAssistant: <think>")
    assert "<|start_header_id|>user<|end_header_id|>\n\nWhat is 2+2?<|eot_id|>" in prompt("llama3")
    assert prompt("gemma").endswith("<start_of_turn>user\nWhat is 2+2?<end_of_turn>\n<start_of_turn>model\n")
    (tmp_path / "mine.jinja").write_text("Q: {{ messages[0]['content'] }} A:")
    assert prompt(str(tmp_path / "mine.jinja")) == "Q: What is 2+2? A:"
    with pytest.raises(ValueError, match=r"data\.chat_template=.*absent\.jinja: there is no file"):
        prompt(str(tmp_path / "absent.jinja"))
    with pytest.raises(ValueError, match="chat_template='chatmll': choose one of native, none, chatml"):
        DataConfig(chat_template="chatmll")


def test_tools_of_a_row_reach_the_template(tmp_path: Path) -> None:
    tokenizer = load_tokenizer("tok_qwen25")
    tools = [{"type": "function", "function": {"name": "search", "parameters": {"type": "object"}}}]
    row = {"prompt": "find", "tools": tools, "reward_model": {"ground_truth": "1"}}
    (tmp_path / "a.jsonl").write_text(json.dumps(row))
    dataset = PromptDataset(DataConfig(tools_key="tools"), str(tmp_path / "a.jsonl"), tokenizer, split="train")
    ids, got = dataset[0]
    assert got.tools == tools and '"name": "search"' in tokenizer.decode(ids)


def test_prompt_ids_and_what_the_reward_function_gets(tmp_path: Path) -> None:
    row = {"data_source": "s", "prompt": "hi", "reward_model": {"ground_truth": "1"}, "id": 17}
    path = write_parquet(tmp_path / "a.parquet", [row | {"extra_info": {"own": 1}}])
    asked = {"return_raw_chat": True, "return_full_prompt": True, "return_raw_input_ids": True}
    _, got = make_dataset(path, prompt_id_key="id", max_prompt_id_length=2, **asked)[0]
    assert got.prompt_id == "17"
    assert got.extra_info == {
        "own": 1,
        "prompt_id": "17",
        "prompt_id_ids": [ord("1"), ord("7")],
        "raw_prompt": [{"role": "user", "content": "hi"}],
        "full_prompts": "user:hi|assistant:",
        "raw_input_ids": [ord("h"), ord("i")],
    }
    assert make_dataset(path)[0][1].extra_info == {"own": 1}
    with pytest.raises(ValueError, match=r"row 0: the prompt id '17' has 2 tokens.*max_prompt_id_length=1"):
        make_dataset(path, prompt_id_key="id", max_prompt_id_length=1)[0]


def test_named_validation_sets(tmp_path: Path) -> None:
    easy, hard = (write_prompts(tmp_path / f"{name}.parquet", PROMPTS) for name in ("easy", "hard"))
    dataset = PromptDataset(DataConfig(val_max_samples=3), {"easy": easy, "hard": [hard]}, CharTokenizer(), split="val")
    assert [dataset[i][1].validation_set for i in range(len(dataset))] == ["easy"] * 3 + ["hard"] * 3
    assert len(dataset) == 6  # the limit counts for each set


def test_what_a_start_reads_of_a_file_grows_as_its_rows_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted, not timed: lines parsed by all that a plan asks of a data set."""
    parse, calls = json.loads, 0

    def counted(text: Any) -> Any:
        nonlocal calls
        calls += 1
        return parse(text)

    monkeypatch.setattr("verl_like.data.rows.json.loads", counted)
    counts = []
    for num_rows in (2000, 4000, 6000):
        file = tmp_path / f"{num_rows}.jsonl"
        file.write_text(f"{json.dumps({'data_source': 's', 'prompt': '1+1=', 'reward_model': {}})}\n" * num_rows)
        calls = 0
        dataset = make_dataset(str(file))
        for ask in (dataset.check_rows, dataset.num_media, dataset.agents, dataset.reward_styles, dataset.domains):
            ask()
        counts.append(calls)
    assert counts[2] - counts[1] == counts[1] - counts[0] <= 8 * 2000
