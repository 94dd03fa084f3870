"""Best checkpoint by a validation metric, and the early stop where no better one comes."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verl_like.checkpoint.files import write_atomically
from verl_like.checkpoint.layout import step_dir
from verl_like.config import TrainerConfig
from verl_like.config.errors import RunStopped
from verl_like.small_files import read_object

logger = logging.getLogger(__name__)

# {"metric", "step", "value", "validations": [[step, value], ...]}; step, value: of the best that is a checkpoint
BEST_FILE = "best_checkpoint.json"


class Best:
    """Record of trainer.best_metric at each validation, kept beside the checkpoints so that a resume knows it.

    resumed_at: the step that a run is taken up at; later ones are done again, and count then.
    """

    def __init__(self, settings: TrainerConfig, root: Path, *, resumed_at: int | None) -> None:
        self.settings, self._root = settings, root
        self._seen: dict[int, float] = {}  # in the order of the steps
        file = root / BEST_FILE
        if settings.best_metric is not None and resumed_at is not None and file.exists():
            kept = read_object(file, {"metric": str})
            if kept["metric"] == settings.best_metric:
                known: Any = kept.get("validations") or [[kept.get("step"), kept.get("value")]]
                try:
                    self._seen = {int(step): float(value) for step, value in known if step <= resumed_at}
                except (TypeError, ValueError, OverflowError) as error:
                    raise ValueError(f"{file} is damaged: validations={known!r:.60}") from error
        there = [step for step in self._bests() if step and step_dir(root, step).is_dir()]
        self._kept = there[-1] if there else None  # the newest best that is a whole checkpoint

    @property
    def step(self) -> int:
        """Step of the best validation; 0 before the first."""
        return [0, *self._bests()][-1]

    @property
    def value(self) -> float:
        """Value of the best validation; NaN before the first."""
        return self._seen.get(self.step, math.nan)

    def judge(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Record a validation; return True where it is the best so far.

        A step that was judged already counts no second time.

        Raises RunStopped where there is no such metric among its.
        """
        name = self.settings.best_metric
        if name is None or not any(key.startswith("val-") for key in metrics):
            return False
        if name not in metrics:
            known = ", ".join(sorted(key for key in metrics if key.startswith(("val-core/", "val/"))))
            raise RunStopped(f"trainer.best_metric={name}: this validation gave no such number, but {known or 'none'}")
        if step in self._seen:
            return False
        self._seen[step] = metrics[name]
        better = self._bests()[-1] == step
        if better:
            logger.info("best so far: %s = %.5g at step %d", name, self.value, step)
        return better

    def committed(self, step: int) -> None:
        """Note that the step is a whole checkpoint now: if it was the best, the one before may be deleted."""
        if step in self._bests():
            self._kept = step
        self.keep()

    def keep(self) -> None:
        """Write what is known, for a resume and for people."""
        if self._seen:
            kept = {"metric": self.settings.best_metric, "step": self._kept, "value": self._seen.get(self._kept or -1)}
            kept["validations"] = list(self._seen.items())
            write_atomically(self._root / BEST_FILE, json.dumps(kept))

    @property
    def folder(self) -> Path | None:
        """Folder of the best checkpoint, which is not deleted with the old ones."""
        return step_dir(self._root, self._kept) if self._kept else None

    def stays_away(self) -> bool:
        """True after trainer.early_stop_patience validations in a row without a better one."""
        patience = self.settings.early_stop_patience
        return patience is not None and sum(step > self.step for step in self._seen) >= patience

    def _bests(self) -> list[int]:
        """Steps that were the best of those up to them."""
        sign, found, most = -1.0 if self.settings.best_mode == "min" else 1.0, list[int](), math.nan
        for step, value in self._seen.items():
            if math.isnan(most) or sign * value > sign * most:
                most = value
                found.append(step)
        return found
