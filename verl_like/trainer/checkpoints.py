"""When to save, what belongs to a checkpoint, and how a run takes it up again.

A checkpoint is `global_step_N/` with the actor, the critic and the loop's own state (step, KL coefficient, sampler).
The file `latest_checkpointed_iteration.txt` is written last: a crash while saving leaves the previous one valid.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedTokenizerBase

from verl_like.checkpoint.layout import (
    prepare_step_dir,
    read_trainer_state,
    resolve_resume,
    rotate,
    step_of,
    write_latest,
    write_trainer_state,
)
from verl_like.config import TrainerConfig

if TYPE_CHECKING:
    from verl_like.trainer.ppo import PPOTrainer

logger = logging.getLogger(__name__)


class Checkpoints:
    """Saves and restores a `PPOTrainer` under trainer.default_local_dir."""

    def __init__(self, trainer: TrainerConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        self.config, self.tokenizer = trainer, tokenizer
        self.root = Path(trainer.default_local_dir).expanduser()
        self._saved_step: int | None = None
        self._incomplete: tuple[Path, dict[str, Any]] | None = None  # written but not declared complete

    def restore(self, run: PPOTrainer) -> None:
        """Load the checkpoint that trainer.resume_mode names, if there is one."""
        path = resolve_resume(self.config)
        if path is None:
            return
        _require_weights(run, path)
        logger.info("resuming from %s", path)
        saved = read_trainer_state(path)
        run.policy.load(str(path / "actor"))
        if run.critic is not None:
            run.critic.load(str(path / "critic"))
        run.source.load_state_dict(saved["source"])
        run.state = run.state.load_state_dict(saved["state"])
        self._saved_step = run.state.step
        if run.state.step >= run.total_steps:
            logger.warning(
                "%s is at step %d of %d: nothing is left to train. Raise trainer.total_training_steps, "
                "or start afresh: trainer.resume_mode=disable, or another trainer.default_local_dir",
                *(path, run.state.step, run.total_steps),
            )

    def save_unless_saved(self, run: PPOTrainer) -> None:
        """For an interrupted run: nothing is lost, nothing is written twice."""
        if run.state.step > 0 and self._saved_step != run.state.step:
            self.save(run)

    def save(self, run: PPOTrainer) -> None:
        """Write one whole checkpoint, then mark it as the latest, then drop old ones."""
        self.complete(run, wait=True)
        path = prepare_step_dir(self.root, run.state.step)
        run.policy.save(str(path / "actor"))
        if run.critic is not None:
            run.critic.save(str(path / "critic"))
        if (path / "actor" / "huggingface").is_dir():
            self.tokenizer.save_pretrained(path / "actor" / "huggingface")
        self._saved_step = run.state.step
        self._incomplete = (path, {"state": run.state.state_dict(), "source": run.source.state_dict()})
        if not self._in_background(run):
            self.complete(run, wait=True)

    def complete(self, run: PPOTrainer, *, wait: bool) -> None:
        """Declare the checkpoint under way complete once all its files are written (checkpoint.async_save); `wait` for
        them. Until then the one before stays the newest."""
        if self._incomplete is None or not run.policy.saved(wait=wait):
            return
        (path, state), self._incomplete = self._incomplete, None
        write_trainer_state(path, state)
        write_latest(self.root, step_of(path))
        rotate(self.root, self.config.max_actor_ckpt_to_keep, self.config.max_critic_ckpt_to_keep)
        logger.info("saved checkpoint %s", path)

    @staticmethod
    def _in_background(run: PPOTrainer) -> bool:
        actor, critic = run.config.actor_rollout_ref.actor.checkpoint, run.config.critic.checkpoint
        return actor.async_save or (run.critic is not None and critic.async_save)


def _require_weights(run: PPOTrainer, path: Path) -> None:
    """ValueError when load_contents would leave the weights out: the step count would go on with untrained ones."""
    sections = [("actor_rollout_ref.actor", run.config.actor_rollout_ref.actor.checkpoint)]
    if run.critic is not None:
        sections.append(("critic", run.config.critic.checkpoint))
    for section, checkpoint in sections:
        if "model" not in checkpoint.load_contents:
            raise ValueError(
                f"{section}.checkpoint.load_contents={checkpoint.load_contents} leaves out the weights of {path}: add "
                "model to save_contents and load_contents, or set trainer.resume_mode=disable"
            )
