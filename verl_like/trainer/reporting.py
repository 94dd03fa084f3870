"""Reporting of a run: one place that feeds trackers, the live display, the sample files and the report."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from verl_like.batch import Evaluated, Experience, PromptRow, Rollouts, Scores
from verl_like.config import TrainerConfig
from verl_like.config.batch_plan import BatchPlan
from verl_like.config.errors import RunStopped
from verl_like.config.roles import ACTOR
from verl_like.observe.health_watch import HealthWatch
from verl_like.observe.live_display import ProgressDisplay
from verl_like.observe.metrics import (
    domain_metrics,
    perf_metrics,
    rollout_metrics,
    sequence_balance_metrics,
    training_metrics,
)
from verl_like.observe.samples import (
    Decoder,
    Sample,
    SampleStore,
    TokenTexts,
    add_tokens,
    choose_rows,
    dump_samples,
    make_samples,
    pick_rows,
    pick_samples,
    samples_text,
)
from verl_like.observe.timing import StepClock, timing_per_token_metrics
from verl_like.observe.trackers import Trackers
from verl_like.observe.validation import report_names
from verl_like.trainer.costs import SpeedReport
from verl_like.trainer.dispatch import RowBalance

logger = logging.getLogger(__name__)

_ROWS_OF_A_GROUP = 8  # at most so many responses to one prompt are kept
_EVERY_STEP_UNTIL = 5  # the first steps are kept all: that is when most goes wrong
_VALIDATION_PROMPTS = 32  # the same ones at each validation
_ROWS_OF_A_VALIDATION_PROMPT = 2


class RunReport(Protocol):
    """Document about the run, kept up to date while it goes on (kit/report)."""

    def step_finished(self, step: int) -> None:
        """Begin a new document where it is due."""

    def finish(self) -> None:
        """Write the last document and wait for it."""


class Reporter:
    """Reporter of finished steps: metrics under verl's names, handed to everybody who listens."""

    def __init__(
        self,
        trainer: TrainerConfig,
        trackers: Trackers,
        progress: ProgressDisplay,
        tokenizer: Decoder,
        *,
        max_prompt_length: int,
        steps_per_epoch: int,
        plan: BatchPlan,
        spread: RowBalance,
        speed: SpeedReport,
        store: SampleStore,
        report: RunReport,
        health: HealthWatch,
        first_step: int,
    ) -> None:
        """spread: of the actor's rows. first_step: the first step that this process makes."""
        self.health = health
        self.store, self.report, self.first_step, self.newest_version = store, report, first_step, 0
        self.token_texts = TokenTexts(tokenizer)
        self.trainer, self.trackers, self.progress = trainer, trackers, progress
        self.spread, self.speed = spread, speed
        self.tokenizer, self.plan, self.steps_per_epoch = tokenizer, plan, steps_per_epoch
        self.max_prompt_length = max_prompt_length

    def clock(self) -> StepClock:
        """Start a fresh clock for one step, watched by the live display."""
        return StepClock(self.progress)

    def step(
        self, step: int, rollouts: Rollouts, scores: Scores, metrics: Mapping[str, float], clock: StepClock
    ) -> dict[str, float]:
        """Log one finished step, and write its samples where trainer.rollout_data_dir asks for it.

        Returns all metrics of the step.
        """
        own = {
            **metrics,
            **domain_metrics(rollouts, scores),
            **self._staleness(rollouts),
            **rollout_metrics(rollouts, self.max_prompt_length),
        }
        everything = self.trained(step, rollouts, own, clock)
        if self.trainer.rollout_data_dir:
            samples = make_samples(rollouts, scores, self.tokenizer, step)
            with writing("trainer.rollout_data_dir", self.trainer.rollout_data_dir):
                dump_samples(self.trainer.rollout_data_dir, step, samples)
        return everything

    def trained(
        self, step: int, rows: Rollouts | Experience, metrics: Mapping[str, float], clock: StepClock
    ) -> dict[str, float]:
        """Log one finished step with what holds of any rows that were trained: sizes, balance, seconds, speed.

        Returns all metrics of the step.
        """
        num_tokens = rows.num_tokens_B()
        total, shares = int(num_tokens.sum()), self.spread.shares(rows, self.plan.roles[ACTOR].data_parallel_size)
        everything = {
            **training_metrics(step, (step - 1) // self.steps_per_epoch),
            **metrics,
            **sequence_balance_metrics(num_tokens.tolist(), shares),
            **clock.metrics(),
            **timing_per_token_metrics(
                clock.seconds, response_tokens=int(rows.response_length_B.sum()), total_tokens=total
            ),
            **perf_metrics(total, clock.seconds["step"], self.plan.world_size),
            **self.speed.metrics(rows, clock.seconds, metrics),
        }
        settling = {
            f"{role}/grad_norm" for role in ("actor", "critic") if everything.get(f"{role}/loss_scale_overflows")
        }
        judged = {
            name: value
            for name, value in everything.items()
            if name.startswith(("actor/", "critic/")) and name not in settling  # expected, with float16
        }
        everything["training/not_finite"] = float(sum(not math.isfinite(value) for value in judged.values()))
        self._log(step, everything)
        self.health.look(step, everything)
        self.progress.step_finished(step, everything)
        self.speed.log(clock.seconds, everything)
        self.report.step_finished(step)
        return everything

    def rows_to_keep(self, step: int, rollouts: Rollouts, scores: Scores) -> dict[int, str]:
        """Choose rows of this step for people, with why they were chosen; {} where it keeps none."""
        every, shown = self.trainer.sample_freq, self.trainer.console_samples > 0 and step == self.first_step
        if not shown and not (every > 0 and (step % every == 0 or step <= _EVERY_STEP_UNTIL)):
            return {}
        seed = self.trainer.seed + step
        return choose_rows(rollouts, scores, self.trainer.sample_groups, _ROWS_OF_A_GROUP, seed)

    def keep(
        self,
        step: int,
        rollouts: Rollouts,
        scores: Scores,
        evaluated: Evaluated,
        experience: Experience,
        chosen: Sequence[str],
    ) -> None:
        """Write these rows to <log_dir>/samples; a few are shown at the first step. experience: of the whole step."""
        samples = make_samples(rollouts, scores, self.tokenizer, step, experience)
        add_tokens(samples, rollouts, self.token_texts, trainer=evaluated, experience=experience)
        samples = [{**sample, "chosen": why} for sample, why in zip(samples, chosen, strict=True)]
        if step == self.first_step:
            self._show(f"step {step}, some of the answers:", samples)
        if self.trainer.sample_freq > 0:
            self._store("train", step, samples)

    def _staleness(self, rollouts: Rollouts) -> dict[str, float]:
        """Staleness: versions between the oldest sampled token and the newest weights that any token was sampled by."""
        versions_T = rollouts.weight_version_T[rollouts.response_mask_T]
        if not len(versions_T):
            return {}
        self.newest_version = max(self.newest_version, int(versions_T.max()))
        return {"training/weight_staleness": float(self.newest_version - int(versions_T.min()))}

    def validation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log metrics of a validation outside a step (before training, or trainer.val_only)."""
        self._log(step, metrics)
        self.progress.step_finished(step, metrics)

    def validation_samples(self, step: int, batches: Sequence[tuple[Rollouts, Scores]]) -> None:
        """Keep and show a few validation answers; all of them where trainer.validation_data_dir asks for that."""
        few = self._few_of_each_prompt(step, batches)
        if self.trainer.sample_freq > 0:
            self._store("validation", step, few)
        wanted = self.trainer.log_val_generations
        if wanted <= 0:
            self._show(f"validation at step {step}, some of the answers:", few)
        if not (self.trainer.validation_data_dir or wanted > 0):
            return
        samples = [
            sample for rollouts, scores in batches for sample in make_samples(rollouts, scores, self.tokenizer, step)
        ]
        if self.trainer.validation_data_dir:
            folder = Path(self.trainer.validation_data_dir)
            rows = [row for rollouts, _ in batches for row in rollouts.rows]
            with writing("trainer.validation_data_dir", folder):
                dump_samples(folder, step, samples)
                for name, chosen in by_validation_set(samples, rows).items():
                    dump_samples(folder / name, step, chosen)
        if wanted > 0:
            self.trackers.log_samples(step, pick_samples(samples, wanted))

    def _few_of_each_prompt(self, step: int, batches: Sequence[tuple[Rollouts, Scores]]) -> list[Sample]:
        """Choose answers to the validation prompts that are kept, the same ones each time."""
        rows = pick_rows([rollouts.rows for rollouts, _ in batches], _VALIDATION_PROMPTS, _ROWS_OF_A_VALIDATION_PROMPT)
        samples: list[Sample] = []
        for (rollouts, scores), chosen in zip(batches, rows, strict=True):
            if chosen:
                kept = rollouts.select(chosen)
                part = make_samples(kept, scores.select(chosen), self.tokenizer, step)
                add_tokens(part, kept, self.token_texts)
                samples += part
        return samples

    def _show(self, title: str, samples: Sequence[Sample]) -> None:
        count = self.trainer.console_samples
        if count > 0 and samples and "console" in self.trainer.logger:
            apart = max(1, len(samples) // count)  # over the whole choice, so that they are not all of one prompt
            logger.info("%s", samples_text(title, samples[::apart][:count]))

    def _store(self, part: str, step: int, samples: Sequence[Sample]) -> None:
        key = "trainer.default_local_dir" if self.trainer.log_dir is None else "trainer.log_dir"
        with writing(key, self.store.folder.parent):
            self.store.write(part, step, samples)

    def _log(self, step: int, metrics: Mapping[str, float]) -> None:
        key = "trainer.default_local_dir" if self.trainer.log_dir is None else "trainer.log_dir"
        with writing(key, self.trainer.log_dir or self.trainer.default_local_dir):
            self.trackers.log(step, metrics)

    def close(self) -> None:
        """Close the display and the trackers, and write the report; everything logged so far is kept."""
        self.progress.close()
        self.trackers.finish()
        self.report.finish()


@contextmanager
def writing(key: str, folder: str | Path) -> Iterator[None]:
    """Turn an error of the run's own files inside into RunStopped, with a message that names their key."""
    try:
        yield
    except OSError as error:
        gone = "" if Path(folder).expanduser().is_dir() else "; the folder was removed while the run was writing to it"
        raise RunStopped(f"{key}={str(folder)!r}: {error}{gone}") from error


def by_validation_set(samples: Sequence[Sample], rows: Sequence[PromptRow]) -> dict[str, list[Sample]]:
    """Group samples by validation set or data source: folder name -> samples.

    Empty if there is one unnamed source only.
    """
    names = report_names(rows)
    if len(names) < 2 and not any(name for name, _ in names):
        return {}
    parts: dict[str, list[Sample]] = {}
    for sample, row in zip(samples, rows, strict=True):
        name = names[row.validation_set, row.data_source].replace("/", "_")
        parts.setdefault(name, []).append(sample)
    return parts
