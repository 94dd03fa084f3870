"""Find the reward function a configuration names, and check it before the first step. Standard library only."""

from __future__ import annotations

import functools
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
from verl_like.rewards.reward_call import RewardFunctionError, ScorerSpec

_MODULE_PREFIX = "pkg://"
_BATCH_ARGUMENTS = ("data_sources", "solution_strs", "ground_truths", "extra_infos")
_ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")


def resolve_path(path: str, key: str = "custom_reward_function.path") -> str:
    """An absolute file path, or `pkg://module` as it is. RewardFunctionError if the file does not exist."""
    if path.startswith(_MODULE_PREFIX):
        return path
    file = Path(path).expanduser().resolve()
    if not file.is_file():
        raise RewardFunctionError(f"{key}={path}: there is no such file ({file})")
    return str(file)


def load_scorer(spec: ScorerSpec) -> Callable[..., Any]:
    """What scores one response (or a batch). Raises RewardFunctionError that names the key to change."""
    function = _load_function(spec)
    return function if spec.manager is None else _load_manager(spec, function)


def own_arguments(spec: ScorerSpec) -> dict[str, Any]:
    """Keyword arguments of every call of what `load_scorer` gives, besides the four of a reward function."""
    if spec.manager is not None:
        return {}
    return spec.kwargs if spec.path is not None else {"options": spec.options}


def _load_manager(spec: ScorerSpec, function: Callable[..., Any]) -> Callable[..., Any]:
    """An object of the user's manager class, made around the function that would have scored."""
    path, _, name = (spec.manager or "").rpartition(":")
    module = _load_module(path, "reward_model.reward_manager")
    kind = getattr(module, name, None)
    if not isinstance(kind, type) or not any("__call__" in vars(base) for base in kind.__mro__):
        raise RewardFunctionError(
            f"reward_model.reward_manager={spec.manager}: {path} has no class {name} with a __call__"
        )
    try:
        return kind(compute_score=_bound(spec, function), **spec.manager_kwargs)
    except Exception as error:
        tail = "".join(traceback.format_exception(error)[-4:])
        raise RewardFunctionError(
            f"reward_model.reward_manager={spec.manager}: {name}(compute_score=..., **{spec.manager_kwargs}) (its "
            f"arguments are reward_model.reward_kwargs) failed:\n{tail}"
        ) from error


def _bound(spec: ScorerSpec, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with everything but the four arguments of a reward function."""
    if spec.path is not None:
        return functools.partial(function, **spec.kwargs)

    def compute_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> Any:
        name = spec.choice.grader_of_row(data_source)
        arguments = {"grader": name, "options": spec.options}
        return graders.compute_score(data_source, solution_str, ground_truth, extra_info, **arguments)

    return compute_score


def _load_function(spec: ScorerSpec) -> Callable[..., Any]:
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


def _load_module(path: str, key: str = "custom_reward_function.path") -> ModuleType:
    try:
        if path.startswith(_MODULE_PREFIX):
            return importlib.import_module(path.removeprefix(_MODULE_PREFIX))
        return _load_file(Path(resolve_path(path, key)))
    except RewardFunctionError:
        raise
    except BaseException as error:  # a user's module may raise anything, SystemExit included
        tail = "".join(traceback.format_exception(error)[-6:])
        raise RewardFunctionError(f"{key}={path} could not be imported:\n{tail}") from error


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
    names = _BATCH_ARGUMENTS if spec.batch else _ARGUMENTS
    clash = sorted(set(spec.kwargs) & set(names))
    if clash:
        raise RewardFunctionError(f"custom_reward_function.reward_kwargs may not set {', '.join(clash)}")
    try:
        signature.bind(**dict.fromkeys(names), **spec.kwargs)
    except TypeError as error:
        extra = f", **{spec.kwargs}" if spec.kwargs else ""
        raise RewardFunctionError(
            f"custom_reward_function.name={spec.name}: {spec.path} defines {spec.name}{signature}, which cannot be "
            f"called as {spec.name}({'=, '.join(names)}={extra}): {error}. "
            "Change the function or custom_reward_function.reward_kwargs."
        ) from error
