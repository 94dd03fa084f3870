"""The built-in graders: by name, and which one grades a row.

A grader has verl's signature: compute_score(data_source, solution_str, ground_truth, extra_info=None, **options) and
gives a float or a dict with "score"; the dict's "pred" is what it extracted. To add one: a file with a `compute_score`,
a row in graders.txt, a test, a row in docs/rewards.md.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from verl_like.text import table_rows
from verl_like.user_code import FORMS, is_reference, load

Grader = Callable[..., Any]

_NO_OPTIONS: Mapping[str, Any] = {}  # never written to
_ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")


@dataclass(frozen=True, slots=True)
class GraderEntry:
    """Module of a grader, which is imported when it is first used, and the options that its name stands for."""

    module: str  # has a compute_score
    preset: Mapping[str, Any] = field(default_factory=lambda: _NO_OPTIONS)
    runs_programs: bool = False  # needs a sandbox


GRADERS: dict[str, GraderEntry] = {}
ROUTES: dict[str, str] = {}  # data source or pattern -> grader. Exact names are looked up first, then patterns in order
for _name, _module, _options, _sources in table_rows(Path(__file__).with_suffix(".txt").read_text(encoding="utf-8")):
    _programs, _pairs = _options == "programs", [pair.split("=") for pair in _options.split() if "=" in pair]
    GRADERS[_name] = GraderEntry(f"verl_like.plugins.{_module}", dict(_pairs), _programs)
    ROUTES |= dict.fromkeys(_sources.split(), _name)


@dataclass(frozen=True, slots=True, kw_only=True)
class GraderChoice:
    """Choice of the grader of each row: by the user's settings, then by the row itself, then by ROUTES.

    Make one with `choose`, which checks it.

    by_source: data_source or pattern -> grader name.
    rule: grader of all other rows.
    options: grader name -> keyword arguments.
    """

    rule: str | None = None
    by_source: Mapping[str, str] = field(default_factory=lambda: _NO_OPTIONS)
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: _NO_OPTIONS)

    def grader_of_row(self, data_source: str, style: str = "") -> str | None:
        """Name of the grader of a row, or None. `style` is the row's reward_model.style: it may name a grader."""
        chosen = _lookup(self.by_source, data_source) or self.rule
        return chosen or (style if style in GRADERS else _lookup(ROUTES, data_source))

    def check_rows(self, rows: Iterable[tuple[str, str]]) -> None:
        """Raise ValueError unless every (data_source, style) has a grader."""
        unknown = sorted({source for source, style in rows if self.grader_of_row(source, style) is None})
        if unknown:
            raise ValueError(
                f"no built-in grader for data_source {', '.join(map(repr, unknown))} (built in: "
                f"{', '.join(sorted(ROUTES))}). Choose a grader by name with reward_model.rule or "
                f"reward_model.rule_by_source (graders: {', '.join(GRADERS)}), set custom_reward_function.path to a "
                "file with a compute_score function, or data.reward_fn_key to the column that names the data source."
            )


def choose(
    rule: str | None = None,
    by_source: Mapping[str, str] | None = None,
    rule_kwargs: Mapping[str, Any] | None = None,
) -> GraderChoice:
    """A GraderChoice from reward_model.{rule, rule_by_source, rule_kwargs}.

    Raises ValueError, which names the key to change.

    rule_kwargs holds options of `rule`, and under a grader's name a dictionary with options of that grader.
    """
    by_source = dict(by_source or {})
    named = {"reward_model.rule": rule} | {f"reward_model.rule_by_source.{s}": name for s, name in by_source.items()}
    for key, name in named.items():
        if name is not None and not is_grader(name):
            known = ", ".join(GRADERS)
            raise ValueError(f"{key}={name}: there is no such grader; choose one of {known}, or your own: {FORMS}")
    options: dict[str, dict[str, Any]] = {}
    for key, value in (rule_kwargs or {}).items():
        if is_grader(key) and isinstance(value, Mapping):
            options.setdefault(key, {}).update(value)
        elif rule is not None:
            options.setdefault(rule, {})[key] = value
        else:
            raise ValueError(
                f"reward_model.rule_kwargs.{key}={value!r}: whose option is it? Set reward_model.rule, or write "
                f"reward_model.rule_kwargs.<grader>.{key} (graders: {', '.join(GRADERS)})"
            )
    for name, chosen in options.items():
        if name in GRADERS:  # those of users' graders are checked where these are loaded, in the reward workers
            _check_options(name, chosen)
    return GraderChoice(rule=rule, by_source=by_source, options=options)


def is_grader(name: str) -> bool:
    """True for the name of a built-in grader, or a reference to one of the user's own."""
    return name in GRADERS or is_reference(name)


@functools.cache
def grader_by_name(name: str) -> Grader:
    """The grader of that name or reference. Raises ValueError, naming the known ones, if there is none."""
    if is_reference(name):
        return load(name, "reward_model.rule")
    if name not in GRADERS:
        raise ValueError(f"there is no grader {name!r}; choose one of {', '.join(GRADERS)}")
    entry = GRADERS[name]
    function = importlib.import_module(entry.module).compute_score
    return functools.partial(function, **entry.preset) if entry.preset else function


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    *,
    grader: str | None = None,
    options: Mapping[str, Mapping[str, Any]] = _NO_OPTIONS,
) -> Any:
    """Score with the grader of that name, or that of `data_source`: what runs without custom_reward_function.path."""
    if grader is None:
        choice = GraderChoice()
        choice.check_rows([(data_source, "")])
        grader = choice.grader_of_row(data_source)
    assert grader is not None
    function = grader_by_name(grader)
    return function(data_source, solution_str, ground_truth, extra_info, **options.get(grader, _NO_OPTIONS))


def _lookup(routes: Mapping[str, str], data_source: str) -> str | None:
    if data_source in routes:
        return routes[data_source]
    return next((name for pattern, name in routes.items() if fnmatchcase(data_source, pattern)), None)


def _check_options(name: str, options: Mapping[str, Any]) -> None:
    parameters = inspect.signature(grader_by_name(name)).parameters
    known = [key for key in parameters if key not in _ARGUMENTS]
    for key in options:
        if key not in known:
            raise ValueError(
                f"reward_model.rule_kwargs: grader {name} has no option {key!r} (it has: {', '.join(known) or 'none'})"
            )
