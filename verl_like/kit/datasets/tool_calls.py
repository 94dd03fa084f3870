"""Conversations with tool calls: one row for each call, which the model has to make itself.

    python -m verl_like.kit.datasets.tool_calls --local_dataset_path glaive_toolcall_en_demo.json --local_save_dir
    OUT

A record is a conversation in ShareGPT's form (conversations with from human, gpt, function_call, observation, system;
tools as JSON text: LLaMA-Factory's tool files). The row's prompt is everything before a call, earlier calls and the
tools' answers included; the column `tools` holds the schemas (set data.tools_key=tools, so that the chat template shows
them); ground_truth is the call, {"name", "arguments"}, as JSON text, and the tool_call grader compares it by value.
"""

from __future__ import annotations

import json
from typing import Any

from verl_like.kit.datasets import schema

DATA_SOURCE = "tool_calls"
_ROLES = {"human": "user", "gpt": "assistant", "system": "system", "observation": "tool"}


def to_rows(record: dict[str, Any], place: str) -> list[dict[str, Any]]:
    """Make {"messages", "call", "tools", "turn"} of each call of one conversation.

    Raises ValueError, which names the place, for a record of another form.
    """
    tools = json.loads(record["tools"]) if isinstance(record.get("tools"), str) else record.get("tools") or []
    tools = [tool if "function" in tool else {"type": "function", "function": tool} for tool in tools]
    found, messages = [], []
    for turn, message in enumerate(record["conversations"]):
        if message["from"] == "function_call":
            call = _call(message["value"], f"{place}, turn {turn}")
            if tools:
                found.append({"messages": list(messages), "call": call, "tools": tools, "turn": turn})
            shown = f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>"
            messages.append({"role": "assistant", "content": shown})
        elif message["from"] in _ROLES:
            messages.append({"role": _ROLES[message["from"]], "content": message["value"]})
        else:
            raise ValueError(f"{place}, turn {turn}: unknown speaker {message['from']!r}; known: {', '.join(_ROLES)}")
    return found


def _call(text: str, place: str) -> dict[str, Any]:
    try:
        call = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{place}: the call is no JSON: {error}") from error
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        raise ValueError(f"{place}: a call must have a name, not {text[:120]!r}")
    arguments = call.get("arguments") or {}
    return {"name": call["name"], "arguments": json.loads(arguments) if isinstance(arguments, str) else arguments}


def to_row(found: dict[str, Any], index: int, split: str) -> dict[str, Any]:
    """One call as a row of the schema, with the column tools (JSON text: schemas differ from row to row)."""
    call = json.dumps(found["call"], ensure_ascii=False)
    row = schema.make_row(
        data_source=DATA_SOURCE,
        prompt=found["messages"],
        ground_truth=call,
        ability="tools",
        split=split,
        index=index,
        turn=found["turn"],
        reference_response=f"<tool_call>\n{call}\n</tool_call>",
    )
    return row | {"tools": json.dumps(found["tools"], ensure_ascii=False)}


def main(argv: list[str] | None = None) -> None:
    """Convert a file of conversations, divided into train.parquet and test.parquet by conversation."""
    arguments = schema.parser("Tool calls to parquet.", local_source="a file of conversations with tools")
    arguments.add_argument("--num_test", type=int, default=30, help="conversations held out for test.parquet")
    arguments.add_argument("--seed", type=int, default=1, help="which ones are held out")
    options = arguments.parse_args(argv)
    source = schema.required_source(options, "a file in ShareGPT's form")
    records = schema.read_records(source, ("conversations", "tools"))
    per_record = [to_rows(record, f"{source}, record {i}") for i, record in enumerate(records)]
    parts = schema.hold_out([rows for rows in per_record if rows], options.num_test, options.seed)
    flat = {split: [found for rows in part for found in rows] for split, part in parts.items()}
    schema.write_splits(flat, to_row, options.local_save_dir, title=DATA_SOURCE)


if __name__ == "__main__":
    schema.run(main)
