"""Transcripts on real conversations and real chat templates: nothing sampled changes, and contexts are the template's.

The model of these tests writes what each template would have it write (`as_written`), or whatever the test says. All
templates but minimind's run on Qwen2.5's tokenizer with the special tokens of the template's family added.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from tests.unit.data.factory import SHARED_DATA
from tests.unit.episodes.conversations import (
    Conversation,
    Message,
    real_conversations,
    shared_templates,
    tokenizer_for_all,
    trl_templates,
    turns,
)
from verl_like.data.chat import PromptEncoder
from verl_like.data.templates import TEMPLATES
from verl_like.episodes.transcript import Observation, Transcript
from verl_like.kit.verbs.template_cases import TOOLS, answer, as_written, cases, result

# Templates that render every history as it was written, with tools; some conversations are played on each
VERBATIM = (
    "gemma4_v2",
    "lfm2_2_5",
    "lfm2_v2",
    "llama3_1",
    "llama3_2",
    "muse_glimmer",
    "qwen2_5",
    "qwen3_instruct_2507",
    "qwen3_vl",
)
# Their generation prompt ends in a line that an empty thought would make one token with: same text, other tokens
BUT_FOR_A_TOKEN = ("qwen3_8", "qwen3_5_think")
# They refuse messages with two calls
SINGLE_CALLS = ("llama3_1", "llama3_2")
# They leave calls out of the rendering, so their contexts have what apply_chat_template of tool_calls has not
WITHOUT_CALLS = ("lfm2", "llama3", "qwen2_5_vl")
# No tool messages: refused, or left out without a word
WITHOUT_TOOLS = ("cohere", "cohere2", "gemma", "gemma3", "phi3", "phi3_5")
# Earlier thoughts are dropped, the end of a turn changed, an empty thought put in
REWRITING = (
    "diffusion_gemma",
    "gemma4_v5",
    "glm4moe",
    "gptoss",
    "lfm2_2_5_v2",
    "nemotron_3_nano",
    "nemotron_3_ultra",
    "qwen3",
    "qwen3_5_nothink",
    "qwen3_5_think",
)


@pytest.fixture(scope="module")
def shared() -> Path:
    if not (SHARED_DATA / "tool_chat").is_dir():
        pytest.skip(f"needs the conversations and tokenizers of {SHARED_DATA}")
    return SHARED_DATA


@pytest.fixture(scope="module")
def encoders(shared: Path) -> dict[str, PromptEncoder]:
    templates = shared_templates(shared)
    tokenizer = AutoTokenizer.from_pretrained(shared / "tok_qwen25")
    minimind = AutoTokenizer.from_pretrained(shared / "tok_minimind")
    return {
        name: PromptEncoder(minimind if name == "minimind" else tokenizer, {}, template)
        for name, template in templates.items()
    }


@pytest.fixture(scope="module")
def peers(shared: Path) -> dict[str, PromptEncoder]:
    templates = trl_templates()
    tokenizer = tokenizer_for_all(shared, templates)
    return {name: PromptEncoder(tokenizer, {}, template) for name, template in templates.items()}


@pytest.fixture(scope="module")
def conversations(shared: Path) -> list[Conversation]:
    return real_conversations(shared)


@pytest.fixture(scope="module")
def some(conversations: list[Conversation]) -> list[Conversation]:
    """A few of each kind: with system prompt, with tools, with thoughts and further questions."""
    thoughtful = [c for c in conversations if sum("reasoning_content" in message for message in c[0]) > 2]
    return [*conversations[::80], *thoughtful[:2]]


class Played:
    """A conversation, played to its end: the rows put together a second time, from what was sampled and observed."""

    def __init__(self, encoder: PromptEncoder, conversation: Conversation, *, follow_template: bool) -> None:
        messages, self.tools = conversation
        prompt, steps = turns(messages)
        self.encoder = encoder
        self.row = encoder.encode([(prompt, self.tools)])[0]
        self.transcript = Transcript(encoder, self.row, prompt, self.tools, follow_template=follow_template)
        self.turns = self.drift = 0
        self.cuts: list[str] = []
        self.unequal: list[str] = []
        for message, observed in steps:
            self.step(as_written(encoder, self.transcript.messages, message, self.tools), message, observed)

    def step(self, sampled: list[int], message: Message, observed: list[Message]) -> None:
        self.transcript.wrote(sampled, message)
        self.row = [*self.row, *sampled]
        self._compare()
        seen = self.transcript.observe(observed)
        self.row = seen.ids if seen.new_row else [*self.row, *seen.ids]
        self._compare()
        self.turns += 1
        self.cuts += [seen.reason] if seen.new_row else []
        whole = self.encoder.encode([(self.transcript.messages, self.tools)])[0]
        if self.row != whole:
            same = self.encoder.tokenizer.decode(self.row) == self.encoder.tokenizer.decode(whole)
            self.unequal.append("same text" if same else "other text")

    def _compare(self) -> None:
        """Tokens at which the context that the engine is sent is not the one put together here."""
        self.drift += sum(a != b for a, b in itertools.zip_longest(self.transcript.context_ids, self.row))


def play(encoder: PromptEncoder, conversations: Sequence[Conversation], *, follow_template: bool) -> list[Played]:
    return [Played(encoder, conversation, follow_template=follow_template) for conversation in conversations]


def unequal(played: Sequence[Played]) -> list[str]:
    return [kind for conversation in played for kind in conversation.unequal]


@pytest.mark.parametrize(("name", "step"), [("qwen2_5", 2), ("qwen3", 8), ("minimind", 8)])
def test_real_conversations(
    name: str, step: int, encoders: dict[str, PromptEncoder], conversations: list[Conversation]
) -> None:
    """What follows an answer is what the template has there, and nothing else changes."""
    played = play(encoders[name], conversations[::step], follow_template=True)
    num_turns = sum(conversation.turns for conversation in played)
    assert num_turns > 850 / step and sum(conversation.drift for conversation in played) == 0
    assert len(unequal(played)) <= num_turns / 100
    cuts = [cut for conversation in played for cut in conversation.cuts]
    if name == "qwen2_5":
        assert not cuts
    elif name == "minimind":  # its generation prompt ends the thought, and samples with reasoning think all the same
        assert len(cuts) < num_turns / 10 and all("think" in cut for cut in cuts)
    else:  # a model that thinks, if only an empty thought, which is dropped as soon as something follows
        assert len(cuts) > num_turns / 2


@pytest.mark.parametrize("name", [*VERBATIM, "qwen3_8", *WITHOUT_CALLS, *REWRITING])
def test_other_models_templates(name: str, peers: dict[str, PromptEncoder], some: list[Conversation]) -> None:
    if name in SINGLE_CALLS:
        some = [
            (messages, tools) for messages, tools in some if max(len(m.get("tool_calls", ())) for m in messages) < 2
        ]
    followed, kept = (play(peers[name], some, follow_template=follow) for follow in (True, False))
    assert sum(conversation.drift for conversation in [*followed, *kept]) == 0
    assert not any(conversation.cuts for conversation in kept)
    assert any(conversation.cuts for conversation in followed) == (name in REWRITING)
    if name in WITHOUT_CALLS:
        followed = [conversation for conversation in followed if conversation.tools is None]
    assert set(unequal(followed)) <= ({"same text"} if name in BUT_FOR_A_TOKEN else set())


@pytest.mark.parametrize("name", WITHOUT_TOOLS)
def test_templates_without_tools_say_so(
    name: str, peers: dict[str, PromptEncoder], conversations: list[Conversation]
) -> None:
    chats = [conversation for conversation in conversations[::40] if conversation[1] is None]
    if name == "gemma":  # it has no system messages either
        chats = [conversation for conversation in chats if conversation[0][0]["role"] == "user"]
    played = play(peers[name], chats, follow_template=True)
    assert played and not unequal(played) and not any(conversation.cuts for conversation in played)
    tools = next(
        conversation for conversation in conversations if any(message["role"] == "tool" for message in conversation[0])
    )
    with pytest.raises(
        ValueError, match=r"takes no message of the role tool after this answer: .*(alternate|leaves out)"
    ):
        Played(peers[name], (tools[0], None), follow_template=False)


def test_what_follows_is_the_same_however_it_is_found(
    encoders: dict[str, PromptEncoder], peers: dict[str, PromptEncoder]
) -> None:
    """By proof, and from stand-ins: for every template, all that was proved is what a history that the template would
    write otherwise is continued with."""
    num_same = 0
    for name, encoder in [*encoders.items(), *((name, peers[name]) for name in VERBATIM)]:
        for case in cases():
            prompt, tools = [{"role": "user", "content": "Weather?"}], TOOLS if case.tools else None
            proved, found = (
                Transcript(encoder, encoder.encode([(prompt, tools)])[0], prompt, tools, follow_template=follow)
                for follow in (True, False)
            )
            found._proved = False
            for message, observed in case.steps:
                sampled = as_written(encoder, proved.messages, message, tools)
                proved.wrote(sampled, message)
                found.wrote(sampled, message)
                one, other = proved.observe(observed), found.observe(observed)
                assert one.new_row or one.ids == other.ids, (name, case.name)
                num_same += not one.new_row
    assert num_same > 150


# ---- small templates, a tokenizer of one token per byte


SPECIAL = ("<s>", "<|im_start|>", "<|im_end|>", "<|endoftext|>")
CHATML = TEMPLATES["chatml"]
# Thoughts of earlier turns are dropped, as Qwen3 does
FORGETFUL = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content if loop.index0 > messages | length - 1 or m.role != 'assistant' "
    "else m.content.split('</think>')[-1] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ALTERNATING = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}<|im_start|>{{ m.content | trim }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>{% endif %}"
)
DATED = "{{ strftime_now('%H:%M:%S.%f') }}" + CHATML
NO_TOOLS = CHATML.replace("{% for m in messages %}", "{% for m in messages if m.role != 'tool' %}")
USER: Message = {"role": "user", "content": "And then?"}
TOOL: Message = {"role": "tool", "content": "42"}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    alphabet = {character: i for i, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    bytes_only = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_only.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=bytes_only, bos_token="<s>", eos_token="<|im_end|>")
    made.add_special_tokens({"additional_special_tokens": list(SPECIAL[1:])})  # pyright: ignore[reportArgumentType]
    return made


class Chat:
    """A transcript that is told texts."""

    def __init__(self, tokenizer: Any, template: str, *, follow: bool = True) -> None:
        self.encoder = PromptEncoder(tokenizer, {}, template)
        prompt = [{"role": "user", "content": "Why?"}]
        ids = self.encoder.encode([(prompt, None)])[0]
        self.transcript = Transcript(self.encoder, ids, prompt, None, follow_template=follow)

    def turn(self, text: str, observed: list[Message], **message: Any) -> Observation:
        content = text
        for token in SPECIAL:
            content = content.removesuffix(token)
        self.transcript.wrote(self.encoder.encode_text(text), {"role": "assistant", "content": content} | message)
        return self.transcript.observe(observed)

    def text(self, ids: Sequence[int] | None = None) -> str:
        return self.encoder.tokenizer.decode(self.transcript.context_ids if ids is None else ids)


NEXT = "<|im_start|>user\nAnd then?<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("follow", [True, False])
@pytest.mark.parametrize(
    ("answered", "delta"),
    [
        ("Because.<|im_end|>", "\n" + NEXT),
        ("<|im_end|>", "\n" + NEXT),
        ("Because", "<|im_end|>\n" + NEXT),  # cut off: the turn is ended for it
        ("", "<|im_end|>\n" + NEXT),
        ("  two\n\n", "<|im_end|>\n" + NEXT),
    ],
)
def test_what_follows_an_answer(tokenizer: Any, answered: str, delta: str, follow: bool) -> None:
    chat = Chat(tokenizer, CHATML, follow=follow)
    seen = chat.turn(answered, [USER])
    assert (chat.text(seen.ids), seen.new_row, seen.reason) == (delta, False, "")
    assert chat.text() == "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n" + answered + delta
    assert chat.transcript.messages[-1] == USER


def test_an_end_that_is_not_the_templates(tokenizer: Any) -> None:
    """With the template's history it is rendered anew; with the model's own it stays, and the turn is ended."""
    kept = Chat(tokenizer, CHATML, follow=False)
    assert kept.text(kept.turn("Because.<|endoftext|>", [USER]).ids) == "<|im_end|>\n" + NEXT
    followed = Chat(tokenizer, CHATML)
    seen = followed.turn("Because.<|endoftext|>", [USER])
    assert seen.new_row and seen.reason.startswith("'<|endoftext|>' became '<|im_end|>")
    assert seen.ids == followed.transcript.context_ids and "endoftext" not in followed.text()


def test_a_template_that_forgets_thoughts(tokenizer: Any) -> None:
    wrote = "<think>\nhm\n</think>\nBecause.<|im_end|>"
    followed = Chat(tokenizer, FORGETFUL)
    seen = followed.turn(wrote, [USER])
    assert seen.new_row and "think" in seen.reason and "hm" not in followed.text()
    again = followed.turn("Indeed.<|im_end|>", [USER])
    assert not again.new_row and followed.text(again.ids) == "\n" + NEXT
    kept = Chat(tokenizer, FORGETFUL, follow=False)
    for _ in range(3):
        seen = kept.turn(wrote, [USER])
        assert not seen.new_row and kept.text(seen.ids) == "\n" + NEXT
    assert kept.text().count("hm") == 3


def test_a_template_that_trims(tokenizer: Any) -> None:
    followed = Chat(tokenizer, ALTERNATING)
    seen = followed.turn("Because. <|im_end|>", [USER])
    assert seen.new_row and "Because.<|im_end|>" in followed.text()
    assert seen.reason == "' <|im_end|>' became '<|im_end|><|im_start|>And then?<|im_end|'"
    kept = Chat(tokenizer, ALTERNATING, follow=False)
    assert kept.text(kept.turn("Because. <|im_end|>", [USER]).ids) == "<|im_start|>And then?<|im_end|><|im_start|>"


@pytest.mark.parametrize("follow", [True, False])
def test_what_a_template_does_not_take_is_named_and_can_be_said_otherwise(tokenizer: Any, follow: bool) -> None:
    for template, why in ((ALTERNATING, "roles must alternate"), (NO_TOOLS, "leaves out a message")):
        chat = Chat(tokenizer, template, follow=follow)
        before = chat.transcript.context_ids
        with pytest.raises(ValueError, match=rf"takes no message of the role tool after this answer: .*{why}"):
            chat.turn("Because.<|im_end|>", [TOOL])
        assert len(chat.transcript.messages) == 2 and chat.transcript.context_ids[: len(before)] == before
        assert not chat.transcript.observe([USER]).new_row


def test_the_clock_stands_still(tokenizer: Any) -> None:
    chat = Chat(tokenizer, DATED)
    assert not any(chat.turn("Because.<|im_end|>", [USER]).new_row for _ in range(3))


@pytest.mark.parametrize("follow", [True, False])
def test_calls_stay_as_they_were_written(encoders: dict[str, PromptEncoder], follow: bool) -> None:
    """JSON with other spaces than the template's; arguments as OpenAI gives them; two results in one turn."""
    encoder, prompt = encoders["qwen2_5"], [{"role": "user", "content": "Weather?"}]
    wrote = '<tool_call>{"arguments":{"city":"Paris"},"name":"get_weather"}</tool_call>' * 2 + "<|im_end|>"
    ids = encoder.encode([(prompt, TOOLS)])[0]
    transcript = Transcript(encoder, ids, prompt, TOOLS, follow_template=follow)
    transcript.wrote(encoder.encode_text(wrote), answer("", calls=["get_weather"] * 2, json_arguments=True))
    seen = transcript.observe([result(0, "get_weather", "sun"), result(1, "get_weather", "rain")])
    assert not seen.new_row and encoder.tokenizer.decode(seen.ids) == (
        "\n<|im_start|>user\n<tool_response>\nsun\n</tool_response>\n<tool_response>\nrain\n</tool_response>"
        "<|im_end|>\n<|im_start|>assistant\n"
    )
    assert wrote in encoder.tokenizer.decode(transcript.context_ids)


def test_a_call_that_was_cut_off_is_not_completed(encoders: dict[str, PromptEncoder]) -> None:
    """Even if a parser made a whole call of it."""
    encoder, prompt = encoders["qwen2_5"], [{"role": "user", "content": "Weather?"}]
    wrote = encoder.encode_text('<tool_call>\n{"name": "get_weather", "arguments": {"city": "Par')
    transcript = Transcript(encoder, encoder.encode([(prompt, TOOLS)])[0], prompt, TOOLS, follow_template=True)
    transcript.wrote(wrote, answer("", calls=["get_weather"]))
    seen = transcript.observe([result(0, "get_weather", "sun")])
    assert not seen.new_row and encoder.tokenizer.decode(seen.ids).startswith("<|im_end|>\n<|im_start|>user")


# The generation prompt begins a thought, which the template renders from reasoning_content alone
THOUGHTFUL = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>{% endif %}"
)


def test_a_thought_that_was_cut_off_is_not_completed(tokenizer: Any) -> None:
    """The parsed message renders as an extension of what was written, but not by what follows an answer."""
    thinking = {"content": "", "reasoning_content": "hm"}
    kept = Chat(tokenizer, THOUGHTFUL, follow=False)
    assert kept.text(kept.turn("hm", [USER], **thinking).ids) == "<|im_end|>\n" + NEXT + "<think>"
    followed = Chat(tokenizer, THOUGHTFUL)
    seen = followed.turn("hm", [USER], **thinking)
    assert seen.new_row and seen.reason.startswith("'' became '</think><|im_end|>")
    again = followed.turn("so</think>Because.<|im_end|>", [USER], reasoning_content="so", content="Because.")
    assert not again.new_row and followed.text(again.ids) == "\n" + NEXT + "<think>"


# As Mistral's: the tools stand before the last question, results need calls with ids of nine characters before them
LAST_QUESTION_FIRST = (
    "{% set users = messages | selectattr('role', 'equalto', 'user') | list %}"
    "{% set spoken = namespace(n=0) %}<s>{% for m in messages %}"
    "{% if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}"
    "{% if (m.role == 'user') != (spoken.n % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% set spoken.n = spoken.n + 1 %}{% endif %}"
    "{% if m.role == 'user' %}{% if m == users[-1] %}[TOOLS]{% endif %}[INST]{{ m.content }}[/INST]"
    "{% elif m.role == 'tool' %}[RESULT]{{ m.content }}[/RESULT]"
    "{% elif m.tool_calls %}[CALLS]{% for call in m.tool_calls %}"
    "{% if call.id | length != 9 %}{{ raise_exception('ids must have nine characters') }}{% endif %}"
    "{{ call.function.name }}{{ call.function.arguments | tojson }}{% endfor %}<|im_end|>"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("follow", [True, False])
def test_a_template_that_needs_calls_and_moves_the_tools(tokenizer: Any, follow: bool) -> None:
    chat = Chat(tokenizer, LAST_QUESTION_FIRST, follow=follow)
    calls = answer("", calls=["get_weather"], json_arguments=True)["tool_calls"]
    text = '[CALLS]get_weather{"city": "Paris"}<|im_end|>'
    with pytest.raises(ValueError, match=r"no message of the role user and tool after .*must alternate"):
        Chat(tokenizer, LAST_QUESTION_FIRST, follow=follow).turn(text, [USER, TOOL, USER])
    seen = chat.turn(text, [TOOL], tool_calls=calls)
    assert not seen.new_row and chat.text(seen.ids) == "[RESULT]42[/RESULT]"
    seen = chat.turn(text, [TOOL], tool_calls=calls)
    assert not seen.new_row and chat.text(seen.ids) == "[RESULT]42[/RESULT]"
    seen = chat.turn("Rain.<|im_end|>", [USER])
    assert seen.new_row == follow and ("TOOLS" in seen.reason) == follow
    row = "<s>[INST]Why?[/INST]" + (text + "[RESULT]42[/RESULT]") * 2 + "Rain.<|im_end|>"
    assert (
        chat.text() == (row if follow else row.replace("[INST]", "[TOOLS][INST]", 1)) + "[TOOLS][INST]And then?[/INST]"
    )


def test_misuse_is_refused(tokenizer: Any) -> None:
    chat = Chat(tokenizer, CHATML)
    with pytest.raises(ValueError, match="needs an answer before it"):
        chat.transcript.observe([USER])
    with pytest.raises(ValueError, match="role assistant, not 'user'"):
        chat.transcript.wrote([1], USER)
    chat.transcript.wrote([1], {"role": "assistant", "content": "a"})
    with pytest.raises(ValueError, match="two answers in a row"):
        chat.transcript.wrote([1], {"role": "assistant", "content": "a"})
    with pytest.raises(ValueError, match="at least one message"):
        chat.transcript.observe([])


TEXTS = st.lists(
    st.sampled_from([*SPECIAL, "<think>", "</think>", " ", "\n", "a", "{", "é", "\u4e16"]), max_size=6
).map("".join)


@given(
    turns=st.lists(
        st.tuples(TEXTS, st.sampled_from(["", "<|im_end|>"]), TEXTS.filter(str.strip)), min_size=1, max_size=3
    ),
    template=st.sampled_from([CHATML, FORGETFUL, ALTERNATING, DATED]),
    follow=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_whatever_is_written(tokenizer: Any, turns: list[tuple[str, str, str]], template: str, follow: bool) -> None:
    """Special tokens in the middle, in the user's text, nothing at all: no token changes within a row, and what was
    shown stands in the context."""
    chat = Chat(tokenizer, template, follow=follow)
    row = chat.transcript.context_ids
    for said, end, shown in turns:
        sampled = chat.encoder.encode_text(said + end)
        seen = chat.turn(said + end, [{"role": "user", "content": shown}])
        row = seen.ids if seen.new_row else [*row, *sampled, *seen.ids]
        assert chat.transcript.context_ids == row and not (seen.new_row and not follow)
        assert shown.strip() in chat.text(seen.ids)
