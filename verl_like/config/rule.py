"""Rules: what keys of several sections must be to each other, and when a key can have no effect.

    @rule("actor_rollout_ref.rollout.do_sample", "n")  # as in key(idle=...): a name beside the first, or a whole one
    def responses_of_a_group_differ(config: PPOConfig) -> Findings:
        \"\"\"The responses of a group must differ.\"\"\"  # what `explain` and docs/configuration.md say
        if not config.actor_rollout_ref.rollout.do_sample and config.actor_rollout_ref.rollout.n > 1:
            return "all responses would be equal; set do_sample=true or n=1"  # why, and the fix

The engine writes the keys and their values before it. A rule may be a generator of several reasons, and give one with
keys of its own, (keys, reason), where those to name vary. Standard library only.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from typing import Any, Literal

from verl_like.config.ppo import PPOConfig
from verl_like.config.schema import get_value, keys

Kind = Literal["impossible", "risky", "idle"]
Finding = str | tuple[Sequence[str], str]  # a reason; or keys, and a reason
Findings = Finding | Iterator[Finding] | list[str] | None


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule. keys: whole ones, in the order in which a message names them; a section that an idle rule is about ends
    in a point. reads: further keys. says: what holds. subject: the module that has it."""

    kind: Kind
    keys: tuple[str, ...]
    reads: tuple[str, ...]
    says: str
    subject: str
    test: Callable[[PPOConfig], Findings]

    def findings(self, config: PPOConfig) -> Iterator[tuple[Sequence[str], str]]:
        """(keys, reason) wherever the rule does not hold (of kind idle: where it does)."""
        found = self.test(config)
        for each in [found] if isinstance(found, str | tuple) else found or ():
            names, reason = ((), each) if isinstance(each, str) else each
            yield _whole((*self.keys[:1], *names))[1:] or self.keys, reason

    def is_about(self, key: str) -> bool:
        """Return True where the rule reads a key, or says that it is idle."""
        return _covers((*self.keys, *self.reads), key)


RULES: list[Rule] = []  # but for those that a key's declaration holds


def rule(
    *names: str, kind: Kind = "impossible", reads: Sequence[str] = ()
) -> Callable[[Callable[[PPOConfig], Findings]], Callable[[PPOConfig], Findings]]:
    """Register a function as a rule about these keys; without any it writes whole lines. reads: keys that it looks at,
    and does not name unless it gives them."""

    def register(test: Callable[[PPOConfig], Findings]) -> Callable[[PPOConfig], Findings]:
        whole, subject = _whole((*names, *reads)), test.__module__.rpartition(".")[2]
        says = " ".join((test.__doc__ or "").split())
        RULES.append(Rule(kind, whole[: len(names)], whole[len(names) :], says, subject, test))
        return test

    return register


def idle(*names: str, when: str | Callable[[PPOConfig], object], why: str = "") -> None:
    """Register keys, and sections that end in a point, which can have no effect at times.

    when: a condition, with `why` in words; or both as one text "KEY is STATE", see `key(idle=...)`.
    """
    RULES.append(_idle(names, when, why))


def _idle(names: tuple[str, ...], when: str | Callable[[PPOConfig], object], why: str = "") -> Rule:
    holds, why = (_holds(when), when) if isinstance(when, str) else (when, why)
    return Rule("idle", _whole(names), (), why, "", lambda config: why if holds(config) else None)


# What is said of a key's value -> whether that is so; other words are names of a value
_STATES: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("false", "empty", "0"), lambda value: not value),
    **dict.fromkeys(("not set", "null"), lambda value: value is None),
    "set": lambda value: value is not None,
    **dict.fromkeys(("true", "not empty"), bool),
    "0 or more": lambda value: value >= 0,
}


def _holds(text: str) -> Callable[[PPOConfig], bool]:
    """Condition "KEY is STATE": one of _STATES, a name, or not a name; what stands behind a colon explains it."""
    key, _, state = text.partition(" is ")
    word = state.partition(":")[0]
    name = word.removeprefix("not ")
    holds = _STATES.get(word) or (lambda value: (str(value) == name) == (name == word))
    return lambda config: holds(get_value(config, key))


@cache
def declared() -> tuple[Rule, ...]:
    """The idle rules of keys and sections whose declaration says when they can have no effect."""
    return tuple(_declared(PPOConfig(), ""))


def _declared(node: Any, prefix: str) -> Iterator[Rule]:
    for field in fields(node):
        value = getattr(node, field.name)
        path = f"{prefix}{field.name}{'.' if is_dataclass(value) else ''}"
        told = field.metadata.get("idle", ())
        for text in (told,) if isinstance(told, str) else told:
            name, _, state = text.partition(" is ")
            yield _idle((path,), f"{_whole((path, name))[1]} is {state}")
        if is_dataclass(value):
            yield from _declared(value, path)


def _whole(names: Sequence[str]) -> tuple[str, ...]:
    """Whole keys of names, each of which may be that of a key beside the first one."""
    section = names[0].rstrip(".").rpartition(".")[0] if names else ""
    return tuple(f"{section}.{name}" if f"{section}.{name}" in keys() else name for name in names)


def _covers(patterns: Sequence[str], key: str) -> bool:
    return any(key.startswith(each) if each.endswith(".") else key == each for each in patterns)


def impossible(config: PPOConfig, subject: str | None = None) -> list[str]:
    """Combinations that cannot work: keys, values, reason and fix. subject: of this module's rules alone."""
    return _lines("impossible", config, subject)


def risky(config: PPOConfig, subject: str | None = None) -> list[str]:
    """Settings that work but are probably not meant: keys, values, reason and fix."""
    return _lines("risky", config, subject)


def _lines(kind: Kind, config: PPOConfig, subject: str | None) -> list[str]:
    rules = [each for each in RULES if each.kind == kind and subject in (None, each.subject)]
    return list(dict.fromkeys(_line(config, *found) for each in rules for found in each.findings(config)))


def _line(config: PPOConfig, names: Sequence[str], reason: str) -> str:
    """`key=value with key=value and key=value: reason`; the reason alone where no key is named."""
    first, *others = [_stated(config, name) for name in names] or [""]
    return f"{first}{' with ' if others else ''}{' and '.join(others)}{': ' if names else ''}{reason}"


def _stated(config: PPOConfig, key: str) -> str:
    value = get_value(config, key)
    return f"{key}={value!r}" if isinstance(value, str) and not value.strip() else f"{key}={value}"


def idle_lines(config: PPOConfig, set_keys: frozenset[str], followers: Mapping[str, Sequence[str]] = {}) -> list[str]:
    """One line for every key the user set that can have no effect in this run.

    followers: key -> keys that take its value. What acts through one of them is not idle.
    """
    found = [each for rule in all_rules() if rule.kind == "idle" for each in rule.findings(config)]

    def why(key: str) -> str | None:
        return next((reason for patterns, reason in found if _covers(patterns, key)), None)

    def acts(key: str) -> bool:
        return why(key) is None or any(acts(follower) for follower in followers.get(key, ()))

    return [f"{key} has no effect in this run: {why(key)}" for key in keys() if key in set_keys and not acts(key)]


def all_rules() -> tuple[Rule, ...]:
    """All rules; of several reasons why a key is idle the first is said, a declaration's last."""
    return (*RULES, *declared())
