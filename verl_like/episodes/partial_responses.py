"""Partial responses in a checkpoint: the tokens sampled so far of groups in flight, by the number of their draw.

Episodes of one turn go on from them after a resume; all others begin anew, with the same seeds. A group that a
checkpoint has no tokens of begins anew too, so this file may be missing.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from verl_like.episodes.answering import Collection
from verl_like.rollout.rollout_engine import NOTHING, FinishReason, Partial, Sampled

FILE = "under_way.npz"
_REASONS: tuple[FinishReason | None, ...] = (None, "stop", "length")


ByGroup = dict[int, dict[int, Partial]]  # group -> sample -> tokens


def of(collection: Collection, running: Mapping[str, Sampled]) -> dict[int, Partial]:
    """Collect the tokens of one group's first attempts, by sample. running: the client's snapshot."""
    found = dict(collection.partials)
    for trail in collection.trails:
        if trail.attempt == 0 and trail.requests:
            name, future = trail.requests[0]
            done = future.result() if future.done() and future.exception() is None else None
            if done is not None and done.finish_reason != "abort":
                found[trail.sample] = Partial.from_sampled(done.sampled, done.finish_reason)
            elif len(sampled := running.get(name, NOTHING)):
                found[trail.sample] = Partial.from_sampled(sampled)
    return found


def write(folder: Path, partials: ByGroup) -> None:
    """Write these responses into a folder that becomes a checkpoint."""
    rows = [(group, sample) for group, samples in partials.items() for sample in samples]
    each = [partial for samples in partials.values() for partial in samples.values()]
    with (folder / FILE).open("wb") as file:
        np.savez(
            file,
            group_B=np.asarray([group for group, _ in rows], dtype=np.int64),
            sample_B=np.asarray([sample for _, sample in rows], dtype=np.int32),
            reason_B=np.asarray([_REASONS.index(one.finish) for one in each], dtype=np.int8),
            length_B=np.asarray([len(one) for one in each], dtype=np.int64),
            token_ids_T=np.concatenate([np.empty(0, np.int32), *(one.token_ids for one in each)]),
            log_probs_T=np.concatenate([np.empty(0, np.float32), *(one.log_probs for one in each)]),
            weight_versions_T=np.concatenate([np.empty(0, np.int32), *(one.weight_versions for one in each)]),
            routed_B=np.asarray([0 if one.routes is None else len(one.routes) for one in each], dtype=np.int64),
            routes_T=np.concatenate([one.routes for one in each if one.routes is not None] or [np.empty(0, np.uint8)]),
        )


def read(folder: Path) -> ByGroup:
    """Read what `write` wrote; nothing where it wrote nothing."""
    if not (folder / FILE).exists():
        return {}
    with np.load(folder / FILE, allow_pickle=False) as columns:
        ends = columns["length_B"].cumsum()[:-1]
        parts = [np.split(columns[name], ends) for name in ("token_ids_T", "log_probs_T", "weight_versions_T")]
        routed_B = columns["routed_B"] if "routed_B" in columns else 0 * columns["length_B"]  # none: an older file
        routes_T = columns["routes_T"] if routed_B.any() else np.empty(0, np.uint8)
        parts.append(np.split(routes_T, routed_B.cumsum()[:-1]))
        rows = zip(*(columns[name].tolist() for name in ("group_B", "sample_B", "reason_B")), *parts, strict=False)
        found: ByGroup = {}
        for group, sample, reason, token_ids, log_probs, versions, routes in rows:
            arrays = {"token_ids": token_ids, "log_probs": log_probs, "weight_versions": versions}
            arrays["routes"] = routes if len(routes) else None
            found.setdefault(group, {})[sample] = Partial(**arrays, finish=_REASONS[reason])
    return found
