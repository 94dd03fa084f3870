"""Rows whose last message is an assistant's: the policy goes on with that answer."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any, ClassVar

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from verl_like.batch import PromptRow
from verl_like.config import DataConfig
from verl_like.data.chat import PromptEncoder
from verl_like.data.dataset import PromptDataset
from verl_like.data.templates import TEMPLATES
from verl_like.episodes.transcript import Transcript
from verl_like.plugins.agents.gateway.session import Asked, Rules, Session
from verl_like.plugins.agents.tool_agent import Bounds, ToolAgent
from verl_like.plugins.agents.tool_calls.formats import parser_of
from verl_like.plugins.reward_models.model_score import ModelScore
from verl_like.plugins.verl_agents.service import _templated
from verl_like.rewards.grading import Answer
from verl_like.rollout.rollout_engine import Completion, Sampled, SamplingParams

USER = {"role": "user", "content": "2+2?"}
R1 = (  # as DeepSeek-R1: it begins thoughts itself, and takes them off answers
    "{% for m in messages %}{% if m['role'] == 'user' %}<U>{{ m['content'] }}{% else %}"
    "<A>{{ m['content'].split('</think>')[-1] }}<E>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<A><think>\n{% endif %}"
)
QWEN3 = (  # as Qwen3: a thought, perhaps an empty one, before the last answer
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' and loop.last %}"
    "{% if '</think>' in m['content'] %}{{ m['content'] }}{% else %}"
    "<think>\n\n</think>\n\n{{ m['content'] }}{% endif %}"
    "{% else %}{{ m['content'] }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def characters() -> PreTrainedTokenizerFast:
    """A token for each character."""
    known = ["<|im_start|>", "<|im_end|>", "<unk>", "\n", *map(chr, range(32, 127))]
    tokenizer = Tokenizer(models.WordLevel({text: number for number, text in enumerate(known)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")  # type: ignore[assignment]
    tokenizer.decoder = decoders.Fuse()  # type: ignore[assignment]
    marks = {"eos_token": "<|im_end|>", "unk_token": "<unk>", "additional_special_tokens": ["<|im_start|>"]}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=TEMPLATES["chatml"], **marks)


TOKENIZER = characters()
END = TOKENIZER.eos_token_id


def begun(content: Any, **more: Any) -> list[dict[str, Any]]:
    return [USER, {"role": "assistant", "content": content, **more}]


@pytest.mark.parametrize("template", ["chatml", "llama3", "gemma", "qwen2_5", "r1_zero", QWEN3, R1])
@pytest.mark.parametrize("content", ["The answer is", "The end", "<|im_end|", " both sides \n"])
def test_as_transformers_does_it(template: str, content: str) -> None:
    text = TEMPLATES.get(template, template)
    mine = PromptEncoder(TOKENIZER, {}, text).render((begun(content), None))
    theirs = TOKENIZER.apply_chat_template(
        begun(content), chat_template=text, continue_final_message=True, tokenize=False
    )
    assert mine == theirs and mine.rstrip().endswith(content.strip())


@pytest.mark.parametrize(
    ("template", "content", "end"),
    [
        ("chatml", "", "user\n2+2?<|im_end|>\n<|im_start|>assistant\n"),  # not begun: the generation prompt
        ("llama3", " \n", "2+2?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"),
        (R1, None, "<U>2+2?<A><think>\n"),
        ("chatml", [{"type": "text", "text": "Let "}, {"type": "text", "text": "me"}], "assistant\nLet me"),
        (QWEN3, "<think>\nOkay", "<|im_start|>assistant\n<think>\nOkay"),  # no closed thought before an open one
        (R1, "<think>\nOkay", "<U>2+2?<A><think>\nOkay"),
        ("r1_zero", "<think> So", "Assistant: <think> So"),
        (QWEN3, "<think>\nOkay\n</think>\n\nIt is", "<|im_start|>assistant\n<think>\nOkay\n</think>\n\nIt is"),
    ],
)
def test_where_the_policy_goes_on(template: str, content: Any, end: str) -> None:
    text = PromptEncoder(TOKENIZER, {}, TEMPLATES.get(template, template)).render((begun(content), None))
    assert text.endswith(end) and text.count("2+2?") == 1


@pytest.mark.parametrize(
    ("template", "messages", "what"),
    [
        ("chatml", begun("", tool_calls=[{"function": {"name": "f", "arguments": {}}}]), "cannot go on in tool calls"),
        ("chatml", begun("", reasoning_content="Hm"), "cannot go on in .*a thought alone"),
        ("chatml", begun([{"type": "image"}, {"type": "text", "text": "a"}]), "cannot go on in .*media"),
        (R1, begun("<think>\nOkay\n</think>\n\nSo"), "does not appear in the chat"),  # it would be another answer
        ("{{ messages[0]['content'] }}", begun("So"), "chat template refused"),
    ],
)
def test_what_cannot_be_continued_is_said(template: str, messages: Any, what: str) -> None:
    encoder = PromptEncoder(TOKENIZER, {}, TEMPLATES.get(template, template))
    with pytest.raises(ValueError, match=f"(?s){what}.*data.continue_final_message=False"):
        encoder.render((messages, None))


def test_what_the_trainer_sets_is_no_keyword_of_the_template() -> None:
    with pytest.raises(ValueError, match=r"apply_chat_template_kwargs=.*see data.continue_final_message"):
        DataConfig(apply_chat_template_kwargs={"continue_final_message": True})


def test_verls_meaning_closes_it() -> None:
    encoder = PromptEncoder(TOKENIZER, {}, TEMPLATES["chatml"], continues=False)
    text = encoder.render((begun("So"), None))
    assert text.endswith("<|im_start|>assistant\nSo<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize(("continues", "prefix", "solution"), [(True, "4 ", "4 2"), (False, "", "2")])
def test_rows_and_what_graders_read(tmp_path: Path, continues: bool, prefix: str, solution: str) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(json.dumps({"data_source": "x", "prompt": row}) for row in ([USER], begun("4 "))))
    data = DataConfig(continue_final_message=continues, max_prompt_length=200)
    (_, plain), (ids, row) = PromptDataset(data, str(file), TOKENIZER, split="train")
    assert (plain.begun, row.begun) == ("", prefix)
    sampled = TOKENIZER.encode("2<|im_end|>")
    assert Answer(row=row, prompt_ids=ids, response_ids=sampled).text(TOKENIZER) == solution
    other = TOKENIZER.encode("a context of a program's own")
    assert Answer(row=row, prompt_ids=other, response_ids=sampled).text(TOKENIZER) == "2"


def test_a_row_that_cannot_be_continued_is_named(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"prompt": begun("", tool_calls=[{"function": {"name": "f", "arguments": {}}}])}))
    with pytest.raises(ValueError, match=r"rows.jsonl, row 0: the policy cannot go on"):
        PromptDataset(DataConfig(), str(file), TOKENIZER, split="train")[0]


def test_a_reward_model_reads_one_turn() -> None:
    (ids,), row = (
        PromptEncoder(TOKENIZER, {}).encode([(begun("It is "), None)]),
        PromptRow(index=0, data_source="x", messages=begun("It is "), begun="It is "),
    )
    model: Any = ModelScore(None, None, policy_tokenizer=TOKENIZER, own_tokenizer=TOKENIZER)  # type: ignore[arg-type]
    read = model._templated(Answer(row=row, prompt_ids=ids, response_ids=TOKENIZER.encode("4<|im_end|>")))
    assert (
        TOKENIZER.decode(read).endswith("assistant\nIt is 4<|im_end|>\n")
        and TOKENIZER.decode(read).count("<|im_start|>") == 2
    )


@pytest.mark.parametrize("follow", [True, False])
def test_a_conversation_goes_on_after_it(follow: bool) -> None:
    """One assistant turn, of what was begun and what was sampled; nothing is tokenised again."""
    encoder = PromptEncoder(TOKENIZER, {})
    (ids,) = encoder.encode([(begun("It is"), None)])
    transcript = Transcript(encoder, ids, begun("It is"), None, follow_template=follow)
    assert transcript.begun == "It is"
    sampled = TOKENIZER.encode(" 4<|im_end|>")
    transcript.wrote(sampled, {"role": "assistant", "content": " 4"})
    seen = transcript.observe([{"role": "user", "content": "Sure?"}])
    whole = [*begun("It is 4"), {"role": "user", "content": "Sure?"}]
    assert not seen.new_row and transcript.messages == whole and transcript.begun == ""
    assert transcript.context_ids == [*ids, *sampled, *seen.ids] == encoder.encode([(whole, None)])[0]


def test_a_call_that_was_begun_is_read_whole() -> None:
    prefix = '<tool_call>\n{"name": "add", "arguments": '
    encoder = PromptEncoder(TOKENIZER, {})
    (ids,) = encoder.encode([(begun(prefix), None)])
    toolbox: Any = None
    bounds = Bounds(prompt=200, response=200)
    agent = ToolAgent(encoder, toolbox, parser_of("hermes"), bounds, end_ids=(END,), follow_template=False)
    sampled = Sampled.of(TOKENIZER.encode('{"a": 1}}\n</tool_call><|im_end|>'), [0.0] * 23, 0)
    completion = Completion(request_id="x", sampled=sampled, finish_reason="stop")
    (call,) = agent._parsed(
        Transcript(encoder, ids, begun(prefix), None, follow_template=False), completion, as_text=False
    ).calls
    assert (call.name, call.arguments) == ("add", {"a": 1})


@pytest.mark.parametrize("joined", [True, False])
def test_a_request_to_the_gateway_begins_an_answer(joined: bool) -> None:
    """Its client is given what follows; what it asks next goes on from there, in one row, however it puts both."""

    class Policy:
        sampling = SamplingParams(max_tokens=50)
        contexts: ClassVar[list[str]] = []

        async def __call__(self, context_ids: list[int], *arguments: Any, **options: Any) -> Completion:
            self.contexts.append(TOKENIZER.decode(context_ids))
            sampled = Sampled.of(TOKENIZER.encode(" 4<|im_end|>"), [0.0] * 3, 0)
            return Completion(request_id="x", sampled=sampled, finish_reason="stop")

    async def talk() -> Session:
        encoder, ends = PromptEncoder(TOKENIZER, {}), frozenset([END])
        session = Session(
            Rules(encoder=encoder, parser=parser_of("hermes"), end_ids=ends, response=50, total=500), policy
        )
        reply = await session.answer(Asked(messages=begun("It is")))
        assert reply.message["content"] == " 4"
        told = begun("It is 4") if joined else [*begun("It is"), reply.message]
        await session.answer(Asked(messages=[*told, {"role": "user", "content": "Sure?"}]))
        return session

    policy: Any = Policy()
    turns = asyncio.run(talk()).turns()
    assert policy.contexts[0].endswith("assistant\nIt is") and policy.contexts[1].startswith(
        policy.contexts[0] + " 4<|im_end|>"
    )
    assert [turn.new_row for turn in turns] == [False, False]


@pytest.mark.parametrize(
    ("continues", "end"), [(True, "assistant\nSo"), (False, "So<|im_end|>\n<|im_start|>assistant\n")]
)
def test_agent_loops_that_call_the_template_themselves(continues: bool, end: str) -> None:
    encoder = PromptEncoder(TOKENIZER, {}, continues=continues)
    ids = _templated(encoder, TOKENIZER.apply_chat_template, begun("So"), add_generation_prompt=True)
    assert TOKENIZER.decode(ids).endswith(end)
