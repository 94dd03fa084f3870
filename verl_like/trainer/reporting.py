"""What a run tells the world: one place that feeds trackers, the live display and the sample files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from verl_like.batch import PromptRow, Rollouts, Scores
from verl_like.config import TrainerConfig
from verl_like.config.errors import RunStopped
from verl_like.observe.domains import domain_metrics
from verl_like.observe.metrics import (
    perf_metrics,
    rollout_metrics,
    sequence_balance_metrics,
    training_metrics,
)
from verl_like.observe.progress import Progress
from verl_like.observe.samples import Decoder, Sample, dump_samples, make_samples, pick_samples
from verl_like.observe.timing import StepClock, timing_per_token_metrics
from verl_like.observe.trackers import Trackers
from verl_like.observe.validation import report_names
from verl_like.trainer.dispatch import RowBalance
from verl_like.trainer.speed import SpeedReport


class Reporter:
    """Turns a finished step into metrics under verl's names and hands them to everybody who listens."""

    def __init__(
        self,
        trainer: TrainerConfig,
        trackers: Trackers,
        progress: Progress,
        tokenizer: Decoder,
        *,
        max_prompt_length: int,
        max_response_length: int,
        steps_per_epoch: int,
        num_devices: int,
        speed: SpeedReport,
    ) -> None:
        self.trainer, self.trackers, self.progress, self.speed = trainer, trackers, progress, speed
        self.tokenizer, self.num_devices, self.steps_per_epoch = tokenizer, num_devices, steps_per_epoch
        self.max_prompt_length, self.max_response_length = max_prompt_length, max_response_length

    def clock(self) -> StepClock:
        """A fresh clock for one step, watched by the live display."""
        return StepClock(self.progress)

    def step(
        self, step: int, rollouts: Rollouts, scores: Scores, metrics: Mapping[str, float], clock: StepClock
    ) -> None:
        """Log one finished step, and write its samples where trainer.rollout_data_dir asks for them."""
        num_tokens = rollouts.num_tokens_B()
        shape = self.speed.shape
        spread = RowBalance(even=self.trainer.balance_batch, cost=shape.actor, share_prompts=shape.actor_shares_prompts)
        shares = spread.shares(rollouts, self.num_devices)
        everything = {
            **training_metrics(step, (step - 1) // self.steps_per_epoch),
            **metrics,
            **domain_metrics(rollouts, scores),
            **rollout_metrics(rollouts, self.max_prompt_length, self.max_response_length),
            **sequence_balance_metrics(num_tokens.tolist(), shares),
            **clock.metrics(),
            **timing_per_token_metrics(
                clock.seconds,
                response_tokens=int(rollouts.response_length_B.sum()),
                total_tokens=int(num_tokens.sum()),
            ),
            **perf_metrics(int(num_tokens.sum()), clock.seconds["step"], self.num_devices),
            **self.speed.metrics(rollouts, clock.seconds, metrics),
        }
        self._log(step, everything)
        self.progress.step_finished(step, everything)
        self.speed.log(clock.seconds, everything)
        if self.trainer.rollout_data_dir:
            samples = make_samples(rollouts, scores, self.tokenizer, step)
            with writing("trainer.rollout_data_dir", self.trainer.rollout_data_dir):
                dump_samples(self.trainer.rollout_data_dir, step, samples)

    def validation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Metrics of a validation outside a step (before training, or trainer.val_only)."""
        self._log(step, metrics)
        self.progress.step_finished(step, metrics)

    def validation_samples(self, step: int, batches: Sequence[tuple[Rollouts, Scores]]) -> None:
        """Write and show validation answers (trainer.validation_data_dir, trainer.log_val_generations)."""
        wanted = self.trainer.log_val_generations
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

    def _log(self, step: int, metrics: Mapping[str, float]) -> None:
        key = "trainer.default_local_dir" if self.trainer.log_dir is None else "trainer.log_dir"
        with writing(key, self.trainer.log_dir or self.trainer.default_local_dir):
            self.trackers.log(step, metrics)

    def close(self) -> None:
        """Close the display and the trackers; everything logged so far is kept."""
        self.progress.close()
        self.trackers.finish()


@contextmanager
def writing(key: str, folder: str | Path) -> Iterator[None]:
    """What goes wrong with the run's own files inside ends the run with a message that names their key."""
    try:
        yield
    except OSError as error:
        gone = "" if Path(folder).expanduser().is_dir() else "; the folder was removed while the run was writing to it"
        raise RunStopped(f"{key}={str(folder)!r}: {error}{gone}") from error


def by_validation_set(samples: Sequence[Sample], rows: Sequence[PromptRow]) -> dict[str, list[Sample]]:
    """Folder name -> the samples of one validation set or data source; empty if there is one unnamed source only."""
    names = report_names(rows)
    if len(names) < 2 and not any(name for name, _ in names):
        return {}
    parts: dict[str, list[Sample]] = {}
    for sample, row in zip(samples, rows, strict=True):
        name = names[row.validation_set, row.data_source].replace("/", "_")
        parts.setdefault(name, []).append(sample)
    return parts
