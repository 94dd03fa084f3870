"""Graders of other projects behind our reward function signature, to be compared with ours; see graders.py.

They are loaded from the installed packages: math-verify, and, from a folder given as `peers`, verl and trl.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import sys
from pathlib import Path
from types import ModuleType
from typing import Any


def math_verify(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> float:
    """math-verify as its README uses it, without its time limits (a pool kills what hangs)."""
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    from math_verify import parse, verify

    gold = parse(f"${ground_truth}$", parsing_timeout=None)  # type: ignore[arg-type]
    return float(verify(gold, parse(solution_str, parsing_timeout=None), timeout_seconds=None))  # type: ignore[arg-type]


def verl(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None, *, peers: str) -> float:
    """verl's grader of the data source: normalised strings."""
    name = "gsm8k" if "gsm8k" in data_source else "math_reward"
    module = _load(str(Path(peers) / "verl" / "utils" / "reward_score" / f"{name}.py"))
    return float(module.compute_score(solution_str, ground_truth))


def trl(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None, *, peers: str) -> float:
    """TRL's accuracy_reward: math-verify on boxed answers, with signals as time limits. -1: it skipped the row."""
    if peers not in sys.path:
        sys.path.append(peers)
    from trl.rewards.accuracy_rewards import accuracy_reward

    (reward,) = accuracy_reward([[{"role": "assistant", "content": solution_str}]], [f"${ground_truth}$"])
    return -1.0 if reward is None else float(reward)


@functools.cache
def _load(path: str) -> ModuleType:
    """A module by file, without its package's imports."""
    spec = importlib.util.spec_from_file_location(f"peer_{Path(path).stem}", path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
