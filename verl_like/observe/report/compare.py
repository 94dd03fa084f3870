"""Runs side by side: the keys that differ, and the answers of each to the same validation prompts."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from verl_like.config.schema import keys
from verl_like.observe.report.content import shown
from verl_like.observe.run_folder import Run, flat

_MOST_PROMPTS = 64


def run_names(runs: Sequence[Run]) -> list[str]:
    """A short name for each run: its folder, with as much of the path as makes the names differ."""
    paths = [run.path.resolve().parts for run in runs]
    for depth in range(1, max(map(len, paths)) + 1):
        names = [os.path.join(*parts[-depth:]) for parts in paths]
        if len(set(names)) == len(names):
            return names
    return [f"{'/'.join(parts[-1:])} ({number})" for number, parts in enumerate(paths, start=1)]


def differing_keys(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Keys whose values are not the same in all runs, with their meaning."""
    known, tables = keys(), [flat(run.config) for run in runs]
    paths = dict.fromkeys(path for table in tables for path in table)
    missing = object()
    rows = []
    for path in paths:
        values = [table.get(path, missing) for table in tables]
        if any(value != values[0] for value in values):
            texts = ["(not set)" if value is missing else shown(path, value) for value in values]
            rows.append({"key": path, "values": texts, "meaning": known[path].doc if path in known else ""})
    return rows


def answers_side_by_side(runs: Sequence[Run]) -> dict[str, Any]:
    """The newest kept answers of each run to validation prompts that all have: {"steps", "rows"}."""
    newest: list[dict[tuple[str, str], dict[str, Any]]] = []
    steps: list[int | None] = []
    for run in runs:
        records = run.validation_samples
        last = max((record["step"] for record in records), default=None)
        steps.append(last)
        found: dict[tuple[str, str], dict[str, Any]] = {}
        for record in records:
            if record["step"] == last:
                found.setdefault((record["data_source"], record["input"]), record)
        newest.append(found)
    common = [key for key in newest[0] if all(key in other for other in newest[1:])][:_MOST_PROMPTS] if newest else []
    rows = []
    for key in common:
        answers = [table[key] for table in newest]
        scores = [answer["score"] for answer in answers]
        rows.append({"prompt": key[1], "truth": answers[0]["gts"], "answers": answers, "differs": len(set(scores)) > 1})
    return {"steps": steps, "rows": sorted(rows, key=lambda row: not row["differs"])}
