"""verl.utils.reward_score, by the package's own graders: what reward functions written for verl fall back on."""

from __future__ import annotations

import pkgutil
from typing import Any

from verl_like.rewards import graders

__path__ = pkgutil.extend_path(__path__, __name__)  # a user's own files of this name stand beside these


def default_compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    sandbox_fusion_url: str | None = None,
    concurrent_semaphore: Any = None,
    memory_limit_mb: int | None = None,
    **kwargs: Any,
) -> float | dict[str, Any]:
    """Score with the grader of the data source: a number or, where verl's returns one (`math_dapo`), a dict.

    Raises NotImplementedError where no grader has the data source, and where it needs a sandbox for programs.
    """
    name = graders.GraderChoice().grader_of_row(data_source)
    if name is None or graders.GRADERS[name].runs_programs:
        raise NotImplementedError(
            f"default_compute_score: data_source={data_source!r} has no grader that a function can call; leave "
            "custom_reward_function.path out for its rows (reward_model.rule_by_source takes functions for the others)"
        )
    graded = graders.compute_score(data_source, solution_str, ground_truth, extra_info, grader=name)
    return graded if name == "math_dapo" else float(graded["score"])


_default_compute_score = default_compute_score  # its name until verl 0.4
