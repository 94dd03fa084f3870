"""Validation: answer every validation prompt with rollout.val_kwargs, score, and report per data source."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from verl_like.batch import Prompt, Rollouts, Scores
from verl_like.episodes.answering import Answering
from verl_like.episodes.collector import Collector
from verl_like.observe.validation import validation_metrics


@dataclass(slots=True)
class Validator:
    """Validator of the whole validation set; without one it returns no metrics."""

    batches: Callable[[], Iterable[list[Prompt]]]
    how: Answering
    on_samples: Callable[[int, list[tuple[Rollouts, Scores]]], None]

    def run(self, collector: Collector, step: int) -> dict[str, float]:
        """Compute val-core/* and val-aux/* of the weights that the rollout engine holds.

        A small batch may lose all its rewards (the last one may be a single prompt); raises RewardError if all batches
        do.
        """
        batches = [collector.answer(prompts, self.how, step=step) for prompts in self.batches()]
        answered = [(rollouts, pending.result()) for rollouts, pending in batches]
        collector.rewards.require_any([scores for _, scores in answered], step=step)
        self.on_samples(step, answered)
        return validation_metrics(answered)
