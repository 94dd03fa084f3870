"""Rows, and toolboxes of files written for one test."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from verl_like.batch import PromptRow
from verl_like.plugins.agents.tools.tool_call import ToolOutcome, ToolSpec
from verl_like.plugins.agents.tools.toolbox import Toolbox


def row(ground_truth: Any = "7", **extra_info: Any) -> PromptRow:
    messages = [{"role": "user", "content": "What is it?"}]
    return PromptRow(index=3, data_source="test", messages=messages, ground_truth=ground_truth, extra_info=extra_info)


def write(folder: Path, name: str, source: str) -> str:
    (folder / name).write_text(textwrap.dedent(source))
    return str(folder / name)


@contextmanager
def toolbox(*, num_workers: int = 1, timeout: float = 20.0, **settings: Any) -> Iterator[Toolbox]:
    box = Toolbox(ToolSpec(timeout=timeout, **settings), num_workers=num_workers)
    try:
        yield box
    finally:
        box.close()


def called(box: Toolbox, session: str, name: str, **arguments: Any) -> ToolOutcome:
    return box.call(session, name, arguments).result(30)


def names(schemas: list[dict[str, Any]] | None) -> list[str]:
    return [schema["function"]["name"] for schema in schemas or []]
