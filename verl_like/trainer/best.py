"""The best checkpoint by a validation metric, and an early end where it stays away."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from pathlib import Path

from verl_like.checkpoint.files import write_atomically
from verl_like.checkpoint.layout import step_dir
from verl_like.config import TrainerConfig
from verl_like.config.errors import RunStopped

logger = logging.getLogger(__name__)

BEST_FILE = "best_checkpoint.json"  # {"metric", "step", "value", "since"}: validations without a better value


class Best:
    """What trainer.best_metric was at its best, kept beside the checkpoints so that a resume knows it."""

    def __init__(self, settings: TrainerConfig, root: Path, *, resumed_at: int | None) -> None:
        self.settings, self._root = settings, root
        self.step, self.value, self._since = 0, math.nan, 0
        file = root / BEST_FILE
        if settings.best_metric is not None and resumed_at is not None and file.exists():
            kept = json.loads(file.read_text())
            if kept["metric"] == settings.best_metric and kept["step"] <= resumed_at:
                self.step, self.value, self._since = kept["step"], kept["value"], kept["since"]

    def judge(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Whether this validation is the best so far. RunStopped where there is no such metric among its."""
        name = self.settings.best_metric
        if name is None or not any(key.startswith("val-") for key in metrics):
            return False
        if name not in metrics:
            known = ", ".join(sorted(key for key in metrics if key.startswith("val-core/"))) or "none"
            raise RunStopped(f"trainer.best_metric={name}: this validation gave no such number; val-core has {known}")
        sign = -1.0 if self.settings.best_mode == "min" else 1.0
        better = math.isnan(self.value) or sign * metrics[name] > sign * self.value
        if better:
            self.step, self.value, self._since = step, metrics[name], 0
            logger.info("best so far: %s = %.5g at step %d", name, self.value, step)
        else:
            self._since += 1
        return better

    def keep(self) -> None:
        """Write what is known, for a resume and for people."""
        if self.settings.best_metric is not None and not math.isnan(self.value):
            kept = {"metric": self.settings.best_metric, "step": self.step, "value": self.value, "since": self._since}
            write_atomically(self._root / BEST_FILE, json.dumps(kept))

    @property
    def folder(self) -> Path | None:
        """The best checkpoint, which is not deleted with the old ones."""
        return step_dir(self._root, self.step) if self.step else None

    def stays_away(self) -> bool:
        """trainer.early_stop_patience validations in a row brought nothing better."""
        patience = self.settings.early_stop_patience
        return patience is not None and self._since >= patience
