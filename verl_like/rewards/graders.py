"""The built-in graders, by data source.

A grader has verl's signature: grader(data_source, solution_str, ground_truth, extra_info=None) -> float or dict with
"score". To add one: a file with a function, one line in GRADERS, a test, a row in docs/rewards.md.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

Grader = Callable[..., Any]

# data source -> module with a compute_score. Modules are imported when first used, so that a worker which never sees
# a data source does not pay for its grader's imports.
GRADERS: dict[str, str] = {
    "openai/gsm8k": "verl_like.rewards.gsm8k",
    "gsm8k": "verl_like.rewards.gsm8k",
    "countdown": "verl_like.rewards.countdown",
    "game24": "verl_like.rewards.countdown",
    "arithmetic": "verl_like.rewards.arithmetic",
}


@cache
def grader_of(data_source: str) -> Grader:
    """The grader of a data source. ValueError naming the known ones if there is none."""
    check_data_sources([data_source])
    return importlib.import_module(GRADERS[data_source]).compute_score


def check_data_sources(data_sources: Iterable[str]) -> None:
    """Raise ValueError unless every data source has a built-in grader."""
    unknown = sorted({name for name in data_sources if name not in GRADERS})
    if unknown:
        raise ValueError(
            f"no built-in grader for data_source {', '.join(map(repr, unknown))} (built in: "
            f"{', '.join(sorted(GRADERS))}). Set custom_reward_function.path to a file with a compute_score function, "
            "or data.reward_fn_key to the column that names the data source."
        )


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
) -> Any:
    """Score with the grader of `data_source`: what runs when no custom_reward_function.path is set."""
    return grader_of(data_source)(data_source, solution_str, ground_truth, extra_info)
