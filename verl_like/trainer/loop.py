"""Loop around any kind of step: when a run begins, validates, saves, reports, stops and ends.

What a step does is a class derived from this one: `ppo.PPOTrainer`, and those of plugins whose data hold the answers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from verl_like.cluster.lifecycle import StopFlag
from verl_like.config import PPOConfig
from verl_like.config.batch_plan import BatchPlan
from verl_like.config.errors import RunStopped
from verl_like.observe.timing import StepClock
from verl_like.trainer.checkpoints import Checkpoints, Unhealthy
from verl_like.trainer.reporting import Reporter
from verl_like.trainer.roles import ActorHandle, CriticHandle
from verl_like.trainer.state import TrainState
from verl_like.trainer.workers import Pools

logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Loop:
    """Parts that every trainer has, and its habits between steps. `start`, `step` and `validate` are the trainer's."""

    config: PPOConfig
    plan: BatchPlan
    state: TrainState
    total_steps: int
    source: Any  # of batches, with the place in the data that a checkpoint holds (`checkpoints.Source`)
    pools: Pools
    actor: ActorHandle
    critic: CriticHandle | None = None
    checkpoints: Checkpoints
    report: Reporter
    stop: StopFlag
    on_start: Callable[[], None] = lambda: None  # the checkpoint is read, and the first weights are proved
    clock: StepClock = field(default_factory=StepClock)  # of the step that runs; replaced at each step
    first_step: int | None = field(default=None, init=False)  # that the checkpoint was of, once it is read; else 0
    unreported: Callable[[], dict[str, float]] | None = field(default=None, init=False)  # of a finished step

    def fit(self) -> None:
        """Run the whole training. A loop of one's own calls the same four methods."""
        self.start()
        while not self.done():
            self.step()
        self.finish()

    def start(self) -> None:
        """Load the checkpoint, if there is one, and do what comes before the first step."""
        raise NotImplementedError

    def step(self) -> dict[str, float]:
        """Make one step. Returns its metrics."""
        raise NotImplementedError

    def validate(self) -> dict[str, float]:
        """Compute metrics of the whole validation set; none without one."""
        raise NotImplementedError

    def done(self) -> bool:
        """True when all steps are made, only validation was asked for, or the user asked to stop."""
        ended = self.stop.requested or self.checkpoints.best.stays_away() or self.state.step >= self.total_steps
        return self.config.trainer.val_only or ended

    def begin_step(self) -> tuple[int, StepClock]:
        """Begin a step: return its number, counted from 1, and its clock."""
        self.clock = self.report.clock()
        return self.state.step + 1, self.clock

    def profiled(self, step: int) -> AbstractContextManager[None]:
        """Record the steps of trainer.profile_steps in the workers."""
        return self.pools.profiled(step) if step in (self.config.trainer.profile_steps or ()) else nullcontext()

    def save_if_due(self) -> None:
        """Write a checkpoint every trainer.save_freq steps, and after the last; complete once the step is reported."""
        if self.due(self.config.trainer.save_freq, self.config.trainer.save_each_epoch):
            with self.clock("save_checkpoint"):
                self.checkpoints.write(self)

    def end_step(self) -> dict[str, float]:
        """Report the step, complete its checkpoint, and stop where a rule says so. Returns the step's metrics."""
        reported = self.report_step()
        self.checkpoints.validated(self, reported)
        self.stop_when_unhealthy()
        self.checkpoints.complete(self, wait=False)
        self.stop_when_nothing_is_learnt()
        return reported

    def report_step(self) -> dict[str, float]:
        """Hand out the finished step's metrics, once: before its checkpoint is complete, or when the driver fails."""
        report, self.unreported = self.unreported, None
        return {} if report is None else report()

    def validate_before_training(self) -> None:
        """Validate before the first step (trainer.val_before_train); a run with trainer.val_only consists of this."""
        trainer = self.config.trainer
        if (trainer.val_before_train or trainer.val_only) and (metrics := self.validate()):  # none without a set
            self.report.validation(self.state.step, metrics)
            self.checkpoints.validated(self, metrics)

    def validate_if_due(self) -> dict[str, float]:
        """Validate every trainer.test_freq steps, and after the last one."""
        trainer = self.config.trainer
        return self.validate() if self.due(trainer.test_freq, trainer.test_each_epoch) else {}

    def due(self, every: int | None, each_epoch: bool = False) -> bool:
        """True on every `every`-th step (None means after the last step alone, -1 never), and at an epoch's last."""
        step, per_epoch = self.state.step, self.plan.steps_per_epoch
        if each_epoch and per_epoch is not None and step % per_epoch == 0:
            return True
        return every != -1 and (step == self.total_steps or (every is not None and step % every == 0))

    def finish(self) -> None:
        """Save what is not saved yet of a run that ends before its last step, interrupted or by a loop of one's own."""
        if self.stop.requested:
            logger.warning("stopping after step %d, as asked", self.state.step)
        if self.checkpoints.best.stays_away():
            best = self.checkpoints.best
            logger.warning(
                "%s was best at step %d (%.5g): trainer.early_stop_patience=%d ends the run",
                *(best.settings.best_metric, best.step, best.value, best.settings.early_stop_patience),
            )
        if self.stop.requested or self.state.step < self.total_steps:
            self.checkpoints.save_unless_saved(self)
        self.checkpoints.complete(self, wait=True)
        self.checkpoints.finish()

    def stop_when_unhealthy(self) -> None:
        """Raise Unhealthy where a rule with trainer.health.<rule>=stop speaks about this step."""
        verdict = self.report.health.stopping
        if verdict is None:
            return
        first = min(verdict.steps)
        before = self.checkpoints.newest_before(first)
        again = "no checkpoint is from before it"
        if before is not None:
            again = f"from before it: trainer.resume_mode=resume_path trainer.resume_from_path={before}"
        key = f"trainer.health.{verdict.rule.name.replace(' ', '_')}"
        raise Unhealthy(
            f"step {self.state.step}: {key}=stop: {self.report.health.text(verdict)}. To go on: {again}; or from step "
            f"{self.state.step}, the newest checkpoint, by the same command with {key}=warn"
        )

    def stop_when_nothing_is_learnt(self) -> None:
        """Raise RunStopped after trainer.max_skipped_updates optimizer steps in a row whose gradient was not finite."""
        limit = self.config.trainer.max_skipped_updates
        for role, group in (("actor", self.actor), ("critic", self.critic)):
            if group is not None and 0 < limit <= group.num_skipped_in_a_row:
                raise RunStopped(
                    f"step {self.state.step}: the last {group.num_skipped_in_a_row} updates of the {role} were skipped "
                    f"because their gradients were not finite (trainer.max_skipped_updates={limit}): nothing is learnt "
                    f"any more. Look at {role}/grad_norm, the rewards and the learning rate of the steps before; "
                    "trainer.max_skipped_updates=-1 goes on all the same"
                )


def prefixed(role: str, metrics: dict[str, float]) -> dict[str, float]:
    """Prefix the metrics of one role; a name that has a family of its own (training/..., perf/...) keeps it."""
    return {name if "/" in name else f"{role}/{name}": value for name, value in metrics.items()}
