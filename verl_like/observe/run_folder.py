"""Reader of the files that a run leaves behind: `verl_like.read_run(folder)`. Needs neither torch nor the trainer.

docs/run_folder.md lists the files. A run that is still going on can be read too: what is being written is left out.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from verl_like.small_files import parse_object, read_bytes, read_object, read_yaml

METRICS, CONFIG, ENVIRONMENT, SAMPLES = "metrics.jsonl", "config.yaml", "environment.json", "samples"
STEP_PROOF = "step_proof.txt"  # of trainer.prove_step

# Names that a record of the samples may have besides the reward function's own values.
FIELDS = frozenset(
    {
        *("input", "output", "gts", "score", "step", "data_source", "finish_reason", "outcome", "failure", "group"),
        *("dataset_index", "validation_set", "prompt_id", "prompt_tokens", "response_tokens", "sampled_tokens"),
        *("weight_version", "advantage", "turns", "chosen", "tokens", "episode", "input_shown", "output_shown"),
    }
)


@dataclass(frozen=True)
class Run:
    """One run's folder. Everything is read when it is first asked for."""

    path: Path

    @cached_property
    def config(self) -> dict[str, Any]:
        """The resolved configuration, nested; {} where the file is missing."""
        path = self.path / CONFIG
        if not path.exists():
            return {}
        try:
            found = yaml.safe_load(read_yaml(path)) or {}
        except yaml.YAMLError as error:
            raise ValueError(f"{path} is damaged: {error}") from error
        if not isinstance(found, dict):
            raise ValueError(f"{path} is damaged: it holds no mapping")
        return found

    @cached_property
    def environment(self) -> dict[str, Any]:
        """Command line, versions, host and devices of the run's latest start; {} where the file is missing."""
        path = self.path / ENVIRONMENT
        return read_object(path) if path.exists() else {}

    @cached_property
    def steps(self) -> dict[int, dict[str, float]]:
        """Finite metrics by step, in step order."""
        found = read_metrics(self.path / METRICS)
        return {
            step: {name: value for name, value in metrics.items() if isinstance(value, float | int) and _finite(value)}
            for step, metrics in found.items()
        }

    @property
    def metrics(self) -> Any:
        """One row a step: a pandas DataFrame indexed by step where pandas is installed, else a list of dicts."""
        rows = [{"step": step, **metrics} for step, metrics in self.steps.items()]
        try:
            import pandas
        except ImportError:
            return rows
        return pandas.DataFrame(rows).set_index("step") if rows else pandas.DataFrame(rows)

    @cached_property
    def validation(self) -> list[dict[str, float]]:
        """The validations, in step order: step and all val-core/*, val-aux/* metrics."""
        found = []
        for step, metrics in self.steps.items():
            values = {name: value for name, value in metrics.items() if name.startswith(("val-core/", "val-aux/"))}
            if values:
                found.append({"step": step, **values})
        return found

    @cached_property
    def samples(self) -> list[dict[str, Any]]:
        """Kept training responses, in step order; see docs/run_folder.md for the fields."""
        return list(self._records("train"))

    @cached_property
    def validation_samples(self) -> list[dict[str, Any]]:
        """Kept validation responses, in step order."""
        return list(self._records("validation"))

    def _records(self, part: str) -> Iterator[dict[str, Any]]:
        for path in sorted((self.path / SAMPLES / part).glob("*.jsonl")):
            yield from records(path)


def records(path: Path) -> list[dict[str, Any]]:
    """The records of one file of samples; none where the run thinned the file out meanwhile."""
    try:
        text = read_bytes(path, sys.maxsize)
    except FileNotFoundError:
        return []
    return [parse_object(line, f"{path}, line {n}") for n, line in enumerate(text.split(b"\n"), start=1) if line]


def read_run(path: str | os.PathLike[str]) -> Run:
    """Read the run whose folder (trainer.log_dir, by default trainer.default_local_dir) this is.

    Example: read_run("outputs/quickstart/checkpoints").metrics["critic/score/mean"].plot()

    Raises FileNotFoundError, naming what is there, for a folder without metrics.jsonl.
    """
    folder = Path(path).expanduser()
    if not (folder / METRICS).is_file():
        inside = sorted(file.parent for file in folder.glob(f"*/{METRICS}")) if folder.is_dir() else []
        hint = f"; did you mean {inside[0]}?" if inside else ""
        there = f"it holds no {METRICS}" if folder.is_dir() else "there is no such folder"
        there = "it is a file" if folder.is_file() else there
        raise FileNotFoundError(f"{folder.absolute()} is no run's folder (trainer.log_dir): {there}{hint}")
    return Run(folder)


def read_metrics(path: str | os.PathLike[str]) -> dict[int, dict[str, float | None]]:
    """Metrics by step from a metrics.jsonl, in step order; lines of one step are joined, the later value counts.

    A line is {"step", "time", name: number ...}; before 0.2 the numbers stood in an object of their own, "data".
    """
    steps: dict[int, dict[str, float | None]] = {}
    with Path(path).expanduser().open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.endswith(b"\n"):
                record = parse_object(line, f"{path}, line {number}", {"step": int})
                step, _ = record.pop("step"), record.pop("time", None)
                if not isinstance(data := record.pop("data", {}), dict):
                    raise ValueError(f"{path}, line {number} is damaged: data={data!r:.60}")
                steps[step] = {**steps.get(step, {}), **data, **record}
    return dict(sorted(steps.items()))


def _finite(number: float) -> bool:
    return abs(number) <= sys.float_info.max


def flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested sections as dotted keys; an empty dictionary is a value."""
    found: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            found |= flat(value, f"{prefix}{name}.")
        else:
            found[prefix + name] = value
    return found


def value_at(tree: Any, path: str, default: Any = None) -> Any:
    """The value at a dotted path of plain nested dictionaries; the default where the path ends early."""
    for part in path.split("."):
        if not isinstance(tree, dict) or part not in tree:
            return default
        tree = tree[part]
    return tree
