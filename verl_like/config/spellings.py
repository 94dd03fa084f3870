"""Settings under today's names and values: overrides and YAML pass through here before composing.

names/verl.txt says what verl's old and newer spellings are here (names.py has its form); this module applies it, with
the few translations that look at several settings at once or compute a value. Standard library only.
"""

import difflib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from verl_like.config.errors import ConfigError
from verl_like.config.names import MISSING, NOTHING, VERL, Row, rows_of, table, value_of, written
from verl_like.config.ppo import PPOConfig
from verl_like.config.schema import find_key, get_value, sections
from verl_like.config.sync_rounds import is_of_rounds, rounds_of_verl

_SECTION = "algorithm.rollout_correction"
_ROLL = "algorithm.train_infer_correction"
_TIS = "actor_rollout_ref.actor.tis_imp_ratio_cap"


@dataclass(frozen=True, slots=True)
class Change:
    """One value that the user sets: a dotted key and a plain value."""

    key: str
    value: Any


def standing(changes: list[Change]) -> list[Change]:
    """Settings that no later one of the same key, by any name, replaces: the rest is not read. Dictionaries merge."""
    kept: list[Change] = []
    replaced: set[str] = set()
    for change in reversed(changes):
        key = renamed(change.key)
        if key not in replaced:
            kept.append(change)
        if not isinstance(change.value, dict):
            replaced.add(key)
    return kept[::-1]


def canonical(changes: list[Change]) -> tuple[list[Change], list[str]]:
    """Settings under today's names and values, and one warning line for each that was translated."""
    result: list[Change] = []
    warnings: list[str] = []
    if any(row.rule == "fn correction" for each in changes for row, _ in rows_of(VERL, each.key)):
        changes, warnings = correction_spellings(changes)
    changes, told = _rounds(changes)
    warnings += told
    changes, told = _one_split(changes)
    warnings += told
    for change in changes:
        change = _followed(change)
        if change is None:
            continue
        left_out = _left_out(change)
        if left_out is not None:
            warnings.append(left_out)
            continue
        several, note = _several(change)
        if several:
            result += several
            meant = ", ".join(f"{new.key}={new.value}" for new in several)
            becomes = f"becomes {meant}: {note}" if note else f"is another spelling of {meant}"
            warnings.append(f"{change.key}={change.value} {becomes}")
            continue
        key = renamed(change.key)
        if key != change.key:
            warnings.append(f"{change.key} is another spelling of {key}; use {key}")
        if key in (better := deprecated()) and change.value is not None:
            warnings.append(f"{key} is deprecated: {better[key][1]}; use {better[key][0]}")
        value = _converted(key, change.value)
        if value not in (change.value, [change.value]) and change.value is not None and str(value) != change.value:
            warnings.append(f"{key}={change.value} is another spelling of {key}={value}")
        result.append(Change(key, value))
    return result, warnings


_REFERENCE = re.compile(r"\$\{(oc\.select:)?\s*([\w.]+)\s*(?:,(.*))?\}")


def _followed(change: Change) -> Change | None:
    """A setting that follows another (`${key}`, `${oc.select:key,default}`), by that one's name of today; the default,
    where there is no such key. None: by another spelling it follows itself, as keys in verl's own files do."""
    match = _REFERENCE.fullmatch(change.value) if isinstance(change.value, str) else None
    if match is None or match[2].startswith((".", "oc.")):
        return change
    source = renamed(match[2])
    if source == renamed(change.key):
        return None
    if match[1] and find_key(source) is None and source not in sections():
        return _followed(Change(change.key, _read((match[3] or "null").strip())))
    return Change(change.key, change.value.replace(match[2], source, 1))


def _read(text: str) -> Any:
    """A default in an interpolation: `null`, `false`, a number, `[]`; anything else is text."""
    try:
        return json.loads(text.lower())
    except ValueError:
        return text


def renamed(key: str) -> str:
    """Today's spelling of a key."""
    found = next((match.expand(row.keys[0]) for row, match in rows_of(VERL, key) if row.renames), None)
    return key if found is None else renamed(found)


_SPLIT = re.compile(r"(actor_rollout_ref\.(?:actor|ref)|critic|reward_model)\.megatron\.tensor_model_parallel_size")


def _rounds(changes: list[Change]) -> tuple[list[Change], list[str]]:
    """Put what verl's fully_async_main spells by its rounds before what is given; one line for all."""
    given = {renamed(each.key): each for each in changes}
    found, line = rounds_of_verl({key: each.value for key, each in given.items()}, lambda each: _size(each, given))
    kept = [each for each in changes if not is_of_rounds(each.key) and renamed(each.key) not in found]
    return [*(Change(key, value) for key, value in found.items()), *kept], [line] if line else []


def _one_split(changes: list[Change]) -> tuple[list[Change], list[str]]:
    """Leave out Megatron's tensor parallelism where a role has context or expert parallelism too; one line for each.

    A row's tokens are split once here, and experts are not split by columns: FSDP shards over those processes instead.
    """
    given = {renamed(each.key): each for each in changes}
    result, told, instead = list[Change](), list[str](), dict[str, int]()
    for change in changes:
        match = _SPLIT.fullmatch(change.key)
        if match is None or _size(change.value, given) < 2:
            result.append(change)
            continue
        key = renamed(change.key)
        roles, follower = {key: match[1]}, key.replace(".actor.", ".ref.")
        if follower not in given:  # the reference takes the actor's size
            roles[follower] = match[1].replace(".actor", ".ref")
        beside = [(target, other) for target, role in roles.items() if (other := _other_split(role, given))][:1]
        if not any(target == key for target, _ in beside):
            result.append(change)
        for target, other in beside:
            why = f"beside {other.key}={other.value} FSDP shards the weights over these processes instead; same numbers"
            told.append(f"{change.key}={change.value}: {why}")
            result.append(Change(target, 1))
            instead[target] = _size(change.value, given)
    return [_kept(change, instead) for change in result], told


def _kept(change: Change, sizes: Mapping[str, int]) -> Change:
    """A setting that follows a size which is left out, with that size."""
    match = _REFERENCE.fullmatch(change.value) if isinstance(change.value, str) else None
    size = sizes.get(renamed(match[2])) if match else None
    return change if size is None else Change(change.key, size)


def _other_split(role: str, given: Mapping[str, Change]) -> Change | None:
    """Setting that gives a role context or expert parallelism; the reference follows the actor where it has none."""
    names = ("megatron.context_parallel_size", "megatron.expert_model_parallel_size", "ulysses_sequence_parallel_size")
    for name in names:
        key = renamed(f"{role}.{name}")
        change = given.get(key, given.get(key.replace(".ref.", ".actor.")))
        if change is not None and _size(change.value, given) > 1:
            return change
    return None


def _size(value: Any, given: Mapping[str, Change]) -> int:
    """A size, or that of the key it follows; 0 for what is none."""
    for _ in range(len(given) + 1):  # no more, where keys follow each other in a circle
        if not (match := _REFERENCE.fullmatch(value) if isinstance(value, str) else None):
            break
        key = renamed(match[2])
        known = find_key(key)
        value = given[key].value if key in given else known.default if known else _read((match[3] or "0").strip())
    return _whole(value)


def _whole(value: Any) -> int:
    """A whole number in any of the forms that a key of integers takes; 0 for what is none."""
    if (isinstance(value, float) and value.is_integer()) or (isinstance(value, str) and value.isdecimal()):
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def _left_out(change: Change) -> str | None:
    """Line that tells why a setting is left out; None where it is kept."""
    why = _reason(change)
    if why is None or why[1]:
        return why and f"{change.key}={change.value}: {why[0]}"
    return f"{change.key} has no effect: {why[0]}"


def _reason(change: Change) -> tuple[str, bool] | None:
    """Reason why a setting is left out, and whether it tells what is done instead; None where it is kept."""
    if change.value == "???":
        return "??? is what YAML writes for a value that was not given", False
    key: str | None = change.key
    while key is not None:
        spelling, key, own = key, None, None
        for row, match in rows_of(VERL, spelling, change.value):
            if row.keys and "=" in row.keys[0]:
                return None  # it has a counterpart at this value
            if row.kind == NOTHING and _says_nothing(row, spelling, change.value):
                return row.note or f"{change.value} is what is done anyway", row.instead
            own = row if row.kind == NOTHING and not row.kept else own  # it has another value
            if row.kind == MISSING and not row.values:
                off = None if own and own.instead else _off(own if own and own.note else row, match, change.value)
                return None if off is None else (off, False)
            if row.renames:
                key = match.expand(row.keys[0])
                break
    return None


def _says_nothing(row: Row, key: str, value: Any) -> bool:
    if row.kept and value is None:
        known = find_key(renamed(key))
        return None in row.values and known is not None and not known.may_be_null
    if row.instead:
        return _whole(value) > 0 or (isinstance(value, str) and _REFERENCE.fullmatch(value) is not None)
    return value in row.values if row.values else not row.kept


def _off(row: Row, match: re.Match[str], value: Any) -> str | None:
    """Reason why a setting of a section that is not there says nothing; None where it asks for it."""
    if not value:
        return f"it is off, and not available yet ({row.note})"
    section = match.string.removesuffix(f".{match['below']}")
    if not row.conditions or match.string.rpartition(".")[2] == row.conditions[0]:
        return None
    return f"it belongs to {section}.{row.conditions[0]}, which is off, and not available yet ({row.note})"


def _several(change: Change) -> tuple[list[Change], str]:
    """The settings that stand for one, and what is to be said of that; none where the value is an ordinary one."""
    for row, match in rows_of(VERL, change.key, change.value):
        if row.rule == "not":
            return [Change(match.expand(row.keys[0]), not change.value)], ""
        if row.keys and "=" in row.keys[0] and not row.rule:
            pairs = (match.expand(key).partition("=") for key in row.keys)
            return [Change(key, value_of(value)) for key, _, value in pairs], row.note
    return [], ""


def _converted(key: str, value: Any) -> Any:
    if isinstance(value, str) and value.startswith("${"):
        return value  # an interpolation: its target is converted
    for row, _ in rows_of(VERL, key):
        if not row.keys and not row.kind:
            kind, _, name = row.rule.partition(" ")
            value = CONVERSIONS[name](value) if kind == "fn" else _translated(row.translations(), value)
    return value


def _translated(pairs: Mapping[str, str], value: Any) -> Any:
    for old, new in pairs.items():
        if old != "*" and value == value_of(old):
            return value_of(new)
    return [_translated(pairs, each) for each in value] if isinstance(value, list) else value


# Function of a row about values -> what it does
CONVERSIONS: dict[str, Callable[[Any], Any]] = {
    "model_config": lambda value: _taken_apart(value) if isinstance(value, dict) else value,
    "listed": lambda value: [value] if isinstance(value, str) else value,
    "no_section": lambda value: False if isinstance(value, dict) else value,
    "number": lambda value: int(value) if isinstance(value, str) and value.isdecimal() else value,
}


def _taken_apart(override: dict[str, Any]) -> dict[str, Any]:
    """An override_config without verl's sections: their settings, except those that ask for what is done anyway."""
    plain = {name: value for name, value in override.items() if name not in ("model_config", "moe_config")}
    frozen = {name: value for name, value in (override.get("moe_config") or {}).items() if value}
    return plain | (override.get("model_config") or {}) | frozen


def refusal(key: str) -> str | None:
    """Reason why a setting of verl's under this unknown name is refused, with the fix; None where no row has it."""
    rows = [row for row, _ in rows_of(VERL, key)]
    if any(row.instead for row in rows):
        return "give a whole number, at least 1, or leave it out"
    newer = newer_than_here(key)
    for row in rows:
        if row.kind == NOTHING and row.values and not row.kept:
            fix, why = f"set it to {written(row.values[0])}, or leave it out", row.note or newer
            return f"not available yet; {fix}{f' ({why})' if why else ''}"
    section, _, name = key.rpartition(".")
    places = (text.rpartition(".") for row in table(VERL) for text in row.texts() if not {*"*="} & {*text})
    beside = [other for place, _, other in places if place == section]
    near = [] if name in beside else difflib.get_close_matches(name, beside, n=1, cutoff=0.85)
    if newer and near:
        return f"did you mean {section}.{near[0]}?"
    return newer and f"not available yet ({newer})"


def says_nothing(key: str) -> str | None:
    """Reason why a key of verl's is left out whatever its value; None for others."""
    for row, match in rows_of(VERL, key):
        if row.kind == NOTHING and not row.values and not row.kept:
            return row.note
        if row.renames:
            return says_nothing(match.expand(row.keys[0]))
    return None


def newer_than_here(path: str) -> str | None:
    """Subject of an unknown key of newer verl; None for a key that is known here, or nowhere."""
    return next((row.note for row, _ in rows_of(VERL, path) if row.kind == MISSING and not row.values), None)


@cache
def deprecated() -> dict[str, tuple[str, str]]:
    """Keys that have a better one -> that, and why."""
    pairs = ((row, text) for row in table(VERL) if row.kept and row.keys for text in row.texts())
    return {text: (match.expand(row.keys[0]), row.note) for row, text in pairs for _, match in rows_of(VERL, text)}


@cache
def no_effect() -> dict[str, str]:
    """Keys of ours that change nothing by design -> why. Scripts for verl carry them."""
    rows = (row for row in table(VERL) if row.kept and row.kind == NOTHING and not row.values)
    return {text: row.note for row in rows for text in row.texts()}


@cache
def not_yet() -> dict[str, Row]:
    """Keys of ours of which some values ask for what is not built. Building it = deleting the row."""
    rows = (row for row in table(VERL) if row.kind == MISSING and row.values)
    return {text: row for row in rows for text in row.texts()}


def without_effect(set_keys: frozenset[str]) -> list[str]:
    """One line for every key that the user set and nothing reads in this version."""
    return [f"{key} has no effect: {why}" for key, why in no_effect().items() if key in set_keys]


def not_available(config: PPOConfig) -> list[str]:
    """One line for every switch that is on without its feature being built; followers of a listed key are left out."""
    on = {key: value for key, row in not_yet().items() if _asks_for_it(row, value := get_value(config, key))}
    return [
        f"{key}={value}: not available yet; {not_yet()[key].note}" for key, value in on.items() if not _follows(key, on)
    ]


def _asks_for_it(row: Row, value: Any) -> bool:
    return bool(value) if row.values == ("*",) else value in row.values


def _follows(key: str, on: Mapping[str, Any]) -> bool:
    """Return True where a key of the reference or the critic only repeats the actor's (see trainer/config/*.yaml)."""
    name = key.rsplit(".", 1)[-1]
    return key in (f"actor_rollout_ref.ref.{name}", f"critic.{name}") and f"actor_rollout_ref.actor.{name}" in on


# Correction: what depends on several keys at once. rollout_rs of verl 0.6 -> the option that computes the same.
_OLD_OPTIONS = {"token": "token_k1", "sequence": "seq_sum_k1", "geometric": "seq_mean_k1", "k3": "seq_mean_k3"}
_ROLL_LEVELS = {"token": "token", "segment": "segment_mean", "geometric": "seq_mean", "sequence": "seq_sum"}


def correction_spellings(changes: list[Change]) -> tuple[list[Change], list[str]]:
    """Settings under today's names, and one warning line for each translation.

    As everywhere, a later setting wins over an earlier one: so does a preset, with a warning.
    Raises ConfigError for an unknown preset and for a setting that is not offered.
    """
    warnings: list[str] = []
    changes = _with_presets(changes, warnings)
    result: list[Change] = []
    for change in changes:
        value = change.value
        if change.key == _TIS:
            new = "rollout_is=token with rollout_is_threshold"
            warnings.append(f"{_TIS} is another spelling of {_SECTION}.{new}; use them")
            result += _set(rollout_is="token", rollout_is_threshold=value) if value is not None and value > 0 else []
        elif change.key == f"{_SECTION}.use_policy_gradient":
            kind = "reinforce" if value else "ppo_clip"
            warnings.append(f"{change.key} is another spelling of {_SECTION}.loss_type; use loss_type={kind}")
            result += _set(loss_type=kind)
        elif not change.key.startswith((f"{_ROLL}.", f"{_SECTION}.rollout_rs")):
            result.append(change)
    return result + _roll(changes, warnings) + _rejection_settings(changes, warnings), warnings


def _with_presets(changes: list[Change], warnings: list[str]) -> list[Change]:
    """Each preset replaced by the keys it sets."""
    result: list[Change] = []
    for change in changes:
        if change.key != f"{_SECTION}.preset":
            result.append(change)
            continue
        before = {earlier.key: earlier.value for earlier in result}
        expanded = _expanded(change.value)
        lost = [c for c in expanded if c.key in before and before[c.key] != c.value]
        if lost:
            shown = ", ".join(f"{c.key}={before[c.key]}" for c in lost)
            warnings.append(f"{change.key}={change.value} overrides {shown}, set before it; write the preset first")
        result += expanded
    return result


def _set(**values: Any) -> list[Change]:
    return [Change(f"{_SECTION}.{name}", value) for name, value in values.items()]


def _expanded(name: Any) -> list[Change]:
    if name is None:
        return []
    if name not in (known := presets()):
        raise ConfigError([f"{_SECTION}.preset={name}: choose one of {', '.join(known)}"])
    return _set(**known[name])


@cache
def presets() -> dict[str, dict[str, Any]]:
    """Names of verl's RolloutCorrectionConfig class methods -> all keys of the section.

    A later preset leaves nothing of an earlier one.
    """
    found: dict[str, dict[str, Any]] = {}
    for row in table(VERL):
        start, _, name = row.names[0].partition(".preset=")
        if name:
            pairs = (key.removeprefix(f"{start}.").partition("=") for key in row.keys)
            found[name] = found.get("disabled", {}) | {key: value_of(value) for key, _, value in pairs}
    return found


def _rejection_settings(changes: list[Change], warnings: list[str]) -> list[Change]:
    """rollout_rs and its bounds; a list as text, and verl 0.6's names with their separate lower bound."""
    given = {c.key.removeprefix(f"{_SECTION}."): c.value for c in changes if c.key.startswith(f"{_SECTION}.rollout_rs")}
    lower = given.pop("rollout_rs_threshold_lower", None)
    settings = {name: _joined(value) for name, value in given.items()}
    option, upper = settings.get("rollout_rs"), settings.get("rollout_rs_threshold")
    if isinstance(option, str) and option in _OLD_OPTIONS:
        settings["rollout_rs"] = _OLD_OPTIONS[option]
        warnings.append(f"{_SECTION}.rollout_rs={option} is another spelling of rollout_rs={_OLD_OPTIONS[option]}")
    if lower is not None:
        warnings.append(f'{_SECTION}.rollout_rs_threshold_lower is another spelling of rollout_rs_threshold="low_high"')
        if not isinstance(upper, int | float):
            fix = "needs rollout_rs_threshold to be one number, the upper bound"
            raise ConfigError([f"{_SECTION}.rollout_rs_threshold_lower={lower}: {fix}"])
        # These bounds are ratios trainer / sampler; k1's are sampler / trainer.
        settings["rollout_rs_threshold"] = f"{1 / float(upper)}_{1 / float(lower)}"
    return _set(**settings)


def _joined(value: Any) -> Any:
    return ",".join(str(item) for item in value) if isinstance(value, list) else value


def _roll(changes: list[Change], warnings: list[str]) -> list[Change]:
    """ROLL's train_infer_correction: is_weight.{enabled, weight_type, upper_bound, detach} and a list of filters."""
    given = {c.key.removeprefix(f"{_ROLL}."): c.value for c in changes if c.key.startswith(f"{_ROLL}.")}
    if not given:
        return []
    warnings.append(f"{_ROLL} is ROLL's spelling of {_SECTION}; use rollout_is and rollout_rs")
    if given.get("is_weight.detach", True) is False:
        raise ConfigError([f"{_ROLL}.is_weight.detach=False: weights are constants here; leave it out"])
    settings: dict[str, Any] = {}
    if given.get("is_weight.enabled", False):
        settings["rollout_is"] = given.get("is_weight.weight_type", "token")
        settings["rollout_is_threshold"] = given.get("is_weight.upper_bound", 1.2)
    rejections = [pair for rule in given.get("filters") or [] if rule.get("enabled") for pair in _roll_filter(rule)]
    if rejections:
        settings["rollout_rs"] = ",".join(option for option, _ in rejections)
        settings["rollout_rs_threshold"] = ",".join(bounds for _, bounds in rejections)
    return _set(**settings)


def _roll_filter(rule: dict[str, Any]) -> list[tuple[str, str]]:
    """One filter as (option, bounds): its ratio is trainer / sampler, k1's is sampler / trainer."""
    level = _ROLL_LEVELS[rule.get("agg_type", "token")]
    found = []
    if rule.get("ratio_enabled", True):
        found.append((f"{level}_k1", f"{1 / rule.get('ratio_high', 1.2)}_{1 / rule.get('ratio_low', 0.8)}"))
    if rule.get("diff_enabled", False):
        found.append((f"{level}_diff", f"{rule.get('diff_low', -0.2)}_{rule.get('diff_high', 0.2)}"))
    return found
