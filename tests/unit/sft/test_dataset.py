"""All rows of a supervised run are looked at before it starts: what is wrong is told once, what is lost is counted."""

from __future__ import annotations

import json
import logging
import multiprocessing
import string
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conftest import ROOT, load_script
from tests.worlds.processes import forks
from verl_like.config import DataConfig, Truncation
from verl_like.config.errors import ConfigError
from verl_like.config.roles import ACTOR, roles_of
from verl_like.config.sft import SFTConfig
from verl_like.data import chat
from verl_like.data.templates import TEMPLATES
from verl_like.plugins.sft import dataset as module
from verl_like.plugins.sft.dataset import SFTDataset, batches_of
from verl_like.plugins.sft.start import shown
from verl_like.plugins.sft.turns import Row
from verl_like.trainer.build import prepare
from verl_like.trainer.compose import compose, compose_with_warnings


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """A token for each character, and chatml's marks."""
    made = load_script(ROOT / "recipes" / "quickstart" / "model.py", "quickstart_model").build_tokenizer(
        string.printable
    )
    made.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    made.chat_template = TEMPLATES["chatml"]
    return made


def talk(*texts: Any, **more: Any) -> list[dict[str, Any]]:
    """Messages of a user and an assistant by turns."""
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": text, **more} for i, text in enumerate(texts)]


def write(path: Path, *rows: Any) -> str:
    path.write_text("\n".join(json.dumps(row if isinstance(row, dict) else {"messages": row}) for row in rows))
    return str(path)


def dataset(tokenizer: Any, files: Any, sft: dict[str, Any] | None = None, **data: Any) -> SFTDataset:
    found = DataConfig(messages_key="messages", default_data_source="sft", **data)
    return SFTDataset(found, files, tokenizer, split="train", sft=SFTConfig(**(sft or {})))


def problem(made: SFTDataset) -> str:
    with pytest.raises(ConfigError) as caught:
        made.check_rows()
    return str(caught.value)


GOOD = talk("2+2=", "4")


def test_every_row_that_cannot_be_used_is_named_in_one_message(tmp_path: Path, tokenizer: Any) -> None:
    one = write(tmp_path / "one.jsonl", *[GOOD] * 5, [], GOOD, talk("x", None), talk("x", "y", train="false"))
    rows = [{"messages": GOOD, "tools": {"name": "x"}}, talk("x", "y" * 80), talk("x", "y" * 90), talk("x", "y" * 85)]
    two = write(tmp_path / "two.jsonl", GOOD, talk("x", "y" * 80), *rows, talk("x", 7))
    text = problem(dataset(tokenizer, [one, two], {"max_length": 60}))
    assert text.startswith("data.train_files: 9 of 16 rows cannot be used: correct them, or leave them out\n")
    long = f"{two}, row 1, row 3, row 4 and 1 more: the row has 101 tokens, more than sft.max_length=60. Raise it"
    assert long in text and "the longest row has 111 tokens" in text
    assert f"{one}, row 5: the prompt must be a list of {{'role', 'content'}} messages" in text
    assert f"{one}, row 7: message 1 (assistant) has no content (null, or no such key)" in text
    assert f"{one}, row 8: a message has train='false': it must be true or false" in text
    assert f"{two}, row 2: column 'tools' must hold a list of tool schemas" in text
    assert "row 6" not in text  # the fifth kind is the last that is told
    assert f"{two}, row 1: message 1 (assistant): its content must be a text" in problem(
        dataset(tokenizer, write(tmp_path / "two.jsonl", GOOD, talk("x", 7)))
    )


@pytest.mark.parametrize(
    ("sft", "cells", "fault"),
    [
        ({"mask_key": "mask"}, {"mask": None}, "sft.mask_key=mask: the row has no mask"),
        ({"mask_key": "mask"}, {"mask": "[0, 1]"}, "must have one of 0 and 1 for each of 2 messages"),
        ({}, {"enable_thinking": "false"}, "sft.enable_thinking_key=enable_thinking: 'false' must be true or false"),
    ],
)
def test_truth_values_are_no_texts(tmp_path: Path, tokenizer: Any, sft: Any, cells: Any, fault: str) -> None:
    good = {"messages": GOOD, "mask": [0, 1], "enable_thinking": 0}
    file = write(tmp_path / "rows.jsonl", good, {**good, **cells})
    assert f"{file}, row 1: " in (text := problem(dataset(tokenizer, file, sft))) and fault in text
    with pytest.raises(ValueError, match="row 1: .*" + fault.partition("'")[0]):
        dataset(tokenizer, file, sft).rows(1)


@pytest.mark.parametrize("key", ["response_key", "mask_key", "enable_thinking_key"])
def test_a_column_that_is_named_must_be_there(tmp_path: Path, tokenizer: Any, key: str) -> None:
    file = write(tmp_path / "rows.jsonl", {"messages": GOOD})
    with pytest.raises(ValueError, match=rf"sft\.{key}=thinkng: .* such( a)? column \((it has|they have): messages\)"):
        dataset(tokenizer, file, {key: "thinkng"})


def test_columns_of_a_prompt_and_its_answer_are_told_with_their_keys(
    tmp_path: Path, tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    file = write(tmp_path / "rows.jsonl", {"instruction": "1+1=", "input": "", "output": "2"})
    with pytest.raises(ValueError, match=r"no column 'messages'.*: data.prompt_key=instruction data.response_key=out"):
        dataset(tokenizer, file, {})
    found = DataConfig(prompt_key="instruction", default_data_source="sft")
    SFTDataset(found, file, tokenizer, split="train", sft=SFTConfig(response_key="output"))
    assert "data.train_files: the columns input are not read: put what they say into the prompt" in caplog.text


@pytest.mark.parametrize(
    ("messages", "fault"),
    [
        (talk("x", "y")[1:], "message 0 is the assistant's, and nothing asks for it"),
        ([*talk("x"), {"role": "assistant", "tool_calls": [{"id": "1"}]}], "functions called, each with its name"),
        ([{"role": "human", "content": "x"}, *talk("x", "y")], "did you mean 'user'?"),
    ],
)
def test_messages_that_nobody_can_learn_from_are_told(
    tmp_path: Path, tokenizer: Any, messages: Any, fault: str
) -> None:
    assert fault in problem(dataset(tokenizer, write(tmp_path / "rows.jsonl", GOOD, messages)))


def test_an_answer_that_is_no_text_is_told_by_its_column(tmp_path: Path, tokenizer: Any) -> None:
    file = write(tmp_path / "rows.jsonl", {"question": "2+2=", "answer": "4"}, {"question": "2+2=", "answer": 4})
    made = SFTDataset(
        DataConfig(prompt_key="question"), file, tokenizer, split="train", sft=SFTConfig(response_key="answer")
    )
    assert f"{file}, row 1: the column answer must hold a text or chat messages, not 4" in problem(made)


def test_rows_without_anything_to_train_are_left_out_and_counted(
    tmp_path: Path, tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [
        GOOD,
        talk("x"),
        talk("x" * 60, "y"),
        GOOD,
        talk("x", "y", train=False),
        talk("x" * 4, "yyyyy", "z" * 60, "y"),
    ]
    made = dataset(tokenizer, write(tmp_path / "rows.jsonl", *rows), {"max_length": 60}, truncation=Truncation.right)
    with caplog.at_level(logging.INFO):
        made.check_rows()
    assert [made[i][1].messages for i in range(len(made))] == [GOOD, GOOD, rows[5]]
    assert len(made) == made.identity()["rows"] == len(made.domains()) == 3
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warnings[0].splitlines()[0] == "data.train_files: 3 of 6 rows are left out"
    assert "row 1, row 4: no assistant's message is trained" in warnings[0]
    assert "row 2: data.truncation=right at sft.max_length=60 cuts the answers off" in warnings[0]
    assert "cuts 4 of 14 trained tokens off" in warnings[1]  # 2 of row 2, and the last turn of row 5
    assert "3 rows with 110 tokens, of which 10 are trained; the longest has 111" in caplog.text
    assert all(batch.response_mask_T.any() for batch, _ in batches_of(made, 1))
    dropped = dataset(
        tokenizer, write(tmp_path / "rows.jsonl", *rows), {"max_length": 60}, filter_overlong_prompts=True
    )
    dropped.check_rows()
    assert len(dropped) == 2 and "row 2, row 5: longer than sft.max_length=60" in caplog.text
    text = problem(dataset(tokenizer, write(tmp_path / "rows.jsonl", talk("x"))))
    assert "1 of 1 rows are left out" in text and "no others are there to train" in text


def test_empty_answers_are_trained_and_counted(
    tmp_path: Path, tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [talk("x", ""), GOOD, talk("x", "y", "z", ""), talk("x", "y", "z", "w"), [*talk("x"), *talk("x", "")[1:]]]
    made = dataset(tokenizer, file := write(tmp_path / "rows.jsonl", *rows))
    made.check_rows()
    (told,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert told.startswith("data.train_files: 3 rows have an empty answer, whose end alone is trained")
    assert told.endswith(f"{file}, row 0, row 2, row 4")
    (row,) = made.rows(0)
    assert tokenizer.convert_ids_to_tokens(row.ids[row.trained]) == ["<|im_end|>"]


def test_a_long_file_is_looked_at_in_several_processes(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [*(talk(f"{i}+0=", str(i)) for i in range(40)), talk("x", None), talk("x"), *[GOOD] * 40, talk("x", 7)]
    monkeypatch.setattr(module, "CHUNK", 3)
    monkeypatch.setattr(module, "_MANY", 50)
    monkeypatch.setattr(multiprocessing, "get_context", lambda _: forks())
    started = list[int]()
    monkeypatch.setattr(
        chat, "ProcessPoolExecutor", lambda number, *rest, **more: started.append(number) or POOL(number, *rest, **more)
    )
    found = [
        dataset(tokenizer, write(tmp_path / "rows.jsonl", *rows), filter_overlong_prompts_workers=workers)
        for workers in (1, 2)
    ]
    texts = [problem(made) for made in found]
    assert texts[0] == texts[1] and "2 of 83 rows cannot be used" in texts[0] and started == [2]
    assert "row 40: " in texts[0] and "row 82: " in texts[0]
    good = dataset(
        tokenizer, write(tmp_path / "rows.jsonl", *rows[:40], *rows[41:82]), filter_overlong_prompts_workers=2
    )
    with caplog.at_level(logging.INFO):
        good.check_rows()
    assert len(good) == 80 and "all 81 rows are encoded first" in caplog.text


POOL = chat.ProcessPoolExecutor


def test_a_row_is_encoded_once_while_there_is_room(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The look through all rows keeps what it made of them; of more than fit, the oldest are encoded again."""
    path, asked = write(tmp_path / "rows.jsonl", *(talk("ask", letter * 20) for letter in "abcdef")), list[int]()
    made = dataset(tokenizer, [path])
    made.check_rows()
    first = [made.rows(i)[0].ids.tolist() for i in range(6)]
    encode = module.encoded
    monkeypatch.setattr(module, "encoded", lambda *given: asked.append(1) or encode(*given))
    assert [made.rows(i)[0].ids.tolist() for i in range(6)] == first and not asked
    assert len({*map(tuple, first)}) == 6
    monkeypatch.setattr(module, "_KEPT", 3 * (len(first[0]) + 64))
    small = dataset(tokenizer, [path])
    small.check_rows()
    for order, encoded in (((3, 4, 5), 0), ((0, 1, 2), 3), ((2, 1, 0), 0), ((3,), 1)):
        asked.clear()
        assert [small.rows(i)[0].ids.tolist() for i in order] == [first[i] for i in order]
        assert len(asked) == encoded, order


def test_null_content_beside_calls_is_what_the_template_knows(tmp_path: Path, tokenizer: Any) -> None:
    """DeepSeek's templates tell a call by content that is none; others want an empty text, or arguments as text."""
    call = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    rows = [{"role": "user", "content": "x"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    made = dataset(
        tokenizer, write(tmp_path / "rows.jsonl", rows), chat_template=str(write_template(tmp_path / "calls.jinja"))
    )
    made.check_rows()
    assert (
        shown(made.rows(0)[-1], tokenizer)
        == '<|im_start|>user\nx<|im_end|><|im_start|>assistant\n\u27e6add{"a": 1}<|im_end|>\u27e7'
    )


def write_template(path: Path) -> Path:
    path.write_text(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.tool_calls and m.content is none %}"
        "{{ m.tool_calls[0].function.name + m.tool_calls[0].function.arguments }}{% else %}{{ '' + m.content }}"
        "{% endif %}<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    return path


def test_parts_that_a_template_writes_as_python_are_refused(tmp_path: Path, tokenizer: Any) -> None:
    parts = [{"type": "text", "text": "2+2="}]
    file = write(tmp_path / "rows.jsonl", [{"role": "user", "content": parts}, {"role": "assistant", "content": "4"}])
    made = dataset(tokenizer, file)
    with pytest.raises(ValueError, match="row 0: the chat template writes parts of content as a list of Python's"):
        made.check_rows()


def test_what_is_trained_stands_in_one_pair_of_brackets(tokenizer: Any) -> None:
    ids = np.array(tokenizer("abcdef", add_special_tokens=False)["input_ids"], np.int32)
    flags = np.array([False, True, True, False, True, True])
    assert shown(Row(ids=ids, trained=flags), tokenizer) == "a\u27e6bc\u27e7d\u27e6ef\u27e7"
    assert shown(Row(ids=ids, trained=~flags), tokenizer) == "\u27e6a\u27e7bc\u27e6d\u27e7ef"
    assert shown(Row(ids=ids, trained=flags | True), tokenizer) == "\u27e6abcdef\u27e7"


def test_a_start_counts_the_rows_that_are_left_and_tells_faults_of_both_sets(tmp_path: Path, tiny_model: Path) -> None:
    train = write(tmp_path / "train.jsonl", *[GOOD] * 5, talk("1+1="), GOOD)
    words = ["trainer.objective=sft", f"data.train_files={train}", f"model.path={tiny_model}", "trainer.launcher=local"]
    words += ["trainer.device=cpu", "data.train_batch_size=2", "trainer.total_epochs=1", "sft.max_length=64"]
    with ExitStack() as stack:
        facts = prepare(compose(words), stack)
        assert (len(facts.train), facts.plan.steps_per_epoch) == (6, 3)
        assert not {"rollout", "old log-probs"} & dict(facts.plan.rows()).keys()
    others = ["algorithm.adv_estimator=gae", "actor_rollout_ref.actor.use_kl_loss=true", "distillation.enabled=true"]
    config, warnings = compose_with_warnings([*words, *others, f"distillation.teacher_model.model_path={tiny_model}"])
    assert list(roles_of(config)) == [ACTOR] and "actor.use_kl_loss has no effect" in str(warnings)
    assert "distillation.enabled has no effect" in str(warnings)
    bad, best = write(tmp_path / "val.jsonl", GOOD, []), ["trainer.best_metric=val/los", "trainer.test_freq=1"]
    write(tmp_path / "train.jsonl", GOOD, GOOD, talk("1+1=", None))
    with ExitStack() as stack, pytest.raises(ConfigError) as caught:
        prepare(compose([*words, *best, f"data.val_files={bad}"]), stack)
    assert [text.partition(" rows ")[0] for text in caught.value.problems] == [
        "data.train_files: 1 of 3",
        "data.val_files: 1 of 2",
        "trainer.best_metric=val/los: a validation of this run gives val/loss, val-core/...",
    ]
