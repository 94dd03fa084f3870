"""What a checkpoint keeps of groups under way: the tokens that are sampled, by the number of their draw.

Episodes of one turn go on from them after a resume; all others begin anew, with the same seeds. A group that a
checkpoint has no tokens of begins anew too, so this file may be missing.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from verl_like.rollout.rollout_engine import FinishReason, Sampled

FILE = "under_way.npz"
_REASONS: tuple[FinishReason | None, ...] = (None, "stop", "length")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Kept:
    """One response so far. finish_reason: None while it runs."""

    sampled: Sampled
    finish_reason: FinishReason | None


ByGroup = dict[int, dict[int, Kept]]  # group -> sample -> tokens


def write(folder: Path, kept: ByGroup) -> None:
    """Into a folder that becomes a checkpoint."""
    rows = [(group, sample, one) for group, samples in kept.items() for sample, one in samples.items()]
    sampled = [one.sampled for _, _, one in rows]
    with (folder / FILE).open("wb") as file:
        np.savez(
            file,
            group_B=np.asarray([group for group, _, _ in rows], dtype=np.int64),
            sample_B=np.asarray([sample for _, sample, _ in rows], dtype=np.int32),
            reason_B=np.asarray([_REASONS.index(one.finish_reason) for _, _, one in rows], dtype=np.int8),
            length_B=np.asarray([len(each) for each in sampled], dtype=np.int64),
            token_ids_T=np.concatenate([np.empty(0, np.int32), *(each.token_ids for each in sampled)]),
            log_probs_T=np.concatenate([np.empty(0, np.float32), *(each.log_probs for each in sampled)]),
            weight_versions_T=np.concatenate([np.empty(0, np.int32), *(each.weight_versions for each in sampled)]),
        )


def read(folder: Path) -> ByGroup:
    """What `write` wrote; nothing where it wrote nothing."""
    if not (folder / FILE).exists():
        return {}
    with np.load(folder / FILE, allow_pickle=False) as columns:
        ends = columns["length_B"].cumsum()[:-1]
        parts = [np.split(columns[name], ends) for name in ("token_ids_T", "log_probs_T", "weight_versions_T")]
        rows = zip(*(columns[name].tolist() for name in ("group_B", "sample_B", "reason_B")), *parts, strict=False)
        found: ByGroup = {}
        for group, sample, reason, token_ids, log_probs, versions in rows:
            sampled = Sampled(token_ids=token_ids, log_probs=log_probs, weight_versions=versions)
            found.setdefault(group, {})[sample] = Kept(sampled=sampled, finish_reason=_REASONS[reason])
    return found
