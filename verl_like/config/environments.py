"""`env.*`: environments that a run plays in place of a file of prompts (ROLL's agentic pipeline)."""

import difflib
import string
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from verl_like.config.base import ConfigNode, at_least, key, reference, require, section

# What env.custom.<tag> may say
CUSTOM = (
    *("type", "config", "max_steps", "max_tokens_per_step", "format_penalty"),
    *("system", "template", "instruction", "history_length"),
)
# What a template may name: ROLL's names
TEMPLATE_NAMES = (
    *("observation", "current_observation", "turn_idx", "current_step", "step_count", "actions_left"),
    *("max_response_length", "env_instruction", "history_length", "history"),
)


@dataclass(kw_only=True, slots=True)
class EnvGroupsConfig(ConfigNode):
    """`env.train.*`, `env.val.*`: how many groups play what. A group is one start, played rollout.n times (val_kwargs.n
    in validation)."""

    tags: list[str] = key([])
    """What is played: names of env.custom, or of environments that come with the package (docs/environments.md). Empty:
    nothing; prompts come from data files."""
    num_groups: int | None = key(None, at_least(1), unit="groups")
    """Groups that exist, each with its tag. Null: data.train_batch_size in training, 64 in validation."""
    groups_per_tag: list[int] = key([], unit="groups")
    """How many of them play each tag, in the order of tags. Empty: equally many, the first tags one more where that
    does not divide."""
    max_traj_per_env: int | None = key(None, at_least(1), unit="starts")
    """Most starts of one group in a step. Null: as many as fill data.train_batch_size."""
    format_penalty: float = 0.0
    """Added to the reward of a turn whose text names no move."""

    def check(self) -> None:
        fits = not self.groups_per_tag or len(self.groups_per_tag) == len(self.tags)
        require(fits, "groups_per_tag", self.groups_per_tag, f"give one number for each of the {len(self.tags)} tags")
        total, groups = sum(self.groups_per_tag), self.num_groups
        fits = not self.groups_per_tag or (min(self.groups_per_tag) >= 0 and groups in (None, total) and total > 0)
        require(
            fits, "groups_per_tag", self.groups_per_tag, f"their sum must be num_groups={groups}, or leave that out"
        )


@dataclass(kw_only=True, slots=True)
class EnvConfig(ConfigNode):
    """`env.*`: environments that a run plays in place of data files ([environments](environments.md))."""

    train: EnvGroupsConfig = section(EnvGroupsConfig)
    """What is played in training."""
    val: EnvGroupsConfig = section(EnvGroupsConfig, idle="val.tags is empty")
    """What is played in validation: always the same starts."""
    custom: dict[str, Any] = key({})
    """Environments by tag: type (a kind, an adapter's name, or file.py:Class), config (arguments of the class),
    max_steps, max_tokens_per_step, format_penalty (in place of env.train's and env.val's), system, template,
    instruction, history_length."""
    worker_cls: str | None = key(None, reference())
    """file.py:Class of an EnvironmentWorker: how an episode begins and moves on in its process. Null: ours."""
    render_save_dir: str | None = key(None, idle="val.tags is empty")
    """Folder for a GIF of each episode of a validation. Null: none are drawn."""

    def check(self) -> None:
        require(not self.val.tags or bool(self.train.tags), "val.tags", self.val.tags, "set train.tags too")
        for tag, entry in self.custom.items():
            place = f"custom.{tag}"
            require(isinstance(entry, Mapping), place, entry, f"give a mapping of {', '.join(CUSTOM)}")
            for name in entry:
                near = difflib.get_close_matches(str(name), CUSTOM, n=1)
                hint = f"did you mean {near[0]}? " if near else ""
                require(name in CUSTOM, f"{place}.{name}", entry[name], f"{hint}there are {', '.join(CUSTOM)}")
            for name in ("max_steps", "max_tokens_per_step"):
                value = entry.get(name)
                legal = value is None or (isinstance(value, int) and value >= 1)
                require(legal, f"{place}.{name}", value, "must be a whole number of at least 1")
            require(isinstance(entry.get("config") or {}, Mapping), f"{place}.config", entry.get("config"), "a mapping")
            template = entry.get("template") or ""
            what = f"a text that may name {', '.join(TEMPLATE_NAMES)}; a brace of its own is doubled"
            require(_names_of(template) <= {*TEMPLATE_NAMES}, f"{place}.template", template, what)


def _names_of(template: Any) -> set[str]:
    """Names in braces in a template; {""} for what is no template."""
    try:
        return {name for _, name, _, _ in string.Formatter().parse(template) if name is not None}
    except (TypeError, ValueError):
        return {""}
