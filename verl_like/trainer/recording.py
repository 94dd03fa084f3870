"""Recording of steps on disk: for `verl-like replay` and `bisect`, and as a source of batches.

<folder>/step_<n>.safetensors     every column of every stage, as "rollouts.response_ids_T"; what is no tensor, the
                                  seed and the checksums of the weights that the step began with: JSON in its header
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from verl_like.batch import MediaHandle, PromptRow, RewardFailure, Rollouts, Scores, TensorStruct
from verl_like.config import PPOConfig
from verl_like.config.errors import ConfigError
from verl_like.episodes.collector import Collector
from verl_like.episodes.pending_scores import PendingBatch
from verl_like.observe.redaction import hidden
from verl_like.trainer.folders import log_dir
from verl_like.trainer.roles import RoleHandle

Stages = Mapping[str, TensorStruct]
_OBJECTS: dict[str, Callable[..., Any]] = {"rows": PromptRow, "failures": RewardFailure}


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """Recorded step.

    columns: by "stage.name", in the order of the stages.
    facts: seed, version and weights, by role.
    """

    columns: dict[str, Any]
    facts: dict[str, Any]

    def stage(self, name: str, kind: type[Any]) -> Any:
        """Restore the struct of a stage."""
        found = {key.partition(".")[2]: value for key, value in self.columns.items() if key.startswith(f"{name}.")}
        for column, made in _OBJECTS.items():
            if column in found:
                found[column] = [None if each is None else made(**each) for each in found[column]]
        if found.get("media"):
            found["media"] = [[MediaHandle(**each) for each in row] for row in found["media"]]
        for row in found.get("rows", []):
            row.media[:] = [MediaHandle(**each) for each in row.media]
        try:
            return kind(**found)
        except TypeError as error:  # a column too many, or too few
            raise ConfigError([f"a recorded step is damaged: {error}"]) from error


def step_file(folder: Path, step: int) -> Path:
    """Path of a step's file."""
    return folder / f"step_{step}.safetensors"


def recorded_steps(folder: Path) -> list[int]:
    """Steps that the folder holds, in order."""
    found = (re.fullmatch(r"step_(0|[1-9][0-9]{0,17})\.safetensors", path.name) for path in folder.glob("step_*"))
    return sorted(int(match[1]) for match in found if match)


def write_step(file: Path, stages: Stages, facts: dict[str, Any]) -> None:
    """Write all columns of a step; the file is there when it is whole."""
    columns = {f"{name}.{key}": value for name, stage in stages.items() for key, value in stage.columns().items()}
    tensors = {key: value.detach().cpu().clone() for key, value in columns.items() if isinstance(value, torch.Tensor)}
    others = {key: value for key, value in columns.items() if key not in tensors}
    header = hidden(json.dumps({"order": list(columns), "lists": others, "facts": facts}, default=_plain))
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(".part")
    save_file(tensors, partial, {"step": header})
    os.replace(partial, file)


def read_step(file: Path) -> Recorded:
    """Read a recorded step. Raises ConfigError where the file is not there, or is none."""
    try:
        with safe_open(file, framework="pt") as opened:
            header = json.loads(opened.metadata()["step"])
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - it is no dictionary
        columns = {key: (tensors | header["lists"])[key] for key in header["order"]}
        return Recorded(columns=columns, facts=dict(header["facts"]))
    except Exception as error:  # safetensors raises kinds of its own
        raise ConfigError([f"{file} holds no recorded step (trainer.record_freq): {error}"]) from error


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else str(value)


class Recorder:
    """Recorder of each trainer.record_freq-th step of a run, and of each that skip_rollout did not find.

    Written with a step are the checksums of the weights that the update of `roles` begins with.
    """

    def __init__(self, config: PPOConfig, roles: Sequence[RoleHandle]) -> None:
        self._every, self._own, self._roles = config.trainer.record_freq, log_dir(config) / "recorded", roles
        self._dump = dump_dir(config) if config.actor_rollout_ref.rollout.skip_rollout else None

    def keep(self, step: int, stages: Stages, facts: dict[str, Any]) -> None:
        """Write a step, before its update, where it is due."""
        files = [step_file(self._own, step)] if self._every > 0 and step % self._every == 0 else []
        if self._dump is not None and not step_file(self._dump, step).exists():
            files.append(step_file(self._dump, step))
        if files:
            facts = facts | {"weights": {role.role: role.checksums() for role in self._roles}}
        for file in dict.fromkeys(files):
            write_step(file, stages, facts)


def dump_dir(config: PPOConfig) -> Path:
    """Folder in which skip_rollout looks for steps."""
    named = config.actor_rollout_ref.rollout.skip_dump_dir
    return log_dir(config) / "recorded" if named is None else Path(named).expanduser()


class RecordedSource(Collector):
    """Source of batches that an earlier run has recorded, with their scores; steps that are not there are sampled."""

    def next_batch(self, step: int) -> tuple[Rollouts, PendingBatch]:
        """Return the next batch; see Collector. Raises ConfigError for a missing step where nothing can sample it."""
        file, policy = step_file(dump_dir(self.config), step), self.config.actor_rollout_ref.rollout
        if not file.exists() and not policy.engine.recorded:
            return super().next_batch(step)
        found, self._metrics = read_step(file), {}
        self._source.skip()  # the place in the data moves on, as it did then
        rollouts: Rollouts = found.stage("rollouts", Rollouts)
        return rollouts, PendingBatch(found.stage("scores", Scores))
