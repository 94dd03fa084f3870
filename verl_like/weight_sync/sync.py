"""Trained weights into the rollout engine of the same process: the hybrid engine's weight sync."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

from verl_like.config import RolloutConfig
from verl_like.parallel.dist import ProcessInfo
from verl_like.rollout.base import RolloutEngine
from verl_like.weight_sync.channel import InProcess
from verl_like.weight_sync.receiver import WeightReceiver
from verl_like.weight_sync.source import WeightSource
from verl_like.weight_sync.verdict import SyncReport, WeightSyncError, verdict

if TYPE_CHECKING:
    from verl_like.engine.fsdp import FSDPEngine

__all__ = ["SyncReport", "WeightSync", "WeightSyncError"]

logger = logging.getLogger(__name__)


class WeightSync:
    """Syncs one training engine with one rollout engine in the same process. `sync` is collective.

    trainer_dtype: see WeightSource.
    """

    def __init__(
        self,
        engine: FSDPEngine,
        rollout: RolloutEngine,
        config: RolloutConfig,
        process: ProcessInfo,
        *,
        trainer_dtype: torch.dtype = torch.float32,
    ) -> None:
        self._rollout = rollout
        self._channel = InProcess()
        self._source = WeightSource(
            engine, process, prove=config.sync_probe, trainer_dtype=trainer_dtype, name="rank {}"
        )
        self._receiver = WeightReceiver(rollout, config, process, name="rank {}")

    def sync(self, version: int, *, optimizer_moved: bool | None = None) -> SyncReport:
        """Fill the rollout engine with the engine's weights as `version`. Raises WeightSyncError on every rank; the
        engine is unloaded then. optimizer_moved: see WeightSource.send."""
        try:
            sent = self._source.send(version, self._receiver.wanted(), self._channel, optimizer_moved=optimizer_moved)
            report = verdict([sent], [self._receiver.receive(self._channel)])
        except WeightSyncError:
            self._receiver.unload()
            raise
        self._source.arrived()
        logger.debug("weight sync: %s", report)
        return report
