"""The health rules while a run goes on: `trainer.health` says of each whether it warns, stops the run, or is silent."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from pathlib import Path

from verl_like.config.trainer import HEALTH_RULES
from verl_like.observe.health import EARLY, RULES, Verdict, derived, verdict_of
from verl_like.observe.run_folder import METRICS, SAMPLES, read_metrics

logger = logging.getLogger(__name__)

_NEWEST = 1000  # steps that rules look at, beside the first: a check of all of them takes milliseconds


class HealthWatch:
    """Watch over the health of a run: looks at each finished step.

    actions: by the names of config.trainer.HEALTH_RULES; a rule without one warns.
    resumed_at: step up to which the run's metrics.jsonl counts as well, so that "at the start" is the run's.
    """

    def __init__(self, actions: Mapping[str, str], folder: Path, resumed_at: int | None) -> None:
        named = zip(HEALTH_RULES, RULES, strict=True)
        self._rules = [(rule, action) for name, rule in named if (action := actions.get(name, "warn")) != "off"]
        self._folder, self._warned = folder, set[str]()
        self._history: dict[int, dict[str, float]] = {}
        self.stopping: Verdict | None = None  # of the newest step, by a rule that stops
        if resumed_at is not None and (folder / METRICS).exists():
            for step, metrics in read_metrics(folder / METRICS).items():
                self._add(step, {name: value for name, value in metrics.items() if value is not None})

    def look(self, step: int, metrics: Mapping[str, float]) -> None:
        """Warn of each rule that begins to speak; remember one that stops, where this very step shows its fault."""
        self._add(step, metrics)
        history = derived(self._history)
        for rule, action in self._rules:
            verdict = verdict_of(rule, history)
            if verdict.state != "fires":
                self._warned.discard(rule.name)
            elif action == "stop" and step in verdict.steps:
                self.stopping = self.stopping or verdict
            elif rule.name not in self._warned:
                self._warned.add(rule.name)
                logger.warning("health: %s", self.text(verdict))

    def text(self, verdict: Verdict) -> str:
        """The rule, what it saw, and where to look."""
        rule, steps = verdict.rule, ", ".join(map(str, verdict.steps[-5:]))
        return (
            f"{rule.name}: {verdict.sentence}: {verdict.metric}={verdict.value:.4g} (threshold {rule.threshold:g}), "
            f"at step(s) {steps}. Responses: {self._samples(verdict.steps)}. What helps: {rule.fix}"
        )

    def _samples(self, steps: tuple[int, ...]) -> str:
        """The kept responses that are nearest to the steps that show the fault."""
        files = sorted((self._folder / SAMPLES / "train").glob("*.jsonl"))
        return (
            str(min(files, key=lambda file: abs(int(file.stem) - steps[-1]))) if files else "none (trainer.sample_freq)"
        )

    def _add(self, step: int, metrics: Mapping[str, float]) -> None:
        """Finite numbers that rules read, of the first steps and of the newest."""
        read = {name for name in metrics if name in _READ or name.startswith("reward/failures/")}
        finite = {name: value for name, value in metrics.items() if name in read and math.isfinite(value)}
        self._history[step] = self._history.get(step, {}) | finite
        if len(self._history) > EARLY + _NEWEST:
            del self._history[sorted(self._history)[EARLY]]


_READ = {name for rule in RULES for name in rule.metrics} | {
    *("critic/score/max", "critic/score/min", "critic/score/mean"),
    *("response/duplicate_fraction", "response_length/mean"),
}
