"""Trainer of a supervised run: a step draws rows and makes one update. The loop around it is every trainer's."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from verl_like.batch import Experience
from verl_like.flat_columns import row_sums
from verl_like.plugins.sft.dataset import Batches, batches_of
from verl_like.trainer.loop import Loop, prefixed
from verl_like.trainer.roles import UpdateRules


@dataclass(kw_only=True)
class SFTTrainer(Loop):
    """Trainer on answers that the data hold. A variant has other rows (`source`), or another loss in the workers."""

    source: Batches
    val: Any  # SFTDataset, or None

    def start(self) -> None:
        """Load the checkpoint, if there is one; validate before training, where that is asked for."""
        self.checkpoints.restore(self)
        self.first_step = self.state.step
        self.on_start()
        self.validate_before_training()

    def step(self) -> dict[str, float]:
        """Draw rows -> update -> save -> validate. Returns the step's metrics."""
        with self.checkpoints.saved_on_error(self):
            step, clock = self.begin_step()
            with self.profiled(step), clock("step"):
                with clock("data"):
                    rows = self.source.next_batch()
                rows, metrics = self.with_targets(rows)
                self.checkpoints.update_begins()
                with clock("update_actor"):
                    metrics |= self.update(rows, step)
                self.state = self.state.advance(metrics, num_sequences=len(rows), actor_updated=True)
                self.checkpoints.step_ended(self)
                self.unreported = partial(self.report.trained, step, rows, metrics, clock)
                self.save_if_due()
                metrics |= self.validate_if_due()
            return self.end_step()

    def with_targets(self, rows: Experience) -> tuple[Experience, dict[str, float]]:
        """Add what the loss needs of the models to the rows, with metrics of it: nothing here."""
        return rows, {}

    def update(self, rows: Experience, step: int) -> dict[str, float]:
        """Take the step's optimizer step, over all its rows."""
        actor = self.config.actor_rollout_ref.actor
        rules = UpdateRules(
            prompts_per_mini_batch=actor.ppo_mini_batch_size,
            epochs=actor.ppo_epochs,
            shuffle=actor.shuffle,
            seed=self.config.trainer.seed,
            max_response_length=self.config.sft.max_length,
        )
        metrics = prefixed("actor", self.actor.update(rows, rules, step))
        trained = float(rows.response_mask_T.sum())
        return metrics | {"train/tokens": float(rows.num_tokens_B().sum()), "train/trained_tokens": trained}

    def validate(self) -> dict[str, float]:
        """Compute the mean -log p of all trained tokens (val/loss), and of each set (val-core/<set>/loss/mean@1)."""
        if self.val is None:
            return {}
        sums: dict[str, torch.Tensor] = {}
        with self.clock("testing"):
            for rows, names in batches_of(self.val, self.config.data.val_batch_size):
                log_probs_T = self.actor.evaluate("log_probs", rows).old_log_probs_T
                assert log_probs_T is not None
                columns = (-log_probs_T.double() * rows.response_mask_T, rows.response_mask_T.double())
                totals_B2 = torch.stack([row_sums(column_T, rows.response_length_B) for column_T in columns], 1)
                for number, total_2 in zip(rows.group_B.tolist(), totals_B2, strict=True):
                    name = names[number]
                    sums[name] = sums.get(name, torch.zeros(2)) + total_2
        means = {f"val-core/{name}/loss/mean@1": total for name, total in sums.items()}
        means["val/loss"] = torch.stack([*sums.values()]).sum(0)
        return {name: float(loss / count) for name, (loss, count) in means.items()}
