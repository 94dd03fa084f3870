"""Composition of a checked PPOConfig from a command line and the user's YAML. The only module that knows hydra.

Omegaconf, too, is known here alone.

Precedence, lowest first: dataclass defaults, trainer/config/*.yaml, the user's YAML, command-line overrides. Hydra
composes the config groups and its grammar reads the overrides; what hydra does besides (a job folder, its logging,
changing directory, multirun) does not happen. Every setting passes through one list of changes, in which old spellings
are translated and unknown keys refused, whether it came from a file, `key=value` or `+key=value`.
"""

from __future__ import annotations

import dataclasses
import logging
import pickle
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, lru_cache
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from verl_like.config import PPOConfig
from verl_like.config.batch_plan import uncorrected
from verl_like.config.engines import AUTO, is_installed, preferred
from verl_like.config.errors import ConfigError, raise_if_any
from verl_like.config.parser import meant
from verl_like.config.rules import check
from verl_like.config.schema import find_key, from_dict, get_value, keys, of_no_home, sections, suggest, to_dict
from verl_like.config.spellings import Change, canonical, refusal, renamed, standing
from verl_like.models.adapter_config import adapter_settings
from verl_like.models.location import weight_bytes
from verl_like.observe.redaction import HIDDEN, redacted_tree
from verl_like.observe.run_folder import flat, value_at
from verl_like.registry import PARTS, part
from verl_like.text import one_line
from verl_like.trainer.config_files import CONFIG_DIR, CONFIG_NAME, ENTRIES, entry_file, with_suffix
from verl_like.trainer.stages_asked import asked_by_megatron, taken_back
from verl_like.trainer.yaml_anchors import inline_all, is_helper, own_data_keys
from verl_like.user_code import EXTERNAL_MODULES, UserCodeError, external_modules, import_modules

logger = logging.getLogger(__name__)

# Groups that can be chosen on the command line (`rollout=hf`), with the section each one fills.
GROUPS = {
    "actor": "actor_rollout_ref.actor",
    "ref": "actor_rollout_ref.ref",
    "rollout": "actor_rollout_ref.rollout",
    "critic": "critic",
    "reward_model": "reward_model",
    "algorithm": "algorithm",
    "trainer": "trainer",
    "objective": "_global_",
    "preset": "_global_",
}

ConfigStore.instance().store(name="ppo_schema", node=PPOConfig)


@dataclasses.dataclass(slots=True)
class Settings:
    """Settings that the user asked for, in order: values, and choices of config groups as hydra overrides."""

    changes: list[Change] = dataclasses.field(default_factory=list)
    groups: list[str] = dataclasses.field(default_factory=list)
    warnings: list[str] = dataclasses.field(default_factory=list)
    problems: list[str] = dataclasses.field(default_factory=list)
    helpers: dict[str, Any] = dataclasses.field(default_factory=dict)  # sections of YAML that others refer to
    added: set[str] = dataclasses.field(default_factory=set)  # keys written with +


Overrides = Sequence[str] | Mapping[str, Any]


def compose(overrides: Overrides = (), yaml_files: Sequence[str | Path] = ()) -> PPOConfig:
    """Compose the checked configuration of a run; warnings are logged.

    Args:
        overrides: `key=value` as on hydra's command line, or a dictionary of keys (or sections) and Python values.
        yaml_files: the user's own, later ones win.

    Raises ConfigError listing everything that is wrong.
    """
    config, warnings = compose_with_warnings(overrides, yaml_files)
    for warning in warnings:
        logger.warning("config: %s", warning)
    return config


def compose_with_warnings(
    overrides: Overrides = (), yaml_files: Sequence[str | Path] = ()
) -> tuple[PPOConfig, list[str]]:
    """Run `compose`, with the warnings returned instead of logged."""
    tree, changes, warnings = compose_tree(overrides, yaml_files)
    config = to_config(tree)
    hidden = [key for key, value in flat(to_dict(config)).items() if isinstance(value, str) and HIDDEN in value]
    again = "it was hidden when this configuration was saved; give it again, on the command line for instance"
    raise_if_any([f"{key}={HIDDEN}: {again}" for key in hidden])
    return config, warnings + checked(config, changes)


def checked(config: PPOConfig, changes: list[Change]) -> list[str]:
    """Collect the warnings of config/rules; raises ConfigError for what cannot work. changes: what the user set."""
    defaults = keys()
    set_keys = {key.path for change in changes if (key := find_key(change.key))}
    # neither the default nor what the key follows, which a saved configuration spells out
    usual = {key: [get_value(config, other) for other in _sources(key, _interpolations().get(key))] for key in set_keys}
    changed = frozenset(key for key in set_keys if get_value(config, key) not in [defaults[key].default, *usual[key]])
    return check(config, changed, followers_of(changes))


def followers_of(changes: Sequence[Change]) -> dict[str, list[str]]:
    """Map a key to the keys that take its value: by the user's interpolations, or by default."""
    texts = _interpolations() | {key.path: change.value for change in changes if (key := find_key(change.key))}
    followers: dict[str, list[str]] = {}
    for follower, text in texts.items():
        for source in _sources(follower, text):
            followers.setdefault(source, []).append(follower)
    return followers


def _sources(key: str, text: Any) -> list[str]:
    """Find the keys whose values a text such as `${critic.ppo_epochs}/${.name}` takes."""
    names = re.findall(r"\$\{(\.?[\w.]+)\}", text) if isinstance(text, str) else []
    return [key.rpartition(".")[0] + name if name.startswith(".") else name for name in names]


@cache
def _interpolations() -> dict[str, str]:
    """Map the keys that follow others before the user sets any to their text in the YAML files."""
    plain = OmegaConf.to_container(_base(()), resolve=False)
    found = {key: value_at(plain, key) for key in keys()}
    return {key: text for key, text in found.items() if isinstance(text, str) and "${" in text}


def compose_tree(overrides: Overrides, yaml_files: Sequence[str | Path]) -> tuple[DictConfig, list[Change], list[str]]:
    """Compose the omegaconf tree before conversion, the settings applied to it, and warnings about spellings."""
    settings = Settings()
    if isinstance(yaml_files, str | Path):
        raise ConfigError([f"yaml_files={str(yaml_files)!r}: give a list of files"])
    for file in yaml_files:
        _read_yaml(Path(file), settings)
    in_files = len(settings.changes)
    listed = isinstance(overrides, Mapping) or (
        isinstance(overrides, Iterable) and all(isinstance(each, str) for each in overrides)
    )
    if isinstance(overrides, str) or not listed:
        raise ConfigError([f"{overrides!r}: give a list of key=value texts, or a dictionary"])
    if isinstance(overrides, Mapping):
        _read_mapping(overrides, settings)
    else:
        for text in overrides:
            _read_override(text, settings)
    settings.warnings += _given_twice(_leaves(settings.changes[in_files:]))
    objective = _take_objective(settings)
    inlined, problems = inline_all(_leaves(settings.changes), settings.helpers)
    settings.problems += problems
    changes, warnings = canonical(standing(_leaves(inlined)))
    changes = [_fitted(change, settings) for change in own_data_keys(standing(_leaves(changes)), settings.added)]
    settings.problems += [problem for change in changes if (problem := _unknown(change, objective))]
    raise_if_any(settings.problems)
    tree = _base(settings.groups)
    raise_if_any([problem for change in changes if (problem := _apply(tree, change))])
    _import_users_modules(tree)
    warnings = settings.warnings + warnings + _engine(tree, changes)
    warnings += _corrected(tree, changes) + _adapted(tree, changes)
    return tree, changes, [*warnings, *take_back_stages(tree, asked_by_megatron(_leaves(inlined))).values()]


def take_back_stages(tree: DictConfig, asked: Mapping[str, str]) -> dict[str, str]:
    """Run `stages_asked.taken_back` on a tree."""
    return taken_back(asked, lambda: to_config(tree), lambda key: _apply(tree, Change(key, 1)))


def _take_objective(settings: Settings) -> str:
    """Read the changes as verl's program of trainer.objective spells them, over its defaults. Returns the objective."""
    chosen = ["rl", *(text.partition("=")[2] for text in settings.groups if text.startswith("objective@"))]
    chosen += [str(change.value) for change in _leaves(settings.changes) if change.key == "trainer.objective"]
    if chosen[-1] in PARTS["names"]:
        settings.groups.append(_group_override("objective", None, chosen[-1]))
        settings.changes, warnings = part("names", chosen[-1])(_leaves(settings.changes))
        settings.warnings += warnings
    return chosen[-1]


def _engine(tree: DictConfig, changes: list[Change]) -> list[str]:
    """Choose the engine where rollout.name=auto: the first installed that all else allows. Returns its line."""
    key = "actor_rollout_ref.rollout.name"
    if str(_selected(tree, key)) != AUTO:
        return []
    device = str(_selected(tree, "trainer.device"))
    if device == "auto":
        import torch

        device = "cuda" if torch.cuda.is_available() else "cpu"
    refused: dict[str, int] = {}
    model = _selected(tree, "actor_rollout_ref.model.path")
    for name in filter(is_installed, preferred(on_cpu=device == "cpu", model_bytes=weight_bytes(model))):
        _apply(tree, Change(key, name))
        refused[name] = _count_problems(tree, changes, device)
        if not refused[name]:
            break
    chosen = min(refused, key=lambda name: refused[name])
    _apply(tree, Change(key, chosen))
    return [f"{key}=auto: {chosen}, on {device.upper()}"]


def _count_problems(tree: DictConfig, changes: list[Change], device: str) -> int:
    try:
        config = to_config(tree)
        checked(config, changes)
    except ConfigError as error:
        return len(error.problems)
    if config.actor_rollout_ref.rollout.engine.require_model is None:
        return 0
    from verl_like.rollout.build import refuses_model  # which imports torch

    needed = config.data.max_prompt_length + config.data.max_response_length
    return int(refuses_model(config.actor_rollout_ref.rollout, config.actor_rollout_ref.model, device, needed))


def _adapted(tree: DictConfig, changes: Sequence[Change]) -> list[str]:
    """Set rank, scale and modules of the LoRA adapters that the run begins with.

    Returns lines that name what is not taken over from an adapter. Raises ConfigError where the user asks for others.
    """
    told, problems = list[str](), list[str]()
    given = {change.key: change.value for change in changes}
    for section in ("actor_rollout_ref.model", "critic.model"):
        key = f"{section}.lora_adapter_path"
        if (path := _selected(tree, key)) is None:
            continue
        settings, saved = adapter_settings(path, key, of_value_model=section == "critic.model")
        for name, value in settings.items():
            asked = given.get(f"{section}.{name}", value)
            if asked != value and not (isinstance(asked, list) and sorted(asked) == sorted(value)):
                problems.append(f"{section}.{name}={asked}, but {key}={path} has {name}={value}: leave {name} out")
            _apply(tree, Change(f"{section}.{name}", value))
        if saved.get("lora_dropout"):
            told.append(
                f"{key}={path}: its lora_dropout={saved['lora_dropout']} has no effect: nothing is dropped here"
            )
        base, model = saved.get("base_model_name_or_path"), _selected(tree, f"{section}.path")
        if base and Path(base).name != Path(model).name:
            told.append(f"{key}={path} was made for {base}, and is put on {section}.path={model}: the same weights?")
    raise_if_any(problems)
    return told


def _selected(tree: DictConfig, key: str) -> Any:
    try:
        return OmegaConf.select(tree, key)
    except OmegaConfBaseException as error:
        raise ConfigError([f"{key}: {str(error).splitlines()[0]}"]) from error


def _corrected(tree: DictConfig, changes: Sequence[Change]) -> list[str]:
    """Turn truncated importance weights on where groups live through several versions of the weights.

    Only where the user says nothing else. Returns the line that tells it.
    """
    key = "algorithm.rollout_correction.rollout_is"
    written = OmegaConf.to_container(tree.trainer, resolve=False)
    if value_at(written, "mode") == "sync" or any(key == change.key for change in changes):
        return []
    if not uncorrected(to_config(tree)):
        return []
    _apply(tree, Change(key, "token"))
    return [
        f"{key}=token, as trainer.mode={tree.trainer.mode} trains on responses of older weights: each token's loss is "
        "weighted by its probability now over that when it was sampled, cut off at rollout_is_threshold; "
        "bypass_mode=True takes the clipped ratio to the sampler instead, without a further forward pass"
    ]


def _import_users_modules(tree: DictConfig) -> None:
    """Import modules that may register names, before the names in the configuration are checked."""
    key = "actor_rollout_ref.model.external_lib"
    try:
        import_modules(external_modules(), EXTERNAL_MODULES)
        import_modules(_selected(tree, key), key)
    except UserCodeError as error:
        raise ConfigError([str(error)]) from error


def to_config(tree: DictConfig) -> PPOConfig:
    """Resolve interpolations and build the dataclasses."""
    try:
        plain = OmegaConf.to_container(tree, resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError([_unresolved(error)]) from error
    assert isinstance(plain, dict)
    try:
        return from_dict({str(name): value for name, value in plain.items()})
    except ConfigError as error:  # what a key takes over from another is that one's fault
        written = OmegaConf.to_container(tree, resolve=False)
        told = {text.partition("=")[0]: text for text in error.problems}
        own = [text for key, text in told.items() if told.keys().isdisjoint(_sources(key, value_at(written, key)))]
        raise ConfigError(own) from error


def _unresolved(error: OmegaConfBaseException) -> str:
    """Say what is wrong with an interpolation, where, and how variables of the environment are named."""
    text, hint = str(error).splitlines()[0], ""
    if missing := re.fullmatch(r"Interpolation key '(\w+)' not found", text):
        hint = f"; a variable of the environment is ${{oc.env:{missing[1]}}}"
    elif missing := re.search(r"Environment variable '(\w+)' not found", text):
        text = f"the environment has no variable {missing[1]}; set it"
        hint = f", or write ${{oc.env:{missing[1]},VALUE}} with what counts without it"
    elif "Unsupported interpolation" in text:
        hint = "; ${oc.env:NAME} is a variable of the environment, ${section.key} another key's value"
    return f"{error.full_key}: {text}{hint}" if error.full_key else f"{text}{hint}"


def save_resolved(config: PPOConfig, path: str | Path) -> None:
    """Write the whole configuration as YAML.

    The file can be given back with --config-path and --config-name, and the secrets, which are hidden in it, again.
    """
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(OmegaConf.to_yaml(OmegaConf.create(redacted_tree(to_dict(config), exact=True))))


def _read_yaml(path: Path, settings: Settings, within: tuple[Path, ...] = ()) -> None:
    """Add a user's YAML: its `defaults` first (other files beside it, groups), then its own keys.

    within: the files that name it in theirs.
    """
    if not path.is_file():
        raise ConfigError([f"config file {path} does not exist" + "".join(f" (defaults of {each})" for each in within)])
    try:
        tree, text = OmegaConf.to_container(OmegaConf.load(path), resolve=False) or {}, path.read_text()
    except Exception as error:
        raise ConfigError([f"config file {path} cannot be read: {one_line(error)}"]) from error
    if not isinstance(tree, dict):
        raise ConfigError([f"config file {path} must hold keys, not a {type(tree).__name__}"])
    tree.pop("hydra", None)
    settings.helpers |= {str(name): tree.pop(name) for name in list(tree) if is_helper(str(name), tree[name], text)}
    defaults = tree.pop("defaults", None) or []
    if not (isinstance(defaults, list) and all(isinstance(entry, str | dict) for entry in defaults)):
        text = "give a list of files beside it and of groups, as [base, _self_] or [rollout: hf]"
        raise ConfigError([f"config file {path}: defaults={defaults}: {text}"])
    own = [Change(str(name), value) for name, value in tree.items()]
    before = True
    for entry in defaults:
        if entry == "_self_":
            settings.changes += own
            before = False
        elif isinstance(entry, dict):
            settings.groups += [_group_override(str(group), None, str(choice)) for group, choice in entry.items()]
        elif entry not in (*ENTRIES, "ppo_schema"):
            named = with_suffix(path.parent / entry)
            named = named if named.is_file() else entry_file(entry) or named
            if named in (path, *within):
                raise ConfigError([f"config file {path}: defaults={defaults}: {entry} names itself; leave it out"])
            _read_yaml(named, settings, (path, *within))
    if before:
        settings.changes += own


def _read_override(text: str, settings: Settings) -> None:
    if not text:
        settings.warnings.append('an empty argument is skipped (as "$EXTRA" leaves one where EXTRA is not set)')
        return
    if not text.strip():
        settings.problems.append(
            "an argument is blank: in a shell script a backslash with a space after it ends the command, and the lines "
            f"below are not read; remove the space{f' ({_WINDOWS})' if chr(13) in text else ''}"
        )
        return
    if text.endswith("\r"):
        settings.problems.append(f"{text.rstrip()}: {_WINDOWS}")
        return
    try:
        override = _parsed(text)
    except HydraException:
        settings.problems.append(f"cannot read {text!r}: {_how_to_write(text)}")
        return
    key = override.key_or_group
    if not key:
        settings.problems.append(f"cannot read {text!r}: write key=value")
        return
    if key.split(".")[0].split("/")[0] == "hydra":
        settings.warnings.append(f"{text} has no effect: no hydra job folder, logging or sweep is used")
    elif override.is_delete():
        known = find_key(renamed(key))
        instead = f"set {key}=null" if known is not None and known.may_be_null else "leave it out, or set what you want"
        settings.problems.append(f"{text}: keys cannot be deleted; {instead}")
    elif override.is_sweep_override():
        settings.problems.append(f"{text}: sweeps are not supported; for a list write {key}=[a,b]")
    elif _is_group(override):
        settings.groups.append(_group_override(key, override.package, str(override.value())))
    elif override.package is not None:
        settings.problems.append(f"{text}: only groups go to another place (@); write {key}=VALUE")
    else:
        settings.changes.append(
            Change(key, _Nothing() if not text.partition("=")[2].strip() else _text(override.value()))
        )
        settings.added |= {key} if override.is_add() else set()


class _Nothing(str):
    """Empty value of `key=`, as an unset shell variable leaves it. (Quotes with nothing in them are a text.)"""


def _read_mapping(values: Mapping[str, Any], settings: Settings) -> None:
    for name, value in values.items():
        if name in GROUPS and isinstance(value, str):
            settings.groups.append(_group_override(name, None, value))
        else:
            key = name.removeprefix("+")
            settings.changes.append(Change(key, _text(value)))
            settings.added |= {key} - {name}


@lru_cache(maxsize=4096)
def _parsed(text: str) -> Override:
    plain = re.fullmatch(r"([+\w.\-/@]+)=([^'\"\[\](){},$]+)", text)
    try:
        return _parser().parse_override(text)
    except HydraException:
        if plain is None:
            raise
        # hydra's grammar has no ~, =, # or letters beyond ASCII in plain values, as paths and names have
        return _parser().parse_override(f"{plain[1]}='{plain[2]}'")


_WINDOWS = "the script has the line ends of Windows; `sed -i 's/\\r$//' SCRIPT` mends it"


def _how_to_write(text: str) -> str:
    """Fix of an argument that cannot be read, with the argument itself where it has a key."""
    key, equals, value = text.partition("=")
    if equals and re.search(r"^\.|\.\.|\.$|\S\s+\S", key):
        return f"{key!r} is no key; write section.name=value"
    if not equals or key != key.strip():
        return "write key=value, without spaces around the ="
    if "$(" in value:
        return "write key=value; $(...) is left to the shell in double quotes, not in single ones"
    if value.startswith(("[", "{")):
        return f"write key=value, and quote what stands in it, but no name before a colon: \"{key}=['a b','c=d']\""
    quoted = value.replace("'", "").replace('"', "")
    return f"write key=value, and in a shell script special characters in two pairs of quotes: '{key}=\"{quoted}\"'"


@cache
def _parser() -> OverridesParser:
    return OverridesParser.create()


def _is_group(override: Override) -> bool:
    chosen = override.package is not None or override.key_or_group in GROUPS
    return chosen and isinstance(override.value(), str)


def _group_override(group: str, package: str | None, choice: str) -> str:
    name, _, own_package = group.removeprefix("optional ").removeprefix("override ").strip().partition("@")
    choices = sorted(path.stem for path in (CONFIG_DIR / name).glob("*.yaml"))
    if not choices:
        raise ConfigError([f"{name}={choice}: there is no such group; choose one of {', '.join(GROUPS)}"])
    if choice not in choices:
        raise ConfigError([f"{name}={choice}: choose one of {', '.join(choices)}{meant(choice, choices)}"])
    package = package or own_package or GROUPS.get(name, name)
    return f"{name}={choice}" if package == name else f"{name}@{package}={choice}"


def _text(value: Any) -> Any:
    """Replace hydra's quoted strings and paths by plain strings, also inside lists and dictionaries."""
    if isinstance(value, dict):
        return {str(name): _text(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_text(item) for item in value]
    return value if value is None or isinstance(value, bool | int | float) else str(value)


def _leaves(changes: list[Change]) -> list[Change]:
    """Split dictionaries given to a section into one change per leaf; those given to an open dictionary stay whole."""
    flat: list[Change] = []
    for change in changes:
        # teachers have names of their own, and the keys below them names that are translated
        inside_open = find_key(change.key) is not None and not change.key.startswith("distillation.teacher_models")
        if isinstance(change.value, dict) and change.value and not inside_open:
            flat += _leaves([Change(f"{change.key}.{name}", value) for name, value in change.value.items()])
        elif not (change.value in ({}, None) and change.key in sections()):
            flat.append(change)
    return flat


def _given_twice(changes: list[Change]) -> list[str]:
    """Find the keys that the command line sets to several values; dictionaries are merged."""
    given: dict[str, list[Any]] = {}
    for change in changes:
        if not isinstance(change.value, dict):
            given.setdefault(renamed(change.key), []).append(change.value)
    return [
        f"{key} is given {len(values)} times ({', '.join(map(str, values))}): the last one counts"
        for key, values in given.items()
        if any(value != values[0] for value in values)
    ]


def _fitted(change: Change, settings: Settings) -> Change:
    """Convert a value to the form of its key: 1e3 to an integer, an empty value (unset variable) to false or null."""
    key, value = find_key(change.key), change.value
    kinds = () if key is None else get_args(key.type) or (key.type,)
    if isinstance(value, float) and value.is_integer() and int in kinds and float not in kinds:
        return Change(change.key, int(value))
    if isinstance(value, list):  # a text in place of a list has become one by now
        return Change(change.key, ["" if isinstance(each, _Nothing) else each for each in value])
    wanted = {bool, int, float, str} if isinstance(value, _Nothing) else {bool, int, float}
    if value != "" or not wanted & set(kinds):
        return Change(change.key, "") if isinstance(value, _Nothing) else change
    empty = f"{change.key}= is empty (a shell variable that is not set?)"
    if bool in kinds:
        settings.warnings.append(f"{empty}: it counts as false")
        return Change(change.key, False)
    if str in kinds and key is not None and key.may_be_null:
        settings.warnings.append(f"{empty}: it counts as null")
        return Change(change.key, None)
    settings.problems.append(f"{empty}: give it a value, or leave it out")
    return Change(change.key, key.default if key else None)


def _unknown(change: Change, objective: str) -> str | None:
    if find_key(change.key) is not None:
        return None
    if change.key in sections():
        return f"{change.key}={change.value!r}: this is a section; set one of its keys, {change.key}.<name>"
    if why := refusal(change.key):
        return f"{change.key}={change.value}: {why}"
    return f"unknown key {change.key}{suggest(change.key, objective)}"


def _base(groups: Sequence[str]) -> DictConfig:
    """Build a fresh tree of the defaults with these groups; the files are read once a process."""
    return pickle.loads(_composed(tuple(groups)))


@cache
def _composed(groups: tuple[str, ...]) -> bytes:
    """Compose the tree as a pickle, from which a copy is made in a third of the time that copy.deepcopy takes."""
    try:
        with initialize_config_dir(str(CONFIG_DIR), version_base=None):
            return pickle.dumps(hydra_compose(CONFIG_NAME, overrides=list(groups)))
    except HydraException as error:
        raise ConfigError([" ".join(str(error).split())]) from error


def _apply(tree: DictConfig, change: Change) -> str | None:
    """Set one value; returns what is wrong with it, if anything."""
    key = find_key(change.key)
    form = "" if key is None or key.path != change.key else _form(key.type)
    if form == _form(bool) and type(change.value) in (int, float) and change.value not in (0, 1):
        return f"{change.key}={change.value!r}: {form}"  # omegaconf takes any number for true
    if key is not None and (problem := of_no_home(key, change.value)):
        return problem
    try:
        with open_dict(tree):  # a dictionary is merged into a dictionary; it replaces a list (data.val_files)
            merge = isinstance(change.value, dict) and isinstance(OmegaConf.select(tree, change.key), DictConfig)
            OmegaConf.update(tree, change.key, change.value, merge=merge, force_add=True)
    except OmegaConfBaseException as error:
        if change.value is None:
            return f"{change.key}=null: it must have a value; leave it out, or give it one"
        return f"{change.key}={change.value!r}: {form or str(error).splitlines()[0]}"
    return None


_FORMS = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}
_FORMS |= {list: "a list, as [a,b]", dict: "a dictionary, as {name: value}", list[float]: "numbers, as [0.1,2]"}


def _form(kind: Any) -> str:
    """Say how a value of this type is written, for messages; empty for an enum, whose own error lists its names."""
    kinds = get_args(kind) if isinstance(kind, UnionType) else (kind,)
    names = [name for each in kinds if (name := _FORMS.get(each) or _FORMS.get(get_origin(each)))]
    return f"give {' or '.join(names)}" if names else ""
