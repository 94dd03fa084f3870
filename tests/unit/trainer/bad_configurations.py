"""Configurations that cannot be meant, drawn from the table of keys by a seed: each key gets values of another type, out
of its range, names that are on no menu, and paths, packages and addresses that are not there."""

from __future__ import annotations

import json
import random
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import UnionType
from typing import Any

from verl_like.config.schema import Key, keys

ROLLOUT = "actor_rollout_ref.rollout"
ACTOR = "actor_rollout_ref.actor"


@dataclass(frozen=True, slots=True)
class Bad:
    """One configuration: what is wrong in it, and what the rest must be for the key to count."""

    key: str
    value: str
    kind: str
    around: Mapping[str, str] = field(default_factory=dict)

    @property
    def settings(self) -> list[str]:
        """The command line, without the sound part of it."""
        return [*(f"{key}={value}" for key, value in self.around.items()), f"{self.key}={self.value}"]


# What makes a section count in a run. The first prefix that fits.
AROUND: dict[str, dict[str, str]] = {
    "critic.model.path": {"algorithm.adv_estimator": "gae"},
    "critic.": {"algorithm.adv_estimator": "gae", "critic.model.path": "MODEL"},
    "reward_model.judge.": {"reward_model.judge.url": "http://127.0.0.1:9/v1", "custom_reward_function.path": "null"},
    "reward_model.model.path": {"reward_model.enable": "true"},
    "actor_rollout_ref.ref.": {f"{ACTOR}.use_kl_loss": "true"},
    "algorithm.kl_ctrl.": {"algorithm.use_kl_in_reward": "true"},
    "async_training.": {"trainer.mode": "colocate_async", "algorithm.rollout_correction.rollout_is": "token"},
    f"{ROLLOUT}.multi_turn.": {
        f"{ROLLOUT}.multi_turn.enable": "true",
        f"{ROLLOUT}.multi_turn.tool_config_path": "TOOLS",
    },
    f"{ROLLOUT}.val_kwargs.": {"data.val_files": "TRAIN"},
}
for _lora in ("lora_alpha", "target_modules", "exclude_modules"):
    AROUND[f"actor_rollout_ref.model.{_lora}"] = {"actor_rollout_ref.model.lora_rank": "2"}
    AROUND[f"critic.model.{_lora}"] = {**AROUND["critic."], "critic.model.lora_rank": "2"}


def around(key: str) -> dict[str, str]:
    """The other settings with which a key counts."""
    fits = [prefix for prefix in AROUND if key.startswith(prefix)]
    return AROUND[max(fits, key=len)] if fits else {}


def sound(folder: Path, model: Path) -> dict[str, str]:
    """A configuration with which nothing is wrong; its files are written to `folder`."""
    rows = [
        {"data_source": "d", "prompt": [{"role": "user", "content": f"{i}+1="}], "reward_model": {"ground_truth": "1"}}
        for i in range(8)
    ]
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return 1.0\n"
    )
    return {
        "data.train_files": f"{folder}/train.jsonl",
        "data.val_files": "[]",
        "data.train_batch_size": "4",
        "data.max_prompt_length": "8",
        "data.max_response_length": "4",
        "actor_rollout_ref.model.path": str(model),
        f"{ACTOR}.ppo_mini_batch_size": "4",
        f"{ROLLOUT}.name": "hf",
        f"{ROLLOUT}.n": "2",
        "custom_reward_function.path": f"{folder}/reward.py",
        "algorithm.adv_estimator": "grpo",
        "trainer.launcher": "local",
        "trainer.device": "cpu",
        "trainer.total_training_steps": "1",
        "trainer.default_local_dir": f"{folder}/out",
        "trainer.report_freq": "-1",
    }


def bad_values(key: Key) -> Iterator[tuple[str, str]]:
    """(kind, text of the value) of everything that this key must refuse."""
    kinds = typing.get_args(key.type) if isinstance(key.type, UnionType) else (key.type,)
    if bool in kinds:
        yield from (("type", text) for text in ("perhaps", "7", "[true]", "{a: 1}"))
    elif any(isinstance(kind, type) and issubclass(kind, Enum) for kind in kinds):
        yield from (("menu", text) for text in ("nonesuch", "[]", "17"))
    elif int in kinds or float in kinds:
        if str not in kinds:
            yield from (("type", text) for text in ("many", "[1,2]", "{a: 1}"))
        yield from (("range", text) for text in ("-7", "nan", "inf", "-1e30", "1e30", "1180591620717411303424"))
        if float not in kinds:
            yield from (("range", text) for text in ("1.5", "1000000000000", "-2"))
    elif str in kinds:
        yield from (("type", text) for text in ("[a,b]", "{a: 1}"))
        if any(word in key.name for word in ("path", "file", "dir")):
            yield from (("path", text) for text in ("/nowhere/at/all", "nowhere/at_all.py", "pkg://nowhere.at_all:run"))
        elif any(word in key.name for word in ("url", "address", "host")):
            yield from (
                ("address", text)
                for text in ("http://127.0.0.1:9/v1", "127.0.0.1:9", "nowhere.invalid:80", "not an address", "ftp://x")
            )
        else:
            yield ("menu", "nonesuch")
    elif typing.get_origin(key.type) is dict:
        yield from (("type", text) for text in ("text", "[1]", "3"))
        yield ("names", "{nonesuch: {a: [1]}}")
    else:
        yield from (("type", text) for text in ("{a: {b: 1}}", "[[1]]"))
        yield ("menu", "[nonesuch]")


def all_bad() -> list[Bad]:
    """Every one of them, in the order of the table."""
    return [Bad(key.path, text, kind, around(key.path)) for key in keys().values() for kind, text in bad_values(key)]


def drawn(count: int, seed: int) -> list[Bad]:
    """Some of them, by a seed."""
    return random.Random(seed).sample(all_bad(), count)
