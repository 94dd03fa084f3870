"""Reason why two runs differ: the first quantity of a step that is not the same, and the keys that can explain it.

The second may be another trainer's: a table with one row for each response, see `read_table`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from verl_like.batch import Rollouts, Scores
from verl_like.config.errors import ConfigError
from verl_like.flat_columns import bounds
from verl_like.kit.replaying import Difference, parting, recorded_folder
from verl_like.kit.run_diff import differences, read_configuration
from verl_like.observe.run_folder import read_run
from verl_like.trainer.recording import Recorded, read_step, recorded_steps, step_file

# (phase, column or metric) of a difference -> patterns of the keys that act there, and not only before it.
_SEED, _ROLLOUT = r"trainer\.seed", r"actor_rollout_ref\.rollout\."
_UPDATE = (
    r"actor_rollout_ref\.actor\.(optim|policy_loss|clip_|kl_loss|use_kl_loss|use_unbiased_kl|entropy_coeff|loss_|grad_clip"
    r"|ppo_(mini|epochs)|shuffle|sample_weight|mask_truncated|ratio_skip|rl_loss|sft_loss|fsdp_config|data_loader)"
    r"|critic\.|algorithm\.rollout_correction|actor_rollout_ref\.(model|actor\.ulysses)"
)
_ANSWERS = r"actor_rollout_ref\.rollout\.|data\.max_(prompt|response)_length|async_training\."
_CAUSES: tuple[tuple[str, str, str], ...] = (
    ("weights", "critic", rf"critic\.|{_SEED}"),
    ("weights", "", rf"actor_rollout_ref\.(model|actor\.fsdp_config|actor\.(optim|strategy))|{_SEED}"),
    ("rollouts", r"prompt|group_B|rows", rf"data\.|{_SEED}|env\.|.*\.model\.custom_chat_template|.*rollout\.n$"),
    ("rollouts", "", rf"{_ANSWERS}|{_SEED}|data\.(tokenizer|chat_template)|algorithm\.filter_groups"),
    (
        "scores",
        "",
        r"reward_model\.|custom_reward_function\.|.*rollout\.(outcomes|multi_turn)|algorithm\.filter_groups",
    ),
    (
        "evaluated",
        r"ref|full_kl",
        r"actor_rollout_ref\.(ref|model)\.|actor_rollout_ref\.actor\.(use_kl|kl_)|algorithm\.use_kl",
    ),
    ("evaluated", "values", r"critic\."),
    (
        "evaluated",
        "",
        r"actor_rollout_ref\.(model|actor)\.|.*rollout\.(temperature|log_prob)|algorithm\.(adv|rollout_c)",
    ),
    ("experience", "mask|is_weights", r"algorithm\.rollout_correction|.*rollout\.outcomes|algorithm\.filter_groups"),
    (
        "experience",
        "",
        r"algorithm\.|reward_model\.(overlong|length)|actor_rollout_ref\.actor\.sample_weight|data\.max_res",
    ),
    ("update", r"^critic/", r"critic\."),
    ("update", r"lr$", r".*\.optim\.|trainer\.total"),
    ("update", "", _UPDATE),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """The first difference, the differing keys that can explain it (key, A, B), and what no key tells."""

    difference: Difference
    keys: list[tuple[str, Any, Any]]
    others: int  # keys that differ and act elsewhere
    hints: list[str]

    def text(self) -> str:
        """Lines for people."""
        found = self.difference
        lines = [f"first difference: step {found.step}, {found.phase}: {found.where}"]
        lines += [f"  A: {found.first}", f"  B: {found.second}", ""]
        if self.keys:
            width = max(len(key) for key, _, _ in self.keys)
            lines += ["keys that differ and can explain it (A | B):"]
            lines += [f"  {key:<{width}}  {first} | {second}" for key, first, second in self.keys]
        lines += [f"  {hint}" for hint in self.hints]
        if not self.keys and not self.hints:
            lines.append("no key that differs acts there: look at versions, hardware and what the files hold")
        return "\n".join([*lines, *([f"{self.others} more keys differ (verl-like diff)"] if self.others else [])])


def explain(first: Path, second: Path, tolerance: float) -> Explanation | None:
    """Compare a run with another, or with a table of another trainer's; None where no recorded step differs.

    Raises ConfigError for a folder without recorded steps, and for a table that lacks what it must have.
    """
    if second.is_file():
        found = next((each for each in _against_table(first, second, tolerance) if not each.same), None)
        return None if found is None else Explanation(difference=found, keys=[], others=0, hints=[_OTHERS_TABLE])
    found = parting(first, second, tolerance)
    if found is None:
        return None
    (_, one), (_, other) = (read_configuration(path) for path in (first, second))
    told = [(each.key, each.first, each.second) for each in differences(one, other) if not _of_no_account(each.key)]
    keys = [row for row in told if _acts(row[0], found)]
    return Explanation(difference=found, keys=keys, others=len(told) - len(keys), hints=[*_hints(first, second, found)])


_OTHERS_TABLE = "the table has no configuration: compare its trainer's settings of this quantity with `config.yaml`"


def _of_no_account(key: str) -> bool:
    """True for keys that change no number: where files go, and what is reported."""
    names = r"trainer\.(log_dir|default_local_dir|experiment_name|project_name|logger|.*freq|console|resume|max_.*ckpt)"
    return re.match(names, key) is not None


def _acts(key: str, difference: Difference) -> bool:
    """True where the key acts on the differing quantity. Weights after a first step differ by the update before."""
    phase, where = difference.phase, difference.where
    if phase == "weights" and difference.step > 1 and re.match(_UPDATE, key):
        return True
    pattern = next(keys for of, part, keys in _CAUSES if of == phase and re.search(part, where))
    return re.match(pattern, key) is not None


def _hints(first: Path, second: Path, difference: Difference) -> Iterator[str]:
    """Files of the same name with other content, other versions, weights that came otherwise."""
    one, other = (read_run(path).environment for path in (first, second))
    a, b = one.get("code", {}), other.get("code", {})
    for key in sorted(a.keys() & b.keys()):
        if a[key]["sha256"] != b[key]["sha256"] and a[key]["path"] != "" and _acts(key, difference):
            yield f"{key}: the file's content differs ({a[key]['sha256'][:12]} | {b[key]['sha256'][:12]})"
    versions, theirs = one.get("packages", {}), other.get("packages", {})
    for name in sorted(versions.keys() | theirs.keys()) if versions and theirs else ():  # known of both
        if versions.get(name) != theirs.get(name):
            yield f"package {name}: {versions.get(name)} | {theirs.get(name)}"
    if difference.phase == "weights" and difference.step == 1:
        yield "both runs began with other weights: another revision of the model's files, or random ones"


def read_table(file: Path) -> list[dict[str, Any]]:
    """Read another trainer's responses: parquet or jsonl, one row for each, in the order of its batch.

    Columns: step (from 1), prompt_ids, response_ids (lists of tokens); where they are there also reward (a number),
    rollout_log_probs, old_log_probs, ref_log_probs, advantages (lists, one number for each token of the response).
    Raises ConfigError for another form.
    """
    try:
        if file.suffix == ".parquet":
            rows = pq.read_table(file).to_pylist()
        else:
            rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
        for number, row in enumerate(rows):
            _check_row(number, row)
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError([f"{file} is no table of responses: {error} (docs/selfcheck.md)"]) from error
    return rows


def _check_row(number: int, row: Any) -> None:
    """Raise ValueError for a row that lacks a column, or has one of another type or length."""
    if not isinstance(row, dict):
        raise ValueError(f"row {number} is no object: {str(row)[:40]}")
    if lacking := {"step", "prompt_ids", "response_ids"} - row.keys():
        raise ValueError(f"row {number} has no {', '.join(sorted(lacking))}")
    if not isinstance(row["step"], int) or isinstance(row["step"], bool):
        raise ValueError(f"row {number}: step={row['step']!r} is no whole number")
    for name in ("prompt_ids", "response_ids"):
        if not isinstance(row[name], list) or not all(isinstance(token, int) for token in row[name]):
            raise ValueError(f"row {number}: {name} is no list of tokens")
    if row.get("reward") is not None and not isinstance(row["reward"], int | float):
        raise ValueError(f"row {number}: reward={row['reward']!r} is no number")
    for _, name in _LISTS:
        values = row.get(name)
        if values is None:
            continue
        if not isinstance(values, list) or not all(isinstance(value, int | float) for value in values):
            raise ValueError(f"row {number}: {name} is no list of numbers")
        if len(values) != len(row["response_ids"]):
            raise ValueError(f"row {number}: {name} has {len(values)} numbers for {len(row['response_ids'])} tokens")


_LISTS = (
    ("rollouts", "rollout_log_probs"),
    ("evaluated", "old_log_probs"),
    ("evaluated", "ref_log_probs"),
    ("experience", "advantages"),
)


def _against_table(run: Path, file: Path, tolerance: float) -> Iterator[Difference]:
    """Every quantity that both have, in the order of a step."""
    rows, folder = read_table(file), recorded_folder(run)
    steps = sorted({row["step"] for row in rows} & set(recorded_steps(folder)))
    if not steps:
        raise ConfigError([f"{run} and {file} have no step in common (trainer.record_freq)"])
    for step in steps:
        own, theirs = read_step(step_file(folder, step)), [row for row in rows if row["step"] == step]
        yield from _of_rows(own, theirs, step, tolerance)


def _of_rows(own: Recorded, theirs: Sequence[dict[str, Any]], step: int, tolerance: float) -> Iterator[Difference]:
    rollouts: Rollouts = own.stage("rollouts", Rollouts)
    scores: Scores = own.stage("scores", Scores)
    count = len(rollouts)
    about: dict[str, Any] = {"step": step}
    yield Difference(
        **about, phase="rollouts", where="responses", first=count, second=len(theirs), same=count == len(theirs)
    )
    for name, ids, lengths in (
        ("prompt_ids", rollouts.prompt_ids_T, rollouts.prompt_length_B),
        ("response_ids", rollouts.response_ids_T, rollouts.response_length_B),
    ):
        ends = bounds(lengths)
        for row in range(count):
            mine, other = ids[ends[row] : ends[row + 1]].tolist(), list(theirs[row][name])
            if mine != other:
                at = next(
                    (i for i, (a, b) in enumerate(zip(mine, other, strict=False)) if a != b), min(len(mine), len(other))
                )
                told = [str(part[at : at + 4]) for part in (mine, other)]
                where = f"{name} at row {row}, token {at}"
                yield Difference(**about, phase="rollouts", where=where, first=told[0], second=told[1], same=False)
    for row in range(count):
        if theirs[row].get("reward") is not None:
            mine, other = float(scores.score_B[row]), float(theirs[row]["reward"])
            same = math.isclose(mine, other, rel_tol=tolerance, abs_tol=tolerance)
            yield Difference(**about, phase="scores", where=f"reward of row {row}", first=mine, second=other, same=same)
    ends = bounds(rollouts.response_length_B)
    for phase, name in _LISTS:
        column_T = own.columns.get(f"{phase}.{name}_T")
        if column_T is None or (phase == "experience" and len(column_T) != ends[-1]):
            continue  # rows that were left out moved the others
        for row in range(count):
            own_values = column_T[ends[row] : ends[row + 1]].tolist()
            others = theirs[row].get(name)
            for token, (mine, other) in enumerate(zip(own_values, others or own_values, strict=True)):
                if not math.isclose(mine, other, rel_tol=tolerance, abs_tol=tolerance):
                    where = f"{name} at row {row}, token {token}"
                    yield Difference(**about, phase=phase, where=where, first=mine, second=other, same=False)
