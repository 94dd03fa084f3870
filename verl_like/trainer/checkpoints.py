"""Saving of a run's checkpoints, and the way it takes one up again.

A checkpoint is written in two parts: `write` puts the actor, the critic and their configuration into a folder that is
not a checkpoint yet; `complete` adds the loop's own state and the checksums and declares it the newest. Between the two
lie the weight sync and the step's report, so that a step that counts as saved is in the metrics too.
"""

from __future__ import annotations

import copy
import logging
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from transformers import PreTrainedTokenizerBase

from verl_like.checkpoint import layout
from verl_like.checkpoint.checksums import collect
from verl_like.cluster.worker_group import GroupStopped
from verl_like.config import PPOConfig, TrainerConfig
from verl_like.config.errors import ConfigError, RunStopped
from verl_like.models.loading import write_generation_config
from verl_like.models.vision import VisionProcessor
from verl_like.observe.run_folder import STEP_PROOF
from verl_like.remote_storage import RemoteFolder, Uploader, is_remote
from verl_like.trainer.best import Best
from verl_like.trainer.compose import save_resolved
from verl_like.trainer.folders import log_dir
from verl_like.trainer.resume import CONFIG_FILE, run_of
from verl_like.trainer.roles import ActorHandle, CriticHandle
from verl_like.trainer.state import TrainState

logger = logging.getLogger(__name__)


class Source(Protocol):
    """Place of a run in its data, as checkpoints hold it: `episodes.collector.Collector`, and those of plugins."""

    def trained(self) -> None:
        """Note that what was drawn last is trained."""

    def state_dict(self) -> dict[str, Any]:
        """Return plain values."""
        ...

    def load_state_dict(self, state: dict[str, Any], folder: Path) -> None:
        """Go on from a saved state. Raises ValueError where the data are others."""

    def save_under_way(self, folder: Path) -> None:
        """Write what is under way into the checkpoint's folder."""


class Run(Protocol):
    """Parts of a run that a checkpoint holds, and that it talks to: `loop.Loop`."""

    config: PPOConfig
    state: TrainState
    actor: ActorHandle
    critic: CriticHandle | None
    total_steps: int

    @property
    def source(self) -> Source:
        """Place in the data."""
        ...

    def report_step(self) -> dict[str, float]:
        """Hand out the finished step's metrics, once."""
        ...


class NotFinite(RunStopped):
    """Error of a model or optimizer with NaN or infinite numbers: it is not written."""


class Unhealthy(RunStopped):
    """Error of a health rule that stops the run: its newest step is saved, and no older one is dropped for that."""


class Checkpoints:
    """Checkpoints of a run under trainer.default_local_dir.

    end_ids: ids that end a response, for the exported model.
    resume: the checkpoint to start from (`resume.find_resume`).
    confirm: called before anything is written; raises when the folder is another run's meanwhile (checkpoint/lock.py).
    """

    def __init__(
        self,
        trainer: TrainerConfig,
        tokenizer: PreTrainedTokenizerBase,
        *,
        end_ids: Sequence[int] = (),
        vision: VisionProcessor | None = None,
        resume: Path | None = None,
        confirm: Callable[[], None] = lambda: None,
    ) -> None:
        self.config, self.tokenizer, self.resume, self.confirm = trainer, tokenizer, resume, confirm
        self.end_ids, self.vision = end_ids, vision
        self.root = Path(trainer.default_local_dir).expanduser()
        self.best = Best(trainer, self.root, resumed_at=self.resume_step)
        self._run = run_of(resume, trainer)
        self._uploader: Uploader | None = None
        if trainer.default_hdfs_dir is not None:
            remote = RemoteFolder(trainer.default_hdfs_dir, "trainer.default_hdfs_dir")
            goes_back = trainer.resume_mode == "resume_path"  # behind steps that it may make once more
            self._uploader = Uploader(remote, self._run, over_others=goes_back)
        self._saved_step: int | None = None
        self._keep_all = False
        self._incomplete: tuple[Path, dict[str, Any]] | None = None  # written but not declared complete
        self._boundary: dict[str, Any] | None = None  # the loop's state that belongs to the weights; None: in an update

    @property
    def resume_step(self) -> int | None:
        """Last finished step of the run that is taken up; None for a fresh start."""
        return None if self.resume is None else layout.step_of(self.resume)

    def newest_before(self, step: int) -> Path | None:
        """Find the newest whole checkpoint of an earlier step than this one."""
        whole = layout.whole_checkpoints(self.root)
        return next((path for path in reversed(whole) if layout.step_of(path) < step), None)

    def restore(self, run: Run) -> None:
        """Load the checkpoint to start from, if there is one. Raises ConfigError when the run's data do not fit it."""
        if self.resume is not None:
            saved = layout.read_trainer_state(self.resume)
            try:
                if saved["source"] is not None:  # of another trainer's checkpoint
                    run.source.load_state_dict(saved["source"], self.resume)
                run.state = run.state.load_state_dict(run.state.state_dict() | saved["state"])
            except ValueError as error:
                raise ConfigError([f"{self.resume}: {error}"]) from error
            except (AttributeError, KeyError, TypeError) as error:  # entries that are missing, or of another kind
                told = f"{self.resume / layout.STATE_FILE} is damaged ({type(error).__name__}: {error})"
                raise ConfigError([f"{told}: resume from another step with trainer.resume_from_path"]) from error
            run.actor.load(str(self.resume / layout.ACTOR))
            if run.critic is not None:
                run.critic.load(str(self.resume / layout.CRITIC))
            self._saved_step = run.state.step
            if self.config.del_local_ckpt_after_load:
                self._delete_loaded(self.resume)
            if run.state.step >= run.total_steps:
                logger.warning(
                    "%s is at step %d of %d: nothing is left to train. Raise trainer.total_training_steps, "
                    "or start afresh: trainer.resume_mode=disable, or another trainer.default_local_dir",
                    *(self.resume, run.state.step, run.total_steps),
                )
        self.step_ended(run)

    def _delete_loaded(self, path: Path) -> None:
        """Delete a loaded checkpoint (trainer.del_local_ckpt_after_load).

        It stays where trainer.default_hdfs_dir is set and does not hold it yet.
        """
        what, fetched = "trainer.del_local_ckpt_after_load", is_remote(self.config.resume_from_path)
        if self._uploader is None and not fetched:
            more = ": until the next save the run has no checkpoint (trainer.default_hdfs_dir is not set)"
        elif fetched or (self._uploader is not None and self._uploader.remote.holds(path.name, self._run)):
            more = ""
        else:
            logger.warning("%s: %s stays, as %s has it not", what, path, self.config.default_hdfs_dir)
            return
        logger.warning("%s: %s is loaded, and deleted here%s", what, path, more)
        layout.forget(path)

    def update_begins(self) -> None:
        """Note that an update begins: from here to `step_ended` the weights belong to no step and cannot be saved."""
        self._boundary = None

    def step_ended(self, run: Run) -> None:
        """Note that the weights are those of `run.state.step` until the next update, whatever the loop draws."""
        run.source.trained()
        self._boundary = copy.deepcopy({"state": run.state.state_dict(), "source": run.source.state_dict()})

    @contextmanager
    def saved_on_error(self, run: Run) -> Iterator[None]:
        """Save finished steps when the driver fails inside, as for an interrupt, before its error goes on."""
        try:
            yield
        except NotFinite:
            self._attempt(run.report_step)  # what may tell why; there is nothing to save
            raise
        except Exception as error:
            self._keep_all = isinstance(error, Unhealthy)
            logger.error("the run fails after step %d: %s", run.state.step, (str(error) or repr(error)).splitlines()[0])
            self._save_after_error(run)
            raise

    def save_unless_saved(self, run: Run) -> None:
        """Save an interrupted run: no step is lost, none is written twice."""
        assert self._boundary is not None
        if self._boundary["state"]["step"] not in (0, self._saved_step):
            self.write(run)
        self.complete(run, wait=True)

    def write(self, run: Run) -> None:
        """Write models and configuration of the finished step.

        Raises NotFinite, naming tensors, when they are spoilt.
        """
        self.complete(run, wait=True)
        assert self._boundary is not None
        state, step = self._boundary, self._boundary["state"]["step"]
        self.confirm()
        with self._told(step):
            path = layout.prepare_step_dir(self.root, step)
            self._require_finite(run, layout.ACTOR, run.actor.save(str(path / layout.ACTOR)), path)
            if run.critic is not None:
                self._require_finite(run, layout.CRITIC, run.critic.save(str(path / layout.CRITIC)), path)
            exported = path / layout.ACTOR / "huggingface"
            self.tokenizer.save_pretrained(exported)
            if self.end_ids:
                write_generation_config(exported, run.config.actor_rollout_ref.model.path, self.end_ids)
            if self.vision is not None:
                self.vision.save(exported)
            save_resolved(run.config, path / CONFIG_FILE)
            if (proof := log_dir(run.config) / STEP_PROOF).exists():
                shutil.copyfile(proof, path / STEP_PROOF)
            run.source.save_under_way(path)
        self._saved_step, self._incomplete = step, (path, state)

    def complete(self, run: Run, *, wait: bool) -> None:
        """Declare what was written a checkpoint, and drop old ones, once all its files are there.

        wait: for those that are written in the background (checkpoint.async_save). Until then the one before stays the
        newest.
        """
        if self._incomplete is None or (self._in_background(run) and not self._saved(run, wait)):
            return
        written, state = self._incomplete
        self.confirm()
        with self._told(state["state"]["step"]):
            layout.write_trainer_state(written, state | {"run": self._run})
            collect(written)
            path = layout.commit(written)
        self._incomplete = None
        self.best.committed(layout.step_of(path))
        if self._uploader is not None:  # before old ones are deleted: it waits for those it is busy with
            self._uploader.start(path)
        if not self._keep_all:
            uploads = [] if self._uploader is None else self._uploader.pending
            spared = [*uploads, *filter(None, [self.best.folder])]
            layout.rotate(path, self.config.max_actor_ckpt_to_keep, self.config.max_critic_ckpt_to_keep, spared)
        logger.info("saved checkpoint %s", path)

    def validated(self, run: Run, metrics: Mapping[str, float]) -> None:
        """Save the best step so far at once, whatever trainer.save_freq says."""
        step = run.state.step
        if self.best.judge(step, metrics) and step not in (0, self._saved_step):
            self.write(run)
        if step == self._saved_step and self._incomplete is None:  # whole before it was validated: a resumed one
            self.best.committed(step)
        self.best.keep()

    def finish(self) -> None:
        """Wait for uploads. Raises RunStopped for files that could not be copied to trainer.default_hdfs_dir."""
        left = [] if self._uploader is None else self._uploader.finish()
        if left:
            raise RunStopped(
                f"trainer.default_hdfs_dir={self.config.default_hdfs_dir}: not uploaded: {', '.join(left)}. They are "
                "whole here: copy them yourself"
            )

    def close(self) -> None:
        """Wait for uploads, however the run ends: none goes on beside the next start, and missing copies are logged."""
        self._attempt(self.finish)

    def _save_after_error(self, run: Run) -> None:
        """Save as for an interrupt, if the weights are those of a finished step.

        No error of the saving hides the first error.
        """
        if self._boundary is None:
            logger.error("it failed in the middle of an update: the weights belong to no step and are not saved")
            return
        for what in (run.report_step, partial(self.save_unless_saved, run)):
            self._attempt(what)

    @staticmethod
    def _attempt(what: Callable[[], object]) -> None:
        try:
            what()
        except (GroupStopped, RunStopped) as second:
            logger.error("not all is saved: %s", str(second).splitlines()[0])
        except Exception:
            logger.exception("saving failed too; the error that ends the run follows")

    @contextmanager
    def _told(self, step: int) -> Iterator[None]:
        """Turn errors of a disk that is full, read-only or gone into RunStopped, for people."""
        try:
            yield
        except OSError as error:
            before = self.newest_before(step)
            raise RunStopped(
                f"step {step} cannot be saved in trainer.default_local_dir={self.config.default_local_dir!r}: {error}. "
                f"The newest whole checkpoint there: {before or 'none'}. Once the folder can be written, the same "
                "command goes on from it"
            ) from error

    def _require_finite(self, run: Run, role: str, names: list[str], written: Path) -> None:
        if names:
            step = layout.step_of(written.stem)
            if not self._in_background(run):
                shutil.rmtree(written)
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            raise NotFinite(
                f"step {step}: the {role} holds NaN or infinite numbers in {', '.join(names[:5])}{more}. Nothing of it "
                f"is saved; the checkpoints in trainer.default_local_dir={self.config.default_local_dir!r} stay as "
                f"they are: resume from the newest with a lower {role} learning rate or gradient clip"
            )

    @staticmethod
    def _saved(run: Run, wait: bool) -> bool:
        """True where no role writes in the background; `wait`: wait until that is so."""
        critic = run.critic is None or run.critic.saved(wait=wait)
        return run.actor.saved(wait=wait) and critic

    @staticmethod
    def _in_background(run: Run) -> bool:
        actor, critic = run.config.actor_rollout_ref.actor.checkpoint, run.config.critic.checkpoint
        return actor.async_save or (run.critic is not None and critic.async_save)
