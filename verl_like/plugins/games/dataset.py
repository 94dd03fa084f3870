"""A data set without files: starts of environments, group by group (`env.train`, `env.val`; ROLL's agentic pipeline).

    group        0  1  2  3 ... num_groups - 1, each with a tag
    round 0      row 0, 1, 2, 3 ...                one start of each group
    round 1      row num_groups, ...               other starts

Rows are drawn in order, so that every step has the share of each tag that its groups have. The n episodes of a row
begin in the same state, which is a function of the run's seed, the group and the round.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from verl_like.batch import PromptRow
from verl_like.config import EnvConfig, EnvGroupsConfig, PPOConfig

VAL_GROUPS = 64
_STARTS = 1 << 20  # of training, before they come again


def tags_of_groups(groups: EnvGroupsConfig, num_groups: int) -> list[str]:
    """The tag of each group, in order: what groups_per_tag says, or equal shares."""
    most, rest = divmod(num_groups, len(groups.tags))
    counts = groups.groups_per_tag or [most + (number < rest) for number in range(len(groups.tags))]
    return [tag for tag, count in zip(groups.tags, counts, strict=True) for _ in range(count)]


def environment_of(env: EnvConfig, groups: EnvGroupsConfig, tag: str) -> dict[str, Any]:
    """Make the content of a row's extra_info.environment, but for seed and split."""
    entry = dict(env.custom.get(tag) or {})
    kind = entry.pop("type", tag)
    return {"tag": tag, "kind": kind, "format_penalty": groups.format_penalty, **entry}


@dataclass(frozen=True)
class EnvironmentDataset:
    """Data set of environments' starts (`data.dataset.Dataset`).

    num_rows: number of different starts; then they come again.
    """

    env: EnvConfig
    encoder: Any
    split: str
    seed: int
    num_groups: int
    num_rows: int

    @classmethod
    def train(
        cls, env: EnvConfig, encoder: Any, *, seed: int, batch_size: int, steps: int | None
    ) -> EnvironmentDataset:
        """Make the data set of training. Raises ValueError where the groups cannot fill a step."""
        num_groups = env.train.num_groups or sum(env.train.groups_per_tag) or batch_size
        rounds, most = -(-batch_size // num_groups), env.train.max_traj_per_env
        if most is not None and most < rounds:
            raise ValueError(
                f"env.train.max_traj_per_env={most}: {num_groups} groups need {rounds} starts each for "
                f"data.train_batch_size={batch_size}; raise it or env.train.num_groups"
            )
        if steps is None:
            raise ValueError("env.train.tags: environments have no last row; set trainer.total_training_steps")
        return cls(env, encoder, "train", seed, num_groups, max(_STARTS // num_groups, rounds) * num_groups)

    @classmethod
    def val(cls, env: EnvConfig, encoder: Any, *, seed: int) -> EnvironmentDataset:
        num_groups = env.val.num_groups or sum(env.val.groups_per_tag) or VAL_GROUPS
        return cls(env, encoder, "val", seed, num_groups, num_groups)

    @property
    def groups(self) -> EnvGroupsConfig:
        return self.env.train if self.split == "train" else self.env.val

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, index: int) -> tuple[list[int], PromptRow]:
        turn, group = divmod(index, self.num_groups)
        tag = tags_of_groups(self.groups, self.num_groups)[group]
        settings = environment_of(self.env, self.groups, tag)
        digest = hashlib.blake2b(f"{self.split}/{self.seed}/{group}/{turn}".encode(), digest_size=8).digest()
        own = {**settings, "seed": int.from_bytes(digest, "big") >> 1, "split": self.split}
        if self.split == "val" and self.env.render_save_dir is not None:
            own["render"] = self.env.render_save_dir
        messages = [{"role": "user", "content": tag}]  # stands for what the environment says when it begins
        row = PromptRow(
            index=index,
            data_source=tag,
            messages=messages,
            ability="environment",
            extra_info={"environment": own, "tags": tag, "group_ids": group, "episode": turn, "split": self.split},
        )
        return list(self.encoder.encode([(messages, None)])[0]), row

    def reward_styles(self) -> list[tuple[str, str]]:
        return sorted((tag, "") for tag in set(self.groups.tags))

    def domains(self) -> list[str]:
        tags = tags_of_groups(self.groups, self.num_groups)
        return [tags[index % self.num_groups] for index in range(len(self))]

    def agents(self) -> list[str]:
        return [""]

    def identity(self) -> dict[str, Any]:
        played = {tag: environment_of(self.env, self.groups, tag) for tag in self.groups.tags}
        digest = hashlib.blake2b(json.dumps(played, sort_keys=True, default=str).encode(), digest_size=8).hexdigest()
        return {"files": [f"env.{self.split}"], "rows": len(self), "kept": f"{digest}-{self.num_groups}-{self.seed}"}

    def num_media(self) -> int:
        return 0

    def check_rows(self) -> None:
        self[0]


def kinds_of(env: EnvConfig) -> Sequence[tuple[str, str]]:
    """List the kinds of environments that the run's rows play, each with its configuration as JSON."""
    played = [environment_of(env, groups, tag) for groups in (env.train, env.val) for tag in groups.tags]
    return tuple(dict.fromkeys((each["kind"], json.dumps(each.get("config") or {}, default=str)) for each in played))


def datasets(config: PPOConfig, encoder: Any) -> tuple[EnvironmentDataset, EnvironmentDataset | None]:
    """The starts of env.train and env.val; None for a run that validates on none."""
    env, seed, steps = config.env, config.trainer.seed, config.trainer.total_training_steps
    train = EnvironmentDataset.train(env, encoder, seed=seed, batch_size=config.data.train_batch_size, steps=steps)
    return train, EnvironmentDataset.val(env, encoder, seed=seed) if env.val.tags else None
