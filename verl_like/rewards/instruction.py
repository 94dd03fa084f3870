"""Instruction following: the share of IFEval's format instructions that a response obeys."""

from __future__ import annotations

import json
from typing import Any

from verl_like.rewards.instruction_checks import obeys
from verl_like.rewards.truth import dictionary_with

_END_OF_THINKING = "</think>"


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    *,
    score: float = 1.0,
    partial_credit: bool = False,
) -> dict[str, Any]:
    """`score` if all instructions are obeyed; with partial_credit, that times the share of them that are.

    ground_truth: {"instruction_id_list": [name, ...], "kwargs": [arguments, ...]}, also as a JSON text, or a list of
    {"instruction_id", "kwargs"}. What stands before </think> is not looked at. Returns score, acc (all obeyed), share,
    and pred: the instructions that were not obeyed.
    """
    instructions = _instructions(ground_truth)
    text = solution_str.rsplit(_END_OF_THINKING, 1)[-1].strip()
    broken = [name for name, arguments in instructions if not obeys(name, arguments, text)]
    share = 1 - len(broken) / len(instructions)
    value = share if partial_credit else float(not broken)
    return {
        "score": score * value,
        "acc": float(not broken),
        "share": share,
        "pred": f"broken: {', '.join(broken)}" if broken else "all obeyed",
    }


def _instructions(ground_truth: Any) -> list[tuple[str, dict[str, Any]]]:
    if isinstance(ground_truth, str) and ground_truth.lstrip().startswith("["):
        ground_truth = json.loads(ground_truth)
    if isinstance(ground_truth, list):
        items = [dictionary_with(item, "instruction_id") for item in ground_truth]
        pairs = [(item["instruction_id"], item.get("kwargs")) for item in items]
    else:
        truth = dictionary_with(ground_truth, "instruction_id_list")
        names = truth["instruction_id_list"]
        pairs = list(zip(names, truth.get("kwargs") or [None] * len(names), strict=True))
    if not pairs:
        raise ValueError(f"the row has no instructions: {ground_truth!r}")
    # parquet gives every row the arguments of all instructions, null where they do not belong
    return [(name, {k: v for k, v in (arguments or {}).items() if v is not None}) for name, arguments in pairs]
