"""Find the reward function a configuration names, and check it before the first step. Standard library only."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from verl_like.rewards import graders
from verl_like.rewards.reward_call import RewardFunctionError, ScorerSpec
from verl_like.user_code import check_call, find, find_stand_ins, load, load_module, own_lines

_BATCH_ARGUMENTS = ("data_sources", "solution_strs", "ground_truths", "extra_infos")
_ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
# What the functions in verl/utils/reward_score call the same things.
_OTHER_NAMES = {
    **dict.fromkeys(("predict_str", "model_output", "completion"), "solution_str"),
    "test_cases": "ground_truth",
}
SERVED = ("reward_router_address", "reward_model_tokenizer", "reward_model_path")


def load_scorer(spec: ScorerSpec) -> Callable[..., Any]:
    """Load the function that scores one response (or a batch). Raises a ValueError that names the key to change."""
    if spec.path is not None or spec.own_graders:
        find_stand_ins()  # of verl's modules, which functions written for it import
    for key, reference in spec.own_graders.items():  # reward_model.rule=file.py:name and the like
        function = load(reference, key)
        check_call(function, f"{key}={reference}", *_ARGUMENTS, keywords=spec.options.get(reference, {}))
    function = _load_function(spec)
    return function if spec.manager is None else _load_manager(spec, function)


def own_arguments(spec: ScorerSpec) -> dict[str, Any]:
    """Keyword arguments of every call of what `load_scorer` gives, besides the four of a reward function."""
    if spec.manager is not None:
        return {}
    if spec.served_path is not None and spec.path is not None:
        return _of_server(spec) | spec.kwargs
    return spec.kwargs if spec.path is not None else {"options": spec.options}


def _of_server(spec: ScorerSpec) -> dict[str, Any]:
    """Make verl's arguments of a function that asks the reward model; the server's address comes with each call."""
    asked = _asks_for(_load_function(spec))
    given: dict[str, Any] = {}
    if "reward_model_path" in asked:
        given["reward_model_path"] = spec.served_path
    if "reward_model_tokenizer" in asked:
        from transformers import AutoTokenizer

        given["reward_model_tokenizer"] = AutoTokenizer.from_pretrained(
            spec.served_folder, trust_remote_code=spec.served_trust
        )
    return given


def _asks_for(function: Callable[..., Any]) -> list[str]:
    """List the arguments among SERVED that the function takes.

    **kwargs counts as the first of them alone, so that nothing is loaded in vain.
    """
    try:
        parameters = inspect.signature(function).parameters
    except ValueError:
        return []
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return [name for name in SERVED if name in parameters or (takes_all and name == SERVED[0])]


def takes_address(spec: ScorerSpec, function: Callable[..., Any]) -> bool:
    """True where the function is to be passed the address of the served reward model.

    False where the user's own arguments give one.
    """
    if spec.served_path is None or spec.path is None or spec.manager is not None:
        return False
    return SERVED[0] in _asks_for(function) and SERVED[0] not in spec.kwargs


def _load_manager(spec: ScorerSpec, function: Callable[..., Any]) -> Callable[..., Any]:
    """An object of the user's manager class, made around the function that would have scored."""
    assert spec.manager is not None
    kind = load(spec.manager, "reward_model.reward_manager")
    name = spec.manager.rpartition(":")[2]
    if not isinstance(kind, type) or not any("__call__" in vars(base) for base in kind.__mro__):
        raise RewardFunctionError(f"reward_model.reward_manager={spec.manager}: {name} is no class with a __call__")
    try:
        return kind(compute_score=_bound(spec, function), **spec.manager_kwargs)
    except Exception as error:
        tail = own_lines(error, limit=-4)
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
    module = load_module(spec.path, "custom_reward_function.path")
    function = find(module, spec.name, f"custom_reward_function.name={spec.name}")
    if not callable(function):
        raise RewardFunctionError(
            f"custom_reward_function.name={spec.name}: {spec.path} defines it as {type(function).__name__}, "
            "which cannot be called"
        )
    taken = None if spec.batch else _arguments_by_parameter(function)
    _check_signature(function, spec, taken)
    return function if taken is None else _taking(function, taken)


def _arguments_by_parameter(function: Callable[..., Any]) -> dict[str, str] | None:
    """Parameter -> which of the four arguments it takes, where a function takes some of them only, or by verl's other
    names; None for one that takes all four, and for one that takes no response."""
    try:
        parameters = inspect.signature(function).parameters
    except ValueError:
        return None
    taken = {name: _OTHER_NAMES.get(name, name) for name in parameters if name in (*_ARGUMENTS, *_OTHER_NAMES)}
    if "solution_str" not in taken.values() or len(set(taken.values())) < len(taken):
        return None
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        taken |= {name: name for name in _ARGUMENTS if name not in taken.values()}
    return None if taken.keys() == set(_ARGUMENTS) else taken


def _taking(function: Callable[..., Any], taken: dict[str, str]) -> Callable[..., Any]:
    """The function, to be called with all four arguments."""

    @functools.wraps(function)
    def called(
        data_source: Any = None, solution_str: Any = None, ground_truth: Any = None, extra_info: Any = None, **own: Any
    ) -> Any:
        values = (data_source, solution_str, ground_truth, extra_info)
        given: dict[str, Any] = dict(zip(_ARGUMENTS, values, strict=True))
        return function(**{name: given[argument] for name, argument in taken.items()}, **own)

    if not inspect.iscoroutinefunction(function):
        return called

    @functools.wraps(function)
    async def awaited(*arguments: Any, **own: Any) -> Any:
        return await called(*arguments, **own)

    return awaited


def is_async(function: Callable[..., Any]) -> bool:
    """True where calling the function gives a coroutine."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def _check_signature(function: Callable[..., Any], spec: ScorerSpec, taken: dict[str, str] | None) -> None:
    try:
        signature = inspect.signature(function)
    except ValueError:  # some compiled functions do not tell
        return
    names = _BATCH_ARGUMENTS if spec.batch else _ARGUMENTS
    if spec.served_path is not None:
        names = (*names, *(name for name in _asks_for(function) if name not in spec.kwargs))
    clash = sorted(set(spec.kwargs) & set(names))
    if clash:
        raise RewardFunctionError(f"custom_reward_function.reward_kwargs may not set {', '.join(clash)}")
    given = names if taken is None else (*taken, *(name for name in names if name not in _ARGUMENTS))
    try:
        signature.bind(**dict.fromkeys(given), **spec.kwargs)
    except TypeError as error:
        extra = f", **{spec.kwargs}" if spec.kwargs else ""
        raise RewardFunctionError(
            f"custom_reward_function.name={spec.name}: {spec.path} defines {spec.name}{signature}, which cannot be "
            f"called as {spec.name}({'=, '.join(names)}={extra}): {error}. "
            "Change the function or custom_reward_function.reward_kwargs."
        ) from error
