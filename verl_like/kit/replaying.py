"""A recorded step once more (`verl-like replay`), and where two recorded runs part (`verl-like bisect`)."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from torch import Tensor

from verl_like.checkpoint.layout import step_dir, whole_checkpoints
from verl_like.config import PPOConfig
from verl_like.config.errors import ConfigError
from verl_like.flat_columns import bounds
from verl_like.kit.run_diff import read_configuration
from verl_like.observe.run_folder import METRICS, read_metrics
from verl_like.trainer.compose import compose
from verl_like.trainer.recording import Recorded, read_step, recorded_steps, step_file
from verl_like.trainer.run import opened

RECORDED = "recorded"
_STAGES = ("rollouts", "scores", "evaluated", "experience")  # of a step, in this order
_ABSENT = "not there"
_ALWAYS = ("pg_loss", "vf_loss", "grad_norm", "kl_loss", "entropy")  # told also where they are the same
_SETTINGS: dict[str, Any] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Difference of two values of one thing.

    where: its tensor, row and token.
    """

    step: int
    phase: str
    where: str
    first: Any
    second: Any
    same: bool


def replay_config(run: Path, step: int, overrides: Sequence[str], out: str) -> PPOConfig:
    """The run's configuration, for this step alone, with `overrides` of one's own.

    Raises ConfigError where no checkpoint is there that the step began with.
    """
    file, tree = read_configuration(run)
    root = Path(tree["trainer"]["default_local_dir"]).expanduser()
    root = root if root.is_dir() else run
    settings = _SETTINGS | {"trainer.default_local_dir": out, "trainer.resume_mode": "disable"}
    settings["actor_rollout_ref.rollout.skip_dump_dir"] = str(run / RECORDED)
    actor, correction = tree["actor_rollout_ref"]["actor"], tree["algorithm"]["rollout_correction"]
    if tree["trainer"]["mode"] != "sync":  # its rows are there; what follows from the mode stays as it was
        settings["trainer.mode"] = "sync"
        bypass = correction["bypass_mode"] or any("rollout_correction.bypass_mode" in one for one in overrides)
        if actor["old_log_probs"] == "auto" and not bypass:
            settings["actor_rollout_ref.actor.old_log_probs"] = "recompute"
    if step > 1:
        before = step_dir(root, step - 1)
        if before not in (there := whole_checkpoints(root)):
            raise ConfigError(
                [
                    f"step {step} began with the weights of {before}, which is not there; checkpoints: "
                    f"{', '.join(path.name for path in there) or 'none'} (trainer.save_freq=1 keeps them all)"
                ]
            )
        settings |= {"trainer.resume_mode": "resume_path", "trainer.resume_from_path": str(before)}
    own = {text.partition("=")[0] for text in overrides}
    return compose([*(f"{k}={v}" for k, v in settings.items() if k not in own), *overrides], [file])


def recorded_folder(run: Path) -> Path:
    """The folder of a run's recorded steps. Raises ConfigError where there is none."""
    if (run / RECORDED).is_dir():
        return run / RECORDED
    there = "it has recorded no step (trainer.record_freq)" if run.is_dir() else "there is no such folder"
    raise ConfigError([f"{run.absolute()}: {'it is a file; name the folder of a run' if run.is_file() else there}"])


def replay(run: Path, step: int, overrides: Sequence[str], tolerance: float) -> list[Difference]:
    """Make the recorded step again, and compare columns and metrics. Raises ConfigError for what is missing."""
    recorded = read_step(step_file(recorded_folder(run), step))
    metrics = read_metrics(run / METRICS).get(step, {})
    with tempfile.TemporaryDirectory() as out:
        config = replay_config(run, step, overrides, out)
        with opened(config) as trainer:
            trainer.start()
            again = trainer.step()
        found = list(_of_step(step, recorded, read_step(step_file(Path(out) / RECORDED, step)), tolerance))
    return [*found, *_of_metrics(step, metrics, again, tolerance)]


def parting(first: Path, second: Path, tolerance: float) -> Difference | None:
    """The first step, phase and tensor in which two recorded runs differ; None: in none that both have recorded."""
    steps = sorted(set(recorded_steps(recorded_folder(first))) & set(recorded_steps(recorded_folder(second))))
    if not steps:
        raise ConfigError([f"{first} and {second} have recorded no step in common (trainer.record_freq)"])
    tables = [read_metrics(run / METRICS) for run in (first, second)]
    for step in steps:
        a, b = (read_step(step_file(run / RECORDED, step)) for run in (first, second))
        before, after = (table.get(step, {}) for table in tables)
        for difference in (*_of_step(step, a, b, tolerance), *_of_metrics(step, before, after, tolerance)):
            if not difference.same:
                return difference
    return None


def _of_step(step: int, first: Recorded, second: Recorded, tolerance: float) -> Iterator[Difference]:
    """Weights, then the columns of each stage: one line each."""
    for role in dict.fromkeys([*first.facts["weights"], *second.facts["weights"]]):
        sums, others = (each.facts["weights"].get(role, {}) for each in (first, second))
        wrong = [name for name in dict.fromkeys([*sums, *others]) if sums.get(name) != others.get(name)]
        what = f"{role}: {wrong[0]} and {len(wrong) - 1} more" if wrong else f"{role}: {len(sums)} tensors"
        name = wrong[0] if wrong else next(iter(sums))
        yield Difference(
            step=step,
            phase="weights",
            where=what,
            same=not wrong,
            first=sums.get(name, _ABSENT),
            second=others.get(name, _ABSENT),
        )
    keys = dict.fromkeys([*first.columns, *second.columns])
    for key in sorted(keys, key=lambda key: _STAGES.index(key.partition(".")[0])):
        phase, _, name = key.partition(".")
        if name in ("seconds_B", "episode_names"):
            continue  # how long grading took; names, which older records have not
        a, b = first.columns.get(key), second.columns.get(key)
        if name == "rewards_T" and (a is None or b is None):
            continue  # older records have none
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            yield _of_tensors(step, phase, name, a, b, first.columns.get(f"{phase}.response_length_B"), tolerance)
        else:
            yield Difference(step=step, phase=phase, where=name, first=_brief(a), second=_brief(b), same=a == b)


def _of_tensors(
    step: int, phase: str, name: str, a: Tensor, b: Tensor, length_B: Tensor | None, tolerance: float
) -> Difference:
    about = {"step": step, "phase": phase}
    if a.shape != b.shape:
        return Difference(**about, where=name, first=tuple(a.shape), second=tuple(b.shape), same=False)
    x, y = a.double(), b.double()
    differs = ~((x == y) | (x.isnan() & y.isnan()) | ((x - y).abs() <= tolerance * (1 + x.abs())))
    places = differs.flatten().nonzero().flatten()
    if not len(places):
        return Difference(**about, where=name, first=f"{a.numel()} entries", second="", same=True)
    at = int(places[0])
    at_token = at // (a.numel() // len(a))  # a teacher has several numbers for each
    where = f"row {at}"
    if name.endswith("_T") and length_B is not None and int(length_B.sum()) == len(a):
        ends = bounds(length_B)
        row = next(i for i in range(len(length_B)) if at_token < ends[i + 1])
        where = f"row {row}, token {at_token - ends[row]}"
    more = f"{name} at {where} ({len(places)} of {a.numel()} entries differ)"
    return Difference(**about, where=more, first=a.flatten()[at].item(), second=b.flatten()[at].item(), same=False)


def _of_metrics(step: int, first: dict[str, Any], second: dict[str, Any], tolerance: float) -> Iterator[Difference]:
    """Compare the models' metrics. The other metrics follow from what was compared already, or are times.

    Loads of experts count tokens that were computed: of a prompt that rows share once on each rank that has some.
    """
    names = (n for n in first.keys() & second.keys() if n.startswith(("actor/", "critic/")) and "/moe_" not in n)
    for name in sorted(names):
        # metrics.jsonl has null where a number is not finite
        a, b = (math.nan if value is None else value for value in (first[name], second[name]))
        same = math.isclose(a, b, rel_tol=tolerance, abs_tol=tolerance) or not (math.isfinite(a) or math.isfinite(b))
        if not same or name.endswith(_ALWAYS):
            yield Difference(step=step, phase="update", where=name, first=a, second=b, same=same)


def _brief(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{value.numel()} entries"
    return _ABSENT if value is None else f"{str(value)[:60]}"
