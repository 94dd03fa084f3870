"""Responses of earlier epochs, by data row and turn, within a bound of memory: the driver sends them with a request."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from verl_like.config.rollout import SpeculativeConfig
from verl_like.rollout.rollout_engine import Completion

FILE = "draft_history.npz"
_EACH = 8  # responses that are kept of a row's turn, the last ones
_Key = tuple[int, int]


class History:
    """Keeps responses as `rollout.speculative` asks, and counts what became of drafts.

    Keys are (number of the data row, turn of the episode). The row that was sampled least recently goes first.
    """

    def __init__(self, config: SpeculativeConfig) -> None:
        self._keeps, self._most_bytes = config.method == "history", config.history_megabytes * 10**6
        self._kept: dict[_Key, list[NDArray[np.int32]]] = {}  # the last sampled last
        self._num_bytes = 0
        self._counts: dict[str, int] = dict.fromkeys(("tokens", "drafted", "kept"), 0)

    def of(self, index: int, turn: int) -> Sequence[NDArray[np.int32]]:
        """Earlier responses to this turn of a data row, the last one last."""
        return tuple(self._kept.get((index, turn), ()))

    def note(self, index: int, turn: int, completion: Completion) -> None:
        """Remember one more response."""
        for name, more in (
            ("tokens", len(completion.sampled)),
            ("drafted", completion.drafted),
            ("kept", completion.kept),
        ):
            self._counts[name] += more
        if self._keeps and len(completion.sampled):
            self._add((index, turn), completion.sampled.token_ids)

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the responses since the last call; empty where there were none."""
        counts, self._counts = self._counts, dict.fromkeys(self._counts, 0)
        if not counts["tokens"]:
            return {}
        return {
            "drafts/proposed": float(counts["drafted"]),
            "drafts/kept_share": counts["kept"] / max(counts["drafted"], 1),
            "drafts/tokens_a_pass": counts["tokens"] / (counts["tokens"] - counts["kept"]),
            "drafts/history_mb": self._num_bytes / 10**6,
        }

    def write(self, folder: Path) -> None:
        """Write all responses into a folder that becomes a checkpoint."""
        if not self._keeps:
            return
        rows = [(*key, response) for key, responses in self._kept.items() for response in responses]
        with (folder / FILE).open("wb") as file:
            np.savez(
                file,
                index_B=np.asarray([index for index, _, _ in rows], dtype=np.int64),
                turn_B=np.asarray([turn for _, turn, _ in rows], dtype=np.int64),
                length_B=np.asarray([len(response) for _, _, response in rows], dtype=np.int64),
                token_ids_T=np.concatenate([np.empty(0, np.int32), *(response for _, _, response in rows)]),
            )

    def read(self, folder: Path) -> None:
        """Read what `write` wrote; nothing where it wrote nothing."""
        if not self._keeps or not (folder / FILE).exists():
            return
        with np.load(folder / FILE, allow_pickle=False) as columns:
            responses = np.split(columns["token_ids_T"], columns["length_B"].cumsum()[:-1])
            for index, turn, response in zip(
                columns["index_B"].tolist(), columns["turn_B"].tolist(), responses, strict=False
            ):
                self._add((index, turn), response)

    def _add(self, key: _Key, token_ids: NDArray[np.int32]) -> None:
        responses = self._kept.pop(key, [])
        self._kept[key] = responses
        responses.append(token_ids)
        self._num_bytes += token_ids.nbytes
        if len(responses) > _EACH:
            self._num_bytes -= responses.pop(0).nbytes
        while self._num_bytes > self._most_bytes:
            self._num_bytes -= sum(gone.nbytes for gone in self._kept.pop(next(iter(self._kept))))
