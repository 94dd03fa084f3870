"""Teacher whose log-probs are in a parquet file: of responses that are known before, as recorded steps have them.

Columns: prompt_ids and response_ids (lists of ids), log_probs (a number for each response token, or a list of K), and
with lists ids (the K ids of each token).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch

from verl_like.batch import Evaluated, Rollouts


class FileTeacher:
    """Log-probs by prompt and response. k: likeliest tokens that are wanted; 0: a number for each token."""

    def __init__(self, key: str, path: str, k: int) -> None:
        """Read the file. Raises ValueError, with `key`, for one that is not there, or has not what is wanted."""
        self._key, self._k, file = f"{key}={path}", k, Path(path).expanduser()
        wanted = ["prompt_ids", "response_ids", "log_probs", *(["ids"] if k else [])]
        try:
            if missing := set(wanted) - set(names := pq.read_schema(file).names):
                raise ValueError(f"there is no {', '.join(sorted(missing))}, but {', '.join(names)}")
            table = pq.read_table(file, columns=wanted)
        except (OSError, ValueError) as error:
            raise ValueError(
                f"{self._key}: cannot be read ({error}); it needs the columns {', '.join(wanted)}"
            ) from error
        self._rows: dict[Any, dict[str, Any]] = {}
        for row in table.to_pylist():
            name = tuple(row["prompt_ids"]), tuple(row["response_ids"])
            widths = {len(each) for each in row["log_probs"]} if k else {k}
            if len(row["log_probs"]) != len(name[1]) or min(widths, default=k) < k:
                what = f"{k} log-probs and ids" if k else "a log-prob"
                raise ValueError(f"{self._key}: row {len(self._rows)} has not {what} for each response token")
            self._rows[name] = row

    def log_probs(self, rollouts: Rollouts) -> Evaluated:
        """Look the rows up. Raises ValueError for one that the file has not."""
        lengths = rollouts.response_length_B
        responses = rollouts.response_ids_T.split(lengths.tolist())
        names = [(tuple(p), tuple(r.tolist())) for p, r in zip(rollouts.prompt_lists(), responses, strict=True)]
        missing = [row for row, name in enumerate(names) if name not in self._rows]
        if missing:
            raise ValueError(
                f"{self._key}: {len(missing)} of {len(names)} responses are not in it (the first: row {missing[0]}); "
                "a file knows given responses alone: actor_rollout_ref.rollout.name=recorded trains those of a run"
            )
        found = [self._rows[name] for name in names]
        if not self._k:
            return Evaluated(response_length_B=lengths, teacher_log_probs_T=_joined(found, "log_probs"))
        values_TK, ids_TK = (_joined(found, name, self._k) for name in ("log_probs", "ids"))
        return Evaluated(response_length_B=lengths, teacher_log_probs_T=values_TK, teacher_ids_T=ids_TK.int())


def _joined(rows: list[dict[str, Any]], name: str, k: int = 0) -> torch.Tensor:
    values = [value[:k] if k else value for row in rows for value in row[name]]
    return torch.tensor(values, dtype=torch.float64 if name == "ids" else torch.float32)
