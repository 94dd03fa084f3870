"""Preference pairs (helpful and harmless, and others like it) for reward models and for RL with one.

    python -m verl_like.kit.datasets.full_hh_rlhf --split rl --local_dataset_path RAW --local_save_dir ~/data/hh
    python -m verl_like.kit.datasets.full_hh_rlhf --split rm --local_dataset_path dpo.json --local_save_dir OUT

--split rl: prompts, with the chosen answer as ground_truth and reward_model.style "model"; rm: prompt, chosen and
rejected; sft: prompt and response. As verl's script of this name, one folder each:
<local_save_dir>/<split>/train.parquet.

A record has chosen and rejected as whole conversations ("\\n\\nHuman: ...\\n\\nAssistant: ...",
github.com/anthropics/hh-rlhf), or prompt, chosen, rejected (Dahoas/full-hh-rlhf), or conversations, chosen, rejected
in ShareGPT's form.
"""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from verl_like.kit.datasets import schema

_TURN = re.compile(r"\n\n(Human|Assistant):[ ]?")
_ROLES = dict.fromkeys(("Human", "human", "user"), "user") | {"system": "system"}
_ROLES |= dict.fromkeys(("Assistant", "gpt", "assistant"), "assistant")

_ANSWERS = ("chosen", "rejected")
Messages = list[dict[str, str]]


class Pair(NamedTuple):
    """A conversation that ends with the user, and two answers to it."""

    messages: Messages
    chosen: str
    rejected: str


def to_pair(record: dict[str, Any], place: str) -> Pair:
    """A record in any of the three forms. Raises ValueError, naming the place, if it is none of them."""
    if "conversations" in record:
        messages = [_message(turn, place) for turn in record["conversations"]]
        return Pair(messages, *(_message(record[name], place)["content"] for name in _ANSWERS))
    if "prompt" in record:
        return Pair(_transcript(str(record["prompt"]), place), *(str(record[name]).strip() for name in _ANSWERS))
    chosen, rejected = (_transcript(str(record[name]), place) for name in _ANSWERS)
    return Pair(chosen[:-1], chosen[-1]["content"], rejected[-1]["content"])


def _transcript(text: str, place: str) -> Messages:
    _, *parts = _TURN.split(text if text.startswith("\n\n") else "\n\n" + text)
    if not parts:
        return [{"role": "user", "content": text.strip()}]
    turns = [{"role": _ROLES[who], "content": said.strip()} for who, said in zip(parts[::2], parts[1::2], strict=True)]
    if turns[-1] == {"role": "assistant", "content": ""}:
        turns.pop()  # a prompt ends with an open "Assistant:"
    if not turns:
        raise ValueError(f"{place}: a conversation without a turn: {text[:80]!r}")
    return turns


def _message(turn: Any, place: str) -> dict[str, str]:
    if isinstance(turn, str):
        return {"role": "assistant", "content": turn}
    role, content = turn.get("from", turn.get("role")), turn.get("value", turn.get("content"))
    if role not in _ROLES or not isinstance(content, str):
        raise ValueError(f"{place}: a turn must have from and value (or role and content), not {str(turn)[:120]!r}")
    return {"role": _ROLES[role], "content": content}


def to_row(pair: Pair, index: int, split: str, kind: str, data_source: str) -> dict[str, Any]:
    """One pair as a row for `kind` (rl, rm or sft)."""
    if kind == "rl":
        row = schema.make_row(
            data_source=data_source,
            prompt=[dict(message) for message in pair.messages],
            ground_truth=pair.chosen,
            ability="alignment",
            split=split,
            index=index,
        )
        row["reward_model"]["style"] = "model"
        return row
    answers = {"response": pair.chosen} if kind == "sft" else {"chosen": pair.chosen, "rejected": pair.rejected}
    return {"prompt": pair.messages, **answers, "extra_info": {"split": split, "index": index}}


def main(argv: list[str] | None = None) -> None:
    """Convert the splits that are there; a single file is divided."""
    local_source = "a file, or a folder with train and test files"
    arguments = schema.parser("Preference pairs to parquet.", local_source=local_source, num_test=0)
    arguments.add_argument("--split", choices=("rl", "rm", "sft"), default="rl", help="what the rows are for")
    arguments.add_argument("--data_source", default="Dahoas/full-hh-rlhf", help="data_source of the rows (rl)")
    options = arguments.parse_args(argv)
    where = "the pairs, from github.com/anthropics/hh-rlhf for instance"
    parts = schema.read_parts(options, where, _ANSWERS, _pairs)
    row_of = partial(to_row, kind=options.split, data_source=options.data_source)
    schema.write_splits(parts, row_of, options.local_save_dir / options.split, title=f"preferences ({options.split})")


def _pairs(records: list[dict[str, Any]], file: Path) -> list[Pair]:
    return [to_pair(record, f"{file}, record {i}") for i, record in enumerate(records)]


if __name__ == "__main__":
    schema.run(main)
