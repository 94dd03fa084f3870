"""Find the reward function a configuration names, and check it before the first step. Standard library only."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from verl_like.rewards import graders
from verl_like.rewards.protocol import RewardFunctionError, ScorerSpec

_MODULE_PREFIX = "pkg://"
_ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")


def resolve_path(path: str) -> str:
    """An absolute file path, or `pkg://module` as it is. RewardFunctionError if the file does not exist."""
    if path.startswith(_MODULE_PREFIX):
        return path
    file = Path(path).expanduser().resolve()
    if not file.is_file():
        raise RewardFunctionError(f"custom_reward_function.path={path}: there is no such file ({file})")
    return str(file)


def load_scorer(spec: ScorerSpec) -> Callable[..., Any]:
    """The function that scores one response. Raises RewardFunctionError that names the key to change."""
    if spec.path is None:
        return graders.compute_score
    module = _load_module(spec.path)
    function = getattr(module, spec.name, None)
    if function is None:
        public = [n for n, v in vars(module).items() if inspect.isroutine(v) and not n.startswith("_")]
        raise RewardFunctionError(
            f"custom_reward_function.name={spec.name}: {spec.path} has no such function (it has: {', '.join(public)})"
        )
    if not callable(function):
        raise RewardFunctionError(
            f"custom_reward_function.name={spec.name}: {spec.path} defines it as {type(function).__name__}, "
            "which cannot be called"
        )
    _check_signature(function, spec)
    return function


def is_async(function: Callable[..., Any]) -> bool:
    """Whether calling it gives a coroutine."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def _load_module(path: str) -> ModuleType:
    try:
        if path.startswith(_MODULE_PREFIX):
            return importlib.import_module(path.removeprefix(_MODULE_PREFIX))
        return _load_file(Path(resolve_path(path)))
    except RewardFunctionError:
        raise
    except BaseException as error:  # a user's module may raise anything, SystemExit included
        tail = "".join(traceback.format_exception(error)[-6:])
        raise RewardFunctionError(f"custom_reward_function.path={path} could not be imported:\n{tail}") from error


def _load_file(file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("custom_reward_function", file)
    if spec is None or spec.loader is None:
        raise RewardFunctionError(f"custom_reward_function.path={file} is not a Python file (.py)")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickling look the module up by name
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))  # helpers beside the file can be imported
    spec.loader.exec_module(module)
    return module


def _check_signature(function: Callable[..., Any], spec: ScorerSpec) -> None:
    try:
        signature = inspect.signature(function)
    except ValueError:  # some compiled functions do not tell
        return
    clash = sorted(set(spec.kwargs) & set(_ARGUMENTS))
    if clash:
        raise RewardFunctionError(f"custom_reward_function.reward_kwargs may not set {', '.join(clash)}")
    try:
        signature.bind(**dict.fromkeys(_ARGUMENTS), **spec.kwargs)
    except TypeError as error:
        extra = f", **{spec.kwargs}" if spec.kwargs else ""
        raise RewardFunctionError(
            f"custom_reward_function.name={spec.name}: {spec.path} defines {spec.name}{signature}, which cannot be "
            f"called as {spec.name}(data_source=, solution_str=, ground_truth=, extra_info={extra}): {error}. "
            "Change the function or custom_reward_function.reward_kwargs."
        ) from error
