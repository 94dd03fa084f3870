"""Which tokens are trained, on real conversations and templates, beside what check-template's model would write."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from tests.unit.data.factory import SHARED_DATA
from tests.unit.episodes.conversations import real_conversations, shared_templates, tokenizer_for_all, trl_templates
from verl_like.data.chat import PromptEncoder
from verl_like.kit.verbs.template_cases import answer, as_written
from verl_like.plugins.sft.dataset import trained_turns
from verl_like.plugins.sft.turns import Row, fitted, rows_of

# template -> rows of its 25 turns: 7 where history stays as it was written, more where thoughts are dropped from it
TEMPLATES = {"minimind": 7, "qwen2_5": 7, "qwen3": 25}
OF_PEERS = {"gptoss": 21, "gemma4": 7, "llama3_1": 7, "nemotron_3_nano": 25, "qwen3_5_nothink": 21}


@pytest.fixture(scope="module")
def encoders() -> dict[str, PromptEncoder]:
    if not (SHARED_DATA / "tool_chat").is_dir():
        pytest.skip(f"needs the conversations and tokenizers of {SHARED_DATA}")
    qwen = AutoTokenizer.from_pretrained(SHARED_DATA / "tok_qwen25")
    minimind = AutoTokenizer.from_pretrained(SHARED_DATA / "tok_minimind")
    peers = {name: text for name, text in trl_templates().items() if name in OF_PEERS}
    own = {
        name: (minimind if name == "minimind" else qwen, text) for name, text in shared_templates(SHARED_DATA).items()
    }
    tokenizer = tokenizer_for_all(SHARED_DATA, peers)
    every = own | {name: (tokenizer, text) for name, text in peers.items()}
    return {name: PromptEncoder(each, {}, text, continues=False) for name, (each, text) in every.items()}


def turns_of(row: Row) -> list[tuple[list[int], list[int]]]:
    """What stands before each trained run of tokens, and the run."""
    ids, edges = row.ids.tolist(), np.flatnonzero(np.diff(row.trained, prepend=False, append=False))
    return [(ids[:start], ids[start:end]) for start, end in zip(edges[::2], edges[1::2], strict=True)]


@pytest.mark.parametrize(("name", "num_rows"), (TEMPLATES | OF_PEERS).items())
def test_trained_is_what_a_policy_would_write_behind_what_it_would_be_sent(
    encoders: dict[str, PromptEncoder], name: str, num_rows: int
) -> None:
    encoder, rows = encoders[name], 0
    for messages, tools in real_conversations(SHARED_DATA)[::60]:
        own = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
        made = rows_of(encoder, messages, tools, own)
        expected = [
            (encoder.encode([(messages[:i], tools)])[0], as_written(encoder, messages[:i], messages[i], tools))
            for i in own
        ]
        assert sorted(turn for row in made for turn in turns_of(row)) == sorted(expected)
        rows += len(made)
    assert rows == num_rows


def test_calls_that_a_template_leaves_out_are_refused(encoders: dict[str, PromptEncoder]) -> None:
    silent = PromptEncoder(encoders["qwen2_5"].tokenizer, {}, CHATML, continues=False)
    messages = [{"role": "user", "content": "x"}, answer("", calls=["get_time"])]
    with pytest.raises(ValueError, match="leaves the tool calls of message 1 out"):
        rows_of(silent, messages, None, [1])
    refused = PromptEncoder(encoders["qwen2_5"].tokenizer, {}, "{{ messages[-1].content }}", continues=False)
    with pytest.raises(ValueError, match="does not show the assistant's message 1 behind the request"):
        rows_of(refused, [messages[0], answer("y")], None, [1])


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_an_answer_without_an_end_of_turn_gets_the_end_of_the_sequence(tiny_tokenizer_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_tokenizer_dir)
    messages = [{"role": role, "content": text} for role, text in zip(["user", "assistant"] * 2, "1234", strict=True)]
    rows = rows_of(PromptEncoder(tokenizer, {}, continues=False), messages, None, [1, 3])
    texts = [[tokenizer.decode(part) for part in turn] for row in rows for turn in turns_of(row)]
    assert texts == [["1", "2<eos>"], ["123", "4<eos>"]]
    base = rows_of(PromptEncoder(tokenizer, {}, "", continues=False), messages[:2], None, [1])
    assert [turns_of(row) for row in base] == [turns_of(rows[0])]


def test_turns_are_chosen_by_the_messages_or_by_a_mask() -> None:
    messages = [{"role": role, "content": ""} for role in ("user", "assistant", "user", "assistant")]
    assert trained_turns(messages, None) == [1, 3]
    assert trained_turns(messages, [0, 0, 0, 1]) == [3]
    assert trained_turns([*messages[:1], {**messages[1], "train": False}, *messages[2:]], None) == [3]
    with pytest.raises(ValueError, match="one of 0 and 1 for each of 4 messages"):
        trained_turns(messages, [0, 1])
    with pytest.raises(ValueError, match=r"asks for the messages \[2\], but the assistant's are \[1, 3\]"):
        trained_turns(messages, [0, 0, 1, 0])


@pytest.mark.parametrize(("how", "ids"), [("left", [2, 3, 4]), ("right", [0, 1, 2])])
def test_long_rows_are_cut_or_refused(how: str, ids: list[int]) -> None:
    row = Row(ids=np.arange(5, dtype=np.int32), trained=np.array([False, False, True, False, True]))
    cut = fitted(row, 3, how)
    assert cut.ids.tolist() == ids and cut.trained.tolist() == row.trained[ids].tolist()
    with pytest.raises(ValueError, match="the row has 5 tokens, more than sft"):
        fitted(row, 3, "error")
