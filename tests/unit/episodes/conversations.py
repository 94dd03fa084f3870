"""Real conversations, real chat templates, and one tokenizer for all of them: what test_transcript.py runs on.

The templates are read from where they stand: the tokenizers of ../shared/data, and the wheel of trl, which ships those
of many models. The wheel is downloaded once, into the user's cache.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

TRL = "trl==1.16.0"
# Special tokens by their look, for the tokenizer that has to know those of every family
MARKER = re.compile(
    r"<\|[\w./-]+?\|>|<\uff5c[^\uff5c<>]+\uff5c>|<\|[a-z_]+>|<[a-z_]+\|>|<(?:start|end)_of_turn>|\[gMASK\]|<sop>"
)

Message = dict[str, Any]
Conversation = tuple[list[Message], list[dict[str, Any]] | None]


def trl_templates() -> dict[str, str]:
    """Chat templates of the wheel by name, those for training left out. Skips the test where it cannot be had."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "verl_like" / "peers"
    wheels = cache / TRL
    if not list(wheels.glob("*.whl")):
        wheels.mkdir(parents=True, exist_ok=True)
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        try:
            subprocess.run(
                [*pip, "--only-binary", ":all:", "--retries", "1", "--timeout", "10", "-d", str(wheels), TRL],
                check=True,
                capture_output=True,
                text=True,
                timeout=60,
            )
        except (OSError, subprocess.SubprocessError) as error:
            said = str(getattr(error, "stderr", None) or error).strip().splitlines()[-1:]
            pytest.skip(f"needs the chat templates of {TRL}; pip could not download it: {said}")
    with zipfile.ZipFile(next(iter(wheels.glob("*.whl")))) as wheel:
        names = [name for name in wheel.namelist() if name.endswith(".jinja") and "_training" not in name]
        return {Path(name).stem: wheel.read(name).decode() for name in names}


def shared_templates(shared: Path) -> dict[str, str]:
    """The templates of ../shared/data by name."""
    files = {
        "qwen2_5": "tok_qwen25/tokenizer_config.json",
        "qwen3": "tok_qwen25/qwen3_tokenizer_config.json",
        "minimind": "tok_minimind/tokenizer_config.json",
    }
    return {name: json.loads((shared / file).read_text())["chat_template"] for name, file in files.items()}


def tokenizer_for_all(shared: Path, templates: dict[str, str]) -> Any:
    """Qwen2.5's tokenizer with the special tokens of every template added, so that each is a single id."""
    from transformers import AddedToken, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(shared / "tok_qwen25")
    marks = {mark for template in templates.values() for mark in MARKER.findall(template)} | {"<s>", "</s>"}
    new = sorted(marks - set(tokenizer.get_vocab()))
    tokenizer.add_tokens([AddedToken(mark, special=True, normalized=False) for mark in new], special_tokens=True)
    tokenizer.bos_token = "<s>"
    return tokenizer


def real_conversations(shared: Path) -> list[Conversation]:
    """All multi-turn samples of ../shared/data/tool_chat as OpenAI's messages: those in which an answer is followed."""
    folder = shared / "tool_chat"
    found = [_glaive(row) for row in json.loads((folder / "glaive_toolcall_en_demo.json").read_text())]
    found += [_parts(json.loads(line)) for line in (folder / "reason_tool_use_demo_50.jsonl").read_text().splitlines()]
    found += [_glaive({**row, "tools": ""}) for row in json.loads((folder / "dpo_en_demo.json").read_text())]
    return [(messages, tools) for messages, tools in found if len(turns(messages)[1]) > 0]


def turns(messages: list[Message]) -> tuple[list[Message], list[tuple[Message, list[Message]]]]:
    """The prompt, and each answer with what is observed after it; an answer that ends the conversation is left out."""
    answers = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    if not answers:
        return messages, []
    pairs = zip(answers, [*answers[1:], len(messages)], strict=True)
    steps = [(messages[place], messages[place + 1 : following]) for place, following in pairs]
    return messages[: answers[0]], [(answer, observed) for answer, observed in steps if observed]


def _glaive(row: dict[str, Any]) -> Conversation:
    roles = {"human": "user", "gpt": "assistant", "observation": "tool", "system": "system"}
    messages: list[Message] = []
    for part in row["conversations"]:
        if part["from"] == "function_call":
            made = json.loads(part["value"])
            messages.append(_calling("", [made] if isinstance(made, dict) else made, len(messages)))
        else:
            messages.append({"role": roles[part["from"]], "content": part["value"]})
    tools = [{"type": "function", "function": tool} for tool in json.loads(row["tools"] or "[]")]
    return _numbered(messages), tools or None


def _parts(row: dict[str, Any]) -> Conversation:
    messages: list[Message] = []
    for message in row["messages"]:
        texts = {kind: [p["value"] for p in message["content"] if p["type"] == kind] for kind in ("text", "reasoning")}
        calls = [json.loads(part["value"]) for part in message["content"] if part["type"] == "tool_call"]
        made: Message = {"role": message["role"], "content": "".join(texts["text"])}
        if calls:
            made = _calling(made["content"], calls, len(messages))
        if texts["reasoning"]:
            made["reasoning_content"] = "".join(texts["reasoning"])
        messages.append(made)
    if messages[-1].get("tool_calls"):  # the samples with parallel calls end there: they get their results
        messages += [{"role": "tool", "content": json.dumps({"ok": call["id"]})} for call in messages[-1]["tool_calls"]]
    return _numbered(messages), json.loads(row["tools"]) or None


def _calling(content: str, calls: list[dict[str, Any]], place: int) -> Message:
    tool_calls = [
        {"type": "function", "id": f"call{place:03d}{number:02d}", "function": call}
        for number, call in enumerate(calls)
    ]
    return {"role": "assistant", "content": content, "tool_calls": tool_calls}


def _numbered(messages: list[Message]) -> list[Message]:
    """Tool messages with the id and the name of the call that they answer."""
    waiting: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] == "assistant":
            waiting = list(message.get("tool_calls", []))
        elif message["role"] == "tool" and waiting:
            call = waiting.pop(0)
            message |= {"tool_call_id": call["id"], "name": call["function"]["name"]}
    return messages
