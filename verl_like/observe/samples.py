"""Responses that people read: one jsonl file per step, and a few rows of a validation for the trackers. Every run keeps
them in `<log_dir>/samples/{train,validation}/<step>.jsonl`, bounded in size.

A record has verl's fields (input, output, gts, score, step, and each further value of the reward function) plus those
of `run_folder.FIELDS`; docs/run_folder.md says what each one means. The score of a row whose reward failed is null.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from verl_like.batch import Evaluated, Experience, PromptRow, Rollouts, Scores
from verl_like.flat_columns import bounds
from verl_like.models.special_tokens import SpecialTokens
from verl_like.observe.redaction import hidden
from verl_like.observe.run_folder import FIELDS

Sample = dict[str, Any]

_BY_REASON = {"stop": "finished", "length": "truncated", "abort": "aborted"}  # where nobody judged the episodes
_SAMPLE_SEED = 42  # the same prompts are shown at every validation


class Decoder(Protocol):
    """The part of a Hugging Face tokenizer that turning ids into text needs."""

    def decode(self, token_ids: Any, *, skip_special_tokens: bool = False) -> Any: ...


def make_samples(
    rollouts: Rollouts, scores: Scores, tokenizer: Decoder, step: int, experience: Experience | None = None
) -> list[Sample]:
    """One record per row, in row order, special tokens left out of the texts. experience: gives the advantages.

    Where a text spells some out, input_shown or output_shown has it with those that are tokens in \u27e6 \u27e7.
    """
    special = SpecialTokens(tokenizer)
    prompts, ends = rollouts.prompt_lists(), bounds(rollouts.response_length_B)
    credit = {} if experience is None else credit_rows(rollouts, experience)
    samples: list[Sample] = []
    for i, row in enumerate(rollouts.rows):
        prompt_ids, own = prompts[i], slice(ends[i], ends[i + 1])
        response_ids = rollouts.response_ids_T[own].tolist()
        failure, reason = scores.failures[i], rollouts.finish_reasons[i]
        sampled = rollouts.response_mask_T[own]
        versions = rollouts.weight_version_T[own][sampled]
        sample = {
            "input": tokenizer.decode(prompt_ids, skip_special_tokens=True),
            "output": tokenizer.decode(response_ids, skip_special_tokens=True),
            "gts": row.ground_truth,
            "score": float(scores.score_B[i]),
            "step": step,
            "data_source": row.data_source,
            "finish_reason": reason,
            "outcome": _outcome(scores, i, reason),
            "group": int(rollouts.group_B[i]),
            "dataset_index": row.index,
            "prompt_tokens": len(prompt_ids),
            "response_tokens": len(response_ids),
            "sampled_tokens": int(sampled.sum()),
            "weight_version": int(versions.min()) if len(versions) else None,
        }
        for name, ids, said in (("input", prompt_ids, row.messages), ("output", response_ids, "")):
            if special.spelled([said, sample[name]]):
                parts = (f"\u27e6{text}\u27e7" if is_token else text for text, is_token in special.shown(ids))
                sample[f"{name}_shown"] = "".join(parts)
        if i in credit and experience is not None:
            trained = row_of(experience, experience.response_mask_T, credit[i])
            advantages = row_of(experience, experience.advantages_T, credit[i])[trained]
            sample["advantage"] = float(advantages.mean()) if len(advantages) else 0.0
        if rollouts.step_T is not None:
            sample["turns"] = max(rollouts.step_T[own].tolist(), default=-1) + 1
        if rollouts.episode_names is not None:
            sample["episode"] = rollouts.episode_names[i]
        if row.validation_set:
            sample["validation_set"] = row.validation_set
        if row.prompt_id is not None:
            sample["prompt_id"] = row.prompt_id
        if failure is not None:
            sample["failure"] = hidden(f"{failure.kind}: {failure.message}")
        # The reward function's own values never hide a field of the record, nor stand for one that it lacks ("failure")
        samples.append({**{name: value for name, value in scores.extras[i].items() if name not in FIELDS}, **sample})
    return samples


def _outcome(scores: Scores, i: int, reason: str) -> str:
    if scores.outcomes is not None:
        return scores.outcomes[i]
    return _BY_REASON.get(reason, reason) if scores.failures[i] is None else "grader_error"


def credit_rows(rollouts: Rollouts, experience: Experience) -> dict[int, int]:
    """Row of the experience for each row of the rollouts that has one: rows are left out there, or drawn twice."""
    found: dict[tuple[int, int, bytes], int] = {}
    for position, identity in enumerate(_identities(experience)):
        found.setdefault(identity, position)
    matched = {i: found.get(identity) for i, identity in enumerate(_identities(rollouts))}
    return {i: position for i, position in matched.items() if position is not None}


def _identities(rows: Rollouts | Experience) -> list[tuple[int, int, bytes]]:
    episodes = (rows.group_B if rows.episode_B is None else rows.episode_B).tolist()
    ids, places = rows.response_ids_T.to(torch.int32).numpy(), itertools.pairwise(bounds(rows.response_length_B))
    texts = [ids[start:stop].tobytes() for start, stop in places]
    return list(zip(rows.prompt_length_B.tolist(), episodes, texts, strict=True))


def add_tokens(
    samples: Sequence[Sample],
    rollouts: Rollouts,
    token_texts: TokenTexts,
    *,
    trainer: Evaluated | None = None,
    experience: Experience | None = None,
) -> None:
    """Give each record `tokens`: its response token by token, with what is known of each. Rows as in `rollouts`.

    trainer: log-probs (and entropy) of the trained model, where this run computed them.
    """
    credit = {} if experience is None else credit_rows(rollouts, experience)
    for i, sample in enumerate(samples):
        columns: dict[str, Tensor | None] = {"rollout_log_probs": rollouts.rollout_log_probs_T}
        if trainer is not None:
            columns["log_probs"] = trainer.old_log_probs_T
            columns |= {"ref_log_probs": trainer.ref_log_probs_T, "entropy": trainer.entropy_T}
        known = {name: row_of(rollouts, column, i) for name, column in columns.items() if column is not None}
        if experience is not None and i in credit:
            known["advantages"] = row_of(experience, experience.advantages_T, credit[i])
        sample["tokens"] = {
            "text": token_texts(row_of(rollouts, rollouts.response_ids_T, i).tolist()),
            "sampled": runs(row_of(rollouts, rollouts.response_mask_T, i).int().tolist()),
            "weight_version": runs(row_of(rollouts, rollouts.weight_version_T, i).tolist()),
            **{name: rounded(column) for name, column in known.items()},
        }


def row_of(rows: Rollouts | Experience, column_T: Tensor, i: int) -> Tensor:
    """Cut the part of a token column [T] that belongs to the response of row `i`."""
    end = int(rows.response_length_B[: i + 1].sum())
    return column_T[end - int(rows.response_length_B[i]) : end]


def rounded(values: Tensor) -> list[float | None]:
    """Round to four decimals: enough to colour by, and a third of the bytes."""
    return [round(value, 4) if math.isfinite(value) else None for value in values.tolist()]


class TokenTexts:
    """The text of each token of a response. Remembers what a token reads like: a tokenizer needs 20 us to say so."""

    def __init__(self, tokenizer: Decoder) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, str] = {}

    def __call__(self, ids: Sequence[int]) -> list[str]:
        """Characters that several tokens make together stand at the last of them."""
        texts, start = [], 0
        for end in range(1, len(ids) + 1):
            text = self._alone(ids[start]) if end - start == 1 else self._decode(ids[start:end])
            unfinished = text.endswith("\N{REPLACEMENT CHARACTER}") and end < len(ids) and end - start < 4
            texts.append("" if unfinished else text)
            start = start if unfinished else end
        return texts

    def _alone(self, token: int) -> str:
        """Decode a token as it reads behind another one: at the start of a text some tokenizers drop a word's space."""
        if token not in self._known:
            once, twice = self._decode([token]), self._decode([token, token])
            self._known[token] = twice[len(once) :] if twice.startswith(once) else once
        return self._known[token]

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)


def runs(values: Sequence[int]) -> list[list[int]]:
    """Encode values as [[value, how many in a row], ...]: masks and weight versions change rarely."""
    return [[value, len(list(items))] for value, items in itertools.groupby(values)]


def choose_rows(rollouts: Rollouts, scores: Scores, num_groups: int, max_rows: int, seed: int) -> dict[int, str]:
    """Rows of the groups to keep, with why: half of the groups by chance ("chance"), so that they show what is common;
    the others are the most telling ones left ("telling"): a failed reward first, then answers that were graded most
    differently. Of a group at most `max_rows` rows, spread over its scores."""
    members: dict[int, list[int]] = {}
    for i, group in enumerate(rollouts.group_B.tolist()):
        members.setdefault(group, []).append(i)
    order = list(members)
    random.Random(seed).shuffle(order)
    by_chance = order[: (num_groups + 1) // 2]
    score_B = scores.score_B.tolist()

    def interest(group: int) -> tuple[bool, float]:
        known = [score_B[i] for i in members[group] if math.isfinite(score_B[i])]
        return any(scores.failures[i] for i in members[group]), max(known) - min(known) if known else 0.0

    rest = sorted(order[len(by_chance) :], key=interest, reverse=True)[: num_groups - len(by_chance)]
    chosen: dict[int, str] = {}
    for group in (*by_chance, *rest):
        rows = sorted(members[group], key=lambda i: (not math.isfinite(score_B[i]), score_B[i], i))
        count = min(max_rows, len(rows))
        kept = {rows[round(k * (len(rows) - 1) / max(1, count - 1))] for k in range(count)}
        chosen |= dict.fromkeys(sorted(kept), "chance" if group in by_chance else "telling")
    return chosen


def dump_samples(folder: str | os.PathLike[str], step: int, samples: Sequence[Sample]) -> Path:
    """Write `<folder>/<step, six digits>.jsonl`, replacing what a run before a resume left there. Returns the path.

    The file appears at once: a reader never sees half of it.
    """
    path = Path(folder).expanduser() / f"{step:06d}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".tmp{os.getpid()}")
    with temporary.open("w", encoding="utf-8") as file:
        for sample in samples:
            file.write(to_json(sample) + "\n")
    temporary.replace(path)
    return path


def pick_samples(samples: Sequence[Sample], count: int) -> list[Sample]:
    """Pick `count` rows of a validation: a fixed random choice, sorted by prompt."""
    ordered = sorted(samples, key=lambda sample: str(sample["input"]))
    chosen = random.Random(_SAMPLE_SEED).sample(range(len(ordered)), min(count, len(ordered)))
    return [ordered[i] for i in sorted(chosen)]


def pick_rows(batches: Sequence[Sequence[PromptRow]], num_prompts: int, max_rows: int) -> list[list[int]]:
    """Rows of a validation to keep, for each batch: a fixed random choice of prompts, the same in every run on the same
    files; of a prompt at most `max_rows` rows."""

    def name(row: PromptRow) -> tuple[str, str, int]:
        return row.validation_set, row.data_source, row.index

    names = sorted({name(row) for rows in batches for row in rows})
    chosen = set(random.Random(_SAMPLE_SEED).sample(names, min(num_prompts, len(names))))
    left = dict.fromkeys(chosen, max_rows)
    picked: list[list[int]] = []
    for rows in batches:
        picked.append([])
        for i, row in enumerate(rows):
            if left.get(name(row), 0) > 0:
                left[name(row)] -= 1
                picked[-1].append(i)
    return picked


def samples_text(title: str, samples: Sequence[Sample]) -> str:
    """A few responses for the console, each in three short lines."""
    lines = [title]
    for sample in samples:
        score = "failed" if "failure" in sample else f"{sample['score']:.4g}"
        facts = [f"score {score}", f"{sample['response_tokens']} tokens", sample["outcome"], sample["data_source"]]
        if sample["gts"] not in (None, ""):
            facts.append(f"truth {short(sample['gts'], 40)}")
        lines.append("  " + " | ".join(facts))
        lines.append(f"    prompt: {short(sample['input'], 160)}")
        lines.append(f"    answer: {short(sample['output'], 320)}")
        if "failure" in sample:
            lines.append(f"    reward: {short(sample['failure'], 160)}")
    return "\n".join(lines)


def short(value: Any, limit: int) -> str:
    """Write text on one line without control characters; a long one loses its middle."""
    text = "".join(c if c.isprintable() else {"\n": "\\n", "\t": "\\t"}.get(c, "?") for c in str(value))
    return text if len(text) <= limit else f"{text[: limit // 2]} ... {text[-(limit // 2) :]}"


def to_json(value: Any) -> str:
    """One line of strict JSON: NaN and infinities become null, tensors and arrays lists, anything else its text."""
    return encodable(json.dumps(_plain(value), ensure_ascii=False, allow_nan=False))


def encodable(text: str) -> str:
    """JSON that a file can hold: half a surrogate pair, as a grader may read it out of a response, as an escape."""
    return text.encode("utf-8", "backslashreplace").decode()


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set):
        return [_plain(item) for item in value]
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    return str(value)


logger = logging.getLogger(__name__)

_NEWEST = 5  # files that are never thinned out: what happens now is looked at most


class SampleStore:
    """Writes records of a step, and thins older steps out where the folder grows over its limit."""

    def __init__(self, folder: Path, max_mb: float, resumed_at: int | None) -> None:
        """Set aside samples of later steps than `resumed_at`, under the first free number.

        resumed_at: the last step of the run that goes on; None: a new run, for which all samples are set aside.
        """
        self.folder, self.max_bytes = folder, max_mb * 1e6
        files = sorted(folder.glob("*/*.jsonl"))
        later = [path for path in files if resumed_at is None or step_of(path) > resumed_at]
        if later:
            aside = free_name(folder)
            for path in later:
                target = aside / path.relative_to(folder)
                target.parent.mkdir(parents=True, exist_ok=True)
                path.rename(target)
            logger.info("%d files of samples that were in %s are now in %s", len(later), folder, aside.name)

    def write(self, part: str, step: int, samples: Sequence[Sample]) -> None:
        """Keep the records of a step. part: train or validation."""
        dump_samples(self.folder / part, step, samples)
        train, validation = (sorted((self.folder / name).glob("*.jsonl")) for name in ("train", "validation"))
        thin_out(train, self.max_bytes - sum(path.stat().st_size for path in validation))
        thin_out(validation, self.max_bytes)


def free_name(path: Path) -> Path:
    """Return the path with the first free number behind it, to set aside what is there."""
    names = (path.with_name(f"{path.name}.{n}") for n in itertools.count(1))
    return next(name for name in names if not name.exists())


def step_of(path: Path) -> int:
    """The step that a file of samples belongs to."""
    return int(path.stem)


def thin_out(files: Sequence[Path], max_bytes: float) -> None:
    """Delete every second file between the first and the newest until the rest fits; then the oldest of the newest."""
    kept = list(files)
    while len(kept) > 1 and sum(path.stat().st_size for path in kept) > max_bytes:
        between = kept[1:-_NEWEST]
        gone = set(between[::2]) or {kept[0]}
        for path in gone:
            path.unlink()
        kept = [path for path in kept if path not in gone]
